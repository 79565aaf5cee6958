"""Summaries over real hosts: they travel beyond one connection, and garbage does not stop them."""

import contextlib
import random

import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.identity import load_or_create
from swarmnode.p2p.summaries import Summaries
from swarmnode.wire import ids
from swarmnode.wire.messages import Summary
from tests.support.hosts import hosts

pytestmark = pytest.mark.swarm
SWARM = b"\x0a" * 32


def summaries(network, directory, name):
    """Return the summaries of one host. Without a name it publishes no own summary."""
    identity = load_or_create(directory / "identity.key")
    node = Summaries(
        network.requests,
        network.peer_id,
        identity.private_key,
        SWARM,
        network.connected,
        rng=random.Random(3),
    )
    if name:
        node.own_summary = lambda created_at: Summary(
            name, "0.1.0", created_at, 60, 5, 5, 0.5, 9, len(network.connected())
        )
    return node


async def test_summaries_pass_through_a_node_without_one(
    tmp_path,
):
    async with hosts(tmp_path, 3, line=True) as networks:
        first, middle, last = (
            summaries(network, tmp_path / str(i), name)
            for i, (network, name) in enumerate(zip(networks, ("a", "", "c"), strict=True))
        )
        await last.round(networks[2].connected())
        await middle.round(networks[1].connected())
        await first.round(networks[0].connected())
        claims = [(claim.peer, claim.name, claim.direct) for claim in first.statistics().rows]
        assert claims == [(networks[2].peer_id, "c", False)]
        direct_by_name = {claim.name: claim.direct for claim in middle.statistics().rows}
        assert direct_by_name == {"a": True, "c": True}
        assert first.statistics().clock_offset_seconds is None  # one peer is too few
        assert abs(middle.statistics().clock_offset_seconds) < 30


async def test_garbage_is_rejected_and_later_requests_work(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        ours, theirs = summaries(a, tmp_path / "0", "a"), summaries(b, tmp_path / "1", "b")
        for garbage in (b"", b"\xc1" * 400, b"\xdf\xff\xff\xff\xff", bytes(100_000)):
            with contextlib.suppress(PeerError), trio.fail_after(10):
                await b.requests.request(
                    a.peer_id, ids.SUMMARY_PROTOCOL, garbage, deadline=5, max_response_bytes=2**16
                )
                raise AssertionError("garbage was answered")
        served = a.requests.statistics().served[ids.SUMMARY_PROTOCOL]
        assert served["malformed"] == 4
        await theirs.round(b.connected())
        assert [claim.name for claim in ours.statistics().rows] == ["b"]
