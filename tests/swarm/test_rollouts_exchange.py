"""The exchange over real libp2p hosts with the real scorer, and over the in-memory network: what
holds on one must hold on the other."""

import contextlib
import math
import random
import re
import string
import time

import msgspec
import pytest
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.demo.liar.listings import ListingLiar
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.link.messages import Hello
from swarmnode.p2p import identity
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, GroupRules, OwnGroup
from swarmnode.tasks import registry
from swarmnode.tasks.client import AsyncScorer
from swarmnode.testing.network import MemorySwarm
from swarmnode.trainer.judge import Judgement
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.state import Counters
from swarmnode.wire import ids
from swarmnode.wire.envelope import Credentials
from tests.support.hosts import hosts

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
SWARM = swarm_of()


@contextlib.asynccontextmanager
async def networks(kind, directory, count):
    """(network, author with the same key) for each node; all connected with all."""
    if kind == "memory":
        authors = [Author(SWARM, seed=n) for n in range(count)]
        medium = MemorySwarm()
        yield [(medium.join(author.peer), author) for author in authors]
        return
    async with hosts(directory, count) as real:
        with trio.fail_after(60):
            for network in real:
                await network.wait_connected(count - 1)
        keys = [
            identity.load_or_create(directory / str(n) / "identity.key").private_key
            for n in range(count)
        ]
        yield [(network, Author(SWARM, key=key)) for network, key in zip(real, keys, strict=True)]


@contextlib.asynccontextmanager
async def exchanges(kind, directory, count, rules=GroupRules(BUILTIN_TASKS)):  # noqa: B008 - immutable
    """(exchange, author, network) for each node, with one scorer for all."""
    async with (
        networks(kind, directory, count) as nodes,
        AsyncScorer() as scorer,
        trio.open_nursery() as nursery,
    ):
        running = []
        for network, author in nodes:
            credentials = Credentials(author.key, SWARM)
            exchange = RolloutExchange(
                network, scorer, credentials, rules, SharingConfig(), rng=random.Random(0)
            )
            exchange.set_policy(Hello(MODEL, TOKENIZER, 0))
            await nursery.start(exchange.run)
            running.append((exchange, author, network))
        yield running
        nursery.cancel_scope.cancel()


both = pytest.mark.parametrize("kind", ["memory", "libp2p"])


async def drawn_until(exchange, enough, seconds=60.0):
    """Groups that a trainer draws from `exchange`, step by step, until `enough(groups)`."""
    groups = []
    with trio.move_on_after(seconds):
        while not enough(groups):
            groups += exchange.draw(Draw(len(groups), 4, 0, 4)).groups
            await trio.sleep(0.2)
    assert enough(groups), exchange.statistics()
    return groups


@both
async def test_three_nodes_share_groups(kind, tmp_path):
    async with exchanges(kind, tmp_path, 3) as nodes:
        for exchange, author, _ in nodes:
            for sequence in range(4):
                assert await exchange.publish(author.own_group(sequence)) == "published"
        for exchange, author, _ in nodes:
            others = {other.peer for _, other, _ in nodes} - {author.peer}
            drawn = await drawn_until(
                exchange, lambda groups, others=others: {g.peer for g in groups} == others
            )
            assert all(sum(group.rewards) >= 2 for group in drawn)


@both
async def test_a_long_group_is_pulled(kind, tmp_path):
    async with exchanges(kind, tmp_path, 3) as nodes:
        own = nodes[0][1].long_group(0)
        assert await nodes[0][0].publish(own) == "published"
        for exchange, _, _ in nodes[1:]:
            (group,) = await drawn_until(exchange, lambda groups: len(groups) == 1)
            assert group.group.completions == own.completions


@both
async def test_a_liar_is_refused_by_reason_and_then_ignored_and_an_honest_peer_is_served(
    kind, tmp_path
):
    async with (
        networks(kind, tmp_path, 3) as [(lying, liar), *others],
        AsyncScorer() as scorer,
        trio.open_nursery() as nursery,
    ):
        ListingLiar(liar, time.time, random.Random(0)).serve(lying.requests)
        victim, honest = (
            RolloutExchange(
                network,
                scorer,
                Credentials(key.key, SWARM),
                GroupRules(BUILTIN_TASKS),
                SharingConfig(),
            )
            for network, key in others
        )
        for exchange in (victim, honest):
            exchange.set_policy(Hello(MODEL, TOKENIZER, 0))
            await nursery.start(exchange.run)
        (network, _), (_, author) = others
        for sequence in range(20):
            await honest.publish(author.own_group(sequence))
        drawn = await drawn_until(victim, lambda groups: groups and not network.welcome(liar.peer))
        assert {group.peer for group in drawn} == {author.peer}
        assert len(victim.admission.statistics().rejected) >= 3
        assert victim.authors.trust(author.peer) > victim.authors.trust(liar.peer) == 0.0
        nursery.cancel_scope.cancel()


