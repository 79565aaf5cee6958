"""What a node's network process and a bootstrap node do alike: say where they are, stay alive to
the supervisor, wait for the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import structlog
import trio

from swarmnode.errors import LocalError
from swarmnode.files import write_atomically
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.process import Progress

log = structlog.get_logger("swarmnode.daemon.node")

HEARTBEAT_SECONDS = 1.0
MEMORY_BYTES = 1536 * 2**20
"""A network process that uses more ends itself and is started again: no peer may grow it for ever.
At rest it has 150 to 300 MiB."""


def announce(data_dir: Path, network: Libp2pNetwork, swarm: bytes, url: str) -> None:
    """Say where we are: in the log, and in a file for whoever started us. `url`: of the status
    page, empty without one."""
    addresses = {
        "peer": network.peer_id,
        "addrs": network.listen_addrs,
        "http": url,
        "swarm": swarm.hex(),
    }
    try:
        write_atomically(data_dir / "run" / "addresses.json", json.dumps(addresses).encode())
    except OSError as error:  # a full disk: what is there is of the last start, with the same port
        log.error("cannot say where we are", error=str(error))
    log.info(
        "listening", peer=network.peer_id, addrs=network.listen_addrs, status_page=url or "off"
    )


async def beat(progress: Progress) -> None:
    """Give the supervisor a sign of life per second, until cancelled.

    Raises:
        LocalError: this process has grown beyond MEMORY_BYTES, and starts again.
    """
    process = psutil.Process()
    while True:
        used = process.memory_info().rss
        if used > MEMORY_BYTES:
            raise LocalError(f"the network process uses {used / 2**20:.0f} MiB; starting again")
        progress("serving")
        await trio.sleep(HEARTBEAT_SECONDS)


async def told_to_stop() -> None:
    """Return at the first SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            break
    log.info("draining")
