import pytest
import trio

from swarmnode.p2p import identity, mdns
from swarmnode.p2p.addresses import Address
from tests.support.hosts import host
from tests.support.waiting import wait_connected

SWARM = bytes([3]) * 32


@pytest.fixture
def peers(tmp_path) -> list[str]:
    return [identity.load_or_create(tmp_path / str(index)).peer_id for index in range(2)]


def test_every_swarm_has_its_own_service_type():
    assert mdns.service_type(SWARM) != mdns.service_type(bytes(32))
    name = mdns.service_type(SWARM).split(".")[0]
    assert len(name) <= 16  # RFC 6763: underscore and 15 characters


def test_announcements_are_validated(peers):
    good = {b"id": peers[0].encode()}
    assert mdns.parse_service(good, ["192.168.1.5", "fd00::7"], 4001) == [
        (peers[0], "/ip4/192.168.1.5/tcp/4001"),
        (peers[0], "/ip6/fd00::7/tcp/4001"),
    ]
    assert mdns.parse_service(good, ["0.0.0.0", "224.0.0.251", "169.254.1.1"], 4001) == []
    assert mdns.parse_service(good, ["192.168.1.5"], None) == []
    assert (
        len(mdns.parse_service(good, [f"192.168.1.{index}" for index in range(200)], 4001))
        == mdns.FOUND_ADDRESSES
    )
    for bad in (
        {},
        {b"id": None},
        {b"id": b"\xff\xfe"},
        {b"id": b"12D3KooW"},
        {b"id": peers[0].encode() * 9},
    ):
        with pytest.raises(ValueError):
            mdns.parse_service(bad, ["192.168.1.5"], 4001)
    with pytest.raises(ValueError):
        mdns.parse_service(good, ["host.local"], 4001)


async def test_two_nodes_discover_each_other(peers):
    """Multicast DNS on the loopback interface."""
    discovered: dict[str, dict[str, str]] = {peer: {} for peer in peers}
    found = trio.Event()

    def listener(own: str):
        def heard_of(peer: str, address: str) -> None:
            discovered[own][peer] = address
            if all(discovered.values()):
                found.set()

        return heard_of

    async with trio.open_nursery() as nursery:
        nodes = []
        for index, peer in enumerate(peers):
            listen = [Address("ip4", "127.0.0.1", 4001 + index)]
            nodes.append(mdns.MdnsDiscovery(peer, SWARM, listen, interfaces=["127.0.0.1"]))
            nursery.start_soon(nodes[-1].run, listener(peer))
        with trio.fail_after(60):
            await found.wait()
        nursery.cancel_scope.cancel()
    assert discovered == {
        peers[0]: {peers[1]: "/ip4/127.0.0.1/tcp/4002"},
        peers[1]: {peers[0]: "/ip4/127.0.0.1/tcp/4001"},
    }


async def test_node_dials_a_peer_from_mdns(tmp_path):
    async with host(tmp_path / "a") as a, host(tmp_path / "b") as b:
        b.discovery.add_from_mdns(a.peer_id, a.listen_addrs[0].split("/p2p/")[0])
        with trio.fail_after(60):
            await wait_connected(b)
        assert b.statistics().peers.known_by_source["mdns"] == 1
