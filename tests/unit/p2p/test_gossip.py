"""Gossip between real hosts on loopback, and the queue by itself."""

import pytest
import trio

from swarmnode.p2p import storms
from swarmnode.p2p.gossip import Message, Topic, Validation
from swarmnode.wire.limits import GOSSIP_BYTES
from tests.support.hosts import host, hosts
from tests.support.waiting import until

NAME = "/test/topic/1"


def accept(data: bytes, peer: str) -> Validation:
    return Validation.ACCEPT


async def join(networks, *validators, last_rate=0.0) -> list[Topic]:
    """Everybody joins, the last with a rate; returns once every pair of connected hosts knows that
    of each other and is in each other's mesh."""
    rates = [0.0] * (len(networks) - 1) + [last_rate]
    joined = zip(networks, validators, rates, strict=True)
    topics = [
        await network.gossip.join(NAME, validator, rate=rate) for network, validator, rate in joined
    ]
    told = lambda: all(
        len(network.gossip.peers(NAME)) == len(network.connected()) for network in networks
    )
    await until(told, seconds=70)
    await until(
        lambda: all(
            network.gossip.statistics().mesh[NAME] == len(network.connected())
            for network in networks
        )
    )
    return topics


async def test_a_message_reaches_everybody_else_once_and_says_who_brought_it(tmp_path):
    async with hosts(tmp_path, 3, line=True) as (a, b, c):
        topics = await join((a, b, c), accept, accept, accept)
        await a.gossip.publish(NAME, b"hello")
        with trio.fail_after(30):
            assert await topics[1].get() == Message(b"hello", a.peer_id)
            assert await topics[2].get() == Message(b"hello", b.peer_id)
        await c.gossip.publish(NAME, b"back")
        with trio.fail_after(30):
            assert await topics[0].get() == Message(b"back", b.peer_id)  # and not its own
        assert len(topics[0]) == len(topics[2]) == 0


@pytest.mark.parametrize("verdict", [Validation.IGNORE, Validation.REJECT])
async def test_what_is_not_accepted_is_neither_delivered_nor_forwarded(tmp_path, verdict):
    def picky(data: bytes, peer: str) -> Validation:
        return verdict if data == b"bad" else Validation.ACCEPT

    async with hosts(tmp_path, 3, line=True) as (a, b, c):
        _, at_b, at_c = await join((a, b, c), accept, picky, accept)
        await a.gossip.publish(NAME, b"bad")
        await a.gossip.publish(NAME, b"good")
        with trio.fail_after(30):
            assert (await at_b.get()).data == b"good"
            assert (await at_c.get()).data == b"good"
        statistics = b.gossip.statistics()
        assert (
            statistics.received,
            statistics.accepted,
            statistics.ignored + statistics.rejected,
        ) == (2, 1, 1)
        assert (b.reputation.score(a.peer_id, trio.current_time()) < 0) is (
            verdict is Validation.REJECT
        )


async def test_who_publishes_far_more_than_it_may_is_disconnected_and_who_passes_it_on_is_not(
    tmp_path,
):
    messages = int(storms.TIMES * storms.SECONDS) + 40
    async with hosts(tmp_path, 3, line=True) as (a, b, c):
        *_, at_c = await join((a, b, c), accept, accept, accept, last_rate=1.0)
        for number in range(messages):
            await a.gossip.publish(NAME, b"of a %d" % number)
        with trio.fail_after(30):
            assert {(await at_c.get()).forwarder for _ in range(messages)} == {b.peer_id}
        assert c.reputation.score(b.peer_id, trio.current_time()) == 0
        for number in range(messages):
            await b.gossip.publish(NAME, b"of b %d" % number)
        with trio.fail_after(30):
            while c.connected():
                await c.changed()
        assert c.reputation.statistics(trio.current_time()).rejected == {"storm": 1}
        assert not c.welcome(b.peer_id)
        assert a.connected() == [b.peer_id], "whoever said no number bears it"


async def test_who_was_started_again_is_heard_however_much_it_had_said(tmp_path):
    """A message is known by its sender and number: numbers that begin at the clock's seconds come
    twice from who sends many a second."""
    said = 40
    async with host(tmp_path / "stays") as a:
        topic = await a.gossip.join(NAME, accept)
        for life in range(2):
            async with host(tmp_path / "again", initial_peers=[a.listen_addrs[0]]) as b:
                await b.gossip.join(NAME, accept)
                await until(
                    lambda: (
                        a.gossip.statistics().mesh[NAME] == 1
                        and b.gossip.statistics().mesh[NAME] == 1
                    ),
                    seconds=70,
                )
                for number in range(said):
                    await b.gossip.publish(NAME, b"%d %d" % (life, number))
                with trio.fail_after(30):
                    assert sorted([(await topic.get()).data for _ in range(said)]) == sorted(
                        b"%d %d" % (life, n) for n in range(said)
                    )
            await until(lambda: not a.connected())


