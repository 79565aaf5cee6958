"""Location of the Unix socket between trainer and network process, and framing of its messages.

frame = length (u32, big-endian) ‖ msgpack of one message
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from swarmnode.files import socket_address
from swarmnode.link.messages import FRAME_BYTES, ToNetwork, ToTrainer

Message = TypeVar("Message")
SOCKET = "run/link.sock"
"""Path below the data directory."""

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
to_network: msgspec.msgpack.Decoder[ToNetwork] = msgspec.msgpack.Decoder(ToNetwork)
to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


class FrameError(Exception):
    """Raised for an invalid frame; the connection is closed and opened again."""


def socket_path(data_dir: Path) -> tuple[str, int | None]:
    """Return the address of the link's socket, and a descriptor to close afterwards. Raises
    Unavailable; see `files.socket_address`."""
    return socket_address(data_dir / SOCKET)


def pack(message: ToNetwork | ToTrainer) -> bytes:
    """Encode a message as a frame. Raises FrameError if it is longer than FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class Unpacker(Generic[Message]):
    """Decodes messages from received bytes, in either direction.

    Args:
        decoder: `to_network` or `to_trainer`.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages completed by `data`. Raises FrameError for an oversized or
        undecodable frame."""
        self._pending += data
        messages = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._pending[_LENGTH.size : end])))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise FrameError(str(error)) from None
            del self._pending[:end]
        return messages
