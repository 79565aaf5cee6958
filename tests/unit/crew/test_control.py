"""One node's part in crews, event by event: what it signs, what ends its crew, and what does
not."""

import math
import random

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.stages import wire
from swarmnode.stages.crew import (
    LONG_AGO,
    CrewStatistics,
    Means,
    Phase,
    SlotStatistics,
    State,
    advance,
    statistics,
    usual_seconds,
)
from swarmnode.stages.wire import (
    NO_HASH,
    Capacity,
    Copy,
    Founded,
    Member,
    ModelCost,
    Part,
    Record,
    Signed,
    Taken,
    crew_id,
    member_bytes,
)
from tests.support.crew_trainer import named_keys

MODEL, LINEAGE = b"m" * 32, b"l" * 32
COST = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 2, Part(0.0, 0.0))
SETTINGS = wire.Settings(stages=2)
OURS = Copy(LINEAGE, 1, 2, 40, b"h" * 32, "memory", Taken(1), b"")


class Node:
    """`b`, to which others speak."""

    def __init__(self, *copies, trusts=lambda peer: True, layers=2, work=1.0, stages=2, memory=1.0):
        sign, verify = named_keys("b")
        self.means = Means(replace(SETTINGS, stages=stages), sign, verify, random.Random(1), trusts)
        self.state, self.now, self.done = State("b"), 100.0, []
        self.does(wire.PeerBack("a"))
        cost = ModelCost(Part(0.0, 0.0), (Part(1.0, work),) * layers, Part(0.0, 0.0))
        self.does(wire.Offering(MODEL, Capacity(memory, 1.0), cost, copies))

    def does(self, event):
        self.state, actions = advance(self.state, event, self.now, self.means)
        self.done += actions
        return actions

    def answers(self, peer, message):
        return next(
            action.message
            for action in self.does(wire.Received(peer, message))
            if isinstance(action, wire.SendAnswer)
        )

    def waits(self, seconds, alive=(), heard=()):
        for _ in range(int(seconds / SETTINGS.tick_seconds)):
            self.now += SETTINGS.tick_seconds
            for peer in alive:
                (
                    self.answers(
                        peer,
                        wire.Heartbeat(
                            self.state.crew.id, wire.Status("active", 40, int(self.now))
                        ),
                    )
                    if self.state.crew
                    else None
                )
            self.does(wire.Tick({peer: self.now - 0.1 for peer in heard}))

    def told(self):
        return [action for action in self.done if isinstance(action, wire.ToTrainer)]


def record(*peers, step=0, lineage=LINEAGE, nonce=b"n" * 8):
    point = NO_HASH if step == 0 else b"h" * 32
    return Record(
        lineage, MODEL, point, step, Taken(), tuple(Member(peer, 1) for peer in peers), nonce
    )


def founded(of):
    crew = crew_id(of)
    return Founded(
        of,
        tuple(Signed(one.peer, named_keys(one.peer)[0](member_bytes(crew))) for one in of.members),
    )


def running(*copies, peers=("a", "b"), step=0, work=1.0):
    node = Node(*copies, layers=len(peers), work=work)
    of = record(*peers, step=step)
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    assert node.answers("a", founded(of)) == wire.Noted()
    node.does(wire.StageStatus(node.state.crew.id, peers.index("b"), "active", step))
    for peer in set(peers) - {"b"}:
        node.answers(peer, wire.Heartbeat(node.state.crew.id, wire.Status("active", step, 1)))
    assert node.state.phase == Phase.RUNNING
    return node


def test_a_record_that_names_us_is_signed_joined_prepared_and_run():
    node = running()
    kinds = [type(message).__name__ for message in node.told()]
    assert kinds == ["Assigned", "Resumed"]
    assert (node.told()[0].stage, node.told()[0].members) == (1, ("a", "b"))


def test_what_is_shown_of_a_crew_and_of_none():
    node = Node()
    node.answers("c", wire.Offer(MODEL, 1.0, 1.0, 0.0))
    assert statistics(node.state, node.now, SETTINGS) == CrewStatistics(offers=1)
    node = running(step=0)
    node.does(wire.StageStatus(node.state.crew.id, 1, "active", 3))
    shown = statistics(node.state, node.now, SETTINGS)
    assert (shown.state, shown.id, shown.stage, shown.standing_seconds) == (
        "running",
        node.state.crew.id.hex(),
        1,
        0.0,
    )
    assert shown.slots == (
        SlotStatistics(0, "a", "active", 0, 1),
        SlotStatistics(1, "b", "active", 3, 1),
    )
    node.does(wire.PeerGone("a"))
    node.now += 2.0
    shown = statistics(node.state, node.now, SETTINGS)
    assert (shown.state, [slot.state for slot in shown.slots], shown.standing_seconds) == (
        "paused",
        ["suspect", "active"],
        2.0,
    )


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (record("a", "c"), "record"),
        (record("c", "b"), "record"),
        (msgspec.structs.replace(record("a", "b"), model=b"x" * 32), "model"),
        (record("a", "b", "c"), "model"),
        (
            msgspec.structs.replace(record("a", "b"), members=(Member("a", 0), Member("b", 2))),
            "model",
        ),
    ],
)
def test_what_is_not_signed(of, why):
    node = Node()
    assert node.answers("a", wire.Propose(of)) == wire.Refuse(why, crew_id(of))
    assert node.state.reserved is None


