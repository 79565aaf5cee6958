"""TCP proxies that add latency between the demo's nodes, in both directions."""

from __future__ import annotations

import socket
import threading
from functools import partial

import trio

MAX_CHUNK_BYTES = 64 * 1024
MIN_CHUNK_BYTES = 1024
CHUNKS = 16
IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""Limit of the bytes in flight per direction. The throughput is at most this per one-way
latency."""


class DelayProxy:
    """Proxies to ports of this machine, served by a thread until `close`."""

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: One-way latency.
        """
        self._seconds = seconds
        self._targets: dict[int, socket.socket] = {}
        self._scope = trio.CancelScope()
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def add_proxy(self, target: int) -> int:
        """Return the port of a new proxy to 127.0.0.1:`target`. Call this before `open`."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._targets[target] = listener
        port: int = listener.getsockname()[1]
        return port

    def open(self) -> None:
        self._thread = threading.Thread(
            target=trio.run, args=(self._serve,), name="delay proxy", daemon=True
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
                        self._serve_port,
                        target,
                        trio.SocketListener(trio.socket.from_stdlib_socket(listener)),
                    )

    async def _serve_port(self, target: int, listener: trio.SocketListener) -> None:
        await trio.serve_listeners(partial(self._forward, target), [listener])

    async def _forward(self, target: int, near: trio.SocketStream) -> None:
        await trio.sleep(self._seconds)
        try:
            far = await trio.open_tcp_stream("127.0.0.1", target)
        except OSError:  # the node was killed
            await near.aclose()
            return
        await forward_delayed(near, far, self._seconds)


async def forward_delayed(
    near: trio.abc.HalfCloseableStream,
    far: trio.abc.HalfCloseableStream,
    seconds: float,
    in_flight: int = IN_FLIGHT_BYTES,
) -> None:
    """Forward bytes in both directions with a delay, until both directions have ended or one stream
    breaks. Close both streams.

    Args:
        seconds: One-way latency.
        in_flight: Limit of the bytes in flight per direction. In front of a slow link, more bytes
            than the link carries in `seconds` would only add a queue.
    """
    chunk = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, in_flight // CHUNKS))
    async with near, far, trio.open_nursery() as nursery:

        async def carry(source: trio.abc.ReceiveStream, sink: trio.abc.HalfCloseableStream) -> None:
            send, receive = trio.open_memory_channel[tuple[float, bytes]](
                max(1, in_flight // chunk)
            )
            try:
                async with trio.open_nursery() as both:
                    both.start_soon(_deliver, receive, sink)
                    while data := await source.receive_some(chunk):
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
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port
