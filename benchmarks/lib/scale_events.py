"""A simulation of up to a thousand nodes, event by event, for `benchmarks.scale`: the product's own
decisions (shelf, allowances, puller, offers, claims, pool, sampling, trust) with a simulated
network, trainer and clock. The same seed makes the same run.

    trainer's step ─▶ draw from the pool ─▶ polls, held open ─▶ fetches ─▶ pool, shelf
                   └▶ own groups ─▶ shelf ─▶ answers to waiting polls
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from swarmnode.p2p.turnover import SILENT_SECONDS
from swarmnode.rollouts.authors import AuthorTrust
from swarmnode.rollouts.exchange import ANSWER_SECONDS
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.pool import Pool
from swarmnode.rollouts.puller import Pull, Puller
from swarmnode.rollouts.sampling import most_per_peer, spread
from swarmnode.rollouts.shelf import ANSWER_INTERVAL_SECONDS, NEWS_SECONDS, Allowances, Shelf
from swarmnode.trainer.judge import reserve
from swarmnode.wire import codec
from swarmnode.wire.limits import PATIENCE_SECONDS
from swarmnode.wire.listings import GroupsRequest, ListedGroup, ListingRequest, ListingResponse
from swarmnode.wire.messages import RolloutGroup, SamplingParams, TaskRef

SWARM = hashlib.blake2b(b"benchmarks.scale", digest_size=32).digest()
STEP_SECONDS = 30.0
JITTER = 0.2
"""Relative jitter of a step's length."""
ROOM = 6
"""Number of peers' groups that a step trains on, J. A batch has 8 groups; at least 2 are own."""
MADE = 8
"""Useful groups that a node makes in a step."""
DEGREE = 16
TURNOVER_SECONDS = 300.0
"""Time after which a node replaces one of its connections."""
LIFE_SECONDS = 3600.0
"""Mean lifetime of a node; another takes its place."""
TEND_SECONDS = 10.0
FETCH_SECONDS = 6.0
"""Deadline of a fetch."""
ENVELOPE = bytes(256)
"""Stands for every group in memory; only the size in its listing counts."""
START = 1_700_000_000.0
FLAT, POISON = "flat", "poison"
"""Hostile groups. flat: the listed spread is false. poison: the spread is true, and every trainer
refuses the text."""


@dataclass(frozen=True)
class Setup:
    nodes: int
    seed: int = 0
    steps: int = 20
    warm: int = 6
    """Steps before anything is counted."""
    hostile: float = 0.0
    """Share of hostile identities, half of each kind."""
    leave: float = 0.0
    """Share of nodes that leave at the same time, half-way through the counted steps."""
    group_bytes: int = 17_000


@dataclass
class Counts:
    """Counts of honest nodes after the warm-up."""

    node_steps: int = 0
    trained: int = 0
    full: int = 0
    """Steps in which ROOM groups were trained on."""
    listings: int = 0
    listing_bytes: int = 0
    """Bytes of requests and answers, without stream overhead."""
    pulls: int = 0
    pulled: int = 0
    hostile_pulled: int = 0
    failed: int = 0
    """Unanswered requests."""
    seconds: float = 0.0
    """CPU time of this process while counting: decisions and the simulation."""
    ages: list[float] = field(default_factory=list)


@dataclass
class WaitingPoll:
    """A poll that its holder has not answered yet."""

    reader: Node
    request: ListingRequest
    reply: Callable[[ListingResponse], None]
    is_woken: bool = False


