import contextlib
import random
from types import SimpleNamespace

import msgspec
import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, completion, swarm_of
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.errors import PeerError
from swarmnode.p2p.gossip import Validation
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Candidate, Draw, GroupRules, Judged
from swarmnode.tasks.client import AsyncScorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import bucket_seed
from swarmnode.testing.network import MemorySwarm
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import ListingRequest, ListingResponse
from swarmnode.wire.messages import Announce, FetchRequest, FetchResponse, TaskRef

SWARM = swarm_of()
EPOCH = 1_800_000_000.0


class Swarm:
    """`count` exchanges on one in-memory network, in virtual time."""

    def __init__(self, nursery, count=3, latency=0.0, scorer=None, spoken=ids.Spoken(), **cfg):  # noqa: B008 - immutable
        self.medium = MemorySwarm(latency)
        self.authors = [Author(SWARM, seed=n) for n in range(count)]
        self.networks = [self.medium.join(author.peer) for author in self.authors]
        self.scorer = scorer or InProcessScorer()
        self.exchanges = [
            RolloutExchange(
                network,
                self.scorer,
                Credentials(author.key, SWARM),
                GroupRules(BUILTIN_TASKS, spoken=spoken),
                SharingConfig(**cfg),
                clock=lambda: EPOCH + trio.current_time(),
                rng=random.Random(0),
            )
            for network, author in zip(self.networks, self.authors, strict=True)
        ]
        self.nursery = nursery

    async def start(self):
        for exchange in self.exchanges:
            exchange.set_policy(policy())
            await self.nursery.start(exchange.run)
        return self

    def outcomes(self, number):
        return self.exchanges[number].admission.statistics().outcomes

    async def publish_from(self, number, frame):
        """Any bytes, as a hostile node would gossip them."""
        await self.networks[number].gossip.publish(ids.rollout_topic(SWARM), frame)
        await trio.testing.wait_all_tasks_blocked()


def policy(tokenizer=TOKENIZER, version=0):
    return SimpleNamespace(
        model=MODEL, tokenizer=tokenizer, policy_version=version, tokens_per_text_byte=1.0
    )


@pytest.fixture
async def swarm(nursery):
    return await Swarm(nursery).start()


async def never(peer, data):
    """A handler that takes requests and answers none."""
    await trio.sleep_forever()


async def settle():
    await trio.sleep(60)


async def test_three_nodes_share_groups_and_each_draws_the_others(swarm, autojump_clock):
    for number in range(3):
        for sequence in range(4):
            assert (
                await swarm.exchanges[number].publish(swarm.authors[number].own_group(sequence))
                == "gossip"
            )
    await settle()
    for number, exchange in enumerate(swarm.exchanges):
        drawn = exchange.draw(Draw(request=5, count=4, policy_version=1, per_peer=4))
        others = {author.peer for author in swarm.authors} - {swarm.authors[number].peer}
        assert {group.peer for group in drawn.groups} == others
        assert len(drawn.groups) == 4
        assert drawn.request == 5
        assert all(sum(group.rewards) >= 2 for group in drawn.groups)
        assert all(group.staleness == 1 for group in drawn.groups)


async def test_where_members_choose_a_group_is_of_the_choice_that_its_seed_is_for(
    nursery, autojump_clock
):
    swarm = await Swarm(nursery, 2, spoken=ids.spoken_in(ids.BUCKET_PROTOCOLS)).start()
    author = swarm.authors[0]
    for sequence, name in enumerate(["builtin/copy", "builtin/sum"]):
        seed, index = bucket_seed(SWARM, author.peer, sequence, name, 0)
        task = TaskRef(name, task_version(name), seed, index)
        assert await swarm.exchanges[0].publish(author.own_group(sequence, task=task)) == "gossip"
    await swarm.exchanges[0].publish(author.own_group(2))  # as if there were no choice
    await settle()
    drawn = swarm.exchanges[1].draw(Draw(1, 4, 0, 4))
    assert {group.group.task.id for group in drawn.groups} == {"builtin/copy", "builtin/sum"}
    assert swarm.outcomes(1)["seed"] == 1


