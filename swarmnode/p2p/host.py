"""Starts and stops the libp2p host and everything that runs on it.

    open_host ─▶ choose the port ─▶ guarded host: TCP, Noise, Yamux, GossipSub ─▶ Network (facade) ─▶ its tasks: redial, mDNS, book, …
    leaving   ─▶ book saved ─▶ tasks end ─▶ connections and host closed, shielded and bounded (else py-libp2p leaks every socket)

Everything the library would choose by default is passed explicitly: its defaults also accept plaintext, secio and mplex, dial peers of
their own choosing, and retry behind our back.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import psutil
import trio
from libp2p import new_host
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.rcmgr.manager import ResourceManager
from libp2p.tools.anyio_service import background_trio_service
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarmnode.config import NetworkConfig
from swarmnode.errors import ConfigError, StateError, Unavailable
from swarmnode.files import write_atomically
from swarmnode.p2p import addresses, guards
from swarmnode.p2p.gate import Gate
from swarmnode.p2p.identity import Identity
from swarmnode.p2p.network import Network
from swarmnode.wire.limits import SWARM_ID_BYTES

MESHSUB = "/meshsub/1.1.0"
"""1.2's IDONTWANT costs twice the CPU per message and saves nothing below 64 KB."""
CLOSE_SECONDS = 5.0
OWN_PORTS = range(20_000, 32_000)
FAMILIES = (socket.AF_INET, socket.AF_INET6)
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
) -> AsyncIterator[Network]:
    """A running host, listening and looking for peers; closed when the block is left.

    `swarm`: 32 bytes, keeps peers of other swarms out of the peer exchange and off mDNS. `secret`: 32 bytes that a peer must have,
    `members`: ids that it must be among, to get through the handshake. Raises ConfigError for an address that cannot be,
    Unavailable if a port is taken or an address is not this machine's, StateError if `data_dir/port` is not a port. If the library fails
    later, its exception ends the block. A single exception comes out as itself, whatever number of nurseries it went through.
    """
    try:
        async with _open(cfg, identity, data_dir, swarm, secret, members) as network:
            yield network
    except BaseExceptionGroup as group:
        if (error := _only(group)) is not None:
            raise error from error.__cause__
        raise


@contextlib.asynccontextmanager
async def _open(
    cfg: NetworkConfig, identity: Identity, data_dir: Path, swarm: bytes, secret: bytes | None, members: Collection[str] | None
) -> AsyncIterator[Network]:
    quiet()
    listen = _listen_addresses(cfg, data_dir)
    announce = [_parse("announce_addrs", text)[0] for text in cfg.announce_addrs]
    bootstrap = [_bootstrap(text) for text in cfg.initial_peers]
    guards.install()
    gate = Gate()
    host = build_host(cfg, identity, listen, announce, gate, secret)
    router = guards.guard_gossip(
        GossipSub(
            protocols=[MESHSUB],
            degree=8,
            degree_low=6,
            degree_high=32,  # a small swarm is fully meshed; at the default of 12 nodes prune each other and stay out for a minute
            heartbeat_initial_delay=0.1,
            heartbeat_interval=1,
            prune_back_off=10,
            do_px=False,  # our own exchange is bounded and checked
            spam_protection_enabled=False,  # it drops above 10 messages per second and forwarder, silently
            adaptive_gossip_enabled=False,  # it slows the heartbeat down to two minutes
        )
    )
    pubsub = guards.GuardedPubsub(host, router, strict_signing=True)
    multiaddrs = [Multiaddr(str(address)) for address in listen]
    async with guards.running(host, multiaddrs):
        try:
            async with background_trio_service(pubsub), background_trio_service(router):
                await pubsub.wait_until_ready()
                async with trio.open_nursery() as nursery:
                    network = Network(
                        host, pubsub, router, nursery, gate,
                        own=identity.peer_id, cfg=cfg, data_dir=data_dir, swarm=swarm,
                        listen=listen, announce=announce, bootstrap=bootstrap, members=members,
                    )  # fmt: skip
                    await network.start()
                    try:
                        yield network
                    finally:
                        network.stop()
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
                await _close_connections(host)


def build_host(
    cfg: NetworkConfig,
    identity: Identity,
    listen: list[addresses.Address],
    announce: list[addresses.Address],
    gate: Gate,
    secret: bytes | None = None,
) -> Any:
    """A guarded host that is not running yet."""
    security = {protocol: gate.around(transport) for protocol, transport in guards.noise_only(identity.key_pair, secret).items()}
    host = new_host(
        key_pair=identity.key_pair,
        transports=[TCP()],
        sec_opt=security,
        muxer_opt=guards.YAMUX_ONLY,
        announce_addrs=[Multiaddr(str(address)) for address in announce] or None,
        disable_identify_address_discovery=True,  # peers' opinions of our address are not ours to spread
        # Connections are bounded below and by the guards. A breaker that refuses everybody after five refusals, limits that shrink under
        # load and tables by peer id, of which a stranger has as many as it likes, would be new ways to hurt us.
        resource_manager=ResourceManager(
            enable_metrics=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
            enable_rate_limiting=False,
        ),
        connection_config=ConnectionConfig(
            max_connections=cfg.max_connections,
            high_watermark=cfg.max_connections,
            low_watermark=0,
            min_connections=0,
            max_connections_per_peer=4,  # two that dialled each other at once, and again when one of them has restarted unnoticed
        ),
    )
    network = host.get_network()
    gate.watch(network.upgrader)
    network.retry_config = RetryConfig(max_retries=0)
    network.auto_connector.maybe_connect = trio.lowlevel.checkpoint  # the redial loop in dialer.py is the only one that dials
    return guards.guard_host(host)


