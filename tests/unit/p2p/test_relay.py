"""Real hosts on loopback that connect through a relay: reservations, circuits, limits, bans."""

import contextlib
import random

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.errors import PeerError
from swarmnode.p2p import nat
from swarmnode.p2p.addresses import parse
from swarmnode.p2p.relay import HOP, STOP, RelayLimits, RelayState
from swarmnode.p2p.relay_client import Reservations
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, write_message
from tests.support.hosts import ask, call, host, place, relayed, serve_echo
from tests.support.waiting import until


async def test_peer_without_reservation_cannot_be_called(tmp_path):
    async with (
        host(tmp_path / "relay", relay="server") as relay,
        host(tmp_path / "b", initial_peers=relay.listen_addrs, relay="off") as b,
    ):
        async with host(
            tmp_path / "a", initial_peers=relay.listen_addrs, swarm=bytes([1]) * 32, relay="off"
        ) as a:
            await until(lambda: len(relay.connected()) == 2)
            with pytest.raises(PeerError, match="204"):
                await a.nat.client.call(b.peer_id, place(relay))
            assert relay.statistics().nat.relay.called["no_reservation"] == 1


async def test_reservation_belongs_to_the_authenticated_peer(tmp_path):
    async with relayed(tmp_path) as (relay, a, _):
        victim = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

        async def reserve(stream):
            await write_message(
                stream,
                pb.HopMessage(
                    type=pb.HopMessage.RESERVE, peer=pb.PeerId(id=ID.from_string(victim).to_bytes())
                ),
            )
            return await read_message(stream, pb.HopMessage)

        answer, _ = await run_on_new_stream(a.host, relay.peer_id, HOP, reserve, deadline=5.0)
        assert answer.status == pb.OK
        assert relay.statistics().nat.relay.reservations == 2  # a's own and b's, as before
        assert not relay.nat.relay.reserved(victim)


async def test_reservations_end_with_their_connection(tmp_path):
    async with host(tmp_path / "relay", relay="server") as relay:
        async with host(tmp_path / "b", initial_peers=relay.listen_addrs, relay="client"):
            await until(lambda: relay.statistics().nat.relay.reservations == 1)
        await until(lambda: relay.statistics().nat.relay.reservations == 0)


async def test_lost_relay_is_removed_and_asked_again(tmp_path):
    async with host(tmp_path / "relay", relay="server") as relay:
        known = relay.listen_addrs
        listening = parse(known[0])[0].port
    async with host(tmp_path / "b", initial_peers=known, relay="client") as b:
        for _ in range(2):
            async with host(
                tmp_path / "relay", relay="server", listen_addrs=[f"/ip4/127.0.0.1/tcp/{listening}"]
            ) as relay:
                await until(
                    lambda relay=relay: (
                        b.nat.own_addresses(relay.peer_id)[1:] == [str(place(relay))]
                    )
                )
            await until(lambda: b.statistics().nat.client.relays == [])


async def test_a_connected_relay_is_not_asked_in_a_loop(tmp_path, monkeypatch):
    """Its reservation is renewed, although it is not a candidate any more."""
    monkeypatch.setattr("swarmnode.p2p.relay_client.SHORTEST_SECONDS", 0.4)
    monkeypatch.setattr("swarmnode.p2p.relay_client.LONGEST_SECONDS", 0.4)
    async with relayed(tmp_path) as (relay, _, b):
        monkeypatch.setattr(b.nat, "address_of", lambda peer: None)
        before = b.statistics().nat.client.reserved
        await until(lambda: b.statistics().nat.client.reserved >= before + 2)
        assert b.statistics().nat.client.relays == [relay.peer_id]


async def test_excess_circuit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(nat, "RELAY_LIMITS", RelayLimits(circuits=1))
    async with relayed(tmp_path) as (relay, a, b):
        await call(a, b, relay)
        with pytest.raises(PeerError, match="201"):
            await b.nat.client.call(a.peer_id, place(relay))
        assert relay.statistics().nat.relay.called["full"] == 1
        assert b.peer_id in a.connected()


async def test_circuit_ends_at_its_byte_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(nat, "RELAY_LIMITS", RelayLimits(circuit_bytes=2**17))
    async with relayed(tmp_path) as (relay, a, b):
        await call(a, b, relay)

        serve_echo(b)
        with pytest.raises(PeerError):
            await ask(a, b.peer_id, bytes(2**20), deadline=10.0)
        await until(lambda: b.peer_id not in a.connected() and a.peer_id not in b.connected())
        await until(lambda: relay.statistics().nat.relay.circuits == 0)
        assert relay.peer_id in a.connected()
        assert relay.peer_id in b.connected()


async def test_circuit_ends_at_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(nat, "RELAY_LIMITS", RelayLimits(circuit_seconds=1))
    async with relayed(tmp_path) as (relay, a, b):
        await call(a, b, relay)
        await until(lambda: b.peer_id not in a.connected() and a.peer_id not in b.connected(), 5.0)