async def test_a_long_group_is_announced_and_fetched(swarm, autojump_clock):
    assert await swarm.exchanges[0].publish(swarm.authors[0].long_group(0)) == "announced"
    await settle()
    for number in (1, 2):
        (group,) = swarm.exchanges[number].draw(Draw(1, 2, 0, 1)).groups
        assert group.group.completions == swarm.authors[0].long_group(0).completions
        assert swarm.exchanges[number].statistics().fetching.fetched == {"ok": 1}
    assert swarm.exchanges[0].statistics().serving.served == {"group": 2}


async def test_a_long_group_reaches_a_peer_that_is_not_connected_to_its_author(
    swarm, autojump_clock
):
    swarm.medium.cut(swarm.authors[0].peer, swarm.authors[2].peer)
    # so that the neighbour between them does not have it yet when it is asked first
    swarm.medium.latency = 1.0
    await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
    await settle()
    assert swarm.outcomes(2)["admitted"] == 1
    served = swarm.exchanges[1].statistics().serving.served
    assert served["unknown"] >= 1
    assert served["group"] == 1


async def test_a_forwarder_that_never_has_it_is_asked_a_few_times_and_not_blamed(
    swarm, autojump_clock
):
    swarm.medium.cut(swarm.authors[0].peer, swarm.authors[2].peer)
    swarm.networks[0].requests.serve(
        ids.FETCH_PROTOCOL, never, max_request_bytes=64, max_response_bytes=9
    )
    await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
    await settle()
    assert swarm.exchanges[2].statistics().fetching.fetched == {"fetch_unknown": 1}
    assert swarm.exchanges[1].statistics().serving.served == {"unknown": 4}
    assert swarm.networks[2].reputation.score(swarm.authors[1].peer, trio.current_time()) == 0


async def test_a_fetch_that_takes_too_long_is_given_up(swarm, autojump_clock):
    swarm.medium.latency = 100.0
    await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
    await settle()
    assert swarm.outcomes(1)["fetch_timeout"] == 1
    assert swarm.exchanges[1].statistics().fetching.pending == 0


async def test_a_peer_that_dies_after_announcing_costs_one_fetch(swarm, autojump_clock):
    swarm.medium.latency = 1.0
    await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
    swarm.medium.leave(swarm.authors[0].peer)
    await settle()
    assert swarm.outcomes(1)["fetch_failed"] == 1


async def test_an_announcer_without_bodies_holds_few_slots_and_others_are_fetched(
    swarm, autojump_clock
):
    """Author 1 announces forty bodies that it never gives."""
    swarm.networks[1].requests.serve(
        ids.FETCH_PROTOCOL, never, max_request_bytes=64, max_response_bytes=9
    )
    for sequence in range(40):
        announce = Announce(bytes([sequence]) * 32, 100_000, int(EPOCH * 1000), sequence)
        await swarm.publish_from(1, swarm.authors[1].frame(announce))
    assert swarm.exchanges[0].statistics().fetching.pending == 8
    assert swarm.outcomes(0)["busy"] == 32
    await swarm.exchanges[2].publish(swarm.authors[2].long_group(0))
    await trio.sleep(0.1)  # long before the first of those deadlines
    assert swarm.outcomes(0)["admitted"] == 1


async def test_sixteen_authors_without_bodies_keep_no_newcomer_from_being_fetched(
    nursery, autojump_clock
):
    """Two announcements a second of all together, each connected, and none ever gives anything."""
    swarm = await Swarm(nursery, 2).start()
    authors = [Author(SWARM, seed=100 + number) for number in range(16)]
    networks = [swarm.medium.join(author.peer) for author in authors]
    for network in networks:
        network.requests.serve(
            ids.FETCH_PROTOCOL, never, max_request_bytes=64, max_response_bytes=9
        )
    for number in range(420):
        announce = Announce(
            number.to_bytes(32), limits.GROUP_BYTES, int(EPOCH * 1000), number // 16
        )
        await networks[number % 16].gossip.publish(
            ids.rollout_topic(SWARM), authors[number % 16].frame(announce)
        )
        if number % 60 == 30:
            await swarm.exchanges[1].publish(swarm.authors[1].long_group(number))
        await trio.sleep(0.5)
    assert swarm.outcomes(0)["admitted"] == 7


