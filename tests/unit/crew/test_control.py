"""Membership of one node in crews, event by event."""

import random

import pytest
from msgspec.structs import replace

from swarmnode.stages.crew_messages import (
    AcceptAnswer,
    AliveAnswer,
    CrewEnd,
    CrewMember,
    CrewRecord,
    CrewStart,
    Heartbeat,
    HeldBlock,
    LeaveRequest,
    MemberStatus,
    Offer,
    ProposeRequest,
    RefuseAnswer,
    StageAssignment,
    StageFault,
    StageStatus,
    ToTrainer,
    TrainerOffer,
    crew_id,
)
from swarmnode.stages.network.crew import (
    CLEARING_STEPS,
    GRACE_SECONDS,
    MAX_FAILED_CREWS,
    OTHER_BYTES_SECONDS,
    advance,
)
from swarmnode.stages.network.crew_state import (
    ClockTick,
    CrewDependencies,
    DrainStarted,
    GarbageReceived,
    MembershipSettings,
    Note,
    PeerConnected,
    PeerDisconnected,
    Phase,
    RequestFinished,
    RequestReceived,
    SendAnswer,
    SendRequest,
    State,
    StreamLost,
    TrainerDisconnected,
)
from swarmnode.stages.specs import ModelCost, PartCost

MODEL, LINEAGE = b"m" * 32, b"l" * 32
SETTINGS = MembershipSettings(stages=2, base_wait_seconds=120.0)
ACTIVE = MemberStatus("active", 40)


def copy(stage, step=40, where="memory", lineage=LINEAGE):
    return HeldBlock(lineage, (1, 1), stage, step, where)


def record(*peers, step=40, lineage=LINEAGE, nonce=b"n" * 8, model=MODEL):
    return CrewRecord(lineage, model, step, tuple(CrewMember(peer, 1) for peer in peers), nonce)


class Node:
    """`b`, connected with `a`, `c` and `d`."""

    def __init__(self, *copies, trusts=lambda peer: True, layers=2, memory=1.0):
        self.dependencies = CrewDependencies(
            replace(SETTINGS, stages=layers), random.Random(1), trusts
        )
        self.state, self.now, self.done = State("b"), 100.0, []
        cost = ModelCost(PartCost(0.0, 0.0), (PartCost(1.0, 1.0),) * layers, PartCost(0.0, 0.0))
        self.stages = layers
        self.trainer_offer = TrainerOffer(MODEL, memory, 1.0, cost, self.of_this_crew(copies))
        for peer in "acd":
            self.handle(PeerConnected(peer))
        self.handle(self.trainer_offer)

    def handle(self, event):
        self.state, actions = advance(self.state, event, self.now, self.dependencies)
        self.done += actions
        return actions

    def answer(self, peer, message):
        return next(
            action.message
            for action in self.handle(RequestReceived(peer, message))
            if isinstance(action, SendAnswer)
        )

    def receive_offer(self, peer, *copies, memory=1.0):
        self.answer(peer, Offer(MODEL, memory, 1.0, self.of_this_crew(copies)))

    def of_this_crew(self, copies):
        """`copies` of a crew with a layer for each stage."""
        return tuple(replace(one, layers=(1,) * self.stages) for one in copies)

    def receive_heartbeats(self, *peers, status=ACTIVE):
        for peer in peers:
            self.answer(peer, Heartbeat(self.state.crew.id, status))

    def wait(self, seconds, alive=(), heard=()):
        for tick in range(round(seconds / SETTINGS.tick_seconds)):
            self.now += SETTINGS.tick_seconds
            if tick % 2 and self.state.crew is not None:
                self.receive_heartbeats(*alive, status=MemberStatus("active", 40, int(self.now)))
            self.handle(ClockTick({peer: self.now for peer in heard}))

    def sent(self, kind):
        return [
            (action.peer, action.message)
            for action in self.done
            if isinstance(action, SendRequest) and isinstance(action.message, kind)
        ]

    def sent_to_trainer(self):
        return [action for action in self.done if isinstance(action, ToTrainer)]

    def notes(self, what):
        return [
            action.detail
            for action in self.done
            if isinstance(action, Note) and action.what == what
        ]