def quiet() -> None:
    """The library logs at ERROR what any stranger can cause, so a stranger could fill the disk. What matters of it is counted by us.

    Left alone when a person has asked for the library's own debugging (LIBP2P_DEBUG).
    """
    if not os.environ.get("LIBP2P_DEBUG"):
        for name in ("libp2p", "libp2p.network.auto_connector", "libp2p.network.connection_pruner"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _only(group: BaseExceptionGroup) -> Exception | None:
    """The one exception in `group`, None if there are several or a cancellation is among them, which must stay where it is."""
    found: list[BaseException] = []
    nested: list[BaseException] = [group]
    while nested:
        error = nested.pop()
        if isinstance(error, BaseExceptionGroup):
            nested += error.exceptions
        else:
            found.append(error)
    return found[0] if len(found) == 1 and isinstance(found[0], Exception) else None


async def _close_connections(host: Any) -> None:
    """All side by side: the library, which closes what is left, takes 0.2 s for each in turn."""
    network = host.get_network()
    async with trio.open_nursery() as nursery:
        for peer in list(network.connections):
            nursery.start_soon(network.close_peer, peer)


def addresses_to_tell(cfg: NetworkConfig, data_dir: Path) -> list[addresses.Address]:
    """Where others can dial this node, without starting it: what it announces, else what it listens on, its port chosen if need be.

    An address that is every interface's is this machine's addresses, the widest-reaching first. Raises as `open_host` does.
    """
    if cfg.announce_addrs:
        return [_parse("announce_addrs", text)[0] for text in cfg.announce_addrs]
    found = []
    for address in [_parse("listen_addrs", text)[0] for text in cfg.listen_addrs]:
        port = address.port or _own_port(data_dir, address)
        if address.ip is None or not address.ip.is_unspecified:
            found.append(addresses.Address(address.kind, address.host, port))
            continue
        own = [each.address.split("%")[0] for interface in psutil.net_if_addrs().values() for each in interface if each.family in FAMILIES]
        usable = [each for text in own if not (each := addresses.from_socket(text, port)).ip.is_link_local and each.kind == address.kind]
        found += sorted(usable, key=lambda each: -each.scope)
    return [each for each in found if each.scope] or found


def _listen_addresses(cfg: NetworkConfig, data_dir: Path) -> list[addresses.Address]:
    """What to listen on, every port 0 replaced by this node's own port; each checked to be free.

    Here rather than when the library binds, because then there is still an error number that tells taken from not ours.
    """
    wanted = [_parse("listen_addrs", text)[0] for text in cfg.listen_addrs]
    if not wanted:
        raise ConfigError("network.listen_addrs is empty")
    for address in wanted:
        if address.ip is None:
            raise ConfigError(f"network.listen_addrs: {address} is a name; give the IP address to listen on")
    if any(address.port == 0 for address in wanted):
        port = _own_port(data_dir, next(address for address in wanted if address.port == 0))
        wanted = [address if address.port else addresses.Address(address.kind, address.host, port) for address in wanted]
    for address in wanted:
        _probe(address).close()
    return wanted


def _own_port(data_dir: Path, address: addresses.Address) -> int:
    """The port in `data_dir/port`; a free one, saved there, if there is none yet: peers remember where to find us."""
    path = data_dir / "port"
    try:
        if path.exists():
            text = path.read_text().strip()
            if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
                raise StateError(f"{path} does not hold a port; remove it to choose a new one")
            return int(text)
        port = _free_port(address)
        write_atomically(path, f"{port}\n".encode(), mode=0o644)
        return port
    except (OSError, UnicodeDecodeError) as error:
        raise Unavailable(f"cannot use {path}: {error}") from error


def _free_port(address: addresses.Address) -> int:
    """A free port below those the system gives to outgoing connections: at a restart one of them could have taken it."""
    for port in random.sample(OWN_PORTS, 64):
        with contextlib.suppress(Unavailable), _probe(addresses.Address(address.kind, address.host, port)):
            return port
    raise Unavailable(f"none of 64 ports of {address.host} between {OWN_PORTS.start} and {OWN_PORTS.stop} is free")


def _probe(address: addresses.Address) -> socket.socket:
    """A socket bound to `address`. Raises Unavailable if that is taken or not ours."""
    probe = socket.socket(socket.AF_INET if address.kind == "ip4" else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a listener would: a port in TIME_WAIT is free
        if address.kind == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address.host, address.port))
    except OSError as error:
        probe.close()
        if error.errno == errno.EADDRINUSE:
            what_to_do = "set network.listen_addrs to a free one, or tcp/0"
            raise Unavailable(f"port {address.port} of {address.host} is taken by another process; {what_to_do}") from error
        raise Unavailable(f"cannot listen on {address}: {error.strerror}") from error
    return probe


def _parse(key: str, text: str) -> tuple[addresses.Address, str | None]:
    try:
        return addresses.parse(text)
    except ValueError as error:
        raise ConfigError(f"network.{key}: {text!r}: {error}") from error


def _bootstrap(text: str) -> tuple[addresses.Address, str]:
    address, peer = _parse("initial_peers", text)
    if peer is None:
        raise ConfigError(f"network.initial_peers: {text!r} does not end in /p2p/<peer id>")
    return address, peer
