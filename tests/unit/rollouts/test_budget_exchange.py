"""A node without budget among nodes that have it, in virtual time."""

import random
from types import SimpleNamespace

import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.p2p.budget import CHOICES
from swarmnode.rollouts.exchange import RolloutExchange, Unlimited
from swarmnode.rollouts.groups import GroupRules
from swarmnode.testing.network import MemorySwarm
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire.envelope import Credentials

SWARM = swarm_of()
EPOCH = 1_800_000_000.0


class Allowance:
    """A budget that the test sets."""

    def __init__(self):
        self.allowed, self.hears = set(CHOICES), True

    def allows(self, choice):
        return choice in self.allowed

    def listening(self):
        return self.hears


class Line:
    """Three nodes, 0 and 2 connected through 1 only, whose budget the test sets."""

    def __init__(self, nursery):
        self.nursery = nursery
        self.budget = Allowance()
        medium = MemorySwarm()
        self.authors = [Author(SWARM, seed=n) for n in range(3)]
        networks = [medium.join(author.peer) for author in self.authors]
        medium.cut(self.authors[0].peer, self.authors[2].peer)
        self.exchanges = [
            RolloutExchange(
                network,
                InProcessScorer(),
                Credentials(author.key, SWARM),
                GroupRules(BUILTIN_TASKS),
                SharingConfig(),
                rng=random.Random(0),
                clock=lambda: EPOCH + trio.current_time(),
                budget=self.budget if number == 1 else Unlimited(),
            )
            for number, (network, author) in enumerate(zip(networks, self.authors, strict=True))
        ]

    async def start(self):
        for exchange in self.exchanges:
            exchange.set_policy(
                SimpleNamespace(
                    model=MODEL, tokenizer=TOKENIZER, policy_version=0, tokens_per_text_byte=1.0
                )
            )
            await self.nursery.start(exchange.run)
        return self

    async def publish(self, number, sequence, long=False):
        author = self.authors[number]
        outcome = await self.exchanges[number].publish(
            author.long_group(sequence) if long else author.own_group(sequence)
        )
        await trio.sleep(30)
        return outcome

    def admitted(self):
        return [
            exchange.admission.statistics().outcomes.get("admitted", 0)
            for exchange in self.exchanges
        ]


@pytest.fixture
async def line(nursery):
    return await Line(nursery).start()


async def test_with_budget_everything_travels_through_it(line, autojump_clock):
    await line.publish(0, 0)
    assert line.admitted() == [0, 1, 1]


async def test_without_upload_it_takes_groups_and_passes_none_on(line, autojump_clock):
    line.budget.allowed = {"fetch"}
    await line.publish(0, 0)
    assert line.admitted() == [0, 1, 0]
    assert await line.publish(1, 0) == "budget"
    assert line.admitted() == [0, 1, 0]


async def test_without_upload_long_groups_are_not_served(line, autojump_clock):
    line.budget.allowed = {"publish", "forward", "fetch"}
    await line.publish(1, 0, long=True)
    assert line.admitted() == [0, 0, 0]
    assert line.exchanges[0].statistics().fetching.fetched == {}, "it is asked again"
    await trio.sleep(30)
    assert line.exchanges[0].statistics().fetching.fetched == {"fetch_busy": 1}


async def test_without_download_long_groups_are_not_fetched(line, autojump_clock):
    line.budget.allowed = {"publish", "forward", "serve"}
    await line.publish(0, 0, long=True)
    assert line.admitted()[1] == 0
    assert line.exchanges[1].admission.statistics().outcomes["busy"] == 1
    assert line.exchanges[1].statistics().fetching.pending == 0


async def test_paused_it_hears_nothing_and_returns_when_it_may(line, autojump_clock):
    line.budget.hears = False
    await trio.sleep(5)
    await line.publish(0, 0)
    assert line.admitted() == [0, 0, 0]
    line.budget.hears = True
    await trio.sleep(5)
    await line.publish(0, 1)
    assert line.admitted() == [0, 1, 1]
