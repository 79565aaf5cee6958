"""Swaps between nodes in memory: the product's coroutine, without bytes and without a model."""

from collections import Counter
from functools import partial

import pytest
import trio

from swarmnode.errors import BadMessage, LocalError, PeerError
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights import local
from swarmnode.weights.fragments import pack
from swarmnode.weights.local import MOST_SWAPS
from swarmnode.weights.messages import (
    Accepted,
    Busy,
    Here,
    Payload,
    Ready,
    Refused,
    Swap,
    decode_message,
)
from swarmnode.weights.network import swaps
from swarmnode.weights.network.discovery import (
    ASK_SECONDS,
    FRESH_SECONDS,
)
from swarmnode.weights.network.swaps import LONGEST_BACKOFF_SECONDS, PeerBackoff
from swarmnode.wire import strict
from tests.support.swaps import (
    BLOCKS,
    DELAY,
    EVERY,
    LAYOUT,
    Hostile,
    Hub,
    Party,
    averaged,
    solo_steps,
    swarm,
)


def hostile(*ways, every=0.0):
    return partial(Hostile, ways=ways, proposes_every=every)


def requested(party, number=1, fragment=0, outer_step=20):
    """A swap request as a peer of `party` would send it."""
    name = number.to_bytes(16, "big")
    return Swap(name, party.replica.fingerprint, fragment, outer_step, BLOCKS)


async def payload(party, peer, name):
    """The answer of `party` to a question of `peer` for its payload."""
    return decode_message(await party.exchange._serve(peer, strict.encode(Payload(name))))


async def settled(party, seconds=1000.0):
    """Wait until nothing is under way."""
    with trio.fail_after(seconds):
        while party.exchange.statistics().phase != "idle" or party.exchange._searches:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def silent(source, data):
    """Answer no request."""
    await trio.sleep_forever()


# ---- one swap ------------------------------------------------------------------------------------


async def test_both_sides_commit_the_mean(autojump_clock):
    async with swarm({"a": Party, "b": Party}, every=EVERY) as parties:
        a, b = parties["a"], parties["b"]
        a.due()
        await settled(a)
        await settled(b)
        assert (a.applied, b.applied) == ({"b": 1}, {"a": 1})
        for party in (a, b):
            kinds = [type(message) for message in party.to_trainer]
            assert kinds == [local.TakeSnapshot, local.ApplyPayload]
            assert party.outcome("applied") == 1
            assert party.outcome("solo") == 0
            assert party.exchange.statistics().pairs == party.applied
        assert a.to_trainer[0].session == b.to_trainer[0].session


