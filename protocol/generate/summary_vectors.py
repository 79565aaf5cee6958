"""Vectors of summaries, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import (
    KEY,
    OTHER_SWARM,
    PEER,
    SWARM,
    Vector,
    accepted,
    changed,
    pack,
    rejected,
    without,
)
from swarmnode.wire import ids
from swarmnode.wire.envelope import sign

SUMMARY: dict[str, Any] = {
    "name": "Küche",
    "version": "0.1.0",
    "created_at": 1_790_000_000_000,
    "uptime": 3600,
    "step": 120,
    "policy_version": 118,
    "reward": 0.5,
    "published": 480,
    "peers": 3,
}


def signed(
    message: dict[str, Any] | bytes,
    domain: bytes = ids.DOMAIN_SUMMARY,
    swarm: bytes = SWARM,
    codec: Any = "raw",
) -> bytes:
    by = sign(message if isinstance(message, bytes) else pack(message), KEY, domain, swarm, codec)
    return pack(
        {"key": by.key, "payload": by.payload, "signature": by.signature, "codec": by.codec}
    )


def summaries() -> Iterator[Vector]:
    for name, message in (
        ("a summary", SUMMARY),
        (
            "of a node without a name, a step or a reward",
            {**SUMMARY, "name": "", "step": 0, "reward": -1.0},
        ),
        ("64 bytes of name", {**SUMMARY, "name": "ü" * 32}),
        (
            "largest numbers",
            {
                **SUMMARY,
                **dict.fromkeys(
                    ("uptime", "step", "policy_version", "published", "peers"), 2**63 - 1
                ),
            },
        ),
        ("reward 0", {**SUMMARY, "reward": 0.0}),
        ("reward 1", {**SUMMARY, "reward": 1.0}),
    ):
        yield accepted(name, "summary", signed(message), {"peer": PEER, "summary": message})
    for name, path, value in (
        ("65 bytes of name", "name", "a" * 65),
        ("a name with an escape", "name", "a\x1b[2J"),
        ("a name with a newline", "name", "a\nb"),
        ("no version", "version", ""),
        ("33 bytes of version", "version", "1" * 33),
        ("a version with a space", "version", "1 2"),
        ("signed before time", "created_at", -1),
        ("uptime beyond 63 bits", "uptime", 2**63),
        ("fewer steps than none", "step", -1),
        ("peers beyond 63 bits", "peers", 2**64 - 1),
        ("reward above 1", "reward", 1.0625),
        ("reward below 0", "reward", -0.5),
        ("reward below -1", "reward", -2.0),
    ):
        yield rejected("bounds", name, signed(changed(SUMMARY, path, value)), "summary")
    for name, value in (("NaN", float("nan")), ("infinity", float("inf"))):
        yield rejected(
            "not_finite", f"reward is {name}", signed({**SUMMARY, "reward": value}), "summary"
        )
    yield rejected("signature", "of another domain", signed(SUMMARY, ids.DOMAIN_SESSION), "summary")
    yield rejected("signature", "of another swarm", signed(SUMMARY, swarm=OTHER_SWARM), "summary")
    yield rejected("compression", "said to be compressed", signed(SUMMARY, codec="zstd"), "summary")
    yield rejected("schema", "a field more", signed({**SUMMARY, "stake": 1}), "summary")
    yield rejected("schema", "a field less", signed(without(SUMMARY, "peers")), "summary")
    yield rejected("schema", "a name as bin", signed({**SUMMARY, "name": b"a"}), "summary")
    yield rejected("malformed", "truncated", signed(SUMMARY)[:-1], "summary")
    yield rejected("malformed", "empty", signed(b""), "summary")
    yield rejected("oversize", "513 bytes", bytes(513), "summary")
    request = {"summary": signed(SUMMARY)}
    yield accepted("a request", "summary_request", pack(request), request)
    yield accepted(
        "of a node without a summary", "summary_request", pack({"summary": b""}), {"summary": b""}
    )
    yield rejected(
        "bounds", "a request with 513 bytes", pack({"summary": bytes(513)}), "summary_request"
    )
    yield rejected("schema", "a request without a summary", pack({}), "summary_request")
    yield rejected("oversize", "a request of 529 bytes", bytes(529), "summary_request")
    response = {"summaries": [signed(SUMMARY)]}
    yield accepted("a response", "summary_response", pack(response), response)
    yield accepted("nothing", "summary_response", pack({"summaries": []}), {"summaries": []})
    yield rejected("bounds", "33 summaries", pack({"summaries": [b"a"] * 33}), "summary_response")
    yield rejected("bounds", "an empty summary", pack({"summaries": [b""]}), "summary_response")
    yield rejected(
        "schema", "a summary as a map", pack({"summaries": [SUMMARY]}), "summary_response"
    )
    yield rejected("oversize", "16,545 bytes", bytes(16_545), "summary_response")
