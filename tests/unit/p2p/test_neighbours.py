"""The neighbours protocol without a network: when peers are asked, what is sent, hostile messages,
and the sessions of a key that two processes use."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import KEY, OTHER_KEY, OTHER_PEER, OTHER_SWARM, PEER, SWARM
from swarmnode.errors import BadMessage, PeerError, Refused
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.neighbours import REQUEST_BURST, REQUEST_SECONDS, Neighbours
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.sessions import PEERS, REMEMBER_SECONDS, OwnSession, Witness
from swarmnode.wire import codec, limits
from swarmnode.wire.envelope import (
    Credentials,
    open_session,
    open_summary,
    peer_id,
    seal_session,
    seal_summary,
)
from swarmnode.wire.messages import NeighboursRequest, NeighboursResponse, PeerAddresses, Session
from tests.support.sim.network import NoNat
from tests.unit.p2p.test_summaries import NOW, summary

HERE, THERE = Address("ip4", "192.0.2.7", 9512), Address("ip4", "192.0.2.9", 9512)
THIRD_KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
THIRD_PEER = peer_id(THIRD_KEY.public_key().public_bytes_raw())
RELAY, NOBODY = (peer_id(bytes([number]) * 32) for number in (8, 9))


class Wire:
    """Requests without a network: records requests and returns prepared responses."""

    def __init__(self, answers=()):
        self.asked = []
        self.answers = dict(answers)

    def serve(self, protocol, handler, **bounds):
        self.handler = handler

    async def request(self, peer, protocol, data, *, deadline, max_response_bytes):
        request = codec.decode(data, NeighboursRequest, limits.NEIGHBOURS_REQUEST_BYTES)
        self.asked.append((peer, trio.current_time(), request))
        answer = self.answers.get(peer)
        if answer is None:
            raise PeerError("gone")
        return answer

    async def answer(self, peer, request):
        data = await self.handler(peer, codec.encode(request))
        return codec.decode(data, NeighboursResponse, limits.NEIGHBOURS_RESPONSE_BYTES)


class RelayNat(NoNat):
    """Knows the address of the third peer, which is a relay."""

    def address_of(self, relay):
        return THERE if relay == THIRD_PEER else None


def make_table(*connected):
    table = PeerTable(PEER, 16, random.Random(1))
    for peer in connected:
        table.record_connected(peer, inbound=False, now=trio.current_time())
    return table


def make_node(wire, table=None, clock=lambda: NOW + trio.current_time(), allowed=lambda peer: True):
    rng = random.Random(1)
    connections = SimpleNamespace(vantage_address=lambda peer: HERE, observed=lambda peer: HERE)
    node = Neighbours(
        wire,
        Credentials(KEY, SWARM),
        table or make_table(),
        connections,
        RelayNat(HERE),
        lambda: None,
        allowed,
        rng,
        clock=clock,
    )
    node.own_summary = lambda created_at: summary(created_at / 1000)
    return node


def request(key=OTHER_KEY, at=NOW, **changes):
    fields = {
        "swarm": SWARM,
        "addresses": [],
        "session": seal_session(Session(bytes(16), 0, int(at * 1000)), key, SWARM),
        "summary": seal_summary(summary(at), key, SWARM),
        "used": 0,
    }
    return NeighboursRequest(**{**fields, **changes})


def response(*summaries, swarm=SWARM, peers=(), sessions=(), successor=b""):
    peers = [PeerAddresses(*each) for each in peers]
    return codec.encode(
        NeighboursResponse(swarm, peers, list(sessions), list(summaries), successor)
    )


# ---- when peers are asked


async def test_a_new_peer_is_asked_often_and_then_in_rounds(autojump_clock):
    wire = Wire()
    node = make_node(wire, make_table(OTHER_PEER))
    with trio.move_on_after(300):
        await node.run()
    gaps = [after - at for (_, at, _), (_, after, _) in itertools.pairwise(wire.asked)]
    assert all(15 <= gap <= 16.5 for gap in gaps[:2])
    assert all(29 <= gap <= 46 for gap in gaps[3:])
    assert 8 <= len(gaps) <= 11


async def test_the_peers_that_were_asked_longest_ago_come_first(autojump_clock):
    wire, peers = Wire(), [f"p{i}" for i in range(8)]
    node = make_node(wire, make_table(*peers))
    await trio.sleep(61)
    with trio.move_on_after(32):
        await node.run()
    assert len(wire.asked) == 4
    with trio.move_on_after(15):
        await node.run()
    assert sorted(peer for peer, _, _ in wire.asked) == peers


async def test_frequent_requests_are_refused(autojump_clock):
    wire = Wire()
    make_node(wire)
    for _ in range(REQUEST_BURST):
        await wire.answer(OTHER_PEER, request())
    with pytest.raises(PeerError, match="too many requests"):
        await wire.answer(OTHER_PEER, request())
    await trio.sleep(REQUEST_SECONDS)
    await wire.answer(OTHER_PEER, request())


# ---- summaries


async def test_summary_is_signed_for_this_swarm_and_every_thirty_seconds(autojump_clock):
    wire = Wire()
    node = make_node(wire)
    for _ in range(3):
        await node.ask(OTHER_PEER)
        await trio.sleep(20)
    first, second, third = (asked.summary for _, _, asked in wire.asked)
    assert first == second != third
    signer, opened = open_summary(first, SWARM)
    assert signer == PEER
    assert open_summary(third, SWARM)[1].created_at >= opened.created_at + 30_000
    with pytest.raises(BadMessage, match="signature"):
        open_summary(first, OTHER_SWARM)


async def test_peers_report_how_many_groups_they_used():
    wire = Wire()
    node = make_node(wire)
    node.used_of = {OTHER_PEER: 7}.__getitem__
    await node.ask(OTHER_PEER)
    assert wire.asked[0][2].used == 7
    await wire.answer(OTHER_PEER, request(used=5))
    assert (node.statistics().used, node.statistics().used_by) == (5, 1)


async def test_a_node_that_shares_no_summary_shows_those_of_others():
    theirs = seal_summary(summary(), OTHER_KEY, SWARM)
    wire = Wire({OTHER_PEER: response(theirs)})
    node = make_node(wire, clock=lambda: NOW)
    node.own_summary, node.used_of = lambda created_at: None, lambda peer: 3
    node.detect_duplicates()
    await node.ask(OTHER_PEER)
    asked = wire.asked[0][2]
    assert (asked.summary, asked.used) == (b"", 0)
    assert open_session(asked.session, SWARM)[0] == PEER
    assert [claim.peer for claim in node.statistics().rows] == [OTHER_PEER]
    assert (await wire.answer(THIRD_PEER, request(THIRD_KEY, summary=b""))).summaries == [theirs]


async def test_response_has_own_and_other_summaries():
    wire = Wire()
    make_node(wire, clock=lambda: NOW)
    await wire.answer(THIRD_PEER, request(THIRD_KEY))
    answer = await wire.answer(OTHER_PEER, request())
    assert [open_summary(frame, SWARM)[0] for frame in answer.summaries] == [PEER, THIRD_PEER]


async def test_a_summary_of_a_banned_peer_is_not_shown():
    wire = Wire({"x": response(seal_summary(summary(), OTHER_KEY, SWARM))})
    node = make_node(wire, clock=lambda: NOW, allowed=lambda peer: peer != OTHER_PEER)
    await node.ask("x")
    assert node.statistics().rows == []


async def test_clocks_of_peers_are_compared_also_without_summaries():
    wire = Wire()
    node = make_node(wire, clock=lambda: NOW - 400)
    for number in range(3):
        key = Ed25519PrivateKey.from_private_bytes(bytes([40 + number]) * 32)
        peer = peer_id(key.public_key().public_bytes_raw())
        await wire.answer(peer, request(key, NOW + number, summary=b""))
    assert node.statistics().clock_offset_seconds == 401


# ---- other swarms, successors, hostile messages


async def test_a_peer_of_another_swarm_receives_only_a_successor():
    wire, table = Wire(), make_table(OTHER_PEER, THIRD_PEER)
    table.add_self_reported(THIRD_PEER, str(THERE), 0.0)
    node = make_node(wire, table, clock=lambda: NOW)
    member = await wire.answer(OTHER_PEER, request())
    assert member.peers == [PeerAddresses(THIRD_PEER, [str(THERE)])]
    node.successor_of = {SWARM: b"", OTHER_SWARM: b"\x66" * 32}.__getitem__
    await wire.answer(THIRD_PEER, request(THIRD_KEY))
    answer = await wire.answer(OTHER_PEER, request(swarm=OTHER_SWARM))
    assert answer == NeighboursResponse(SWARM, [], [], [], b"\x66" * 32)
    assert [row.peer for row in node.statistics().rows] == [OTHER_PEER, THIRD_PEER]


async def test_addresses_of_another_swarm_are_not_stored():
    table, peers = make_table(OTHER_PEER), [(THIRD_PEER, [str(THERE)])]
    for swarm, stored in ((OTHER_SWARM, False), (SWARM, True)):
        node = make_node(Wire({OTHER_PEER: response(swarm=swarm, peers=peers)}), table)
        await node.ask(OTHER_PEER)
        assert node.reports.outcomes["other_swarm"] == (not stored)
        assert (table.get(THIRD_PEER) is not None) == stored


async def test_false_addresses_cost_few_dials():
    """The hostile peer claims addresses of no node, of this node, out of reach, and names."""
    unreachable = ["/dns4/localhost/tcp/22", "/ip4/0.0.0.0/tcp/22", "/ip4/169.254.169.254/tcp/80"]
    lies = [
        (PEER, [str(THERE)]),
        ("12D3KooWnonsense", [str(THERE)]),
        (OTHER_PEER, [*unreachable, "x"]),
        (RELAY, [f"/ip4/0.0.0.0/tcp/77/p2p/{OTHER_PEER}/p2p-circuit"]),
        (NOBODY, [f"/ip4/0.0.0.0/tcp/77/p2p/{RELAY}/p2p-circuit"]),
    ]
    table = make_table(OTHER_PEER)
    node = make_node(Wire({OTHER_PEER: response(peers=lies)}), table)
    await node.ask(OTHER_PEER)
    assert node.reports.outcomes == Counter(malformed=2, out_of_reach=4, learned=1, other_swarm=0)
    # A relay that reports itself is at its observed address.
    assert table.get(RELAY).addresses == [f"/ip4/192.0.2.7/tcp/77/p2p/{OTHER_PEER}/p2p-circuit"]


async def test_a_peer_reports_ports_and_known_relays_but_no_foreign_address():
    """Otherwise one liar could direct the swarm at any address by calling it a relay."""
    wire, table = Wire(), make_table(OTHER_PEER)
    make_node(wire, table)
    good = ["/ip4/0.0.0.0/tcp/7001", "/ip4/192.0.2.7/tcp/7002"]
    bad = ["/ip4/8.8.8.8/tcp/53", "/dns4/victim.example/tcp/80", "/ip4/192.0.2.7/tcp/0"]
    relays = [f"/ip4/9.9.9.9/tcp/9/p2p/{relay}/p2p-circuit" for relay in (RELAY, THIRD_PEER)]
    await wire.answer(OTHER_PEER, request(addresses=bad + good + relays))
    assert table.get(OTHER_PEER).addresses == [
        "/ip4/192.0.2.7/tcp/7001",
        "/ip4/192.0.2.7/tcp/7002",
        f"{THERE}/p2p/{THIRD_PEER}/p2p-circuit",
    ]


@pytest.mark.parametrize("swarm", [SWARM, OTHER_SWARM])
async def test_a_successor_that_a_peer_knows_is_reported_with_the_peer(swarm):
    found = []

    async def note(peer, successor):
        found.append((peer, successor))

    theirs = seal_summary(summary(), OTHER_KEY, SWARM)
    node = make_node(
        Wire({OTHER_PEER: response(theirs, swarm=swarm, successor=b"\x66" * 32)}), clock=lambda: NOW
    )
    node.on_successor = note
    await node.ask(OTHER_PEER)
    assert found == [(OTHER_PEER, b"\x66" * 32)]
    assert len(node.statistics().rows) == (swarm == SWARM)


@pytest.mark.parametrize(
    "data",
    [
        codec.encode(request(summary=seal_summary(summary(), KEY, SWARM))),
        codec.encode(request(summary=seal_summary(summary(), OTHER_KEY, OTHER_SWARM))),
        codec.encode(request(session=seal_session(Session(bytes(16), 0, 0), KEY, SWARM))),
        codec.encode(request(session=b"\x93" * 500)),
        codec.encode(request(addresses=["/ip4/192.0.2.7/udp/1"])),
        b"\xdf\xff\xff\xff\xff",
        b"",
    ],
    ids=[
        "a summary of another signer",
        "a summary of another swarm",
        "a session of another signer",
        "nested arrays",
        "an address of another kind",
        "a map of 2**32 entries",
        "nothing",
    ],
)
async def test_hostile_request_is_malformed(data):
    wire = Wire()
    make_node(wire, clock=lambda: NOW)
    with pytest.raises(BadMessage):
        await wire.handler(OTHER_PEER, data)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (response(seal_summary(summary(), OTHER_KEY, OTHER_SWARM)), 0),
        (response(b"\x91" * 512), 0),
        (response(sessions=[b"\x91" * 512]), 0),
        (b"\xdd\xff\xff\xff\xff", 0),
        (response(*[seal_summary(summary(), OTHER_KEY, SWARM)] * 8), 1),
        (response(seal_summary(summary(), KEY, SWARM)), 0),
        (None, 0),
    ],
)
async def test_invalid_response_harms_nothing(answer, shown):
    node = make_node(Wire({OTHER_PEER: answer} if answer else {}), clock=lambda: NOW)
    node.detect_duplicates()
    await node.ask(OTHER_PEER)
    assert len(node.statistics().rows) == shown


# ---- one key, two processes


def started(at, name=1):
    return OwnSession(Credentials(KEY, SWARM), bytes([name]) * 16, lambda: at)


@pytest.mark.parametrize(
    ("key", "name", "issued"),
    [(KEY, 1, 3000), (KEY, 2, 1000), (OTHER_KEY, 2, 3000)],
    ids=["its own", "replayed by a liar", "of another key"],
)
def test_other_sessions_are_no_duplicates(key, name, issued):
    started(1.0).check(seal_session(Session(bytes([name]) * 16, 0, issued), key, SWARM))


def test_the_process_that_started_later_ends(caplog):
    frame = seal_session(Session(b"\x02" * 16, 2000, 3000), KEY, SWARM)
    started(1.0).check(frame)
    assert "should stop by itself" in caplog.text
    with pytest.raises(Refused, match="another running node uses this node's key") as raised:
        started(2.5).check(frame)
    assert raised.value.exit_code == 77
    started(2.0).check(frame)
    with pytest.raises(Refused):
        started(2.0, name=3).check(frame)


def test_witness_reports_running_processes_but_no_earlier_run():
    witness = Witness()
    received = lambda name, now: witness.received("p", bytes([name]), f"{name}".encode(), now)
    assert received(1, 0.0) == received(1, 10.0) == []
    assert received(2, 20.0) == received(2, 30.0) == [], "an earlier run"
    assert received(1, 40.0) == [b"2"], "which runs after all"
    assert received(2, 50.0) == [b"1"]
    assert received(1, 51.0 + REMEMBER_SECONDS) == []


def test_witness_memory_is_bounded():
    witness = Witness()
    for number in range(50):
        assert len(witness.received("p", bytes([number]), b"", number)) <= limits.SESSIONS
    assert len(witness.received("p", bytes([49]), b"", 60.0)) == 0
    for number in range(PEERS + 10):
        witness.received(str(number), b"", b"", 0.0)
    assert len(witness) == PEERS
