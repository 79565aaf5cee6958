"""Counters of the guards, by name, for this process. The names are a closed set, because they
become a metric label."""

from __future__ import annotations

import dataclasses
import logging
from types import TracebackType

log = logging.getLogger("swarmnode.p2p.guards")

NAMES = (
    "inbound_failed",  # an inbound connection failed in its handshake or by an error
    "slot_released",  # an inbound connection ended and freed its slot
    "address_full",  # one address exceeded its share of inbound connections
    "identify_refused",  # an identify message was too long or malformed
    "peer_forgotten",  # the peer store was full and dropped its oldest unconnected peer
    "handler_failed",  # an exception left a stream handler
    "stream_abandoned",  # a closed stream was dropped whose peer never closed its half
    "service_failed",  # an exception left a connection's own task
    "window_overrun",  # a peer sent more than its credit
    "streams_overrun",  # a peer opened too many streams, or streams with ids of this side
    "connection_full",  # the unread bytes of one connection exceeded their limit
    # the unread bytes of all connections exceeded their limit; the largest holder was dropped
    "process_full",
    "write_stalled",  # a peer read nothing from its socket for WRITE_STALL_SECONDS
    "answers_full",  # a peer caused more than MAX_OWED_ANSWERS answers and read none
    "window_stalled",  # a peer granted no credit for WINDOW_STALL_SECONDS
    "stream_unopened",  # a stream of this node did not open
    "stream_slots_exhausted",  # no outbound stream slot became free within OPEN_STREAM_SECONDS
)


@dataclasses.dataclass(frozen=True)
class GuardStatistics:
    """Number of times that each guard of `NAMES` fired since the process started."""

    fired: dict[str, int]


_fired = dict.fromkeys(NAMES, 0)


def count_firing(name: str, detail: object = "") -> None:
    """Count one firing of a guard. Raises KeyError for a name that is not in `NAMES`."""
    _fired[name] += 1
    log.debug("guard %s: %s", name, detail)


class contain_errors:
    """Context manager that ends its block on any exception, counts it as guard `name` and stores it
    in `error`.

    The exceptions of py-libp2p have dozens of types without a common base, and one that leaves a
    task of the service ends the process.
    """

    __slots__ = ("_detail", "_name", "error")

    def __init__(self, name: str, detail: object = "") -> None:
        self._name, self._detail = name, detail
        self.error: Exception | None = None

    def reraise(self) -> None:
        """Raise the exception that ended the block, if there was one."""
        if self.error is not None:
            raise self.error

    def __enter__(self) -> contain_errors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        count_firing(self._name, f"{self._detail}: {error!r}")
        return True


def statistics() -> GuardStatistics:
    """Return a copy of the counters."""
    return GuardStatistics(fired=dict(_fired))
