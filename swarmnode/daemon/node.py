"""The network process: composition root. Builds the parts, owns the nursery, orders start and drain.

    member (identity → swarm id → libp2p host) → rollout exchange → link to the trainer → HTTP

Parts do not know this module; it wires them and drives them. Never imports torch. When it dies, the trainer goes on; when the trainer
dies, it goes on: what other nodes see is one peer that never left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import structlog
import trio

from swarmnode import __version__
from swarmnode.config import Config
from swarmnode.crew import local as stages
from swarmnode.crew.plane import StagePlane
from swarmnode.daemon import view
from swarmnode.daemon.member import open_member
from swarmnode.errors import LocalError
from swarmnode.files import write_atomically
from swarmnode.link.messages import Hello, Report, Welcome
from swarmnode.link.server import LinkServer
from swarmnode.observe import logs
from swarmnode.observe.http import serve_http
from swarmnode.observe.snapshot import Health, NodeInfo, NodeSnapshot
from swarmnode.observe.stages import policy_loaded, stages_view
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch, disk_use, process_use
from swarmnode.p2p.identity import Identity
from swarmnode.p2p.metering import Meter
from swarmnode.p2p.network import Network
from swarmnode.p2p.summaries import Summaries
from swarmnode.process import Progress, die_with_parent, run_main
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, Drawn, Judged, OwnGroup
from swarmnode.rollouts.pool import DROP_VERSIONS, MOST_GROUPS
from swarmnode.tasks.client import AsyncScorer
from swarmnode.weights import local
from swarmnode.weights.exchange import WeightExchange
from swarmnode.wire import ids
from swarmnode.wire.messages import RolloutGroup, Summary

log = structlog.get_logger("swarmnode.daemon.node")

HEARTBEAT_SECONDS = 1.0
PAUSES = ("quiet_hours", "month")
"""Why a node leaves its crew for a while: what `Budget` calls a pause and is not over in a moment."""


async def run(config: Config, progress: Progress, ring: logs.LogRing) -> None:
    """Run until SIGTERM.

    Raises:
        LocalError: something of this machine is missing or unsafe; errors.py says which exit code follows.
    """
    async with open_member(config) as member, AsyncScorer() as scorer:
        node = Node(
            config, member.identity, member.swarm, member.network, member.summaries, scorer, ring, member.keeps_rules, member.spoken
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(node.exchange.run)
            await nursery.start(node.weights_plane.run)
            await nursery.start(node.stage_plane.run)
            await nursery.start(node.link.run)
            node.url = await nursery.start(partial(serve_http, config.http, node.snapshot))
            node.announce()
            nursery.start_soon(node.beat, progress)
            nursery.start_soon(member.run)
            nursery.start_soon(node.meter.run)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    break
            log.info("draining")
            node.draining = True
            await node.stage_plane.leave("its node stops")
            nursery.cancel_scope.cancel()


class Node:
    """The parts, and what they are to the trainer (`link.server.TrainerHandler`) and to whoever watches (`snapshot`)."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        swarm: bytes,
        network: Network,
        summaries: Summaries,
        scorer: AsyncScorer,
        ring: logs.LogRing,
        keeps_rules: Callable[[RolloutGroup], bool] = lambda group: True,
        spoken: ids.Spoken = ids.Spoken(),  # noqa: B008 - immutable
    ) -> None:
        self._config = config
        self._swarm = swarm
        self._topic = ids.rollout_topic(swarm, spoken.rollouts)
        self._network = network
        self._summaries = summaries
        if config.node.share_summary:
            summaries.say = self.summary
        self._scorer = scorer
        self._ring = ring
        self.meter = Meter(config.network, config.node.quiet_hours, config.node.data_dir, lambda: network.statistics().traffic)
        network.keep_to(self.meter.allows)
        self.exchange = RolloutExchange(
            network, scorer, identity.private_key, swarm, config.task.names, config.sharing,
            max_completion_length=config.training.max_completion_length, keeps_rules=keeps_rules, budget=self.meter, spoken=spoken,
        )  # fmt: skip
        self.link = LinkServer(config.node.data_dir, self, lambda: self.stage_plane.trainer_left())
        self.weights_plane = WeightExchange(
            network, identity.private_key, swarm, config.weights, config.node.data_dir, self.link.send_to_trainer, budget=self.meter.allows,
            may_average=lambda: self.stage_plane.may_average,
        )  # fmt: skip
        self.stage_plane = StagePlane(
            network, identity.private_key, config.stages, config.node.data_dir, self.link.send_to_trainer, restart=self.end_trainer,
            paused=lambda: next((why for why in self.meter.statistics().paused if why in PAUSES), ""), allows=self.meter.has_room,
        )  # fmt: skip
        self.url = ""
        self.draining = False
        self._started_at = time.time()
        self._trainer = TrainerWatch()
        self._trainer_pid: int | None = None
        self._supervisor = SupervisorWatch(config.node.data_dir / "run" / "supervisor.json")
        self._staleness: Counter[int] = Counter()
        self._ever_connected = False

    # ---- for the trainer ----------------------------------------------------------------------------------------------

    def hello(self, hello: Hello) -> Welcome:
        log.info("trainer connected", pid=hello.pid, policy_version=hello.policy_version)
        self._trainer_pid = hello.pid or None
        self.exchange.set_policy(hello)
        self.weights_plane.set_policy(hello.replica, hello.model, hello.tokenizer)
        self.stage_plane.hello(hello.pid)
        return Welcome(self._network.peer_id, self._swarm)

    async def own_group(self, group: OwnGroup) -> None:
        await self.exchange.publish(group)

    def draw(self, draw: Draw) -> Drawn:
        drawn = self.exchange.draw(draw)
        self._staleness.update(min(group.staleness, DROP_VERSIONS) for group in drawn.groups)
        return drawn

    def judged(self, judged: Judged) -> None:
        self.exchange.judged(judged)

    def report(self, report: Report) -> None:
        self._trainer.report(report, trio.current_time())

    def weights(self, message: local.FromTrainer) -> None:
        self.weights_plane.receive(message)

    def stages(self, message: stages.FromTrainer) -> None:
        self.stage_plane.receive(message)

    def end_trainer(self, reason: str) -> None:
        """The trainer hangs: end its process. The supervisor starts another."""
        log.error("ending the trainer", reason=reason, pid=self._trainer_pid)
        if self._trainer_pid is not None and self.link.statistics().connected:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._trainer_pid, signal.SIGKILL)

    # ---- for other nodes' operators -----------------------------------------------------------------------------------

    def summary(self, created_at: int) -> Summary:
        """What peers may show of this node. `created_at`: Unix milliseconds."""
        published = self.exchange.statistics().published
        return view.own_summary(
            created_at, self._started_at, self._config.node.name, self._trainer.statistics(trio.current_time()).report,
            version=__version__, published=published.get("gossip", 0) + published.get("announced", 0), peers=len(self._network.connected()),
        )  # fmt: skip

    # ---- for whoever watches ------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Say where we are: in the log, and in a file for whoever started us."""
        addresses = {"peer": self._network.peer_id, "addrs": self._network.listen_addrs, "http": self.url, "swarm": self._swarm.hex()}
        try:
            write_atomically(self._config.node.data_dir / "run" / "addresses.json", json.dumps(addresses).encode())
        except OSError as error:  # a full disk: what is there is of the last start, with the same port
            log.error("cannot say where we are", error=str(error))
        log.info("listening", peer=self._network.peer_id, addrs=self._network.listen_addrs, status_page=self.url or "off")

    async def beat(self, progress: Progress) -> None:
        """A sign of life per second for the supervisor; ends the process when it has grown too large.

        Raises:
            LocalError: memory above `supervisor.network_memory_bytes`.
        """
        process = psutil.Process()
        while True:
            used = process.memory_info().rss
            if used > self._config.supervisor.network_memory_bytes:
                raise LocalError(f"the network process uses {used / 2**20:.0f} MiB; starting again")
            self._ever_connected |= bool(self._network.connected())
            progress("serving")
            await trio.sleep(HEARTBEAT_SECONDS)

    def snapshot(self) -> NodeSnapshot:
        """Everything there is to see, now."""
        now = trio.current_time()
        network, exchange = self._network.statistics(), self.exchange.statistics()
        if self.link.statistics().connected:
            self._trainer.connected(self._trainer_pid)
        else:
            self._trainer.disconnected()
        trainer = self._trainer.statistics(now)
        report = trainer.report
        crew = stages_view(self.stage_plane.statistics())
        sharing = self._config.sharing
        return NodeSnapshot(
            at=time.time(),
            node=NodeInfo(
                peer=self._network.peer_id, name=self._config.node.name, version=__version__, swarm=self._swarm.hex(),
                swarm_name=self._config.swarm.name, model=self._config.policy.model, tasks=list(self._config.task.names),
                addrs=self._network.listen_addrs, started_at=self._started_at, sharing=sharing.enabled,
            ),
            health=Health(
                network_ready=True,
                policy_loaded=policy_loaded(report, crew),
                joined=self._ever_connected,
                draining=self.draining,
            ),
            trainer=trainer,
            rollouts=view.rollouts_view(exchange, self._staleness, MOST_GROUPS, sharing.pool_bytes),
            weights=view.weights_view(self.weights_plane.statistics()),
            stages=crew,
            network=view.network_view(network, self._topic),
            swarm=view.swarm_view(self._summaries.statistics(), time.time()),
            budget=view.budget_view(self.meter.statistics()),
            disk=disk_use(self._config.node.data_dir),
            supervisor=self._supervisor.read(),
            scorer_restarts=max(0, self._scorer.statistics().starts - 1),
            processes=process_use({"network": os.getpid(), "trainer": self._trainer_pid, "scorer": self._scorer.statistics().pid}),
            peers=view.peer_rows(self._network, exchange.admitted_by_peer, report, now),
            logs=self._ring.statistics(),
        )  # fmt: skip


def main() -> int:
    die_with_parent()
    progress = Progress()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    ring = logs.configure(config.log, "network")
    trio.run(run, config, progress, ring)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode network", main))
