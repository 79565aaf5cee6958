"""Any bytes of a stranger give a message or BadMessage, never another exception or much memory."""

import random
import struct
import subprocess
import sys
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.generate import frames, listing_vectors, neighbour_vectors
from swarmnode.errors import BadMessage
from swarmnode.wire import codec, limits
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import Envelope, NeighboursRequest, NeighboursResponse

MUTATIONS = 120_000
PACKED_GROUP = frames.changed(frames.GROUP, "completions.0", {**frames.COMPLETION, **frames.PACKED})
PLAYED_GROUP = frames.changed(frames.GROUP, "completions.1", frames.EPISODE)
PAYLOADS = [frames.pack(message) for message in (frames.GROUP, PACKED_GROUP, PLAYED_GROUP)]
MESSAGES = [
    (Envelope, frames.sealed(frames.GROUP)),
    (ListingRequest, frames.pack(listing_vectors.REQUEST)),
    (ListingResponse, frames.pack(listing_vectors.LISTING)),
    (GroupsRequest, frames.pack({"contents": [b"\x33" * 32]})),
    (GroupsResponse, frames.pack({"groups": [{"status": "ok", "body": b"body"}]})),
    (NeighboursRequest, frames.pack(neighbour_vectors.REQUEST)),
    (NeighboursResponse, frames.pack(neighbour_vectors.RESPONSE)),
]
HEADERS = bytes([0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0)])
"""First bytes of every kind of msgpack value, for effective mutations."""


def attempt(function, *arguments) -> bool:
    """Return True if the bytes were accepted. Any exception but BadMessage fails the test."""
    reason = None
    try:
        function(*arguments)
    except BadMessage as error:
        reason = error.reason
    assert reason in (None, *codec.DECODE_REASONS)
    return reason is None


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return `data` with one to four mutations."""
    wounded = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(wounded) + 1)
        kind = rng.randrange(6)
        if kind == 0:  # a bit
            wounded[place % len(wounded)] ^= 1 << rng.randrange(8)
        elif kind == 1:  # another kind of value
            wounded[place % len(wounded)] = rng.choice(HEADERS)
        elif kind == 2:  # missing
            del wounded[place : place + rng.randint(1, 8)]
        elif kind == 3:  # repeated
            wounded[place:place] = wounded[place : place + rng.randint(1, 64)]
        elif kind == 4:  # a number at its edge
            wounded[place : place + 9] = rng.choice((b"\xcf", b"\xd3", b"\xcb")) + rng.choice(
                (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7))
            )
        else:  # something from elsewhere
            start = rng.randrange(len(other))
            wounded[place:place] = other[start : start + rng.randint(1, 40)]
        if not wounded:
            wounded = bytearray(b"\x80")
    return bytes(wounded)


def test_mutated_payloads_are_refused_or_sound():
    rng = random.Random(1)
    accepted = 0
    for number in range(MUTATIONS * 2 // 3):
        payload = mutated(rng, PAYLOADS[number % 3], PAYLOADS[(number + 1) % 3])
        if number % 8 == 0:  # and through a compressor, whose output may be mutated too
            compressed = codec.compress(payload)
            envelope = Envelope(
                b"", mutated(rng, compressed, payload) if number % 16 else compressed, b"", "zstd"
            )
        else:
            envelope = Envelope(b"", payload, b"")
        accepted += attempt(codec.decode_payload, envelope)
    # some mutations only change values of texts or counters
    assert 200 < accepted < MUTATIONS // 10


def test_mutated_messages_are_refused_or_sound():
    rng = random.Random(2)
    for number in range(MUTATIONS // 3):
        kind, data = MESSAGES[number % len(MESSAGES)]
        attempt(codec.decode, mutated(rng, data, PAYLOADS[0]), kind, limits.GROUP_BYTES)


@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    assert not any([attempt(codec.decode, data, kind, 200) for kind, _ in MESSAGES])
    assert not attempt(codec.decode_payload, Envelope(b"", data, b""))
    assert not attempt(codec.decompress, data, 1000)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
PATHS = [
    "type",
    "task",
    "task.id",
    "task.seed",
    "task.index",
    "task.difficulty",
    "model",
    "policy_version",
    "created_at",
    "sequence",
    "sampling",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.max_tokens",
    "completions",
    "completions.1",
    "completions.0.text",
    "completions.0.tokens",
    "completions.0.logprob",
    "completions.0.finish",
    "completions.0.token_ids",
    "completions.0.logprobs",
    "completions.0.turns",
    "extra",
    "completions.0.extra",
]


@settings(max_examples=1500, derandomize=True, database=None, deadline=None)
@given(st.sampled_from(PATHS), VALUES)
def test_fuzzed_values_are_refused_or_round_trip(path, value):
    payload = msgpack.packb(frames.changed(frames.GROUP, path, value))
    envelope = Envelope(b"", payload, b"")
    if attempt(codec.decode_payload, envelope):
        assert codec.encode(codec.decode_payload(envelope)) == payload


# --------------------------------------------------------------------------------------------------
# memory

MEBIBYTE = 2**20
# a gigabyte in 32 KiB
ZEROS = b"".join(frames.repeat_block(b"\0", 2**17, last=i == 8191) for i in range(8192))
ENDLESS = frames.repeat_block(b"\0", 2**17, last=False) * 8192
HEAD = frames.pack(frames.GROUP).split(frames.pack("completions"))[0] + frames.pack("completions")
BOMBS = {
    "empty maps": (b"\xdd\x00\x0f\xff\x00" + b"\x80" * (MEBIBYTE - 300), "raw"),
    "empty maps for completions": (
        HEAD + b"\xdd\x00\x0f\xfc\x00" + b"\x80" * (MEBIBYTE - 1024),
        "raw",
    ),
    "nested arrays": (HEAD + b"\x91" * (MEBIBYTE - 1024), "raw"),
    "nested arrays in front of the tag": (
        b"\x82" + frames.pack("task") + b"\x91" * (MEBIBYTE - 1024),
        "raw",
    ),
    "10,000 completions": (HEAD + b"\xdc\x27\x10" + frames.pack(frames.COMPLETION) * 10_000, "raw"),
    "340,000 turns": (
        HEAD
        + b"\x91"
        + frames.pack(frames.COMPLETION)[:-1]
        + b"\xdd\x00\x05\x30\x20"
        + b"\x92\x00\x01" * 340_000,
        "raw",
    ),
    "a list of 4 billion": (HEAD + b"\xdd\xff\xff\xff\xff", "raw"),
    "a map of 4 billion": (
        b"\xdf\xff\xff\xff\xff" + frames.pack("type") + frames.pack("rollout"),
        "raw",
    ),
    "text of 4 GiB": (
        frames.pack(frames.GROUP).replace(frames.pack("rg/chain_sum"), b"\xdb\xff\xff\xff\xff"),
        "raw",
    ),
    "the same key 50,000 times": (
        b"\xdf\x00\x00\xc3\x50"
        + frames.pack("type")
        + frames.pack("rollout")
        + (frames.pack("sequence") + b"\x01") * 49_999,
        "raw",
    ),
    "a gigabyte, declared": (frames.zstd(ZEROS, 2**30), "zstd"),
    "a gigabyte, not declared": (frames.zstd(ZEROS, None), "zstd"),
    "a gigabyte that declares 1000 bytes": (frames.zstd(ZEROS, 1000), "zstd"),
    "a gigabyte that declares a mebibyte": (frames.zstd(ZEROS, MEBIBYTE), "zstd"),
    "a gigabyte that declares 1000 bytes and does not end": (frames.zstd(ENDLESS, 1000), "zstd"),
    "a gigabyte that declares a mebibyte and does not end": (
        frames.zstd(ENDLESS, MEBIBYTE),
        "zstd",
    ),
    "a window of a gigabyte": (
        b"\x28\xb5\x2f\xfd\xc0\xa0" + struct.pack("<Q", 1000) + frames.raw_block(bytes(1000)),
        "zstd",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_in_little_python_memory(name):
    payload, kind = BOMBS[name]
    envelope = Envelope(b"", payload, b"", kind)
    tracemalloc.start()
    try:
        assert not attempt(codec.decode_payload, envelope)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MEBIBYTE


def test_bombs_are_refused_in_little_memory_of_any_kind():
    """Includes the memory of C libraries: a child whose address space may grow by 32 MiB."""
    child = """
import resource, sys, msgpack
from swarmnode.errors import BadMessage
from swarmnode.wire import codec
from swarmnode.wire.messages import Envelope
bombs = msgpack.unpackb(sys.stdin.buffer.read())
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 32 * 2**20, -1))
for payload, kind in bombs:
    try:
        codec.decode_payload(Envelope(b"", payload, b"", kind))
    except BadMessage:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", child],
        input=msgpack.packb(list(BOMBS.values())),
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""
    assert done.stdout.split() == [b"refused"] * len(BOMBS)