def test_one_proposer_at_a_time_and_for_a_few_seconds():
    node = Node()
    first, second = record("a", "b"), record("c", "b")
    assert isinstance(node.answers("a", wire.Propose(first)), wire.Signature)
    assert node.answers("c", wire.Propose(second)).reason == "busy"
    node.now += 2 * SETTINGS.turn_seconds + 1
    assert isinstance(node.answers("c", wire.Propose(second)), wire.Signature)
    assert node.answers("a", founded(first)).reason == "crew", "that one has lapsed"
    assert node.state.crew is None


def test_a_member_of_what_was_signed_that_proposes_another_is_not_made_to_wait():
    """Whoever proposes does not sign: without this, three that propose in turn kept one another
    waiting for more than a minute."""
    first, second = record("a", "b", "c"), record("c", "b", "a")
    for one, proposer in ((first, "a"), (second, "c")):
        node = Node(layers=3)
        assert isinstance(node.answers("a", wire.Propose(first)), wire.Signature)
        for _ in range(2):
            assert isinstance(node.answers("c", wire.Propose(second)), wire.Signature)
        assert node.answers("d", wire.Propose(record("d", "b", "a"))).reason == "busy", (
            "it is no member"
        )
        node.now += 2 * SETTINGS.turn_seconds - 1
        assert node.answers(proposer, founded(one)) == wire.Noted(), (
            "either may be founded, and waits no longer for it"
        )
        assert node.state.crew is not None


def test_who_takes_another_s_place_has_as_long_and_nobody_takes_its_place_later():
    node, turn = Node(layers=4), SETTINGS.turn_seconds
    assert isinstance(node.answers("a", wire.Propose(record("a", "b", "c", "d"))), wire.Signature)
    node.now += 1.9 * turn
    second = record("c", "b", "a", "d")
    assert isinstance(node.answers("c", wire.Propose(second)), wire.Signature)
    node.now += 0.5 * turn
    assert node.answers("d", wire.Propose(record("d", "b", "a", "c"))).reason == "busy"
    assert isinstance(node.answers("c", wire.Propose(second)), wire.Signature), (
        "which gives it no more time"
    )
    node.now += 1.4 * turn
    assert node.answers("c", founded(second)) == wire.Noted()


def test_a_member_that_proposes_a_crew_without_the_first_proposer_waits_its_turn():
    """Else it could have signed both, and we would not join what the first one has founded."""
    node = Node(layers=3)
    assert isinstance(node.answers("a", wire.Propose(record("a", "b", "c"))), wire.Signature)
    assert node.answers("c", wire.Propose(record("c", "b", "d"))).reason == "busy"
    assert isinstance(node.answers("c", wire.Propose(record("c", "b", "a"))), wire.Signature)
    assert node.answers("c", wire.Propose(record("c", "b", "d"))).reason == "busy", (
        "nor with a second one"
    )
    assert node.answers("a", founded(record("a", "b", "c"))) == wire.Noted()


def test_who_was_left_out_is_named_once_it_has_our_offer_again():
    """Before, it signs nothing that goes on from what we alone have, and would be left out for
    longer each time."""
    node = Node(replace_copy(OURS, 0))
    offers = lambda: node.answers("a", wire.Offer(MODEL, 1.0, 1.0, 0.0, (OURS,)))
    proposed = lambda: [
        one
        for one in node.done
        if isinstance(one, wire.Send) and isinstance(one.message, wire.Propose)
    ]
    told = lambda: [
        one
        for one in node.done
        if isinstance(one, wire.Send)
        and isinstance(one.message, wire.Offer)
        and one.message.memory > 0
    ]
    offers()
    node.does(wire.Tick())
    of = proposed()[-1].message
    while node.now >= node.state.peers["a"].barred_until:  # it does not answer
        node.waits(SETTINGS.turn_seconds)
        offers()
    node.done.clear()
    until = node.state.peers["a"].barred_until + 2 * SETTINGS.offer_seconds
    while node.now < until:
        node.waits(SETTINGS.offer_seconds)
        offers()
    assert not proposed(), "no answer to our offer has come"
    node.does(wire.Answered("a", told()[-1].message, wire.Noted()))
    node.waits(SETTINGS.turn_seconds)
    assert [one.message.record.step for one in proposed()] == [of.record.step]


def test_nobody_gets_us_into_a_crew_that_we_did_not_sign():
    node = Node()
    assert node.answers("a", founded(record("a", "b"))).reason == "crew"
    assert isinstance(node.answers("a", wire.Propose(record("a", "b"))), wire.Signature)
    forged = Founded(record("a", "b"), tuple(Signed(peer, bytes(64)) for peer in ("a", "b")))
    assert node.answers("a", forged).reason == "record"
    assert node.state.crew is None


def test_with_whom_is_a_person_s_choice():
    node = Node(trusts=lambda peer: peer != "a")
    assert node.answers("a", wire.Propose(record("a", "b"))).reason == "trust"


