"""Up to a thousand nodes of benchmarks.scale, event by event: the product's own decisions
(catalogue, allowances, asking, offers, claims, mode, pool, sampling, trust), with a simulated
network, trainer and clock. The same seed makes the same run.

    trainer's step ─▶ draw from the pool ─▶ want ─▶ listings ─▶ pulls ─▶ pool, catalogue
                   └▶ own groups ─▶ catalogue; to all in the topic, where there is one
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from swarmnode.rollouts.catalogue import Allowances
from swarmnode.rollouts.mode import Choice, Mode, Phase
from swarmnode.rollouts.pulling import LISTING_SECONDS

from benchmarks.neighbours import rings
from benchmarks.pullers import Puller
from swarmnode.p2p.liveness import SILENT_SECONDS
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.offers import Pull
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.sampling import most_per_peer, spread
from swarmnode.rollouts.trust import PeerTrust
from swarmnode.trainer.judge import reserve
from swarmnode.wire import codec
from swarmnode.wire.listings import GroupsResponse, Listed, ListingRequest, ListingResponse
from swarmnode.wire.messages import RolloutGroup, SamplingParams, TaskRef

SWARM = hashlib.blake2b(b"benchmarks.scale", digest_size=32).digest()
STEP_SECONDS = 30.0
JITTER = 0.2
"""Of a step's length."""
ROOM = 6
"""Groups of others that a step trains on, J; a batch is 8 and a node samples 2 of them at least."""
MADE = 8
"""Useful groups that a node makes in a step: the most that others have to choose from."""
DEGREE = 16
TURNOVER_SECONDS = 300.0
"""In which a node exchanges one of its connections for another."""
LIFE_SECONDS = 3600.0
"""A node stays so long on average, and another comes in its place."""
TEND_SECONDS = 10.0
LEARNT = 3
"""Groups that show a behaviour, of which a node must have trained on so many to show it itself."""
ENVELOPE = bytes(256)
"""Stands for every group in memory: what matters of it is the size in its listing."""
START = 1_700_000_000.0
FLAT, POISON = "flat", "poison"
"""Hostile groups: with a spread that they do not have; with rewards as listed, and refused by every
trainer."""


@dataclass(frozen=True)
class Setup:
    nodes: int
    seed: int = 0
    choice: Choice = "pull"
    steps: int = 20
    warm: int = 6
    """Steps before anything is counted."""
    hostile: float = 0.0
    """Share of identities that are hostile, half of each kind."""
    leave: float = 0.0
    """Share of nodes that leaves at once, without a word, half-way through what is counted."""
    group_bytes: int = 17_000


@dataclass
class Counts:
    """Of honest nodes, after warming up."""

    node_steps: int = 0
    trained: int = 0
    full: int = 0
    """Steps in which ROOM groups were trained on."""
    listings: int = 0
    listed: int = 0
    """Entries in them."""
    listing_bytes: int = 0
    """Of requests and answers, without what streams add."""
    pulls: int = 0
    pulled: int = 0
    hostile_pulled: int = 0
    gossiped: int = 0
    """Groups that came by gossip."""
    failed: int = 0
    """Requests that were not answered."""
    seconds: float = 0.0
    """CPU time of all decisions."""
    ages: list[float] = field(default_factory=list)


