"""The addresses this node dials: `/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>[/p2p/<peer id>]`, and
places at relays. Pure.

Strings from peers come here before anything else looks at them, so the parser is small, strict and
bounded instead of general.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re

import base58

from swarmnode.wire.envelope import is_small_order

LONGEST_ADDRESS = 256
"""Characters; a DNS name is at most 253."""

ED25519_PEER_ID = bytes.fromhex("002408011220")
"""Identity multihash of an Ed25519 public key in libp2p's protobuf: this prefix, then the 32 bytes
of the key."""

_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*\.?"
)

LOOPBACK, PRIVATE, PUBLIC = 0, 1, 2
"""How far an address reaches. A peer is only told of addresses that reach at least as far as the
one we see it at."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """One place to dial. `str()` is the multiaddr without the peer id."""

    kind: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address, None for a name."""
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
    """Remembered, since each connection's is asked for again and again."""
    return ipaddress.ip_address(host)


@dataclasses.dataclass(frozen=True, slots=True)
class Circuit:
    """A place at a relay where a peer that cannot be reached can be called:
    `<address>/p2p/<relay>/p2p-circuit`."""

    address: Address
    """The relay's."""
    relay: str
    """Peer id."""

    def __str__(self) -> str:
        return f"{self.address}/p2p/{self.relay}/p2p-circuit"

    @property
    def scope(self) -> int:
        return self.address.scope

    @property
    def prefix(self) -> str:
        """Peers behind one relay have nothing else in common: they count as the relay's, not as its
        network's."""
        return f"relay {self.relay}"


@dataclasses.dataclass(frozen=True)
class OwnAddresses:
    """`listen`: what we listen on, ports chosen. `announce`: what a person says that others should
    be told instead; may be empty."""

    listen: list[Address]
    announce: list[Address]

    def told(self) -> list[Address]:
        return self.announce or self.listen

    def outside_ports(self) -> list[int]:
        """Ports at which we can be dialled from another machine; empty if we listen on loopback
        alone."""
        outside = [
            each.port
            for each in self.told()
            if each.scope > LOOPBACK or (each.ip is not None and each.ip.is_unspecified)
        ]
        return list(dict.fromkeys(outside))


def parse_any(text: str) -> tuple[Address | Circuit, str | None]:
    """Like `parse`, and also for a place at a relay. Raises ValueError."""
    if len(text) > LONGEST_ADDRESS:
        raise ValueError("too long")
    direct, circuit, rest = text.partition("/p2p-circuit")
    if not circuit:
        return parse(text)
    address, relay = parse(direct)
    if relay is None:
        raise ValueError("a relay without its peer id")
    if rest and not rest.startswith("/p2p/"):
        raise ValueError("not of the form <relay's address>/p2p/<relay>/p2p-circuit/p2p/<peer id>")
    return Circuit(address, relay), check_peer_id(rest.removeprefix("/p2p/")) if rest else None


def is_circuit(text: str) -> bool:
    """Whether an address, parsed before, is a place at a relay."""
    return "/p2p-circuit" in text


def parse(text: str) -> tuple[Address, str | None]:
    """The address and the peer id at its end, if there is one. Raises ValueError, whose text can be
    shown to a person."""
    if len(text) > LONGEST_ADDRESS:
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
    """`text` itself if it is the peer id of an Ed25519 key. Raises ValueError."""
    if len(text) > 64:
        raise ValueError("not a peer id")
    try:
        raw = base58.b58decode(text)
    except ValueError as error:
        raise ValueError("not a peer id") from error
    if (
        len(raw) != 38
        or not raw.startswith(ED25519_PEER_ID)
        or base58.b58encode(raw).decode() != text
    ):
        raise ValueError("not the peer id of an Ed25519 key")
    if is_small_order(raw[len(ED25519_PEER_ID) :]):
        raise ValueError("the peer id of a key of small order, for which anybody can sign")
    return text


def from_socket(host: str, port: int) -> Address:
    """The address of one end of a socket. Raises ValueError if `host` is not an IP address."""
    ip = ipaddress.ip_address(host.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return Address(f"ip{ip.version}", str(ip), port)


def scope_of(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    if ip.is_loopback:
        return LOOPBACK
    return PUBLIC if ip.is_global else PRIVATE


@functools.lru_cache(4096)
def prefix_of(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """/24 or /48: what one operator can be expected to hold many addresses of. None for loopback,
    which is this machine."""
    if ip.is_loopback:
        return None
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def dialable(address: Address | Circuit, teller: Address | None) -> bool:
    """Whether an address heard from a peer at `teller` may be dialled: no names (a resolver is not
    a peer's to steer), nothing unspecified or multicast, and nothing that reaches less far than the
    teller does (a stranger shall not point us at our own loopback or LAN)."""
    address = address.address if isinstance(address, Circuit) else address
    ip = address.ip
    if ip is None or address.port == 0 or ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return False
    return teller is None or scope_of(ip) >= min(teller.scope, PUBLIC)
