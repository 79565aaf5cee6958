"""Builds a guarded host with every option explicit. The library's defaults also accept plaintext,
secio and mplex, dial peers of their own choice, and retry without notice."""

from __future__ import annotations

import logging
import os
import socket
from typing import cast

import trio
from libp2p import new_host
from libp2p.abc import IHost, IRawConnection
from libp2p.crypto.keys import KeyPair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.rcmgr.manager import ResourceManager
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarmnode.p2p import guards
from swarmnode.p2p.addresses import Address, from_socket, parse
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
        transports=[NamedTCP()],
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


class NamedTCP(TCP):
    """TCP that asks the system's resolver for names, as other programs do: /etc/hosts, search
    domains and, where it is installed, mDNS. The library's resolver asks only name servers."""

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        address, _ = parse(str(maddr))
        if address.ip is not None:
            return await super().dial(maddr)
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.kind, 0)
        failure: Exception | None = None
        try:
            # in a thread, which is abandoned at the dial's deadline
            found = await trio.socket.getaddrinfo(
                address.host, address.port, family, socket.SOCK_STREAM
            )
            for *_, (host, port, *_) in found:
                try:
                    return await super().dial(Multiaddr(str(from_socket(str(host), int(port)))))
                except OpenConnectionError as error:
                    failure = error
        except OSError as error:
            failure = error
        raise OpenConnectionError(f"{address.host}: {failure}") from failure


def silence_library_log() -> None:
    """Silence the library's log, because it logs at ERROR what any stranger can cause, so a
    stranger could fill the disk. This node counts the relevant events itself.

    Does nothing if the operator enabled the library's debug log (LIBP2P_DEBUG).
    """
    if not os.environ.get("LIBP2P_DEBUG"):
        for name in ("libp2p", "libp2p.network.auto_connector", "libp2p.network.connection_pruner"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
