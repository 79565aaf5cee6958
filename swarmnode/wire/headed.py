"""Messages with bodies on a stream: u32be header length ‖ header (canonical msgpack) ‖ body. The
header determines the length of the body.

No number from a peer is used as an allocation size without a check: the header is bounded before it
is read, and its decoder bounds the length of the body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.wire import strict

T = TypeVar("T")
READ_BYTES: Final = 1024 * 1024
"""Maximum size of one read."""


class Reader(Protocol):
    async def receive_some(self, max_bytes: int | None = None) -> bytes: ...


def pack(header: msgspec.Struct, body: bytes | memoryview = b"") -> bytes:
    head = strict.encode(header)
    return len(head).to_bytes(4, "big") + head + body


async def read_header(stream: Reader, decode: Callable[[bytes], T], most: int) -> T | None:
    """Read the next header of at most `most` bytes and decode it; None at the end of the stream.

    Raises:
        BadMessage: `oversize`, `truncated`, or a reason of `decode`.
    """
    prefix = await read_exactly(stream, 4, at_start=True)
    if prefix is None:
        return None
    length = int.from_bytes(prefix, "big")
    if not 0 < length <= most:
        raise BadMessage("oversize", f"a header of {length} bytes")
    return decode(await read_exactly(stream, length) or b"")


async def read_exactly(stream: Reader, count: int, at_start: bool = False) -> bytes | None:
    """Read `count` bytes; None at the end of the stream if `at_start` allows it. Raises
    BadMessage("truncated")."""
    data = bytearray()
    while len(data) < count:
        some = await stream.receive_some(min(count - len(data), READ_BYTES))
        if not some:
            if at_start and not data:
                return None
            raise BadMessage("truncated", f"{len(data)} of {count} bytes")
        data += some
    return bytes(data)
