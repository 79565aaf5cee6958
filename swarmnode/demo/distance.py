"""What lies between nodes that are far apart: whatever is sent to a node's address arrives so much
later, and so do its answers."""

from __future__ import annotations

import socket
import threading
from functools import partial

import trio

CHUNK_BYTES = 64 * 1024
LEAST_CHUNK_BYTES = 1024
CHUNKS = 16
UNDER_WAY_BYTES = 16 * 1024 * 1024
"""On their way at once in one direction, at most; so much per delay goes through."""


class Distance:
    """Lines to ports of this machine, served by a thread until `close`."""

    def __init__(self, seconds: float) -> None:
        """seconds: of each direction."""
        self._seconds = seconds
        self._targets: dict[int, socket.socket] = {}
        self._scope = trio.CancelScope()
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def line_to(self, target: int) -> int:
        """The port of a new line to 127.0.0.1:`target`. Not after `open`."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._targets[target] = listener
        port: int = listener.getsockname()[1]
        return port

    def open(self) -> None:
        self._thread = threading.Thread(
            target=trio.run, args=(self._serve,), name="distance", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None and self._token is not None:
            self._token.run_sync_soon(self._scope.cancel)
            self._thread.join()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:
                for target, listener in self._targets.items():
                    nursery.start_soon(
                        self._line,
                        target,
                        trio.SocketListener(trio.socket.from_stdlib_socket(listener)),
                    )

    async def _line(self, target: int, listener: trio.SocketListener) -> None:
        await trio.serve_listeners(partial(self._connected, target), [listener])

    async def _connected(self, target: int, near: trio.SocketStream) -> None:
        await trio.sleep(self._seconds)
        try:
            far = await trio.open_tcp_stream("127.0.0.1", target)
        except OSError:  # who is killed listens no more
            await near.aclose()
            return
        await join(near, far, self._seconds)


async def join(
    near: trio.abc.HalfCloseableStream,
    far: trio.abc.HalfCloseableStream,
    seconds: float,
    under_way: int = UNDER_WAY_BYTES,
) -> None:
    """Carries bytes both ways, each `seconds` late, until both directions have ended or one end
    breaks; closes both. under_way: bytes at most, each way; before a slow line, more than go
    through it in that time would only wait here."""
    longest = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, under_way // CHUNKS))
    async with near, far, trio.open_nursery() as nursery:

        async def carry(source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream) -> None:
            send, receive = trio.open_memory_channel[tuple[float, bytes]](
                max(1, under_way // longest)
            )
            try:
                async with trio.open_nursery() as both:
                    both.start_soon(_deliver, receive, sink)
                    while data := await source.receive_some(longest):
                        await send.send((trio.current_time() + seconds, bytes(data)))
                    await send.send((trio.current_time() + seconds, b""))
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()

        nursery.start_soon(carry, near, far)
        nursery.start_soon(carry, far, near)


async def _deliver(
    chunks: trio.MemoryReceiveChannel[tuple[float, bytes]], sink: trio.abc.HalfCloseableStream
) -> None:
    async for due, data in chunks:
        await trio.sleep_until(due)
        if not data:
            await sink.send_eof()
            return
        await sink.send_all(data)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port
