"""Real hosts on loopback that talk through a relay: reservations, calls, limits, bans."""

import contextlib

import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Circuit, parse
from swarmnode.p2p.gossip import Verdict
from swarmnode.p2p.network import Network
from swarmnode.p2p.relay import Book, RelayLimits
from swarmnode.testing.hosts import host
from swarmnode.testing.waiting import until

NAME = "/test/relay/1"


@contextlib.asynccontextmanager
async def relayed(tmp_path, swarms=(bytes([1]) * 32, bytes([2]) * 32), **settings):
    """(relay, a, b): b has reserved with the relay; nobody has heard of anybody else, because their swarms differ."""
    async with host(tmp_path / "relay", relay="server", **settings) as relay:
        known = {"initial_peers": relay.listen_addrs, "relay": "client", "hole_punching": False}
        async with host(tmp_path / "a", swarm=swarms[0], **known) as a, host(tmp_path / "b", swarm=swarms[1], **known) as b:
            await until(lambda: relay.statistics().nat.relay.reservations == 2)
            await until(lambda: a.connected() and b.connected())
            yield relay, a, b


def place(relay: Network) -> Circuit:
    return Circuit(parse(relay.listen_addrs[0])[0], relay.peer_id)


async def call(a: Network, b: Network, relay: Network) -> None:
    await a.nat.call(b.peer_id, place(relay))
    await until(lambda: b.peer_id in a.connected() and a.peer_id in b.connected())


async def test_a_request_of_a_mebibyte_crosses_a_relay_both_ways(tmp_path):
    async with relayed(tmp_path) as (relay, a, b):
        await call(a, b, relay)

        async def echo(peer, data):
            return data

        data = bytes(range(256)) * 4096
        for one, other in ((a, b), (b, a)):
            other.requests.serve(NAME, echo, max_request_bytes=2**20, max_response_bytes=2**20)
            assert await one.requests.request(other.peer_id, NAME, data, deadline=20.0, max_response_bytes=2**20) == data
        assert relay.statistics().nat.relay.bytes > 4 * 2**20
        assert a.statistics().nat.relayed == b.statistics().nat.relayed == 1
        assert a.observed(b.peer_id) is None
