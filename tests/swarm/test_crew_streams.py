"""Stage streams between real libp2p hosts on loopback: bytes from trainer to trainer, bounded,
within one roster, for its members only."""

import contextlib
import gc
import hashlib

import msgspec
import psutil
import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.stages.crew_messages import StreamOpen
from swarmnode.stages.network import stream_proxy
from swarmnode.stages.network.stream_proxy import StreamProxy
from swarmnode.wire import ids
from tests.support.hosts import hosts
from tests.support.pipe_ends import open_pipe, stream_peers
from tests.support.waiting import until, wait_connected

pytestmark = pytest.mark.swarm


@contextlib.asynccontextmanager
async def crew(directory, count=2, *, members=None, allows=lambda choice: True):
    """Yield `count` fully connected hosts, the first `members` of them a crew: (networks, pipes,
    circles, losses reported to each)."""
    members = count if members is None else members
    async with hosts(directory, count) as networks, trio.open_nursery() as nursery:
        every, lost = [], [[] for _ in networks]
        for number, network in enumerate(networks):
            await wait_connected(network, count - 1)
            (directory / str(number) / "run").mkdir()
            losses = lost[number]
            made = StreamProxy(
                network.streams,
                directory / str(number),
                lambda peer, crew, losses=losses: losses.append(peer),
                allows=allows,
                rejected=network.rejected,
            )
            await nursery.start(made.run)
            every.append(made)
        seen = stream_peers([network.peer_id for network in networks[:members]])
        for made, circle in zip(every, seen, strict=False):
            made.assign(circle)
        yield networks, every, seen, lost
        nursery.cancel_scope.cancel()


async def send_all(stream, seed, megabytes, digest):
    block = bytes(range(256)) * 4096
    for number in range(megabytes):
        piece = seed + number.to_bytes(8, "big") + block[16:]
        digest.update(piece)
        await stream.send_all(piece)


async def receive_all(stream, count, digest):
    while count:
        data = await stream.receive_some(min(count, 2**20))
        assert data, f"{count} bytes are missing"
        digest.update(data)
        count -= len(data)


async def exactly(stream, count):
    data = b""
    while len(data) < count and (more := await stream.receive_some(count - len(data))):
        data += more
    return data


def refusals(proxy):
    """Return reason → number of refused streams, without zeros."""
    return {reason: count for reason, count in proxy.statistics().refused.items() if count}


async def ended(stream):
    """Wait up to a minute for the end of the stream."""
    with trio.fail_after(60), contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some(2**20):
            pass


async def test_large_streams_arrive_complete_in_bounded_memory(tmp_path):
    async with crew(tmp_path) as (_, (a, b), (ca, cb), lost):
        peer_a = ca.members[0]
        one, other = await open_pipe(a, ca, 1), await open_pipe(b, cb, 0)
        gc.collect()
        before = psutil.Process().memory_info().rss
        sent, got = [hashlib.blake2b(), hashlib.blake2b()], [hashlib.blake2b(), hashlib.blake2b()]
        most = 0

        async def watch():
            nonlocal most
            while True:
                most = max(most, psutil.Process().memory_info().rss - before)
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as transfers:
                transfers.start_soon(send_all, one, b"12345678", 64, sent[0])
                transfers.start_soon(send_all, other, b"87654321", 64, sent[1])
                transfers.start_soon(receive_all, other, 64 * 2**20, got[0])
                transfers.start_soon(receive_all, one, 64 * 2**20, got[1])
            nursery.cancel_scope.cancel()
        assert [each.digest() for each in sent] == [each.digest() for each in got]
        # Both ends of two directions: windows of 8 MiB and bytes in transit.
        assert most < 80 * 2**20
        statistics = a.statistics()
        assert statistics.open == {"frames": 1, "state": 0}
        assert statistics.sent["frames"] == pytest.approx(64 * 2**20, abs=1000)
        await one.aclose()
        await ended(other)
        await until(lambda: lost == [[], [peer_a]])
        assert not any(a.statistics().lost.values())


async def test_opens_in_any_order_and_both_kinds_at_once(tmp_path):
    async with crew(tmp_path, 3) as (_, pipes, seen, _):
        ends = {}
        for kind in ("frames", "state"):
            for here in (2, 1, 0):
                for there in range(3):
                    if there != here:
                        ends[here, there, kind] = await open_pipe(
                            pipes[here], seen[here], there, kind
                        )
        for (here, there, kind), end in ends.items():
            await end.send_all(f"{here}{there}{kind[0]}".encode())
        for (here, there, kind), end in ends.items():
            assert await exactly(end, 3) == f"{there}{here}{kind[0]}".encode()
        assert all(each.statistics().open == {"frames": 2, "state": 2} for each in pipes)


async def test_new_crew_ends_streams_without_reporting_losses(tmp_path):
    async with crew(tmp_path) as (networks, (a, b), (ca, cb), lost):
        one, other = await open_pipe(a, ca, 1), await open_pipe(b, cb, 0)
        await one.send_all(b"x")
        assert await exactly(other, 1) == b"x"
        peer_a = networks[0].peer_id
        newer = stream_peers([network.peer_id for network in networks], crew=b"d" * 32)
        a.assign(newer[0])
        b.assign(newer[1])
        await ended(one)
        await ended(other)
        late = await open_pipe(a, ca, 1)  # of the previous roster
        await ended(late)
        one, other = await open_pipe(a, newer[0], 1), await open_pipe(b, newer[1], 0)
        await one.send_all(b"y")
        assert await exactly(other, 1) == b"y"
        assert lost == [[], []]
        a.release()
        await ended(one)
        # b still has the old roster, so for b a member closed the stream.
        await until(lambda: lost == [[], [peer_a]])