@pytest.mark.parametrize("first", ["a", "b"])
async def test_crossing_proposals_become_one_swap(first, autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        parties[first].due()
        await trio.sleep(DELAY / 2)
        parties["b" if first == "a" else "a"].due()
        for party in parties.values():
            await settled(party)
        assert [dict(party.applied) for party in parties.values()] == [{"b": 1}, {"a": 1}]
        assert [party.outer_step for party in parties.values()] == [21, 21]
        assert not any(solo_steps(party) for party in parties.values())


async def test_after_a_busy_peer_the_next_is_asked(autojump_clock, monkeypatch):
    async with swarm({"me": Party, "x": Party, "y": Party}) as parties:
        me = parties["me"]
        monkeypatch.setattr(me.discovery, "ordered", lambda *due: (("x", "y"), 2))
        parties["x"].may_accept = False
        me.due()
        await settled(me)
        assert me.outcome("busy") == 1
        assert dict(me.applied) == {"y": 1}


async def test_fragments_are_swapped_at_the_same_time(autojump_clock):
    two = partial(Party, fragments=2)
    async with swarm({"a": two, "b": two, "c": two}, every=EVERY) as parties:
        for party in parties.values():
            party.judges_in = 30.0
        parties["a"].due(0)
        await trio.sleep(2.0)
        parties["a"].due(1)
        await trio.sleep(2.0)
        assert set(parties["a"].exchange._swaps) == {0, 1}
        await settled(parties["a"])
        assert sum(parties["a"].applied.values()) == 2


# ---- copies and payloads -------------------------------------------------------------------------


async def test_payloads_are_served_to_the_partner_only(autojump_clock):
    async with swarm({"a": Party, "b": hostile("silent"), "c": Party}) as parties:
        a = parties["a"]
        assert isinstance(a.exchange.answer("b", requested(a)), Accepted)
        assert isinstance(await payload(a, "b", requested(a).id), Ready)
        assert await payload(a, "c", requested(a).id) == Refused(requested(a).id, "over")
        assert await payload(a, "b", bytes(16)) == Refused(bytes(16), "over")


async def test_a_payload_an_interval_old_is_refused(autojump_clock):
    async with swarm({"a": Party, "b": Party}, every=EVERY) as parties:
        a = parties["a"]
        a.due(step_seconds=1.0)
        await settled(a)
        name = a.to_trainer[0].session
        await trio.sleep(0.9 * EVERY)
        assert isinstance(await payload(a, "b", name), Ready)
        await trio.sleep(0.2 * EVERY)
        assert await payload(a, "b", name) == Refused(name, "over")


async def test_payload_request_is_held_until_it_is_ready(autojump_clock):
    async with swarm({"a": Party, "b": hostile("silent")}) as parties:
        a = parties["a"]
        a.encodes_in = swaps.POLL_SECONDS + 0.5
        a.exchange.answer("b", requested(a))
        began = trio.current_time()
        assert await payload(a, "b", requested(a).id) == Busy(requested(a).id)
        assert isinstance(await payload(a, "b", requested(a).id), Ready)
        assert trio.current_time() - began == pytest.approx(a.encodes_in)


# ---- swaps that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "cause"), [("silent", "no_payload"), ("denies", "withdrawn"), ("trickles", "timeout")]
)
async def test_failed_partner_costs_one_try(way, cause, autojump_clock):
    async with swarm({"a": Party, "z": hostile(way)}) as parties:
        a = parties["a"]
        a.due()
        await settled(a)
        assert a.failures == {cause: 1}
        assert (a.outcome("failed"), a.outcome("applied"), solo_steps(a)) == (1, 0, 1)
        assert a.to_trainer[1] == local.DropSwap(a.to_trainer[0].session)
        assert a.exchange._order(local.OuterStepDue(0, 20, 0, 1.0, BLOCKS)) == [], (
            "it is left alone"
        )
        assert not a.rejected, "an honest partner can crash"


