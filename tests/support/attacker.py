"""A libp2p client made of sockets, Noise and hand-packed frames. It can send bytes that no library
would send.

    async with attacker.connect(address) as peer:  # TCP, multistream, Noise, Yamux
        stream = await peer.open("/test/echo/1")   # SYN and protocol negotiation
        await stream.send(b"…"); await stream.receive(3)
        # any Yamux frame, also beyond the window
        await peer.frame(DATA, stream.id, body=…, flags=FIN)

The client shares no muxer code with py-libp2p, so it behaves the same with and without the guards
in this process.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import AsyncIterator

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.secure_session import SecureSession

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
MESHSUB = "/meshsub/1.1.0"
GRAFT = b"\x0a\x1a\x08\x1a\x06\x0a\x04test"
"""One GossipSub frame: an RPC whose control message grafts the topic `test`."""
HEADER = struct.Struct("!BBHII")
WINDOW = 256 * 1024


def varint(value: int) -> bytes:
    """Encode `value` as unsigned LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def line(text: str) -> bytes:
    """Encode one multistream-select message."""
    return varint(len(text) + 1) + text.encode() + b"\n"


async def _read_line(read) -> str:
    size = 0
    for shift in range(0, 21, 7):
        byte = (await read(1))[0]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return (await read(size)).decode().strip()


async def select(read, write, protocol: str) -> None:
    """Negotiate `protocol`. Raise ConnectionError when the other side does not support it."""
    await write(line("/multistream/1.0.0") + line(protocol))
    if (
        await _read_line(read) != "/multistream/1.0.0"
        or (answer := await _read_line(read)) != protocol
    ):
        raise ConnectionError(f"no {protocol}: {answer}")


class Stream:
    """One Yamux stream. credit: bytes that the other side still allows this side to send."""

    def __init__(self, peer: Peer, stream_id: int) -> None:
        self.peer, self.id = peer, stream_id
        self.credit = WINDOW
        self.ended = self.was_reset = False
        self._buffer = bytearray()
        self._changed = trio.Event()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def send(self, data: bytes, until_ended: bool = False) -> None:
        """Send `data` as an honest peer does: wait for credit.

        Args:
            until_ended: Stop when the other side has closed its half and grants no credit.

        Raises:
            ConnectionError: The stream was reset.
        """
        view = memoryview(data)
        while view:
            while not self.credit:
                if self.was_reset:
                    raise ConnectionResetError("stream reset")
                if until_ended and self.ended:
                    return
                await self._changed.wait()
            part = view[: min(self.credit, 64 * 1024)]
            self.credit -= len(part)
            await self.peer.frame(DATA, self.id, body=bytes(part))
            view = view[len(part) :]

    async def receive(self, size: int) -> bytes:
        """Return exactly `size` bytes. Raise ConnectionError when the stream ends earlier."""
        while len(self._buffer) < size:
            if self.was_reset or self.ended or self.peer.lost.is_set():
                raise ConnectionResetError(
                    f"the stream ended after {len(self._buffer)} of {size} bytes"
                )
            await self._changed.wait()
        out = bytes(self._buffer[:size])
        del self._buffer[:size]
        return out

    async def close(self) -> None:
        await self.peer.frame(WINDOW_UPDATE, self.id, flags=FIN)


