"""Length-prefixed frames out of a libp2p stream, in as few reads as they need."""

from libp2p.abc import INetStream
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge

READ_BYTES = 64 * 1024
"""Asked of the stream at once."""
LENGTH_BYTES = 10
"""The longest varint of 64 bits."""


class Frames:
    """The frames of one stream, each of at most `limit` bytes; nobody else may read from it.

    Defect: utils/varint.py `read_varint_prefixed_bytes_limited` reads a length byte by byte: three
    reads for a message, each of which takes the connection's locks and three turns of the
    scheduler. Here: what has arrived is read at once. Cost: up to `READ_BYTES` of memory. Not
    needed any more when a stock reader takes a frame of 2 KiB in two reads.
    """

    def __init__(self, stream: INetStream, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._buffer = bytearray()

    async def read(self) -> bytes:
        """The next frame. Raises ParseError for a length that is no varint, MessageTooLarge before
        its body is read, IncompleteReadError or what the stream raises for its end."""
        while (start := self._prefix()) == 0:
            await self._more(1)
        size = _value(self._buffer[:start])
        if size > self._limit:
            raise MessageTooLarge(f"{size} bytes announced, {self._limit} allowed")
        while len(self._buffer) < start + size:
            await self._more(start + size - len(self._buffer))
        frame = bytes(self._buffer[start : start + size])
        del self._buffer[: start + size]
        return frame

    def _prefix(self) -> int:
        """Bytes of the length at the front; 0 if it is not all there."""
        for index, byte in enumerate(self._buffer[:LENGTH_BYTES]):
            if byte < 0x80:
                return index + 1
        if len(self._buffer) >= LENGTH_BYTES:
            raise ParseError("a length of more than 64 bits")
        return 0

    async def _more(self, wanted: int) -> None:
        part = await self._stream.read(max(wanted, READ_BYTES))
        if not part:
            raise IncompleteReadError("the stream ended", wanted, len(self._buffer))
        self._buffer += part


def _value(prefix: bytes | bytearray) -> int:
    return sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(prefix))
