"""The stage plane with a control that does as it is told: what is carried out, in which order, and who is heard at all. No network."""

import time
from typing import ClassVar

import msgspec
import pytest
import trio

from protocol.generate.frames import KEY
from swarmnode.config import StagesConfig
from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew import plane as plane_module
from swarmnode.crew.plan import Capacity, ModelCost, Part
from swarmnode.crew.plane import StagePlane, no_say
from swarmnode.errors import Incompatible, PeerError, PeerTimeout
from tests.support.waiting import until

OFFERING = local.Offering(b"m" * 32, Capacity(1e9, 1e9), ModelCost(Part(1, 1), (Part(1, 1),), Part(1, 1)))
ASSIGNED = local.Assigned(b"c" * 32, 1, 0, (1, 1), (1, 1), ("me", "b"), 0, True, False, "")
LEAVE = messages.Leave(b"c" * 32, 1)


def seat(peer):
    return messages.Seat(peer, b"i" * 8, 1)


def record(epoch=1, **fields):
    founding = epoch == 1
    made = messages.Record(
        messages.NO_CREW if founding else b"c" * 32, epoch, messages.NO_HASH if founding else b"p" * 32, b"m" * 32, (1, 1),
        (seat("me"), seat("b")), (), (messages.Voter("me", b"i" * 8), messages.Voter("b", b"i" * 8)), 0, 30, bytes(8),
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


class Control:
    """Stands in for CrewControl: `answers` maps a kind of event to actions, or to an exception."""

    made: ClassVar = []

    def __init__(self, me, sign, verify, settings, rng, memory=b""):
        self.memory = memory
        self.heard = []
        self.answers = {}
        self.roster = None
        self.stage = 0
        self.may_average = False
        self.leased = True
        self.recovery = None
        Control.made.append(self)

    def handle(self, event, now):
        if not isinstance(event, ev.Tick):
            self.heard.append(event)
        answer = self.answers.get(type(event), [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def statistics(self):
        return ev.ControlStatistics("none", "c1", 0, None, (), False, 0, {}, 0.0, self.recovery)

    def within_lease(self, now):
        return self.leased

    def kinds(self):
        return [type(event).__name__ for event in self.heard]


class Network:
    """Requests are answered by `reply`, or fail."""

    peer_id = "me"

    def __init__(self):
        self.requests = self.streams = self
        self.handlers = {}
        self.held = []
        self.blamed = []
        self.here = ["a", "b"]
        self.asked = []
        self.reply = messages.encode_message(messages.Noted())
        self._event = trio.Event()

    def serve(self, protocol, handler, **limits):
        self.handlers[protocol] = handler

    def connected(self):
        return self.here

    async def changed(self):
        await self._event.wait()

    def connect(self, *peers):
        self.here = list(peers)
        self._event.set()
        self._event = trio.Event()

    def hold(self, peers):
        self.held.append(set(peers))

    def rejected(self, peer, reason, cost=0.0):
        self.blamed.append((peer, reason))

    async def request(self, peer, protocol, data, *, deadline, max_response_bytes, urgent):
        await trio.lowlevel.checkpoint()
        self.asked.append((peer, messages.decode_request(data), urgent, deadline))
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.fixture
async def made(tmp_path, monkeypatch):
    """A running plane: (plane, network, what the trainer was told)."""
    monkeypatch.setattr(plane_module, "CrewControl", Control)
    Control.made.clear()
    (tmp_path / "run").mkdir()
    network, told = Network(), []
    plane = StagePlane(network, KEY, StagesConfig(), tmp_path, lambda message: told.append(message) or True, restart=told.append)
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        await trio.testing.wait_all_tasks_blocked()
        yield plane, network, told
        nursery.cancel_scope.cancel()


def control():
    return Control.made[-1]


async def serve(network, message):
    handler = next(handler for protocol, handler in network.handlers.items() if "crews" in protocol)
    return messages.decode_answer(await handler("b", messages.encode_message(message)))


async def test_what_is_connected_and_what_is_not_any_more_is_told(made):
    _, network, _ = made
    assert control().heard == [ev.PeerBack("a"), ev.PeerBack("b")]
    network.connect("b", "c")
    await trio.testing.wait_all_tasks_blocked()
    assert control().heard[2:] == [ev.PeerGone("a"), ev.PeerBack("c")]


async def test_nobody_is_answered_before_it_is_written_down(made, autojump_clock, monkeypatch):
    plane, network, _ = made
    tries = []

    def write(path, data):
        tries.append(data)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(plane_module, "write_atomically", write)
    vote = messages.Refuse("busy")
    control().answers[ev.Received] = [ev.Persist(b"promised"), ev.Answer(vote), ev.Send("a", LEAVE)]
    answered = []

    async def ask():
        answered.append(await serve(network, LEAVE))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: len(tries) == 2, seconds=1e6)  # of a clock that jumps while a thread writes
        assert not answered
        assert not network.asked
    assert answered == [vote]
    assert tries == [b"promised"] * 3
    assert plane.statistics().unsaved == 2
    await trio.testing.wait_all_tasks_blocked()
    assert [peer for peer, *_ in network.asked] == ["a"]


async def test_what_was_written_down_is_there_after_a_restart(made, tmp_path):
    _, network, _ = made
    control().answers[ev.Received] = [ev.Persist(b"promised"), ev.Answer(messages.Noted())]
    await serve(network, LEAVE)
    again = StagePlane(Network(), KEY, StagesConfig(), tmp_path, lambda message: True)
    async with trio.open_nursery() as nursery:
        await nursery.start(again.run)
        assert control().memory == b"promised"
        nursery.cancel_scope.cancel()


async def test_a_peer_s_message_that_control_fails_on_ends_nothing(made):
    _, network, _ = made
    control().answers[ev.Received] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await serve(network, LEAVE)  # which `Requests` counts as our error and resets
    control().answers[ev.Received] = [ev.Answer(messages.Noted())]
    assert await serve(network, LEAVE) == messages.Noted()


async def test_an_answer_that_is_none_or_late_is_told_as_such(made):
    plane, network, _ = made
    control().answers[ev.TrainerLeft] = [ev.Send("a", LEAVE)]
    for reply in (PeerTimeout("late"), PeerError("gone"), b"\xc1", messages.encode_message(messages.Offer(b"m" * 32, b"i" * 8, 1, 1, 1))):
        network.reply = reply
        plane.hello(1)
        plane.receive(OFFERING)
        plane.trainer_left()
        await trio.testing.wait_all_tasks_blocked()
        assert control().heard[-1] == ev.Answered("a", LEAVE, None)
    assert network.blamed == [("a", "stages_malformed")] * 2
    assert plane.statistics().unanswered == {"leave": 4}
    assert all(urgent for *_, urgent, _ in network.asked)


async def test_who_does_not_speak_of_crews_is_told_as_such(made):
    plane, network, _ = made
    control().answers[ev.TrainerOffers] = [ev.Send("a", LEAVE)]
    network.reply = Incompatible("another protocol")
    plane.hello(1)
    plane.receive(OFFERING)
    await trio.testing.wait_all_tasks_blocked()
    assert control().heard[-1] == ev.Answered("a", LEAVE, None, foreign=True)


async def test_nobody_averages_in_a_crew_that_stands_or_past_the_lease(made):
    plane, _, _ = made
    assert plane.may_average  # in no crew
    crew = control()
    crew.roster = record()
    for running, leased in ((False, True), (True, False), (False, False), (True, True)):
        crew.may_average, crew.leased = running, leased
        assert plane.may_average == (running and leased)


async def test_bytes_that_are_no_message_never_reach_control(made):
    plane, network, _ = made
    handler = next(iter(network.handlers.values())) if len(network.handlers) == 1 else network.handlers["/swarmnode/crews/1"]
    before = len(control().heard)
    with pytest.raises(PeerError):
        await handler("b", b"\x81\xa4type\xa4vote")
    assert network.blamed == [("b", "stages_malformed")]
    assert plane.statistics().malformed == 1
    assert len(control().heard) == before


async def test_a_trainer_process_is_fresh_once(made):
    plane, _, _ = made
    plane.hello(7)
    plane.receive(OFFERING)
    plane.trainer_left()
    plane.hello(7)  # its link broke
    plane.receive(OFFERING)
    control().roster = record()
    plane.receive(msgspec.structs.replace(OFFERING, model=b"n" * 32))  # other numbers: can wait while it holds a stage
    plane.hello(8)
    plane.receive(OFFERING)
    await trio.testing.wait_all_tasks_blocked()
    said = control().heard[2:]
    assert [type(each).__name__ for each in said] == ["TrainerOffers", "TrainerLeft", "TrainerOffers", "TrainerLeft", "TrainerOffers"]
    assert [each.fresh for each in said if isinstance(each, ev.TrainerOffers)] == [True, False, True]


async def test_the_trainer_is_told_where_the_streams_are_and_ended_when_it_hangs(made):
    plane, _, told = made
    control().answers[ev.TrainerOffers] = [ev.TellTrainer(ASSIGNED), ev.TellTrainer(local.Resumed(1)), ev.RestartTrainer("it hangs")]
    plane.hello(7)
    plane.receive(OFFERING)
    await trio.testing.wait_all_tasks_blocked()
    assert told == [msgspec.structs.replace(ASSIGNED, socket=str(plane.pipes.path)), local.Resumed(1), "it hangs"]
    assert plane.statistics().trainer_restarts == 1


async def test_members_are_held_while_there_is_a_roster(made):
    plane, network, _ = made
    control().roster = record()
    plane.trainer_left()
    plane.hello(7)
    plane.receive(OFFERING)
    await trio.testing.wait_all_tasks_blocked()
    control().roster = None
    plane.trainer_left()
    await trio.testing.wait_all_tasks_blocked()
    assert network.held == [{"me", "b"}, set()]


async def test_how_long_a_crew_stood_still_is_kept_by_size(made):
    plane, _, _ = made
    control().answers[ev.TrainerStatus] = [ev.Note("running", "")]
    status = local.StageStatus(b"c" * 32, 1, 0, "active", rung="R2")
    for recovery in (0.5, 3.0, 3.5, 500.0):  # the first is the crew's founding
        control().recovery = recovery
        plane.receive(status)
        await trio.testing.wait_all_tasks_blocked()
    statistics = plane.statistics()
    assert statistics.recoveries == 3
    assert statistics.recovery_counts == (0, 0, 2, 0, 0, 0, 0, 0, 1)
    assert statistics.recovery_seconds_total == 506.5
    assert statistics.rungs == {"R2": 1}


async def test_while_it_may_not_take_part_it_is_in_no_crew(made, autojump_clock):
    plane, _, _ = made
    plane.hello(7)
    plane.receive(OFFERING)
    why = ["month"]
    plane._paused = lambda: why[0]
    control().roster = record()
    await trio.sleep(5)
    first = control()
    assert [each.reason for each in first.heard if isinstance(each, ev.Drain)] == ["month"]
    why[0] = ""
    await trio.sleep(5)
    assert control() is first  # it has not left yet
    first.roster = None
    while control() is first or len(control().kinds()) < 3:  # its memory is read in a thread, for which the clock does not wait
        await trio.to_thread.run_sync(time.sleep, 0.01)
    assert control().kinds() == ["PeerBack", "PeerBack", "TrainerOffers"]


@pytest.mark.parametrize(
    ("peer", "message", "answer"),
    [
        ("b", messages.Prepare(b"", 2, b"p" * 32, 9), None),
        ("x", messages.Prepare(b"", 2, b"p" * 32, 9), messages.Refuse("unknown")),
        ("x", messages.Prepare(b"", 3, b"p" * 32, 9), None),  # of a roster that we may have missed: control knows
        ("x", messages.Prepare(b"y" * 32, 2, b"p" * 32, 9), None),
        ("b", messages.Propose(record(2), 9), None),
        ("x", messages.Propose(record(2), 9), messages.Refuse("unknown")),
        ("b", messages.Propose(record(), 0), None),
        ("x", messages.Propose(record(), 0), messages.Refuse("record")),
        ("b", LEAVE, None),
        ("x", LEAVE, messages.Noted()),
        ("x", messages.Leave(b"y" * 32, 1), None),
    ],
)
def test_who_has_no_vote_has_no_say(peer, message, answer):
    ours = record()
    crew = messages.crew_id(ours)
    if isinstance(message, messages.Propose) and message.record.epoch == 2:
        message = msgspec.structs.replace(message, record=msgspec.structs.replace(message.record, crew=crew))
    elif getattr(message, "crew", None) in (b"", b"c" * 32):
        message = msgspec.structs.replace(message, crew=crew)
    assert no_say(ours, peer, message) == answer
    if not (isinstance(message, messages.Propose) and message.record.epoch == 1):
        assert no_say(None, peer, message) is None


async def test_what_would_be_no_message_is_not_said(made):
    """Somebody counted to the end: whoever counts on would be taken for one who sends nonsense."""
    plane, network, _ = made
    beyond = messages.Prepare(b"c" * 32, 2**63, b"p" * 32, 1)
    control().answers[ev.TrainerLeft] = [ev.Send("a", beyond)]
    plane.hello(1)
    plane.receive(OFFERING)
    plane.trainer_left()
    await trio.testing.wait_all_tasks_blocked()
    assert control().heard[-1] == ev.Answered("a", beyond, None)
    assert network.asked == []
    assert network.blamed == []


async def test_while_nothing_can_be_written_down_only_so_many_wait(made, autojump_clock, monkeypatch):
    _, network, _ = made
    monkeypatch.setattr(plane_module, "QUEUE", 3)
    control().answers[ev.Received] = [ev.Persist(b"promised"), ev.Answer(messages.Noted())]
    full, outcomes = [OSError(28, "No space left on device")], []

    def write(path, data):
        if full:
            raise full[0]

    async def ask():
        try:
            outcomes.append(await serve(network, LEAVE))
        except PeerError as error:
            outcomes.append(str(error))

    monkeypatch.setattr(plane_module, "write_atomically", write)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
            await trio.sleep(0.01)
        assert outcomes == ["busy"] * 6
        full.clear()
    assert outcomes[6:] == [messages.Noted()] * 4
