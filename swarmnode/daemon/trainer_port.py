"""Dispatches the trainer's messages to the parts of the network process. Has no state of its
own."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import structlog
import trio

from swarmnode.daemon.supervisor import KILLED_FILE
from swarmnode.files import write_atomically
from swarmnode.link.messages import Hello, Report, Welcome
from swarmnode.observe.watch import TrainerWatch
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, Drawn, Judged, OwnGroup
from swarmnode.stages import wire
from swarmnode.stages.service import StageService
from swarmnode.weights import local
from swarmnode.weights.service import WeightService

log = structlog.get_logger("swarmnode.daemon.node")


@dataclass(frozen=True)
class TrainerPort:
    """Implements `link.server.TrainerHandler`."""

    welcome: Welcome
    """The answer to every Hello."""
    watch: TrainerWatch
    rollouts: RolloutExchange
    weight_exchange: WeightService
    crew: StageService

    def hello(self, hello: Hello) -> Welcome:
        log.info("trainer connected", pid=hello.pid, policy_version=hello.policy_version)
        self.watch.connected(hello.pid)
        self.rollouts.set_policy(hello)
        self.weight_exchange.set_policy(hello.replica, hello.model, hello.tokenizer)
        self.crew.hello(hello.pid)
        return self.welcome

    def trainer_left(self) -> None:
        """Handle the disconnection of the trainer."""
        self.watch.disconnected()
        self.weight_exchange.trainer_left()
        self.crew.trainer_left()

    async def own_group(self, group: OwnGroup) -> None:
        self.rollouts.publish(group)

    def draw(self, draw: Draw) -> Drawn:
        return self.rollouts.draw(draw)

    def judged(self, judged: Judged) -> None:
        self.rollouts.authors.judged(judged)

    def report(self, report: Report) -> None:
        self.watch.report(report, trio.current_time())

    def weights(self, message: local.FromTrainer) -> None:
        self.weight_exchange.receive(message)

    def stages(self, message: wire.FromTrainer) -> None:
        self.crew.receive(message)


def kill_trainer(watch: TrainerWatch, data_dir: Path, reason: str) -> None:
    """Kill a stalled trainer and record the reason for the supervisor, which starts another one."""
    log.error("killing the trainer", reason=reason, pid=watch.pid)
    if watch.pid is None:
        return
    with contextlib.suppress(OSError):  # on a full disk the reason is only in this process's log
        write_atomically(data_dir / KILLED_FILE, f"{watch.pid} {reason}".encode())
    with contextlib.suppress(ProcessLookupError):
        os.kill(watch.pid, signal.SIGKILL)
