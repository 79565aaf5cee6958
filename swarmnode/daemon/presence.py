"""Common functions of the network process and a bootstrap node: write the addresses file, send
heartbeats, wait for the stop signal."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import structlog
import trio

from swarmnode.errors import RestartWanted
from swarmnode.files import write_atomically
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.process import Progress

log = structlog.get_logger("swarmnode.daemon.node")

HEARTBEAT_SECONDS = 1.0
MEMORY_BYTES = 1536 * 2**20
"""A network process above this size ends itself and is restarted, so that peers cannot make it grow
without bound. It normally uses 150 to 300 MiB."""


def write_addresses(data_dir: Path, network: Libp2pNetwork, swarm: bytes, url: str) -> None:
    """Log the node's addresses and write them to run/addresses.json.

    Args:
        data_dir: data directory of the node.
        network: the network.
        swarm: swarm id.
        url: address of the status page; empty without one.
    """
    addresses = {
        "peer": network.peer_id,
        "addrs": network.listen_addrs,
        "http": url,
        "swarm": swarm.hex(),
    }
    try:
        write_atomically(data_dir / "run" / "addresses.json", json.dumps(addresses).encode())
    except (
        OSError
    ) as error:  # on a full disk the file of the last start remains, with the same port
        log.error("cannot write the addresses file", error=str(error))
    log.info(
        "listening", peer=network.peer_id, addrs=network.listen_addrs, status_page=url or "off"
    )


async def send_heartbeats(progress: Progress) -> None:
    """Send a heartbeat to the supervisor once a second, until cancelled.

    Raises:
        RestartWanted: this process has grown above MEMORY_BYTES.
    """
    process = psutil.Process()
    while True:
        used = process.memory_info().rss
        if used > MEMORY_BYTES:
            raise RestartWanted(f"the network process uses {used / 2**20:.0f} MiB")
        progress("serving")
        await trio.sleep(HEARTBEAT_SECONDS)


async def wait_for_stop_signal() -> None:
    """Return at the first SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            break
    log.info("draining")
