"""The demo's nodes: each a `swarmnode run` of its own, with its own directory, asked over its own
HTTP server."""

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

ANSWER_SECONDS = 2.0
START = (
    "import sys, swarmnode.cli, swarmnode.process as p; p.die_with_parent();"
    " sys.exit(swarmnode.cli.run(sys.argv[1:]))"
)
"""`swarmnode run` that does not outlive the demo, however that ends."""


@dataclass
class View:
    """What the table and the verdict need of one node. Zeros and None until it has answered."""

    peer: str = ""
    phase: str = "starting"
    step: int = 0
    saved_step: int = 0
    """Step of the state on disk, since it was started."""
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
    """From the last partner's weights, relative to the norm of its own."""
    distances: list[float] = field(default_factory=list)
    """Every distance seen so far, oldest first."""
    exchanges: int = 0
    outer_step: int = 0
    solo_steps: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Partners' weights that were not taken, by cause."""
    trainer_pid: int | None = None
    crew_state: str = "none"
    peer_seconds: float = 0.0
    """To its usual peer, one way, as it has measured."""
    stage: int | None = None
    """Stage that it holds, of which what follows tells; None without a crew."""
    stage_phase: str = ""
    stage_step: int = 0
    source: str = ""
    source_seconds: float | None = None
    checkpoint_age: int | None = None
    gate_kl: float | None = None
    tokens_per_second: float | None = None
    state_bytes: int = 0
    """Sent to other members beside activations."""


class DemoNode:
    """One node of the demo.

    `view` is the node's last answer. When a poll fails, only its phase changes: `starting` until
    the process has answered once, then `no answer`, and `down` when the process has ended.
    """

    def __init__(self, name: str, directory: Path, settings: dict[str, dict[str, object]]) -> None:
        self.name = name
        self.directory = directory
        self.prefix: tuple[str, ...] = ()
        """What its processes are started by, where that is not the system."""
        self.view = View()
        self.answered = False
        """Whether the process that runs now has answered yet."""
        self.log_file = directory / "node.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # not config.toml, which a data directory keeps for itself
        self.config_file = directory / "demo.toml"
        self.config_file.write_text(
            toml_of({**settings, "node": {"data_dir": str(directory), "name": name}})
        )

    def start(self, initial_peers: Sequence[str]) -> None:
        """Start it, joining through `initial_peers`; the first node has none."""
        self.answered = False
        peers = [argument for peer in initial_peers for argument in ("--peer", peer)]
        self.launch("-c", START, "run", "--config", str(self.config_file), *peers)

    def launch(self, *arguments: str) -> None:
        """Start Python with `arguments` as this node; what it says goes to the node's log."""
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
        """Multiaddrs of this node. Raises Unavailable when it ends, or says nothing before
        `deadline` (monotonic)."""
        path = self.directory / "run" / "addresses.json"
        while time.monotonic() < deadline:
            if path.exists():
                return list(json.loads(path.read_bytes())["addrs"])
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise Unavailable(f"{self.name} did not start: {self.last_words()}")

    @property
    def url(self) -> str:
        path = self.directory / "run" / "addresses.json"
        return json.loads(path.read_bytes())["http"] if path.exists() else ""

    def ask(self) -> None:
        """Refresh `view` from the node's /status."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/status?points=1", timeout=ANSWER_SECONDS
            ) as answer:
                self.view = view_of(json.load(answer)["snapshot"], self.view.distances)
                self.answered = True
        except (OSError, ValueError, http.client.HTTPException):
            if self.started and not self.alive():
                self.view.phase = "down"
            else:
                self.view.phase = "no answer" if self.answered else "starting"

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id of what was started last."""
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """kill -9 of the supervisor and everything that it started."""
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
        """Ask it to drain; `wait` for the end."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]

    def wait(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self) -> str:
        """The last line of the node's log."""
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "no log"
        return "no log"


class Liar(DemoNode):
    """A Byzantine node: no supervisor, no trainer, no status page."""

    def start(self, initial_peers: Sequence[str]) -> None:
        settings = tomllib.loads(self.config_file.read_text())
        settings["network"]["initial_peers"] = list(initial_peers)
        config = self.directory / "config.json"
        config.write_text(Config.model_validate(settings).model_dump_json())
        self.launch("-m", "swarmnode.demo.liar", "--config", str(config))

    def ask(self) -> None:
        self.view.phase = "lying" if self.alive() else "down"

    def peer_id(self) -> str:
        from swarmnode.p2p.identity import load_or_create  # late: it loads libp2p

        return load_or_create(self.directory / "identity.key").peer_id


TAKEN = ("accepted", "clipped", "probation", "lagging")


def view_of(snapshot: dict[str, Any], before: Sequence[float] = ()) -> View:
    """From a /status answer's snapshot. before: distances seen earlier."""
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
        solo_steps=averaging.get("solo_steps_total", 0),
        refused={
            cause: n
            for cause, n in snapshot["weights"]["judged"].items()
            if n and cause not in TAKEN
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
        gate_kl=own.get("gate_kl"),
        tokens_per_second=own.get("tokens_per_second"),
        state_bytes=snapshot["stages"]["streams"]["sent"].get("state", 0),
    )


def toml_of(settings: dict[str, dict[str, object]]) -> str:
    """Sections of plain values as TOML; JSON's notation of texts, numbers, booleans and lists is
    TOML's too."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)
