"""Summaries of other nodes: storage, limits against liars, and the clock offset."""

import random

import msgspec
import pytest

from protocol.generate.frames import KEY, PEER, SWARM
from swarmnode.daemon.observer import own_summary
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeInfo
from swarmnode.p2p import summaries
from swarmnode.p2p.summaries import MAX_CLAIMS, MAX_REQUESTERS, Claims, Requesters
from swarmnode.wire.envelope import open_summary, seal_summary
from swarmnode.wire.messages import Summary

NOW = 1_790_000_000.0


def summary(at=NOW, **changes):
    values = {
        "name": "a",
        "version": "0.1.0",
        "uptime": 60,
        "step": 5,
        "policy_version": 5,
        "reward": 0.5,
        "reward_step": 4,
        "published": 9,
        "peers": 2,
    }
    return Summary(**{**values, **changes, "created_at": int(at * 1000)})


def take(claims, signer="p", at=NOW, by=None, now=NOW, **changes):
    """Return True if the summary was stored."""
    frame = f"{signer} {at}".encode()
    claims.take(frame, signer, summary(at, **changes), by or signer, now)
    return frame in claims


def test_summaries_per_peer_are_thirty_seconds_apart():
    claims = Claims("me")
    assert take(claims)
    assert not take(claims, at=NOW + 29.9, now=NOW + 30)
    assert not take(claims, at=NOW - 40)
    assert take(claims, at=NOW + 30, now=NOW + 30)


@pytest.mark.parametrize(("at", "stored"), [(-301, False), (-300, True), (120, True), (121, False)])
def test_old_and_future_summaries_are_refused(at, stored):
    assert take(Claims("me"), at=NOW + at) is stored


def test_expired_summaries_are_not_forwarded():
    claims = Claims("me")
    take(claims)
    claims.expire(NOW + 301)
    assert claims.all() == claims.frames(32, "", random.Random(0)) == []


def test_memory_is_bounded_and_signers_find_room():
    claims = Claims("me")
    assert take(claims, "direct", at=NOW - 60)
    for i in range(MAX_CLAIMS + 50):
        take(claims, f"sybil {i}", by="liar")
    assert len(claims) == MAX_CLAIMS
    assert claims.all()[0].peer == "direct"
    assert take(claims, "another", at=NOW - 60)
    assert len(claims) == MAX_CLAIMS


def test_clock_offset_needs_two_peers():
    requesters = Requesters()
    requesters.record("a", 500.0, 0, 0.0)
    assert requesters.clock_offset(0.0) is None
    requesters.record("b", 0.5, 0, 0.0)
    assert requesters.clock_offset(0.0) == 0.5


def test_lying_minority_does_not_move_the_clock():
    requesters = Requesters()
    for i, offset in enumerate((1e15, 1e15, 90.2, 90.0, 89.8)):
        requesters.record(f"p{i}", offset, 0, 0.0)
    assert requesters.clock_offset(0.0) == 90.2
    assert requesters.clock_offset(summaries.CLOCK_SECONDS + 1) is None


def test_used_groups_are_those_of_the_latest_peers():
    requesters = Requesters()
    for peer, used in (("a", 5), ("b", 2), ("a", 6), ("a", 0), ("c", 0)):
        requesters.record(peer, 0.0, used, 0.0)
    assert requesters.used() == [2, 6]
    for i in range(MAX_REQUESTERS + 10):
        requesters.record(f"p{i}", 0.0, 1, 0.0)
    assert len(requesters.used()) == MAX_REQUESTERS


def test_displayed_name_is_short_and_printable():
    assert (
        summaries.plain_name("Küche\u202e\u2066\u200b" + "x" * 60)
        == "Küche" + "\ufffd" * 3 + "x" * 24
    )


def test_own_summary_is_within_bounds():
    report = Report(phase="training", step=3, policy_version=2, reward_held_out=1.0000001)
    result = own_summary(
        NodeInfo(name="🦋\x1b" * 40, version="1" * 50, started_at=NOW + 5),
        report,
        int(NOW * 1000),
        published=4,
        peers=2,
    )
    assert open_summary(seal_summary(result, KEY, SWARM), SWARM) == (PEER, result)
    assert (result.reward, result.uptime, result.step) == (1.0, 0, 3)
    assert own_summary(NodeInfo(version="1"), None, 0, published=0, peers=0).reward == -1


def test_one_liar_cannot_move_the_median():
    claims = Claims("me")
    for i in range(300):
        take(claims, f"p{i}", reward=0.4)
    take(claims, "liar", reward=1.0, policy_version=2**63 - 1)
    take(claims, "new", reward=-1.0)
    shown = summaries.aggregate(claims.all(), [5, 2], None, NOW + 5)
    assert (shown.reporting, len(shown.rows)) == (302, summaries.MAX_ROWS)
    assert (shown.reward_median, shown.used, shown.used_by) == (0.4, 7, 2)
    assert shown.rows[0].age_seconds == 5
    assert next(row for row in shown.rows if row.peer == "p0").reward == 0.4
    assert msgspec.json.encode(shown)
