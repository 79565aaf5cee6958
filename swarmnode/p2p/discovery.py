"""Sources of peers besides connected ones: bootstrap addresses, the saved book and mDNS.

The book, `peers.json`, holds addresses and reputation of peers across restarts. The file belongs to
this node but may be damaged. It is therefore bounded and decoded by type. A damaged file yields an
empty book and one warning.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarmnode.files import write_atomically
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.mdns import MdnsDiscovery
from swarmnode.p2p.peers import ADDRESSES_PER_PEER, PeerTable
from swarmnode.p2p.reputation import Reputation, SavedRecord

log = logging.getLogger(__name__)

BOOK_SECONDS = 60.0
BOOK_VERSION = 1
BOOK_BYTES = 4 * 2**20
BOOK_PEERS = 256
BOOK_RECORDS = 4096


class Discovery:
    """Fills the peer table.

    Args:
        table: receives the peers.
        reputation: saved in the book together with the peers.
        mdns: None to disable discovery on the local network.
        path: path of the book.
        bootstrap: bootstrap peers and their addresses.
        on_change: called when there is a new peer to dial.
    """

    def __init__(
        self,
        table: PeerTable,
        reputation: Reputation,
        mdns: MdnsDiscovery | None,
        path: Path,
        bootstrap: list[tuple[Address, str]],
        on_change: Callable[[], None],
    ) -> None:
        self._table = table
        self._reputation = reputation
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
        return load_book(self._path, self._table, self._reputation, now)

    def save(self) -> None:
        """Save the peer book. This blocks until fsync returns."""
        save_book(self._path, render_book(self._table, self._reputation, trio.current_time()))

    async def run(self) -> None:
        """Run every source, and save the book at intervals, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_book)
            if self._mdns is not None:
                nursery.start_soon(self._mdns.run, self.add_from_mdns)

    def add_from_mdns(self, peer: str, address: str) -> None:
        """Add a peer found by mDNS."""
        if self._table.add(peer, address, "mdns", trio.current_time()):
            self._on_change()

    async def _keep_book(self) -> None:
        while True:
            await trio.sleep(BOOK_SECONDS)
            data = render_book(self._table, self._reputation, trio.current_time())
            await trio.to_thread.run_sync(save_book, self._path, data)


class BookPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: str
    addresses: list[str]
    age: float
    """Seconds between the last contact and the time of saving."""


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    saved_at: float
    """Unix time in seconds."""
    peers: list[BookPeer]
    reputation: list[SavedRecord]


def load_book(
    path: Path, table: PeerTable, reputation: Reputation, now: float, *, clock: float | None = None
) -> int:
    """Read the book into `table` and `reputation`. Never raises for the content of the file.

    Args:
        path: the file.
        table: receives the peers.
        reputation: receives the records.
        now: monotonic time.
        clock: Unix time; the current time if None.

    Returns:
        The number of loaded peers.
    """
    try:
        with path.open("rb") as file:
            data = file.read(BOOK_BYTES + 1)
        if len(data) > BOOK_BYTES:
            raise ValueError(f"longer than {BOOK_BYTES} bytes")
        book = msgspec.json.decode(data, type=Book)
        if book.version != BOOK_VERSION:
            raise ValueError(f"version {book.version}")
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:  # every msgspec error is a ValueError
        log.warning("cannot read the peer book %s, starting with an empty one: %s", path, error)
        return 0
    away = (time.time() if clock is None else clock) - book.saved_at
    away = max(0.0, away) if math.isfinite(away) else 0.0
    loaded = 0
    for each in book.peers[:BOOK_PEERS]:
        try:
            peer = addresses.check_peer_id(each.peer)
            known = [
                str(addresses.parse_any(text)[0]) for text in each.addresses[:ADDRESSES_PER_PEER]
            ]
        except ValueError:
            continue
        if known and math.isfinite(each.age):
            table.restore(peer, known, now - away - max(0.0, each.age), now)
            loaded += 1
    reputation.restore(book.reputation, away, now)
    return loaded


def save_book(path: Path, data: bytes) -> None:
    """Write the result of `render_book`. A failure is logged. Blocks on fsync, so it must not run
    on the trio thread."""
    try:
        write_atomically(path, data)
    except OSError as error:
        log.warning("cannot save the peer book %s: %s", path, error)


def render_book(table: PeerTable, reputation: Reputation, now: float) -> bytes:
    """Return the book as JSON."""
    peers = [
        BookPeer(each.peer, list(each.addresses), max(0.0, now - each.seen_at(now)))
        for each in table.for_book(BOOK_PEERS, now)
    ]
    return msgspec.json.encode(
        Book(BOOK_VERSION, time.time(), peers, reputation.snapshot(now)[:BOOK_RECORDS])
    )