async def test_what_finds_no_room_among_the_fetches_may_still_be_pulled(swarm, autojump_clock):
    swarm.networks[1].requests.serve(
        ids.FETCH_PROTOCOL, never, max_request_bytes=64, max_response_bytes=9
    )
    bodies = [
        swarm.authors[1].frame(swarm.authors[1].group(sequence, EPOCH)) for sequence in range(9)
    ]
    for sequence, body in enumerate(bodies):
        announce = Announce(envelope.content_id(body), len(body), int(EPOCH * 1000), sequence)
        await swarm.publish_from(1, swarm.authors[1].frame(announce))
    assert swarm.outcomes(0)["busy"] == 1
    assert isinstance(swarm.exchanges[0].admission.check_pulled(bodies[8], EPOCH), Candidate)


def incompressible(author, sequence):
    """A group of 480 KB as sent: sixteen answers of 6,000 tokens, none like another."""
    rng, own = random.Random(0), author.own_group(sequence, size=16)
    long = [own.completions[0]]
    for _ in range(15):
        logprobs = [-rng.random() for _ in range(6_000)]
        text = completion("".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=6_000)))
        long.append(
            msgspec.structs.replace(
                text, logprobs=tensors.pack_logprobs(logprobs), logprob=sum(logprobs)
            )
        )
    return msgspec.structs.replace(own, completions=long, rewards=[1.0] + 15 * [0.0])


async def test_a_step_of_long_groups_published_at_once_all_comes_to_a_newcomer(
    nursery, autojump_clock
):
    """Of whom nothing was admitted: it is given two of these at once and one in eight seconds, and
    told `busy` in between."""
    swarm = await Swarm(nursery, 2).start()
    for sequence in range(8):
        assert (
            await swarm.exchanges[0].publish(incompressible(swarm.authors[0], sequence))
            == "announced"
        )
    await settle()
    assert swarm.exchanges[0].statistics().serving.catalogue.bytes > 8 * 470_000
    assert swarm.exchanges[1].statistics().fetching.fetched == {"ok": 8}
    assert swarm.outcomes(1)["admitted"] == 8
    assert 0 < swarm.exchanges[0].statistics().serving.served["busy"] < 16


async def test_a_body_other_than_announced_costs_its_author_reputation(swarm, autojump_clock):
    async def lie(peer, data):
        return codec.encode(FetchResponse("ok", b"x" * 9))

    group = swarm.authors[0].long_group(0)
    swarm.networks[0].requests.serve(
        ids.FETCH_PROTOCOL, lie, max_request_bytes=64, max_response_bytes=10**7
    )
    await swarm.exchanges[0].publish(group)
    await settle()
    assert swarm.outcomes(1)["mismatch"] == 1
    assert swarm.networks[1].reputation.score(swarm.authors[0].peer, trio.current_time()) < 0


async def test_nonsense_requests_are_counted_and_refused(swarm, autojump_clock):
    with pytest.raises(PeerError):
        await swarm.networks[1].requests.request(
            swarm.authors[0].peer, ids.FETCH_PROTOCOL, b"\xff", deadline=1, max_response_bytes=100
        )
    assert swarm.exchanges[0].statistics().serving.served == {"malformed": 1}


async def test_one_peer_is_given_so_much_and_no_more(swarm, autojump_clock):
    await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
    await settle()
    asked = ListingRequest(SWARM, b"", 0)
    data = await swarm.networks[1].requests.request(
        swarm.authors[0].peer,
        ids.LISTING_PROTOCOL,
        codec.encode(asked),
        deadline=1,
        max_response_bytes=limits.LISTING_RESPONSE_BYTES,
    )
    content = codec.decode(data, ListingResponse, limits.LISTING_RESPONSE_BYTES).groups[0].content
    for _ in range(50):
        await swarm.networks[1].requests.request(
            swarm.authors[0].peer,
            ids.FETCH_PROTOCOL,
            codec.encode(FetchRequest(content)),
            deadline=1,
            max_response_bytes=10**7,
        )
    served = swarm.exchanges[0].statistics().serving.served
    assert 2 < served["group"] < 12
    assert served["busy"] == 52 - served["group"]


