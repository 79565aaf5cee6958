"""Turns what py-libp2p raises, in dozens of types, into PeerError."""

from __future__ import annotations

import logging
from types import TracebackType

from libp2p.network.stream.exceptions import StreamEOF

from swarmnode.errors import Incompatible, PeerError, SwarmNodeError
from swarmnode.p2p.api import AnotherPeer

log = logging.getLogger(__name__)

NOT_SPOKEN = "protocols not supported"
"""How the library says that a peer does not speak a protocol; it has no exception type for that."""
ANOTHER_PEER = "peer id does not correspond"
"""And that a handshake proved another peer id than the one that was dialled."""


class StreamEnd(PeerError):
    """Raised when a peer has sent its last: it finished its side of a stream, or is gone without
    having said so."""


class peer_errors:
    """Within this block every exception is a PeerError: `with peer_errors("dialling"): await
    swarm.dial_addr(…)`.

    Our own errors and cancellations pass as they are. `doing` begins the message; the original
    error is attached as the cause.
    """

    __slots__ = ("_doing",)

    def __init__(self, doing: str = "") -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, SwarmNodeError):
            raise _translated(error, self._doing) from error


class ignored_errors:
    """Within this block every exception ends the block and no more: for what has nobody left to
    tell, such as closing."""

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log.debug("%s: %r", self._doing, error)
        return True


def _translated(error: Exception, doing: str) -> PeerError:
    cause = first_cause(error)
    text = f"{doing}: {cause}" if doing else cause
    if isinstance(error, StreamEOF):
        return StreamEnd(text[:300])
    if NOT_SPOKEN in cause:
        return Incompatible(text[:300])
    return (AnotherPeer if ANOTHER_PEER in cause else PeerError)(text[:300])


def first_cause(error: BaseException) -> str:
    """The first cause of an error, which says what happened; the library's wrappers only say that
    something did."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return first_cause(error.exceptions[0])
    return str(error) or type(error).__name__
