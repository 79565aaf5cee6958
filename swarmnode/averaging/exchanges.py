"""Exchanges under way in the trainer: one immutable record each, from the copy to the commit, in a
table that three threads may use."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from swarmnode.averaging.outer import Prepared, SlowWeights, Tensors

KEPT: Final = 4
"""Exchanges whose copies are kept: as many as `weights.exchange.MOST_SWAPS`."""
DROPPED: Final = 1024
"""Swaps that are remembered as given up: more than can begin while the worker writes a state."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a fragment, or a solo step, as far as it has come."""

    session: bytes
    """Empty for a solo step."""
    fragment: int
    snapshot: Tensors
    """Our weights of the fragment when the copy was made, float32 on the host."""
    shared: Tensors
    """Those of them that the partner holds too."""
    slow: SlowWeights
    """φ and δ in the same moment."""
    outer_step: int
    """Outer steps that the fragment had taken; of what is left of the last one, without that."""
    peer: str = ""
    their_outer_step: int | None = None
    """The partner's claim."""
    prepared: Prepared | None = None
    """The outer step with what the gate made of both; None before."""
    outcome: str = ""
    """The gate's verdict, one of `outcomes.OUTCOMES`."""


class ExchangeTable:
    """Exchanges by session. One that is not in it must not be applied any more. Every method may be
    called from any thread."""

    def __init__(self) -> None:
        self._exchanges: OrderedDict[bytes, Exchange] = OrderedDict()
        self._dropped: deque[bytes] = deque(maxlen=DROPPED)
        self._lock = threading.Lock()

    def put(self, exchange: Exchange) -> None:
        """Take in a new exchange, unless it was dropped before; the oldest beyond KEPT are
        forgotten."""
        with self._lock:
            if exchange.session in self._dropped:
                return
            self._exchanges[exchange.session] = exchange
            while len(self._exchanges) > KEPT:
                self._exchanges.popitem(last=False)

    def get(self, session: bytes) -> Exchange | None:
        with self._lock:
            return self._exchanges.get(session)

    def update(self, exchange: Exchange) -> bool:
        """Replace the record of an exchange that has gone on. False where it was dropped
        meanwhile."""
        with self._lock:
            if exchange.session not in self._exchanges:
                return False
            self._exchanges[exchange.session] = exchange
            return True

    def pop(self, session: bytes) -> Exchange | None:
        with self._lock:
            return self._exchanges.pop(session, None)

    def drop(self, session: bytes) -> None:
        """Forget it, and whatever is still to come of it."""
        with self._lock:
            self._exchanges.pop(session, None)
            self._dropped.append(session)

    def is_dropped(self, session: bytes) -> bool:
        with self._lock:
            return session in self._dropped

    def drop_fragment(self, fragment: int) -> None:
        """Forget all copies of `fragment`: they are of weights that are gone, and nothing may be
        corrected against them."""
        with self._lock:
            for session in [
                s for s, exchange in self._exchanges.items() if exchange.fragment == fragment
            ]:
                del self._exchanges[session]

    def clear(self) -> None:
        with self._lock:
            self._exchanges.clear()