def running(*peers, step=40, copies=None):
    """A node in a running crew of `peers`."""
    peers = peers or ("a", "b")
    own = (copy(peers.index("b"), step),) if copies is None else copies
    node = Node(*(own if step else ()), layers=len(peers))
    assert node.answer("a", ProposeRequest(record(*peers, step=step))) == AcceptAnswer(
        crew_id(record(*peers, step=step))
    )
    others = [peer for peer in peers if peer != "b"]
    node.receive_heartbeats(*others, status=MemberStatus("active", step))
    node.handle(StageStatus(node.state.crew.id, peers.index("b"), "active", step))
    assert node.state.phase == Phase.RUNNING
    return node


# ---- forming a crew ------------------------------------------------------------------------------


def test_accepted_crew_is_assigned_once_all_sent_heartbeats():
    node = Node(copy(1), layers=3)
    of = record("a", "b", "c")
    assert node.answer("a", ProposeRequest(of)) == AcceptAnswer(crew_id(of))
    assert {peer for peer, _ in node.sent(Heartbeat)} == {"a", "c"}
    node.receive_heartbeats("a")
    assert node.state.phase == Phase.FORMING
    assert not node.sent_to_trainer()
    node.receive_heartbeats("c")
    [assigned] = node.sent_to_trainer()
    assert (assigned.stage, assigned.members, assigned.step) == (1, ("a", "b", "c"), 40)
    assert node.answer("a", ProposeRequest(of)) == AcceptAnswer(crew_id(of)), "a repeated proposal"


def test_candidate_with_the_newest_step_proposes_first():
    node = Node(copy(1))
    node.receive_offer("a", copy(0))
    node.handle(ClockTick())
    assert not node.sent(ProposeRequest), "`a` comes first"
    node.wait(SETTINGS.turn_seconds)
    [(peer, proposal)] = node.sent(ProposeRequest)
    assert (peer, proposal.record.step) == ("a", 40)
    first = Node(copy(1, 41))
    first.receive_offer("a", copy(0, 40))
    assert [message.record.step for _, message in first.sent(ProposeRequest)] == [41]


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (record("a", "c"), "record"),
        (record("c", "b"), "record"),
        (record("a", "b", model=b"x" * 32), "model"),
        (record("a", "b", "c"), "model"),
        (replace(record("a", "b"), members=(CrewMember("a", 1), CrewMember("b", 2))), "model"),
    ],
)
def test_bad_record_is_refused(of, why):
    node = Node(copy(1))
    assert node.answer("a", ProposeRequest(of)) == RefuseAnswer(why, crew_id(of))
    assert node.state.crew is None


def test_stage_without_room_is_refused():
    node = Node(memory=0.5)
    assert node.answer("a", ProposeRequest(record("a", "b", step=0))).reason == "room"


def test_untrusted_member_is_refused():
    node = Node(trusts=lambda peer: peer != "a")
    assert node.answer("a", ProposeRequest(record("a", "b"))).reason == "trust"


def test_second_proposal_is_refused_as_busy():
    node = Node(copy(1))
    node.answer("a", ProposeRequest(record("a", "b")))
    assert node.answer("c", ProposeRequest(record("c", "b"))).reason == "busy"


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        (record("a", "b", step=39), 0.0),
        (record("a", "b", step=41), 0.0),
        (record("a", "b", step=38), SETTINGS.discard_wait_seconds),
        (record("a", "b", step=10**15), SETTINGS.discard_wait_seconds),
        (record("a", "b", step=50, lineage=b"x" * 32), SETTINGS.discard_wait_seconds),
        (record("a", "b", step=30, lineage=b"x" * 32), SETTINGS.base_wait_seconds),
        (record("a", "b", step=0, lineage=b"x" * 32), SETTINGS.base_wait_seconds),
    ],
)
def test_own_steps_are_discarded_only_after_waiting(of, seconds):
    node = Node(copy(1))
    if seconds:
        node.now += seconds - 1
        assert node.answer("a", ProposeRequest(of)).reason == "newer"
        node.now += 1
    assert isinstance(node.answer("a", ProposeRequest(of)), AcceptAnswer)