class Node:
    """A member. kind: "" for an honest one, FLAT or POISON."""

    def __init__(self, world: World, index: int, kind: str) -> None:
        self.world, self.index, self.kind = world, index, kind
        self.rng = random.Random(f"{world.setup.seed}/{index}")
        self.key = self.rng.randbytes(32)
        self.peer = f"node{index}"
        self.shelf = Shelf(self.key, SWARM, self.rng.randbytes(8))
        self.puller = Puller(self.key, world.author_of, self.rng, world.now)
        self.allowances = Allowances()
        self.waiting: list[WaitingPoll] = []
        self.answered: dict[str, float] = {}
        """Reader → when its last waiting poll was answered."""
        self.pool, self.trust = Pool(), AuthorTrust()
        self.backlog: list[ExternalGroup] = []
        """Groups that a step had no room for; the next step takes them first."""
        self.linked: set[str] = set()
        self.version = 0
        self.met: set[str] = set()
        self.wakes_at = math.inf

    def step(self) -> None:
        """Take a step of the trainer."""
        world = self.world
        if world.nodes.get(self.peer) is not self:
            return
        world.after(STEP_SECONDS * self.rng.uniform(1 - JITTER, 1 + JITTER), self.step)
        if self.kind:
            self._make(64)
            return
        self.decide(self._step)

    def _step(self) -> None:
        world, now = self.world, self.world.now
        count = ROOM + reserve(ROOM) - len(self.backlog)
        drawn = self.pool.draw(
            count,
            self.version,
            now,
            self.rng,
            self._trusts,
            self.trust.participation,
            most_per_peer(ROOM),
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
        self.puller.drew(count, self.pool.waiting(self.trust.participation), self.version, now)

    def _train(self, group: ExternalGroup) -> None:
        world = self.world
        self.met.add(group.peer)
        if world.counting:
            world.used.add(group.content)
            world.counts.ages.append(world.now - group.group.created_at / 1000)

    def _make(self, count: int) -> None:
        """Publish `count` own groups."""
        for _ in range(count):
            width = 0.5 if self.kind else self.rng.uniform(0.1, 0.5)
            rewards = [0.5, 0.5] if self.kind == FLAT else [0.5 - width, 0.5 + width]
            group = self.world.publish(self, rewards)
            about = ListedGroup(
                group.content,
                self.key,
                "rg/chain_sum",
                group.group.created_at,
                self.world.setup.group_bytes,
                0.5 if self.kind else spread(rewards),
            )
            self.shelf.put(ENVELOPE, about)
        for poll in [poll for poll in self.waiting if not poll.is_woken]:
            self._wake(poll)

    # -- fetching

    def decide(self, work: Callable[..., None], *args: object) -> None:
        """Do `work`, then start due polls and fetches."""
        if self.world.nodes.get(self.peer) is self:
            work(*args)
            self._start_due()

    def start(self) -> None:
        """Start to poll and fetch."""
        if not self.kind:
            self.decide(lambda: None)

    def _start_due(self) -> None:
        world, now, seen = self.world, self.world.now, self.world.seen_by(self.peer)
        for peer in self.puller.polls_due(sorted(self.linked), now, seen):
            cursor = self.puller.offers.cursor(peer)
            request = ListingRequest(SWARM, *cursor, PATIENCE_SECONDS)
            world.ask(
                peer,
                PATIENCE_SECONDS + ANSWER_SECONDS,
                lambda other, reply, r=request: other.list_groups(self, r, reply),
                lambda answer, p=peer: self.decide(self._polled, p, answer),
            )
        for pull in self.puller.fetches_due(now, now, self._fetch_weight, seen):
            world.ask(
                pull.holder,
                FETCH_SECONDS,
                lambda other, reply, p=pull: reply(other.give(self, p)),
                lambda statuses, p=pull: self.decide(self._fetched, p, statuses),
            )
        wake = self.puller.next_time(now)
        if wake < self.wakes_at:
            self.wakes_at = wake
            world.after(wake - now + 1e-6, lambda: self._woken(wake))

    def _woken(self, wake: float) -> None:
        if wake == self.wakes_at:
            self.wakes_at = math.inf
            self.decide(lambda: None)

    def _polled(self, peer: str, answer: ListingResponse | None) -> None:
        now = self.world.now
        self.puller.polled(peer, answer, now, now)
        if self.world.counting and answer is not None:
            self.world.counts.listings += 1
            self.world.counts.listing_bytes += len(codec.encode(answer)) + len(
                codec.encode(ListingRequest(SWARM, b"12345678", 9999, PATIENCE_SECONDS))
            )

    def _fetched(self, pull: Pull, statuses: list[str] | None) -> None:
        world, now = self.world, self.world.now
        if statuses is None:
            self.puller.failed(pull, now)
            return
        self.puller.fetched(pull, statuses, now)
        came = [
            listed for listed, status in zip(pull.groups, statuses, strict=True) if status == "ok"
        ]
        if world.counting:
            world.counts.pulls += 1
            world.counts.pulled += len(came)
        holder = world.nodes.get(pull.holder)
        for listed in came:
            group = world.groups[listed.content]
            if world.counting:
                world.counts.hostile_pulled += bool(world.kind_of(group.peer))
            self.puller.scored(listed.content, group.rewards, now)
            world.seen_by(self.peer)(listed.content, note=True)
            if world.kind_of(group.peer) != FLAT:
                self.pool.add(group, now, self.version)
                self.shelf.put(ENVELOPE, listed, holder.key if holder else b"")

    def _trusts(self, peer: str) -> float:
        return self.trust.of(peer, 1.0)

    def _fetch_weight(self, peer: str) -> float:
        return self._trusts(peer) * self.trust.participation(peer)

    # -- serving

    def list_groups(
        self, reader: Node, request: ListingRequest, reply: Callable[[ListingResponse], None]
    ) -> None:
        """Answer a poll as `shelf.ShelfServer` does: at once if the listing is not empty, else at
        the next news or at the end of the patience."""
        now = self.world.now
        if not self.allowances.has_room(reader.peer, now):
            reply(self.shelf.busy())
            return
        poll = WaitingPoll(reader, request, reply)
        self.waiting.append(poll)
        if self.shelf.listing(request, now, reader.key).groups:
            self._answer(poll)
        else:
            self.world.after(request.patience, lambda: self._answer(poll))
            self._wake(poll)

    def _wake(self, poll: WaitingPoll) -> None:
        if self.shelf.has_news(poll.request, poll.reader.key):
            poll.is_woken = True
            now, before = self.world.now, self.answered.get(poll.reader.peer, -math.inf)
            at = max(now + NEWS_SECONDS, before + ANSWER_INTERVAL_SECONDS)
            self.answered[poll.reader.peer] = at
            self.world.after(at - now, lambda: self._answer(poll))

    def _answer(self, poll: WaitingPoll) -> None:
        if poll not in self.waiting or self.world.nodes.get(self.peer) is not self:
            return
        self.waiting.remove(poll)
        listing = self.shelf.listing(poll.request, self.world.now, poll.reader.key)
        self._charge(poll.reader, 100 * len(listing.groups))
        poll.reply(listing)

    def give(self, reader: Node, pull: Pull) -> list[str]:
        """Return the status of each group of a fetch."""
        now = self.world.now
        if not self.allowances.has_room(reader.peer, now):
            return ["busy"] * len(pull.groups)
        request = GroupsRequest([listed.content for listed in pull.groups])
        statuses = [str(answer.status) for answer in self.shelf.give(request, now).groups]
        self._charge(
            reader,
            sum(
                listed.size
                for listed, status in zip(pull.groups, statuses, strict=True)
                if status == "ok"
            ),
        )
        return statuses

    def _charge(self, reader: Node, size: int) -> None:
        self.allowances.charge(reader.peer, size, reader.peer in self.met, self.world.now)


class Seen:
    """Content ids that a node has seen, as admission records them."""

    def __init__(self) -> None:
        self._of: set[bytes] = set()

    def __call__(self, content: bytes, note: bool = False) -> bool:
        if note:
            self._of.add(content)
        return content in self._of


class World:
    """Clock, network and all nodes."""

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
            node.start()
        self.after(TEND_SECONDS, self._tend)

    # -- used by nodes

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
        if not author.kind:
            self.made[author.peer] += self.counting
        return group

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), call))

    def ask(
        self,
        peer: str,
        deadline: float,
        answer: Callable[[Node, Callable[..., None]], None],
        done: Callable[..., None],
    ) -> None:
        """Send a request; call `done` with the answer, or with None at the deadline.

        Args:
            answer: answer(node, reply) calls reply with the answer, now or later.
        """
        is_open = True

        def finish(response: object) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self.counts.failed += self.counting and response is None
                done(response)

        def reply(response: object) -> None:
            self.after(self.rng.uniform(0.02, 0.15), lambda: finish(response))

        def arrive() -> None:
            if (other := self.nodes.get(peer)) is not None:
                answer(other, reply)

        self.after(self.rng.uniform(0.02, 0.15), arrive)
        self.after(deadline, lambda: finish(None))

    # -- events

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = end

    def leave(self, peer: str) -> None:
        """Remove a node; others notice later."""
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
        """Churn nodes, drop dead connections and replace some connections."""
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
            node.start()


