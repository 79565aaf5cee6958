"""A TLS connection that ends before anybody has it: closed, and nothing is left to the garbage
collector."""

import contextlib
import gc
import socket
import ssl
import struct
import warnings

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.bulk import tls


def reset_connection() -> socket.socket:
    """A connection whose other end has reset it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
    return raw


def test_one_that_was_reset_before_the_handshake_is_closed():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    raw, refused = reset_connection(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tls.handshake(raw, context, (), server_side=False)
        except PeerError as error:
            refused = str(error)
        gc.collect()
    assert refused.startswith("the connection failed")
    assert raw.fileno() == -1
    assert not [each for each in caught if each.category is ResourceWarning]


async def test_a_connection_that_is_ready_after_its_caller_has_gone_is_discarded():
    ours, theirs = socket.socketpair()
    discarded = []

    def work() -> str:
        ours.recv(1)  # until it is shut down
        return "ready"

    with contextlib.ExitStack() as stack:
        control = stack.enter_context(ours.dup())
        stack.enter_context(ours)
        stack.enter_context(theirs)
        with trio.move_on_after(0) as scope:
            await tls.in_thread(control, trio.CapacityLimiter(1), work, discard=discarded.append)
    assert scope.cancelled_caught
    assert discarded == ["ready"]