def test_crew_that_does_not_form_strikes_missing_members():
    node = Node(copy(1), layers=3)
    node.answer("a", ProposeRequest(record("a", "b", "c")))
    node.receive_heartbeats("a")
    node.wait(SETTINGS.join_seconds + GRACE_SECONDS, alive=["a"])
    assert node.state.crew is None
    assert not node.sent_to_trainer()
    assert [detail.split(":")[0] for detail in node.notes("struck")] == ["c"]


def test_peer_that_refuses_again_and_again_is_struck():
    node = Node(copy(1, 41))
    node.receive_offer("a", copy(0))
    for _ in range(200):
        if node.state.crew is not None:
            crew, of = node.state.crew.id, node.state.crew.record
            node.handle(RequestFinished("a", ProposeRequest(of), RefuseAnswer("trust", crew)))
        node.wait(0.5)
        node.receive_offer("a", copy(0))
        if node.notes("struck"):
            break
    assert len(node.sent(ProposeRequest)) == MAX_FAILED_CREWS
    assert node.now < 100 + 60


def test_peer_that_ends_crews_before_their_first_step_is_struck():
    node = Node(copy(1))
    for number in range(MAX_FAILED_CREWS):
        assert not node.notes("struck")
        node.answer("a", ProposeRequest(record("a", "b", nonce=bytes([number] * 8))))
        node.receive_heartbeats("a")
        node.answer("a", LeaveRequest(node.state.crew.id, "no reason"))
        node.handle(node.trainer_offer)
    assert node.state.peers["a"].strikes == 1


# ---- a running crew ------------------------------------------------------------------------------


def test_silence_ends_the_crew():
    node = running()
    node.wait(SETTINGS.gone_seconds - 0.5)
    assert node.state.phase == Phase.RUNNING
    node.wait(0.5)
    assert node.state.crew is None
    assert [type(message) for message in node.sent_to_trainer()] == [
        StageAssignment,
        CrewStart,
        CrewEnd,
    ]
    assert node.state.peers["a"].strikes == 1


@pytest.mark.parametrize(
    "event",
    [
        lambda crew: StreamLost("a", crew),
        lambda crew: PeerDisconnected("a"),
        lambda crew: RequestReceived("a", LeaveRequest(crew, "its trainer is gone")),
        lambda crew: TrainerDisconnected(),
        lambda crew: DrainStarted("its node stops"),
        lambda crew: StageStatus(crew, 1, "failed", reason="no memory"),
        lambda crew: StageFault(crew, 1, "its own device"),
        lambda crew: StageFault(crew, None, "a stream broke; only a head does not know whose"),
    ],
)
def test_end_of_a_crew_is_sent_to_all_and_costs_no_strike(event):
    node = running()
    node.handle(event(node.state.crew.id))
    assert node.state.crew is None
    assert isinstance(node.sent_to_trainer()[-1], CrewEnd)
    assert node.sent(LeaveRequest)
    assert not node.notes("struck")
    assert len(node.notes("broken")) == 1


@pytest.mark.parametrize(
    "event",
    [
        lambda crew: GarbageReceived("a"),
        lambda crew: StageFault(crew, 0, "a frame that is not finite"),
    ],
)
def test_garbage_of_a_member_is_a_strike(event):
    node = running()
    node.handle(event(node.state.crew.id))
    assert node.state.crew is None
    assert node.state.peers["a"].strikes == 1
    assert node.notes("struck")[0].startswith("a: ")


def test_head_strikes_members_with_work_in_hand():
    node = running("b", "a", "c")
    node.receive_heartbeats("a", status=MemberStatus("active", 40, 1, 2))
    node.receive_heartbeats("c", status=MemberStatus("active", 40, 1, 0))
    node.handle(StageFault(node.state.crew.id, None, "no work for 120 s"))
    assert (node.state.peers["a"].strikes, node.state.peers["c"].strikes) == (1, 0)
    node = running("b", "a", "c")
    node.handle(StageFault(node.state.crew.id, None, "no work for 120 s"))
    assert (node.state.peers["a"].strikes, node.state.peers["c"].strikes) == (1, 1)