@pytest.mark.parametrize("name", hostile_frames(Author(SWARM), EPOCH))
async def test_hostile_gossip_is_counted_and_others_are_served(swarm, autojump_clock, name):
    frame, reason = hostile_frames(swarm.authors[0], EPOCH)[name]
    if len(frame) <= limits.GOSSIP_BYTES:
        await swarm.publish_from(0, frame)
        assert swarm.outcomes(1) == {reason: 1}
    await swarm.exchanges[2].publish(swarm.authors[2].own_group(0))
    await settle()
    assert swarm.outcomes(1)["admitted"] == 1


async def test_a_liar_is_blamed_by_those_who_prove_it_and_then_ignored(swarm, autojump_clock):
    for sequence in range(8):
        group = swarm.authors[0].group(sequence, EPOCH)
        forged = msgspec.structs.replace(
            group, task=msgspec.structs.replace(group.task, seed=9 << 20)
        )
        await swarm.publish_from(0, swarm.authors[0].frame(forged))
    assert not swarm.networks[1].welcome(swarm.authors[0].peer)
    assert swarm.networks[1].welcome(swarm.authors[2].peer)
    assert swarm.outcomes(1)["seed"] < 8


async def test_an_author_is_blamed_even_when_another_passed_it_on(swarm, autojump_clock):
    swarm.medium.cut(swarm.authors[0].peer, swarm.authors[2].peer)
    group = swarm.authors[0].group(0, EPOCH)
    forged = swarm.authors[0].frame(
        msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, seed=9 << 20))
    )
    assert swarm.exchanges[2].validate(forged, swarm.authors[1].peer) is Validation.REJECT
    assert swarm.networks[2].reputation.score(swarm.authors[0].peer, trio.current_time()) < 0


async def test_a_poisoned_group_costs_itself_only(swarm, autojump_clock):
    poisoned = swarm.authors[0].own_group(0, texts=["\N{SKULL}", "1"])
    poisoned = msgspec.structs.replace(poisoned, rewards=[0.0, 1.0])
    await swarm.exchanges[0].publish(poisoned)
    await swarm.exchanges[2].publish(swarm.authors[2].own_group(0))
    await settle()
    assert swarm.outcomes(1)["scorer"] == 1
    assert swarm.outcomes(1)["admitted"] == 1
    assert swarm.networks[1].welcome(swarm.authors[0].peer)


async def test_an_author_that_wears_the_scorer_out_is_not_scored_for_a_while(swarm, autojump_clock):
    victim, (liar, _, honest) = swarm.exchanges[1], swarm.authors
    for sequence in range(3):  # both in one batch: nothing runs between the two
        victim.validate(
            liar.frame(liar.group(sequence, EPOCH, texts=["\N{SKULL}", "1"])), liar.peer
        )
        victim.validate(honest.frame(honest.group(sequence, EPOCH)), honest.peer)
        await trio.testing.wait_all_tasks_blocked()
    assert swarm.outcomes(1) == {"candidate": 6, "scorer": 3, "admitted": 3}
    victim.validate(liar.frame(liar.group(3, EPOCH)), liar.peer)
    victim.validate(honest.frame(honest.group(3, EPOCH)), honest.peer)
    await trio.testing.wait_all_tasks_blocked()
    assert swarm.outcomes(1) == {"candidate": 8, "scorer": 4, "admitted": 4}
    later = EPOCH + 601
    await trio.sleep(601)
    victim.validate(liar.frame(liar.group(4, later)), liar.peer)
    await trio.testing.wait_all_tasks_blocked()
    assert swarm.outcomes(1)["admitted"] == 5


