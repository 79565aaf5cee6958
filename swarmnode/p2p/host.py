"""Starts and stops the libp2p host and everything that runs on it.

    open_host ─▶ choose the port ─▶ guarded host (TCP, Noise, Yamux) ─▶ Libp2pNetwork ─▶ its tasks
    exit      ─▶ save the book ─▶ end the tasks ─▶ close connections and host

Closing is shielded and bounded in time, because py-libp2p leaks every socket otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import trio

from swarmnode.config import NetworkConfig
from swarmnode.p2p import guards, listening
from swarmnode.p2p.identity import Identity
from swarmnode.p2p.library import build
from swarmnode.p2p.library.gater import ConnectionGater
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.network import Libp2pNetwork, SwarmSettings
from swarmnode.wire.limits import SWARM_ID_BYTES

NO_SWARM = bytes(SWARM_ID_BYTES)


@contextlib.asynccontextmanager
async def open_host(
    cfg: NetworkConfig,
    identity: Identity,
    data_dir: Path,
    *,
    swarm: bytes = NO_SWARM,
    secret: bytes | None = None,
    members: Collection[str] | None = None,
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host that listens and connects to peers until the block is left.

    A single exception is raised as itself, without the exception groups of the nurseries that it
    passed. An exception of the library ends the block.

    Args:
        cfg: network settings.
        identity: key of the node.
        data_dir: holds the port and the peer book.
        swarm: swarm id, 32 bytes. Peer exchange and mDNS ignore peers of other swarms.
        secret: 32 bytes that a peer of a private swarm needs for the handshake.
        members: peer ids that may connect; None for all.

    Raises:
        ConfigError: an address is invalid.
        Unavailable: a port is in use, or an address does not belong to this machine.
        StateError: `data_dir/port` does not hold a port.
    """
    try:
        own = listening.own_addresses(cfg, data_dir)
        belongs = SwarmSettings(swarm, members, listening.bootstrap_peers(cfg))
        gater = ConnectionGater()
        guards.install()
        library = build.build_host(
            identity.key_pair, own.announce, gater, cfg.max_connections, secret
        )
        async with (
            guards.running(library, own.listen),
            trio.open_nursery() as nursery,
        ):
            network = Libp2pNetwork(
                Host(library, nursery),
                gater,
                cfg,
                own,
                belongs,
                data_dir,
            )
            await network.start()
            try:
                yield network
            finally:
                network.stop()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if (error := _only(group)) is not None:
            raise error from error.__cause__
        raise


def _only(group: BaseExceptionGroup) -> Exception | None:
    """Return the single exception in `group`; None if there are several, or if one is a
    cancellation, which must stay in its group."""
    found: list[BaseException] = []
    nested: list[BaseException] = [group]
    while nested:
        error = nested.pop()
        if isinstance(error, BaseExceptionGroup):
            nested += error.exceptions
        else:
            found.append(error)
    return found[0] if len(found) == 1 and isinstance(found[0], Exception) else None
