"""Valid and invalid frames, for `vectors.py` and for tests that mutate them.

Messages are plain dicts and msgpack, not swarmnode's structs, so that invalid messages can be built
too. zstd frames are laid out by hand (RFC 8878), because a compressor's output may change between
releases, and because no compressor writes a bomb.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.wire import envelope as envelopes
from swarmnode.wire import ids
from swarmnode.wire.envelope import peer_id, sign
from swarmnode.wire.manifest import swarm_id

Vector = dict[str, Any]
"""One case of protocol/vectors."""

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
TASKS = {"rg/chain_sum": "0123456789abcdef", "builtin/copy": "fedcba9876543210"}
SWARM = swarm_id("vectors", TASKS)
OTHER_SWARM = swarm_id("other", TASKS)
PEER = peer_id(KEY.public_key().public_bytes_raw())
OTHER_PEER = peer_id(OTHER_KEY.public_key().public_bytes_raw())

COMPLETION = {
    "text": "<answer>7</answer>",
    "tokens": 3,
    "logprob": -1.75,
    "finish": "eos",
    "token_ids": b"",
    "logprobs": b"",
    "turns": [],
}
EPISODE = {
    **COMPLETION,
    "text": "left≤right",
    "tokens": 6,
    "logprob": -3.0,
    "turns": [[4, 2], [0, 1], [8, 3]],
}
"""Three actions: `left`, an empty one, and `≤right`, whose first character has three bytes."""
GROUP: dict[str, Any] = {
    "type": "rollout",
    "task": {
        "id": "rg/chain_sum",
        "version": TASKS["rg/chain_sum"],
        "seed": 5 << 20,
        "index": 7,
    },
    "model": b"\x11" * 32,
    "tokenizer": b"\x22" * 32,
    "policy_version": 12,
    "created_at": 1_790_000_000_000,
    "sequence": 7,
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8},
    "completions": [
        COMPLETION,
        {**COMPLETION, "text": "8", "tokens": 8, "logprob": -9.5, "finish": "length"},
    ],
}
RULES: dict[str, Any] = {
    "min_completions": 2,
    "max_completions": 16,
    "max_tokens": 64,
    "temperature": 1.0,
    "top_p": 1.0,
    "groups_per_second": 16.0,
}
"""Rules of a manifest."""
PACKED = {
    "token_ids": struct.pack("<3I", 1, 2**32 - 1, 300),
    "logprobs": struct.pack("<3f", -0.5, -1.25, 0.0),
}


def pack(value: Any) -> bytes:
    return msgpack.packb(value)


def envelope(
    payload: bytes,
    codec: Any = "raw",
    key: Ed25519PrivateKey = KEY,
    domain: bytes = ids.DOMAIN_ROLLOUT,
    swarm: bytes = SWARM,
) -> dict[str, Any]:
    """Return the fields of a correctly signed envelope."""
    signed = sign(payload, key, domain, swarm, codec)
    return {
        "key": signed.key,
        "payload": signed.payload,
        "signature": signed.signature,
        "codec": signed.codec,
    }


def sealed(message: dict[str, Any] | bytes, codec: Any = "raw", **signed: Any) -> bytes:
    payload = message if isinstance(message, bytes) else pack(message)
    return pack(envelope(payload, codec, **signed))


SMALL_ORDER_KEYS = [
    key[:31] + bytes([key[31] | sign])
    for key in sorted(envelopes.SMALL_ORDER_KEYS)
    for sign in (0, 0x80)
]
"""All encodings of points whose order divides 8, with either sign of x: 32 bytes each."""
FORGED_SIGNATURE = b"\x01" + bytes(63)
"""R is the identity and S is 0. It verifies under a key A of small order if the hash of RFC 8032
(5.1.7) times A is the identity: for at least one message in eight."""
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
"""Order of Ed25519's base point."""


def is_forged(key: bytes, data: bytes) -> bool:
    """Return True if FORGED_SIGNATURE verifies `data` under the small-order `key`, for any order of
    the key."""
    hashed = hashlib.sha512(FORGED_SIGNATURE[:32] + key + data).digest()
    return int.from_bytes(hashed, "little") % GROUP_ORDER % 8 == 0


def changed(message: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of `message` with another value at a path such as `completions.0.tokens`."""
    result = copy.deepcopy(message)
    place: Any = result
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in parents:
        place = place[step]
    place[last] = value
    return result


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def pairs(fields: Sequence[tuple[Any, Any]]) -> bytes:
    """Return a msgpack map of up to 15 entries, in any order and with repeated keys."""
    return bytes([0x80 | len(fields)]) + b"".join(pack(key) + pack(value) for key, value in fields)


def zstd(blocks: bytes, declared: int | None, window: bytes = b"\x50") -> bytes:
    """Return a zstd frame around `blocks`: one segment of the `declared` size, or, if None, of
    unknown size with a window of 1 MiB."""
    header = b"\x00" + window if declared is None else b"\xe0" + struct.pack("<Q", declared)
    return b"\x28\xb5\x2f\xfd" + header + blocks


def raw_block(content: bytes, last: bool = True) -> bytes:
    return struct.pack("<I", len(content) << 3 | last)[:3] + content


def repeat_block(byte: bytes, times: int, last: bool = True) -> bytes:
    return struct.pack("<I", times << 3 | 1 << 1 | last)[:3] + byte


def parts(frame: bytes) -> list[list[Any]]:
    """Return `frame` as [hex, times] pairs; runs of more than 64 equal bytes are one pair."""
    result: list[list[Any]] = []
    for byte, group in itertools.groupby(frame):
        times = len(list(group))
        if times > 64 or not result or result[-1][1] > 1:
            result.append([f"{byte:02x}", times] if times > 64 else [f"{byte:02x}" * times, 1])
        else:
            result[-1][0] += f"{byte:02x}" * times
    return result


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def accepted(name: str, read_as: str, frame: bytes, value: Any) -> Vector:
    return {
        "name": name,
        "read_as": read_as,
        "verdict": "accept",
        "frame": parts(frame),
        "value": plain(value),
    }


def encoded(name: str, read_as: str, message: dict[str, Any]) -> Vector:
    return accepted(name, read_as, pack(message), message)


def rejected(
    reason: str, name: str, frame: bytes | dict[str, Any], read_as: str = "group"
) -> Vector:
    """Return the vector of a rejected frame. A message is packed."""
    return {
        "name": name,
        "read_as": read_as,
        "verdict": "reject",
        "reason": reason,
        "frame": parts(frame if isinstance(frame, bytes) else pack(frame)),
    }


def refusals(read_as: str, *rows: tuple[str, str, bytes | dict[str, Any]]) -> Iterator[Vector]:
    """Yield the rejected frames of rows of (reason, name, frame)."""
    for reason, name, frame in rows:
        yield rejected(reason, name, frame, read_as)


def derived(name: str, what: str, given: dict[str, Any], output: object) -> Vector:
    return {"name": name, "derive": what, "input": given, "output": output}
