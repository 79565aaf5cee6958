"""Groups too long for gossip: announced by hash, fetched by whoever gossips, at most once each and
under a deadline. Serving gives them.

want ─▶ FetchQueue ─▶ one of a few workers ─ request ─▶ author, or whoever told us of it ─ hash
checked ─▶ on_body
           ▲                                               │                              └ failed
           ───────▶ on_failed
           └─────────────────── not now ───────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.rollouts.fetch_queue import WORKERS, FetchQueue, Wanted
from swarmnode.rollouts.groups import Announced
from swarmnode.rollouts.pace import Throughput
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.messages import FetchRequest, FetchResponse


class FetchStatistics(msgspec.Struct, frozen=True):
    fetched: dict[str, int] = {}
    """By outcome: `ok` or a reason."""
    pending: int = 0
    """Announced groups waiting for or under fetch."""
    bytes_per_second: float = 0.0
    """Moving average of what a fetch achieves."""


class Fetching:
    """on_body(announced, body) takes what came, its hash checked; on_failed(reason, peer) is told
    what did not, and from whom."""

    def __init__(
        self,
        network: Network,
        queue: FetchQueue,
        on_body: Callable[[Announced, bytes], None],
        on_failed: Callable[[str, str], None],
        allows: Callable[[str], bool] = lambda choice: True,
        protocol: str = ids.FETCH_PROTOCOL,
    ) -> None:
        """`allows("fetch")`: whether there is budget for it. `protocol`: the ordinal that the swarm
        speaks."""
        self._network = network
        self._queue = queue
        self._on_body = on_body
        self._on_failed = on_failed
        self._allows = allows
        self._protocol = protocol
        self._news = trio.Event()
        self._throughput = Throughput()
        self._fetched: Counter[str] = Counter()

    def start(self, nursery: trio.Nursery) -> None:
        for _ in range(WORKERS):
            nursery.start_soon(self._work)

    def want(self, announced: Announced, forwarder: str) -> str | None:
        """Have it fetched. Returns why not: `busy` (no room for it), `duplicate` (under way)."""
        if announced.content in self._queue:
            return "duplicate"
        out = self._queue.put(announced, forwarder)
        if out is announced:
            return "busy"
        if out is not None:
            self._on_failed("busy", out.peer)
        self._news.set()
        return None

    def statistics(self) -> FetchStatistics:
        return FetchStatistics(
            fetched=dict(self._fetched),
            pending=len(self._queue),
            bytes_per_second=self._throughput.bytes_per_second,
        )

    async def _work(self) -> None:
        while True:
            while (wanted := self._queue.take(trio.current_time())) is None:
                self._news = trio.Event() if self._news.is_set() else self._news
                with trio.move_on_after(self._queue.wait(trio.current_time())):
                    await self._news.wait()
            await self._fetch(wanted)
            self._news.set()

    async def _fetch(self, wanted: Wanted) -> None:
        announced, source, started = wanted.announced, wanted.source, trio.current_time()
        body, outcome = None, ""
        try:
            if self._allows("fetch"):
                body, outcome = await self._pull(announced, source)
        finally:
            final = self._queue.answered(wanted, outcome, trio.current_time())
        if not outcome:
            # no budget: lost, as gossip loses what comes too fast
            self._on_failed("busy", announced.peer)
        if not outcome or not final:
            return
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
        if (
            len(response.body) != announced.size
            or envelope.content_id(response.body) != announced.content
        ):
            return None, "mismatch"
        return response.body, "ok"
