"""Episodes exchanged over real libp2p hosts with the real scorer."""

import contextlib
import random

import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import MODEL, TOKENIZER, swarm_of
from swarmnode.link.messages import Hello
from swarmnode.p2p import identity
from swarmnode.rollouts.groups import Draw, GroupRules, OwnGroup
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.tasks.client import AsyncScorer
from swarmnode.wire.envelope import Credentials
from tests.support.authors import Author, forged_episodes
from tests.support.fakes.scorer import score_one
from tests.support.games import HIGH, TURNS, guessing_game
from tests.support.hosts import hosts
from tests.support.waiting import until, wait_connected

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
SWARM = swarm_of()


@contextlib.asynccontextmanager
async def exchanges(directory, count, rules):
    """Yield (exchange, author with the host's key) for each fully connected node, with one scorer
    for all."""
    async with (
        hosts(directory, count) as networks,
        AsyncScorer() as scorer,
        trio.open_nursery() as nursery,
    ):
        running = []
        for number, network in enumerate(networks):
            await wait_connected(network, count - 1)
            path = directory / str(number) / "identity.key"
            author = Author(SWARM, key=identity.load_or_create(path).private_key)
            exchange = RolloutExchange(
                network,
                scorer,
                Credentials(author.key, SWARM),
                rules,
                SharingConfig(),
                rng=random.Random(0),
            )
            exchange.set_policy(Hello(MODEL, TOKENIZER, 0))
            await nursery.start(exchange.run)
            running.append((exchange, author))
        yield running
        nursery.cancel_scope.cancel()


def admitted(exchange):
    return exchange.admission.statistics().outcomes.get("admitted", 0)


@pytest.fixture
def game(tmp_path):
    with guessing_game(tmp_path) as task:
        yield task


async def test_training_node_replays_an_episode(tmp_path, game):
    """One node publishes between two hosts, with the scorer's own process. A connected forger gets
    nothing admitted."""
    async with exchanges(tmp_path, 2, GroupRules((game,))) as nodes, AsyncScorer() as scorer:
        (teller, author), (asker, _) = nodes
        author.tasks = (game,)
        guesses = [[str(number)] for number in range(1, HIGH + 1)]
        for sequence in range(2):
            found = await score_one(scorer, author.task(sequence), guesses)
            secret = str(1 + found.rewards.index(1.0))
            wrong = "1" if secret != "1" else "2"
            episodes = [[wrong, secret], [wrong, wrong, "0"], [wrong] * TURNS]
            group = author.group(sequence, 0.0, episodes=episodes)
            if sequence:
                group, reason = forged_episodes(group)["ends early"]
                assert reason == "trajectory"
            own = OwnGroup(
                group.task, 0, sequence, group.sampling, group.completions, [1.0, 0.25, 0.0]
            )
            assert teller.publish(own) == "published"
        outcomes = lambda: asker.admission.statistics().outcomes
        await until(lambda: outcomes().get("trajectory") == admitted(asker) == 1)
        (group,) = asker.draw(Draw(1, 2, 0, 2)).groups
        assert group.rewards == [1.0, 0.25, 0.0]
        assert [len(texts) for texts in group.observations] == [2, 3, TURNS]
        assert group.observations[0][-1] == "right"
        assert asker.authors.trust(author.peer) > 0.0
