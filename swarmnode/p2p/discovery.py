"""Combines the sources of peers: bootstrap addresses, the saved book, mDNS and peer exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from swarmnode.p2p import book
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.exchange import PeerExchange
from swarmnode.p2p.mdns import MdnsDiscovery
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.reputation import Reputation

BOOK_SECONDS = 60.0


class Discovery:
    """Fills the peer table.

    Args:
        table: receives the peers.
        reputation: saved in the book together with the peers.
        exchange: peer exchange.
        mdns: None to disable discovery on the local network.
        path: path of the book.
        bootstrap: bootstrap peers and their addresses.
        on_change: called when there is a new peer to dial.
    """

    def __init__(
        self,
        table: PeerTable,
        reputation: Reputation,
        exchange: PeerExchange,
        mdns: MdnsDiscovery | None,
        path: Path,
        bootstrap: list[tuple[Address, str]],
        on_change: Callable[[], None],
    ) -> None:
        self._table = table
        self._reputation = reputation
        self.exchange = exchange
        self._mdns = mdns
        self._path = path
        self._bootstrap = bootstrap
        self._on_change = on_change

    def load(self) -> int:
        """Add the bootstrap peers and the saved peers to the table. Returns the number of saved
        peers."""
        now = trio.current_time()
        for address, peer in self._bootstrap:
            self._table.add(peer, str(address), "bootstrap", now)
        return book.load(self._path, self._table, self._reputation, now)

    def save(self) -> None:
        """Save the book. Blocks for an fsync."""
        book.save(self._path, book.render(self._table, self._reputation, trio.current_time()))

    async def run(self) -> None:
        """Run every source, and save the book at intervals, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exchange.run)
            nursery.start_soon(self._keep_book)
            if self._mdns is not None:
                nursery.start_soon(self._mdns.run, self.add_from_mdns)

    @property
    def mdns_running(self) -> bool:
        return self._mdns is not None and self._mdns.running

    def learned(self) -> dict[str, int]:
        """Return the number of addresses received by peer exchange, by outcome."""
        return dict(self.exchange.learned)

    def add_from_mdns(self, peer: str, address: str) -> None:
        """Add a peer found by mDNS."""
        if self._table.add(peer, address, "mdns", trio.current_time()):
            self._on_change()

    async def _keep_book(self) -> None:
        while True:
            await trio.sleep(BOOK_SECONDS)
            data = book.render(self._table, self._reputation, trio.current_time())
            await trio.to_thread.run_sync(book.save, self._path, data)
