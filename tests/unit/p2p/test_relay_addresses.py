"""Circuit addresses as text, in the peer table and between neighbours."""

import random

import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address, Circuit, dialable, parse_any
from swarmnode.p2p.peers import PEERS_PER_PREFIX, PEERS_PER_RELAY, PeerTable
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import NeighboursRequest, NeighboursResponse, PeerAddresses
from tests.support.hosts import host, hosts
from tests.support.waiting import until

RELAY = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
PEER = "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"
PLACE = f"/ip4/5.5.5.5/tcp/9/p2p/{RELAY}/p2p-circuit"


def test_circuit_addresses_round_trip():
    assert parse_any(PLACE) == (Circuit(Address("ip4", "5.5.5.5", 9), RELAY), None)
    assert parse_any(f"{PLACE}/p2p/{PEER}") == (Circuit(Address("ip4", "5.5.5.5", 9), RELAY), PEER)
    assert str(parse_any(PLACE)[0]) == PLACE
    assert parse_any("/ip4/5.5.5.5/tcp/9") == (Address("ip4", "5.5.5.5", 9), None)


@pytest.mark.parametrize(
    "text",
    [
        "/p2p-circuit",
        f"/p2p/{RELAY}/p2p-circuit",
        "/ip4/5.5.5.5/tcp/9/p2p-circuit",
        f"{PLACE}/tcp/1",
        f"{PLACE}/p2p/x",
        f"{PLACE}x",
        f"{PLACE}/p2p/{PEER}/p2p-circuit",
        f"{PLACE}{PLACE}",
        f"/ip4/5.5.5.5/udp/9/p2p/{RELAY}/p2p-circuit",
        PLACE + "/" * 300,
    ],
)
def test_other_circuit_forms_are_refused(text):
    with pytest.raises(ValueError):
        parse_any(text)


def test_circuit_has_the_scope_of_its_relay():
    near = Circuit(Address("ip4", "127.0.0.1", 9), RELAY)
    assert not dialable(near, Address("ip4", "5.5.5.5", 1))
    assert dialable(near, Address("ip4", "127.0.0.1", 1))
    assert not dialable(Circuit(Address("dns4", "localhost", 9), RELAY), None)
    assert not dialable(Circuit(Address("ip4", "0.0.0.0", 9), RELAY), None)


def test_few_direct_addresses_precede_relays():
    table = PeerTable("own", 8, random.Random(0))
    direct = [f"/ip4/5.5.{number}.5/tcp/9" for number in range(4)]
    for address in [PLACE, *direct]:
        table.add("p", address, "exchange", 0.0)
    (dial,) = table.to_dial(10.0)
    assert dial.addresses == (*direct[:2], PLACE, *direct[2:])


def test_relayed_peers_have_their_own_limit():
    table = PeerTable("own", 8, random.Random(0))
    for number in range(2 * PEERS_PER_RELAY):
        table.add(f"r{number}", PLACE, "exchange", 0.0)
        table.add(f"d{number}", f"/ip4/5.5.5.{number}/tcp/9", "exchange", 0.0)
    assert table.statistics().known == PEERS_PER_RELAY + PEERS_PER_PREFIX


def test_working_circuit_proves_no_relay_address():
    table = PeerTable("own", 8, random.Random(0))
    table.add("p", PLACE, "exchange", 0.0)
    table.record_connected("p", inbound=False, now=0.0)
    table.record_dialled("p", PLACE, 0.0)
    assert table.peers_to_share(8, exclude="x", scope=addresses.PUBLIC) == []
    table.add_self_reported("p", PLACE, 0.0)
    assert table.peers_to_share(8, exclude="x", scope=addresses.PUBLIC) == [("p", [PLACE])]


async def ask(one, other, claimed):
    """Return the peers that `other` sends to `one`, which reports `claimed` for itself. Retries,
    because a peer has two at a time and a limited rate."""
    data = codec.encode(NeighboursRequest(bytes(32), claimed, b"", b"", 0))
    limit = limits.NEIGHBOURS_RESPONSE_BYTES
    with trio.fail_after(60):
        while True:
            try:
                answer = await one.requests.request(
                    other.peer_id,
                    ids.NEIGHBOURS_PROTOCOL,
                    data,
                    deadline=5.0,
                    max_response_bytes=limit,
                )
                break
            except PeerError:
                await trio.sleep(0.05)
    return {
        each.peer: each.addresses for each in codec.decode(answer, NeighboursResponse, limit).peers
    }


async def test_undialled_relay_is_not_passed_on(tmp_path):
    """Otherwise one liar could direct the swarm at any address by calling it a relay."""
    async with hosts(tmp_path, 3) as (a, b, c):
        await until(lambda: len(a.connected()) == 2 and a.nat.address_of(c.peer_id) is not None)
        await ask(
            b,
            a,
            [
                f"/ip4/9.9.9.9/tcp/9/p2p/{RELAY}/p2p-circuit",
                f"/ip4/9.9.9.9/tcp/9/p2p/{c.peer_id}/p2p-circuit",
            ],
        )
        places = [
            each for each in (await ask(c, a, [])).get(b.peer_id, []) if addresses.is_circuit(each)
        ]
        known = addresses.parse(c.listen_addrs[0])[0]
        # the false address is dropped, the correctable one corrected
        assert places == [str(Circuit(known, c.peer_id))]


async def test_relay_without_address_uses_its_observed_one(tmp_path):
    """Only for the relay's own address."""
    async with host(tmp_path / "a") as a, host(tmp_path / "b", initial_peers=a.listen_addrs) as b:
        await until(lambda: a.connected() and b.connected())
        claimed = {
            PEER: [f"/ip4/0.0.0.0/tcp/77/p2p/{a.peer_id}/p2p-circuit"],
            RELAY: [f"/ip4/0.0.0.0/tcp/77/p2p/{PEER}/p2p-circuit"],
        }

        async def tell(peer: str, data: bytes) -> bytes:
            return codec.encode(
                NeighboursResponse(
                    bytes(32), [PeerAddresses(*each) for each in claimed.items()], [], [], b""
                )
            )

        a.requests.serve(
            ids.NEIGHBOURS_PROTOCOL, tell, max_request_bytes=9999, max_response_bytes=9999
        )
        b.nat.address_of = lambda peer: None
        await b.neighbours.ask(a.peer_id)
        assert b.peers.get(PEER).addresses == [f"/ip4/127.0.0.1/tcp/77/p2p/{a.peer_id}/p2p-circuit"]
        assert b.peers.get(RELAY) is None