class Peer:
    """The test's end of one Yamux connection. generous: grant credit for received data; otherwise
    the reader appears paused."""

    def __init__(self, session) -> None:
        self.session = session
        self.streams: dict[int, Stream] = {}
        self.lost = trio.Event()
        self.generous = True
        self.window_updates = 0
        self._next = 1
        self._lock = trio.Lock()

    async def frame(
        self,
        kind: int,
        stream_id: int,
        *,
        flags: int = 0,
        length: int | None = None,
        body: bytes = b"",
    ) -> None:
        """Send one frame as given. `length` defaults to the length of `body`."""
        async with self._lock:
            await self.session.write(
                HEADER.pack(0, kind, flags, stream_id, len(body) if length is None else length)
                + body
            )

    async def syn(self, stream_id: int | None = None) -> Stream:
        """Open a stream without negotiation."""
        if stream_id is None:
            stream_id, self._next = self._next, self._next + 2
        stream = self.streams[stream_id] = Stream(self, stream_id)
        await self.frame(WINDOW_UPDATE, stream_id, flags=SYN)
        return stream

    async def open(self, protocol: str) -> Stream:
        """Open a stream and negotiate `protocol`."""
        stream = await self.syn()
        await select(stream.receive, stream.send, protocol)
        return stream

    async def pump(self) -> None:
        """Read frames until the connection is lost."""
        try:
            while True:
                _, kind, flags, stream_id, length = HEADER.unpack(await self._exactly(HEADER.size))
                body = await self._exactly(length) if kind == DATA and length else b""
                await self._take(kind, flags, stream_id, length, body)
        except (Exception, trio.Cancelled):
            self.lost.set()
            for stream in self.streams.values():
                stream.was_reset = True
                stream._wake()
            raise

    async def _exactly(self, size: int) -> bytes:
        out = b""
        while len(out) < size:
            out += await self.session.read(size - len(out))
        return out

    async def _take(self, kind: int, flags: int, stream_id: int, length: int, body: bytes) -> None:
        if kind == PING and flags & SYN:
            await self.frame(PING, 0, flags=ACK, length=length)
        if kind not in (DATA, WINDOW_UPDATE):
            return
        if flags & SYN:
            self.streams[stream_id] = Stream(self, stream_id)
            await self.frame(WINDOW_UPDATE, stream_id, flags=ACK)
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if kind == WINDOW_UPDATE:
            stream.credit += length
            self.window_updates += length > 0
        stream._buffer += body
        stream.ended |= bool(flags & FIN)
        stream.was_reset |= bool(flags & RST)
        stream._wake()
        if body and self.generous:
            await self.frame(WINDOW_UPDATE, stream_id, length=len(body))


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of `/ip4/…/tcp/…`."""
    parts = address.split("/")
    return parts[2], int(parts[4])


@contextlib.asynccontextmanager
async def agreed(
    address: str, protocol: str, *, source: str | None = None
) -> AsyncIterator[RawConnection]:
    """Connect by TCP and agree on the security `protocol`. Raise ConnectionError when the other
    side does not support it."""
    host, port = endpoint(address)
    async with await trio.open_tcp_stream(host, port, local_address=source) as tcp:
        raw = RawConnection(TrioTCPStream(tcp), True)

        async def exactly(size: int) -> bytes:
            out = b""
            while len(out) < size:
                with contextlib.suppress(IOException):
                    out += (part := await raw.read(size - len(out)))
                    if part:
                        continue
                raise ConnectionResetError("closed during the handshake")
            return out

        await select(exactly, raw.write, protocol)
        yield raw


@contextlib.asynccontextmanager
async def secured(address: str, *, source: str | None = None) -> AsyncIterator[SecureSession]:
    """Open a connection with TCP and Noise only."""
    async with agreed(address, "/noise", source=source) as raw:
        keys = create_new_key_pair(os.urandom(32))
        pattern = PatternXX(
            ID.from_pubkey(keys.public_key), keys.private_key, create_noise_key().private_key
        )
        yield await pattern.handshake_outbound(raw, None)


@contextlib.asynccontextmanager
async def connect(
    address: str, *, source: str | None = None, seconds: float = 60.0
) -> AsyncIterator[Peer]:
    """Yield a connected `Peer`. seconds: limit of the handshake. On exit the socket closes without
    a goodbye."""
    async with contextlib.AsyncExitStack() as stack:
        with trio.fail_after(seconds):
            session = await stack.enter_async_context(secured(address, source=source))
            await select(session.read, session.write, "/yamux/1.0.0")
        peer = Peer(session)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(_pump, peer)
        yield peer


async def _pump(peer: Peer) -> None:
    with contextlib.suppress(Exception):
        await peer.pump()