def test_what_was_learnt_is_not_given_up_for_the_base_or_for_less():
    node = Node(OURS)
    assert node.answers("a", wire.Propose(record("a", "b"))).reason == "behind"
    assert (
        node.answers("a", wire.Propose(record("a", "b", step=7, lineage=b"x" * 32))).reason
        == "behind"
    )
    older = record("a", "b", step=30)
    assert node.answers("a", wire.Propose(older)).reason == "behind"
    assert isinstance(node.answers("a", wire.Propose(record("a", "b", step=40))), wire.Signature)
    node = Node(OURS)
    node.now += 2 * SETTINGS.exact_seconds
    assert isinstance(node.answers("a", wire.Propose(older)), wire.Signature)
    node = Node(OURS)
    node.now += SETTINGS.lost_seconds
    assert isinstance(
        node.answers("a", wire.Propose(record("a", "b", lineage=b"x" * 32))), wire.Signature
    )


def test_a_crew_that_restored_for_long_and_took_no_step_is_no_reason_to_begin_anew_the_sooner():
    """At 7 B a stage takes ten minutes, and then somebody loses his connection for some seconds."""
    node = Node(OURS)
    node.waits(5.0)
    of = record("a", "b", step=40)
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    node.answers("a", founded(of))
    for second in range(200):
        node.answers("a", wire.Heartbeat(node.state.crew.id, wire.Status("loading", 40, second)))
        node.waits(1.0)
    assert node.state.phase == Phase.PREPARING
    node.answers("a", wire.Leave(node.state.crew.id, "its connection is gone"))
    node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST, (OURS,)))
    base = record("c", "b", lineage=b"x" * 32)
    for _ in range(int(SETTINGS.lost_seconds / 10.0) - 1):
        assert node.answers("c", wire.Propose(base)).reason == "behind"
        node.waits(10.0)
    node.waits(20.0)
    assert isinstance(node.answers("c", wire.Propose(base)), wire.Signature)


def test_a_stranger_s_words_change_nothing_about_a_crew_that_works():
    """A witness without a stage got four votes for ending a healthy crew once."""
    node = running()
    crew, other = node.state.crew.id, record("x", "b", nonce=b"o" * 8)
    for message in (
        wire.Leave(crew, "it is over"),
        wire.Heartbeat(crew, wire.Status("failed")),
        wire.Heartbeat(b"x" * 32, wire.Status("absent")),
        wire.Propose(other),
        founded(other),
        founded(record("a", "b")),
        wire.Offer(MODEL, 1e30, 1e30, 0.0, ()),
    ):
        node.answers("x", message)
        assert (node.state.phase, node.state.crew.id) == (Phase.RUNNING, crew)
    for answer in (wire.Refuse("crew", crew), wire.Alive(crew, wire.Status("failed")), None):
        node.does(wire.Answered("x", wire.Heartbeat(crew, wire.Status()), answer))
        node.does(wire.Answered("x", wire.Propose(other), answer))
    node.does(wire.PeerGone("x"))
    assert (node.state.phase, node.state.crew.id) == (Phase.RUNNING, crew)


def test_silence_pauses_then_ends_and_a_sign_of_life_refutes():
    node = running()
    node.waits(20, alive=("a",))
    assert node.state.phase == Phase.RUNNING
    node.waits(10)
    assert node.state.phase == Phase.PAUSED
    node.answers("a", wire.Heartbeat(node.state.crew.id, wire.Status("active", 1, 999)))
    assert node.state.phase == Phase.RUNNING
    node.waits(SETTINGS.evict_seconds + 1)
    assert node.state.phase == Phase.FREE
    assert isinstance(node.told()[-1], wire.Released)


@pytest.mark.parametrize(
    "event",
    [
        lambda crew: wire.Received("a", wire.Leave(crew, "drained")),
        lambda crew: wire.Received("a", wire.Heartbeat(crew, wire.Status("absent"))),
        lambda crew: wire.Received("a", wire.Heartbeat(crew, wire.Status("failed"))),
        lambda crew: wire.StreamLost("a", crew),
        lambda crew: wire.TrainerLeft(),
        lambda crew: wire.Drain("quiet hours"),
        lambda crew: wire.Blames(crew, (0,), "refused 5 steps"),
    ],
)
def test_what_ends_a_crew_ends_it_at_once_and_everybody_is_told(event):
    node = running()
    crew = node.state.crew.id
    actions = node.does(event(crew))
    assert node.state.phase == Phase.FREE
    assert any(isinstance(a, wire.Send) and isinstance(a.message, wire.Leave) for a in actions)
    assert any(isinstance(a, wire.Released) for a in actions)


def test_a_member_that_was_blamed_is_left_out_for_a_while_and_for_longer_each_time():
    node = running()
    node.does(wire.Blames(node.state.crew.id, (0,), "refused 5 steps"))
    barred = node.state.peers["a"].barred_until - node.now
    node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST))
    assert node.answers("a", wire.Propose(record("a", "b"))).reason == "trust"
    node.now += barred
    of = record("a", "b", nonce=b"2" * 8)
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    node.answers("a", founded(of))
    node.does(wire.Blames(node.state.crew.id, (0,), "again"))
    assert node.state.peers["a"].barred_until - node.now >= 2 * barred
    assert node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST)) == [], (
        "nothing is offered to it"
    )


