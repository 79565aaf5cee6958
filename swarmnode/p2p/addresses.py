"""Parse, compare and filter the addresses that this node dials. Pure.

Two forms exist: `/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>[/p2p/<peer id>]`, and circuit addresses
at relays. Every address string from a peer passes through this parser first, so the parser is
small, strict and bounded instead of general.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re

from swarmnode.wire.envelope import peer_key

MAX_ADDRESS_CHARACTERS = 256
"""Limit for an address string. A DNS name alone has at most 253 characters."""

_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*\.?"
)

LOOPBACK, PRIVATE, PUBLIC = 0, 1, 2
"""Scope of an address. A peer only receives addresses with at least the scope of the address at
which this node sees that peer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A TCP endpoint to dial. `str()` gives the multiaddr without the peer id."""

    kind: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address, or None for a DNS name."""
        return _ip(self.host) if self.kind in ("ip4", "ip6") else None

    @property
    def is_link_local(self) -> bool:
        return self.ip is not None and self.ip.is_link_local

    @property
    def scope(self) -> int:
        return PUBLIC if self.ip is None else scope_of(self.ip)

    @property
    def prefix(self) -> str | None:
        return None if self.ip is None else prefix_of(self.ip)


@functools.lru_cache(4096)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse `host`; cached because the statistics ask for every connection's address repeatedly."""
    return ipaddress.ip_address(host)


@dataclasses.dataclass(frozen=True, slots=True)
class Circuit:
    """A relay address at which an unreachable peer can be dialled:
    `<address>/p2p/<relay>/p2p-circuit`."""

    address: Address
    """Address of the relay."""
    relay: str
    """Peer id of the relay."""

    def __str__(self) -> str:
        return f"{self.address}/p2p/{self.relay}/p2p-circuit"

    @property
    def scope(self) -> int:
        return self.address.scope

    @property
    def prefix(self) -> str:
        """The group of peers behind this relay. They share nothing but the relay, so they do not
        count towards the network prefix of the relay."""
        return f"relay {self.relay}"


@dataclasses.dataclass(frozen=True)
class OwnAddresses:
    """Addresses of this node.

    Attributes:
        listen: listening addresses, with the port already chosen.
        announce: addresses that the operator wants to advertise instead; may be empty.
    """

    listen: list[Address]
    announce: list[Address]

    def advertised(self) -> list[Address]:
        """Return the addresses to advertise: `announce` if set, otherwise `listen`."""
        return self.announce or self.listen

    def external_ports(self) -> list[int]:
        """Return the ports that other machines can dial; empty if this node listens on loopback
        only."""
        outside = [
            each.port
            for each in self.advertised()
            if each.scope > LOOPBACK or (each.ip is not None and each.ip.is_unspecified)
        ]
        return list(dict.fromkeys(outside))


def parse_any(text: str) -> tuple[Address | Circuit, str | None]:
    """Parse a direct address or a circuit address.

    Returns:
        The address and the peer id at its end, or None without one.

    Raises:
        ValueError: the text is malformed.
    """
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError("too long")
    direct, circuit, rest = text.partition("/p2p-circuit")
    if not circuit:
        return parse(text)
    address, relay = parse(direct)
    if relay is None:
        raise ValueError("the relay's peer id is missing")
    if rest and not rest.startswith("/p2p/"):
        raise ValueError("not of the form <relay's address>/p2p/<relay>/p2p-circuit/p2p/<peer id>")
    return Circuit(address, relay), check_peer_id(rest.removeprefix("/p2p/")) if rest else None


def is_circuit(text: str) -> bool:
    """Return True if an already parsed address is a circuit address."""
    return "/p2p-circuit" in text


def parse(text: str) -> tuple[Address, str | None]:
    """Parse a direct address.

    Returns:
        The address and the peer id at its end, or None without one.

    Raises:
        ValueError: the text is malformed; the message can be shown to the operator.
    """
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError("too long")
    parts = text.split("/")
    if (
        len(parts) not in (5, 7)
        or parts[0] != ""
        or parts[3] != "tcp"
        or (len(parts) == 7 and parts[5] not in ("p2p", "ipfs"))
    ):
        raise ValueError("not of the form /ip4/<address>/tcp/<port>/p2p/<peer id>")
    kind, host, port = parts[1], parts[2], parts[4]
    if kind == "ip4":
        host = str(ipaddress.IPv4Address(host))
    elif kind == "ip6":
        host = str(ipaddress.IPv6Address(host.split("%")[0]))
    elif kind in ("dns", "dns4", "dns6"):
        if not _NAME.fullmatch(host):
            raise ValueError("not a host name")
    else:
        raise ValueError(f"/{kind[:16]} is not supported; use ip4, ip6, dns, dns4 or dns6")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError("the port is not 0 to 65535")
    return Address(kind, host, int(port)), check_peer_id(parts[6]) if len(parts) == 7 else None


def check_peer_id(text: str) -> str:
    """Return `text` if it is the peer id of an Ed25519 key, otherwise raise ValueError."""
    if peer_key(text) is None:
        raise ValueError("not the peer id of an Ed25519 key")
    return text


def from_socket(host: str, port: int) -> Address:
    """Return the address of a socket's end. Raises ValueError unless `host` is an IP address."""
    ip = ipaddress.ip_address(host.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return Address(f"ip{ip.version}", str(ip), port)


def scope_of(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """Return LOOPBACK, PRIVATE or PUBLIC."""
    if ip.is_loopback:
        return LOOPBACK
    return PUBLIC if ip.is_global else PRIVATE


@functools.lru_cache(4096)
def prefix_of(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Return the /24 (IPv4) or /48 (IPv6) network of `ip`, or None for loopback.

    One operator can be expected to hold many addresses of such a network.
    """
    if ip.is_loopback:
        return None
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def dialable(address: Address | Circuit, reporter: Address | None) -> bool:
    """Return True if this node may dial an address that a peer reported.

    Names are refused, because a peer must not control DNS queries of this node. Unspecified,
    multicast and link-local addresses are refused. An address must have at least the scope of its
    reporter, so that a stranger cannot make this node dial its own loopback or LAN.

    Args:
        address: the reported address.
        reporter: address of the reporting peer; None for a report from the local network.
    """
    address = address.address if isinstance(address, Circuit) else address
    ip = address.ip
    if ip is None or address.port == 0 or ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return False
    return reporter is None or scope_of(ip) >= min(reporter.scope, PUBLIC)