def test_head_that_takes_no_step_is_struck():
    node = running("a", "b", "c")
    node.wait(SETTINGS.step_seconds - 1, alive=["a", "c"])
    assert node.state.phase == Phase.RUNNING
    node.wait(1.5, alive=["a", "c"])
    assert (node.state.peers["a"].strikes, node.state.peers["c"].strikes) == (1, 0)


def test_member_with_work_and_without_progress_is_struck():
    node = running("a", "b", "c")
    for load, struck in ((0, 0), (1, 1)):
        for _ in range(int(SETTINGS.progress_seconds) + 2):
            if node.state.crew is not None:
                node.receive_heartbeats("a", status=MemberStatus("active", 40, 5, 0))
                node.receive_heartbeats("c", status=MemberStatus("active", 40, 5, load))
                node.now += 1.0
                node.handle(ClockTick())
        assert (node.state.peers["a"].strikes, node.state.peers["c"].strikes) == (0, struck)
    assert node.state.crew is None


def test_refused_heartbeat_ends_the_crew_after_joining():
    node = running()
    crew = node.state.crew.id
    beat = Heartbeat(crew, ACTIVE)
    node.now += 1
    node.handle(RequestFinished("a", beat, RefuseAnswer("crew", crew), seconds=2.0))
    assert node.state.crew is not None
    node.handle(RequestFinished("a", beat, RefuseAnswer("crew", crew), seconds=0.5))
    assert node.state.crew is None


# ---- silence, by the clock of a process that may itself be slow ----------------------------------


def test_other_bytes_are_signs_of_life_for_a_minute():
    node = running()
    node.wait(OTHER_BYTES_SECONDS + SETTINGS.gone_seconds - 1, heard=["a"])
    assert node.state.phase == Phase.RUNNING
    node.wait(1.5, heard=["a"])
    assert node.state.crew is None


@pytest.mark.parametrize("alive", [True, False])
def test_process_that_slept_waits_for_its_peers_but_not_long(alive):
    node = running()
    node.handle(ClockTick())
    node.now += 60.0
    node.handle(ClockTick())
    assert node.state.phase == Phase.RUNNING
    if alive:
        node.receive_heartbeats("a")
        node.wait(5.0, alive=["a"])
        assert node.state.phase == Phase.RUNNING
        return
    woke = node.now
    while node.state.crew is not None:
        node.wait(0.5)
    assert node.now - woke < SETTINGS.gone_seconds


def test_slow_process_waits_longer_by_its_lag():
    node = running()
    for _ in range(9):  # ticks come every second instead of every half
        node.now += 2 * SETTINGS.tick_seconds
        node.handle(ClockTick())
    assert node.state.lag == 2.0
    assert node.state.phase == Phase.RUNNING, "nine seconds of silence"
    for _ in range(18):
        node.now += 2 * SETTINGS.tick_seconds
        node.handle(ClockTick())
    assert node.state.crew is None


# ---- strikes -------------------------------------------------------------------------------------


def strike(node, peer="a"):
    """`peer` sends garbage in a crew; afterwards the trainer offers again."""
    of = record("a", "b", nonce=random.Random(node.now).randbytes(8))
    node.answer("a", ProposeRequest(of))
    node.receive_heartbeats("a")
    node.handle(GarbageReceived(peer))
    node.handle(node.trainer_offer)


def test_exclusion_doubles_with_each_strike():
    node = Node(copy(1))
    for number in range(1, 12):
        strike(node)
        seconds = node.state.peers["a"].struck_until - node.now
        assert seconds == min(3600.0, SETTINGS.strike_seconds * 2**number)
        node.now += seconds


def test_struck_peer_is_excluded_while_another_crew_is_possible():
    node = Node(copy(1, 41))
    strike(node)
    node.receive_offer("c")
    node.receive_offer("a", copy(0))
    node.wait(SETTINGS.discard_wait_seconds)
    assert {peer for peer, _ in node.sent(ProposeRequest)} == {"c"}


