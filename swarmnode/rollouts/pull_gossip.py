"""Pull gossip: each node keeps a shelf of groups, polls the listings of connected peers, and
fetches the groups that its trainer will use. Groups travel from shelf to shelf; no peer can push.

    shelf ─ listing, held open up to 10 s until a new group ───▶ peers' polls
          ─ groups, up to 16 and 1 MiB ────────────────────────▶ peers' fetches
    own polls ─▶ listings ─▶ puller chooses groups and holders ─▶ own fetches ─▶ admission ─▶ scorer

This is the anti-entropy of Demers et al. (PODC 1987) in its pull variant, with long polls. A new
group travels as fast as with a push, and only peers that poll receive it. Serving does not depend
on the node's own demand. A node that is paused or over its budget neither fetches nor serves.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import Network
from swarmnode.rollouts import sampling
from swarmnode.rollouts.admission import Admission, Rejected, clock_reason
from swarmnode.rollouts.claims import PROVEN, BeliefStatistics, Lie, contradiction
from swarmnode.rollouts.groups import Candidate
from swarmnode.rollouts.offers import Pull
from swarmnode.rollouts.pace import Throughput
from swarmnode.rollouts.puller import Puller
from swarmnode.rollouts.reasons import Verdict
from swarmnode.rollouts.shelf import Allowances, Shelf, ShelfStatistics
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import RolloutGroup

ANSWER_SECONDS = 5.0
"""A requester waits for the answer to a poll for its patience plus this time."""
NEWS_SECONDS = 0.1
"""A held poll is answered this long after the first new group. The groups of one step are
published together, so one answer lists all of them."""
ANSWER_INTERVAL_SECONDS = 1.0
"""Least time between two answers to one peer's polls with `patience` above 0."""
POLLS_PER_PEER = 2
"""Polls of one peer that are held open at a time. Further ones are refused."""
POLLS_SERVED = 512
"""Polls of all peers that are held open at a time. Further ones are refused."""
FETCHES_PER_PEER = 2
"""Fetches of one peer that are answered at a time. Further ones are refused."""
FETCHES_SERVED = 32
"""Fetches of all peers that are answered at a time. Each is answered from memory, so many readers
can fetch a group as soon as it is listed."""
MOST_READERS = 1024
"""Peers whose last answer is remembered."""
BUDGET_SECONDS = 1.0
"""Time between two checks whether a paused node may fetch again."""
LISTINGS = ("ok", "busy", "other_swarm", "unsupported", "timeout", "failed", "malformed")
"""Outcomes of polls."""
PULLED = ("ok", "refused", "unknown", "busy", "timeout", "failed", "malformed", "mismatch")
"""Outcomes of fetched groups; `refused` by admission, which counts the reason."""
SERVED = ("listing", "group", "unknown", "busy", "malformed")
"""Outcomes of peers' requests: one per poll, and one per group of a fetch."""

Answer = TypeVar("Answer", bound=msgspec.Struct)
Request = TypeVar("Request", bound=msgspec.Struct)


class PullStatistics(msgspec.Struct, frozen=True):
    """Counts of this node's polls and fetches."""

    polled: int = 0
    """Peers whose listings are being polled now."""
    listings: dict[str, int] = {}
    """Polls by outcome, of LISTINGS."""
    pulled: dict[str, int] = {}
    """Fetched groups by outcome, of PULLED."""
    offered: int = 0
    """Listed groups that this node has not fetched; a group counts once per peer that lists it."""
    claims: BeliefStatistics = BeliefStatistics()


class ServingStatistics(msgspec.Struct, frozen=True):
    """Counts of answers to peers."""

    served: dict[str, int] = {}
    """Answers by outcome, of SERVED."""
    waiting: int = 0
    """Polls held open now."""
    shelf: ShelfStatistics = ShelfStatistics()


@dataclass(frozen=True)
class Hooks:
    """Callbacks into the rest of the rollout service."""

    allows: Callable[[str], bool]
    """allows("fetch") and allows("publish") return True while budget and pauses permit fetching
    groups, or serving them."""
    trust: Callable[[str], float]
    """Author's peer id → weight of its groups, 0 to 1."""
    gives: Callable[[str], bool]
    """Peer id → True if a group made by this peer was ever admitted."""
    enqueue: Callable[[Candidate], None]
    """Queues a group that passed admission for scoring."""


