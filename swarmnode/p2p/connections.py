"""The open connections, and what follows from them: how each peer is reached and from which
address.

    library ─ opened, closed ─▶ ConnectionTable ─▶ listeners, in order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.hosts import Connection, ConnectionEvents
from swarmnode.p2p.turnover import PeerLink


class ConnectionTable:
    """The open connections of this node.

    Attributes:
        listeners: notified in this order, after the table has changed.
    """

    def __init__(self) -> None:
        self.listeners: list[ConnectionEvents] = []
        self._live: dict[Connection, float] = {}
        """The open connections and the times at which they were opened, on trio's clock."""
        self._by_peer: dict[str, list[Connection]] = {}
        """The same connections by peer; a peer without a connection has no entry."""
        self._punched: set[Connection] = set()
        self._changed = trio.Event()

    def opened(self, connection: Connection) -> None:
        """Add a connection and notify the listeners."""
        if connection.is_closed or connection in self._live:
            return
        if connection.relay is None and self.circuits(connection.peer):
            self._punched.add(connection)
        self._live[connection] = trio.current_time()
        self._by_peer.setdefault(connection.peer, []).append(connection)
        for each in self.listeners:
            each.opened(connection)
        self._notify()

    def closed(self, connection: Connection) -> None:
        """Remove a connection and notify the listeners."""
        if connection not in self._live:
            return
        del self._live[connection]
        self._by_peer[connection.peer].remove(connection)
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]
        self._punched.discard(connection)
        for each in self.listeners:
            each.closed(connection)
        self._notify()

    async def changed(self) -> None:
        """Return when a connection was opened or closed."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- queries

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._live))

    def __len__(self) -> int:
        return len(self._live)

    def since(self, connection: Connection) -> float:
        """Return the time at which a connection was opened, on trio's clock."""
        return self._live[connection]

    def peers(self) -> list[str]:
        """Return the connected peers."""
        return list(self._by_peer)

    def with_peer(self, peer: str) -> list[Connection]:
        return list(self._by_peer.get(peer, ()))

    def circuits(self, peer: str) -> list[Connection]:
        """Return the relayed connections of a peer."""
        return [each for each in self.with_peer(peer) if each.relay is not None]

    def direct(self, peer: str) -> list[Connection]:
        return [each for each in self.with_peer(peer) if each.relay is None]

    def is_direct(self, peer: str) -> bool:
        """Return True if there is a direct connection with `peer`."""
        return bool(self.direct(peer))

    def is_punched(self, peer: str) -> bool:
        """Return True if a direct connection with `peer` was opened while a relayed one existed."""
        return any(each in self._punched for each in self.with_peer(peer))

    def count_behind(self, relay: str) -> int:
        """Return the number of connections through this relay."""
        return sum(1 for each in self._live if each.relay == relay)

    def count_in_prefix(self, prefix: str) -> int:
        """Return the number of connections with this /24 or /48 network."""
        return sum(
            1 for each in self._live if each.remote is not None and each.remote.prefix == prefix
        )

    def origin(self, peer: str) -> str | None:
        """Return the relay of `peer`, or its /24 or /48 network; None for this machine."""
        return next(
            (
                f"relay {each.relay}" if each.relay else each.remote.prefix if each.remote else None
                for each in self.with_peer(peer)
            ),
            None,
        )

    def links(self, depends_on: Callable[[str], bool]) -> list[PeerLink]:
        """Return a `PeerLink` per connected peer, for `turnover`. depends_on(peer) is True for
        peers to keep."""
        return [self._link(peer, depends_on(peer)) for peer in self.peers()]

    def _link(self, peer: str, needed: bool) -> PeerLink:
        open_connections = self.with_peer(peer)
        spare = not needed and not any(each.is_busy for each in open_connections)
        return PeerLink(
            peer,
            all(each.inbound for each in open_connections),
            min(map(self.since, open_connections)),
            self.origin(peer),
            spare,
        )

    # -- addresses of peers

    def observed(self, peer: str) -> Address | None:
        """Return the address at which this node sees a peer; None if it is relayed. The port is
        ephemeral if the peer dialled."""
        return next((each.remote for each in self.direct(peer) if each.remote is not None), None)

    def last_received(self, peer: str) -> float | None:
        """Return the time of the last bytes from a connected peer, on trio's clock."""
        return max(
            (each.last_received for each in self.with_peer(peer) if each.last_received is not None),
            default=None,
        )

    def vantage_address(self, peer: str) -> Address | None:
        """Return the address from which `peer` observes the network: its own, or the address of its
        relay."""
        if (seen := self.observed(peer)) is not None:
            return seen
        relays = (each.relay for each in self.circuits(peer) if each.relay is not None)
        return next(
            (address for relay in relays if (address := self.observed(relay)) is not None), None
        )

    def dialled_at(self, peer: str) -> Address | None:
        """Return the address at which this node dialled a peer; None if the peer dialled."""
        return next((each.remote for each in self.direct(peer) if not each.inbound), None)
