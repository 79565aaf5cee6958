"""Nodes that average in memory on trio's autojump clock. They use the product's SwapService and
Discovery over a network without bytes and with a trainer without weights.

    async with swarm({"a": Party, "b": Party}) as parties:
        parties["a"].due()
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights import local
from swarmnode.weights.fragments import blocks_of
from swarmnode.weights.layout import Layout, make_layout
from swarmnode.weights.messages import (
    Accepted,
    Busy,
    Here,
    Payload,
    Ready,
    Refused,
    Swap,
    decode_message,
)
from swarmnode.weights.network.discovery import Discovery
from swarmnode.weights.network.payload_store import PayloadOffer
from swarmnode.weights.network.swaps import FAILURES, OUTCOMES, SwapService
from swarmnode.wire import strict

LAYOUT = make_layout((f"layers.{i}.w", (8,), "float32") for i in range(2))
BLOCKS = blocks_of(spec.name for spec in LAYOUT)
SIZE = 100
SWARM = bytes(32)
DELAY = 0.01
LEASE_SECONDS = 10.0
EVERY = 100
"""Training steps of one second between two outer steps of a fragment."""


class Hub:
    """Carries requests between parties with a delay of DELAY seconds each way."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.rng = random.Random(0)

    async def request(self, source: str, target: str, data: bytes, deadline: float) -> bytes:
        with trio.move_on_after(deadline):
            await trio.sleep(DELAY)
            handler = self.handlers.get(target)
            if handler is None:
                raise PeerError("not connected")
            answer: bytes = await handler(source, data)
            await trio.sleep(DELAY)
            return answer
        raise PeerTimeout("no answer")


class StubStore:
    """A payload store whose payloads have SIZE bytes. A fetch takes as long as the sender's
    `sends_in`."""

    def __init__(self, peers: Mapping[str, Any]) -> None:
        self.offered: list[PayloadOffer] = []
        self.ended: set[bytes] = set()
        self._peers = peers

    async def open(self, path: str) -> Any:
        await trio.lowlevel.checkpoint()
        return SimpleNamespace(path=Path(path), source=SimpleNamespace(size=SIZE)) if path else None

    def offer(self, payload: Any, until: float, audience: Any) -> PayloadOffer:
        name = len(self.offered).to_bytes(32, "big")
        self.offered.append(PayloadOffer(name, bytes(32), SIZE, payload.path, until))
        return self.offered[-1]

    def is_offered(self, offer: PayloadOffer) -> bool:
        return offer.transfer not in self.ended

    def withdraw(self, offer: PayloadOffer) -> None:
        self.ended.add(offer.transfer)

    def new_path(self) -> Path:
        return Path("in")

    def discard(self, path: Path) -> None:
        """There is no file."""

    async def fetch(self, remote: Any, path: Path, limit: int, deadline: float) -> None:
        sender = self._peers[remote.peer]
        takes = sender.sends_in
        with trio.move_on_at(deadline):
            await trio.sleep(takes)
            if sender.sends is not None:
                raise sender.sends
            return
        raise PeerTimeout("too slow")


