"""Listening and announced addresses from the configuration, and the node's permanent port."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from swarmnode.config import NetworkConfig
from swarmnode.errors import ConfigError, StateError, Unavailable
from swarmnode.files import write_atomically
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address, OwnAddresses

PORT_RANGE = range(20_000, 32_000)
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def own_addresses(cfg: NetworkConfig, data_dir: Path) -> OwnAddresses:
    """Return the addresses to listen on and to announce.

    Port 0 is replaced by this node's own port; every listening address is checked to be free.
    Raises the errors of `network.open_host`.
    """
    return OwnAddresses(
        _listen_addresses(cfg, data_dir),
        [_parse("announce_addrs", text)[0] for text in cfg.announce_addrs],
    )


def bootstrap_peers(cfg: NetworkConfig) -> list[tuple[Address, str]]:
    """Return the addresses and peer ids to join through. Raises ConfigError."""
    return [_bootstrap(text) for text in cfg.initial_peers]


def addresses_to_advertise(cfg: NetworkConfig, data_dir: Path) -> list[Address]:
    """Return the addresses at which other nodes can dial this node, without starting it.

    These are the announced addresses, or else the listening addresses with the chosen port. An
    unspecified address is replaced by the addresses of this machine, widest scope first. Raises as
    `open_host` does.
    """
    if cfg.announce_addrs:
        return [_parse("announce_addrs", text)[0] for text in cfg.announce_addrs]
    listen = [_parse("listen_addrs", text)[0] for text in cfg.listen_addrs]
    with_port = [
        Address(each.kind, each.host, each.port or _own_port(data_dir, each)) for each in listen
    ]
    found = concrete_addresses(with_port, interface_addresses())
    found.sort(key=lambda each: -each.scope)
    return [each for each in found if each.scope] or found


def interface_addresses() -> list[str]:
    """Return every IP address of this machine, IPv6 without its zone."""
    return [
        each.address.split("%")[0]
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in FAMILIES
    ]


def concrete_addresses(listen: Iterable[Address], interfaces: Iterable[str]) -> list[Address]:
    """Return the listening addresses, with 0.0.0.0 and :: replaced by each address of `interfaces`,
    without link-local addresses."""
    found: list[Address] = []
    for address in listen:
        if address.ip is None or not address.ip.is_unspecified:
            found.append(address)
            continue
        own = [addresses.from_socket(text, address.port) for text in interfaces]
        found += [each for each in own if each.kind == address.kind]
    return [each for each in dict.fromkeys(found) if not each.is_link_local]


def _listen_addresses(cfg: NetworkConfig, data_dir: Path) -> list[Address]:
    """Return the addresses to listen on, with port 0 replaced, each checked to be free.

    The check is made here because the library does not keep the error number, which distinguishes a
    port in use from a foreign address.
    """
    wanted = [_parse("listen_addrs", text)[0] for text in cfg.listen_addrs]
    if not wanted:
        raise ConfigError("network.listen_addrs is empty")
    for address in wanted:
        if address.ip is None:
            raise ConfigError(
                f"network.listen_addrs: {address} is a name; give the IP address to listen on"
            )
    if any(address.port == 0 for address in wanted):
        port = _own_port(data_dir, next(address for address in wanted if address.port == 0))
        wanted = [
            address if address.port else Address(address.kind, address.host, port)
            for address in wanted
        ]
    for address in wanted:
        _probe(address).close()
    return wanted


def _own_port(data_dir: Path, address: Address) -> int:
    """Return the port in `data_dir/port`, or choose a free one and save it. It stays the same
    because peers remember the node's address."""
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
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Unavailable(f"cannot use {path}: {why}") from error


def _free_port(address: Address) -> int:
    """Return a free port below the range of ephemeral ports, from which an outgoing connection
    could take it during a restart.

    The system's random source is used, because two processes with the same seed would choose the
    same port.
    """
    for port in random.SystemRandom().sample(PORT_RANGE, 64):
        with contextlib.suppress(Unavailable), _probe(Address(address.kind, address.host, port)):
            return port
    raise Unavailable(
        f"none of 64 ports of {address.host} from {PORT_RANGE.start} to {PORT_RANGE.stop} is free"
    )


def _probe(address: Address) -> socket.socket:
    """Return a socket bound to `address`. Raises Unavailable if it is in use or belongs to another
    machine."""
    probe = socket.socket(
        socket.AF_INET if address.kind == "ip4" else socket.AF_INET6, socket.SOCK_STREAM
    )
    try:
        # as a listener does: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.kind == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address.host, address.port))
    except OSError as error:
        probe.close()
        if error.errno == errno.EADDRINUSE:
            what_to_do = "set network.listen_addrs to a free one, or tcp/0"
            raise Unavailable(
                f"port {address.port} of {address.host} is used by another process; {what_to_do}"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            every = Address(
                address.kind, "0.0.0.0" if address.kind == "ip4" else "::", address.port
            )
            what_to_do = f"listen on {every}, and name this one in network.announce_addrs"
            raise Unavailable(
                f"cannot listen on {address}: not an address of this machine; {what_to_do}"
            ) from error
        raise Unavailable(f"cannot listen on {address}: {error.strerror}") from error
    return probe


def _parse(key: str, text: str) -> tuple[Address, str | None]:
    try:
        return addresses.parse(text)
    except ValueError as error:
        raise ConfigError(f"network.{key}: {text!r}: {error}") from error


def _bootstrap(text: str) -> tuple[Address, str]:
    address, peer = _parse("initial_peers", text)
    if peer is None:
        raise ConfigError(f"network.initial_peers: {text!r} does not end in /p2p/<peer id>")
    return address, peer
