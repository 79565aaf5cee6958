"""How often each guard fired, by name, for this process. The names are a closed set, so that they
can be a metric label."""

from __future__ import annotations

import dataclasses
import logging
from types import TracebackType

log = logging.getLogger("swarmnode.p2p.guards")

NAMES = (
    "inbound_failed",  # an inbound connection ended in its handshake, or by an error
    "slot_released",  # an inbound connection ended and gave its slot back
    "address_full",  # one address asked for more inbound connections than its share
    "identify_refused",  # an identify message that is too long or broken
    "peer_forgotten",  # the peer store was full and its oldest unconnected peer went
    "handler_failed",  # an exception left a stream handler
    "stream_abandoned",  # a closed stream whose peer never closed its half was dropped
    "service_failed",  # an exception left a connection's own task
    "window_overrun",  # a peer sent more than the credit it was given
    "streams_overrun",  # a peer opened too many streams, or streams with our ids
    "connection_full",  # the unread bytes of one connection passed their bound
    # the unread bytes of all connections passed theirs; the largest holder was dropped
    "process_full",
    "write_stalled",  # a peer read nothing from its socket for WRITE_STALL_SECONDS
    # a peer had us answer more than OWED times, and read nothing meanwhile
    "answers_full",
    "window_stalled",  # a peer granted no credit for WINDOW_STALL_SECONDS
    "stream_unopened",  # a stream of ours did not open
    "stream_slots_exhausted",  # no outbound stream became free within OPEN_STREAM_SECONDS
)


@dataclasses.dataclass(frozen=True)
class GuardStatistics:
    """`fired[name]`: times that guard fired since the process started; every name of `NAMES` is
    there."""

    fired: dict[str, int]


_fired = dict.fromkeys(NAMES, 0)


def fired(name: str, detail: object = "") -> None:
    """Count one firing of guard `name`; `KeyError` for a name that is not in `NAMES`."""
    _fired[name] += 1
    log.debug("guard %s: %s", name, detail)


class contained:
    """Within this block every exception ends the block, is counted as guard `name`, and goes no
    further: then it is `error`.

    What py-libp2p raises has dozens of types without a common base, and a task of the whole service
    that lets one out ends the process.
    """

    __slots__ = ("_detail", "_name", "error")

    def __init__(self, name: str, detail: object = "") -> None:
        self._name, self._detail = name, detail
        self.error: Exception | None = None

    def raise_again(self) -> None:
        """Raise what ended the block, if anything did."""
        if self.error is not None:
            raise self.error

    def __enter__(self) -> contained:
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
        fired(self._name, f"{self._detail}: {error!r}")
        return True


def statistics() -> GuardStatistics:
    """A frozen copy of the counters."""
    return GuardStatistics(fired=dict(_fired))
