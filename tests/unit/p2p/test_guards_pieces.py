"""Parts of the guards without a socket."""

import types

import pytest
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from swarmnode.errors import Refused
from swarmnode.p2p import guards
from swarmnode.p2p.guards import inbox, swarm


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(guards.importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(Refused, match=r"0\.9\.0"):
        guards.install()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("203.0.113.5", "203.0.113.6", False),
    ],
)
def test_ipv6_64_network_is_one_origin(one, other, same):
    origins = [
        swarm._origin(
            types.SimpleNamespace(get_remote_address=lambda address=address: (address, 1))
        )
        for address in (one, other)
    ]
    assert (origins[0] == origins[1]) is same


def test_sum_recounts_before_it_exceeds():
    held = [60]
    total = inbox.ApproximateSum(lambda: 100, lambda: sum(held))
    assert not total.add(60)
    held[:] = [10]  # 50 were read meanwhile
    assert not total.add(50)
    held[:] = [60]
    assert total.add(50)


@pytest.mark.parametrize("guard", [False, True])
def test_full_peer_store_keeps_own_keys(guard):
    keys = create_new_key_pair(bytes(32))
    host = new_host(key_pair=keys)
    if guard:
        guards.guard_host(host)
    address = Multiaddr("/ip4/192.0.2.1/tcp/1")
    for number in range(1100):
        host.get_peerstore().add_addrs(ID(number.to_bytes(34, "big")), [address], 7200)
    assert len(host.get_peerstore().peer_data_map) <= 1000
    if guard:
        assert host.get_public_key() == keys.public_key
    else:
        with pytest.raises(PeerStoreError):
            assert not host.get_public_key(), "upstream fixed this: remove guard guard_peerstore"
