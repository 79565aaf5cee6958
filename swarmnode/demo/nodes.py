"""The demo's nodes: `swarmnode run` processes with their own data directories, polled over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarmnode.config import Config
from swarmnode.errors import Unavailable

STATUS_TIMEOUT_SECONDS = 2.0
START = (
    "import sys, swarmnode.cli, swarmnode.process as p; p.die_with_parent();"
    " sys.exit(swarmnode.cli.run(sys.argv[1:]))"
)
"""Python code of a `swarmnode run` that ends with the demo, even if the demo is killed."""


@dataclass
class View:
    """Status of one node for the table and the verdict. Defaults until the node has responded."""

    peer: str = ""
    phase: str = "starting"
    step: int = 0
    saved_step: int = 0
    """Step of the last saved state, since the start of the node."""
    peers: int = 0
    reward_own: float | None = None
    reward_external: float | None = None
    held_out_start: float | None = None
    held_out: float | None = None
    published: int = 0
    admitted: int = 0
    used: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    greylisted: int = 0
    banned: int = 0
    restarts: int = 0
    peers_used: dict[str, int] = field(default_factory=dict)
    distance: float | None = None
    """Distance from the last partner's weights, relative to the norm of its own weights."""
    distances: list[float] = field(default_factory=list)
    """Every distance seen so far, oldest first."""
    exchanges: int = 0
    outer_step: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Numbers of rejected partner weights, by cause."""
    trainer_pid: int | None = None
    crew_state: str = "none"
    peer_seconds: float = 0.0
    """Measured one-way latency to its usual peer."""
    stage: int | None = None
    """Stage of the crew; None without a crew. The following fields describe this stage."""
    stage_phase: str = ""
    stage_step: int = 0
    source: str = ""
    source_seconds: float | None = None
    checkpoint_age: int | None = None
    tokens_per_second: float | None = None


class DemoNode:
    """One node of the demo.

    `view` is the node's last status. If a poll fails, only `view.phase` changes: `starting` until
    the first response, `no answer` afterwards, and `down` if the process has ended.
    """

    def __init__(self, name: str, directory: Path, settings: dict[str, dict[str, object]]) -> None:
        self.name = name
        self.directory = directory
        self.prefix: tuple[str, ...] = ()
        """Command that starts the node's process, for example in a network namespace."""
        self.view = View()
        self.has_responded = False
        """True if the current process has responded to a poll."""
        self.log_file = directory / "node.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # config.toml is the file of `swarmnode config set`.
        self.config_file = directory / "demo.toml"
        self.config_file.write_text(
            to_toml({**settings, "node": {"data_dir": str(directory), "name": name}})
        )

    def start(self, initial_peers: Sequence[str]) -> None:
        """Start the node. It joins through `initial_peers`; the first node has none."""
        self.has_responded = False
        peers = [argument for peer in initial_peers for argument in ("--peer", peer)]
        self.launch("-c", START, "run", "--config", str(self.config_file), *peers)

    def launch(self, *arguments: str) -> None:
        """Start Python with `arguments` as the node's process. Its output goes to the node's
        log."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("SWARMNODE_")
        }
        environment["HF_HUB_OFFLINE"] = "1"
        with open(self.log_file, "ab") as log:
            command = [*self.prefix, sys.executable, *arguments]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_for_address(self, deadline: float) -> list[str]:
        """Wait until the node listens, and return its multiaddrs.

        Args:
            deadline: Time of `time.monotonic`.

        Raises:
            Unavailable: The node has ended, or does not listen before the deadline.
        """
        path = self.directory / "run" / "addresses.json"
        while time.monotonic() < deadline:
            if path.exists():
                return list(json.loads(path.read_bytes())["addrs"])
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise Unavailable(f"{self.name} did not start: {self.last_log_line()}")

    @property
    def url(self) -> str:
        """URL of the status page; empty before the node listens."""
        path = self.directory / "run" / "addresses.json"
        return json.loads(path.read_bytes())["http"] if path.exists() else ""

    def poll(self) -> None:
        """Update `view` from the node's /status."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/status?points=1", timeout=STATUS_TIMEOUT_SECONDS
            ) as response:
                self.view = parse_snapshot(json.load(response)["snapshot"], self.view.distances)
                self.has_responded = True
        except (OSError, ValueError, http.client.HTTPException):
            if self.started and not self.alive():
                self.view.phase = "down"
            else:
                self.view.phase = "no answer" if self.has_responded else "starting"

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Id of the process that was started last."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Kill the supervisor and all its children with SIGKILL."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid)
            for process in [*family.children(recursive=True), family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        self.view.phase = "killed"

    def stop(self) -> None:
        """Send SIGTERM, so that the node drains. `wait` waits for its end."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]

    def wait(self, seconds: float) -> None:
        """Wait for the end of the node, and kill it after `seconds`."""
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_log_line(self) -> str:
        """Return the last line of the node's log."""
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "no log"
        return "no log"


class Liar(DemoNode):
    """A Byzantine node. It has no supervisor, no trainer and no status page."""

    def start(self, initial_peers: Sequence[str]) -> None:
        settings = tomllib.loads(self.config_file.read_text())
        settings["network"]["initial_peers"] = list(initial_peers)
        config = self.directory / "config.json"
        config.write_text(Config.model_validate(settings).model_dump_json())
        self.launch("-m", "swarmnode.demo.liar", "--config", str(config))

    def poll(self) -> None:
        self.view.phase = "attacking" if self.alive() else "down"

    def peer_id(self) -> str:
        from swarmnode.p2p.identity import load_or_create  # imports libp2p

        return load_or_create(self.directory / "identity.key").peer_id


ACCEPTED_OUTCOMES = ("accepted", "clipped", "probation", "lagging")
"""Outcomes of exchanges in which the node used the partner's weights."""


def parse_snapshot(snapshot: dict[str, Any], before: Sequence[float] = ()) -> View:
    """Return the view of a node from the snapshot in its /status.

    Args:
        before: Earlier distances.
    """
    averaging = (snapshot["trainer"].get("report") or {}).get("weights") or {}
    distance = averaging.get("distance")
    new = [distance] if distance is not None and [distance] != list(before[-1:]) else []
    report = snapshot["trainer"].get("report") or {}
    rollouts, network = snapshot["rollouts"], snapshot["network"]
    crew, own = snapshot["stages"]["crew"], snapshot["stages"]["own"] or {}
    return View(
        peer=snapshot["node"]["peer"],
        phase=report.get("phase", "loading"),
        step=report.get("step", 0),
        saved_step=report.get("state_saved_step", 0),
        peers=network["peers"]["connected"],
        reward_own=report.get("reward_own"),
        reward_external=report.get("reward_external"),
        held_out_start=report.get("reward_held_out_start"),
        held_out=report.get("reward_held_out"),
        published=rollouts["published"],
        admitted=rollouts["admission"]["admitted"],
        used=report.get("external_groups_total", 0),
        rejected={reason: n for reason, n in rollouts["admission"]["rejected"].items() if n},
        greylisted=network["reputation"]["greylisted"],
        banned=network["reputation"]["banned"],
        restarts=sum(snapshot["supervisor"]["restarts"].values()),
        peers_used=report.get("peers_used", {}),
        distance=distance,
        distances=[*before, *new],
        exchanges=averaging.get("exchanges_total", 0),
        outer_step=averaging.get("outer_step", 0),
        refused={
            cause: n
            for cause, n in snapshot["weights"]["judged"].items()
            if n and cause not in ACCEPTED_OUTCOMES
        },
        trainer_pid=snapshot["trainer"]["pid"],
        crew_state=crew["state"],
        peer_seconds=crew["peer_seconds"],
        stage=crew["stage"],
        stage_phase=own.get("phase", ""),
        stage_step=own.get("step", 0),
        source=own.get("source", ""),
        source_seconds=own.get("source_seconds"),
        checkpoint_age=own.get("checkpoint_age_steps"),
        tokens_per_second=own.get("tokens_per_second"),
    )


def to_toml(settings: dict[str, dict[str, object]]) -> str:
    """Return sections of plain values as TOML. Strings, numbers, booleans and lists have the same
    notation in JSON."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)
