"""Translates the dozens of exception types of py-libp2p into PeerError."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

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


@contextlib.contextmanager
def peer_errors(doing: str = "") -> Iterator[None]:
    """Turn every exception of the block into a PeerError.

    Errors of swarmnode and cancellations pass unchanged. `doing` starts the message; the original
    error is its cause.
    """
    try:
        yield
    except SwarmNodeError:
        raise
    except Exception as error:
        raise _translated(error, doing) from error


@contextlib.contextmanager
def ignored_errors(doing: str) -> Iterator[None]:
    """Log and drop every exception of the block, for operations without a caller to inform, such as
    closing."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises dozens of types
        log.debug("%s: %r", doing, error)


def _translated(error: Exception, doing: str) -> PeerError:
    cause = first_cause(error)
    text = f"{doing}: {cause}" if doing else cause
    if isinstance(error, StreamEOF):
        return StreamEnd(text[:300])
    if UNSUPPORTED_TEXT in cause:
        return Incompatible(text[:300])
    return (WrongPeer if WRONG_PEER_TEXT in cause else PeerError)(text[:300])


def first_cause(error: BaseException) -> str:
    """Return the text of the first cause of an error, because the library's wrapping exceptions do
    not contain it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return first_cause(error.exceptions[0])
    return str(error) or type(error).__name__