async def test_member_retries_until_the_peer_has_the_new_crew(tmp_path):
    async with crew(tmp_path) as (networks, (a, b), _, lost):
        newer = stream_peers([network.peer_id for network in networks], crew=b"d" * 32)
        a.assign(newer[0])
        one = await open_pipe(a, newer[0], 1)
        await until(lambda: b.statistics().refused.get("crew", 0) >= 2)
        b.assign(newer[1])
        other = await open_pipe(b, newer[1], 0)
        await one.send_all(b"at last")
        assert await exactly(other, 7) == b"at last"
        assert lost == [[], []]


async def test_lost_host_is_reported_at_once(tmp_path):
    async with crew(tmp_path, 3) as (networks, pipes, seen, lost):
        ends = {
            (i, j): await open_pipe(pipes[i], seen[i], j)
            for i in range(3)
            for j in range(3)
            if i != j
        }
        await until(lambda: all(each.statistics().open["frames"] == 2 for each in pipes))
        began = trio.current_time()
        networks[1].disconnect(networks[0].peer_id)
        networks[1].disconnect(networks[2].peer_id)
        await until(lambda: lost[0] == lost[2] == [networks[1].peer_id])
        assert trio.current_time() - began < 2
        await ended(ends[0, 1])
        assert pipes[0].statistics().open["frames"] == 1  # the stream to stage 2


async def open_as(network, peer, opened):
    """Open a stream as any peer could. Return the stream."""
    data = opened if isinstance(opened, bytes) else msgspec.msgpack.encode(opened)
    stream = await network.streams.open(peer, ids.STAGE_STREAM_PROTOCOL, deadline=5)
    await stream.send(len(data).to_bytes(4, "big") + data)
    return stream


async def refused(network, peer, opened):
    """Open a stream and expect a reset, perhaps before both sides have agreed on a protocol."""
    with trio.fail_after(60), contextlib.suppress(PeerError):
        await (await open_as(network, peer, opened)).closed.wait()


def opening(circle, **other):
    """Return the opening message of a member."""
    fields = {"crew": circle.crew, "from_stage": 0, "to_stage": 1, "kind": "frames", **other}
    return StreamOpen(**fields)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"crew": b"x" * 32}, "crew"),
        ({"from_stage": 1}, "stage"),
        ({"from_stage": 7}, "stage"),
        ({"from_stage": -1}, "stage"),
        ({"to_stage": 0}, "stage"),
    ],
)
async def test_rejects_openings_that_contradict_the_crew(tmp_path, other, reason):
    async with crew(tmp_path) as (networks, (_, b), (ca, _), _):
        await refused(networks[0], networks[1].peer_id, opening(ca, **other))
        assert refusals(b) == {reason: 1}
        assert b.statistics().parked == 0
        assert networks[1].is_allowed(networks[0].peer_id)


async def test_stranger_gets_no_stream(tmp_path):
    async with crew(tmp_path, 3, members=2) as (networks, (_, b, _), (ca, _), _):
        await refused(networks[2], networks[1].peer_id, opening(ca))
        assert refusals(b) == {"peer": 1}
        await refused(networks[1], networks[2].peer_id, opening(ca))  # ca has no crew


@pytest.mark.parametrize("data", [b"\xc1", bytes(513), msgspec.msgpack.encode({"crew": b"c" * 32})])
async def test_malformed_message_costs_reputation(tmp_path, data):
    async with crew(tmp_path) as (networks, (_, b), _, _):
        await refused(networks[0], networks[1].peer_id, data)
        assert refusals(b) == {"malformed": 1}
        assert (
            networks[1].reputation.statistics(trio.current_time()).rejected["stages_malformed"] == 1
        )


async def test_parked_streams_are_limited_in_number_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_proxy, "PARK_SECONDS", 0.5)
    async with crew(tmp_path) as (networks, (_, b), (ca, _), _):
        first = await open_as(networks[0], networks[1].peer_id, opening(ca))
        await until(lambda: b.statistics().parked == 1)
        second = await open_as(networks[0], networks[1].peer_id, opening(ca))
        with trio.fail_after(60):
            await first.closed.wait()
            assert b.statistics().parked == 1
            await second.closed.wait()
        assert b.statistics().parked == 0


async def test_bytes_wait_without_budget(tmp_path):
    allowed = [False]
    async with crew(tmp_path, allows=lambda choice: allowed[0]) as (_, (a, b), (ca, cb), _):
        one, other = await open_pipe(a, ca, 1), await open_pipe(b, cb, 0)
        await one.send_all(b"x")
        await until(lambda: a.statistics().throttled_seconds > 0)
        assert a.statistics().sent["frames"] < 300  # only the opening message
        allowed[0] = True
        assert await exactly(other, 1) == b"x"