def test_crew_with_a_struck_member_is_refused_while_another_is_possible():
    node = Node(copy(1))
    strike(node)
    node.receive_offer("a", copy(0))
    node.receive_offer("c")
    of = record("a", "b", nonce=b"o" * 8)
    assert node.answer("a", ProposeRequest(of)).reason == "struck"
    node.receive_offer("c", memory=0.0)
    assert isinstance(node.answer("a", ProposeRequest(of)), AcceptAnswer)


def test_struck_peer_is_admitted_at_once_without_another_crew():
    node = Node(copy(1, 41))
    strike(node)
    node.done.clear()
    node.receive_offer("a", copy(0))
    node.wait(3.0)
    assert [peer for peer, _ in node.sent(ProposeRequest)] == ["a"]


def test_ten_steps_together_clear_strikes():
    node = Node(copy(1))
    strike(node)
    node.answer("a", ProposeRequest(record("a", "b")))
    node.receive_heartbeats("a")
    crew = node.state.crew.id
    for step in range(41, 40 + CLEARING_STEPS):
        node.handle(StageStatus(crew, 1, "active", step))
    assert node.state.peers["a"].strikes == 1
    node.handle(StageStatus(crew, 1, "active", 40 + CLEARING_STEPS))
    assert node.state.peers["a"].strikes == 0


# ---- strangers, offers, statistics ---------------------------------------------------------------


def test_strangers_change_nothing_about_a_running_crew():
    node = running()
    crew, before = node.state.crew, node.state
    for message in (
        LeaveRequest(crew.id, "it is over"),
        Heartbeat(crew.id, MemberStatus("failed")),
        ProposeRequest(record("c", "b", step=10**15)),
        ProposeRequest(record("b", "c")),
        ProposeRequest(crew.record),
    ):
        node.answer("c", message)
        assert node.state == before, message
    node.handle(GarbageReceived("c"))
    node.handle(StreamLost("c", crew.id))
    node.handle(PeerDisconnected("c"))
    node.handle(RequestFinished("c", Heartbeat(crew.id, ACTIVE), RefuseAnswer("crew", crew.id)))
    node.handle(RequestFinished("c", Heartbeat(crew.id, ACTIVE), AliveAnswer(crew.id, ACTIVE)))
    node.receive_offer("c", *(copy(stage, 10**15) for stage in range(2)), memory=1e30)
    assert node.state.crew == crew
    assert node.state.phase == Phase.RUNNING


def test_offer_is_sent_to_connected_peers_and_withdrawn_in_a_crew():
    node = Node(copy(1))
    assert {peer for peer, offer in node.sent(Offer) if offer.memory} == {"a", "c", "d"}
    node.done.clear()
    node.answer("a", ProposeRequest(record("a", "b")))
    node.receive_heartbeats("a")
    assert [offer.memory for _, offer in node.sent(Offer)] == [0.0] * 3
    node.done.clear()
    node.wait(3 * SETTINGS.offer_seconds, alive=["a"])
    assert not node.sent(Offer), "once"


def test_peers_beyond_the_bound_are_forgotten():
    node = Node()
    for number in range(3 * SETTINGS.most_peers):
        node.receive_offer(f"x{number}")
    assert len(node.state.peers) == SETTINGS.most_peers
    assert {"a", "c", "d"} <= node.state.peers.keys()


def test_trainer_of_an_ended_crew_is_released():
    node = Node()
    node.handle(StageStatus(b"c" * 32, 0, "active", 3))
    assert node.sent_to_trainer() == [CrewEnd("that crew is over")]


def test_time_in_a_crew_without_steps_does_not_count_as_waiting():
    node = Node(copy(1))
    node.wait(5.0)
    node.answer("a", ProposeRequest(record("a", "b")))
    node.receive_heartbeats("a")
    node.wait(200.0, alive=["a"])
    node.handle(StreamLost("a", node.state.crew.id))
    node.handle(node.trainer_offer)
    assert node.now - node.state.free_since == pytest.approx(5.0)
