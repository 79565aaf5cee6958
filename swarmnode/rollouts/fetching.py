"""Groups too long for gossip: announced by hash, fetched by whoever gossips, at most once each and under a deadline. Serving gives them.

    want ─ room? ─▶ pending ─▶ one of a few workers ─ request ─▶ author, or whoever told us of it ─ hash checked ─▶ on_body
                                                                                                  └ failed ───────▶ on_failed
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.rollouts.groups import Announced
from swarmnode.rollouts.pace import Throughput
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.messages import FetchRequest, FetchResponse

WORKERS = 4
PENDING = 64
PENDING_PEER = 8
PAUSES = (1.0, 2.0, 4.0)
"""Seconds before asking again whoever is still fetching it too."""


class FetchStatistics(msgspec.Struct, frozen=True):
    fetched: dict[str, int] = {}
    """By outcome: `ok` or a reason."""
    pending: int = 0
    """Announced groups waiting for or under fetch."""
    bytes_per_second: float = 0.0
    """Moving average of what a fetch achieves."""


class Fetching:
    """on_body(announced, body) takes what came, its hash checked; on_failed(reason, peer) is told what did not, and from whom."""

    def __init__(
        self,
        network: Network,
        on_body: Callable[[Announced, bytes], None],
        on_failed: Callable[[str, str], None],
        allows: Callable[[str], bool] = lambda choice: True,
        protocol: str = ids.FETCH_PROTOCOL,
    ) -> None:
        """`allows("fetch")`: whether there is budget for it. `protocol`: the ordinal that the swarm speaks."""
        self._network = network
        self._on_body = on_body
        self._on_failed = on_failed
        self._allows = allows
        self._protocol = protocol
        self._pending: deque[tuple[Announced, str]] = deque()
        self._of_peer: Counter[str] = Counter()
        self._active: set[str] = set()
        self._wanted: set[bytes] = set()
        self._news = trio.Event()
        self._throughput = Throughput()
        self._fetched: Counter[str] = Counter()

    def start(self, nursery: trio.Nursery) -> None:
        for _ in range(WORKERS):
            nursery.start_soon(self._work)

    def want(self, announced: Announced, forwarder: str) -> str | None:
        """Have it fetched. Returns why not: `busy` (too many pending, in all or of this author), `duplicate` (under way)."""
        if announced.content in self._wanted:
            return "duplicate"
        if len(self._pending) >= PENDING or self._of_peer[announced.peer] >= PENDING_PEER:
            return "busy"
        self._wanted.add(announced.content)
        self._pending.append((announced, forwarder))
        self._of_peer[announced.peer] += 1
        self._news.set()
        return None

    def statistics(self) -> FetchStatistics:
        return FetchStatistics(
            fetched=dict(self._fetched),
            pending=len(self._wanted),
            bytes_per_second=self._throughput.bytes_per_second,
        )

    async def _work(self) -> None:
        while True:
            while (chosen := self._choose()) is None:
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()
            announced, forwarder = chosen
            self._active.add(announced.peer)
            try:
                if self._allows("fetch"):
                    await self._fetch(announced, forwarder)
                else:
                    self._on_failed("busy", announced.peer)  # no budget: lost, as gossip loses what comes too fast
            finally:
                self._active.discard(announced.peer)
                self._wanted.discard(announced.content)
                self._of_peer[announced.peer] -= 1
                if not self._of_peer[announced.peer]:
                    del self._of_peer[announced.peer]
                self._news.set()

    def _choose(self) -> tuple[Announced, str] | None:
        """The oldest pending of an author of whom nothing is under way: one that never delivers holds up one worker, not all."""
        for place, (announced, forwarder) in enumerate(self._pending):
            if announced.peer not in self._active:
                del self._pending[place]
                return announced, forwarder
        return None

    async def _fetch(self, announced: Announced, forwarder: str) -> None:
        """From its author, who has it; where we are not connected to the author, from whoever told us of it, who may not have it yet."""
        from_author = announced.peer in self._network.connected()
        source = announced.peer if from_author else forwarder
        for pause in (None,) if from_author else (None, *PAUSES):
            if pause is not None:
                await trio.sleep(pause)
            started = trio.current_time()
            body, outcome = await self._pull(announced, source)
            if outcome not in ("fetch_unknown", "fetch_busy"):
                break
        self._fetched[outcome] += 1
        if body is None:
            self._on_failed(outcome, source)
            return
        self._throughput.observe(source, len(body), trio.current_time() - started)
        self._on_body(announced, body)

    async def _pull(self, announced: Announced, source: str) -> tuple[bytes | None, str]:
        """(the announced bytes, `ok`) or (None, reason)."""
        try:
            data = await self._network.requests.request(
                source,
                self._protocol,
                codec.encode(FetchRequest(announced.content)),
                deadline=self._throughput.deadline(announced.size),
                max_response_bytes=min(announced.size + 64, limits.FETCH_RESPONSE_BYTES),
            )
            response = codec.decode(data, FetchResponse, limits.FETCH_RESPONSE_BYTES)
        except BadMessage as bad:
            return None, bad.reason
        except PeerTimeout:
            return None, "fetch_timeout"
        except PeerError:
            return None, "fetch_failed"
        if response.status != "ok":
            return None, f"fetch_{response.status}"
        if len(response.body) != announced.size or envelope.content_id(response.body) != announced.content:
            return None, "mismatch"
        return response.body, "ok"
