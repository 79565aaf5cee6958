"""The demo's nodes: `swarmnode run` processes with their own data directories, polled over HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from swarmnode.config import Config
from swarmnode.errors import Unavailable
from swarmnode.link.messages import Report
from swarmnode.observe import client
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.samples import Sample, displayable, newest
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.weights.local import WeightsReport

STATUS_TIMEOUT_SECONDS = 2.0
SAMPLES = 1000
"""Newest samples in which the held-out ones are searched."""
START = (
    "import sys, swarmnode.cli, swarmnode.process as p; p.die_with_parent();"
    " sys.exit(swarmnode.cli.run(sys.argv[1:]))"
)
"""Python code of a `swarmnode run` that ends with the demo, even if the demo is killed."""


@dataclass(frozen=True)
class Rise:
    """First and last held-out reward of a node, on the same questions. None: not measured."""

    before: float | None = None
    before_error: float | None = None
    """Standard error over the questions."""
    after: float | None = None
    after_error: float | None = None
    step: int = -1
    """Step of the last evaluation."""

    @property
    def is_significant(self) -> bool:
        """True if the reward rose by more than two standard errors of the difference."""
        if self.before is None or self.after is None:
            return False
        error = math.hypot(self.before_error or 0.0, self.after_error or 0.0)
        return self.after - self.before > 2 * error

    def __str__(self) -> str:
        return (
            f"{_with_error(self.before, self.before_error)} →"
            f" {_with_error(self.after, self.after_error)}"
        )


def rise_of(report: Report) -> Rise:
    return Rise(
        report.reward_held_out_start,
        report.reward_held_out_start_error,
        report.reward_held_out,
        report.reward_held_out_error,
        -1 if report.reward_held_out_step is None else report.reward_held_out_step,
    )


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


class StatusAnswer(msgspec.Struct, frozen=True):
    """The body of /status."""

    snapshot: NodeSnapshot


class Pace:
    """Time in the present phase, and an estimate of the time that is left. Pure: times are
    arguments, in seconds."""

    def __init__(self) -> None:
        self._phase, self._since, self._now = "", 0.0, 0.0
        self._evaluation_seconds = 0.0
        self._began: float | None = None
        """End of the first evaluation."""
        self._step, self._stepped_at = 0, 0.0
        self._evaluated = -1

    def observe(self, now: float, phase: str, step: int, evaluated: int) -> None:
        """Record a poll. evaluated: step of the last evaluation, -1 before the first one."""
        if phase != self._phase:
            if self._phase == "evaluating" and self._began is None:
                self._evaluation_seconds, self._began = now - self._since, now
            self._phase, self._since = phase, now
        if step > self._step:
            self._step, self._stepped_at = step, now
        self._evaluated, self._now = evaluated, now

    @property
    def phase_seconds(self) -> float:
        """Time from the start of the present phase to the last poll."""
        return self._now - self._since

    def seconds_left(self, steps: int) -> float | None:
        """Return the time until `steps` steps and the last evaluation are done, if each takes as
        long as before; None before the first step."""
        if self._evaluated >= steps:
            return 0.0
        if self._began is None or not self._step:
            return None
        if self._step >= steps:
            done = self.phase_seconds if self._phase == "evaluating" else 0.0
            return max(0.0, self._evaluation_seconds - done)
        each = (self._stepped_at - self._began) / self._step
        since = min(each, self._now - self._stepped_at)
        return each * (steps - self._step) - since + self._evaluation_seconds


class DemoNode:
    """One node of the demo.

    `status` is the snapshot of the last successful poll. `phase` is what the trainer does, or
    `starting` until the first response, `no answer` if a later poll failed, and `down` if the
    process has ended.
    """

    def __init__(self, name: str, directory: Path, settings: dict[str, dict[str, object]]) -> None:
        self.name = name
        self.directory = directory
        self.prefix: tuple[str, ...] = ()
        """Command that starts the node's process, for example in a network namespace."""
        self.status = NodeSnapshot()
        self.phase = "starting"
        self.has_responded = False
        """True if the current process has responded to a poll."""
        self.pace = Pace()
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
        """Update `status` and `phase` from the node's /status."""
        try:
            body = client.fetch_status(NodeAddress(self.url), 1, STATUS_TIMEOUT_SECONDS)
            self.status = msgspec.json.decode(body, type=StatusAnswer).snapshot
            self.has_responded = True
            loading = self.status.supervisor.loading.get("trainer", "")
            self.phase = (loading or self.report.phase).removeprefix("loading, ")
        except (Unavailable, OSError, msgspec.MsgspecError):
            if self.started and not self.alive():
                self.phase = "down"
            else:
                self.phase = "no answer" if self.has_responded else "starting"
        self.pace.observe(time.monotonic(), self.phase, self.report.step, self.rise.step)

    @property
    def report(self) -> Report:
        """The trainer's last report; one of step 0 before the first."""
        return self.status.trainer.report or Report("loading")

    @property
    def averaging(self) -> WeightsReport:
        return self.report.weights or WeightsReport()

    @property
    def rise(self) -> Rise:
        return rise_of(self.report)

    def answers(self) -> tuple[Sample, Sample] | None:
        """Return the answers to the first held-out question at the first and the last evaluation;
        None before the first one."""
        found = [each for each in newest(self.directory, SAMPLES) if each.held_out]
        return (displayable(found[-1]), displayable(found[0])) if found else None

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
        self.phase = "killed"

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
        self.phase = "attacking" if self.alive() else "down"

    def peer_id(self) -> str:
        from swarmnode.p2p.identity import load_or_create  # imports libp2p

        return load_or_create(self.directory / "identity.key").peer_id


def to_toml(settings: dict[str, dict[str, object]]) -> str:
    """Return sections of plain values as TOML. Strings, numbers, booleans and lists have the same
    notation in JSON."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)