def test_of_two_contradicting_members_the_recurring_one_is_excluded():
    peers = ("a", "b", "c", "d")  # we are b
    node, out = running(peers=peers), []
    until = lambda peer: (
        node.state.peers[peer].barred_until if peer in node.state.peers else LONG_AGO
    )
    for number, pair in enumerate([(0, 2), (0, 2), (2, 3), (2, 3)]):
        before = {peer: until(peer) for peer in "acd"}
        node.does(wire.Blames(node.state.crew.id, pair, "no answer again and again"))
        out += [peer for peer in "acd" if until(peer) != before[peer]]
        node.now = max(until(peer) for peer in "acd") + 1.0
        node.does(
            wire.Offering(
                MODEL, Capacity(1.0, 1.0), ModelCost(COST.embedding, 4 * COST.layers[:1], COST.head)
            )
        )
        of = record(*peers, nonce=bytes([number]) * 8)
        assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
        node.answers("a", founded(of))
    assert sorted(out[:2]) == ["a", "c"], "in turn, where nobody knows better"
    assert out[2:] == ["c", "c"]


def next_crew(node, peers, number):
    """The next crew of `peers`, which the first of them proposes; the node offers as much as it
    takes."""
    layers = COST.layers[:1] * len(peers)
    node.does(
        wire.Offering(MODEL, Capacity(1.0, 1.0), ModelCost(COST.embedding, layers, COST.head))
    )
    of = record(*peers, nonce=bytes([number]) * 8)
    assert isinstance(node.answers(peers[0], wire.Propose(of)), wire.Signature)
    node.answers(peers[0], founded(of))


def test_of_itself_and_another_a_head_leaves_the_other_out_whoever_of_them_was_blamed_more_often():
    node = running(peers=("a", "b", "c", "d"))  # we are b
    for number, other in enumerate((0, 2, 3, 0, 2, 3)):
        node.does(wire.Blames(node.state.crew.id, (1, other), "no answer again and again"))
        assert node.state.peers["abcd"[other]].barred_until > node.now, (
            "it knows of itself that it is honest"
        )
        node.now = max(known.barred_until for known in node.state.peers.values()) + 1.0
        next_crew(node, ("a", "b", "c", "d"), number)


def test_of_two_around_an_honest_one_either_is_left_out_once_it_has_been_beside_another():
    """A frame that it has been given and one that it has sent on: the one in the middle contradicts
    both, and is blamed alone."""
    node, out = running(peers=("a", "b", "c", "d")), []  # we are b; a and d lie
    until = lambda peer: (
        node.state.peers[peer].barred_until if peer in node.state.peers else LONG_AGO
    )
    for number, middle in enumerate(("c", "e", "f")):
        before = {peer: until(peer) for peer in ("a", middle, "d")}
        node.does(wire.Blames(node.state.crew.id, (2,), "no answer again and again", beside=(0, 3)))
        out += [peer for peer, at in before.items() if until(peer) != at]
        node.now = max(map(until, before)) + 1.0
        next_crew(node, ("a", "b", {"c": "e", "e": "f"}.get(middle, "c"), "d"), number)
    assert out[0] == "c"
    assert set(out[1:]) <= {"a", "d"}


@pytest.mark.parametrize("clean", [False, True])
def test_a_member_that_spoils_one_step_in_three_is_excluded(
    clean,
):
    """clean: it had long been even when it began to spoil."""
    node, out = running(), []
    for number in range(3):
        for step in range(1, 31):
            node.waits(2.0, alive=("a",))
            node.does(wire.StageStatus(node.state.crew.id, 1, "active", step))
        took = 20.0 if clean else 60.0
        node.does(wire.Blames(node.state.crew.id, (0,), "again", seconds=took))
        out.append(node.state.peers["a"].barred_until - node.now)
        assert out[-1] >= 2 * took
        node.now += out[-1]
        next_crew(node, ("a", "b"), number)
    assert (out[0] < out[1] < out[2]) == (not clean)


def test_a_step_that_cost_hours_costs_whoever_spoilt_it_as_much():
    node = running()
    node.waits(2.0, alive=("a",))
    node.does(wire.StageStatus(node.state.crew.id, 1, "active", 1))
    node.now += 10_000.0
    node.does(wire.Blames(node.state.crew.id, (0,), "no answer again and again", seconds=10_000.0))
    assert node.state.peers["a"].barred_until - node.now >= 20_000.0


def fails_after(node, steps, seconds):
    """`a` fails after so many steps that took so long; how long it is left out."""
    for step in range(1, steps + 1):
        node.waits(seconds, alive=("a",))
        node.does(wire.StageStatus(node.state.crew.id, 1, "active", step))
    node.does(wire.Received("a", wire.Heartbeat(node.state.crew.id, wire.Status("failed", 40, 1))))
    return max(0.0, node.state.peers["a"].barred_until - node.now)