async def test_a_question_that_cannot_be_regenerated_costs_reputation(swarm, autojump_clock):
    group = swarm.authors[0].group(0, EPOCH)
    harder = msgspec.structs.replace(group.task, difficulty=3)
    await swarm.publish_from(0, swarm.authors[0].frame(msgspec.structs.replace(group, task=harder)))
    await settle()
    assert swarm.outcomes(1)["unregenerable"] == 1
    assert swarm.networks[1].reputation.score(swarm.authors[0].peer, trio.current_time()) < 0


async def test_a_slow_scorer_makes_us_busy_but_groups_are_still_passed_on(nursery, autojump_clock):
    swarm = await Swarm(
        nursery, scorer=InProcessScorer(seconds=60.0), groups_per_second=1000.0
    ).start()
    frames = [swarm.authors[0].frame(swarm.authors[0].group(n, EPOCH)) for n in range(180)]
    for frame in frames[:164]:
        swarm.exchanges[1].validate(frame, "forwarder")
        await trio.sleep(0.01)
    busy = swarm.outcomes(1)["busy"]
    assert 0 < busy <= 164 - 64
    await trio.sleep(20)  # until it may pass sixteen on again
    assert [swarm.exchanges[1].validate(frame, "forwarder") for frame in frames[164:]] == 16 * [
        Validation.ACCEPT
    ]
    assert swarm.outcomes(1)["busy"] == busy + 16
    await trio.sleep(6000)
    assert swarm.outcomes(1)["admitted"] == 164 - busy


async def test_without_a_scorer_groups_are_dropped_and_counted(nursery, autojump_clock):
    swarm = await Swarm(nursery, scorer=AsyncScorer()).start()  # never run
    await swarm.exchanges[0].publish(swarm.authors[0].own_group(0))
    await settle()
    assert swarm.outcomes(1) == {"candidate": 1, "scorer": 1}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"rewards": [1.0] * 8}, "zero_advantage"),
        ({"rewards": [0.0] * 7 + [1.0]}, "gossip"),
        ({"completions": []}, "invalid"),
        ({"sequence": -1}, "invalid"),
        ({"sequence": 2**70}, "invalid"),
    ],
)
async def test_only_groups_that_others_would_take_are_published(
    swarm, autojump_clock, change, outcome
):
    own = msgspec.structs.replace(swarm.authors[0].own_group(0), **change)
    assert await swarm.exchanges[0].publish(own) == outcome
    statistics = swarm.exchanges[0].statistics()
    assert (statistics.published, statistics.unpublished) == (
        (1, {}) if outcome == "gossip" else (0, {outcome: 1})
    )


async def test_a_group_with_a_lone_surrogate_stays_here(swarm, autojump_clock):
    completions = swarm.authors[0].own_group(0).completions
    broken = [msgspec.structs.replace(completions[0], text="\ud800"), *completions[1:]]
    assert (
        await swarm.exchanges[0].publish(
            msgspec.structs.replace(swarm.authors[0].own_group(0), completions=broken)
        )
        == "invalid"
    )


async def test_a_group_too_long_for_a_frame_goes_without_token_ids_or_stays(swarm, autojump_clock):
    own = msgspec.structs.replace(
        swarm.authors[0].own_group(0, texts=["a" * 16_000] * 9), rewards=[0.0] * 8 + [1.0]
    )
    # 1.3 MB with ids, a few hundred bytes of compressed text without
    assert await swarm.exchanges[0].publish(own) == "gossip"
    words = ["".join(random.Random(n).choices("0123456789abcdef", k=16_000)) for n in range(64)]
    rare = [
        msgspec.structs.replace(c, text=c.text * 4)
        for c in swarm.authors[0].own_group(1, texts=words).completions
    ]
    assert (
        await swarm.exchanges[0].publish(
            msgspec.structs.replace(swarm.authors[0].own_group(1), completions=rare)
        )
        == "oversize"
    )


async def test_we_publish_no_faster_than_peers_take(swarm, autojump_clock):
    outcomes = [await swarm.exchanges[0].publish(swarm.authors[0].own_group(n)) for n in range(80)]
    assert outcomes.count("gossip") == 64  # 16 a second, a burst of four seconds
    assert outcomes[-1] == "rate"
    await settle()
    assert "rate" not in swarm.outcomes(1)


