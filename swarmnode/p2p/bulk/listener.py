"""The listening side of the TLS connections: who may come in, how many at a time, for how long.

    token issued over libp2p ─▶ connection accepted (16 at a time, 4 of one address) ─▶ handshake,
    token and request within 5 s
                             ─▶ the peer id of the certificate is one that has a token, and the
                             token is its own, for this transfer, unused

Whatever is wrong, the connection is closed without a word.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable

import trio

from swarmnode.errors import PeerError, Unavailable
from swarmnode.p2p.addresses import Address, from_socket
from swarmnode.p2p.bulk import tls
from swarmnode.p2p.conversations import LENGTH
from swarmnode.p2p.library.certificates import Contexts
from swarmnode.wire import codec, limits
from swarmnode.wire.messages import BulkRequest

log = logging.getLogger(__name__)

HANDSHAKES = 16
HANDSHAKES_PER_ADDRESS = 4
HANDSHAKE_SECONDS = 5.0
TOKEN_SECONDS = 30.0
TOKENS = 256
TOKENS_PER_PEER = 4
"""An older one makes room."""
ATTEMPTS = 8
"""To find a port that is free at every address."""
OUTCOMES = ("ok", "crowded", "late", "refused", "token")
"""How inbound connections end, up to the token; `refused`: the handshake failed, or showed a peer
id that nobody waits for."""


class Tokens:
    """One-time tokens, each for one peer and one transfer. Pure: `now` in seconds, any clock. `peer
    in tokens` is safe from threads."""

    def __init__(self, random: Callable[[int], bytes] = os.urandom) -> None:
        self._random = random
        self._granted: collections.OrderedDict[bytes, tuple[str, bytes, float]] = (
            collections.OrderedDict()
        )
        self._peers: collections.Counter[str] = collections.Counter()

    def issue(self, peer: str, transfer: bytes, now: float) -> bytes:
        self._expire(now)
        if self._peers[peer] >= TOKENS_PER_PEER:
            self._drop(
                next(token for token, (owner, _, _) in self._granted.items() if owner == peer)
            )
        if len(self._granted) >= TOKENS:
            self._drop(next(iter(self._granted)))
        token = self._random(limits.TOKEN_BYTES)
        self._granted[token] = (peer, transfer, now + TOKEN_SECONDS)
        self._peers[peer] += 1
        return token

    def redeem(self, token: bytes, peer: str, transfer: bytes, now: float) -> bool:
        """Whether `token` was given to `peer` for `transfer`, lately, and not used yet; it is
        now."""
        self._expire(now)
        if token not in self._granted:
            return False
        owner, granted, _ = self._granted[token]
        self._drop(token)
        return owner == peer and granted == transfer

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._granted)

    def _expire(self, now: float) -> None:
        while self._granted and next(iter(self._granted.values()))[2] <= now:
            self._drop(next(iter(self._granted)))

    def _drop(self, token: bytes) -> None:
        peer = self._granted.pop(token)[0]
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]


@dataclasses.dataclass(frozen=True)
class Caller:
    """A connection that showed a peer id, a token and a request; whether the token is worth
    anything is not known yet."""

    peer: str
    connection: ssl.SSLSocket
    token: bytes
    request: BulkRequest


Serve = Callable[[Caller, socket.socket], Awaitable[None]]
"""Serves a caller whose token was good; the socket is a second handle of its connection."""


class TlsListener:
    """`serve`: called in a task of its own; must not raise. `limiter`: threads."""

    def __init__(
        self, contexts: Contexts, tokens: Tokens, serve: Serve, limiter: trio.CapacityLimiter
    ) -> None:
        self._contexts = contexts
        self._tokens = tokens
        self._serve = serve
        self._limiter = limiter
        self._open: collections.Counter[str] = collections.Counter()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.port = 0

    async def start(self, nursery: trio.Nursery, addresses: list[Address], port: int) -> None:
        """Listens at the IPs of `addresses`, all on one port; 0 takes a free one. Raises
        Unavailable."""
        listeners, self.port = await _listen(sorted({address.host for address in addresses}), port)
        nursery.start_soon(functools.partial(trio.serve_listeners, self._accepted, listeners))

    async def _accepted(self, stream: trio.SocketStream) -> None:
        """One connection. Never raises; its sockets are closed at the end."""
        try:
            address = from_socket(*stream.socket.getpeername()[:2]).host
        except OSError:
            return await stream.aclose()
        if self._open.total() >= HANDSHAKES or self._open[address] >= HANDSHAKES_PER_ADDRESS:
            self.outcomes["crowded"] += 1
            return await stream.aclose()
        raw, control = blocking(stream.socket)
        with control:
            self._open[address] += 1
            try:
                caller = await self._admit(raw, control)
            finally:
                self._open[address] -= 1
                if not self._open[address]:
                    del self._open[address]
            if caller is not None:
                with caller.connection:
                    await self._serve(caller, control)
        return None

    async def _admit(self, raw: socket.socket, control: socket.socket) -> Caller | None:
        outcome = "late"
        caller = None
        with trio.move_on_after(HANDSHAKE_SECONDS):
            try:
                caller = await tls.in_thread(
                    control, self._limiter, self._handshake, raw, discard=_close
                )
                now = trio.current_time()
                outcome = (
                    "ok"
                    if self._tokens.redeem(caller.token, caller.peer, caller.request.transfer, now)
                    else "token"
                )
            except PeerError as error:
                outcome = "refused"
                log.debug("a TLS connection was refused: %s", error)
        self.outcomes[outcome] += 1
        if outcome == "ok":
            return caller
        if caller is not None:
            _close(caller)
        return None

    def _handshake(self, raw: socket.socket) -> Caller:
        """Blocks. Raises PeerError; the connection is closed then."""
        connection, peer = tls.handshake(raw, self._contexts.server, self._tokens, server_side=True)
        try:
            token = tls.receive_exactly(connection, limits.TOKEN_BYTES)
            (length,) = LENGTH.unpack(tls.receive_exactly(connection, LENGTH.size))
            if length > limits.BULK_REQUEST_BYTES:
                raise PeerError("a request that is too long")
            request = codec.decode(
                tls.receive_exactly(connection, length), BulkRequest, limits.BULK_REQUEST_BYTES
            )
            return Caller(peer, connection, token, request)
        except BaseException:
            connection.close()
            raise


def _close(caller: Caller) -> None:
    caller.connection.close()


def blocking(handle: trio.socket.SocketType) -> tuple[socket.socket, socket.socket]:
    """A trio socket as a blocking one, for a thread, and a second handle to it, for us; trio's own
    is gone."""
    raw = socket.socket(fileno=handle.detach())
    raw.setblocking(True)
    return raw, raw.dup()


async def _listen(hosts: list[str], port: int) -> tuple[list[trio.SocketListener], int]:
    error: OSError | None = None
    for _ in range(ATTEMPTS if port == 0 else 1):
        listeners: list[trio.SocketListener] = []
        chosen = port
        try:
            for host in hosts:
                listeners += await trio.open_tcp_listeners(chosen, host=host)
                chosen = listeners[0].socket.getsockname()[1]
            return listeners, chosen
        except OSError as raised:
            error = raised
            for listener in listeners:
                await listener.aclose()
    raise Unavailable(
        f"cannot listen on port {port} (network.bulk_port) of {', '.join(hosts)}: {error}"
    ) from error
