"""The exchange over real libp2p hosts with the real scorer, and over the in-memory network: both
must behave alike."""

import contextlib
import random
import time

import msgspec
import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, swarm_of
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.link.messages import Hello
from swarmnode.p2p import identity
from swarmnode.rollouts.groups import Draw, GroupRules, OwnGroup
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.tasks.client import AsyncScorer
from swarmnode.wire import envelope, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import ListedGroup
from tests.support.authors import Author, forged_episodes
from tests.support.fakes.network import MemorySwarm
from tests.support.games import HIGH, TURNS, guessing_game
from tests.support.hosts import hosts
from tests.support.pulling import Holder, rewards_of
from tests.support.waiting import until, wait_connected

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
SWARM = swarm_of()


@contextlib.asynccontextmanager
async def networks(kind, directory, count):
    """Yield (network, author with the same key) for each fully connected node."""
    if kind == "memory":
        authors = [Author(SWARM, seed=n) for n in range(count)]
        medium = MemorySwarm()
        yield [(medium.join(author.peer), author) for author in authors]
        return
    async with hosts(directory, count) as real:
        with trio.fail_after(60):
            for network in real:
                await wait_connected(network, count - 1)
        keys = [
            identity.load_or_create(directory / str(n) / "identity.key").private_key
            for n in range(count)
        ]
        yield [(network, Author(SWARM, key=key)) for network, key in zip(real, keys, strict=True)]


@contextlib.asynccontextmanager
async def exchanges(kind, directory, count, rules=GroupRules(BUILTIN_TASKS)):  # noqa: B008 - immutable
    """Yield (exchange, author, network) for each node, with one scorer for all."""
    async with (
        networks(kind, directory, count) as nodes,
        AsyncScorer() as scorer,
        trio.open_nursery() as nursery,
    ):
        running = [
            (await start(nursery, network, author, scorer, rules), author, network)
            for network, author in nodes
        ]
        yield running
        nursery.cancel_scope.cancel()


async def start(nursery, network, author, scorer, rules=GroupRules(BUILTIN_TASKS)):  # noqa: B008 - immutable
    """Start a node's exchange and return it."""
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
    return exchange


both = pytest.mark.parametrize("kind", ["memory", "libp2p"])


def admitted(exchange):
    return exchange.admission.statistics().outcomes.get("admitted", 0)


async def publish(exchange, own):
    """Publish a group, listed with the spread that its readers compute."""
    own = msgspec.structs.replace(own, rewards=await rewards_of(own))
    assert exchange.publish(own) == "published"


def waiting(exchange):
    """Return how many polls of peers this node holds open."""
    return exchange.statistics().serving.waiting


@both
async def test_three_nodes_share_groups_by_waiting_polls(kind, tmp_path):
    async with exchanges(kind, tmp_path, 3) as nodes:
        for exchange, author, _ in nodes:
            for sequence in range(3):
                await publish(exchange, author.own_group(sequence))
        await until(lambda: all(admitted(exchange) == 6 for exchange, _, _ in nodes))
        await until(lambda: all(waiting(exchange) == 2 for exchange, _, _ in nodes))
        began = trio.current_time()
        await publish(nodes[0][0], nodes[0][1].own_group(3))
        await until(lambda: all(admitted(exchange) == 7 for exchange, _, _ in nodes[1:]))
        assert trio.current_time() - began < limits.PATIENCE_SECONDS / 2
        for exchange, author, _ in nodes:
            drawn = exchange.draw(Draw(1, 6, 1, 4))
            assert len(drawn.groups) == 6
            assert author.peer not in {group.peer for group in drawn.groups}
            assert all(sum(group.rewards) >= 2 for group in drawn.groups)
            pulling = exchange.statistics().pulling
            assert not set(pulling.listings) - {"ok", "unsupported"}
            assert pulling.claims.faults == {}


