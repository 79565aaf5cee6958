"""GossipSub over real sockets: what a stock host loses, and what a stranger can make it keep."""

import contextlib
import os

import trio
from libp2p.pubsub.pb import rpc_pb2

from tests.support import attacker
from tests.support.host_process import guarded, processes, stock

MB = 1_000_000


async def delivered(publisher, receiver, count, **arguments):
    """How many of `count` messages that `publisher` sends reach `receiver`, which it is connected
    to."""

    async def have():
        await publisher.rests()
        await receiver.rests()
        return (await receiver.ask("stat"))["delivered"]

    await publisher.ask("connect", address=receiver.address, peer=receiver.peer)
    while not (before := await have()):  # subscriptions and the first graft take a moment
        await publisher.ask("publish", count=1)
    await publisher.ask("publish", count=count, **arguments)
    return await have() - before


async def test_default_settings_lose_no_messages():
    with processes(stock(gossip="default"), guarded(gossip="default"), guarded(), guarded()) as (
        filters,
        forwards,
        one,
        two,
    ):
        assert await delivered(filters, one, 60, pause=0.005) < 40, (
            "upstream fixed this: remove guard spam_protection_enabled"
        )
        assert await delivered(forwards, two, 60, pause=0.005) == 60


async def test_a_burst_is_not_lost_in_the_outbound_queue():
    with processes(stock(), guarded(), guarded(), guarded()) as (drops, queues, one, two):
        assert await delivered(drops, one, 200) < 200, (
            "upstream fixed this: remove guard queue_full (messages)"
        )
        assert await delivered(queues, two, 200) == 200
        assert await queues.counted("queue_full") == 0


async def publish(host, count, size, pause_every=10):
    """`count` signed messages of `size` bytes from one stranger."""
    async with attacker.connect(host.address) as peer:
        stream = await peer.open(attacker.MESHSUB)
        with contextlib.suppress(ConnectionError):
            for number in range(count):
                await peer.publish("test", os.urandom(8) + bytes(size - 8), stream)
                if number % pause_every == 0:
                    await trio.sleep(0.01)
        await host.rests()


async def test_a_slow_subscriber_finds_its_messages_waiting():
    with processes(stock(consume=False), guarded(consume=False)) as (forgets, keeps):
        for host in (forgets, keeps):
            await publish(host, 150, 64)
        assert (await forgets.ask("stat"))["waiting"] < 150, (
            "upstream fixed this: remove guard SUBSCRIPTION_MESSAGES"
        )
        assert (await keeps.ask("stat"))["waiting"] == 150


async def test_messages_are_not_kept_for_ever():
    with processes(stock(), guarded()) as (keeps, forgets):
        for host in (keeps, forgets):
            await publish(host, 120, 60_000)
        assert (await keeps.ask("stat"))["equivocation_bytes"] > 7 * MB, (
            "upstream fixed this: remove guard _check_equivocation"
        )
        assert (await keeps.ask("stat"))["deliveries"] == 120, (
            "upstream fixed this: remove guard recent_message_deliveries"
        )
        assert (await forgets.ask("stat"))["delivered"] == 120
        assert (await forgets.ask("stat"))["equivocation_bytes"] == 0
        await forgets.settles("cache_bytes", 0)
        await forgets.settles("deliveries", 0)
        assert await forgets.serves()


async def test_messages_longer_than_a_frame_are_refused():
    with processes(stock(), guarded()) as (swollen, bounded):
        growth = []
        for host in (swollen, bounded):
            before = host.rss()
            await publish(host, 150, 256_000)
            growth.append(host.rss() - before)
        assert growth[0] > 30 * MB, "upstream fixed this: remove guard message_refused (length)"
        assert growth[1] < 20 * MB
        assert await bounded.counted("message_refused") == 150
        assert await bounded.serves()


async def test_ids_of_any_length_are_not_remembered():
    async def send(host):
        async with attacker.connect(host.address) as peer:
            stream = await peer.open(attacker.MESHSUB)
            for _ in range(40):
                message = attacker.signed(peer.keys, "test", b"x", seqno=os.urandom(900_000))
                await stream.send(attacker.frame_rpc(rpc_pb2.RPC(publish=[message])))
            await host.rests()

    with processes(stock(), guarded()) as (remembers, refuses):
        await send(remembers)
        assert (await remembers.ask("stat"))["seen_bytes"] > 30 * MB, (
            "upstream fixed this: remove guard message_refused (ids)"
        )
        await send(refuses)
        assert (await refuses.ask("stat"))["seen_bytes"] == 0
        assert await refuses.counted("message_refused") == 40
        assert await refuses.serves()


async def test_asking_ten_thousand_times_for_one_message_costs_one_message():
    async def ask(host):
        before = host.peak_rss()
        async with attacker.connect(host.address) as peer:
            stream = await peer.open(attacker.MESHSUB)
            message = attacker.signed(peer.keys, "test", bytes(60_000))
            await stream.send(attacker.frame_rpc(rpc_pb2.RPC(publish=[message])))
            wanted = rpc_pb2.RPC()
            wanted.control.iwant.add(messageIDs=[message.from_id + message.seqno] * 10_000)
            await stream.send(attacker.frame_rpc(wanted))
            await host.rests()
            return host.peak_rss() - before

    with processes(stock(), guarded()) as (generous, bounded):
        assert await ask(generous) > 100 * MB, (
            "upstream fixed this: remove guard rpc_bounded (IWANT)"
        )
        assert await ask(bounded) < 30 * MB
        assert await bounded.serves()


async def test_invented_topics_are_not_remembered():
    async def send(host):
        async with attacker.connect(host.address) as peer:
            stream = await peer.open(attacker.MESHSUB)
            rpc = rpc_pb2.RPC()
            for number in range(500):
                rpc.control.prune.add(topicID=f"{number:0500}", backoff=2**62)
            await stream.send(attacker.frame_rpc(rpc))
            await host.rests()
            return (await host.ask("stat"))["topics"]

    with processes(stock(), guarded()) as (remembers, forgets):
        assert await send(remembers) >= 500, (
            "upstream fixed this: remove guard rpc_bounded (topics)"
        )
        assert await send(forgets) == 0
        assert await forgets.serves()


async def test_a_forwarder_in_a_hurry_is_made_to_wait_while_others_are_served():
    with processes(guarded()) as (host,):
        async with attacker.connect(host.address) as peer:
            stream = await peer.open(attacker.MESHSUB)
            signed = lambda: [attacker.signed(peer.keys, "test", os.urandom(8)) for _ in range(40)]
            # before, so that they come as fast as they can
            frames = [attacker.frame_rpc(rpc_pb2.RPC(publish=signed())) for _ in range(40)]
            for frame in frames:
                await stream.send(frame)
            with trio.fail_after(60):
                while not await host.counted("forwarder_paced"):  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            assert (await host.ask("stat"))["delivered"] < 1600
            assert await host.serves()


async def test_odd_rpcs_leave_the_host_serving():
    with processes(guarded()) as (host,):
        for frame in (
            b"",
            b"\x00",
            b"\x0a\x05ab",
            b"\x1a\x02\x08\x01",
            b"\x12\x06\x1a\x04\xff\xff\xff\xff",
            bytes(1000),
        ):
            async with attacker.connect(host.address) as peer:
                stream = await peer.open(attacker.MESHSUB)
                with contextlib.suppress(ConnectionError):
                    await stream.send(attacker.frame_rpc(frame))
                await trio.sleep(0.05)
            assert await host.serves()
