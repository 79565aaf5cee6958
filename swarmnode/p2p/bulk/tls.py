"""TLS 1.3 between two peer ids on a socket of its own, with libp2p's certificates, driven by a
thread.

Why not libp2p's own TLS transport: it reads 4 KiB at a time and feeds a muxer. Its certificates are
what is needed here, and an ordinary `ssl` socket around them decrypts straight into the memory
where the bytes belong, without the interpreter's lock, and ends by being shut down: real
cancellation, which a stream of a shared connection cannot have.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Container
from typing import TypeVar, TypeVarTuple

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.library.certificates import peer_of_certificate

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def handshake(
    raw: socket.socket, context: ssl.SSLContext, expected: Container[str], *, server_side: bool
) -> tuple[ssl.SSLSocket, str]:
    """Blocks. The TLS socket that took over `raw`, and the peer id at its other end; `raw` is
    closed if that fails.

    Raises PeerError unless there is a certificate, and it proves one of the `expected` peer ids.
    """
    try:
        # of one that is reset already, `wrap_socket` of Python 3.11 leaves its own socket to the
        # garbage collector
        raw.getpeername()
        tls = context.wrap_socket(raw, server_side=server_side, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:  # reset before we got here
        raw.close()
        raise PeerError(f"the connection failed: {error}") from error
    try:
        tls.do_handshake()
        peer = peer_of(tls)
        if peer not in expected:
            raise PeerError(f"{peer} was not expected")
        return tls, peer
    except BaseException as error:
        tls.close()
        if isinstance(error, (OSError, ValueError)):  # ssl.SSLError is an OSError
            raise PeerError(f"the handshake failed: {error}") from error
        raise


def peer_of(tls: ssl.SSLSocket) -> str:
    """The peer id that the other side's certificate proves. Raises PeerError."""
    encoded = tls.getpeercert(True)
    if not encoded:
        raise PeerError("no certificate")
    return peer_of_certificate(encoded)


def receive_exactly(tls: ssl.SSLSocket, count: int) -> bytes:
    """Blocks. Raises PeerError when the connection ends before."""
    buffer = bytearray(count)
    fill(tls, memoryview(buffer), lambda more: None)
    return bytes(buffer)


def fill(tls: ssl.SSLSocket, view: memoryview, moved: Callable[[int], None]) -> None:
    """Blocks until all of `view` is received; tells `moved` of every part. Raises PeerError when
    the connection ends before."""
    filled, size = 0, len(view)
    try:
        while filled < size:
            count = tls.recv_into(view[filled:], size - filled)
            if not count:
                raise PeerError("the connection ended early")
            filled += count
            moved(count)
    except OSError as error:
        raise PeerError(f"the connection failed: {error}") from error


def send(tls: ssl.SSLSocket, data: bytes | memoryview) -> None:
    """Blocks until `data` is handed to the kernel. Raises PeerError."""
    try:
        tls.sendall(data)
    except OSError as error:
        raise PeerError(f"the connection failed: {error}") from error


def shut_down(control: socket.socket) -> None:
    """Ends whatever a thread does on the connection of which `control` is another handle."""
    try:
        control.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is not connected any more, so nobody waits on it


async def in_thread(
    control: socket.socket,
    limiter: trio.CapacityLimiter,
    work: Callable[[*Ts], T],
    *args: *Ts,
    discard: Callable[[T], None] = lambda result: None,
) -> T:
    """`work(*args)` in a thread; when cancelled, shuts the connection down, which ends the work,
    and waits for that.

    control: a second handle of the socket that `work` uses, so that no thread closes what another
    one reads. discard: takes a result that came too late.
    """
    result: list[T] = []
    error: list[Exception] = []
    done = trio.Event()

    async def run() -> None:
        try:
            with trio.CancelScope(shield=True):
                result.append(await trio.to_thread.run_sync(work, *args, limiter=limiter))
        except Exception as raised:  # noqa: BLE001
            error.append(raised)
        done.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            try:
                await done.wait()
            finally:
                if not done.is_set():
                    shut_down(control)
    except BaseException:  # cancelled, which comes out of a nursery in a group
        for late in result:
            discard(late)
        raise
    if error:
        raise error[0]
    return result[0]