@pytest.mark.parametrize("seconds", [2.0, 20.0, 200.0])
def test_what_happens_to_everybody_is_free_once_and_working_pays_for_it(seconds):
    for steps in (0, 2, 5):
        node = running()
        for last in (False, True):
            out = fails_after(node, steps, seconds)
            assert (out > 0) == (
                last and steps * min(seconds, SETTINGS.bar_seconds / 4) < SETTINGS.bar_seconds
            )
            if not last:
                node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST))
                again(node)


@pytest.mark.parametrize("seconds", [2.0, 60.0, 600.0])
def test_who_fails_in_the_middle_of_every_other_step_is_left_out_for_longer_each_time(seconds):
    node, out = running(), []
    for _ in range(6):
        out.append(fails_after(node, 1, seconds))
        node.now += out[-1]
        node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST))
        again(node)
    assert out == sorted(out)
    assert out[-1] > 20 * SETTINGS.bar_seconds


def test_a_stranger_that_ends_a_crew_which_stood_still_owes_all_that_it_cost():
    for steps in (False, True):
        node = running()
        if steps:
            node.does(wire.StageStatus(node.state.crew.id, 1, "active", 1))
        node.waits(2 * SETTINGS.bar_seconds, alive=("a",))
        node.does(wire.Received("a", wire.Leave(node.state.crew.id, "because")))
        assert (node.state.peers["a"].barred_until >= node.now + 4 * SETTINGS.bar_seconds) == (
            not steps
        )


def again(node):
    """The same two found another crew, and it runs."""
    of = record("a", "b", nonce=b"2" * 8)
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    node.answers("a", founded(of))
    node.does(wire.StageStatus(node.state.crew.id, 1, "active", 0))
    node.answers("a", wire.Heartbeat(node.state.crew.id, wire.Status("active", 0, 1)))


def test_a_refusal_that_crossed_what_the_member_said_since_ends_nothing_and_a_second_one_does():
    node = running()
    crew = node.state.crew.id
    refused = wire.Answered("a", wire.Heartbeat(crew, wire.Status()), wire.Refuse("crew", crew))
    node.does(refused)
    node.does(refused)
    assert node.state.phase == Phase.RUNNING
    node.now += SETTINGS.heartbeat_seconds
    node.answers("a", wire.Heartbeat(crew, wire.Status("active", 0, 2)))
    node.does(refused)
    assert node.state.phase == Phase.RUNNING, "it has been heard since"
    node.now += SETTINGS.heartbeat_seconds
    node.does(refused)
    assert node.state.phase == Phase.FREE


def test_progress_without_end_is_no_reason_to_wait_without_end():
    node = Node()
    of = record("a", "b")
    node.answers("a", wire.Propose(of))
    node.answers("a", founded(of))
    for second in range(int(SETTINGS.prepare_seconds) - 1):
        node.answers("a", wire.Heartbeat(node.state.crew.id, wire.Status("loading", 0, second)))
        node.waits(1.0)
    assert node.state.phase == Phase.PREPARING
    node.waits(2.0, alive=())
    assert node.state.phase == Phase.FREE
    assert node.state.peers["a"].barred_until - node.now > SETTINGS.prepare_seconds, (
        "left out for longer than it has cost"
    )


def test_a_crew_of_homes_that_samples_token_by_token_has_time_for_its_lines():
    """7 B: 64 answers of 4,000 tokens in sixteen waves, as many at a time as there are stages; 50
    ms from each stage to the next."""
    node, lines = Node(), 16 * 4000 * 0.05
    cost = ModelCost(
        Part(0.0, 0.0), (Part(1.0, 1.0),) * 2, Part(0.0, 0.0), batches=16.0, crossings=4000 / 16
    )
    node.does(wire.PeerBack("a"))
    node.does(wire.Answered("a", wire.Offer(MODEL, 0.0, 0.0, 0.0), wire.Noted(), seconds=0.05))
    node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), cost))
    of = record("a", "b")
    node.answers("a", wire.Propose(of))
    node.answers("a", founded(of))
    assert node.told()[0].step_seconds == pytest.approx(
        SETTINGS.step_seconds + SETTINGS.slow_lines * lines
    )


@pytest.mark.parametrize(
    ("work", "bound"), [(1.0, SETTINGS.step_seconds), (200.0, 200.0 * SETTINGS.slow_steps)]
)
def test_a_crew_takes_no_step_for_as_long_as_is_slow_for_its_stages(work, bound):
    """A CPU that evaluates and trains a real model needs more than a quarter of an hour; what
    others say of themselves moves nothing."""
    node = running(work=work)
    assert node.told()[0].step_seconds == bound, "the trainer knows it"
    node.waits(bound - 5.0, alive=("a",))
    assert node.state.phase == Phase.RUNNING
    node.waits(10.0, alive=("a",))
    assert node.state.phase == Phase.FREE
    assert node.state.peers["a"].debt >= bound, "it holds the first stage"


def test_a_member_whose_heartbeats_a_full_line_holds_up_is_alive_while_its_bytes_come():
    node = running()
    node.waits(20.0, alive=("a",))
    node.waits(20.0, heard=("a",))
    assert node.state.phase == Phase.RUNNING
    node.waits(9.0)
    assert node.state.phase == Phase.PAUSED
    node.waits(2.0, heard=("a",))
    assert node.state.phase == Phase.RUNNING
    node.waits(80.0, heard=("a",))
    assert node.state.phase == Phase.FREE, "and one that talks and never says how it is, is none"


