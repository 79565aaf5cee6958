"""The requester's way to a socket: agree on a port and a token over libp2p, connect, prove who we
are, ask.

Until the answer has been read nothing was written to the sink, so whatever goes wrong here leaves
the libp2p stream to be used instead.
"""

from __future__ import annotations

import collections
import socket
import ssl
from collections.abc import Callable

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.api import Declined, Requests
from swarmnode.p2p.bulk import fetching, tls
from swarmnode.p2p.bulk.fetching import Pull
from swarmnode.p2p.bulk.listener import HANDSHAKE_SECONDS, blocking
from swarmnode.p2p.library.certificates import Contexts
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import BulkSocketRequest, BulkSocketResponse

AGREE_SECONDS = 10.0
CONNECT_SECONDS = 3.0
FORGET_SECONDS = 600.0
"""A peer whose port could not be reached is not tried again for this long."""
REMEMBERED = 1024
"""Peers of which that is known."""
FALLBACKS = ("off", "unreachable", "agree", "connect", "handshake")
"""Why a stream is used: no socket here, not reached a moment ago, not agreed on, no connection, not
admitted."""


class Fallback(Exception):
    """Raised when there will be no socket. `args[0]`: of FALLBACKS."""


class Calling:
    """`observed(peer)`: the address at which we see it. `contexts`: None if this node uses no
    sockets."""

    def __init__(
        self,
        requests: Requests,
        limiter: trio.CapacityLimiter,
        observed: Callable[[str], Address | None],
    ) -> None:
        self._requests = requests
        self._limiter = limiter
        self._observed = observed
        self._unreachable: collections.OrderedDict[str, float] = collections.OrderedDict()
        self.contexts: Contexts | None = None

    async def call(self, pull: Pull) -> tuple[socket.socket, ssl.SSLSocket]:
        """A second handle, and the connection, on which the wanted chunks follow. Raises Fallback,
        or Declined."""
        if self.contexts is None:
            raise Fallback("off")
        remote = self._observed(pull.peer)
        if remote is None or self._unreachable.get(pull.peer, float("-inf")) > trio.current_time():
            raise Fallback("unreachable")
        response = await self._agree(pull)
        raw, control = await self._connect(pull.peer, remote, response.port)
        try:
            with trio.move_on_after(HANDSHAKE_SECONDS):
                return control, await tls.in_thread(
                    control,
                    self._limiter,
                    self._introduce,
                    raw,
                    response.token,
                    pull,
                    discard=ssl.SSLSocket.close,
                )
            raise Fallback("handshake")
        except BaseException as error:
            control.close()
            if isinstance(error, PeerError) and not isinstance(error, Declined):
                raise Fallback("handshake") from error
            raise

    async def _agree(self, pull: Pull) -> BulkSocketResponse:
        try:
            data = await self._requests.request(
                pull.peer,
                ids.BULK_SOCKET_PROTOCOL,
                codec.encode(BulkSocketRequest(pull.transfer, pull.root)),
                deadline=AGREE_SECONDS,
                max_response_bytes=limits.BULK_SOCKET_RESPONSE_BYTES,
            )
            response = codec.decode(data, BulkSocketResponse, limits.BULK_SOCKET_RESPONSE_BYTES)
        except PeerError as error:
            raise Fallback("agree") from error
        if response.status != "ok":
            raise Declined(response.status)
        return response

    async def _connect(
        self, peer: str, remote: Address, port: int
    ) -> tuple[socket.socket, socket.socket]:
        """To the IP address at which we see the peer and no other: it chooses a port, not whom we
        call."""
        handle = trio.socket.socket(
            socket.AF_INET if remote.kind == "ip4" else socket.AF_INET6, socket.SOCK_STREAM
        )
        with handle, trio.move_on_after(CONNECT_SECONDS):
            try:
                await handle.connect((remote.host, port))
                return blocking(handle)
            except OSError:
                pass  # refused at once, or a network that is not there: as good as no answer
        self._unreachable[peer] = trio.current_time() + FORGET_SECONDS
        self._unreachable.move_to_end(peer)
        if len(self._unreachable) > REMEMBERED:
            self._unreachable.popitem(last=False)
        raise Fallback("connect")

    def _introduce(self, raw: socket.socket, token: bytes, pull: Pull) -> ssl.SSLSocket:
        """Blocks, in a thread. Raises PeerError; the connection is closed then."""
        assert self.contexts is not None
        connection, _ = tls.handshake(raw, self.contexts.client, (pull.peer,), server_side=False)
        try:
            fetching.open_socket(connection, token, pull)
            return connection
        except BaseException:
            connection.close()
            raise