async def test_a_validator_that_raises_costs_one_message(tmp_path, caplog):
    def broken(data: bytes, peer: str) -> Validation:
        if data == b"bad":
            raise RuntimeError("a bug of ours")
        return Validation.ACCEPT

    async with hosts(tmp_path, 2) as (a, b):
        _, at_b = await join((a, b), accept, broken)
        await a.gossip.publish(NAME, b"bad")
        await a.gossip.publish(NAME, b"good")
        with trio.fail_after(30):
            assert (await at_b.get()).data == b"good"
        statistics = b.gossip.statistics()
        assert (statistics.validator_errors, statistics.ignored) == (1, 1)
        assert b.reputation.score(a.peer_id, trio.current_time()) == 0.0  # not its fault
        assert "a bug of ours" in caplog.text


async def test_the_longest_message_goes_through_and_a_longer_one_is_not_sent(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        _, at_b = await join((a, b), accept, accept)
        with pytest.raises(ValueError, match=str(GOSSIP_BYTES)):
            await a.gossip.publish(NAME, bytes(GOSSIP_BYTES + 1))
        await a.gossip.publish(NAME, bytes(GOSSIP_BYTES))
        with trio.fail_after(30):
            assert len((await at_b.get()).data) == GOSSIP_BYTES
        assert (a.gossip.statistics().published, a.gossip.statistics().published_bytes) == (
            1,
            GOSSIP_BYTES,
        )


async def test_bursts_arrive_whole(tmp_path):
    """The library's defaults lose two thirds of these: 10 per second and forwarder, 32 in the
    queue."""
    async with hosts(tmp_path, 2) as (a, b):
        _, at_b = await join((a, b), accept, accept)
        for index in range(300):
            await a.gossip.publish(NAME, index.to_bytes(4, "big"))
            await trio.lowlevel.checkpoint()
            await until(lambda: b.gossip.statistics().received > index - 20)  # noqa: B023 - called at once
        await until(lambda: b.gossip.statistics().accepted == 300)
        with trio.fail_after(30):
            assert [int.from_bytes((await at_b.get()).data, "big") for _ in range(300)] == list(
                range(300)
            )


async def test_a_greylisted_forwarder_is_not_listened_to(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        await join((a, b), accept, accept)
        for _ in range(6):
            b.rejected(a.peer_id, "signature")
        await a.gossip.publish(NAME, b"x")
        await until(lambda: b.gossip.statistics().received == 1)
        statistics = b.gossip.statistics()
        assert (statistics.unwelcome, statistics.ignored, statistics.queued) == (1, 1, 0)


async def test_a_forwarder_of_rubbish_ends_up_banned_and_disconnected(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        await join((a, b), accept, lambda data, peer: Validation.REJECT)
        for index in range(6):
            await a.gossip.publish(NAME, bytes([index]))
        await until(lambda: not b.welcome(a.peer_id))
        b.rejected(a.peer_id, "reward", cost=50.0)
        await until(lambda: b.connected() == [])
        assert b.statistics().reputation.banned == 1
        assert b.statistics().reputation.rejected == {"gossip_validator": 6, "reward": 1}


async def test_a_topic_is_joined_once(tmp_path):
    async with hosts(tmp_path, 1) as (a,):
        await a.gossip.join(NAME, accept)
        with pytest.raises(ValueError, match="joined already"):
            await a.gossip.join(NAME, accept)


async def test_the_queue_is_bounded_in_messages_and_in_bytes():
    topic = Topic(NAME, accept, messages=3, size=100)
    assert [topic.put(Message(bytes(10), "p")) for _ in range(4)] == [True, True, True, False]
    assert (await topic.get()).data == bytes(10)
    assert not topic.put(Message(bytes(81), "p"))
    assert topic.put(Message(bytes(80), "p"))
    assert (topic.dropped, topic.delivered, len(topic)) == (2, 1, 3)


async def test_a_consumer_waits_for_news_and_can_be_cancelled(autojump_clock):
    topic = Topic(NAME, accept, messages=3, size=100)
    with trio.move_on_after(1) as scope:
        await topic.get()
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:

        async def consume() -> None:
            async for message in topic:
                assert message.data == b"x"
                return

        nursery.start_soon(consume)
        await trio.sleep(1)
        topic.put(Message(b"x", "p"))