class Node:
    """One member. kind: "" for an honest one, FLAT, POISON."""

    def __init__(self, world: World, index: int, kind: str) -> None:
        self.world, self.index, self.kind = world, index, kind
        self.rng = random.Random(f"{world.setup.seed}/{index}")
        self.key = self.rng.randbytes(32)
        self.peer = f"node{index}"
        self.puller = Puller(self.key, SWARM, world.author_of, self.rng)
        self.allowances = Allowances()
        self.mode = Mode(world.setup.choice, world.now)
        self.pool, self.trust = Pool(), PeerTrust()
        self.backlog: list[ExternalGroup] = []
        """Groups that a step had no room for, first in the next: `trainer.external`."""
        self.linked: set[str] = set()
        self.version = self.shown = self.read = 0
        self.knows = self.drained = False
        self.met: set[str] = set()

    def step(self) -> None:
        """One step of its trainer."""
        world, now = self.world, self.world.now
        if world.nodes.get(self.peer) is not self:
            return
        world.after(STEP_SECONDS * self.rng.uniform(1 - JITTER, 1 + JITTER), self.step)
        if self.kind:
            self._make(64)
            return
        began = time.process_time()
        self._hear()
        count = ROOM + reserve(ROOM) - len(self.backlog)
        drawn = self.pool.draw(
            count, self.version, now, self.rng, self._trusts, self.trust.belief, most_per_peer(ROOM)
        )
        drawn, self.backlog = [*self.backlog, *drawn], []
        used = 0
        for group in drawn:
            if used == ROOM:
                self.backlog.append(group)
                continue
            refused = world.kind_of(group.peer) == POISON
            self.trust.judged(group.peer, "surprise" if refused else "used")
            if not refused:
                used += 1
                self._train(group)
        self.version += 1
        if world.counting:
            world.counts.node_steps += 1
            world.counts.trained += used
            world.counts.full += used == ROOM
            world.fills.append((now, used / ROOM))
        self._make(MADE)
        self.puller.want(count, self.pool.waiting(self.trust.belief), now)
        pulls = self.mode.phase is Phase.PULL
        self.drained = pulls and (self.drained or self.puller.wanted > 0)
        if self.drained or not pulls:
            self.mode.note("wanted", count)
        self.mode.look(now, self.puller.asking.listers(self.linked))
        self._pump()
        if (next_moment := self.puller.moments.next) < math.inf:
            world.after(next_moment - now + 1e-6, self._ask_before_next)
        if world.counting:
            world.counts.seconds += time.process_time() - began

    def _train(self, group: ExternalGroup) -> None:
        world = self.world
        self.met.add(group.peer)
        self.shown += group.content in world.shown
        if self.shown >= LEARNT and not self.knows:
            self.knows = True
            world.knowing.append(world.now)
        if world.counting:
            world.used.add(group.content)
            world.counts.ages.append(world.now - group.group.created_at / 1000)

    def _make(self, count: int) -> None:
        """Own groups, or a liar's."""
        for _ in range(count):
            rewards = (
                [0.5, 0.5]
                if self.kind == FLAT
                else [0.5 - (width := self.rng.uniform(0.1, 0.5)), 0.5 + width]
            )
            group = self.world.publish(self, rewards)
            about = Listed(
                group.content,
                self.key,
                "rg/chain_sum",
                group.group.created_at,
                self.world.setup.group_bytes,
                0.5 if self.kind else spread(rewards),
            )
            self.puller.catalogue.put(ENVELOPE, about)

    def _hear(self) -> None:
        """What came by gossip since the last step; a few of it, the newest, stand for all in the
        pool."""
        world = self.world
        came = world.published - self.read
        self.read = world.published
        if self.mode.phase is Phase.PULL or not came:
            return
        self.mode.note("arrived", came)
        if world.counting:
            world.counts.gossiped += came
        latest = list(itertools.islice(reversed(world.latest), min(came, 256)))
        for group in self.rng.sample(latest, min(len(latest), 3 * ROOM)):
            if group.peer != self.peer and world.kind_of(group.peer) != FLAT:
                self._admit(group)

    # -- asking

    def _ask_before_next(self) -> None:
        began = time.process_time()
        self._pump()
        if self.world.counting:
            self.world.counts.seconds += time.process_time() - began

    def _pump(self) -> None:
        """Start what is due."""
        world, now = self.world, self.world.now
        if self.mode.phase is Phase.GOSSIP or world.nodes.get(self.peer) is not self:
            return
        for peer, listing in self.puller.to_list(
            sorted(self.linked), now, trial=self.mode.phase is Phase.TRIAL
        ):
            world.ask(
                self.peer,
                peer,
                LISTING_SECONDS,
                lambda other, r=listing: other.list(self, r),
                lambda a, p=peer: self._listed(p, a),
            )
        if self.mode.phase is Phase.PULL:
            for pull in self.puller.to_pull(now, self._asks, world.seen_by(self.peer)):
                world.ask(
                    self.peer,
                    pull.holder,
                    6.0,
                    lambda other, p=pull: other.give(self, p),
                    lambda a, p=pull: self._pulled(p, a),
                )

    def _listed(self, peer: str, answer: ListingResponse | None) -> None:
        began = time.process_time()
        new = self.puller.listed(peer, answer, self.world.now)
        self.mode.note("listed", new * self.puller.claims.credit(peer))
        if self.world.counting and answer is not None:
            self.world.counts.listings += 1
            self.world.counts.listed += len(answer.groups)
            self.world.counts.listing_bytes += len(codec.encode(answer)) + len(
                codec.encode(ListingRequest(SWARM, b"12345678", 9999))
            )
        self._pump()
        if self.world.counting:
            self.world.counts.seconds += time.process_time() - began

    def _pulled(self, pull: Pull, answer: GroupsResponse | None) -> None:
        world = self.world
        began = time.process_time()
        came = self.puller.pulled(pull, answer, world.now)
        if world.counting:
            world.counts.pulls += answer is not None
            world.counts.pulled += len(came)
        for listed, _ in came:
            group = world.groups[listed.content]
            lie = world.kind_of(group.peer) == FLAT
            if world.counting:
                world.counts.hostile_pulled += bool(world.kind_of(group.peer))
            self.puller.scored(listed.content, as_listed=not lie)
            self.mode.note("gained", not lie)
            world.seen_by(self.peer)(listed.content, note=True)
            if not lie:
                self._admit(group)
                self.puller.catalogue.put(ENVELOPE, listed)
        self._pump()
        if world.counting:
            world.counts.seconds += time.process_time() - began

    def _admit(self, group: ExternalGroup) -> None:
        self.pool.add(group, self.world.now, self.version)

    def _trusts(self, peer: str) -> float:
        return self.trust.of(peer, 1.0)

    def _asks(self, peer: str) -> float:
        return self._trusts(peer) * self.trust.belief(peer)

    # -- answering

    def list(self, asker: Node, request: ListingRequest) -> ListingResponse:
        now = self.world.now
        if not self.allowances.has_room(asker.peer, now):
            return self.puller.catalogue.busy()
        answer = self.puller.catalogue.listing(request, now)
        self.allowances.charge(asker.peer, 100 * len(answer.groups), asker.peer in self.met, now)
        return answer

    def give(self, asker: Node, pull: Pull) -> GroupsResponse | None:
        now = self.world.now
        if not self.allowances.has_room(asker.peer, now):
            return None
        answer = self.puller.give(pull, now)
        size = sum(
            listed.size
            for listed, group in zip(pull.groups, answer.groups, strict=True)
            if group.status == "ok"
        )
        self.allowances.charge(asker.peer, size, asker.peer in self.met, now)
        return answer


