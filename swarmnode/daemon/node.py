"""The network process: creates the parts, connects them, and orders their start and shutdown.

    member (identity → swarm id → libp2p host) → rollouts, weights, crew → link to the trainer →
    observer → HTTP

The parts do not know this module, and each other only through their arguments. Torch is never
imported. The network process and the trainer survive each other's restarts, so other nodes see one
peer that never left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from swarmnode import __version__
from swarmnode.config import Config
from swarmnode.daemon.member import Member, open_member
from swarmnode.daemon.observer import NodeObserver, ObservedParts
from swarmnode.daemon.presence import send_heartbeats, wait_for_stop_signal, write_addresses
from swarmnode.daemon.trainer_port import TrainerPort
from swarmnode.link.messages import Welcome
from swarmnode.link.server import LinkServer
from swarmnode.observe import logs
from swarmnode.observe.http import serve_http
from swarmnode.observe.snapshot import NodeInfo
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch
from swarmnode.p2p.budget import Meter
from swarmnode.pauses import PauseFlag
from swarmnode.process import Progress, die_with_parent, run_main
from swarmnode.rollouts.groups import GroupRules
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.stages.network.crew_service import NodeCallbacks, StageService
from swarmnode.swarm.known import known_peers
from swarmnode.swarm.manifest import bootstrap
from swarmnode.swarm.membership import make_invite
from swarmnode.tasks.client import AsyncScorer
from swarmnode.weights.network.service import WeightService
from swarmnode.wire.envelope import Credentials

PAUSES = ("quiet_hours", "month", "owner")
"""Budget pauses during which the node leaves its crew. Pauses of a few seconds are not in this
list."""


async def run(config: Config, progress: Progress) -> None:
    """Run until SIGTERM.

    Raises:
        LocalError: something on this machine is missing or unsafe; errors.py lists the exit codes.
    """
    data_dir = config.node.data_dir
    async with open_member(config) as member, AsyncScorer() as scorer:
        network, key = member.network, member.identity.private_key
        is_paused = PauseFlag(data_dir)
        meter = Meter(
            config.network,
            config.node.quiet_hours,
            data_dir,
            lambda: network.statistics().traffic,
            is_paused=is_paused,
        )
        network.set_budget(meter.allows)
        trainer = TrainerWatch()
        rollouts = RolloutExchange(
            network,
            scorer,
            Credentials(key, member.swarm),
            GroupRules(
                config.task.names, config.training.max_completion_length, member.meets_rules
            ),
            config.sharing,
            allows=meter.allows,
        )
        known = known_peers(config.stages.trust, member.opened)
        crew = StageService(
            network,
            config.stages,
            known,
            data_dir,
            NodeCallbacks(
                lambda message: link.send_to_trainer(message),
                paused=lambda: _pause(meter),
                allows=meter.has_room,
            ),
        )
        weights = WeightService(
            network,
            member.swarm,
            config.weights,
            known,
            data_dir,
            lambda message: link.send_to_trainer(message),
            budget=meter.allows,
            may_average=lambda: crew.may_average and not is_paused(),
        )
        port = TrainerPort(Welcome(network.peer_id, member.swarm), trainer, rollouts, weights, crew)
        link = LinkServer(data_dir, port, port.trainer_left)
        supervisor = SupervisorWatch(data_dir / "run" / "supervisor.json")
        parts = ObservedParts(
            network,
            meter,
            supervisor,
            trainer,
            rollouts,
            weights,
            crew,
            scorer,
            member.successors,
        )
        observer = NodeObserver(node_info(config, member), parts, data_dir)
        if config.node.share_summary:
            network.neighbours.own_summary = observer.summary
            network.neighbours.used_of = observer.used_of

        async with trio.open_nursery() as nursery:
            await nursery.start(rollouts.run)
            await nursery.start(weights.run)
            await nursery.start(crew.run)
            await nursery.start(link.run)
            url = await nursery.start(
                partial(serve_http, config.http, observer.snapshot, data_dir=data_dir)
            )
            write_addresses(data_dir, network, member.swarm, url)
            nursery.start_soon(send_heartbeats, progress)
            if member.successors is not None:
                nursery.start_soon(member.successors.run)
            nursery.start_soon(meter.run)
            await wait_for_stop_signal()
            observer.draining = True
            await crew.leave("node is shutting down")
            nursery.cancel_scope.cancel()


def node_info(config: Config, member: Member) -> NodeInfo:
    """Return this node's description of itself."""
    named = member.opened is not None and bootstrap(member.opened.manifest)
    invite = str(make_invite(member.opened)) if member.opened is not None and named else ""
    if invite and member.opened is not None and member.opened.manifest.access.secret:
        invite = "`swarmnode manifest invite` prints it, with the swarm's secret"
    return NodeInfo(
        peer=member.network.peer_id,
        name=config.node.name,
        version=__version__,
        swarm=member.swarm.hex(),
        swarm_name=config.swarm.name,
        model=config.policy.model,
        tasks=list(config.task.names),
        addrs=member.network.listen_addrs,
        started_at=time.time(),
        sharing=config.sharing.enabled,
        invite=invite,
        quiet_hours=config.node.quiet_hours,
    )


def _pause(meter: Meter) -> str:
    """Return the reason why the node may not take part in a crew now; empty if it may."""
    paused = meter.statistics().paused
    return next((reason for reason in PAUSES if paused[reason]), "")


def main(run: Callable[[Config, Progress], Awaitable[None]] = run) -> int:
    die_with_parent()
    progress = Progress()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    logs.configure(config.log, "network", data_dir=config.node.data_dir)
    trio.run(run, config, progress)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode network", main))
