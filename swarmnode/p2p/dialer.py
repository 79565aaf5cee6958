"""The redial loop: executes the decisions of the peer table until cancelled.

    table.to_dial ─▶ one task per peer: its addresses in turn, each with a deadline
      ─▶ table.record_dialled | record_failed ─▶ sleep until the next dial is due

The library's bootstrap and auto-connector are not used: in measurements they did not recover from a
20 s outage within 85 s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import is_circuit
from swarmnode.p2p.peers import Dial, PeerTable

log = logging.getLogger(__name__)

DIAL_SECONDS = 10.0
"""Timeout for one address: TCP connect, Noise and Yamux."""
ADDRESSES_PER_DIAL = 4
DIRECT_SECONDS = 4.0
"""Timeout for a direct address of a peer that also has a relay address. A router drops unwanted
SYNs silently."""
CONCURRENT = 8
LONGEST_SLEEP = 5.0
"""Maximum sleep of the loop, so that a lost wake-up delays a dial by this much at most."""

Connect = Callable[[str, str], Awaitable[bool]]
"""(peer id, address) → True if it connected, False if the peer was already connected. Raises
PeerError."""


class Dialer:
    """Dials the peers that `table` selects, with `connect`, and reports the outcomes to it."""

    def __init__(self, table: PeerTable, connect: Connect) -> None:
        self._table = table
        self._connect = connect
        self._wake = trio.Event()
        self._unreachable: set[tuple[str, str]] = set()

    def wake(self) -> None:
        """Check the table again now, because it has changed."""
        self._wake.set()

    async def dial_once(self, peer: str, address: str) -> None:
        """Connect now, independent of the table. Raises PeerError with the reason."""
        with trio.move_on_after(DIAL_SECONDS):
            await self._connect(peer, address)
            return
        raise PeerError(f"no answer within {DIAL_SECONDS:g} s")

    async def run(self) -> None:
        """Dials until cancelled."""
        async with trio.open_nursery() as nursery:
            running = 0

            async def dial(order: Dial) -> None:
                nonlocal running
                try:
                    await self._dial(order)
                finally:
                    running -= 1
                    self.wake()

            while True:
                self._wake = trio.Event()
                for order in self._table.to_dial(trio.current_time(), CONCURRENT - running):
                    running += 1
                    nursery.start_soon(dial, order)
                pause = (
                    self._table.next_due(trio.current_time()) if running < CONCURRENT else math.inf
                )
                with trio.move_on_after(min(max(pause, 0.05), LONGEST_SLEEP)):
                    await self._wake.wait()

    async def _dial(self, order: Dial) -> None:
        """Dial one peer. Never raises; every failure is recorded as an outcome."""
        relayed = any(map(is_circuit, order.addresses))
        for address in order.addresses[:ADDRESSES_PER_DIAL]:
            seconds = DIRECT_SECONDS if relayed and not is_circuit(address) else DIAL_SECONDS
            why = f"no answer within {seconds:g} s"
            with trio.move_on_after(seconds):
                try:
                    if await self._connect(order.peer, address):
                        self._table.record_dialled(order.peer, address, trio.current_time())
                    else:
                        self._table.cancel_dial(order.peer)
                    self._log_reached(order)
                    return
                except PeerError as error:
                    why = str(error)
            self._log_failure(order, address, why)
        self._table.record_failed(order.peer, trio.current_time())

    def _log_failure(self, order: Dial, address: str, why: str) -> None:
        """Log one warning per bootstrap address and outage. Other failures are frequent, because
        strangers report many stale addresses, and are logged at debug level."""
        if order.source == "bootstrap" and (order.peer, address) not in self._unreachable:
            self._unreachable.add((order.peer, address))
            log.warning(
                "bootstrap peer unreachable, will retry: %s/p2p/%s (%s)",
                address,
                order.peer,
                why[:200],
            )
        else:
            log.debug("dial failed: %s/p2p/%s (%s)", address, order.peer, why[:200])

    def _log_reached(self, order: Dial) -> None:
        lost = {each for each in self._unreachable if each[0] == order.peer}
        if lost:
            self._unreachable -= lost
            log.info("bootstrap peer reached: %s", order.peer)
