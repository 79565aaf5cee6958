"""The connections there are now, and what follows from them: who is reached how, and from where.

library ─ opened, closed ─▶ ConnectionTable ─ opened (the first of its peer?), closed (the last?) ─▶
listeners, in their order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import trio

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.turnover import Link


class Connection(Protocol):
    """`library.hosts.Connection`."""

    @property
    def peer(self) -> str:
        """The peer at its other end."""
        ...

    @property
    def inbound(self) -> bool:
        """The peer has dialled us."""
        ...

    @property
    def relay(self) -> str | None:
        """The peer that it goes through, None if it is direct."""
        ...

    @property
    def remote(self) -> Address | None:
        """Where it comes from or leads to; None for one through a relay."""
        ...

    @property
    def is_closed(self) -> bool: ...
    @property
    def ping(self) -> tuple[int, bool]:
        """The number of the latest ping on it, 0 before the first, and whether that was
        answered."""
        ...

    @property
    def heard(self) -> float | None:
        """When the peer last said anything on it, by trio's clock; None before the first."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether anything is going on over it that we asked for, or granted for as long as it
        lasts."""
        ...

    async def close(self) -> None:
        """Never raises."""
        ...

    def forget(self) -> None:
        """It is closed, and the library has not noticed: has it do so."""
        ...


class Listener(Protocol):
    """Is told of connections as they come and go, when the table has already changed."""

    def opened(self, connection: Connection, first: bool) -> None:
        """`first`: there was none with this peer before."""
        ...

    def closed(self, connection: Connection, last: bool) -> None:
        """`last`: there is none with this peer any more."""
        ...


class ConnectionTable:
    """`listeners`: see `Listener`."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._live: dict[Connection, float] = {}
        """Each, and when it was opened, by trio's clock."""
        self._of: dict[str, list[Connection]] = {}
        """The same by peer, none without a connection."""
        self._punched: set[Connection] = set()
        self._changed = trio.Event()

    def opened(self, connection: Connection) -> None:
        """A connection was opened."""
        if connection.is_closed or connection in self._live:
            return
        first = not self.of(connection.peer)
        if connection.relay is None and self.circuits(connection.peer):
            self._punched.add(connection)
        self._live[connection] = trio.current_time()
        self._of.setdefault(connection.peer, []).append(connection)
        for each in self.listeners:
            each.opened(connection, first)
        self._notify()

    def closed(self, connection: Connection) -> None:
        """A connection was closed."""
        if connection not in self._live:
            return
        del self._live[connection]
        self._of[connection.peer].remove(connection)
        if not self._of[connection.peer]:
            del self._of[connection.peer]
        self._punched.discard(connection)
        last = not self.of(connection.peer)
        for each in self.listeners:
            each.closed(connection, last)
        self._notify()

    async def changed(self) -> None:
        """Returns when a connection was opened or closed."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- what there is

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._live))

    def __len__(self) -> int:
        return len(self._live)

    def since(self, connection: Connection) -> float:
        """When it was opened, by trio's clock."""
        return self._live[connection]

    def peers(self) -> list[str]:
        """Everybody at the other end of a connection."""
        return list(self._of)

    def of(self, peer: str) -> list[Connection]:
        return list(self._of.get(peer, ()))

    def circuits(self, peer: str) -> list[Connection]:
        """Its connections through relays."""
        return [each for each in self.of(peer) if each.relay is not None]

    def direct(self, peer: str) -> list[Connection]:
        return [each for each in self.of(peer) if each.relay is None]

    def is_direct(self, peer: str) -> bool:
        """Whether there is a direct connection with `peer`."""
        return bool(self.direct(peer))

    def is_punched(self, peer: str) -> bool:
        """Whether the direct connection with `peer` came about while there was one through a
        relay."""
        return any(each in self._punched for each in self.of(peer))

    def behind(self, relay: str) -> int:
        """Connections that go through this relay."""
        return sum(1 for each in self._live if each.relay == relay)

    def of_prefix(self, prefix: str) -> int:
        """Connections that come from or lead to this /24 or /48."""
        return sum(
            1 for each in self._live if each.remote is not None and each.remote.prefix == prefix
        )

    def group(self, peer: str) -> str | None:
        """The relay that `peer` is behind, or its /24 or /48; None on this machine."""
        return next(
            (
                f"relay {each.relay}" if each.relay else each.remote.prefix if each.remote else None
                for each in self.of(peer)
            ),
            None,
        )

    def links(self, depends_on: Callable[[str], bool]) -> list[Link]:
        """Everybody at the other end of a connection, for `turnover`. depends_on(peer): whether
        something here does."""
        return [self._link(peer, depends_on(peer)) for peer in self.peers()]

    def _link(self, peer: str, needed: bool) -> Link:
        ours = self.of(peer)
        spare = not needed and not any(each.is_busy for each in ours)
        return Link(
            peer,
            all(each.inbound for each in ours),
            min(map(self.since, ours)),
            self.group(peer),
            spare,
        )

    # -- where peers are

    def observed(self, peer: str) -> Address | None:
        """The address at which we see a connected peer, None if it is relayed; the port is
        ephemeral if it dialled us."""
        return next((each.remote for each in self.direct(peer) if each.remote is not None), None)

    def heard(self, peer: str) -> float | None:
        """When a connected peer last said anything, by trio's clock."""
        return max((each.heard for each in self.of(peer) if each.heard is not None), default=None)

    def vantage(self, peer: str) -> Address | None:
        """From where `peer` speaks: its own address, or that of the relay that it is connected
        through."""
        if (seen := self.observed(peer)) is not None:
            return seen
        relays = (each.relay for each in self.circuits(peer) if each.relay is not None)
        return next(
            (address for relay in relays if (address := self.observed(relay)) is not None), None
        )

    def dialled_at(self, peer: str) -> Address | None:
        """Where we dialled a connected peer, None if it dialled us."""
        return next((each.remote for each in self.direct(peer) if not each.inbound), None)
