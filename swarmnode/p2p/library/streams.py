"""One stream to a peer.

No cancel scope may be put around `read` and `write`: cancelled in the middle, py-libp2p burns a
Noise nonce or loses bytes that it has read, and the whole connection dies. Whoever wants to give up
has another task reset the stream, which wakes its reader and its writer (conversations.py does
that).
"""

from __future__ import annotations

import math

import trio

from swarmnode.errors import Incompatible, PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.circuits import relay_of
from swarmnode.p2p.library.errors import ignored_errors, peer_errors
from swarmnode.p2p.library.identifiers import address_of_socket
from swarmnode.p2p.library.objects import NetStream

READ_BYTES = 65536
MULTISTREAM = "/multistream/1.0.0"
SHORT = 126
"""Characters of a name whose length fits a byte in multistream-select, with the line's end."""
END_SECONDS = 30.0
"""Closing or resetting a stream is given up after this. The guards drop a connection that takes no
frame for half as long, so that this cuts no frame in two."""


class Stream:
    """`peer`: at its other end. Reading and writing raise PeerError when the stream has ended,
    however it did; ending it never raises.

    proposed: a protocol that was not negotiated yet. It is proposed together with the first that is
    written, and the peer's answer is read before the first that is read: one round trip instead of
    three, which counts between homes, and more where a line is full. Reading raises Incompatible
    where the peer does not speak it after all. Source: multistream-select's lazy form, as go-libp2p
    has it.
    """

    def __init__(self, stream: NetStream, proposed: str = "") -> None:
        self.peer = stream.muxed_conn.peer_id.to_base58()
        self._stream = stream
        self._doing = f"a stream of {self.peer}"
        self._unsaid = [MULTISTREAM, proposed] if proposed else []
        self._unheard = list(self._unsaid)

    @property
    def relay(self) -> str | None:
        """The relay through which its connection goes, None if that is direct."""
        return relay_of(self._stream.muxed_conn)

    @property
    def remote(self) -> Address | None:
        """Where its connection comes from or leads to; None for one through a relay."""
        return address_of_socket(self._stream.muxed_conn.get_remote_address())

    @property
    def is_gone(self) -> bool:
        """Whether the peer has reset it, or its connection is closed. The library calls that an
        end, too."""
        muxed = self._stream.muxed_stream
        return muxed.reset_received or muxed.conn.event_shutting_down.is_set()

    async def read(self, most: int = READ_BYTES) -> bytes:
        """At least one and at most `most` bytes. Raises StreamEnd when there will be no more."""
        with peer_errors(self._doing):
            if self._unsaid:
                await self._stream.write(self._proposal())
            while self._unheard:
                await self._hear(self._unheard.pop(0))
            return await self._stream.read(most)

    async def read_exactly(self, count: int) -> bytes:
        """`count` bytes. Raises PeerError if the stream ends before."""
        buffer = bytearray()
        while len(buffer) < count:
            buffer += await self.read(min(count - len(buffer), READ_BYTES))
        return bytes(buffer)

    async def write(self, data: bytes | memoryview) -> None:
        """Returns when `data` is on its way; waits for the peer's credit."""
        with peer_errors(self._doing):
            if self._unsaid:
                data = self._proposal() + bytes(data)
            await self._stream.write(data)  # type: ignore[arg-type]  # annotated as bytes, takes any buffer

    async def finish(self) -> None:
        """Tells the peer that this was all. It may still send."""
        with peer_errors(self._doing):
            if self._unsaid:
                await self._stream.write(self._proposal())
            await self._stream.close_write()

    def _proposal(self) -> bytes:
        said, self._unsaid = self._unsaid, []
        return b"".join(bytes([len(word) + 1]) + word.encode() + b"\n" for word in said)

    async def _hear(self, expected: str) -> None:
        """Reads one of the peer's words, which ought to be ours."""
        (length,) = await self._stream.read(1)
        word = bytearray()
        while len(word) < min(length, SHORT + 1):
            word += await self._stream.read(min(length, SHORT + 1) - len(word))
        if bytes(word) == b"na\n":
            raise Incompatible(f"{self._doing}: it does not speak {expected}")
        if bytes(word) != expected.encode() + b"\n":
            raise PeerError(f"{self._doing}: {bytes(word)!r} instead of {expected}")

    def wait_for_credit_for_ever(self) -> None:
        """A writer waits however long the peer reads nothing: whoever uses the stream watches
        that."""
        self._stream.muxed_stream.patience_seconds = math.inf

    def keep_connection(self) -> None:
        """What was asked for on it lasts, and is granted: the peer is not let go to make room while
        it does."""
        self._stream.muxed_stream.keeps_connection = True

    async def close(self) -> None:
        """Ends our side in order."""
        with (
            trio.CancelScope(shield=True),
            trio.move_on_after(END_SECONDS),
            ignored_errors("closing a stream"),
        ):
            await self._stream.close()

    async def reset(self) -> None:
        """Ends both sides at once and wakes whoever reads or writes (`guards/inbox.py` sees to our
        own reader)."""
        with (
            trio.CancelScope(shield=True),
            trio.move_on_after(END_SECONDS),
            ignored_errors("resetting a stream"),
        ):
            await self._stream.reset()
