"""Builds a guarded host with every option explicit. The library's defaults also accept plaintext,
secio and mplex, dial peers of their own choice, and retry without notice."""

from __future__ import annotations

import logging
import os
from typing import cast

import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.keys import KeyPair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.rcmgr.manager import ResourceManager
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarmnode.p2p import guards
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.gater import ConnectionGater


def build_host(
    key_pair: KeyPair,
    announce: list[Address],
    gater: ConnectionGater,
    max_connections: int,
    secret: bytes | None = None,
) -> IHost:
    """Return a guarded host that is not running yet."""
    silence_library_log()
    security = {
        protocol: gater.wrap(transport)
        for protocol, transport in guards.noise_only(key_pair, secret).items()
    }
    host = new_host(
        key_pair=key_pair,
        transports=[TCP()],
        sec_opt=security,
        muxer_opt=guards.YAMUX_ONLY,
        announce_addrs=[Multiaddr(str(address)) for address in announce] or None,
        # do not forward peers' observations of the own address
        disable_identify_address_discovery=True,
        # Connections are bounded below and by the guards. The library's options would add attacks:
        # a breaker that refuses every peer after five refusals, limits that shrink under load, and
        # tables by peer id, although a stranger can create any number of peer ids.
        resource_manager=ResourceManager(
            enable_metrics=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
            enable_rate_limiting=False,
        ),
        connection_config=ConnectionConfig(
            max_connections=max_connections,
            high_watermark=max_connections,
            low_watermark=0,
            min_connections=0,
            # Two peers may dial each other simultaneously, and again after one of them restarted
            # and the other has not noticed it yet.
            max_connections_per_peer=4,
        ),
    )
    swarm = cast("Swarm", host.get_network())
    swarm.retry_config = RetryConfig(max_retries=0)
    # only `connection_manager.Dialer` dials
    swarm.auto_connector.maybe_connect = trio.lowlevel.checkpoint  # type: ignore[method-assign]
    return guards.guard_host(host)


def silence_library_log() -> None:
    """Silence the library's log, because it logs at ERROR what any stranger can cause, so a
    stranger could fill the disk. This node counts the relevant events itself.

    Does nothing if the operator enabled the library's debug log (LIBP2P_DEBUG).
    """
    if not os.environ.get("LIBP2P_DEBUG"):
        for name in ("libp2p", "libp2p.network.auto_connector", "libp2p.network.connection_pruner"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