class Party:
    """An honest node. Attributes may be changed at any time."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        parties: Mapping[str, Any],
        every: int,
        fragments: int = 1,
        layout: Layout = LAYOUT,
    ) -> None:
        self.name = name
        self.encodes_in, self.judges_in, self.sends_in = 0.1, 0.1, 0.5
        self.sends: Exception | None = None
        """Error raised by a partner's fetch of this party's payload."""
        self.verdict: Callable[[str], str] = lambda peer: "accepted"
        """Gate outcome for the weights of a peer."""
        self.has_trainer = self.may_accept = True
        self.partners = KnownPeers(everyone=True)
        self.steps = 0
        self.applied: Counter[str] = Counter()
        """Committed swaps by partner."""
        self.to_trainer: list[local.ToTrainer] = []
        self.rejected: list[tuple[str, str]] = []
        self.accepted: list[str] = []
        self.store = StubStore(parties)
        self.replica = local.LocalReplica()
        facts = local.ReplicaFacts(layout, fragments, [20] * fragments, False)
        self.replica.start(facts, SWARM, bytes(32), bytes(32))
        self._hub, self._parties = hub, parties
        network: Any = SimpleNamespace(
            peer_id=name,
            connected=lambda: [peer for peer in parties if peer != name],
            is_allowed=lambda peer: True,
            accepted=self.accepted.append,
            rejected=lambda peer, reason, cost=10.0: self.rejected.append((peer, reason)),
            bulk=SimpleNamespace(deadline=lambda peer, size: LEASE_SECONDS / 2),
            requests=SimpleNamespace(request=self._request, serve=self._serve),
        )
        store: Any = self.store
        self.discovery = Discovery(network, self.replica, self.partners)
        self.exchange = SwapService(
            network,
            self.replica,
            self.discovery,
            store,
            self._receive,
            every,
            may_accept=lambda: self.may_accept,
            rng=random.Random(hub.rng.getrandbits(64)),
        )
        self._nursery: trio.Nursery

    async def _request(self, peer: str, protocol: str, data: bytes, **options: Any) -> bytes:
        return await self._hub.request(self.name, peer, data, options["deadline"])

    def _serve(self, protocol: str, handler: Any, **options: Any) -> None:
        self._hub.handlers[self.name] = handler

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.exchange.run)
            task_status.started()
            while True:  # refresh the claims
                for peer in self._parties:
                    if peer != self.name:
                        other = getattr(self._parties[peer], "replica", self.replica)
                        here = Here(self.replica.fingerprint, self.outer_step, other.blocks)
                        self.discovery.received(peer, here)
                await trio.sleep(60.0)

    @property
    def outer_step(self) -> int:
        return self.replica.outer_steps[0]

    def due(self, fragment: int = 0, step_seconds: float = 1.0, steps: int = 0) -> None:
        """Report a due outer step, `steps` training steps after the last one."""
        self.steps += steps
        outer_step = self.replica.outer_steps[fragment]
        self.exchange.outer_step_due(
            local.OuterStepDue(
                fragment,
                outer_step,
                self.steps,
                step_seconds,
                self.replica.within(self.replica.blocks, fragment),
            )
        )

    def outcome(self, name: str) -> int:
        return self.exchange.statistics().outcomes[name]

    @property
    def failures(self) -> dict[str, int]:
        return dict(+Counter(self.exchange.statistics().failures))

    # ---- trainer -----------------------------------------------------------------------------

    def _receive(self, message: local.ToTrainer) -> bool:
        if not self.has_trainer:
            return False
        self.to_trainer.append(message)
        match message:
            case local.TakeSnapshot():
                self._nursery.start_soon(self._take_snapshot, message)
            case local.ApplyPayload():
                self._nursery.start_soon(self._apply, message)
            case local.SoloStep(fragment):
                self.replica.outer_steps[fragment] += 1
        return True

    async def _take_snapshot(self, message: local.TakeSnapshot) -> None:
        await trio.sleep(self.encodes_in)
        step = self.replica.outer_steps[message.fragment]
        written = local.SnapshotWritten(message.session, message.fragment, "out", step)
        self.exchange.snapshot_written(written)

    async def _apply(self, message: local.ApplyPayload) -> None:
        await trio.sleep(self.judges_in)
        outcome = self.verdict(message.peer)
        committed = outcome in ("accepted", "lagging")
        self.replica.outer_steps[message.fragment] += committed
        self.applied[message.peer] += committed
        self.exchange.swap_ended(
            local.SwapEnded(
                message.session, message.fragment, message.peer, outcome, committed, self.outer_step
            )
        )


class Hostile:
    """Proposes to every honest party every `proposes_every` seconds, accepts every proposal, and
    serves payloads as `ways` says, in turn: `well`, `trickles`, `silent` or `denies`."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        parties: Mapping[str, Any],
        _every: int,
        ways: Iterable[str] = ("well",),
        proposes_every: float = 0.0,
    ) -> None:
        self.name = name
        self.ways = list(ways)
        self.sends: Exception | None = None
        self.proposes_every = proposes_every
        self._hub, self._parties = hub, parties
        self._swaps: dict[bytes, str] = {}
        self._way = ""
        hub.handlers[name] = self._serve

    @property
    def sends_in(self) -> float:
        return 0.5 if self._way == "well" else LEASE_SECONDS - 0.5 if self._way == "late" else 1e6

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self.proposes_every or 1e9)
                for name, party in self._parties.items():
                    if isinstance(party, Party):
                        nursery.start_soon(self.propose, name)

    async def propose(self, peer: str) -> None:
        party = self._parties[peer]
        name = self._hub.rng.randbytes(16)
        swap = Swap(name, party.replica.fingerprint, 0, party.outer_step, BLOCKS)
        answer = await self._hub.request(self.name, peer, strict.encode(swap), 5.0)
        if isinstance(decode_message(answer), Accepted):
            self._begin(name)

    def _begin(self, name: bytes) -> None:
        self._swaps[name] = self.ways[len(self._swaps) % len(self.ways)]

    async def _serve(self, peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        match message := decode_message(data):
            case Here():
                return data
            case Swap():
                self._begin(message.id)
                return strict.encode(Accepted(message.id, message.outer_step, message.blocks))
            case Payload():
                self._way = self._swaps.get(message.id, "denies")
                if self._way == "denies":
                    return strict.encode(Refused(message.id, "over"))
                if self._way == "silent":
                    return strict.encode(Busy(message.id))
                return strict.encode(Ready(message.id, bytes(32), bytes(32), SIZE, 20))
        raise PeerError("an answer to nothing")


@contextlib.asynccontextmanager
async def swarm(
    kinds: Mapping[str, Callable[..., Any]], *, every: int = EVERY
) -> AsyncIterator[dict[str, Any]]:
    """Yield running parties by name. every: training steps, of one second each, between outer
    steps."""
    hub, parties = Hub(), dict[str, Any]()
    for name, kind in kinds.items():
        parties[name] = kind(hub, name, parties, every)
    async with trio.open_nursery() as nursery:
        for party in parties.values():
            await nursery.start(party.run)
        yield parties
        nursery.cancel_scope.cancel()


# ---- measurement -------------------------------------------------------------------------------


def solo_steps(party: Party) -> int:
    return sum(isinstance(message, local.SoloStep) for message in party.to_trainer)


async def averaged(
    honest: int,
    ways: Sequence[str] = (),
    count: int = 4,
    intervals: int = 10,
    apart: bool = True,
) -> list[float]:
    """Return one honest node's swaps per interval with honest and with hostile partners, and its
    solo steps.

    Each of `count` hostile nodes proposes to all parties every two seconds. A swap takes 8 s
    without waiting.

    Args:
        apart: Spread the outer steps of the nodes over the interval. Otherwise all are due at once.
    """
    kinds: dict[str, Callable[..., Any]] = {f"honest{n}": Party for n in range(honest)}
    if ways:
        liar = partial(Hostile, ways=ways, proposes_every=2.0)
        kinds |= {f"hostile{n}": liar for n in range(count)}
    async with swarm(kinds) as parties, trio.open_nursery() as nursery:
        nodes = [party for party in parties.values() if isinstance(party, Party)]

        async def train(node: Party, offset: float) -> None:
            node.encodes_in, node.judges_in, node.sends_in = 2.0, 2.0, 4.0
            node.exchange._step_seconds = 1.0
            await trio.sleep(offset)
            while True:
                node.due(steps=EVERY)
                await trio.sleep(EVERY)

        for number, node in enumerate(nodes):
            nursery.start_soon(train, node, apart * number * EVERY / honest)
        await trio.sleep(intervals * EVERY)
        nursery.cancel_scope.cancel()
    for node in nodes:
        counts = node.exchange.statistics()
        assert counts.outcomes["failed"] == sum(counts.failures.values())
        assert set(counts.outcomes) == set(OUTCOMES)
        assert set(counts.failures) <= set(FAILURES)
    by = lambda kind: sum(n for node in nodes for peer, n in node.applied.items() if kind in peer)
    totals = by("honest"), by("hostile"), sum(map(solo_steps, nodes))
    return [total / honest / intervals for total in totals]
