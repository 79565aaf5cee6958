"""Summaries of other nodes: storage, limits against liars, and the clock offset."""

import itertools
import random

import msgspec
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.generate.frames import KEY, OTHER_KEY, OTHER_PEER, OTHER_SWARM, PEER, SWARM
from swarmnode.daemon.observer import own_summary
from swarmnode.errors import BadMessage, PeerError
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeInfo
from swarmnode.p2p import summaries
from swarmnode.p2p.summaries import (
    MAX_CLAIMS,
    MAX_FORWARDED,
    Claims,
    Clocks,
    Summaries,
    SummaryStatistics,
)
from swarmnode.wire import codec, limits
from swarmnode.wire.envelope import open_summary, peer_id, seal_summary
from swarmnode.wire.messages import Summary, SummaryRequest, SummaryResponse

NOW = 1_790_000_000.0


def summary(at=NOW, **changes):
    values = {
        "name": "a",
        "version": "0.1.0",
        "uptime": 60,
        "step": 5,
        "policy_version": 5,
        "reward": 0.5,
        "published": 9,
        "peers": 2,
    }
    return Summary(**{**values, **changes, "created_at": int(at * 1000)})


def take(claims, signer="p", at=NOW, by=None, now=NOW, **changes):
    frame = f"{signer} {at}".encode()
    return claims.take(frame, signer, summary(at, **changes), by or signer, now)


class Wire:
    """Requests without a network: records requests and returns prepared responses."""

    def __init__(self, answers=()):
        self.asked = []
        self.answers = dict(answers)
        self.handler = None

    def serve(self, protocol, handler, **bounds):
        self.handler = handler

    async def request(self, peer, protocol, data, *, deadline, max_response_bytes):
        self.asked.append((peer, trio.current_time(), data))
        answer = self.answers.get(peer)
        if answer is None:
            raise PeerError("gone")
        return answer


def make_node(wire, connected=(), clock=lambda: NOW + trio.current_time(), **options):
    node = Summaries(
        wire,
        PEER,
        KEY,
        SWARM,
        lambda: list(connected),
        clock=clock,
        rng=random.Random(1),
        **options,
    )
    node.own_summary = lambda created_at: summary(created_at / 1000)
    return node


def response(*frames):
    return codec.encode(SummaryResponse(list(frames)))


# ---- stored summaries


def test_latest_summary_replaces_earlier_ones():
    claims = Claims("me")
    assert [take(claims), take(claims, at=NOW + 30, now=NOW + 30, step=7)] == ["taken", "taken"]
    assert [(claim.peer, claim.summary.step) for claim in claims.all()] == [("p", 7)]


def test_summaries_per_peer_are_thirty_seconds_apart():
    claims = Claims("me")
    assert take(claims) == "taken"
    assert take(claims, at=NOW + 29.9, now=NOW + 30) == "known"
    assert take(claims, at=NOW - 40) == "known"
    assert take(claims, at=NOW + 30, now=NOW + 30) == "taken"


@pytest.mark.parametrize(
    ("at", "outcome"), [(-301, "old"), (-300, "taken"), (120, "taken"), (121, "future")]
)
def test_old_and_future_summaries_are_refused(at, outcome):
    assert take(Claims("me"), at=NOW + at) == outcome


def test_own_summary_is_not_stored():
    assert take(Claims("me"), "me", by="p") == "own"


def test_expired_summaries_are_not_forwarded():
    claims = Claims("me")
    take(claims)
    claims.expire(NOW + 301)
    assert claims.all() == claims.frames(32, "", random.Random(0)) == []


def test_forwarder_fills_only_its_share():
    claims = Claims("me")
    outcomes = [take(claims, f"sybil {i}", by="liar") for i in range(MAX_FORWARDED + 50)]
    assert outcomes == ["taken"] * MAX_FORWARDED + ["full"] * 50
    assert take(claims, "another", by="honest") == "taken"


def test_memory_is_bounded_and_signers_find_room():
    claims = Claims("me")
    for i in range(MAX_CLAIMS):
        take(claims, f"p{i}", at=NOW - i / 10, by=f"teller {i % 8}")
    assert len(claims) == MAX_CLAIMS
    assert take(claims, "late", by="another") == "full"
    assert take(claims, "direct") == "taken"
    assert len(claims) == MAX_CLAIMS
    assert claims.all()[0].peer == "direct"
    # the oldest that was passed on
    assert f"p{MAX_CLAIMS - 1}" not in [claim.peer for claim in claims.all()]


