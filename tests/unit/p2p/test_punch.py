"""Hole punching without NAT: direction, source port and limits. With real routers: tests/nat."""

import contextlib
import socket

import pytest
import trio
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.errors import PeerError, Unavailable
from swarmnode.p2p.addresses import Address, parse
from swarmnode.p2p.punch import DCUTR, connect_from, dialable_targets
from swarmnode.p2p.stream_calls import run_on_new_stream, write_message
from tests.support.hosts import ask, call, host, relayed, serve_echo
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def called(tmp_path, hole_punching=True):
    """Open (relay, a, b): a has dialled b through the relay; both advertise their listening
    addresses."""
    async with relayed(tmp_path, hole_punching=hole_punching) as (relay, a, b):
        for each in (a, b):
            each.nat.puncher.own = lambda each=each: [parse(each.listen_addrs[0])[0]]
        await call(a, b, relay)
        yield relay, a, b


async def test_direct_connection_replaces_the_circuit(tmp_path):
    """Only requests that were pending when the circuit was closed may fail."""
    async with called(tmp_path) as (relay, a, b):
        serve_echo(b)
        failed = after = 0
        with trio.fail_after(60):
            while after < 10:
                direct = relay.statistics().nat.relay.circuits == 0
                try:
                    await ask(a, b.peer_id)
                    after += direct
                except PeerError:
                    failed += 1
                await trio.sleep(0.1)
        assert failed <= 2
        assert a.connections.is_direct(b.peer_id)
        assert b.statistics().nat.punch.succeeded == 1
        assert a.statistics().nat.relayed == b.statistics().nat.relayed == 0


async def test_without_punching_the_circuit_stays(tmp_path):
    async with called(tmp_path, hole_punching=False) as (_, a, b):
        await a.nat.puncher.upgrade(b.peer_id)  # which b does not answer
        assert a.statistics().nat.punch.failed == 1
        assert not b.connections.is_direct(a.peer_id)
        assert a.statistics().nat.relayed == 1


async def test_punching_over_a_direct_connection_is_refused(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        await until(lambda: a.connected() and b.connected())

        async def talk(stream):
            await write_message(stream, pb.HolePunch(type=pb.HolePunch.CONNECT))
            await stream.read(1)

        with pytest.raises(PeerError):
            await run_on_new_stream(b.host, a.peer_id, DCUTR, talk, deadline=5.0)
        assert a.statistics().nat.punch.refused == 1


def test_dialled_addresses_are_limited_in_number_and_scope():
    vantage = Address("ip4", "5.5.5.5", 1)
    received = [
        "/ip4/127.0.0.1/tcp/1",
        "/ip4/192.168.0.1/tcp/2",
        "/ip4/6.6.6.1/tcp/3",
        "/ip4/6.6.6.2/tcp/4",
        "/ip4/6.6.6.3/tcp/5",
    ]
    found = dialable_targets(
        [b"garbage", *(Multiaddr(each).to_bytes() for each in received[2:])], vantage
    )
    assert [each.port for each in found] == [3, 4]
    assert dialable_targets([Multiaddr(each).to_bytes() for each in received[:2]], vantage) == []
    assert dialable_targets([Multiaddr(received[2]).to_bytes()], None) == []


async def test_listening_port_is_shared_only_for_dialling(tmp_path):
    async with host(tmp_path / "a") as a:
        own = parse(a.listen_addrs[0])[0]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            raw = await connect_from(own, Address("ip4", "127.0.0.1", other.getsockname()[1]))
            accepted, where = other.accept()
            assert where == ("127.0.0.1", own.port)
            accepted.close()
            await raw.aclose()
        with pytest.raises(Unavailable, match="used by another process"):
            async with host(tmp_path / "b", listen_addrs=[str(own)]):
                pass
