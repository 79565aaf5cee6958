"""Pairing: each transition by hand, then ten thousand seeded schedules that must all come to
rest."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from swarmnode.weights.messages import Accept, Busy, Propose, Release
from swarmnode.weights.pairing import (
    Applied,
    Apply,
    Close,
    CopiesOffered,
    Due,
    Ended,
    Failed,
    Lied,
    Pairing,
    PairingSettings,
    Phase,
    Pull,
    Received,
    Reverted,
    Send,
    Solo,
    Tick,
    Transferred,
    Unreachable,
    vanished,
)
from swarmnode.weights.partners import edge_rank, epoch_bucket, partner_order
from tests.support.pairing_sim import Conditions, Simulation

FP = bytes(32)
NONCE, OTHER = b"n" * 16, b"m" * 16


def node(own="b", **settings):
    return Pairing(PairingSettings(own, FP, **settings))


def due(*candidates, fragment=0, seed=b"seed", best=None):
    return Due(fragment, 7, candidates, seed, lease_seconds=20.0, best=best)


def propose(nonce=NONCE, fragment=0, fingerprint=FP):
    return Propose(nonce, fingerprint, fragment, 5)


def proposed(*candidates, own="b"):
    """A node that has just proposed to the first of `candidates`, and its nonce."""
    pairing = node(own)
    (send,) = pairing.handle(due(*candidates, seed=own.encode()), 0.0)
    return pairing, send.message.nonce


def to_idle_again(pairing, now=10.0):
    """Let the moment between two tries pass; what it does then."""
    assert pairing.state.phase is Phase.IDLE
    return pairing.handle(Tick(), max(now, pairing.deadline))


def test_both_ends_walk_through_the_whole_exchange():
    a, b = node("a"), node("b")
    (send,) = a.handle(due("b"), 0.0)
    (accept,) = b.handle(Received("a", send.message, 3), 0.1)
    assert (accept.message.session, accept.message.outer_step) == (send.message.nonce, 3)
    session = send.message.nonce
    assert a.handle(Received("b", accept.message), 0.2) == ()
    for end, peer in ((a, "b"), (b, "a")):
        assert end.handle(CopiesOffered(session), 0.3) == ()
        assert end.handle(Transferred(session), 1.0) == (Apply(session),)
        assert end.handle(Applied(session), 1.2) == (Ended(peer, "applied"),)
        assert end.state.phase is Phase.IDLE
        assert end.deadline == float("inf")
    assert a.statistics().outcomes["applied"] == 1


def test_busy_three_times_then_a_pull_from_the_first_that_answered():
    pairing = node("a")
    (send,) = pairing.handle(due("b", "c", "d", "e"), 0.0)
    asked = []
    for _ in range(3):
        asked.append(send.peer)
        assert pairing.handle(Received(send.peer, Busy(send.message.nonce, "busy")), 0.5)[
            0
        ] == Ended(send.peer, "busy")
        (send,) = to_idle_again(pairing)
    assert asked == ["b", "c", "d"]
    assert isinstance(send, Pull)
    assert send.peer == "b"
    assert pairing.handle(Transferred(send.session), 11.0) == (Apply(send.session),)


def test_silence_ends_in_a_solo_step():
    pairing, _ = proposed("a", "c", "d")
    for _ in range(2):
        pairing.handle(Tick(), pairing.deadline)
        to_idle_again(pairing)
    pairing.handle(Tick(), pairing.deadline)
    assert to_idle_again(pairing) == (Solo(0), Ended("", "solo"))
    assert pairing.statistics().outcomes["solo"] == 1


def test_a_failed_pull_ends_in_a_solo_step():
    pairing, nonce = proposed("a")
    pairing.handle(Received("a", Busy(nonce, "busy")), 0.1)
    (pull,) = to_idle_again(pairing)
    actions = pairing.handle(Failed(pull.session), 12.0)
    assert actions == (Close(pull.session), Ended("a", "failed"), Solo(0), Ended("", "solo"))


def test_nobody_to_ask_is_a_solo_step_at_once():
    assert node().handle(due(), 0.0) == (Solo(0), Ended("", "solo"))


def test_a_node_that_cannot_be_reached_is_skipped_without_waiting():
    pairing, nonce = proposed("a", "c")
    assert pairing.handle(Unreachable("a", nonce), 0.0) == (Ended("a", "unreachable"),)
    assert to_idle_again(pairing)[0].peer == "c"


@pytest.mark.parametrize(("own", "peer"), [("a", "b"), ("b", "a")])
def test_two_proposals_that_meet_are_one_acceptance_and_the_session_is_the_lower_ids(own, peer):
    pairing, mine = proposed(peer, own=own)
    actions = pairing.handle(Received(peer, propose(OTHER)), 0.1)
    session = mine if own < peer else OTHER
    assert actions == (Send(peer, Accept(OTHER, session, 0, 0)),)
    assert (pairing.state.session, pairing.state.initiator) == (session, own < peer)
    # and the other's ACCEPT, which names the same session, changes nothing any more
    assert pairing.handle(Received(peer, Accept(mine, session, 0, 0)), 0.2) == ()
    assert pairing.state.phase is Phase.PAIRED


def test_mutual_proposals_pair_even_when_one_of_them_is_lost():
    low, low_nonce = proposed("b", own="a")
    high, high_nonce = proposed("a", own="b")
    # the low one's own PROPOSE never arrives
    (accept,) = low.handle(Received("b", propose(high_nonce)), 0.1)
    assert (low.state.session, low.state.initiator) == (low_nonce, True)
    assert high.handle(Received("a", accept.message), 0.2) == ()
    assert (high.state.session, high.state.initiator, high.state.phase) == (
        low_nonce,
        False,
        Phase.PAIRED,
    )


def test_every_state_but_idle_answers_busy_to_a_third_peer():
    pairing, nonce = proposed("c")
    busy = (Send("x", Busy(OTHER, "busy")),)
    ask = Received("x", propose(OTHER))
    assert pairing.handle(ask, 0.1) == busy
    pairing.handle(Received("c", Accept(nonce, nonce, 0, 0)), 0.1)
    assert pairing.handle(ask, 0.1) == busy
    for event in (CopiesOffered(nonce), Transferred(nonce)):
        pairing.handle(event, 0.2)
        assert pairing.handle(ask, 0.2) == busy
    pairing.handle(Applied(nonce), 0.3)
    assert isinstance(pairing.handle(ask, 0.4)[0].message, Accept)


def test_a_resting_node_says_for_how_long():
    pairing = node("a", rest_seconds=30.0)
    pairing.handle(Received("b", propose()), 0.0)
    for event in (CopiesOffered(NONCE), Transferred(NONCE), Applied(NONCE)):
        pairing.handle(event, 1.0)
    assert pairing.handle(Received("c", propose(OTHER)), 11.0) == (
        Send("c", Busy(OTHER, "busy", 20)),
    )
    assert isinstance(pairing.handle(Received("c", propose(OTHER)), 31.0)[0].message, Accept)


def test_who_says_how_long_it_refuses_everybody_is_asked_after_the_others_until_then():
    pairing, nonce = proposed("a", "c")
    pairing.handle(Received("a", Busy(nonce, "busy", 60)), 1.0)
    pairing.handle(due(seed=b"nobody"), 2.0)  # whatever is left of the first step is taken alone
    for now, first in ((10.0, "c"), (61.0, "a")):
        send, *_ = (
            a
            for a in pairing.handle(due("a", "c", seed=str(now).encode()), now)
            if isinstance(a, Send)
        )
        assert send.peer == first
        pairing.handle(Received(first, Busy(send.message.nonce, "busy")), now)
        pairing.handle(due(seed=b"nobody"), now + 1)


def test_another_policy_is_refused_by_name():
    pairing = node()
    assert pairing.handle(Received("a", propose(fingerprint=b"x" * 32)), 0.0) == (
        Send("a", Busy(NONCE, "other_policy")),
    )
    assert pairing.state.phase is Phase.IDLE


def test_an_old_proposal_heard_again_opens_nothing():
    pairing = node()
    pairing.handle(Received("a", propose()), 0.0)
    for event in (CopiesOffered(NONCE), Transferred(NONCE), Applied(NONCE)):
        pairing.handle(event, 1.0)
    assert pairing.handle(Received("a", propose()), 2.0) == (Send("a", Busy(NONCE, "busy")),)


def test_a_proposal_heard_twice_is_accepted_twice_and_pairs_once():
    pairing = node()
    first = pairing.handle(Received("a", propose()), 0.0)
    state = pairing.state
    assert pairing.handle(Received("a", propose()), 0.1) == first
    assert pairing.state == state


def test_an_acceptance_that_comes_too_late_is_released():
    pairing, nonce = proposed("a", "c")
    pairing.handle(Tick(), 2.0)
    assert pairing.handle(Received("a", Accept(nonce, nonce, 0, 0)), 2.1) == (
        Send("a", Release(nonce)),
    )


def test_a_partner_may_not_rename_our_session():
    # b < c: the session is b's whether or not c proposed too
    pairing, nonce = proposed("c", own="b")
    actions = pairing.handle(Received("c", Accept(nonce, OTHER, 0, 0)), 0.1)
    assert actions == (Send("c", Release(OTHER)), Ended("c", "failed"))


def test_a_partner_may_not_choose_another_fragment():
    pairing = node("b")
    (send,) = pairing.handle(due("c", fragment=2), 0.0)
    nonce = send.message.nonce
    assert pairing.handle(Received("c", Accept(nonce, nonce, 3, 0)), 0.1)[1] == Ended("c", "failed")


def test_who_proposes_and_vanishes_is_avoided_for_a_moment_as_after_a_crash():
    pairing = node("b")
    pairing.handle(Received("a", propose()), 0.0)
    assert pairing.handle(Tick(), 5.0) == (
        Send("a", Release(NONCE)),
        Close(NONCE),
        Ended("a", "vanished"),
    )
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 6.0)[0].message, Busy)
    assert pairing.handle(due("a", "c"), 7.0)[0].peer == "c"
    pairing.handle(Tick(), 9.0)
    assert isinstance(pairing.handle(Received("a", propose(b"k" * 16)), 26.0)[0].message, Accept)


def vanish(pairing, now, nonce):
    """`a` proposes at `now` and is not heard of again. When it is listened to again."""
    assert isinstance(pairing.handle(Received("a", propose(nonce)), now)[0].message, Accept)
    assert pairing.handle(Tick(), now + 5.0)[-1] == Ended("a", "vanished")
    (avoided,) = pairing.state.remembered.avoided
    assert avoided.peer == "a"
    return avoided.until


def test_who_accepts_and_is_not_heard_of_is_not_asked_again_at_once():
    pairing, nonce = proposed("c")
    pairing.handle(Received("c", Accept(nonce, nonce, 0, 0)), 0.1)
    assert Ended("c", "open_timeout") in pairing.handle(Tick(), pairing.deadline)
    assert [(avoided.peer, avoided.times) for avoided in pairing.state.remembered.avoided] == [
        ("c", 1)
    ]


def test_one_proved_lie_is_enough_to_leave_a_peer_alone():
    pairing = node("b", avoid_seconds=300.0)
    assert pairing.handle(Lied("a"), 0.0) == ()
    assert isinstance(pairing.handle(Received("a", propose()), 299.0)[0].message, Busy)
    assert pairing.handle(due("a", "c"), 299.0)[0].peer == "c"
    pairing.handle(Tick(), 302.0)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 302.0)[0].message, Accept)


def test_who_lies_again_is_left_alone_for_longer_each_time_and_no_longer_than_a_day():
    pairing, now = node("b"), 0.0
    pairing.handle(due("a", "c"), now)
    for seconds in (300.0, 1500.0, 7500.0, 37500.0, 86400.0, 86400.0):
        pairing.handle(Lied("a"), now)
        assert isinstance(
            pairing.handle(Received("a", propose()), now + seconds - 1.0)[-1].message, Busy
        )
        now += seconds
    assert vanished(pairing.state, "a") == 6


def test_who_held_us_up_for_hours_is_not_listened_to_sooner_for_lying_too():
    pairing = node("b")
    pairing.handle(due("a", "c"), 0.0)
    holds(pairing, "a", 0.0, 10_000.0, NONCE)
    pairing.handle(Lied("a"), 10_000.0)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 49_000.0)[-1].message, Busy)


def averaged(pairing, peer, now, nonce):
    """An exchange that `peer` begins goes well."""
    assert isinstance(pairing.handle(Received(peer, propose(nonce)), now)[0].message, Accept)
    for event in (CopiesOffered(nonce), Transferred(nonce), Applied(nonce)):
        pairing.handle(event, now)


def test_whom_we_have_averaged_with_is_not_accepted_again_before_others_and_asked_after_its_like():
    pairing = node("b", meet_seconds=10.0)
    pairing.handle(due("a", "c", "d"), 0.0)
    for _ in range(3):
        pairing.handle(Unreachable(pairing.state.peer, pairing.state.session), 0.0)
        pairing.handle(Tick(), pairing.deadline)
    averaged(pairing, "a", 100.0, NONCE)
    assert pairing.handle(Received("a", propose(OTHER)), 101.0) == (
        Send("a", Busy(OTHER, "busy", 29)),
    ), "one of three, and ten each"
    assert pairing.handle(due("a", "c", "d", seed=b"next"), 102.0)[0].peer == "c"
    pairing.handle(Unreachable("c", pairing.state.session), 102.0)
    averaged(pairing, "a", 130.0, OTHER)


def test_who_alone_has_all_of_the_fragment_is_asked_first_although_we_have_just_averaged_with_it():
    pairing = node("b", meet_seconds=10.0)
    averaged(pairing, "a", 0.0, NONCE)
    assert pairing.handle(due("a", "c", "d", best=1), 1.0)[0].peer == "a"
    pairing.handle(Unreachable("a", pairing.state.session), 1.0)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 9.0)[0].message, Busy)
    averaged(pairing, "a", 10.0, b"k" * 16)


def test_a_reverted_partner_is_avoided_unless_it_is_the_only_one():
    pairing, now = node("b", short_seconds=2.0), 0.0
    for seconds in (8.0, 40.0, 200.0, 200.0):
        pairing.handle(Reverted("a"), now)
        assert isinstance(
            pairing.handle(Received("a", propose()), now + seconds - 1.0)[-1].message, Busy
        )
        now += seconds
    pairing.handle(Reverted("a"), now)
    assert pairing.handle(due("a"), now)[0].peer == "a"
    pairing.handle(Lied("a"), now)
    pairing.handle(Reverted("a"), now)
    assert pairing.handle(due("a", seed=b"next"), now)[-2] == Solo(0), (
        "a lie is not forgotten for that"
    )


def test_a_lie_that_ended_an_exchange_is_not_forgotten_because_that_was_short():
    pairing = node("b", avoid_seconds=300.0)
    pairing.handle(Received("a", propose()), 0.0)
    pairing.handle(Lied("a"), 0.5)
    pairing.handle(Failed(NONCE), 0.5)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 299.0)[0].message, Busy)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 301.0)[0].message, Accept)


def test_repeated_reverts_lengthen_the_backoff_and_a_success_halves_it():
    pairing, now = node("b"), 0.0
    for times, seconds in enumerate((20.0, 100.0, 500.0, 2500.0), 1):
        until = vanish(pairing, now, bytes([times]) * 16)
        assert until - now - 5.0 == seconds
        assert vanished(pairing.state, "a") == times
        now = until
    nonce = b"k" * 16
    pairing.handle(Received("a", propose(nonce)), now)
    for event in (CopiesOffered(nonce), Transferred(nonce), Applied(nonce)):
        pairing.handle(event, now)
    assert vanished(pairing.state, "a") == 2
    assert vanish(pairing, now, b"j" * 16) - now - 5.0 == 500.0


def breaks(pairing, peer, now, nonce):
    """Its exchange with `peer`, begun by that at `now`, breaks off at once: whether it was
    accepted."""
    answer = pairing.handle(Received(peer, propose(nonce)), now)[0].message
    pairing.handle(CopiesOffered(nonce), now)
    pairing.handle(Failed(nonce), now + 10.0)
    return isinstance(answer, Accept)


def test_who_is_left_alone_is_asked_and_accepted_all_the_same_as_long_as_there_is_nobody_else():
    """As a crew's stage whose only like was killed in the middle of an exchange, or stood still
    with its crew."""
    pairing = node("b")
    pairing.handle(due("a"), 0.0)
    pairing.handle(Received("a", Accept(pairing.state.session, pairing.state.session, 0, 0)), 0.1)
    pairing.handle(CopiesOffered(pairing.state.session), 1.0)
    assert pairing.handle(Failed(pairing.state.session), 10.0)[-2:] == (Solo(0), Ended("", "solo"))
    assert pairing.handle(due("a"), 11.0)[0].peer == "a"
    pairing.handle(Tick(), pairing.deadline)
    assert isinstance(pairing.handle(Received("a", propose()), 20.0)[0].message, Accept)
    pairing.handle(Failed(NONCE), 20.0)
    pairing.handle(due("a", "c", seed=b"both"), 25.0)
    assert pairing.state.peer == "c", "there is somebody else"
    pairing.handle(Unreachable("c", pairing.state.session), 25.0)
    assert isinstance(pairing.handle(Received("a", propose(OTHER)), 25.0)[0].message, Busy)


def test_of_all_whom_it_leaves_alone_it_asks_first_whom_it_would_listen_to_soonest():
    pairing, names = node("b", backoff_seconds=0.0), nonces()
    for peer, at in (("a", 0.0), ("a", 50.0), ("d", 60.0), ("c", 75.0)):
        assert breaks(pairing, peer, at, next(names))  # a until 260, d until 110, c until 125
    asked = [pairing.handle(due("a", "c", "d", "b"), 90.0)[0].peer]
    assert isinstance(pairing.handle(Received("c", propose()), 90.0)[0].message, Busy)
    pairing.handle(Received("d", Accept(pairing.state.session, pairing.state.session, 0, 0)), 90.0)
    pairing.handle(Received("d", Release(pairing.state.session)), 100.0)
    asked.append(pairing.handle(Tick(), pairing.deadline)[0].peer)
    assert asked == ["d", "c"]


def test_who_lied_is_left_alone_although_there_is_nobody_else():
    pairing = node("b")
    pairing.handle(Lied("a"), 0.0)
    assert pairing.handle(due("a"), 1.0) == (Solo(0), Ended("", "solo"))
    assert isinstance(pairing.handle(Received("a", propose()), 2.0)[0].message, Busy)
    assert breaks(pairing, "a", 300.0, OTHER)
    assert pairing.handle(due("a"), 311.0) == (
        Solo(0),
        Ended("", "solo"),
    ), "it lied, and has not done well since"


def nonces():
    return (number.to_bytes(16, "big") for number in itertools.count())


def holds(pairing, peer, now, seconds, nonce):
    """`peer` proposes at `now` and sends for `seconds` what never becomes all: the answer."""
    answer = pairing.handle(Received(peer, propose(nonce), lease_seconds=3600.0), now)[0].message
    if isinstance(answer, Accept):
        pairing.handle(CopiesOffered(nonce), now)
        pairing.handle(Failed(nonce), now + seconds)
    return answer


def test_who_held_us_up_in_vain_is_left_alone_for_longer_each_time_and_forgiven_by_halves():
    pairing, names, now = node("b"), nonces(), 0.0
    for seconds in (100.0, 40.0, 40.0):
        assert isinstance(holds(pairing, "a", now, seconds, next(names)), Accept)
        alone = 4 * seconds * 5 ** (vanished(pairing.state, "a") - 1)
        assert holds(pairing, "a", now + seconds + alone - 1.0, 0.0, NONCE) == Busy(NONCE, "busy")
        now += seconds + alone
    assert vanished(pairing.state, "a") == 3
    assert isinstance(holds(pairing, "other", now, 0.0, next(names)), Accept)
    for left in (1.5, 0.75, 0):
        nonce = next(names)
        pairing.handle(Received("a", propose(nonce)), now)
        for event in (CopiesOffered(nonce), Transferred(nonce), Applied(nonce)):
            pairing.handle(event, now)
        assert vanished(pairing.state, "a") == left


def test_a_partner_that_withdraws_at_once_backs_off_for_longer_each_time():
    pairing, names, now = node("b"), nonces(), 0.0
    for times, alone in enumerate((8.0, 20.0, 100.0, 500.0)):
        nonce = next(names)
        assert isinstance(pairing.handle(Received("a", propose(nonce)), now)[0].message, Accept)
        pairing.handle(Received("a", Release(nonce)), now + 2.0)
        assert vanished(pairing.state, "a") == times
        now += 2.0 + alone
        assert isinstance(
            pairing.handle(Received("a", propose(next(names))), now - 0.1)[0].message, Busy
        )


@pytest.mark.parametrize("hostile", [4, 40])
def test_who_agrees_and_takes_it_back_without_end_keeps_nobody_from_proposing(hostile):
    """Each that is listened to proposes in every tenth of a second, and takes it back in the
    next."""
    rng, names, honest = random.Random(0), nonces(), ("c", "d", "e")
    pairing, began, waited = node("b", rest_seconds=2.0), None, []
    accepted = 0
    for tick in range(6000):
        now, said = tick / 10, []
        if tick % 600 == 0:
            said += pairing.handle(due(*honest, seed=rng.randbytes(4)), now)
            began = now
        if pairing.deadline <= now:
            said += pairing.handle(Tick(), now)
        for message in [action.message for action in said if isinstance(action, Send)]:
            if isinstance(message, Propose):
                waited.append(now - began)
                pairing.handle(Received(pairing.state.peer, Busy(message.nonce, "busy")), now)
        if pairing.state.phase is Phase.PAIRED:
            said = pairing.handle(Received(pairing.state.peer, Release(pairing.state.session)), now)
            for message in [action.message for action in said if isinstance(action, Send)]:
                waited.append(now - began)
                pairing.handle(Received(pairing.state.peer, Busy(message.nonce, "busy")), now)
        for number in rng.sample(range(hostile), hostile):
            pairing.handle(Received(f"hostile{number}", propose(next(names))), now)
        accepted += pairing.state.phase is Phase.PAIRED
        if pairing.state.one_sided:
            pairing.handle(Failed(pairing.state.session, blameless=True), now)
    assert len(waited) == 3 * 10, "as often as if they were not there"
    assert max(waited) < 8.0
    assert accepted < 6 * hostile


def test_what_fails_by_ourselves_is_held_against_nobody():
    pairing, names = node("b"), nonces()
    nonce = next(names)
    pairing.handle(Received("a", propose(nonce)), 0.0)
    pairing.handle(CopiesOffered(nonce), 0.0)
    pairing.handle(Failed(nonce, blameless=True), 100.0)
    assert isinstance(pairing.handle(Received("a", propose(next(names))), 100.0)[0].message, Accept)


def test_a_transfer_that_overruns_its_lease_is_dropped_and_the_step_taken_alone():
    pairing, nonce = proposed("c")
    pairing.handle(Received("c", Accept(nonce, nonce, 0, 0)), 0.1)
    pairing.handle(CopiesOffered(nonce), 1.0)
    assert pairing.deadline == 21.0
    assert pairing.handle(Tick(), 20.9) == ()
    assert [type(a) for a in pairing.handle(Tick(), 21.0)] == [Send, Close, Ended, Solo, Ended]
    assert pairing.handle(Transferred(nonce), 21.1) == ()  # too late, and of no session


@pytest.mark.parametrize("steps", [1, 2])
def test_a_session_that_dies_at_any_point_leaves_an_idle_node(steps):
    pairing, nonce = proposed("c")
    pairing.handle(Received("c", Accept(nonce, nonce, 0, 0)), 0.1)
    for event in (CopiesOffered(nonce), Transferred(nonce))[:steps]:
        pairing.handle(event, 0.2)
    actions = pairing.handle(Failed(nonce), 0.3)
    assert Close(nonce, serve=steps == 2) in actions
    # once both have what they need, each judges for itself
    assert (Send("c", Release(nonce)) in actions) == (steps == 1)
    assert Solo(0) in actions
    assert pairing.state.phase is Phase.IDLE
    assert pairing.state.due is None


def test_an_exchange_that_a_partner_began_counts_as_our_outer_step():
    pairing = node()
    pairing.handle(Received("a", propose(fragment=1)), 0.0)
    pairing.handle(CopiesOffered(NONCE), 0.1)
    assert pairing.handle(due("c", fragment=1), 0.2) == ()  # waits for the session at hand
    for event in (Transferred(NONCE),):
        pairing.handle(event, 0.3)
    assert pairing.handle(Applied(NONCE), 0.4) == (Ended("a", "applied"),)


def test_another_fragment_is_proposed_once_the_session_at_hand_is_over():
    pairing = node()
    pairing.handle(Received("a", propose(fragment=1)), 0.0)
    pairing.handle(CopiesOffered(NONCE), 0.1)
    pairing.handle(due("c", fragment=0), 0.2)
    for event in (Transferred(NONCE),):
        pairing.handle(event, 0.3)
    _, send = pairing.handle(Applied(NONCE), 0.4)
    assert (send.peer, send.message.fragment) == ("c", 0)


def test_training_does_not_wait_for_an_exchange_that_takes_too_long():
    pairing, nonce = proposed("a")
    actions = pairing.handle(due("c", fragment=1, seed=b"next"), 1.0)
    assert actions[:3] == (Send("a", Release(nonce)), Solo(0), Ended("", "solo"))
    assert (actions[3].peer, actions[3].message.fragment) == ("c", 1)


def test_a_step_that_is_being_exchanged_is_not_also_taken_alone():
    pairing, nonce = proposed("c")
    pairing.handle(Received("c", Accept(nonce, nonce, 0, 0)), 0.1)
    assert pairing.handle(due("d", fragment=0, seed=b"next"), 1.0) == ()
    assert pairing.state.phase is Phase.PAIRED


def test_a_release_ends_the_session_before_its_bytes_are_here_and_not_after():
    pairing = node()
    pairing.handle(Received("a", propose()), 0.0)
    assert pairing.handle(Received("x", Release(NONCE)), 0.1) == ()  # not its session
    assert pairing.handle(Received("a", Release(NONCE)), 0.1) == (
        Close(NONCE),
        Ended("a", "released"),
    )
    pairing.handle(Received("a", propose(OTHER)), 0.6)
    for event in (CopiesOffered(OTHER), Transferred(OTHER)):
        pairing.handle(event, 0.7)
    assert pairing.handle(Received("a", Release(OTHER)), 0.8) == ()
    assert pairing.state.phase is Phase.APPLY


def test_random_events_never_raise_and_never_leave_a_state_without_a_deadline():
    rng = random.Random(0)
    nonces = [bytes([i]) * 16 for i in range(4)]
    for _ in range(300):
        pairing = node("m", avoid_seconds=3.0)
        now = 0.0
        for _ in range(60):
            now += rng.choice((0.0, 0.1, 3.0))
            nonce = rng.choice([*nonces, pairing.state.session or nonces[0]])
            peer = rng.choice(["a", "z", "m", pairing.state.peer or "a"])
            said = rng.choice(
                [
                    propose(nonce, rng.randrange(3)),
                    Accept(nonce, rng.choice(nonces), rng.randrange(3), 0),
                    Accept(nonce, nonce, 0, 0),
                    Busy(nonce, "busy"),
                    Release(nonce),
                ]
            )
            new = due("a", "z", fragment=rng.randrange(3), seed=rng.randbytes(4))
            event = rng.choice(
                [
                    Received(peer, said),
                    Tick(),
                    CopiesOffered(nonce),
                    Transferred(nonce),
                    Applied(nonce),
                    Failed(nonce),
                    Unreachable(peer, nonce),
                    new,
                ]
            )
            pairing.handle(event, now)
            settled = pairing.state.phase is Phase.IDLE and pairing.state.due is None
            assert settled == (pairing.deadline == float("inf"))
            assert len(pairing.state.remembered.finished) <= 32


# ---- schedules -----------------------------------------------------------------------------------


def conditions(rng):
    """Anything between a quiet LAN and a network that loses a third and delays beyond every
    deadline."""
    return Conditions(
        missing=rng.choice((0.0, 0.01, 0.05, 0.2)),
        delay=rng.choice(((0.001, 0.01), (0.01, 0.15), (0.01, 1.5), (0.01, 6.0))),
        loss=rng.choice((0.0, 0.0, 0.05, 0.3)),
        duplicates=rng.choice((0.0, 0.0, 0.3)),
        broken=rng.choice((0.0, 0.0, 0.3)),
        spread=rng.choice((0.0, 0.5, 30.0)),
    )


def test_ten_thousand_schedules_come_to_rest():
    total = Counter()
    for seed in range(10_000):
        rng = random.Random(f"schedule {seed}")
        c = conditions(rng)
        result = Simulation(rng.choice((2, 3, 3, 4, 4, 5, 6, 8)), seed, c).run()
        # three tries and their pauses, one session per neighbour at worst, a pull: all of it
        # bounded
        assert result.last_second < c.spread + 150, f"seed {seed}"
        total += result.outcomes
    # the schedules reached every ending
    assert min(total[o] for o in ("applied", "pulled", "solo")) > 1000


def test_without_loss_nobody_ever_waits_for_an_answer_until_a_deadline():
    """A cycle of waiting nodes could only be left by a timeout."""
    tries = Counter()
    for seed in range(300):
        tries += (
            Simulation(
                12, seed, Conditions(missing=0.2, spread=0.0, delay=(0.01, 0.9), duplicates=0.2)
            )
            .run()
            .tries
        )
    assert tries["applied"] > 1000
    assert not any(
        tries[o] for o in ("propose_timeout", "open_timeout", "vanished", "transfer_timeout")
    )


@pytest.mark.parametrize(("nodes", "seeds"), [(8, 150), (128, 8)])
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_four_of_five_nodes_find_a_partner_whatever_their_views_miss(nodes, seeds, missing):
    total = Counter()
    for seed in range(seeds):
        total += Simulation(nodes, seed, Conditions(missing=missing)).run().outcomes
    assert total["applied"] / total.total() > 0.78
    assert total["solo"] / total.total() < 0.02


def test_a_thousand_nodes_pair_as_well_as_eight():
    result = Simulation(1000, 0, Conditions(missing=0.05)).run()
    assert result.paired_share > 0.78
    assert result.messages < 4 * 1000


def test_lost_messages_cost_pairs_but_not_outer_steps():
    total = Counter()
    for seed in range(20):
        total += (
            Simulation(32, seed, dataclasses.replace(Conditions(), loss=0.3, broken=0.2))
            .run()
            .outcomes
        )
    assert total.total() == 20 * 32
    assert total["applied"] / total.total() > 0.3


# ---- order and deadlines -------------------------------------------------------------------------


def test_an_edge_has_one_rank_at_both_ends_and_another_in_the_next_epoch():
    swarm = bytes(32)
    assert edge_rank(3, "a", "b", swarm) == edge_rank(3, "b", "a", swarm)
    assert edge_rank(3, "a", "b", swarm) != edge_rank(4, "a", "b", swarm)
    assert edge_rank(3, "a", "bc", swarm) != edge_rank(3, "ab", "c", swarm)
    assert epoch_bucket(119.0) == 1


def test_every_candidate_is_first_equally_often():
    names = [f"p{i}" for i in range(10)]
    first = Counter(
        partner_order("p0", [*names, "p3"], bucket, bytes(32))[0] for bucket in range(1800)
    )
    assert set(first) == set(names[1:])
    assert min(first.values()) > 140
    assert max(first.values()) < 270
