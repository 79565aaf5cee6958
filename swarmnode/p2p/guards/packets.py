"""Guard for libp2p/security/noise/io.py and security/secure_session.py: fewer and larger reads and
writes."""

import trio
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.io.utils import read_exactly
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.io import (
    MAX_PLAINTEXT_LENGTH,
    SIZE_NOISE_MESSAGE_LEN,
    NoiseTransportReadWriter,
)
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux import yamux as upstream

READ_BYTES = 256 * 1024
"""Bytes per read of the socket; a frame of this node's size arrives in one or two pieces."""


class Packets:
    """The Noise packets of one connection, read and written in bulk.

    Defect: A packet is read in at least two socket calls, and each byte is copied nine times on its
        way to the muxer. A frame of 256 KiB is written in five calls. A packet that arrives in more
        than a hundred pieces ends the connection.
    Upstream: security/noise/io.py
    Guard: The socket is read 256 KiB at a time and written a frame at a time, and packets are
        decrypted in place. Bulk data takes a seventh of the socket calls.
    Cost: Up to 64 KiB of memory while a packet is incomplete.
    Remove when: Upstream's Noise reads through a buffer.
    Tests: test_guards_packets.py
    """

    def __init__(self, transport: NoiseTransportReadWriter) -> None:
        self._raw = transport.read_writer.read_write_closer
        noise = transport.noise_state.noise_protocol
        self._decrypt = noise.cipher_state_decrypt.decrypt_with_ad
        self._encrypt = noise.cipher_state_encrypt.encrypt_with_ad
        self._sealed = memoryview(b"")
        self._plain = memoryview(b"")

    async def read(self, n: int | None = None) -> bytes:
        """Like `SecureSession.read`: exactly `n` bytes, or the available bytes for None. Raises
        IncompleteReadError at an early end."""
        if n == 0:
            return b""
        if not self._plain:
            self._plain = await self._packet()
        wanted = len(self._plain) if n is None else n
        parts: list[memoryview] = []
        while True:
            part, self._plain = self._plain[:wanted], self._plain[wanted:]
            parts.append(part)
            wanted -= len(part)
            if not wanted:
                return b"".join(parts)
            self._plain = await self._packet()

    async def write(self, data: bytes) -> None:
        """Like `SecureSession.write`."""
        view = memoryview(data)
        parts: list[bytes] = []
        for start in range(0, len(view), MAX_PLAINTEXT_LENGTH):
            sealed = self._encrypt(None, view[start : start + MAX_PLAINTEXT_LENGTH])
            parts += (len(sealed).to_bytes(SIZE_NOISE_MESSAGE_LEN, "big"), sealed)
        await self._raw.write(b"".join(parts))

    async def _packet(self) -> memoryview:
        """Return the content of the next packet, never empty."""
        while True:
            have = len(self._sealed) - SIZE_NOISE_MESSAGE_LEN
            length = int.from_bytes(self._sealed[:SIZE_NOISE_MESSAGE_LEN], "big")
            if have >= 0 and have >= length:
                end = SIZE_NOISE_MESSAGE_LEN + length
                packet, self._sealed = self._sealed[SIZE_NOISE_MESSAGE_LEN:end], self._sealed[end:]
                content = self._decrypt(None, packet)
                if not content:
                    raise ConnectionClosedError("an empty packet")
                return memoryview(content)
            rest = bytes(self._sealed)
            self._sealed = memoryview(rest)  # release the rest of the previous read while waiting
            more = await self._raw.read(READ_BYTES)
            if not more:
                raise IncompleteReadError("the connection ended", length, len(rest))
            self._sealed = memoryview(rest + more if rest else more)


def with_bulk_io(session: SecureSession) -> SecureSession:
    """Use `Packets` for the reads and writes of a session fresh from its handshake. Circuits are
    excluded, because they have a buffer."""
    transport = session.conn
    if isinstance(transport, NoiseTransportReadWriter) and isinstance(
        transport.read_writer.read_write_closer, RawConnection
    ):
        packets = Packets(transport)
        session.read, session.write = packets.read, packets.write  # type: ignore[method-assign]
    return session


def install() -> None:
    """Avoid two copies in `read_exactly` of frames that a session reads whole."""

    async def _read_data_body(self: upstream.Yamux, length: int) -> bytes:
        with trio.fail_after(upstream._yamux_data_read_timeout()):
            data = await self.secured_conn.read(length) if length else b""
            return (
                data
                if len(data) == length
                else data + await read_exactly(self.secured_conn, length - len(data))
            )

    upstream.Yamux._read_data_body = _read_data_body  # type: ignore[method-assign]