class PullGossip:
    """Pull gossip of one node. Start it with `await nursery.start(gossip.run)`.

    Args:
        network: Carries polls and fetches, and records peers' reputation.
        admission: Checks fetched groups.
        shelf: The groups that this node serves.
        hooks: See `Hooks`.
        clock: Returns Unix seconds.
        rng: Source of randomness.
    """

    def __init__(
        self,
        network: Network,
        admission: Admission,
        shelf: Shelf,
        hooks: Hooks,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._network = network
        self._admission = admission
        self._shelf = shelf
        self._hooks = hooks
        self._clock = clock
        self._rng = rng
        self._puller: Puller | None = None
        self._pace = Throughput()
        self._changed = trio.Event()
        self._polls: Counter[str] = Counter()
        self._fetches: Counter[str] = Counter()
        self._server = Server(network, shelf, hooks, clock)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Serve, poll and fetch until cancelled."""
        self._server.start()
        puller = self._get_puller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_connections)
            task_status.started()
            while True:
                self._changed = trio.Event()
                now = trio.current_time()
                if self._hooks.allows("fetch"):
                    self._start_due(puller, nursery)
                    wake = puller.next_time(now)
                else:
                    wake = now + BUDGET_SECONDS
                with trio.move_on_at(wake):
                    await self._changed.wait()

    def put(
        self,
        group: RolloutGroup,
        author: str,
        frame: bytes,
        rewards: list[float],
        source: str = "",
    ) -> None:
        """Put a group on the shelf.

        Args:
            group: The decoded group.
            author: Peer id of its signer.
            frame: Its envelope, as signed.
            rewards: (G,), as this node computed them.
            source: Peer id of the holder it was fetched from; empty for an own group.
        """
        key = envelope.peer_key(author)
        if key is None:
            return
        listed = Listed(
            envelope.content_id(frame),
            key,
            group.task.id,
            group.created_at,
            len(frame),
            min(limits.SPREAD, sampling.spread(rewards)),
        )
        self._shelf.put(frame, listed, envelope.peer_key(source) or b"" if source else key)
        self._server.news()

    def drew(self, count: int, waiting: int, policy_version: int) -> None:
        """Record a draw of the trainer.

        Args:
            count: Groups that the trainer asked for.
            waiting: Groups that are left in the pool.
            policy_version: Version of the policy that the step trains.
        """
        self._get_puller().drew(count, waiting, policy_version, trio.current_time())
        self._changed.set()

    def scored(self, content: bytes, rewards: list[float]) -> None:
        """Compare a group's rewards (G,) with the spread that its holder listed."""
        self._get_puller().scored(content, rewards, trio.current_time())
        self._changed.set()

    def diverged(self, content: bytes) -> None:
        """Note that the episodes of a group end elsewhere when they are replayed."""
        self._get_puller().diverged(content)
        self._changed.set()

    def statistics(self) -> PullStatistics:
        """Return the counts of polls and fetches."""
        puller = self._get_puller()
        return PullStatistics(
            polled=puller.polling,
            listings=dict(self._polls),
            pulled=dict(self._fetches),
            offered=len(puller.offers),
            claims=puller.claims.statistics(),
        )

    def serving(self) -> ServingStatistics:
        """Return the counts of answers."""
        return self._server.statistics()

    def _get_puller(self) -> Puller:
        """Return the puller, created at the first call: trio's clock needs a running event loop."""
        if self._puller is None:
            own_key = envelope.peer_key(self._network.peer_id) or b""
            self._puller = Puller(own_key, envelope.peer_id, self._rng, trio.current_time())
        return self._puller

    async def _watch_connections(self) -> None:
        """Wake `run` when a peer connects or disconnects."""
        while True:
            await self._network.changed()
            self._changed.set()

    def _start_due(self, puller: Puller, nursery: trio.Nursery) -> None:
        """Start the polls and fetches that are due."""
        now, seen = trio.current_time(), self._admission.has_seen
        connected = [peer for peer in self._network.connected() if self._network.welcome(peer)]
        for peer in puller.polls_due(connected, now, seen):
            nursery.start_soon(self._poll, puller, peer)
        for pull in puller.fetches_due(now, self._clock(), self._hooks.trust, seen):
            nursery.start_soon(self._fetch, puller, pull)

    # -- polls

    async def _poll(self, puller: Puller, peer: str) -> None:
        """Poll the listing of `peer` once."""
        life, position = puller.offers.cursor(peer)
        patience = limits.PATIENCE_SECONDS
        request = ListingRequest(self._admission.swarm, life, position, patience)
        now = trio.current_time
        try:
            response = await self._ask(
                peer,
                ids.LISTING_PROTOCOL,
                request,
                ListingResponse,
                deadline=patience + ANSWER_SECONDS,
                limit=limits.LISTING_RESPONSE_BYTES,
            )
        except _Unanswered as why:
            outcome = why.outcome
            if outcome in ("unsupported", "failed"):
                puller.refused(peer, now())
            else:
                puller.polled(peer, None, now(), self._clock())
        else:
            outcome = "other_swarm" if response.status == "unknown" else response.status
            taken = puller.polled(peer, response, now(), self._clock())
            for listed in response.groups if taken else ():
                # `offers` drops a group outside the clock window: this node's clock or its author's
                # is wrong. Count it here, so that the operator sees it.
                if (reason := clock_reason(listed.created_at, self._clock())) is not None:
                    self._admission.refuse(reason, peer)
        self._polls[outcome] += 1
        self._changed.set()

    # -- fetches

    async def _fetch(self, puller: Puller, pull: Pull) -> None:
        """Send one fetch request and hand the received groups to admission."""
        size = sum(listed.size for listed in pull.groups)
        deadline, began = self._pace.deadline(size), trio.current_time()
        try:
            response = await self._ask(
                pull.holder,
                ids.GROUPS_PROTOCOL,
                GroupsRequest([listed.content for listed in pull.groups]),
                GroupsResponse,
                deadline=deadline,
                limit=min(limits.GROUPS_RESPONSE_BYTES, size + 512),
            )
            if len(response.groups) != len(pull.groups):
                self._network.rejected(pull.holder, "bounds")
                raise _Unanswered("malformed")
        except _Unanswered as why:
            puller.failed(pull, trio.current_time())
            self._fetches[why.outcome] += len(pull.groups)
        else:
            outcomes = [
                self._take(puller, pull.holder, listed, group.body)
                if group.status == "ok"
                else group.status
                for listed, group in zip(pull.groups, response.groups, strict=True)
            ]
            puller.fetched(pull, outcomes, trio.current_time())
            self._fetches.update(outcomes)
            took = trio.current_time() - began
            self._pace.observe(pull.holder, sum(len(g.body) for g in response.groups), took)
            if took > deadline / 2:
                puller.claims.lie(pull.holder, "slow")
        self._changed.set()

    def _take(self, puller: Puller, holder: str, listed: Listed, body: bytes) -> str:
        """Check one fetched group against its listing and by admission.

        Returns:
            The outcome, one of PULLED.
        """
        if envelope.content_id(body) != listed.content:
            self._lied(puller, holder, "content")
            return "mismatch"
        result = self._admission.check(body, self._clock())
        if isinstance(result, Rejected):
            if result.verdict is Verdict.REJECT:
                # The holder had to apply the same checks before it listed the group.
                self._lied(puller, holder, "content")
                if result.peer is not None and result.peer != holder:
                    self._network.rejected(result.peer, result.reason)
            return "refused"
        lie = contradiction(listed, envelope.peer_key(result.peer) or b"", result.group, len(body))
        if lie is not None:
            # The group is signed by its author, so it is used although its holder lied.
            self._lied(puller, holder, lie)
            puller.contradicted(listed.content)
        self._hooks.enqueue(msgspec.structs.replace(result, source=holder))
        return "ok"

    def _lied(self, puller: Puller, holder: str, lie: Lie) -> None:
        """Count a false listing; a proven one also costs the holder reputation."""
        puller.claims.lie(holder, lie)
        if lie in PROVEN:
            self._network.rejected(holder, "mismatch")

    async def _ask(
        self,
        peer: str,
        protocol: str,
        request: msgspec.Struct,
        kind: type[Answer],
        *,
        deadline: float,
        limit: int,
    ) -> Answer:
        """Send a request and decode the response.

        Raises:
            _Unanswered: The peer sent no valid response before the deadline.
        """
        try:
            data = await self._network.requests.request(
                peer, protocol, codec.encode(request), deadline=deadline, max_response_bytes=limit
            )
            return codec.decode(data, kind, limit)
        except Incompatible:
            raise _Unanswered("unsupported") from None
        except PeerTimeout:
            raise _Unanswered("timeout") from None
        except BadMessage as bad:
            self._network.rejected(peer, bad.reason)
            raise _Unanswered("malformed") from None
        except PeerError:
            raise _Unanswered("failed") from None


class Server:
    """Answers peers' polls and fetches from the shelf."""

    def __init__(
        self, network: Network, shelf: Shelf, hooks: Hooks, clock: Callable[[], float]
    ) -> None:
        self._network = network
        self._shelf = shelf
        self._hooks = hooks
        self._clock = clock
        self._allowances = Allowances()
        self._answered: OrderedDict[str, float] = OrderedDict()
        """Peer → time of the last answer to its polls, in the future if an answer is scheduled."""
        self._news = trio.Event()
        self._waiting = 0
        self._served: Counter[str] = Counter()

    def start(self) -> None:
        """Register the handlers of both protocols."""
        self._network.requests.serve(
            ids.LISTING_PROTOCOL,
            self._list,
            concurrent=POLLS_SERVED,
            per_peer=POLLS_PER_PEER,
            max_request_bytes=limits.LISTING_REQUEST_BYTES,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        self._network.requests.serve(
            ids.GROUPS_PROTOCOL,
            self._give,
            concurrent=FETCHES_SERVED,
            per_peer=FETCHES_PER_PEER,
            max_request_bytes=limits.GROUPS_REQUEST_BYTES,
            max_response_bytes=limits.GROUPS_RESPONSE_BYTES,
        )

    def news(self) -> None:
        """Wake the held polls after the shelf has changed."""
        self._news.set()
        self._news = trio.Event()

    def statistics(self) -> ServingStatistics:
        """Return the counts of answers."""
        return ServingStatistics(dict(self._served), self._waiting, self._shelf.statistics())

    async def _list(self, peer: str, data: bytes) -> bytes:
        """Answer a poll.

        The answer is sent when there is a group to list and the last answer to this peer is
        ANSWER_INTERVAL_SECONDS old, at the latest when the patience is over.

        Raises:
            BadMessage: The request is malformed; the stream is reset.
        """
        request = self._read(data, ListingRequest, limits.LISTING_REQUEST_BYTES)
        if not self._may_answer(peer):
            self._served["busy"] += 1
            return codec.encode(self._shelf.busy())
        reader = envelope.peer_key(peer) or b""
        listing = self._shelf.listing(request, self._clock(), reader)
        if listing.status == "ok" and request.patience:
            self._waiting += 1
            try:
                with trio.move_on_after(request.patience):
                    if not listing.groups:
                        await self._wait_for_news(request, reader)
                    await self._wait_turn(peer)
            finally:
                self._waiting -= 1
            listing = self._shelf.listing(request, self._clock(), reader)
        self._note_answer(peer, trio.current_time())
        answer = codec.encode(listing)
        self._served["listing"] += 1
        self._allowances.charge(peer, len(answer), self._hooks.gives(peer), self._clock())
        return answer

    async def _wait_for_news(self, request: ListingRequest, reader: bytes) -> None:
        """Return NEWS_SECONDS after the shelf has a new own group for `reader`."""
        while not self._shelf.has_news(request, reader):
            await self._news.wait()
        await trio.sleep(NEWS_SECONDS)

    async def _wait_turn(self, peer: str) -> None:
        """Return when the last answer to `peer` is ANSWER_INTERVAL_SECONDS old.

        The turn is recorded before the wait, so that a second poll of the same peer gets a later
        one.
        """
        turn = self._answered.get(peer, -math.inf) + ANSWER_INTERVAL_SECONDS
        if turn > trio.current_time():
            self._note_answer(peer, turn)
            await trio.sleep_until(turn)

    def _note_answer(self, peer: str, at: float) -> None:
        """Record the time `at` of an answer to a poll of `peer`."""
        self._answered[peer] = max(at, self._answered.pop(peer, -math.inf))
        if len(self._answered) > MOST_READERS:
            self._answered.popitem(last=False)

    async def _give(self, peer: str, data: bytes) -> bytes:
        """Answer a fetch.

        Raises:
            BadMessage: The request is malformed; the stream is reset.
        """
        request = self._read(data, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        if self._may_answer(peer):
            response = self._shelf.give(request, self._clock())
            size = sum(len(group.body) for group in response.groups)
            self._allowances.charge(peer, size, self._hooks.gives(peer), self._clock())
        else:
            response = GroupsResponse([GroupResponse("busy")] * len(request.contents))
        self._served.update(
            "group" if group.status == "ok" else group.status for group in response.groups
        )
        return codec.encode(response)

    def _read(self, data: bytes, kind: type[Request], limit: int) -> Request:
        try:
            return codec.decode(data, kind, limit)
        except BadMessage:
            self._served["malformed"] += 1
            raise

    def _may_answer(self, peer: str) -> bool:
        return self._allowances.has_room(peer, self._clock()) and self._hooks.allows("publish")


class _Unanswered(Exception):
    """Raised when a request has no valid response. `outcome` is one of LISTINGS or PULLED."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome
