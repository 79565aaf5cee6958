"""A node whose clock is off by more than the window: its groups and everybody's to it are not used,
and nobody is blamed for it."""

import random
from types import SimpleNamespace

import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.testing.network import MemorySwarm
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire import limits
from swarmnode.wire.envelope import Credentials

SWARM = swarm_of()
EPOCH = 1_800_000_000.0
POLICY = SimpleNamespace(
    model=MODEL, tokenizer=TOKENIZER, policy_version=0, tokens_per_text_byte=1.0
)


@pytest.mark.parametrize(
    ("offset", "ours_to_it", "its_to_us"),
    [
        (limits.CLOCK_SKEW_SECONDS - 5, "admitted", "admitted"),
        (limits.CLOCK_SKEW_SECONDS + 5, "admitted", "future"),
        (limits.GROUP_AGE_SECONDS + 5, "stale", "future"),
        (-limits.CLOCK_SKEW_SECONDS - 5, "future", "admitted"),
        (-limits.GROUP_AGE_SECONDS - 5, "future", "stale"),
        (86_400.0, "stale", "future"),
    ],
)
async def test_a_clock_off_by_more_than_the_window_costs_groups_and_no_reputation(
    nursery, autojump_clock, offset, ours_to_it, its_to_us
):
    medium = MemorySwarm()
    authors = [Author(SWARM, seed=number) for number in range(2)]
    networks = [medium.join(author.peer) for author in authors]
    exchanges = []
    for network, author, skew in zip(networks, authors, (0.0, offset), strict=True):
        exchange = RolloutExchange(
            network,
            InProcessScorer(),
            Credentials(author.key, SWARM),
            GroupRules(BUILTIN_TASKS),
            SharingConfig(),
            clock=lambda skew=skew: EPOCH + skew + trio.current_time(),
            rng=random.Random(0),
        )
        exchange.set_policy(POLICY)
        await nursery.start(exchange.run)
        exchanges.append(exchange)
    for exchange, author in zip(exchanges, authors, strict=True):
        assert await exchange.publish(author.own_group(0)) == "gossip"
    await trio.sleep(10)
    right, wrong = exchanges
    assert (outcome(wrong), outcome(right)) == (ours_to_it, its_to_us)
    for exchange, expected in ((wrong, ours_to_it), (right, its_to_us)):
        assert len(exchange.draw(Draw(1, 4, 0, 2)).groups) == (expected == "admitted")
    for network, other in zip(networks, reversed(authors), strict=True):
        assert network.welcome(other.peer)
        assert network.reputation.score(other.peer, trio.current_time()) >= 0.0


def outcome(exchange):
    """Of the one group that came."""
    outcomes = exchange.admission.statistics().outcomes
    (told,) = (reason for reason in ("admitted", "stale", "future") if outcomes.get(reason))
    return told
