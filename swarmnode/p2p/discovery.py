"""Where peers are heard of: bootstrap addresses, the book of the last run, the local network, and
other peers."""

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
    """`mdns`: None to leave the local network alone. `path`: of the book. `news()` is called when
    there is somebody to dial."""

    def __init__(
        self,
        table: PeerTable,
        reputation: Reputation,
        exchange: PeerExchange,
        mdns: MdnsDiscovery | None,
        path: Path,
        bootstrap: list[tuple[Address, str]],
        news: Callable[[], None],
    ) -> None:
        self._table = table
        self._reputation = reputation
        self.exchange = exchange
        self._mdns = mdns
        self._path = path
        self._bootstrap = bootstrap
        self._news = news

    def load(self) -> int:
        """Puts the bootstrap peers and those of the book into the table; returns the number of the
        latter."""
        now = trio.current_time()
        for address, peer in self._bootstrap:
            self._table.add(peer, str(address), "bootstrap", now)
        return book.load(self._path, self._table, self._reputation, now)

    def save(self) -> None:
        """Saves the book. Blocks for an fsync."""
        book.save(self._path, book.render(self._table, self._reputation, trio.current_time()))

    async def run(self) -> None:
        """Listens and asks until cancelled; saves the book now and then."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exchange.run)
            nursery.start_soon(self._keep_book)
            if self._mdns is not None:
                nursery.start_soon(self._mdns.run, self.found_nearby)

    @property
    def mdns_running(self) -> bool:
        return self._mdns is not None and self._mdns.running

    def learned(self) -> dict[str, int]:
        """Addresses heard of by peer exchange, by what became of them."""
        return dict(self.exchange.learned)

    def found_nearby(self, peer: str, address: str) -> None:
        """mDNS found a peer."""
        if self._table.add(peer, address, "mdns", trio.current_time()):
            self._news()

    async def _keep_book(self) -> None:
        while True:
            await trio.sleep(BOOK_SECONDS)
            data = book.render(self._table, self._reputation, trio.current_time())
            await trio.to_thread.run_sync(book.save, self._path, data)
