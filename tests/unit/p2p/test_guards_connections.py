"""Leaks and exhaustion of connections, streams and sockets on a stock host, and the guards against
them."""

import contextlib
import socket

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify

from tests.support import attacker
from tests.support.host_process import guarded, processes, stock

MB = 1_000_000


async def visits(host, count, seconds):
    """Connect `count` times with a new identity each; returns the number of served connections."""
    served = 0
    for _ in range(count):
        with contextlib.suppress(Exception):
            async with attacker.connect(host.address, seconds=seconds) as peer:
                stream = await peer.open("/test/echo/1")
                await stream.send(b"hi")
                with trio.fail_after(seconds):
                    served += await stream.receive(2) == b"hi"
    return served


@pytest.mark.slow
async def test_four_hundred_sequential_connections_are_served():
    with processes(stock(), guarded()) as (leaky, tidy):
        counts = {}

        async def visit(host, count, seconds):
            counts[host] = await visits(host, count, seconds)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit, leaky, 270, 2)
            nursery.start_soon(visit, tidy, 400, 60)
        assert counts[leaky] < 270, "upstream fixed this: remove guard slot_released"
        assert counts[tidy] == 400
        assert await tidy.serves()
        await tidy.settles("slots", 1)
        # 60 without any; each that was kept would be several more
        assert (await tidy.ask("stat"))["tasks"] < 150


async def test_one_address_cannot_take_all_inbound_slots():
    with processes(guarded(limits={"swarm.INBOUND_PER_ADDRESS": 8})) as (host,):
        async with contextlib.AsyncExitStack() as stack:
            refused = 0
            for _ in range(12):
                try:
                    await stack.enter_async_context(
                        attacker.connect(host.address, source="127.0.0.2")
                    )
                except (ConnectionError, OSError, trio.TooSlowError):
                    refused += 1
            assert refused == 4
            assert await host.serves()
        await host.settles("slots", 1)
        assert await host.serves(source="127.0.0.2")


HALF_HANDSHAKES = {
    "random bytes": [bytes(range(256)) * 40],
    "http": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "endless varint": [b"\xff" * 64],
    "wrong protocol": [attacker.line("/multistream/1.0.0") + attacker.line("/none/1.0.0")],
    "noise of zeros": [
        attacker.line("/multistream/1.0.0") + attacker.line("/noise"),
        b"\x00\x20" + bytes(32),
        b"\xff\xff" + bytes(65535),
    ],
    "half a handshake": [attacker.line("/multistream/1.0.0") + attacker.line("/noise"), b"\x00"],
    "nothing": [],
}


async def test_garbage_costs_only_a_socket():
    with processes(guarded()) as (host,):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(10):
                for parts in HALF_HANDSHAKES.values():
                    stream = await stack.enter_async_context(
                        await trio.open_tcp_stream(
                            *attacker.endpoint(host.address), local_address="127.0.0.3"
                        )
                    )
                    with contextlib.suppress(trio.BrokenResourceError):
                        for part in parts:
                            await stream.send_all(part)
            assert await host.serves()
        await host.settles("slots", 1)
        assert await host.serves()


async def test_long_identify_messages_are_refused():
    async def push(host):
        before = host.rss()
        async with attacker.connect(host.address) as peer:
            for number in range(120):
                with contextlib.suppress(ConnectionError):
                    stream = await peer.open("/ipfs/id/push/1.0.0")
                    body = Identify(
                        listen_addrs=[number.to_bytes(4, "big") + bytes(900_000)]
                    ).SerializeToString()
                    await stream.send(attacker.varint(len(body)) + body, until_ended=True)
                    await stream.close()
            await host.rests()
        return host.rss() - before

    with processes(stock(), guarded()) as (remembers, refuses):
        assert await push(remembers) > 80 * MB, "upstream fixed this: remove guard identify_refused"
        assert await push(refuses) < 30 * MB
        assert await refuses.counted("identify_refused") == 120
        assert await refuses.serves()


async def test_handler_exception_does_not_block_other_streams():
    async def neighbour_answers(host, seconds):
        async with attacker.connect(host.address) as peer:
            ending = await peer.open("/test/ends/1")
            await ending.close()
            await host.rests()
            with trio.move_on_after(seconds), contextlib.suppress(ConnectionError):
                stream = await peer.open("/test/echo/1")
                await stream.send(b"x")
                return await stream.receive(1) == b"x"
        return False

    with processes(stock(), guarded()) as (wedged, fine):
        assert not await neighbour_answers(wedged, 3), (
            "upstream fixed this: remove guard handler_failed (end of stream)"
        )
        assert await neighbour_answers(fine, 60)
        assert await fine.serves()


