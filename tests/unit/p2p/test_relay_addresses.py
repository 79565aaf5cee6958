"""Circuit addresses as text, in the peer table and between neighbours."""

import random

import pytest

from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address, Circuit, dialable, parse_any
from swarmnode.p2p.peers import PEERS_PER_PREFIX, PEERS_PER_RELAY, PeerTable

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
