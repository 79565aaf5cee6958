"""Starts and stops the libp2p host and everything that runs on it.

open_host ─▶ choose the port ─▶ guarded host: TCP, Noise, Yamux ─▶ Libp2pNetwork ─▶ its
tasks: redial, mDNS, book, …
leaving   ─▶ book saved ─▶ tasks end ─▶ connections and host closed, shielded and bounded (else
py-libp2p leaks every socket)
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
    """A running host, listening and looking for peers; closed when the block is left.

    `swarm`: 32 bytes, keeps peers of other swarms out of the peer exchange and off mDNS. `secret`:
    32 bytes that a peer must have, `members`: ids that it must be among, to get through the
    handshake. Raises ConfigError for an address that cannot be, Unavailable if a port is taken or
    an address is not this machine's, StateError if `data_dir/port` is not a port. If the library
    fails later, its exception ends the block. A single exception comes out as itself, whatever
    number of nurseries it went through.
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
            build.running(library, own.listen),
            trio.open_nursery() as nursery,
        ):
            network = Libp2pNetwork(
                Host(build.typed(library), nursery),
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
    """The one exception in `group`, None if there are several or a cancellation is among them,
    which must stay where it is."""
    found: list[BaseException] = []
    nested: list[BaseException] = [group]
    while nested:
        error = nested.pop()
        if isinstance(error, BaseExceptionGroup):
            nested += error.exceptions
        else:
            found.append(error)
    return found[0] if len(found) == 1 and isinstance(found[0], Exception) else None
