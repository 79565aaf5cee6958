"""The rollout service of a node, in virtual time: publishing, and the outcome of fetched groups."""

from collections import Counter

import msgspec
import pytest
import trio

from swarmnode.rollouts.groups import Draw
from swarmnode.tasks.client import AsyncScorer
from tests.support.authors import Author
from tests.support.fakes.scorer import InProcessScorer
from tests.support.pulling import SWARM, Holder, PullSwarm, clock, policy

SURROGATES = [
    msgspec.structs.replace(each, text="\ud800") for each in Author(SWARM).own_group(0).completions
]


@pytest.fixture
async def swarm(nursery):
    return await PullSwarm(3).start(nursery)


async def settle():
    await trio.sleep(60)


async def test_groups_of_one_network_are_of_one_source(swarm, autojump_clock, monkeypatch):
    reader = swarm.exchanges[0]
    monkeypatch.setattr(reader._network, "origin", lambda peer: "192.0.2.0/24")
    for number in (1, 2):
        assert swarm.exchanges[number].publish(swarm.authors[number].own_group(0)) == "published"
    await settle()
    entries = [entry for mine in reader.pool._authors.values() for entry in mine.values()]
    assert len({entry.group.peer for entry in entries}) == 2
    assert {entry.source for entry in entries} == {"192.0.2.0/24"}
    assert all(entry.is_direct for entry in entries)


async def test_author_of_failing_groups_is_excluded(nursery, autojump_clock):
    swarm = await PullSwarm(1).start(nursery)
    holder, liar, honest = Holder(swarm.medium), Author(SWARM, seed=78), Author(SWARM, seed=79)

    async def publish(sequence, *texts):
        """List a group of each in one listing, so that both are scored in one batch."""
        frames = [
            liar.frame(liar.group(sequence, clock(), texts=texts or None)),
            honest.frame(honest.group(sequence, clock())),
        ]
        rewards = [[0.0, 1.0] if texts else None, None]
        lines = [await holder.line(*each) for each in zip(frames, rewards, strict=True)]
        for line, frame in zip(lines, frames, strict=True):
            holder.put(line, frame)
        await trio.sleep(20)

    for sequence in range(3):  # a scorer that fails at all of a batch may be at fault itself
        await publish(sequence, "\N{SKULL}", "1")
    assert swarm.outcomes(0) == {"candidate": 6, "scorer": 3, "admitted": 3}
    await publish(3)
    assert swarm.outcomes(0) == {"candidate": 8, "scorer": 4, "admitted": 4}
    await trio.sleep(601)
    await publish(4)
    assert swarm.outcomes(0)["admitted"] == 6


async def test_with_a_slow_scorer_nothing_is_lost(nursery, autojump_clock):
    swarm = await PullSwarm(3, scorer=InProcessScorer(seconds=60.0)).start(nursery)
    for sequence in range(12):
        await swarm.publish(0, sequence)
        await trio.sleep(5)
    await trio.sleep(600)
    assert swarm.admitted_of(1, 0) == swarm.admitted_of(2, 0) == 12


async def test_without_a_scorer_groups_are_dropped_and_counted(nursery, autojump_clock):
    swarm = await PullSwarm(2, scorer=AsyncScorer()).start(nursery)  # never run
    await swarm.publish(0, 0)
    await settle()
    assert swarm.outcomes(1) == {"candidate": 1, "scorer": 1}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"rewards": [1.0] * 8}, "zero_advantage"),
        ({"rewards": [0.0] * 7 + [1.0]}, "published"),
        ({"completions": []}, "invalid"),
        ({"sequence": -1}, "invalid"),
        ({"sequence": 2**70}, "invalid"),
        ({"completions": SURROGATES}, "invalid"),
    ],
)
async def test_only_groups_that_others_would_take_are_published(
    swarm, autojump_clock, change, outcome
):
    own = msgspec.structs.replace(swarm.authors[0].own_group(0), **change)
    assert swarm.exchanges[0].publish(own) == outcome
    statistics = swarm.exchanges[0].statistics()
    assert (statistics.published, +Counter(statistics.unpublished)) == (
        (1, {}) if outcome == "published" else (0, {outcome: 1})
    )


async def test_we_publish_no_faster_than_peers_take(swarm, autojump_clock):
    outcomes = [swarm.exchanges[0].publish(swarm.authors[0].own_group(n)) for n in range(80)]
    assert outcomes.count("published") == 64  # 16 a second, a burst of four seconds
    assert outcomes[-1] == "rate"
    await settle()
    assert "rate" not in swarm.outcomes(1)


async def test_before_the_trainer_says_hello_nothing_is_published(nursery, autojump_clock):
    swarm = PullSwarm(1)
    assert swarm.exchanges[0].publish(swarm.authors[0].own_group(0)) == "no_policy"


async def test_with_sharing_off_nothing_goes_out_or_comes_in(nursery, autojump_clock):
    swarm = await PullSwarm(2, enabled=False).start(nursery)
    assert swarm.exchanges[0].publish(swarm.authors[0].own_group(0)) == "disabled"
    await settle()
    assert swarm.exchanges[1].draw(Draw(1, 4, 0, 2)).groups == []


async def test_token_ids_of_another_tokenizer_are_dropped(swarm, autojump_clock):
    swarm.exchanges[1].set_policy(policy(tokenizer=b"o" * 32))
    swarm.exchanges[0].publish(swarm.authors[0].own_group(0))
    await settle()
    (other,) = swarm.exchanges[1].draw(Draw(1, 2, 0, 1)).groups
    (same,) = swarm.exchanges[2].draw(Draw(1, 2, 0, 1)).groups
    assert not any(c.token_ids or c.logprobs for c in other.group.completions)
    assert all(c.token_ids and c.logprobs for c in same.group.completions)


async def test_forged_ids_cost_trust_and_reputation(swarm, autojump_clock):
    exchange, liar = swarm.exchanges[1], swarm.authors[0].peer
    for _ in range(16):
        exchange.authors.judged(liar, "used")
    assert exchange.authors.trust(liar) == 1.0
    score = swarm.networks[1].score(liar)
    exchange.authors.judged(liar, "spot_check")
    assert swarm.networks[1].score(liar) == score, "the policy that moved may be the own one"
    exchange.authors.judged(liar, "used")
    exchange.authors.judged(liar, "forged_ids")
    assert exchange.authors.trust(liar) < 0.25
    assert exchange.authors.participation(liar) == 0.5
    assert +Counter(exchange.statistics().judged) == {"used": 17, "spot_check": 1, "forged_ids": 1}