async def test_after_a_failed_swap_the_next_is_asked(autojump_clock):
    names = {"x": hostile("denies"), "y": hostile("silent"), "b": Party}
    async with swarm({"a": Party} | names, every=EVERY) as parties:
        a = parties["a"]
        a.due()
        await settled(a)
        assert a.applied == {"b": 1}
        assert solo_steps(a) == 0
        assert sum(a.failures.values()) == a.outcome("failed")


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (BadMessage("hash"), "hash", "weights_hash"),
        (BadMessage("schema"), "malformed", "weights_malformed"),
        (PeerError("gone"), "broken", None),
        (LocalError("disk"), "local", None),
    ],
)
async def test_a_failed_fetch_is_counted_by_cause(error, cause, reason, autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a, b = parties["a"], parties["b"]
        b.sends = error
        a.due()
        await settled(a)
        assert a.failures == {cause: 1}
        assert a.rejected == ([("b", reason)] if reason else [])
        assert (a.exchange._known("b").backoff.until > trio.current_time()) == (cause != "local")
        await settled(b)
        assert b.applied == {"a": 1}, "the other side may commit alone"


@pytest.mark.parametrize(
    ("outcome", "cause", "lied"),
    [
        ("not_finite", "gate", True),
        ("payload", "gate", True),
        ("probe", "gate", False),
        ("local", "local", False),
        ("own_not_finite", "local", False),
    ],
)
async def test_refused_weights_cost_the_right_peer(outcome, cause, lied, autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a, b = parties["a"], parties["b"]
        a.verdict = lambda peer: outcome
        a.due()
        await settled(a)
        assert a.failures == {cause: 1}
        assert +Counter(a.exchange.statistics().judged) == {outcome: 1}
        # A counter that appears with its first event hides that event from `increase`.
        assert set(a.exchange.statistics().outcomes) == set(swaps.OUTCOMES)
        assert a.rejected == ([("b", f"weights_{outcome}")] if lied else [])
        left = a.exchange._known("b").backoff.until - trio.current_time()
        assert (left > 0) == (cause == "gate")
        assert b.applied == {"a": 1}
        assert all(offer.transfer not in a.store.ended for offer in a.store.offered) == (
            cause == "gate"
        ), "b may still be fetching"


async def test_a_trainer_that_refuses_ends_the_swap(autojump_clock):
    """A suspended stage answers a request for a copy with SwapEnded."""
    async with swarm({"a": Party, "b": hostile("well")}) as parties:
        a = parties["a"]
        a.encodes_in = 1e6
        a.exchange.answer("b", requested(a))
        await trio.sleep(0.1)
        a.exchange.swap_ended(local.SwapEnded(requested(a).id, 0, "", "local", False, 20))
        await trio.sleep(0.1)
        assert a.exchange.statistics().phase == "idle"
        assert a.failures == {"local": 1}


@pytest.mark.parametrize("after", [DELAY / 2, 0.05, 0.2, 0.5])
async def test_a_trainer_that_leaves_ends_everything(after, autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a, b = parties["a"], parties["b"]
        a.judges_in = 1e6
        a.due()
        await trio.sleep(after)
        a.has_trainer = False
        a.exchange.trainer_left()
        assert a.exchange.statistics().phase == "idle"
        await trio.sleep(30.0)
        assert a.failures in ({}, {"no_trainer": 1})
        assert solo_steps(a) == 0
        a.has_trainer, a.judges_in = True, 0.1
        await trio.sleep(LONGEST_BACKOFF_SECONDS)
        a.due()
        await settled(a)
        assert a.applied == {"b": 1}
        await settled(b)


async def test_wrong_answer_to_a_claim_costs_reputation(autojump_clock):
    async def answer(peer, data):
        return strict.encode(Refused(bytes(16), "over"))

    async with swarm({"a": Party, "b": hostile("well")}) as parties:
        a = parties["a"]
        a._hub.handlers["b"] = answer
        await a.discovery._ask("b")
        assert a.rejected == [("b", "weights_malformed")]


# ---- who is asked and accepted -------------------------------------------------------------------


def test_a_backoff_doubles_up_to_an_hour():
    backoff, waits = PeerBackoff(), []
    for _ in range(12):
        backoff.fail(0.0, 10.0)
        waits.append(backoff.until)
    assert waits[:4] == [10.0, 20.0, 40.0, 80.0]
    assert waits[-1] == LONGEST_BACKOFF_SECONDS
    backoff.succeed(began=-1.0)
    assert backoff.until == LONGEST_BACKOFF_SECONDS, "that swap began before the failure"
    backoff.succeed(began=1.0)
    assert backoff.until < 0
    backoff.fail(100.0, 10.0)
    assert backoff.until == 110.0


async def test_a_partner_far_behind_gains_nothing(autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a = parties["a"]
        a.verdict = lambda peer: "lagging"
        a.due()
        await settled(a)
        assert a.outcome("applied") == 1
        assert not a.accepted


async def test_one_fragment_accepts_one_swap_per_quarter_interval(autojump_clock):
    names = [f"p{number}" for number in range(40)]
    async with swarm({"me": Party} | dict.fromkeys(names, Party), every=EVERY) as parties:
        me = parties["me"]
        me.exchange._step_seconds = 1.0
        accepted = 0
        for number in range(10 * EVERY):
            answer = me.exchange.answer(names[number % 40], requested(me, number))
            accepted += isinstance(answer, Accepted)
            await trio.sleep(1.0)
        assert 30 < accepted <= 41


async def test_one_peer_is_accepted_once_in_its_share(autojump_clock):
    """Two candidates: 0.4 of the interval for each."""
    kinds = {"me": Party, "x": hostile("well", every=1.0), "y": Party}
    async with swarm(kinds, every=EVERY) as parties:
        me = parties["me"]
        parties["y"].may_accept = False
        me.due()  # who the candidates are
        await trio.sleep(4 * EVERY)
        assert 4 <= me.applied["x"] <= 6
        answer = me.exchange.answer("x", requested(me))
        assert isinstance(answer, Busy)


async def test_another_policy_is_refused_without_blame(autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a = parties["a"]
        foreign = Swap(bytes(16), b"x" * 32, 0, 20, BLOCKS)
        assert a.exchange.answer("b", foreign) == Refused(bytes(16), "other_policy")
        a.exchange.answer("b", requested(a))
        assert not a.rejected


async def test_only_known_peers_are_asked_and_accepted(autojump_clock):
    async with swarm({"a": Party, "b": Party, "c": Party}) as parties:
        a, c = parties["a"], parties["c"]
        a.exchange._discovery.partners = KnownPeers(frozenset("b"))
        a.due()
        await settled(a)
        assert a.applied == {"b": 1}
        assert a.exchange.answer("c", requested(a)) == Refused(requested(a).id, "stranger")
        assert not a.rejected
        c.exchange._discovery.partners = KnownPeers(frozenset("a"))
        c.due()
        await settled(c)
        assert (c.outcome("refused"), solo_steps(c)) == (1, 1)
        c.due()
        await settled(c)
        assert c.outcome("refused") == 1, "it is not asked again at once"


async def test_swaps_under_way_are_bounded(autojump_clock):
    many = partial(Party, fragments=MOST_SWAPS + 2)
    names = [f"p{number}" for number in range(MOST_SWAPS + 2)]
    async with swarm({"a": many} | dict.fromkeys(names, hostile("silent"))) as parties:
        a = parties["a"]
        a.replica.within = lambda blocks, fragment: blocks  # more fragments than layers
        answers = [
            a.exchange.answer(name, requested(a, number, fragment=number))
            for number, name in enumerate(names)
        ]
        assert sum(isinstance(answer, Accepted) for answer in answers) == MOST_SWAPS


HEAD, TAIL = partial(Party, layout=LAYOUT[:1]), partial(Party, layout=LAYOUT[1:])
"""Two stages of a crew, a layer each."""


async def test_a_whole_node_averages_with_every_stage_of_a_crew(autojump_clock):
    async with swarm({"whole": Party, "head": HEAD, "tail": TAIL}) as parties:
        whole = parties["whole"]
        whole.due()
        await trio.sleep(EVERY / 2)
        assert whole.applied == {"head": 1, "tail": 1}
        assert [party.applied["whole"] for party in (parties["head"], parties["tail"])] == [1, 1]
        assert solo_steps(whole) == 0
        asked = [m.blocks for m in whole.to_trainer if isinstance(m, local.TakeSnapshot)]
        assert sorted(asked) == sorted(parties[name].replica.blocks for name in ("head", "tail"))


async def test_blocks_that_no_partner_holds_step_alone(autojump_clock):
    async with swarm({"whole": Party, "head": HEAD}) as parties:
        whole = parties["whole"]
        whole.due()
        await trio.sleep(EVERY / 2)
        assert whole.applied == {"head": 1}
        alone = [m for m in whole.to_trainer if isinstance(m, local.SoloStep)]
        assert alone == [local.SoloStep(0, pack({3}))], "the second layer"


async def test_an_answer_with_blocks_that_were_not_proposed_is_false(autojump_clock):
    async with swarm({"head": HEAD, "other": Party}) as parties:
        head = parties["head"]
        wrong = lambda peer, swap: Accepted(swap.id, 20, BLOCKS)
        parties["other"].exchange.answer = wrong
        head.due()
        await trio.sleep(EVERY / 2)
        assert head.rejected == [("other", "weights_malformed")]
        assert solo_steps(head) == 1


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", bytes(256), strict.encode(Accepted(bytes(16), 0, b"\1"))]
)
async def test_malformed_message_costs_reputation(data, autojump_clock):
    async with swarm({"a": Party, "b": Party}) as parties:
        a = parties["a"]
        with pytest.raises(BadMessage):
            await a.exchange._serve("b", data)
        assert a.rejected == [("b", "weights_malformed")]


@pytest.fixture
def alone(autojump_clock):
    """The discovery of a node that is connected to x and y, without their claims."""
    parties = dict.fromkeys(("x", "y"))
    return Party(Hub(), "a", parties, EVERY).discovery


async def test_candidates_have_a_recent_claim_of_the_same_policy(alone, autojump_clock):
    claim = alone.claim()
    alone.received("x", claim)
    alone.received("y", Here(b"x" * 32, claim.outer_step, claim.blocks))
    alone.received("stranger", claim)
    assert alone.candidates() == ["x"]
    await trio.sleep(FRESH_SECONDS)
    assert alone.candidates() == []


async def test_greylisted_peer_is_no_candidate(alone):
    alone.received("x", alone.claim())
    alone.received("y", alone.claim())
    alone._network.is_allowed = lambda peer: peer != "x"
    assert alone.candidates() == ["y"]


async def test_claims_are_requested_at_intervals(alone, autojump_clock):
    alone.received("x", alone.claim())
    assert alone._peers_to_ask() == ["y"]
    assert alone._peers_to_ask() == []
    await trio.sleep(ASK_SECONDS)
    assert alone._peers_to_ask() == ["x", "y"]
    assert alone.candidates() == ["x"], "a claim is valid until the peer answers"
    alone.forget()
    assert alone._peers_to_ask() == ["x", "y"]


# ---- a swarm with hostile members ----------------------------------------------------------------


@pytest.mark.parametrize("honest", [2, 3, 12])
async def test_honest_nodes_find_partners(honest, autojump_clock):
    """Measured: 2.0, 2.0 and 1.7 swaps an interval with steps spread, 16 % alone in lockstep."""
    others, _, solo = await averaged(honest)
    assert others > 1.6
    assert solo < 0.15
    others, _, solo = await averaged(honest, apart=False)
    assert solo < 0.4


@pytest.mark.parametrize(
    "ways", [["silent"], ["trickles"], ["late"], ["well", "trickles"]], ids="-".join
)
async def test_useless_peers_leave_others_their_swaps(ways, autojump_clock):
    """Four in sixteen that propose every two seconds. Measured: 1.3 to 1.5 swaps an interval with
    honest peers, of 1.9 without any hostile one."""
    others, _, solo = await averaged(12, ways, intervals=6)
    assert others > 1.0
    assert solo < 0.4


async def test_greedy_peers_do_not_take_all_swaps(autojump_clock, monkeypatch):
    """Measured: 1.3 with honest peers and 0.8 with greedy ones; without a share per peer these take
    nearly all."""
    others, greedy, _ = await averaged(12, ["well"], intervals=6)
    assert others > 1.0
    assert greedy < 0.8 * others
    monkeypatch.setattr(swaps, "PEER_GAPS", 0.0)
    others, greedy, _ = await averaged(12, ["well"], intervals=2)
    assert greedy > 2 * others


async def test_a_trickling_proposer_cannot_hold_a_node(autojump_clock):
    """One hostile neighbour and one honest one."""
    others, _, _ = await averaged(2, ["trickles"], count=1)
    assert others > 0.8