class Seen:
    """Content ids that were here, as admission remembers them."""

    def __init__(self) -> None:
        self._of: set[bytes] = set()

    def __call__(self, content: bytes, note: bool = False) -> bool:
        if note:
            self._of.add(content)
        return content in self._of


class World:
    """Clock, network and everybody in it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = random.Random(f"world/{setup.seed}/{setup.nodes}")
        self.now = START
        self.counting = False
        self.counts = Counts()
        self.fills: list[tuple[float, float]] = []
        self.nodes: dict[str, Node] = {}
        self.groups: dict[bytes, ExternalGroup] = {}
        self.made: Counter[str] = Counter()
        self.used: set[bytes] = set()
        self.shown: set[bytes] = set()
        self.knowing: list[float] = []
        self.published = 0
        self.latest: deque[ExternalGroup] = deque(maxlen=256)
        self._keys: dict[bytes, str] = {}
        self._kinds: dict[str, str] = {}
        self._seen: dict[str, Seen] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._born = itertools.count()
        sampling = SamplingParams(1.0, 1.0, 64)
        self._body = lambda created: RolloutGroup(
            TaskRef("t", "v", 0, 0), b"", b"", 0, created, 0, sampling, []
        )
        for _ in range(setup.nodes):
            self._join()
        for node, linked in zip(
            list(self.nodes.values()), rings(setup.nodes, DEGREE, self.rng), strict=True
        ):
            node.linked = {f"node{i}" for i in linked}
        self.after(TEND_SECONDS, self._tend)

    # -- what nodes use

    def author_of(self, key: bytes) -> str:
        return self._keys[key]

    def kind_of(self, peer: str) -> str:
        return self._kinds[peer]

    def seen_by(self, peer: str) -> Seen:
        return self._seen[peer]

    def publish(self, author: Node, rewards: list[float]) -> ExternalGroup:
        content = self.rng.randbytes(32)
        group = ExternalGroup(
            content, author.peer, self._body(int(self.now * 1000)), "", rewards, staleness=0
        )
        self.groups[content] = group
        self._seen[author.peer](content, note=True)
        if author.knows:
            self.shown.add(content)
        if not author.kind:
            self.published += 1
            self.latest.append(group)
            self.made[author.peer] += self.counting
        return group

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), call))

    def ask(
        self,
        asker: str,
        peer: str,
        deadline: float,
        answer: Callable[[Node], object],
        done: Callable[..., None],
    ) -> None:
        """A request, there and back; None where nobody is there."""

        def arrive() -> None:
            other = self.nodes.get(peer)
            said = answer(other) if other is not None else None
            self.after(
                self.rng.uniform(0.02, 0.15) if other is not None else deadline, lambda: done(said)
            )
            self.counts.failed += self.counting and said is None

        self.after(self.rng.uniform(0.02, 0.15), arrive)

    # -- what happens

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = end

    def leave(self, peer: str) -> None:
        """Without a word: others notice after a while."""
        del self.nodes[peer]

    def _join(self) -> Node:
        index = next(self._born)
        share, kinds = self.setup.hostile, (FLAT, POISON)
        kind = kinds[index % 2] if share and self.rng.random() < share else ""
        node = Node(self, index, kind)
        self.nodes[node.peer] = node
        self._keys[node.key], self._kinds[node.peer], self._seen[node.peer] = (
            node.peer,
            kind,
            Seen(),
        )
        self.after(self.rng.uniform(0, STEP_SECONDS), node.step)
        return node

    def _tend(self) -> None:
        """Churn, connections that are gone, and connections exchanged for others."""
        self.after(TEND_SECONDS, self._tend)
        for peer in [
            peer for peer in self.nodes if self.rng.random() < TEND_SECONDS / LIFE_SECONDS
        ]:
            self.leave(peer)
            self._join()
        members = list(self.nodes)
        for node in list(self.nodes.values()):
            gone = [peer for peer in node.linked if peer not in self.nodes]
            for peer in gone:
                if self.rng.random() < TEND_SECONDS / SILENT_SECONDS:
                    node.linked.discard(peer)
            if len(node.linked) >= DEGREE and self.rng.random() < TEND_SECONDS / TURNOVER_SECONDS:
                other = self.rng.choice(sorted(node.linked))
                node.linked.discard(other)
                if other in self.nodes:
                    self.nodes[other].linked.discard(node.peer)
            for _ in range(2 * (min(DEGREE, len(members) - 1) - len(node.linked))):
                other = self.rng.choice(members)
                if (
                    other != node.peer
                    and len(node.linked) < DEGREE
                    and len(self.nodes[other].linked) < 2 * DEGREE
                ):
                    node.linked.add(other)
                    self.nodes[other].linked.add(node.peer)


@dataclass(frozen=True)
class Result:
    """Of one run; `counts` and what follows from who did what."""

    setup: Setup
    counts: Counts
    minutes: float
    used_share: float
    """Groups that at least one other node trained on."""
    authors: float
    """Distinct authors that a node has trained on since it came."""
    spread_steps: float | None
    """Until a behaviour of one node is shown by 90 % of all."""
    absorbed_seconds: float | None
    """From when `leave` of all nodes left until batches are 95 % as full as before; 0: they always
    were."""
    least_fill: float
    """Least mean over 30 s, after that."""
    kilobytes: float
    """Memory per node, without the groups themselves."""
    phases: dict[str, int]


def simulate(setup: Setup) -> Result:
    """One run."""
    before = _resident()
    world = World(setup)
    world.run(setup.warm * STEP_SECONDS)
    world.counting = True
    first = next(node for node in world.nodes.values() if not node.kind)
    first.knows, began = True, world.now
    half = (setup.steps - setup.warm) * STEP_SECONDS / 2
    world.run(half)
    left_at = world.now
    if setup.leave:
        for peer in world.rng.sample(sorted(world.nodes), round(setup.leave * len(world.nodes))):
            world.leave(peer)
    world.run(half)
    honest = [node for node in world.nodes.values() if not node.kind]
    seconds, least = absorbed(world.fills, left_at)
    return Result(
        setup=setup,
        counts=world.counts,
        minutes=world.counts.node_steps * STEP_SECONDS / 60,
        used_share=len(world.used) / max(1, sum(world.made.values())),
        authors=fmean(len(node.met) for node in honest),
        spread_steps=spread_steps(world.knowing, began, len(honest)),
        absorbed_seconds=seconds if setup.leave else None,
        least_fill=least,
        kilobytes=(_resident() - before) / len(world.nodes),
        phases=dict(Counter(node.mode.phase.value for node in honest)),
    )


def spread_steps(knowing: list[float], began: float, nodes: int) -> float | None:
    """Steps from `began` until 90 % of `nodes` know, one of which knew; None where they did not.
    knowing: when each learnt."""
    needed = max(1, round(0.9 * nodes) - 1)
    return (knowing[needed - 1] - began) / STEP_SECONDS if len(knowing) >= needed else None


def absorbed(fills: list[tuple[float, float]], left_at: float) -> tuple[float | None, float]:
    """Seconds from `left_at` after which no 30 s have a mean below 95 % of what was before; and the
    least of those means."""
    usual = fmean([fill for at, fill in fills if at < left_at] or [1.0])
    after: dict[int, list[float]] = {}
    for at, fill in fills:
        if at >= left_at:
            after.setdefault(int((at - left_at) / STEP_SECONDS), []).append(fill)
    means = {window: fmean(values) for window, values in after.items()}
    low = [window for window, mean in means.items() if mean < 0.95 * usual]
    if low and max(low) == max(means):
        return None, min(means.values())
    return (max(low) + 1) * STEP_SECONDS if low else 0.0, min(means.values(), default=1.0)


def _resident() -> float:
    """KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
