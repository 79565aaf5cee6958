"""Vectors of the neighbours protocol, with sessions and summaries, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import (
    OTHER_SWARM,
    PEER,
    SWARM,
    Vector,
    accepted,
    changed,
    encoded,
    pack,
    refusals,
    rejected,
    sealed,
)
from swarmnode.wire import ids

SUMMARY: dict[str, Any] = {
    "name": "Küche",
    "version": "0.1.0",
    "created_at": 1_790_000_000_000,
    "uptime": 3600,
    "step": 120,
    "policy_version": 118,
    "reward": 0.5,
    "reward_step": 80,
    "published": 480,
    "peers": 3,
}


def signed(
    message: dict[str, Any] | bytes,
    domain: bytes = ids.DOMAIN_SUMMARY,
    swarm: bytes = SWARM,
    codec: Any = "raw",
) -> bytes:
    return sealed(message, codec, domain=domain, swarm=swarm)


SESSION: dict[str, Any] = {
    "id": b"\x55" * 16,
    "started_at": 1_790_000_000_000,
    "issued_at": 1_790_000_060_000,
}
REQUEST: dict[str, Any] = {
    "swarm": SWARM,
    "addresses": ["/ip4/192.0.2.7/tcp/9512", "/ip6/2001:db8::7/tcp/9512"],
    "session": signed(SESSION, ids.DOMAIN_SESSION),
    "summary": signed(SUMMARY),
    "used": 12,
}
RESPONSE: dict[str, Any] = {
    "swarm": SWARM,
    "peers": [{"peer": PEER, "addresses": ["/ip4/198.51.100.7/tcp/9512"]}],
    "sessions": [signed(SESSION, ids.DOMAIN_SESSION)],
    "summaries": [signed(SUMMARY)],
    "successor": b"\x66" * 32,
}


def summaries() -> Iterator[Vector]:
    fresh = {"name": "", "step": 0, "reward": -1.0, "reward_step": 0}
    counters = ("uptime", "step", "policy_version", "reward_step", "published", "peers")
    for name, fields in (
        ("a summary", {}),
        ("of a node without a name, a step or a reward", fresh),
        ("64 bytes of name", {"name": "ü" * 32}),
        ("largest numbers", dict.fromkeys(counters, 2**63 - 1)),
        ("reward 0", {"reward": 0.0}),
        ("reward 1", {"reward": 1.0}),
    ):
        message = {**SUMMARY, **fields}
        yield accepted(name, "summary", signed(message), {"peer": PEER, "summary": message})
    for name, path, value in (
        ("65 bytes of name", "name", "a" * 65),
        ("a name with an escape", "name", "a\x1b[2J"),
        ("a name with a newline", "name", "a\nb"),
        ("no version", "version", ""),
        ("33 bytes of version", "version", "1" * 33),
        ("a version with a space", "version", "1 2"),
        ("reward above 1", "reward", 1.0625),
        ("reward below 0", "reward", -0.5),
        ("reward below -1", "reward", -2.0),
    ):
        yield rejected("bounds", name, signed({**SUMMARY, path: value}), "summary")
    yield from refusals(
        "summary",
        ("signature", "of another domain", signed(SUMMARY, ids.DOMAIN_SESSION)),
        ("signature", "of another swarm", signed(SUMMARY, swarm=OTHER_SWARM)),
        ("compression", "said to be compressed", signed(SUMMARY, codec="zstd")),
        ("malformed", "truncated", signed(SUMMARY)[:-1]),
        ("oversize", "513 bytes", bytes(513)),
    )


def sessions() -> Iterator[Vector]:
    good = signed(SESSION, ids.DOMAIN_SESSION)
    yield accepted("a session", "session", good, {"peer": PEER, "session": SESSION})
    compressed = signed(SESSION, ids.DOMAIN_SESSION, codec="zstd")
    yield from refusals(
        "session",
        ("signature", "of another domain", signed(SESSION, ids.DOMAIN_ROLLOUT)),
        ("compression", "said to be compressed", compressed),
        ("malformed", "truncated", good[:-1]),
        ("oversize", "513 bytes", bytes(513)),
    )


def messages() -> Iterator[Vector]:
    nothing = {"addresses": [], "session": b"", "summary": b"", "used": 0}
    longest = {"session": bytes(512), "summary": bytes(512), "used": 2**63 - 1}
    for name, fields in (
        ("a request", {}),
        ("a request of a node that shares nothing", nothing),
        ("a request with the longest envelopes", longest),
    ):
        yield encoded(name, "neighbours_request", {**REQUEST, **fields})
    nested = pack(REQUEST)[:1] + pack("addresses") + b"\x91" * 4000
    yield from refusals(
        "neighbours_request",
        ("bounds", "9 addresses", {**REQUEST, "addresses": REQUEST["addresses"] * 5}),
        ("bounds", "an address of 257 characters", changed(REQUEST, "addresses.0", "/" * 257)),
        ("bounds", "an address with a line break", changed(REQUEST, "addresses.0", "/ip4/x\n")),
        ("bounds", "a session of 513 bytes", {**REQUEST, "session": bytes(513)}),
        ("bounds", "a summary of 513 bytes", {**REQUEST, "summary": bytes(513)}),
        ("schema", "4000 nested arrays", nested),
        ("oversize", "a request of 4097 bytes", bytes(4097)),
    )
    nothing = {"peers": [], "sessions": [], "summaries": [], "successor": b""}
    most = {"peers": RESPONSE["peers"] * 32, "sessions": [b"a"] * 4, "summaries": [b"a"] * 8}
    for name, fields in (
        ("a response", {}),
        ("nothing", nothing),
        ("32 peers, 4 sessions, 8 summaries", most),
    ):
        yield encoded(name, "neighbours_response", {**RESPONSE, **fields})
    for name, path, value in (
        ("33 peers", "peers", RESPONSE["peers"] * 33),
        ("9 addresses of a peer", "peers.0.addresses", REQUEST["addresses"] * 5),
        ("an empty peer id", "peers.0.peer", ""),
        ("5 sessions", "sessions", [b"a"] * 5),
        ("an empty session", "sessions", [b""]),
        ("a session of 513 bytes in a response", "sessions", [bytes(513)]),
        ("9 summaries", "summaries", [b"a"] * 9),
        ("an empty summary", "summaries", [b""]),
        ("a summary of 513 bytes in a response", "summaries", [bytes(513)]),
        ("a successor of 31 bytes", "successor", bytes(31)),
        ("a successor of 33 bytes", "successor", bytes(33)),
    ):
        yield rejected("bounds", name, changed(RESPONSE, path, value), "neighbours_response")
    yield from refusals(
        "neighbours_response",
        ("schema", "a peer with a name", changed(RESPONSE, "peers.0.name", "me")),
        ("oversize", "73,729 bytes", bytes(73_729)),
    )