async def test_before_the_trainer_says_hello_nothing_is_published(nursery, autojump_clock):
    swarm = Swarm(nursery)
    assert await swarm.exchanges[0].publish(swarm.authors[0].own_group(0)) == "no_policy"


async def test_with_sharing_off_nothing_goes_out_or_comes_in(nursery, autojump_clock):
    swarm = await Swarm(nursery, enabled=False).start()
    assert await swarm.exchanges[0].publish(swarm.authors[0].own_group(0)) == "disabled"
    await settle()
    assert swarm.exchanges[1].draw(Draw(1, 4, 0, 2)).groups == []


async def test_token_ids_are_dropped_for_a_trainer_with_another_tokenizer(swarm, autojump_clock):
    swarm.exchanges[1].set_policy(policy(tokenizer=b"o" * 32))
    await swarm.exchanges[0].publish(swarm.authors[0].own_group(0))
    await settle()
    (other,) = swarm.exchanges[1].draw(Draw(1, 2, 0, 1)).groups
    (same,) = swarm.exchanges[2].draw(Draw(1, 2, 0, 1)).groups
    assert not any(c.token_ids or c.logprobs for c in other.group.completions)
    assert all(c.token_ids and c.logprobs for c in same.group.completions)


async def test_a_failed_spot_check_costs_trust_and_no_reputation(swarm, autojump_clock):
    """Our own policy may be the one that moved: honest nodes must not end up greylisting each other
    for learning."""
    exchange, peer = swarm.exchanges[1], swarm.authors[0].peer
    for _ in range(16):
        exchange.authors.judged(Judged(peer, "used"))
    for _ in range(100):
        exchange.authors.judged(Judged(peer, "spot_check"))
    assert exchange.authors.trust(peer) == 0.25, "and the network still listens"
    assert exchange.authors.belief(peer) == 1 / 16
    for _ in range(16):
        exchange.authors.judged(Judged(peer, "used"))
    assert exchange.authors.trust(peer) == exchange.authors.belief(peer) == 1.0, (
        "whoever is trained on again is trusted again"
    )


async def test_forged_ids_cost_trust_and_reputation(swarm, autojump_clock):
    exchange, liar = swarm.exchanges[1], swarm.authors[0].peer
    for _ in range(16):
        exchange.authors.judged(Judged(liar, "used"))
    assert exchange.authors.trust(liar) == 1.0
    exchange.authors.judged(Judged(liar, "forged_ids"))
    assert exchange.authors.trust(liar) < 0.25
    assert exchange.authors.belief(liar) == 0.5
    assert exchange.statistics().judged == {"used": 16, "forged_ids": 1}


async def test_an_unlikely_text_is_nobodys_fault(swarm, autojump_clock):
    exchange, peer = swarm.exchanges[1], swarm.authors[0].peer
    exchange.authors.judged(Judged(peer, "untokenizable"))
    assert exchange.authors.trust(peer) == 0.25


async def test_a_network_that_fails_to_publish_costs_that_group(swarm, autojump_clock, monkeypatch):
    async def broken(topic, data):
        raise RuntimeError("the library's own")

    monkeypatch.setattr(swarm.networks[0].gossip, "publish", broken)
    assert await swarm.exchanges[0].publish(swarm.authors[0].own_group(0)) == "failed"


async def test_groups_that_nobody_draws_expire(swarm, autojump_clock):
    await swarm.exchanges[0].publish(swarm.authors[0].own_group(0))
    await settle()
    await trio.sleep(limits.GROUP_AGE_SECONDS)
    assert len(swarm.exchanges[1].pool) == 0


async def test_cancelling_leaves_nothing_behind(autojump_clock):
    with contextlib.suppress(trio.Cancelled):
        async with trio.open_nursery() as nursery:
            swarm = await Swarm(nursery, latency=50.0).start()
            await swarm.exchanges[0].publish(swarm.authors[0].long_group(0))
            await trio.sleep(1)
            assert swarm.exchanges[1].statistics().fetching.pending == 1
            nursery.cancel_scope.cancel()
    assert swarm.exchanges[1].statistics().fetching.pending == 0
