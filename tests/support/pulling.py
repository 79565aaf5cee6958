"""Rollout exchanges, readers and scripted holders on one in-memory network, in virtual time."""

import itertools
import random
from types import SimpleNamespace

import msgspec
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, swarm_of
from swarmnode.rollouts.groups import Draw, GroupRules, answers
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.rollouts.sampling import spread
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingRequest,
    ListingResponse,
)
from tests.support.authors import Author
from tests.support.fakes.network import MemorySwarm
from tests.support.fakes.scorer import InProcessScorer
from tests.support.unseal import unseal

SWARM = swarm_of()
EPOCH = 1_800_000_000.0
LIFE = b"hostile!"


def clock():
    """Return virtual Unix seconds."""
    return EPOCH + trio.current_time()


def policy(tokenizer=TOKENIZER, version=0):
    return SimpleNamespace(
        model=MODEL, tokenizer=tokenizer, policy_version=version, tokens_per_text_byte=1.0
    )


async def rewards_of(group):
    """Return the rewards (G,) that every node's scorer computes."""
    (scored,) = await InProcessScorer().score_many([(group.task, answers(group))])
    return scored.rewards


class PullSwarm:
    """`count` exchanges, connected all with all. refused: choices that the budget of each refuses.

    Args:
        seed: seed of the nodes' randomness.
        latency: seconds that a request takes each way.
        skews: seconds by which each node's clock is ahead.
        swarm: its id.
        cfg: settings `sharing.*`.
    """

    def __init__(
        self,
        count,
        *,
        seed=0,
        latency=0.0,
        scorer=None,
        rules=GroupRules(BUILTIN_TASKS),  # noqa: B008 - immutable
        skews=(),
        swarm=SWARM,
        **cfg,
    ):
        self.medium = MemorySwarm(latency)
        self.scorer = scorer or InProcessScorer()
        self.authors = [Author(swarm, number, rules.tasks) for number in range(count)]
        self.peers = [author.peer for author in self.authors]
        self.networks = [self.medium.join(peer) for peer in self.peers]
        self.refused = [set() for _ in range(count)]
        self.exchanges = []
        for number in range(count):
            skew = skews[number] if skews else 0.0
            self.exchanges.append(
                RolloutExchange(
                    self.networks[number],
                    self.scorer,
                    Credentials(self.authors[number].key, swarm),
                    rules,
                    SharingConfig(**cfg),
                    clock=lambda skew=skew: clock() + skew,
                    rng=random.Random(1000 * seed + number),
                    allows=lambda choice, number=number: choice not in self.refused[number],
                )
            )

    async def start(self, nursery, *numbers):
        """Start the exchanges with these numbers, or all."""
        for number in numbers or range(len(self.exchanges)):
            self.exchanges[number].set_policy(policy())
            await nursery.start(self.exchanges[number].run)
        return self

    def line(self):
        """Leave each node connected only with the one before and the one after it."""
        for one, other in itertools.combinations(range(len(self.peers)), 2):
            if other - one > 1:
                self.medium.cut(self.peers[one], self.peers[other])

    async def publish(self, number, *sequences, long=False):
        """Publish groups of node `number`, listed with the spread that their readers compute."""
        author = self.authors[number]
        for sequence in sequences:
            own = author.long_group(sequence) if long else author.own_group(sequence)
            own = msgspec.structs.replace(own, rewards=await rewards_of(own))
            assert self.exchanges[number].publish(own) == "published"

    def draw(self, number, count=6, version=0, per_peer=None):
        """Return the groups that the trainer of node `number` draws for a step."""
        most = -(-count // 2) if per_peer is None else per_peer
        return self.exchanges[number].draw(Draw(1, count, version, most)).groups

    def outcomes(self, number):
        return self.exchanges[number].admission.statistics().outcomes

    def pulling(self, number):
        return self.exchanges[number].statistics().pulling

    def serving(self, number):
        return self.exchanges[number].statistics().serving

    def admitted_of(self, number, author):
        """Return how many groups of an Author, or of a node's number, node `number` admitted."""
        peer = self.peers[author] if isinstance(author, int) else author.peer
        return self.exchanges[number].authors.admitted_of(peer)


class Reader:
    """A peer that polls and fetches by hand. life, position: its cursor at one holder."""

    def __init__(self, medium, seed=66):
        self.author = Author(SWARM, seed=seed)
        self.peer = self.author.peer
        self.network = medium.join(self.peer)
        self.life, self.position = b"", 0

    async def poll(self, holder, patience=0, deadline=20.0):
        """Return the answer to one poll, from this cursor, which moves on."""
        request = ListingRequest(SWARM, self.life, self.position, patience)
        data = await self.ask(holder, ids.LISTING_PROTOCOL, codec.encode(request), deadline)
        answer = codec.decode(data, ListingResponse, limits.LISTING_RESPONSE_BYTES)
        if answer.status == "ok":
            self.life, self.position = answer.life, answer.position
        return answer

    async def fetch(self, holder, *contents):
        """Return the statuses of one fetch."""
        data = await self.ask(
            holder, ids.GROUPS_PROTOCOL, codec.encode(GroupsRequest(list(contents)))
        )
        answer = codec.decode(data, GroupsResponse, limits.GROUPS_RESPONSE_BYTES)
        return [group.status for group in answer.groups]

    async def ask(self, holder, protocol, data, deadline=20.0):
        return await self.network.requests.request(
            holder, protocol, data, deadline=deadline, max_response_bytes=2**21
        )


class Holder:
    """A peer that lists groups and serves what a test sets.

    Attributes:
        answers: Content id → envelope to serve.

    Args:
        patient: Hold a poll without news open, as honest holders do.
    """

    def __init__(self, medium, seed=77, *, patient=True, author=None):
        self.author = author or Author(SWARM, seed=seed)
        self.peer = self.author.peer
        self.network = medium.join(self.peer)
        self.patient = patient
        self.life, self.position = LIFE, 0
        self.listed, self.answers = [], {}
        self._news = trio.Event()
        self.serve_listing(self.list)
        self.serve_groups(self.give)

    def serve_listing(self, handler):
        """Answer polls with `handler` (peer, request) → response."""
        self.network.requests.serve(
            ids.LISTING_PROTOCOL, handler, max_request_bytes=96, max_response_bytes=2**22
        )

    def serve_groups(self, handler):
        """Answer fetches with `handler` (peer, request) → response."""
        self.network.requests.serve(
            ids.GROUPS_PROTOCOL, handler, max_request_bytes=560, max_response_bytes=2**22
        )

    async def add(self, sequence, **claims):
        """List a good group of its own, with `claims` in place of the true ones."""
        frame = self.author.frame(self.author.group(sequence, clock()))
        await self.add_frame(frame, **claims)

    async def add_frame(self, frame, rewards=None, **claims):
        """List a signed group, with `claims` in place of the true ones. rewards: (G,), where no
        scorer computes them."""
        self.put(await self.line(frame, rewards, **claims), frame)

    async def line(self, frame, rewards=None, **claims):
        """Return the line of a signed group in a listing, as `add_frame` lists it."""
        signed, group = unseal(frame, ids.DOMAIN_ROLLOUT, self.author.swarm, limits.GROUP_BYTES)
        true = ListedGroup(
            envelope.content_id(frame),
            signed.key,
            group.task.id,
            group.created_at,
            len(frame),
            spread(rewards or await rewards_of(group)),
        )
        return msgspec.structs.replace(true, **claims)

    def put(self, listed, frame=None):
        """List a line; give `frame` for it, `unknown` without one."""
        self.listed.append(listed)
        self.position += 1
        if frame is not None:
            self.answers[listed.content] = frame
        self._news.set()
        self._news = trio.Event()

    async def list(self, peer, data):
        """Answer a poll."""
        request = codec.decode(data, ListingRequest, limits.LISTING_REQUEST_BYTES)
        since = request.position if request.life == self.life else 0
        if self.patient and since >= self.position:
            with trio.move_on_after(request.patience):
                await self._news.wait()
        return codec.encode(
            ListingResponse("ok", self.life, self.position, self.listed[since:][-limits.LISTED :])
        )

    async def give(self, peer, data):
        """Answer a fetch."""
        contents = codec.decode(data, GroupsRequest, limits.GROUPS_REQUEST_BYTES).contents
        bodies = [self.answers.get(content) for content in contents]
        return codec.encode(
            GroupsResponse(
                [GroupResponse("ok", body) if body else GroupResponse("unknown") for body in bodies]
            )
        )


async def never(peer, data):
    """Take a request and answer it never."""
    await trio.sleep_forever()
