"""Every number, and every byte string of fixed length, in messages between nodes has a bound. Each
is moved out of bounds in each vector.

The checks are tables of names (`wire.fields.check_fields`), so a new field without an entry would
not be checked.
"""

import functools
import json
from pathlib import Path

import msgspec
import pytest
import trio

from swarmnode.errors import BadMessage
from swarmnode.stages import wire
from swarmnode.stages.wire import FrameLimits, read_frame, read_state
from swarmnode.weights.messages import decode_message, decode_state
from tests.support.stage_reading import Bytes

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors"
LIMITS = FrameLimits(hidden=4, vocab=50, tokens=64)
STREAMS = {
    "stage_frame": functools.partial(read_frame, limits=LIMITS),
    "state_message": functools.partial(read_state, limits=LIMITS),
}
READERS = {
    "crews_request": wire.decode_request,
    "crews_answer": wire.decode_answer,
    "weights": decode_message,
    "weights_state": decode_state,
}
FREE = {"manifest"}
"""Byte strings without a fixed length: envelopes, which are checked separately."""


def header_of(vector):
    frame = b"".join(bytes.fromhex(part) * times for part, times in vector["frame"])
    return (
        frame[4 : 4 + int.from_bytes(frame[:4], "big")] if vector["read_as"] in STREAMS else frame
    )


def read(read_as, header):
    if read_as in STREAMS:
        trio.run(STREAMS[read_as], Bytes(len(header).to_bytes(4, "big") + header))
    else:
        READERS[read_as](header)


def moved(value, name=""):
    """Yield (field name, `value` with one leaf out of bounds, expected reason) for every leaf that
    is a number or bytes."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            for path, other, reason in moved(
                item, f"{name}.{key}" if isinstance(key, str) else name
            ):
                copy = dict(value) if isinstance(value, dict) else list(value)
                copy[key] = other
                yield path, copy, reason
    elif isinstance(value, bytes):
        yield name, value + b"\0", "bounds"
    elif isinstance(value, float):
        yield name, float("nan"), "not_finite"
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, -1, "bounds"
        yield name, 2**63, "bounds"


def accepted():
    for file in ("crews.json", "stages.json", "state.json", "weights.json"):
        for vector in json.loads((VECTORS / file).read_text())["vectors"]:
            if vector.get("read_as") in {*STREAMS, *READERS} and vector["verdict"] == "accept":
                yield pytest.param(vector, id=vector["name"])


@pytest.mark.parametrize("vector", list(accepted()))
def test_every_number_and_length_has_a_bound(vector):
    for path, message, reason in moved(msgspec.msgpack.decode(header_of(vector))):
        if path.rpartition(".")[2] in FREE:
            continue
        with pytest.raises(BadMessage) as caught:
            read(vector["read_as"], msgspec.msgpack.encode(message))
        assert caught.value.reason == reason, path