def test_direct_summaries_come_first():
    claims = Claims("me")
    take(claims, "received of", at=NOW, by="teller")
    take(claims, "direct", at=NOW - 60)
    assert [(claim.peer, claim.direct) for claim in claims.all()] == [
        ("direct", True),
        ("received of", False),
    ]


def test_requester_does_not_receive_its_own_summary():
    claims = Claims("me")
    take(claims, "a")
    take(claims, "b")
    assert claims.frames(32, "a", random.Random(0)) == [f"b {NOW}".encode()]


# ---- the clock


def test_clock_offset_needs_two_peers():
    clocks = Clocks()
    clocks.record("a", 500.0, 0.0)
    assert clocks.offset(0.0) is None
    clocks.record("b", 0.5, 0.0)
    assert clocks.offset(0.0) == 0.5


def test_lying_minority_does_not_move_the_clock():
    clocks = Clocks()
    for i, offset in enumerate((1e15, 1e15, 90.2, 90.0, 89.8)):
        clocks.record(f"p{i}", offset, 0.0)
    assert clocks.offset(0.0) == 90.2
    assert clocks.offset(summaries.CLOCK_SECONDS + 1) is None


def test_clocks_are_bounded():
    clocks = Clocks()
    for i in range(summaries.MAX_CLOCKS + 10):
        clocks.record(f"p{i}", 0.0, 0.0)
    assert len(clocks._offsets) == summaries.MAX_CLOCKS


# ---- telling and asking


async def test_peer_is_asked_at_most_every_thirty_seconds(autojump_clock):
    wire = Wire()
    with trio.move_on_after(200):
        await make_node(wire, [OTHER_PEER]).run()
    times = [at for _, at, _ in wire.asked]
    assert times[0] < 2
    assert 4 <= len(times) <= 7
    assert min(b - a for a, b in itertools.pairwise(times)) >= limits.SUMMARY_SECONDS


async def test_least_recently_asked_peers_come_first(autojump_clock):
    peers = [f"p{i}" for i in range(8)]
    wire = Wire()
    node = make_node(wire, peers)
    await node.round(peers)
    await node.round(peers)
    assert sorted(peer for peer, _, _ in wire.asked) == peers


async def test_summary_is_signed_for_this_swarm():
    wire = Wire()
    await make_node(wire).round([OTHER_PEER])
    frame = codec.decode(wire.asked[0][2], SummaryRequest, limits.SUMMARY_REQUEST_BYTES).summary
    assert open_summary(frame, SWARM)[0] == PEER
    with pytest.raises(BadMessage, match="signature"):
        open_summary(frame, OTHER_SWARM)


async def test_node_without_summary_still_receives():
    wire = Wire({OTHER_PEER: response(seal_summary(summary(), OTHER_KEY, SWARM))})
    node = make_node(wire, clock=lambda: NOW)
    node.own_summary = lambda created_at: None
    await node.round([OTHER_PEER])
    assert (
        codec.decode(wire.asked[0][2], SummaryRequest, limits.SUMMARY_REQUEST_BYTES).summary == b""
    )
    assert [claim.peer for claim in node.statistics().rows] == [OTHER_PEER]
    assert (
        codec.decode(
            await wire.handler(OTHER_PEER, codec.encode(SummaryRequest(b""))),
            SummaryResponse,
            20_000,
        ).summaries
        == []
    )


async def test_response_has_own_and_other_summaries():
    wire = Wire()
    node = make_node(wire, clock=lambda: NOW)
    third = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
    await node.round([OTHER_PEER])
    name = peer_id(third.public_key().public_bytes_raw())
    await wire.handler(name, codec.encode(SummaryRequest(seal_summary(summary(), third, SWARM))))
    answer = await wire.handler(
        OTHER_PEER, codec.encode(SummaryRequest(seal_summary(summary(), OTHER_KEY, SWARM)))
    )
    result = [
        open_summary(frame, SWARM)[0]
        for frame in codec.decode(answer, SummaryResponse, limits.SUMMARY_RESPONSE_BYTES).summaries
    ]
    assert result == [PEER, name]
    assert (node.version_of(name), node.version_of("unknown")) == ("0.1.0", "")


