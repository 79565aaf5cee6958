"""The contract of swarmnode/p2p/api.py, run against the network in memory and against real
hosts."""

import contextlib

import pytest
import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.reputation import BAN
from tests.support.fakes.network import MemorySwarm
from tests.support.hosts import ask, hosts, serve_echo
from tests.support.waiting import until, wait_connected

LIMITS = {"max_request_bytes": 1024, "max_response_bytes": 1024}


@contextlib.asynccontextmanager
async def in_memory(directory):
    swarm = MemorySwarm()
    yield [swarm.join(name) for name in ("one", "other")]


@contextlib.asynccontextmanager
async def on_loopback(directory):
    async with hosts(directory, 2) as networks:
        yield networks


@pytest.fixture(params=[in_memory, on_loopback], ids=["memory", "libp2p"])
def pair(request, tmp_path):
    """Open two connected networks."""
    return request.param(tmp_path)


async def test_every_request_failure_is_a_peer_error(pair):
    async def never(peer: str, data: bytes) -> bytes:
        return await trio.sleep_forever()

    async def refuses(peer: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        raise PeerError("no")

    async with pair as (one, other):
        serve_echo(other, **LIMITS)
        other.requests.serve("/test/never/1", never, **LIMITS)
        other.requests.serve("/test/refuses/1", refuses, **LIMITS)
        with pytest.raises(PeerTimeout):
            await ask(one, other.peer_id, protocol="/test/never/1", deadline=0.2)
        with pytest.raises(Incompatible):
            await ask(one, other.peer_id, protocol="/test/nobody/1")
        with pytest.raises(BadMessage, match="oversize"):
            await ask(one, other.peer_id, b"12345", limit=4)
        with pytest.raises(PeerError):
            await ask(one, other.peer_id, bytes(2000))
        with pytest.raises(PeerError):
            await ask(one, other.peer_id, protocol="/test/refuses/1")
        with pytest.raises(PeerError):
            await ask(one, "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X")
        assert await ask(one, other.peer_id) == b"x"


async def test_rejected_peer_is_ignored_then_disconnected(pair):
    async with pair as (one, other):
        with trio.fail_after(60):
            await wait_connected(other)
        serve_echo(other, **LIMITS)
        other.accepted(one.peer_id)
        assert other.score(one.peer_id) > 0
        other.rejected(one.peer_id, "test", cost=-BAN - 30)
        assert not other.is_allowed(one.peer_id)
        with pytest.raises(PeerError):
            await ask(one, other.peer_id)
        assert one.peer_id in other.connected()
        other.rejected(one.peer_id, "test", cost=40)
        await until(lambda: one.peer_id not in other.connected())
