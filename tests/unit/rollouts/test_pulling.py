"""Pulling and serving on an in-memory network, in virtual time, against peers that lie, drip, take,
and do not speak it."""

import random
from types import SimpleNamespace

import msgspec
import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.errors import PeerError
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.rollouts.pulling import Around, Pulling
from swarmnode.rollouts.sampling import spread
from swarmnode.testing.network import MemorySwarm
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import FetchResponse

SWARM = swarm_of()
EPOCH = 1_800_000_000.0
LIFE = b"hostile!"


def clock():
    return EPOCH + trio.current_time()


async def rewards_of(group):
    (scored,) = await InProcessScorer().score_many(
        [(group.task, [completion.text for completion in group.completions])]
    )
    return scored.rewards


class Swarm:
    """Exchanges on one network, each with its own setting of `sharing.exchange`."""

    def __init__(self, *choices):
        self.allowed = {}
        budget = SimpleNamespace(
            allows=lambda choice: self.allowed.get(choice, True), listening=lambda: True
        )
        self.medium = MemorySwarm()
        self.scorer = InProcessScorer()
        self.authors = [Author(SWARM, seed=n) for n in range(len(choices))]
        self.networks = [self.medium.join(author.peer) for author in self.authors]
        self.exchanges = [
            RolloutExchange(
                network,
                self.scorer,
                Credentials(author.key, SWARM),
                GroupRules(BUILTIN_TASKS),
                SharingConfig(exchange=choice),
                clock=clock,
                rng=random.Random(seed),
                budget=budget,
            )
            for seed, (network, author, choice) in enumerate(
                zip(self.networks, self.authors, choices, strict=True)
            )
        ]

    async def start(self, nursery):
        for exchange in self.exchanges:
            exchange.set_policy(
                SimpleNamespace(
                    model=MODEL, tokenizer=TOKENIZER, policy_version=0, tokens_per_text_byte=1.0
                )
            )
            await nursery.start(exchange.run)
        await trio.sleep(2)
        return self

    async def publish(self, number, *sequences, long=False):
        author = self.authors[number]
        for sequence in sequences:
            own = author.long_group(sequence) if long else author.own_group(sequence)
            await self.exchanges[number].publish(
                msgspec.structs.replace(own, rewards=await rewards_of(own))
            )

    async def draw(self, number, count=6, version=0):
        """A step: what is in the pool is drawn, and time goes by until what is asked for meanwhile
        is here."""
        drawn = self.exchanges[number].draw(Draw(1, count, version, -(-count // 2))).groups
        await trio.sleep(20)
        return drawn

    def told(self, number):
        statistics = self.exchanges[number].statistics()
        return statistics.pulling, statistics.serving


class Holder:
    """A peer that lists groups and gives what it likes. answers: content id → body."""

    def __init__(self, medium, seed=77):
        self.author = Author(SWARM, seed=seed)
        self.network = medium.join(self.author.peer)
        self.listed, self.answers, self.asked, self.position = [], {}, [], 0
        serve = self.network.requests.serve
        serve(ids.LISTING_PROTOCOL, self.list, max_request_bytes=96, max_response_bytes=2**22)
        serve(ids.GROUPS_PROTOCOL, self.give, max_request_bytes=560, max_response_bytes=2**22)

    async def add(self, sequence, **claims):
        """A good group, listed with these claims in place of the true ones."""
        frame = self.author.frame(self.author.group(sequence, clock()))
        group = envelope.unseal(frame, ids.DOMAIN_ROLLOUT, SWARM, limits.GROUP_BYTES)[1]
        key = self.author.key.public_key().public_bytes_raw()
        true = Listed(
            envelope.content_id(frame),
            key,
            group.task.id,
            group.created_at,
            len(frame),
            spread(await rewards_of(group)),
        )
        self.listed.append(msgspec.structs.replace(true, **claims))
        self.answers[self.listed[-1].content] = frame
        self.position += 1

    async def list(self, peer, request):
        known = codec.decode(request, ListingRequest, limits.LISTING_REQUEST_BYTES).position
        return codec.encode(
            ListingResponse(
                "ok", LIFE, self.position, self.listed[known:] if known < self.position else []
            )
        )

    async def give(self, peer, request):
        contents = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES).contents
        self.asked += contents
        bodies = [self.answers.get(content) for content in contents]
        return codec.encode(
            GroupsResponse(
                [FetchResponse("ok", body) if body else FetchResponse("unknown") for body in bodies]
            )
        )


async def test_pullers_learn_from_gossipers_and_from_each_other_and_go_on_publishing(
    nursery, autojump_clock
):
    swarm = await Swarm("gossip", "pull", "pull").start(nursery)
    for number in range(3):
        await swarm.publish(number, *range(4))
    await trio.sleep(20)
    assert swarm.exchanges[0].statistics().admission.admitted == 8  # by gossip, pullers' too
    # which they do not listen to
    assert [swarm.exchanges[n].statistics().admission.candidates for n in (1, 2)] == [0, 0]
    for number in (1, 2):
        await swarm.draw(number)
        drawn = await swarm.draw(number)
        assert {group.peer for group in drawn} == {author.peer for author in swarm.authors} - {
            swarm.authors[number].peer
        }
        pulling, _ = swarm.told(number)
        assert pulling.mode == "pull"
        assert pulling.pulled["ok"] == 8 == pulling.claims.kept
        assert pulling.claims.lies == {}
        assert pulling.listers == 2


async def test_a_node_whose_trainer_does_not_draw_asks_nobody(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    await swarm.publish(0, *range(4))
    await trio.sleep(600)
    assert swarm.told(1)[0].listings == {}
    for _ in range(3):
        await swarm.draw(1, count=2)
    assert sum(swarm.told(1)[0].pulled.values()) == 4
    await trio.sleep(600)
    asked = swarm.told(1)[0].listings["ok"]
    assert 0 < asked < 40  # of those that it may ask for one draw, and then no more
    await trio.sleep(600)
    assert swarm.told(1)[0].listings["ok"] == asked


async def test_a_long_group_needs_no_announcement_among_pullers(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    await swarm.publish(0, 0, long=True)
    await swarm.draw(1)
    (group,) = await swarm.draw(1)
    assert group.group.completions == swarm.authors[0].long_group(0).completions
    assert swarm.exchanges[1].statistics().fetching.fetched == {}


async def test_groups_travel_on_to_whoever_is_not_connected_with_their_author(
    nursery, autojump_clock
):
    swarm = await Swarm("pull", "pull", "pull").start(nursery)
    swarm.medium.cut(swarm.authors[0].peer, swarm.authors[2].peer)
    await swarm.publish(0, *range(3))
    for _ in range(2):
        await swarm.draw(1, count=3)
    await swarm.draw(2, count=3)
    assert {group.peer for group in await swarm.draw(2, count=3)} == {swarm.authors[0].peer}


@pytest.mark.parametrize(
    ("claims", "lie", "costs"),
    [
        ({"spread": 0.0}, "spread", False),
        ({"size": 2000}, "size", True),
        ({"author": b"\x07" * 32}, "author", True),
        ({"task": "builtin/none"}, "task", True),
        ({"created_at": int(EPOCH * 1000) - 5}, "age", True),
    ],
)
async def test_a_listing_that_lies_costs_its_holder_and_others_are_pulled_from(
    claims, lie, costs, nursery, autojump_clock
):
    swarm = await Swarm("gossip", "pull").start(nursery)
    liar = Holder(swarm.medium)
    for sequence in range(4):
        await liar.add(sequence, **claims)
    await swarm.publish(0, *range(4))
    for _ in range(4):
        await swarm.draw(1)
    pulling, _ = swarm.told(1)
    assert pulling.claims.lies == {lie: 4}
    assert swarm.exchanges[1].authors.admitted_of(swarm.authors[0].peer) == 4
    # what is signed is as good as before
    assert swarm.exchanges[1].authors.admitted_of(liar.author.peer) == 4
    assert (swarm.networks[1].score(liar.author.peer) < -30) is costs


async def test_groups_that_are_not_there_or_are_others_cost_their_holder(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    liar = Holder(swarm.medium)
    for sequence in range(4):
        await liar.add(sequence)
    liar.answers = {
        liar.listed[0].content: liar.answers[liar.listed[1].content],
        liar.listed[1].content: b"\xc1" * 300,
    }
    await swarm.publish(0, *range(4))
    for _ in range(4):
        await swarm.draw(1)
    pulling, _ = swarm.told(1)
    assert pulling.claims.lies == {"absent": 2, "content": 2}
    assert pulling.pulled == {"ok": 4, "unknown": 2, "mismatch": 2}
    assert swarm.exchanges[1].authors.admitted_of(swarm.authors[0].peer) == 4
    assert len(liar.asked) == 4  # each once


async def test_a_holder_that_drips_holds_nobody_up(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    slow = [Holder(swarm.medium, seed) for seed in (77, 78)]

    async def drip(peer, request):
        await trio.sleep(10_000)

    slow[0].list = slow[1].give = drip
    for holder in slow:
        holder.network.requests.serve(
            ids.LISTING_PROTOCOL, holder.list, max_request_bytes=96, max_response_bytes=2**22
        )
        holder.network.requests.serve(
            ids.GROUPS_PROTOCOL, holder.give, max_request_bytes=560, max_response_bytes=2**22
        )
        await holder.add(0)
    await swarm.publish(0, *range(4))
    swarm.exchanges[1].draw(Draw(1, 4, 0, 4))
    await trio.sleep(1)
    assert swarm.exchanges[1].authors.admitted_of(swarm.authors[0].peer) == 4
    await trio.sleep(60)
    pulling, _ = swarm.told(1)
    assert pulling.listings["timeout"] == 1
    assert pulling.pulled["timeout"] == 1
    assert pulling.claims.lies == {"slow": 1}


async def test_a_holder_that_trickles_within_its_deadline_is_asked_less_and_stretches_nobodys(
    nursery, autojump_clock
):
    swarm = await Swarm("gossip", "pull").start(nursery)
    slow = Holder(swarm.medium)

    async def trickle(peer, request):
        await trio.sleep(1.5)
        return await Holder.give(slow, peer, request)

    slow.network.requests.serve(
        ids.GROUPS_PROTOCOL, trickle, max_request_bytes=560, max_response_bytes=2**22
    )
    for sequence in range(3):
        await slow.add(sequence)
    await swarm.publish(0, *range(3))
    for _ in range(3):
        await swarm.draw(1)
    pulling, _ = swarm.told(1)
    assert pulling.pulled == {"ok": 6}
    assert pulling.claims.lies["slow"] >= 1


async def test_listings_without_end_are_refused_and_counted(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    endless, stuck = Holder(swarm.medium), Holder(swarm.medium, 78)
    await endless.add(0)
    many = [msgspec.structs.replace(endless.listed[0], content=bytes([n]) * 32) for n in range(200)]
    long = codec.encode(ListingResponse("ok", LIFE, 10**6, many))

    async def no_end(peer, request):
        return long

    async def again(peer, request):
        return codec.encode(ListingResponse("ok", LIFE, 1, stuck.listed))

    stuck.network.requests.serve(
        ids.LISTING_PROTOCOL, again, max_request_bytes=96, max_response_bytes=2**22
    )
    endless.network.requests.serve(
        ids.LISTING_PROTOCOL, no_end, max_request_bytes=96, max_response_bytes=2**22
    )
    await stuck.add(0)
    await swarm.publish(0, *range(4))
    for _ in range(4):
        await swarm.draw(1)
    pulling, _ = swarm.told(1)
    assert pulling.listings["malformed"] >= 1
    assert (
        pulling.claims.lies["cursor"]
        == pulling.listings["ok"] - swarm.told(0)[1].served["listing"] - 1
    )
    assert pulling.offered <= 2
    assert swarm.exchanges[1].authors.admitted_of(swarm.authors[0].peer) == 4


async def test_requests_for_a_thousand_groups_and_of_a_taker_are_refused_and_others_are_served(
    nursery, autojump_clock
):
    swarm = await Swarm("gossip", "pull").start(nursery)
    await swarm.publish(0, *range(8), long=True)
    await swarm.publish(1, 0)
    await trio.sleep(10)
    taker, giver = Holder(swarm.medium), swarm.authors[0].peer
    contents = [listed.content for listed in (await listing_of(taker, giver)).groups]
    assert len(contents) == 9
    for request in (
        b"\x81" + bytes(400),
        codec.encode(GroupsRequest(contents[:1] * 2)),
        codec.encode(GroupsRequest([b"a" * 32] * 1000)),
    ):
        with pytest.raises(PeerError):
            await ask(taker, giver, ids.GROUPS_PROTOCOL, request)
    statuses = []
    for _ in range(20):
        answer = await ask(
            taker, giver, ids.GROUPS_PROTOCOL, codec.encode(GroupsRequest(contents[:4]))
        )
        statuses += [
            group.status
            for group in codec.decode(answer, GroupsResponse, limits.GROUPS_RESPONSE_BYTES).groups
        ]
    assert 0 < statuses.count("ok") < 20
    assert (await listing_of(taker, giver)).status == "busy"
    await swarm.draw(1)
    assert len(await swarm.draw(1)) > 0
    served = swarm.told(0)[1].served
    assert served["malformed"] >= 2
    assert served["busy"] >= 60


async def test_what_is_made_during_a_step_is_here_at_the_next_draw(nursery, autojump_clock):
    swarm = await Swarm("pull").start(nursery)
    holder, made = Holder(swarm.medium), []
    for step in range(6):
        drawn = swarm.exchanges[0].draw(Draw(1, 6, step, 6)).groups
        await trio.sleep(20)
        await holder.add(step)
        made.append(holder.listed[-1].content)
        await trio.sleep(20)
        if step > 1:  # how long a step takes is known
            assert [group.content for group in drawn] == [made[step - 1]]


async def test_a_node_that_has_its_next_step_waits_for_the_newest_and_one_that_has_not_asks_at_once(
    nursery, autojump_clock
):
    swarm = await Swarm("pull").start(nursery)
    holders = [Holder(swarm.medium, seed=70 + n) for n in range(6)]
    for holder in holders:
        for sequence in range(12):
            await holder.add(sequence)
    for _ in range(4):
        await swarm.draw(0)  # two steps' worth are in the pool
    held, answers = trio.Event(), [holder.list for holder in holders]

    def slowly(answer):
        async def list_(peer, request):
            await held.wait()
            return await answer(peer, request)

        return list_

    for holder, answer in zip(holders, answers, strict=True):
        holder.network.requests.serve(
            ids.LISTING_PROTOCOL, slowly(answer), max_request_bytes=96, max_response_bytes=2**22
        )
    asked = lambda: sum(len(holder.asked) for holder in holders)
    before = asked()
    swarm.exchanges[0].draw(Draw(1, 6, 0, 3))
    await trio.sleep(17)
    assert asked() == before
    held.set()
    await trio.sleep(2)
    assert asked() > before
    held, before = trio.Event(), asked()
    for _ in range(3):  # all that there is
        swarm.exchanges[0].draw(Draw(1, 6, 0, 3))
    await trio.sleep(5)
    assert asked() > before


async def test_what_does_not_fit_the_budget_is_neither_asked_for_nor_given(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    await swarm.publish(0, *range(4))
    swarm.allowed.update(fetch=False, serve=True)
    await swarm.draw(1)
    assert swarm.told(1)[0].listings == {}
    swarm.allowed.update(fetch=True, serve=False)
    await swarm.draw(1)
    assert swarm.told(1)[0].listings.keys() == {"busy"}
    swarm.allowed["serve"] = True
    await swarm.draw(1)
    assert swarm.told(1)[0].pulled == {"ok": 4}


async def test_a_peer_that_does_not_list_is_left_alone(nursery, autojump_clock):
    swarm = await Swarm("gossip", "pull").start(nursery)
    swarm.medium.join(Author(SWARM, seed=99).peer)
    await swarm.publish(0, *range(2))
    for _ in range(5):
        await swarm.draw(1, count=1)
    pulling, _ = swarm.told(1)
    assert pulling.listings["unsupported"] == 1
    assert pulling.listers == 1
    assert pulling.pulled["ok"] == 2


async def test_what_the_topic_has_left_in_the_pool_says_nothing_about_listings(
    nursery, autojump_clock
):
    network = SimpleNamespace(peer_id="", connected=list, welcome=bool)
    around = Around(allows=bool, trust=len, enqueue=print, in_topic=list)
    pulling = Pulling(network, None, around, "pull", trio.current_time, random.Random(0))
    nursery.start_soon(pulling.run)
    for waiting, wanted in ((100, None), (0, 0.0)):
        pulling.want(6, waiting)
        await trio.sleep(5.0)
        assert pulling.statistics().listed_per_wanted == wanted
    nursery.cancel_scope.cancel()


async def test_a_flooded_node_leaves_the_topic_by_itself_and_comes_back_when_the_swarm_has_shrunk(
    nursery, autojump_clock
):
    swarm = await Swarm("auto", *["gossip"] * 3).start(nursery)
    topic, sequence = ids.rollout_topic(SWARM), 0
    modes, listening = [], []
    for step in range(220):
        publishers = range(1, 4) if step < 80 else range(1, 2)
        made = 9 if step < 80 else 2
        for number in publishers:
            await swarm.publish(number, *range(sequence, sequence + made))
        sequence += made
        await swarm.draw(0, count=2, version=step)
        modes.append(swarm.told(0)[0].mode)
        listening.append(swarm.networks[0].gossip.has_joined(topic))
    order = [one for one, before in zip(modes, [None, *modes], strict=False) if one != before]
    assert order == ["gossip", "trial", "pull", "gossip"]
    assert listening[modes.index("trial")]
    assert not listening[modes.index("pull") + 1]
    assert listening[-1]
    assert swarm.told(0)[0].switches == 2


async def ask(holder, peer, protocol, request):
    return await holder.network.requests.request(
        peer, protocol, request, deadline=5, max_response_bytes=2**21
    )


async def listing_of(holder, peer):
    answer = await ask(
        holder, peer, ids.LISTING_PROTOCOL, codec.encode(ListingRequest(SWARM, b"", 0))
    )
    return codec.decode(answer, ListingResponse, limits.LISTING_RESPONSE_BYTES)
