"""Vectors with one fault each, made of what every node accepts: a value of another type or out of
its range, a field more, less or in another place, a byte more or less.

The faults that only one message can have are in its own file of vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from protocol.generate.frames import SWARM, Vector, pack, rejected, sealed
from swarmnode.wire import ids
from swarmnode.wire.manifest import manifest_id

SIGNED = {
    "group": ids.DOMAIN_ROLLOUT,
    "manifest": ids.DOMAIN_MANIFEST,
    "session": ids.DOMAIN_SESSION,
    "summary": ids.DOMAIN_SUMMARY,
}
"""Kinds whose message is the payload of an envelope, with the domain of its signature."""
HEADED = {"stage_frame", "state_message"}
"""Kinds whose message is a header after its length, before a body."""
ANY_LENGTH = {
    "body",
    "manifest",
    "session",
    "sessions",
    "successor",
    "summaries",
    "summary",
    "wanted",
}
"""Byte strings without a fixed length."""
LARGEST = 4096
"""Longest frame that is varied. The largest messages differ only in size."""


def faults(vectors: list[Vector]) -> Iterator[Vector]:
    """Yield faulty variants of the first accepted vector of each message."""
    seen = set()
    for vector in vectors:
        if vector.get("verdict") != "accept" or "read_as" not in vector:
            continue
        frame = b"".join(bytes.fromhex(part) * times for part, times in vector["frame"])
        if len(frame) > LARGEST or vector["read_as"] == "stage_stream_open":
            continue
        if vector["value"].get("codec") == "zstd":
            continue
        payload, wrap = _unwrapped(vector["read_as"], frame)
        message = msgpack.unpackb(payload)
        kind = (vector["read_as"], message.get("type"))
        if kind in seen:
            continue
        seen.add(kind)
        context = {"given": vector["given"]} if "given" in vector else {}
        for reason, what, data in _variants(payload, message):
            if not data and vector["read_as"] in HEADED:
                continue  # a header of no bytes is refused by its length
            name = f"{vector['name']}: {what}"
            yield {**rejected(reason, name, wrap(data), vector["read_as"]), **context}


def _unwrapped(kind: str, frame: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Return the message in a frame, and a function that puts another one in its place."""
    if kind in HEADED:
        end = 4 + int.from_bytes(frame[:4], "big")
        return frame[4:end], lambda data: struct.pack(">I", len(data)) + data + frame[end:]
    if kind not in SIGNED:
        return frame, lambda data: data

    def seal(data: bytes) -> bytes:
        swarm = manifest_id(data) if kind == "manifest" else SWARM
        return sealed(data, envelope["codec"], domain=SIGNED[kind], swarm=swarm)

    envelope = msgpack.unpackb(frame)
    return envelope["payload"], seal


def _variants(payload: bytes, message: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Yield (reason, fault, bytes) of each variant of a message."""
    fields = list(message.items())
    header = len(fields)
    yield "malformed", "nothing", b""
    yield "malformed", "cut short", payload[:-1]
    yield "malformed", "a byte behind it", payload + b"\0"
    if "type" not in message:
        long = struct.pack(">BH", 0xDE, header) + payload[1:]
        yield "malformed", "a header that is too long", long
    if header > 1:
        shortest = min(fields, key=lambda field: len(pack(field)))
        yield "malformed", "a field twice", _map([*fields, shortest])
    yield "schema", "a field more", _map([*fields, ("extra", 1)])
    first = "type" in message and header > 1
    yield "schema", "a field less", _map([*fields[:first], *fields[first + 1 :]])
    if header > 2:
        yield "malformed", "two fields exchanged", _map([*fields[:-2], fields[-1], fields[-2]])
    if "type" in message and header > 1:
        yield "schema", "its type behind", _map([*fields[1:], fields[0]])
    for path, reason, what, value in _wrong_values(message):
        yield reason, f"{'.'.join(map(str, path))} {what}", pack(_replaced(message, path, value))


def _map(fields: list[tuple[str, Any]]) -> bytes:
    return bytes([0x80 | len(fields)]) + b"".join(pack(key) + pack(item) for key, item in fields)


Path = tuple[str | int, ...]


def _wrong_values(value: Any, path: Path = ()) -> Iterator[tuple[Path, str, str, Any]]:
    """Yield (path, reason, fault, wrong value) for each value in a message. Of a list, only the
    first element varies."""
    name = next((step for step in reversed(path) if isinstance(step, str)), "")
    match value:
        case dict():
            if path:
                yield path, "schema", "as an array", list(value.values())
                yield path, "schema", "with a field more", {**value, "extra": 1}
            for key, item in value.items():
                yield from _wrong_values(item, (*path, key))
        case list():
            yield path, "schema", "as a map", {}
            is_row = any(type(item) is not type(value[0]) for item in value)
            for index, item in enumerate(value if is_row else value[:1]):
                yield from _wrong_values(item, (*path, index))
        case bool():
            yield path, "schema", "as an integer", int(value)
        case int():
            yield path, "bounds", "of -1", -1
            yield path, "bounds", "of 2**63", 2**63
            yield path, "schema", "as a float", float(value)
        case float():
            yield path, "not_finite", "of NaN", float("nan")
            yield path, "not_finite", "of infinity", float("inf")
            yield path, "malformed", "as an integer", int(value)
        case bytes():
            yield path, "schema", "as text", "text"
            if name not in ANY_LENGTH:
                yield path, "bounds", "with a byte more", value + b"\0"
        case str():
            yield path, "schema", "as bytes", value.encode()


def _replaced(message: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copy = dict(message) if isinstance(message, dict) else list(message)
    copy[path[0]] = _replaced(message[path[0]], path[1:], value)
    return copy