def test_a_proposer_that_never_finishes_holds_nobody_for_ever():
    """It asks again and again; every other node that asks has its turn, and a longer one each
    time."""
    node, signed = Node(), {"a": 0, "c": 0}
    for number in range(400):
        node.now += 0.5
        node.does(wire.Tick())
        for peer in ("a", "c") if number % 40 == 0 else ("a",):
            signed[peer] += isinstance(
                node.answers(
                    peer, wire.Propose(record(peer, "b", nonce=number.to_bytes(8, "big")))
                ),
                wire.Signature,
            )
    assert signed["c"] >= 3
    assert signed["a"] * 0.5 < 0.6 * 200


def test_two_that_propose_for_ever_leave_us_our_turn():
    node, promised, ticks = Node(), 0, 1200
    for number in range(ticks):
        node.now += 0.5
        node.does(wire.Tick())
        for peer in ("a", "c"):
            node.answers(peer, wire.Propose(record(peer, "b", nonce=number.to_bytes(8, "big"))))
        promised += node.state.reserved is not None
    assert 0 < promised < 0.5 * ticks
    assert node.state.crew is None


@pytest.mark.parametrize("friends", [0, 1, 2])
def test_ten_that_propose_for_ever_leave_us_most_of_the_time_and_our_turn(friends):
    """They ask as soon as the last one's time is up, whether or not we have noticed that it is.
    Those that name `friends` of one another may take each other's place, and gain nothing by it."""
    node, promised, ticks, honest = (
        Node(layers=friends + 2, stages=0),
        [],
        2400,
        ("a", "c", "d")[: friends + 1],
    )
    for number in range(ticks):
        node.now += 0.5
        for peer in honest if number % 20 == 0 else ():
            node.answers(peer, wire.Offer(MODEL, 1.0, 1.0, 0.0))
        for stranger in range(10):
            named = (f"x{(stranger + other) % 10}" for other in range(1, friends + 1))
            node.answers(
                f"x{stranger}",
                wire.Propose(record(f"x{stranger}", "b", *named, nonce=number.to_bytes(8, "big"))),
            )
        node.does(wire.Tick())
        promised.append(node.state.reserved is not None)
    assert sum(promised[ticks // 2 :]) < 0.3 * ticks / 2
    assert {
        one.peer
        for one in node.done
        if isinstance(one, wire.Send) and isinstance(one.message, wire.Propose)
    } == {*honest}


def test_while_we_propose_we_sign_nothing_although_our_proposal_is_overdue_or_lapses_first():
    node = Node(replace_copy(OURS, 0))
    node.answers("c", wire.Offer(MODEL, 1.0, 1.0, 0.0, (OURS,)))
    node.does(wire.Tick())
    assert node.state.proposal is not None
    assert node.answers("a", wire.Propose(record("a", "b", step=40))).reason == "busy"
    node.now = node.state.proposal.until
    of = record("a", "b", step=40, nonce=b"2" * 8)
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    node.does(wire.Tick())
    assert node.answers("a", founded(of)) == wire.Noted()


def test_who_leaves_because_of_somebody_is_doubted_as_much_as_whom_it_names():
    node = running(peers=("a", "b", "c"))
    node.answers("a", wire.Leave(node.state.crew.id, "is gone", "c"))
    assert node.state.phase == Phase.FREE
    assert node.state.peers["a"].debt == node.state.peers["c"].debt > 0
    assert max(node.state.peers[peer].barred_until for peer in "ac") < node.now


@pytest.mark.parametrize("peers", [("a", "b", "c"), ("b", "a", "c")])
def test_who_leaves_in_the_middle_of_a_long_step_has_nobody_else_charged(peers):
    """It may have held up the work itself, just so long that nobody noticed; the head, which is all
    that others see, may be we."""
    node = running(peers=peers)
    node.does(wire.StageStatus(node.state.crew.id, node.state.crew.stage, "active", 1))
    node.waits(0.6 * SETTINGS.step_seconds, alive=("a", "c"))
    node.answers("c", wire.Leave(node.state.crew.id, "because"))
    assert node.state.phase == Phase.FREE
    assert node.state.peers["a"].debt == 0
    assert node.state.peers["c"].debt > 0


def test_whom_everybody_waits_for_is_charged_and_not_who_says_so_first():
    node = Node(layers=3)
    of = record("a", "b", "c")
    assert isinstance(node.answers("a", wire.Propose(of)), wire.Signature)
    node.answers("a", founded(of))
    node.waits(0.6 * SETTINGS.join_seconds, alive=("a",))
    node.answers("a", wire.Leave(node.state.crew.id, "has not joined", "c"))
    assert node.state.peers["a"].debt == 0
    assert node.state.peers["c"].barred_until > node.now
    offering = wire.Offering(
        MODEL, Capacity(1.0, 1.0), ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 3, Part(0.0, 0.0))
    )
    offers = [one.message for one in node.does(offering) if isinstance(one, wire.Send)]
    assert [offer.without for offer in offers] == [("c",)]


def proposed(node, offers, seconds, refuse=None, of_x=lambda tick: ()):
    """The members of each record that `node` proposes while others offer the same again and again.
    `refuse`: what `x` answers at once; `of_x`: what comes from it besides."""
    found = []
    for tick in range(int(seconds / SETTINGS.tick_seconds)):
        for peer, offer in offers.items() if tick % 20 == 0 else ():
            node.answers(peer, offer)
        node.done.clear()
        for event in of_x(tick):
            node.does(event)
        node.waits(SETTINGS.tick_seconds)
        asked = [
            one
            for one in node.done
            if isinstance(one, wire.Send) and isinstance(one.message, wire.Propose)
        ]
        found += [{one.peer for one in asked}] if asked else []
        for one in asked:
            if one.peer == "x" and refuse is not None:
                node.does(
                    wire.Answered(
                        "x",
                        one.message,
                        wire.Refuse(refuse, crew_id(one.message.record)) if refuse else None,
                    )
                )
                node.answers("x", offers["x"])
    return found


@pytest.mark.parametrize("memory", [1e30, 3.0])
@pytest.mark.parametrize("refuse", ["busy", "crew", ""])
def test_a_stranger_that_offers_most_and_signs_nothing_is_done_without(memory, refuse):
    node = Node(layers=4, stages=0, memory=2.0)
    offers = {
        "a": wire.Offer(MODEL, 2.0, 1.0, 0.0),
        "c": wire.Offer(MODEL, 2.0, 1.0, 0.0),
        "x": wire.Offer(MODEL, memory, 1e30, 0.0),
    }
    assert any("x" not in members for members in proposed(node, offers, 40.0, refuse))


def test_a_crew_that_nobody_proposes_is_waited_for_a_few_times():
    """Two strangers that would be faster together than anybody with us."""
    node = Node(layers=4, stages=0, memory=2.0)
    offers = {
        peer: wire.Offer(MODEL, 3.0, 1e30, 0.0)
        if peer in "xy"
        else wire.Offer(MODEL, 2.0, 1.0, 0.0)
        for peer in "acxy"
    }
    assert any(not members & {"x", "y"} for members in proposed(node, offers, 60.0))


@pytest.mark.parametrize(
    "offers",
    [
        ((MODEL, 0.5), (MODEL, 0.4)),
        ((b"x" * 32, 1.0),),
        ((MODEL, 1.0), (MODEL, 0.0)),
        ((MODEL, 1.5),),
    ],
)
def test_who_offers_anew_all_the_time_delays_a_crew_for_seconds(offers):
    """A stranger that comes back each time, so that it cannot be told from many."""
    said = [
        wire.Offer(model, memory, 1e30 if memory >= 1.0 else 1.0, 0.0) for model, memory in offers
    ]
    comes = lambda tick: (
        (wire.PeerGone("x"), wire.PeerBack("x"), wire.Received("x", said[tick // 4 % len(said)]))
        if tick % 4 == 0
        else ()
    )
    assert proposed(
        Node(),
        {"a": wire.Offer(MODEL, 1.0, 1.0, 0.0)},
        4 * SETTINGS.gather_seconds + SETTINGS.turn_seconds,
        of_x=comes,
    )


def test_offers_are_made_while_free_and_taken_back_in_a_crew():
    node = running()
    sent = [
        a.message.memory
        for a in node.done
        if isinstance(a, wire.Send) and isinstance(a.message, wire.Offer)
    ]
    assert sent[0] > 0
    assert sent[-1] == 0
    node.does(wire.Received("a", wire.Leave(node.state.crew.id, "drained")))
    assert not any(
        isinstance(a, wire.Send) and isinstance(a.message, wire.Offer)
        for a in node.does(wire.Tick())
    ), "its trainer has not stopped"
    actions = node.does(wire.Offering(MODEL, Capacity(1.0, 1.0), COST, (OURS,)))
    assert [
        a.message.copies
        for a in actions
        if isinstance(a, wire.Send) and isinstance(a.message, wire.Offer)
    ] == [(OURS,)]


def test_a_peer_that_does_not_speak_of_crews_is_not_asked_again_at_once():
    node = Node()
    offer = next(a.message for a in node.done if isinstance(a, wire.Send))
    node.does(wire.Answered("a", offer, None, foreign=True))
    before = len(node.done)
    node.waits(SETTINGS.offer_seconds * 3)
    assert not any(isinstance(a, wire.Send) for a in node.done[before:])
    assert any(
        isinstance(a, wire.Send)
        for a in node.does(wire.Received("a", wire.Offer(MODEL, 1.0, 1.0, 0.0)))
    )


def test_the_holder_of_the_first_stage_proposes_and_all_who_sign_make_the_crew():
    node = Node(replace_copy(OURS, 0))
    other = wire.Offer(MODEL, 1.0, 1.0, 0.0, (OURS,))
    actions = node.does(wire.Received("c", other)) + node.does(wire.Tick())
    asked = [a for a in actions if isinstance(a, wire.Send) and isinstance(a.message, wire.Propose)]
    assert [a.peer for a in asked] == ["c"]
    of = asked[0].message.record
    assert (of.step, of.lineage, [member.peer for member in of.members]) == (
        40,
        LINEAGE,
        ["b", "c"],
    )
    signature = wire.Signature(crew_id(of), named_keys("c")[0](member_bytes(crew_id(of))))
    node.does(wire.Answered("x", asked[0].message, signature))
    node.does(
        wire.Answered(
            "c", asked[0].message, msgspec.structs.replace(signature, signature=bytes(64))
        )
    )
    assert node.state.crew is None
    actions = node.does(wire.Answered("c", asked[0].message, signature))
    assert node.state.phase == Phase.PREPARING
    assert [
        a.peer for a in actions if isinstance(a, wire.Send) and isinstance(a.message, Founded)
    ] == ["c"]


def replace_copy(copy, stage):
    return msgspec.structs.replace(copy, first=stage, last=stage + 1)


def test_the_state_is_never_changed_in_place():
    node = Node()
    before = replace(node.state)
    peers = dict(node.state.peers)
    advance(node.state, wire.Received("a", wire.Offer(MODEL, 1.0, 1.0, 0.0)), 101.0, node.means)
    assert node.state == before
    assert node.state.peers == peers


def test_what_a_member_said_before_it_was_ready_and_what_comes_later_changes_nothing():
    """Each heartbeat and each answer has a stream of its own, and the first to be sent may be the
    last to come."""
    node = running()
    crew = node.state.crew.id
    node.now += 3.0
    node.answers("a", wire.Heartbeat(crew, wire.Status("loading", 0, 0)))
    node.does(
        wire.Answered(
            "a",
            wire.Heartbeat(crew, wire.Status("active")),
            wire.Alive(crew, wire.Status("probation")),
        )
    )
    assert [slot.state for slot in statistics(node.state, node.now, SETTINGS).slots] == [
        "active",
        "active",
    ]
    assert node.state.crew.members["a"].signs.silent_seconds(node.now, 1.0) == 0.0, (
        "it is a sign of life"
    )


def test_a_member_that_has_not_joined_is_told_again_with_each_heartbeat_and_not_with_each_refusal():
    node = Node()
    of = record("a", "b")
    node.answers("a", wire.Propose(of))
    node.answers("a", founded(of))
    crew = node.state.crew.id
    told = [
        a
        for a in node.does(
            wire.Answered("a", wire.Heartbeat(crew, wire.Status()), wire.Refuse("crew", crew))
        )
        if isinstance(a, wire.Send)
    ]
    assert [a.message for a in told] == [founded(of)]
    assert node.does(wire.Answered("a", founded(of), wire.Refuse("crew", crew))) == [], (
        "two that refuse each other would never end"
    )


def far_node(seconds, *, batch_bytes=0.0, uplink=math.inf):
    """`b`, whose peers' answers have taken so long, one way; and what it offers then."""
    node = Node()
    node.means = Means(
        SETTINGS, node.means.sign, node.means.verify, random.Random(1), uplink=lambda: uplink
    )
    cost = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 2, Part(0.0, 0.0), batch_bytes)
    for peer, each in seconds.items():
        node.does(wire.PeerBack(peer))
        for one in each:
            node.does(
                wire.Answered(peer, wire.Offer(MODEL, 0.0, 0.0, 0.0), wire.Noted(), seconds=one)
            )
    offering = wire.Offering(MODEL, Capacity(1.0, 1.0), cost)
    return node, [
        a.message
        for a in node.does(offering)
        if isinstance(a, wire.Send) and isinstance(a.message, wire.Offer)
    ]


def test_a_node_offers_what_it_has_measured_of_its_line():
    _, offers = far_node({"a": [0.05], "c": [0.07], "d": [0.06]}, batch_bytes=3e6, uplink=6e6)
    assert offers
    assert all(offer.hop_seconds == pytest.approx(0.06 + 0.5) for offer in offers)
    assert all(offer.hop_seconds == 0.0 for offer in far_node({})[1]), "nothing was measured"


def test_a_distance_is_that_of_the_fastest_answer_and_few_slow_ones_change_it_little():
    node, _ = far_node({"a": [0.3, 0.05, 2.0]})
    assert usual_seconds(node.state) == pytest.approx(0.05 + 1.95 / 32)
    for lies in ([1e9] * 100, [0.0] * 100):
        node, offers = far_node({"a": [0.05], "c": [0.06], "d": lies})
        assert 0.05 <= usual_seconds(node.state) <= 0.06
        assert 0.05 <= offers[0].hop_seconds <= 0.06


def test_what_was_measured_since_is_offered_anew_at_once_and_small_changes_are_not():
    node, _ = far_node({"a": [0.05]})
    offers = lambda: [
        a for a in node.done if isinstance(a, wire.Send) and isinstance(a.message, wire.Offer)
    ]
    node.does(wire.Tick())
    node.done.clear()
    answered = lambda seconds: node.does(
        wire.Answered("a", wire.Offer(MODEL, 0.0, 0.0, 0.0), wire.Noted(), seconds=seconds)
    )
    answered(0.04)
    node.does(wire.Tick())
    assert offers() == []
    answered(0.01)
    node.does(wire.Tick())
    assert [a.message.hop_seconds for a in offers()] == [0.01]