@dataclass(frozen=True)
class Result:
    """Result of one run."""

    setup: Setup
    counts: Counts
    used_share: float
    """Share of groups that at least one other node trained on."""
    authors: float
    """Distinct authors whose groups a node has trained on."""
    absorbed_seconds: float | None
    """Seconds from the leave until batches are 95 % as full as before; 0 if they always were."""
    least_fill: float
    """Least mean fill of 30 s after the leave."""
    kilobytes: float
    """KiB per node, without the groups."""


def rings(count: int, neighbours: int, rng: random.Random) -> list[set[int]]:
    """Return a connected graph: `neighbours` / 2 rings through all `count` nodes, each in another
    order; or a full graph.

    Returns:
        The neighbours of each node.
    """
    if neighbours >= count - 1:
        return [set(range(count)) - {index} for index in range(count)]
    linked: list[set[int]] = [set() for _ in range(count)]
    for _ in range(max(1, neighbours // 2)):
        order = list(range(count))
        rng.shuffle(order)
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            if one != other:
                linked[one].add(other)
                linked[other].add(one)
    return linked


def simulate(setup: Setup) -> Result:
    """Run one setup."""
    before = _resident()
    world = World(setup)
    world.run(setup.warm * STEP_SECONDS)
    world.counting = True
    cpu = time.process_time()
    half = (setup.steps - setup.warm) * STEP_SECONDS / 2
    world.run(half)
    left_at = world.now
    if setup.leave:
        for peer in world.rng.sample(sorted(world.nodes), round(setup.leave * len(world.nodes))):
            world.leave(peer)
    world.run(half)
    world.counts.seconds = time.process_time() - cpu
    honest = [node for node in world.nodes.values() if not node.kind]
    seconds, least = absorbed(world.fills, left_at)
    return Result(
        setup=setup,
        counts=world.counts,
        used_share=len(world.used) / max(1, sum(world.made.values())),
        authors=fmean(len(node.met) for node in honest),
        absorbed_seconds=seconds if setup.leave else None,
        least_fill=least,
        kilobytes=(_resident() - before) / len(world.nodes),
    )


def absorbed(fills: list[tuple[float, float]], left_at: float) -> tuple[float | None, float]:
    """Return the seconds from `left_at` until every window of 30 s has 95 % of the former mean
    fill, and the least mean of a window."""
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
    """Return the resident memory in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