@both
async def test_long_groups_travel_in_one_fetch_and_two_hops(kind, tmp_path):
    async with exchanges(kind, tmp_path, 3) as nodes:
        own = [nodes[0][1].long_group(sequence) for sequence in range(3)]
        for group in own:
            await publish(nodes[0][0], group)
        await until(lambda: all(admitted(exchange) == 3 for exchange, _, _ in nodes[1:]))
        for exchange, _, _ in nodes[1:]:
            groups = exchange.draw(Draw(1, 3, 0, 3)).groups
            assert {group.group.completions[1].text for group in groups} == {
                group.completions[1].text for group in own
            }
            assert exchange.statistics().pulling.pulled == {"ok": 3}


@both
async def test_counts_hostile_groups_and_serves_honest_peers(kind, tmp_path):
    async with networks(kind, tmp_path, 3) as nodes, AsyncScorer() as scorer:
        (network, author), *others = nodes
        liar = Holder(None, network=network, author=author)
        frames = hostile_frames(author, time.time())
        chosen = (
            "duplicated key",
            "NaN",
            "wrong swarm",
            "stale",
            "unknown task",
            "deeply nested payload",
            "zstd bomb",
        )
        key = author.key.public_key().public_bytes_raw()
        for name in chosen:
            frame, now = frames[name][0], int(time.time() * 1000)
            content = envelope.content_id(frame)
            liar.put(ListedGroup(content, key, BUILTIN_TASKS[0], now, len(frame), 0.5), frame)
        async with trio.open_nursery() as nursery:
            running = []
            for network, author in others:
                running.append(await start(nursery, network, author, scorer))
            victim, honest = running
            await publish(honest, others[1][1].own_group(0))
            expected = {frames[name][1] for name in chosen}
            counted = lambda: expected & set(victim.admission.statistics().outcomes)
            await until(lambda: admitted(victim) == 1 and counted())
            honest_peer = others[1][1].peer
            assert victim.authors.trust(liar.peer) < victim.authors.trust(honest_peer)
            nursery.cancel_scope.cancel()


@pytest.fixture
def game(tmp_path, monkeypatch):
    with guessing_game(tmp_path, monkeypatch) as task:
        yield task


@both
async def test_training_node_replays_an_episode(kind, tmp_path, game):
    """One node publishes between two hosts, with the scorer's own process. A connected forger gets
    nothing admitted."""
    async with exchanges(kind, tmp_path, 2, GroupRules((game,))) as nodes, AsyncScorer() as scorer:
        (teller, author, _), (asker, _, _) = nodes
        author.tasks = (game,)
        guesses = [[str(number)] for number in range(1, HIGH + 1)]
        for sequence in range(2):
            found = await scorer.score(author.task(sequence), guesses)
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


async def test_author_of_slow_episodes_is_suspended_from_scoring(tmp_path, game):
    async with (
        networks("memory", tmp_path, 2) as [(network, own), (other, relay)],
        AsyncScorer(cpu_seconds=1) as scorer,
        trio.open_nursery() as nursery,
    ):
        authors = [Author(SWARM, seed, (game,)) for seed in (78, 79)]
        exchange = await start(nursery, network, own, scorer, GroupRules((game,)))
        holder = Holder(None, network=other, author=relay)
        endless, quitters = [["burn"], ["0"]], [["0"], ["9"] * TURNS]

        async def share(sequence, episodes):
            """List a group of each author at once, so that both are scored in one batch."""
            for author, played in zip(authors, (episodes, quitters), strict=True):
                frame = author.frame(author.group(sequence, time.time(), episodes=played))
                holder.put(await holder.line(frame, [0.0, 0.25]), frame)

        outcomes = lambda: exchange.admission.statistics().outcomes
        for sequence in range(3):
            await share(sequence, endless)
            both_done = (sequence + 1, sequence + 1)
            await until(
                lambda done=both_done: (admitted(exchange), outcomes().get("scorer")) == done
            )
        await share(3, quitters)
        await until(lambda: (admitted(exchange), outcomes()["scorer"]) == (4, 4))
        assert network.score(authors[0].peer) == 0.0, "it costs no reputation"
        nursery.cancel_scope.cancel()


# Contract of the two networks.
