"""Translates the dozens of exception types of py-libp2p into PeerError."""

from __future__ import annotations

import logging
from types import TracebackType

from libp2p.network.stream.exceptions import StreamEOF

from swarmnode.errors import Incompatible, PeerError, SwarmNodeError
from swarmnode.p2p.api import WrongPeer

log = logging.getLogger(__name__)

UNSUPPORTED_TEXT = "protocols not supported"
"""Text of the library's error for an unsupported protocol, which has no type of its own."""
WRONG_PEER_TEXT = "peer id does not correspond"
"""Text of the library's error for a handshake with an unexpected peer id."""


class StreamEnd(PeerError):
    """Raised when a peer has finished its side of a stream, or vanished."""


class peer_errors:
    """Context manager that turns every exception into a PeerError.

    Errors of swarmnode and cancellations pass unchanged. `doing` starts the message; the original
    error is its cause.
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
    """Context manager that logs and drops every exception, for operations without a caller to
    inform, such as closing."""

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
    if UNSUPPORTED_TEXT in cause:
        return Incompatible(text[:300])
    return (WrongPeer if WRONG_PEER_TEXT in cause else PeerError)(text[:300])


def first_cause(error: BaseException) -> str:
    """Return the text of the first cause of an error, because the library's wrappers do not say
    what happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return first_cause(error.exceptions[0])
    return str(error) or type(error).__name__