@pytest.mark.parametrize(
    "request_bytes",
    [
        codec.encode(SummaryRequest(seal_summary(summary(), KEY, SWARM))),
        codec.encode(SummaryRequest(seal_summary(summary(), OTHER_KEY, OTHER_SWARM))),
        codec.encode(SummaryRequest(b"\x93" * 500)),
        b"\xdf\xff\xff\xff\xff",
        b"",
    ],
    ids=[
        "of another signer",
        "of another swarm",
        "nested arrays",
        "a map of 2**32 entries",
        "nothing",
    ],
)
async def test_hostile_request_is_malformed(request_bytes):
    wire = Wire()
    node = make_node(wire, clock=lambda: NOW)
    with pytest.raises(BadMessage):
        await wire.handler(OTHER_PEER, request_bytes)
    assert node.statistics() == SummaryStatistics(received=dict.fromkeys(summaries.OUTCOMES, 0))


@pytest.mark.parametrize(
    ("answer", "received"),
    [
        (
            response(seal_summary(summary(), OTHER_KEY, OTHER_SWARM), b"\xc1", b"\x91" * 512),
            {"malformed": 3},
        ),
        (b"\xdd\xff\xff\xff\xff", {"malformed": 1}),
        (response(seal_summary(summary(NOW + 9999), OTHER_KEY, SWARM)), {"future": 1}),
        (response(*[seal_summary(summary(), OTHER_KEY, SWARM)] * 32), {"taken": 1, "known": 31}),
        (response(seal_summary(summary(), KEY, SWARM)), {"own": 1}),
        (None, {"failed": 1}),
    ],
)
async def test_invalid_response_is_counted(answer, received):
    node = make_node(Wire({OTHER_PEER: answer} if answer else {}), clock=lambda: NOW)
    await node.round([OTHER_PEER])
    assert {outcome: n for outcome, n in node.statistics().received.items() if n} == received


async def test_a_summary_of_a_banned_peer_is_not_shown():
    wire = Wire({"x": response(seal_summary(summary(), OTHER_KEY, SWARM))})
    node = make_node(wire, clock=lambda: NOW, is_allowed=lambda peer: peer != OTHER_PEER)
    await node.round(["x"])
    assert (node.statistics().rows, node.statistics().received["unwelcome"]) == ([], 1)


async def test_frequent_requests_are_refused(autojump_clock):
    wire = Wire()
    make_node(wire)
    for _ in range(summaries.REQUEST_BURST):
        await wire.handler(OTHER_PEER, codec.encode(SummaryRequest(b"")))
    with pytest.raises(PeerError, match="too many requests"):
        await wire.handler(OTHER_PEER, codec.encode(SummaryRequest(b"")))
    await trio.sleep(30)
    await wire.handler(OTHER_PEER, codec.encode(SummaryRequest(b"")))


async def test_clock_offset_uses_rejected_summaries():
    wire = Wire()
    node = make_node(wire, clock=lambda: NOW - 400)
    for number in range(3):
        key = Ed25519PrivateKey.from_private_bytes(bytes([40 + number]) * 32)
        frame = seal_summary(summary(NOW + number), key, SWARM)
        await wire.handler(
            peer_id(key.public_key().public_bytes_raw()), codec.encode(SummaryRequest(frame))
        )
    assert node.statistics().clock_offset_seconds == 401
    assert node.statistics().rows == []


# ---- displayed summaries


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


def test_one_liar_cannot_move_the_medians():
    claims = Claims("me")
    for i in range(300):
        take(claims, f"p{i}", reward=0.4, policy_version=10)
    take(claims, "liar", reward=1.0, policy_version=2**63 - 1)
    take(claims, "new", reward=-1.0)
    shown = summaries.aggregate(claims.all(), {}, None, NOW + 5)
    assert (shown.reporting, len(shown.rows)) == (302, summaries.MAX_ROWS)
    assert (shown.reward_median, shown.policy_version_median) == (0.4, 10)
    assert shown.rows[0].age_seconds == 5
    assert next(row for row in shown.rows if row.peer == "p0").reward == 0.4
    assert msgspec.json.encode(shown)