async def test_a_stream_ends_with_its_handler():
    async def notified(host, seconds):
        async with attacker.connect(host.address) as peer:
            stream = await peer.open("/test/leave/1")
            await stream.send(b"x")
            with trio.move_on_after(seconds), contextlib.suppress(ConnectionError):
                await stream.receive(1)
            return stream.ended

    with processes(stock(), guarded()) as (forgetful, tidy):
        assert not await notified(forgetful, 2), (
            "upstream fixed this: remove guard handler_failed (close)"
        )
        assert await notified(tidy, 60)


async def test_half_closed_streams_are_swept():
    with processes(
        stock(sweep=0.5), guarded(sweep=0.5, limits={"inbox.ABANDONED_SECONDS": 0.2})
    ) as (hoarder, tidy):
        async with attacker.connect(hoarder.address) as one, attacker.connect(tidy.address) as two:
            for peer in (one, two):
                for _ in range(50):
                    stream = await peer.open("/test/leave/1")
                    await stream.send(b"x")
            await trio.sleep(2)
            assert (await hoarder.ask("stat"))["streams"] >= 50, (
                "upstream fixed this: remove guard stream_abandoned"
            )
            await tidy.settles("streams", 6)
            stream = await two.open("/test/echo/1")
            await stream.send(b"x")
            with trio.fail_after(60):
                assert await stream.receive(1) == b"x"


async def test_exhausted_outbound_streams_raise():
    with processes(stock(), guarded(limits={"yamux.OPEN_STREAM_SECONDS": 0.5}), guarded()) as (
        hangs,
        fails,
        target,
    ):
        to = {"address": target.address, "peer": target.peer, "count": 300}
        with trio.move_on_after(6) as patience:
            await hangs.ask("unclosed", seconds=60, **to)
        assert patience.cancelled_caught, "upstream fixed this: remove guard stream_slots_exhausted"
        answer = await fails.ask("unclosed", **to)
        assert 200 < answer["opened"] < 300
        assert answer["error"]
        assert await target.serves()


async def test_cancelled_stream_open_releases_its_slot():
    with processes(stock(), guarded(), guarded()) as (loses, keeps, target):
        to = {"address": target.address, "peer": target.peer, "times": 100}
        try:
            free = (await loses.ask("cancel_opens", seconds=8, **to)).get("free", 0)
        except trio.TooSlowError:
            free = 0
        assert free < 240, "upstream fixed this: remove guards open_stream and _install_new_stream"
        # identify and pubsub may hold one each
        assert (await keeps.ask("cancel_opens", **to))["free"] >= 254
        assert await target.serves()


async def test_a_port_belongs_to_one_process():
    with processes(stock(), guarded()) as (stock_one, guarded_one):
        port = attacker.endpoint(stock_one.address)[1]
        with processes(stock(port=port)) as (second,):
            assert second.address == stock_one.address, (
                "upstream fixed this: remove guard exclusive port"
            )
        with (
            pytest.raises(RuntimeError),
            processes(guarded(port=attacker.endpoint(guarded_one.address)[1])),
        ):
            pass
        assert await guarded_one.serves()


async def test_restarted_peer_can_be_dialled():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with processes(stock(), guarded()) as (bitter, forgiving):
        async with trio.open_nursery() as nursery:
            for host in (bitter, forgiving):
                nursery.start_soon(fail_to_dial, host, port)
        with processes(guarded(port=port, seed=7)) as (back,):
            assert back.peer == PEER_OF_SEED_7
            await trio.sleep(1.1)
            answers = [
                await host.ask("connect", address=back.address, peer=back.peer)
                for host in (bitter, forgiving)
            ]
        assert "error" in answers[0], "upstream fixed this: remove guard negative cache"
        assert "error" not in answers[1]


async def fail_to_dial(host, port):
    answer = await host.ask("connect", address=f"/ip4/127.0.0.1/tcp/{port}", peer=PEER_OF_SEED_7)
    assert "error" in answer


PEER_OF_SEED_7 = "12D3KooWRawPbxPtP1eZaJpumGnyWX2DcUyd3RQnydr3eAto4Az7"


async def test_stopped_host_leaves_no_sockets():
    with processes(guarded(), guarded(), stock()) as (target, tidy, leaky):
        before = leaky.sockets(), tidy.sockets()
        async with trio.open_nursery() as nursery:
            for host in (leaky, tidy):
                nursery.start_soon(cycle, host, target)
        assert leaky.sockets() - before[0] >= 6, "upstream fixed this: remove guard running (close)"
        assert tidy.sockets() - before[1] <= 2


async def cycle(host, target):
    answer = await host.ask("cycle", seconds=40, address=target.address, peer=target.peer, times=8)
    assert "error" not in answer
