"""Swaps under way in the trainer: one immutable record each, from the copy to the commit, in a
table that three threads may use."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from swarmnode.averaging.outer import Prepared, SlowWeights, Tensors

MOST_EXCHANGES: Final = 4
"""Largest number of stored exchanges; equal to `weights.exchange.MOST_SWAPS`."""
DROPPED: Final = 1024
"""Ids of dropped swaps that are remembered. Fewer swaps can begin while the worker writes a
state."""


@dataclass(frozen=True)
class Exchange:
    """State of one swap of a fragment, or of a solo step."""

    session: bytes
    """Empty for a solo step."""
    fragment: int
    snapshot: Tensors
    """This node's weights of the fragment at the time of the copy, float32 on the host."""
    shared: Tensors
    """The subset of `snapshot` that the partner holds too."""
    slow: SlowWeights
    """φ and δ at the time of the copy."""
    outer_step: int
    """Outer steps that the fragment had taken. If only tensors that remain from the last outer step
    are swapped, that step is not counted."""
    peer: str = ""
    their_outer_step: int | None = None
    """The partner's claim."""
    prepared: Prepared | None = None
    """The outer step with the tensors that passed the gate; None before."""
    outcome: str = ""
    """The gate's verdict, one of `outcomes.OUTCOMES`."""


class ExchangeTable:
    """Exchanges by session. An exchange that is not in the table must not be applied. All methods
    are thread-safe."""

    def __init__(self) -> None:
        self._exchanges: OrderedDict[bytes, Exchange] = OrderedDict()
        self._dropped: deque[bytes] = deque(maxlen=DROPPED)
        self._lock = threading.Lock()

    def put(self, exchange: Exchange) -> None:
        """Add an exchange unless it was dropped before. Of more than MOST_EXCHANGES, remove the
        oldest."""
        with self._lock:
            if exchange.session in self._dropped:
                return
            self._exchanges[exchange.session] = exchange
            while len(self._exchanges) > MOST_EXCHANGES:
                self._exchanges.popitem(last=False)

    def get(self, session: bytes) -> Exchange | None:
        with self._lock:
            return self._exchanges.get(session)

    def update(self, exchange: Exchange) -> bool:
        """Replace the record of an exchange. Return False if the exchange was dropped meanwhile."""
        with self._lock:
            if exchange.session not in self._exchanges:
                return False
            self._exchanges[exchange.session] = exchange
            return True

    def pop(self, session: bytes) -> Exchange | None:
        with self._lock:
            return self._exchanges.pop(session, None)

    def drop(self, session: bytes) -> None:
        """Remove an exchange, and refuse it if it is added later."""
        with self._lock:
            self._exchanges.pop(session, None)
            self._dropped.append(session)

    def is_dropped(self, session: bytes) -> bool:
        with self._lock:
            return session in self._dropped

    def drop_fragment(self, fragment: int) -> None:
        """Remove all exchanges of `fragment`: their copies are of weights that no longer exist."""
        with self._lock:
            for session in [
                s for s, exchange in self._exchanges.items() if exchange.fragment == fragment
            ]:
                del self._exchanges[session]

    def clear(self) -> None:
        with self._lock:
            self._exchanges.clear()
