"""`python -m swarmnode.daemon.bootstrap --config FILE`: the network process of a node that only helps others to meet.

    member (identity → manifest → libp2p host) → serves the manifest, tells peers of peers → HTTP

No trainer, no scorer, no gossip topic, no torch: a small machine with a public address is enough. It never sees a rollout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import structlog
import trio

from swarmnode import __version__
from swarmnode.config import Config
from swarmnode.daemon import view
from swarmnode.daemon.member import Member, open_member
from swarmnode.errors import ConfigError, LocalError
from swarmnode.files import write_atomically
from swarmnode.observe import logs
from swarmnode.observe.http import serve_http
from swarmnode.observe.snapshot import Health, NodeInfo, NodeSnapshot
from swarmnode.observe.watch import SupervisorWatch, disk_use, process_use
from swarmnode.p2p.metering import Meter
from swarmnode.process import Progress, die_with_parent, run_main
from swarmnode.wire import ids

log = structlog.get_logger("swarmnode.daemon.bootstrap")

HEARTBEAT_SECONDS = 1.0


async def run(config: Config, progress: Progress, ring: logs.LogRing) -> None:
    """Run until SIGTERM. Raises LocalError: something of this machine is missing or unsafe."""
    async with open_member(config, trains=False) as member:
        if member.opened is None:
            raise ConfigError("a bootstrap node needs a swarm: give it an invite, a --manifest file, or a data directory that founded one")
        node = BootstrapNode(config, member, ring)
        async with trio.open_nursery() as nursery:
            node.url = await nursery.start(partial(serve_http, config.http, node.snapshot))
            node.announce()
            nursery.start_soon(node.beat, progress)
            nursery.start_soon(member.run)
            nursery.start_soon(node.meter.run)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    break
            log.info("draining")
            nursery.cancel_scope.cancel()


class BootstrapNode:
    """What there is to see of it."""

    def __init__(self, config: Config, member: Member, ring: logs.LogRing) -> None:
        self._config = config
        self._member = member
        self._ring = ring
        self._started_at = time.time()
        self._ever_connected = False
        network = member.network
        self.meter = Meter(config.network, config.node.quiet_hours, config.node.data_dir, lambda: network.statistics().traffic)
        network.keep_to(self.meter.allows)
        self._supervisor = SupervisorWatch(config.node.data_dir / "run" / "supervisor.json")
        self.url = ""

    def announce(self) -> None:
        """Say where we are: in the log, and in a file for whoever started us."""
        network = self._member.network
        addresses = {"peer": network.peer_id, "addrs": network.listen_addrs, "http": self.url, "swarm": self._member.swarm.hex()}
        try:
            write_atomically(self._config.node.data_dir / "run" / "addresses.json", json.dumps(addresses).encode())
        except OSError as error:  # a full disk: what is there is of the last start, with the same port
            log.error("cannot say where we are", error=str(error))
        log.info("listening", peer=network.peer_id, addrs=network.listen_addrs, status_page=self.url or "off")

    async def beat(self, progress: Progress) -> None:
        """A sign of life per second for the supervisor. Raises LocalError when memory is above `supervisor.network_memory_bytes`."""
        process = psutil.Process()
        while True:
            used = process.memory_info().rss
            if used > self._config.supervisor.network_memory_bytes:
                raise LocalError(f"the network process uses {used / 2**20:.0f} MiB; starting again")
            self._ever_connected |= bool(self._member.network.connected())
            progress("serving")
            await trio.sleep(HEARTBEAT_SECONDS)

    def snapshot(self) -> NodeSnapshot:
        """Everything there is to see, now."""
        network, swarm = self._member.network, self._member.swarm
        return NodeSnapshot(
            at=time.time(),
            node=NodeInfo(
                peer=network.peer_id, name=self._config.node.name, version=__version__, swarm=swarm.hex(),
                swarm_name=self._config.swarm.name, tasks=list(self._config.task.names), addrs=network.listen_addrs,
                started_at=self._started_at, sharing=False, trainer=False,
            ),
            health=Health(network_ready=True, joined=self._ever_connected),
            network=view.network_view(network.statistics(), ids.rollout_topic(swarm, self._member.spoken.rollouts)),
            swarm=view.swarm_view(self._member.summaries.statistics(), time.time()),
            budget=view.budget_view(self.meter.statistics()),
            disk=disk_use(self._config.node.data_dir),
            supervisor=self._supervisor.read(),
            processes=process_use({"network": os.getpid()}),
            peers=view.peer_rows(network, {}, None, trio.current_time()),
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
    sys.exit(run_main("swarmnode bootstrap", main))
