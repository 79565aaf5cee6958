"""Dispatches the trainer's messages to the parts of the network process. Has no state of its
own."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import trio

from swarmnode.link.messages import Hello, Report, Welcome
from swarmnode.observe.watch import TrainerWatch
from swarmnode.rollouts.groups import Draw, Drawn, Judged, OwnGroup
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.stages.crew_messages import FromTrainer
from swarmnode.stages.network.crew_service import StageService
from swarmnode.weights import local
from swarmnode.weights.network.service import WeightService

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
        self.rollouts.authors.judged(judged.peer, judged.outcome)

    def report(self, report: Report) -> None:
        self.watch.report(report, trio.current_time())

    def weights(self, message: local.FromTrainer) -> None:
        self.weight_exchange.receive(message)

    def stages(self, message: FromTrainer) -> None:
        self.crew.receive(message)