@pytest.fixture
def levels():
    registry.install([], {"rg/gcd": {"max_value": [20, 900]}})
    yield
    registry.install([], {"rg/gcd": {}})


async def test_groups_of_chosen_difficulties_teach_another_node_what_to_ask(tmp_path, levels):
    """By the ordinal for swarms whose members choose, between two hosts over sockets."""
    spoken = ids.spoken_in(ids.BUCKET_PROTOCOLS)
    rules = GroupRules(("rg/gcd",), spoken=spoken)
    async with (
        exchanges("libp2p", tmp_path, 2, rules) as ((teller, author, _), (asker, other, _)),
        AsyncScorer() as scorer,
    ):
        told, asked = (
            Questions(
                ["rg/gcd"], Counters(peer=each.peer, swarm=SWARM.hex()), spoken, curriculum=True
            )
            for each in (author, other)
        )
        hard = [
            (sequence, ref)
            for sequence, ref in (told.next() for _ in range(24))
            if ref.difficulty == 1
        ]
        assert 2 < len(hard) < 24
        hard = hard[:8]  # one listing has room for them

        async def publish(sequence, ref, *wrong):
            prompt = await scorer.prompt(ref)
            right = str(
                math.gcd(*map(int, re.findall(r"\d+", prompt.partition(":")[2].partition(".")[0])))
            )
            group = author.group(sequence, 0.0, task=ref, texts=[right, *wrong])
            return await teller.publish(
                OwnGroup(
                    ref, 0, sequence, group.sampling, group.completions, [1.0] + [0.0] * len(wrong)
                )
            )

        for sequence, ref in hard[:-1]:
            assert await publish(sequence, ref, "x", "y", "z") == "published"
        texts = [
            "".join(random.Random(n).choices(string.ascii_letters, k=12_000)) for n in range(7)
        ]
        assert await publish(*hard[-1], *texts) == "published"
        drawn = await drawn_until(asker, lambda groups: len(groups) == len(hard))
        assert {group.group.task.difficulty for group in drawn} == {1}
        assert all(group.rewards[0] == 1.0 and sum(group.rewards) == 1.0 for group in drawn), (
            "it asks the same question and judges itself"
        )
        asked.take_hints(Judgement([], [(group, "used") for group in drawn]))
        assert asked.evidence()["rg/gcd 0"] == (0.0, 0.0)
        assert asked.evidence()["rg/gcd 1"] == (0.0, pytest.approx(0.45)), (
            "half an own group is the most that one peer counts, a step ago"
        )
        assert asked.signals()["rg/gcd 1"] > asked.signals()["rg/gcd 0"] == 0.5
        sequence, ref = hard[0]
        await publish(sequence + 1000, msgspec.structs.replace(ref, difficulty=0), "x")
        await drawn_until(
            asker, lambda _: asker.admission.statistics().outcomes.get("seed", 0) == 1
        )


@both
async def test_requests_end_in_an_answer_or_in_one_of_three_errors(kind, tmp_path):
    async with networks(kind, tmp_path, 2) as [(a, _), (b, _)]:

        async def handler(peer, data):
            assert peer == a.peer_id
            if data == b"refuse":
                raise PeerError("no")
            if data == b"hang":
                await trio.sleep_forever()
            return data * 2

        b.requests.serve("/t/1", handler, max_request_bytes=100, max_response_bytes=200)

        async def ask(data, protocol="/t/1", peer=b.peer_id, limit=200, deadline=5):
            return await a.requests.request(
                peer, protocol, data, deadline=deadline, max_response_bytes=limit
            )

        assert await ask(b"abc") == b"abcabc"
        with pytest.raises(BadMessage):
            await ask(b"abc", limit=5)
        with pytest.raises(PeerTimeout):
            await ask(b"hang", deadline=0.5)
        for failing in (
            ask(b"refuse"),
            ask(b"x" * 101),
            ask(b"abc", protocol="/t/2"),
            ask(b"abc", peer=Author(SWARM, seed=50).peer),
        ):
            with pytest.raises(PeerError):
                await failing