async def test_banned_peer_cannot_return_through_a_relay(tmp_path):
    async with relayed(tmp_path) as (relay, a, b):
        for _ in range(100):
            b.rejected(a.peer_id, "seed", cost=100.0)
        refused = b.statistics().refused_connections
        with contextlib.suppress(Exception):
            await a.nat.client.call(b.peer_id, place(relay))
        await until(lambda: b.statistics().refused_connections == refused + 1)
        await until(lambda: b.peer_id not in a.connected())
        assert a.peer_id not in b.connected()


async def test_relay_refuses_banned_peers(tmp_path):
    async with relayed(tmp_path) as (relay, a, b):
        # its connection is still there
        relay.reputation.rejected(a.peer_id, "seed", trio.current_time(), 1e6)
        with pytest.raises(PeerError, match="202"):
            await a.nat.client.call(b.peer_id, place(relay))


async def test_circuits_need_a_reserved_relay(tmp_path):
    async with (
        host(tmp_path / "b", relay="off") as b,
        host(tmp_path / "a", initial_peers=b.listen_addrs, relay="off") as a,
    ):
        await until(lambda: a.connected() and b.connected())

        async def ring(stream):
            caller = pb.PeerId(id=ID.from_string(a.peer_id).to_bytes())
            await write_message(stream, pb.StopMessage(type=pb.StopMessage.CONNECT, peer=caller))
            return await read_message(stream, pb.StopMessage)

        with pytest.raises(PeerError):
            await run_on_new_stream(a.host, b.peer_id, STOP, ring, deadline=5.0)
        assert b.statistics().nat.client.calls["refused"] == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xff\xff\xff\x7f",
        b"\x05\xff\xff\xff\xff\xff",
        b"\x02\x08\x01",
        b"\x04\x08\x01\x12\x00",
    ],
)
async def test_garbage_ends_its_stream_only(tmp_path, garbage):
    async with relayed(tmp_path) as (relay, a, b):

        async def talk(stream):
            await stream.write(garbage)
            await stream.finish()
            return await read_message(stream, pb.HopMessage)

        for protocol, peer in ((HOP, relay.peer_id), (STOP, relay.peer_id)):
            with contextlib.suppress(PeerError):
                await run_on_new_stream(a.host, peer, protocol, talk, deadline=5.0)
        await call(a, b, relay)


# -- pure


def test_full_relay_only_renews():
    book = RelayState(RelayLimits(reservations=2, reservation_seconds=100))
    assert book.reserve("a", 0.0)
    assert book.reserve("b", 50.0)
    assert not book.reserve("c", 60.0)
    assert book.reserve("a", 90.0)
    assert not book.reserve("c", 140.0)
    assert book.reserve("c", 150.0)
    assert not book.reserved("b", 150.0)
    assert book.counts(150.0) == (2, 0)


def test_circuits_are_counted_at_both_ends():
    book = RelayState(RelayLimits(circuits=10, circuits_per_peer=2))
    assert book.open("a", "b")
    assert book.open("c", "b")
    assert not book.open("d", "b")
    assert book.open("d", "a")
    assert not book.open("a", "e")
    book.close("a", "b")
    assert book.open("a", "e")


def test_reservations_are_renewed_and_refusals_back_off():
    plan = Reservations(random.Random(0))
    assert plan.due(["r", "s", "t"], 0.0) == "r"
    plan.granted("r", 1000.0, 0.0)
    assert plan.due(["r", "s", "t"], 0.0) == "s"
    plan.refused("s", 0.0)
    assert plan.due(["r", "s", "t"], 0.0) == "t"
    plan.granted("t", 1000.0, 0.0)
    assert plan.due(["r", "s", "t"], 10.0) is None
    assert plan.due(["r", "s", "t"], 760.0) in ("r", "t")
    assert plan.valid(999.0) == ["r", "t"]
    assert plan.valid(1000.0) == []
    assert plan.forget_peer("r")
    assert plan.due(["s", "t"], 10.0) == "s"


def test_refusals_back_off_up_to_a_bound():
    plan, now, pauses = Reservations(random.Random(0)), 0.0, []
    for _ in range(15):
        plan.refused("r", now)
        pauses.append(plan.next_due(now))
        now += pauses[-1]
    assert pauses[0] <= 5.0
    assert 300.0 <= pauses[-1] <= 600.0


def test_grant_duration_is_clamped():
    plan = Reservations(random.Random(0))
    plan.granted("r", 1e12, 0.0)
    assert plan.valid(6 * 3600.0) == []
    plan.granted("r", -5.0, 0.0)
    assert plan.valid(59.0) == ["r"]


async def test_relay_without_budget_ends_circuits(tmp_path):
    async with relayed(tmp_path) as (relay, a, b):
        await call(a, b, relay)
        asked, budget = [], False

        def allows(choice):
            asked.append(choice)
            return budget

        relay.set_budget(allows)
        with pytest.raises(PeerError):
            await ask(a, b.peer_id, bytes(1000), deadline=20.0)
        await until(lambda: relay.statistics().nat.relay.circuits == 0, 10.0)
        assert set(asked) == {"relay"}
        with pytest.raises(PeerError):
            await a.nat.client.call(b.peer_id, place(relay))
        assert relay.statistics().nat.relay.reservations == 2
        budget = True
        await until(lambda: b.peer_id not in a.connected())
        await call(a, b, relay)
