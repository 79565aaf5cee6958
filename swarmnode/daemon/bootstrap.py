"""`python -m swarmnode.daemon.bootstrap --config FILE`: the network process of a bootstrap node.

    member (identity → manifest → libp2p host) → serve manifest and neighbours → HTTP

It has no trainer, scorer, groups or torch and never receives a rollout, so a small machine with a
public address is enough.
"""

from __future__ import annotations

import sys
from functools import partial

import msgspec
import trio

from swarmnode.config import Config
from swarmnode.daemon.member import open_member
from swarmnode.daemon.node import main, node_info
from swarmnode.daemon.observer import NodeObserver, ObservedParts
from swarmnode.daemon.presence import send_heartbeats, wait_for_stop_signal, write_addresses
from swarmnode.errors import ConfigError
from swarmnode.observe.http import serve_http
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch
from swarmnode.p2p.budget import Meter
from swarmnode.process import Progress, run_main


async def run(config: Config, progress: Progress) -> None:
    """Run until SIGTERM. Raises LocalError if something on this machine is missing or unsafe."""
    data_dir = config.node.data_dir
    async with open_member(config, trains=False) as member:
        if member.successors is None:
            raise ConfigError(
                "a bootstrap node needs a swarm: give it an invite, a --manifest file, or a data"
                " directory that founded one"
            )
        network = member.network
        meter = Meter(
            config.network, config.node.quiet_hours, data_dir, lambda: network.statistics().traffic
        )
        network.set_budget(meter.allows)
        supervisor = SupervisorWatch(data_dir / "run" / "supervisor.json")
        info = msgspec.structs.replace(
            node_info(config, member), model="", sharing=False, trainer=False
        )
        parts = ObservedParts(
            network,
            meter,
            supervisor,
            TrainerWatch(),
            successors=member.successors,
        )
        observer = NodeObserver(info, parts, data_dir)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(
                partial(serve_http, config.http, observer.snapshot, data_dir=data_dir)
            )
            write_addresses(data_dir, network, member.swarm, url)
            nursery.start_soon(send_heartbeats, progress)
            nursery.start_soon(member.successors.run)
            nursery.start_soon(meter.run)
            await wait_for_stop_signal()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    sys.exit(run_main("swarmnode bootstrap", partial(main, run)))
