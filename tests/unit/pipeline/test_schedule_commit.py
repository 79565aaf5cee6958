"""1F1B takes the time and keeps the inputs that it should; a step is taken by all stages with one
set of micro-batches, or by none."""

import heapq
import random

import pytest

from swarmnode.stages import pipeline
from swarmnode.stages.pipeline import Schedule
from swarmnode.stages.wire import Coordinator, Decided, Fence, Participant, Place, StepAnswer


def simulate(
    stages: int,
    micro_batches: int,
    forward: float = 1.0,
    backward: float = 2.0,
    rng: random.Random | None = None,
    line: tuple[float, float] = (0.0, 0.0),
    late: float = 0.0,
):
    """Event by event: when all backwards are done, the most inputs each stage kept, and each
    stage's order of work. line: seconds that a stage's line takes for activations and for a
    gradient, one after the other; they arrive `late` after that."""
    schedules = [Schedule(i, stages) for i in range(stages)]
    limits = ["counted"] * (stages - 1) + ["learn"]
    busy, peak, free = [False] * stages, [0] * stages, [0.0] * stages
    orders: list[list] = [[] for _ in range(stages)]
    events: list = []
    for m in range(micro_batches):
        schedules[0].forward_arrived(m, limits[0])
    now, count = 0.0, 0

    def start(i):
        nonlocal count
        work = None if busy[i] else schedules[i].next()
        if work is None:
            return
        busy[i] = True
        orders[i].append(work)
        peak[i] = max(peak[i], len(schedules[i].in_flight) + (work[0] != "forward"))
        seconds = {"forward": forward, "backward": backward, "learn": forward + backward}[
            work[0]
        ] * (rng.uniform(0.5, 2) if rng else 1)
        count += 1
        heapq.heappush(events, (now + seconds, count, i, work))

    start(0)
    while events:
        now, _, i, (kind, m) = heapq.heappop(events)
        if kind == "arrived":
            forwards, m = m
            assert (
                schedules[i].forward_arrived(m, limits[i])
                if forwards
                else schedules[i].backward_arrived(m)
            )
        else:
            busy[i] = False
            if (to := i + 1 if kind == "forward" else i - 1) >= 0:
                free[i] = max(now, free[i]) + line[kind != "forward"]
                count += 1
                heapq.heappush(
                    events, (free[i] + late, count, to, ("arrived", (kind == "forward", m)))
                )
        for j in range(stages):
            start(j)
    return now, peak, orders


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 16), (8, 8)]
)
def test_the_bubble_and_the_inputs_kept_are_those_of_1f1b(stages, micro_batches):
    seconds, peak, orders = simulate(stages, micro_batches)
    assert seconds == (micro_batches + stages - 1) * 3.0
    assert all(kept <= 2 * (stages - i) for i, kept in enumerate(peak))
    for order in orders[:-1]:
        kinds = [kind for kind, _ in order]
        last = len(kinds) - kinds[::-1].index("forward")
        assert all(
            kinds[at : at + 2].count("backward") for at in range(kinds.index("backward"), last)
        ), "never two forwards in a row"


def test_every_micro_batch_gets_through_whatever_the_stages_take():
    for seed in range(50):
        rng = random.Random(seed)
        stages, count = rng.randint(1, 6), rng.randint(1, 12)
        _, peak, orders = simulate(stages, count, rng=rng)
        for i, order in enumerate(orders):
            last = {m for kind, m in order if kind in ("backward", "learn")}
            assert last == set(range(count)), seed
            assert peak[i] <= 2 * (stages - i)


def test_a_step_of_7_b_over_home_lines_is_little_longer_than_its_bytes_take(monkeypatch):
    """64 × (256 + 1,024) tokens: 47 s forward in int8 and 89 back in bfloat16 on an inner stage's
    line at 50 Mbit/s; 8 s of computing forward."""
    step = lambda pieces: simulate(
        4, pieces, 8 / pieces, 24 / pieces, line=(47 / pieces, 89 / pieces), late=0.05
    )[0]
    assert step(32) < 1.1 * 136
    monkeypatch.setattr(pipeline, "ROOM", 1)
    assert step(32) > 1.2 * 136, "it would wait for gradients that are on their way"
    assert step(5) > 1.6 * 136


def test_frames_that_come_twice_or_unasked_change_nothing():
    schedule = Schedule(0, 2)
    assert schedule.forward_arrived(7, "counted")
    assert not schedule.forward_arrived(7, "counted")
    assert not schedule.backward_arrived(7)  # not sent on yet
    assert schedule.next() == ("forward", 7)
    assert schedule.backward_arrived(7)
    assert not schedule.backward_arrived(7)
    assert schedule.next() == ("backward", 7)
    assert not schedule.forward_arrived(7, "counted")
    assert schedule.next() is None


def test_a_different_set_of_micro_batches_is_refused_and_dropped():
    stage = Participant()
    stage.accumulated(1)
    stage.accumulated(3)
    assert stage.propose(0, 1, [1, 2]) == StepAnswer(1, "micro_batches")
    assert stage.complete() is None
    assert stage.abort(0, 1)
    assert stage.step == 0
    assert stage.may_accumulate(1)


def test_a_micro_batch_that_is_still_on_its_way_is_waited_for():
    stage = Participant()
    stage.accumulated(1)
    assert stage.propose(0, 1, [1, 2]) is None
    assert stage.complete() is None
    stage.accumulated(2)
    assert stage.complete() == "prepare"
    assert stage.complete() is None
    assert not stage.may_accumulate(3)


def test_but_not_by_one_that_has_lost_what_it_had():
    stage = Participant()
    stage.accumulated(1)
    assert stage.lose()
    assert stage.propose(0, 1, [1]) == StepAnswer(1, "micro_batches")
    assert stage.abort(0, 1)
    assert stage.propose(0, 2, [5]) is None
    stage.accumulated(5)
    assert stage.complete() == "prepare"


def test_nothing_is_added_once_a_proposal_is_answered():
    stage = Participant()
    stage.accumulated(1)
    with pytest.raises(ValueError):
        stage.accumulated(1)
    assert stage.propose(0, 1, [1]) == "prepare"
    assert not stage.may_accumulate(2)
    assert stage.prepared(1, None, 0.0) == StepAnswer(1, "not_finite")


def test_a_commit_that_comes_twice_is_taken_once():
    stage = Participant()
    stage.accumulated(1)
    stage.propose(0, 1, [1])
    assert stage.commit(0, 1) is None  # not prepared yet
    stage.prepared(1, 2.0, 0.0)
    assert stage.propose(0, 1, [1]) == StepAnswer(1, None, 2.0)
    assert stage.commit(0, 2) is None
    assert stage.commit(0, 1) == "take"
    assert stage.commit(0, 1) == "confirm"
    assert stage.propose(0, 1, [1]) == "confirm"
    assert not stage.abort(0, 1)
    assert stage.step == 1


def test_messages_of_another_step_or_of_an_attempt_that_is_over_change_nothing():
    stage = Participant(step=2)
    stage.accumulated(1)
    assert [stage.propose(step, 1, [1]) for step in (0, 1, 3)] == [
        None,
        None,
        StepAnswer(1, "attempt"),
    ]
    assert stage.propose(2, 3, [1]) == "prepare"
    assert stage.propose(2, 2, [1]) is None
    assert stage.propose(2, 3, [1]) is None  # it is being prepared
    assert stage.prepared(2, 1.0, 0.0) is None
    assert stage.prepared(3, 1.0, 0.0) == StepAnswer(3, None, 1.0)
    assert [stage.commit(step, 3) for step in (0, 1, 3)] == [None, "confirm", None]
    assert not stage.abort(2, 2)
    assert stage.phase == "prepared"
    assert stage.propose(2, 4, [1]) == "prepare"  # the abort was lost
    assert stage.prepared(4, None, 0.0) == StepAnswer(4, "not_finite")
    assert stage.phase == "open"
    assert stage.abort(2, 6)
    assert stage.propose(2, 5, []) is None
    assert stage.propose(3, 5, []) is None


def test_what_is_prepared_is_never_dropped_without_a_decision():
    stage = Participant()
    stage.accumulated(1)
    assert stage.lose()
    stage.accumulated(1)  # it had not been added
    stage.propose(0, 1, [1])
    stage.prepared(1, 2.0, now=0.0)
    assert not stage.lose()
    assert [stage.tick(now) for now in (30.0, 59.0, 60.0)] == [
        StepAnswer(1, None, 2.0),
        None,
        StepAnswer(1, None, 2.0),
    ]
    assert stage.commit(0, 1) == "take"
    assert stage.tick(99.0) is None


def test_one_proposal_at_a_time_and_only_its_own_answers_decide_it():
    head = Coordinator(2)
    assert head.give_up("timeout") is None
    first = head.begin()
    with pytest.raises(ValueError):
        head.begin()
    head.acknowledged(0, first, None, 1.0)
    assert head.give_up("timeout") == Decided(first, "timeout", 0.0, (0, 1))
    assert head.give_up("timeout") is None
    second = head.begin()
    assert second == first + 1
    assert head.acknowledged(0, second, None, 1.0) is None
    for stage, attempt in ((1, first), (2, second), (-1, second)):
        assert head.acknowledged(stage, attempt, None, 1.0) is None
    assert head.acknowledged(1, second, None, 1.0) == Decided(second, None, 2.0, (0, 1))
    assert not head.done(1, first)
    assert head.done(1, second)


def test_a_stage_that_hears_nothing_asks_and_gets_the_old_decision():
    head, stage = Coordinator(2), Participant()
    stage.accumulated(1)
    attempt = head.begin()
    stage.propose(0, attempt, [1])
    answer = stage.prepared(attempt, 1.0, now=0.0)
    head.acknowledged(0, attempt, None, 3.0)
    decided = head.acknowledged(1, attempt, answer.refused, answer.squared_norm)
    assert decided.stages == (0, 1)
    assert decided.squared_norm == 4.0
    assert stage.tick(29.0) is None
    again = stage.tick(30.0)
    assert head.acknowledged(1, again.attempt, again.refused, again.squared_norm).stages == (1,)


def test_the_deadline_aborts_and_a_late_acknowledgement_does_not_commit():
    head = Coordinator(2)
    attempt = head.begin()
    head.acknowledged(0, attempt, None, 1.0)
    assert head.give_up("timeout").refused == "timeout"
    assert head.acknowledged(1, attempt, None, 1.0).refused == "timeout"


def test_schedules_of_messages_never_split_a_step():
    """Any order, loss and repetition: a stage only takes what all have prepared, with one set, and
    the head never alone."""
    committed = aborted = 0
    for seed in range(1500):
        rng = random.Random(seed)
        count = rng.randint(2, 5)
        head, stages = Coordinator(count), [Participant() for _ in range(count)]
        proposal = [1, 2]
        for stage in stages:
            for m in proposal if rng.random() < 0.9 else [1]:
                stage.accumulated(m)
        attempt = head.begin()
        mail = [("propose", i) for i in range(count)]
        now, taken, prepared, refused = 0.0, set(), set(), False
        for _ in range(300):
            now += 1.0
            if now == 50.0 and (decided := head.give_up("timeout")):
                refused = True
                mail += [("decision", i, decided) for i in decided.stages]
            for i, stage in enumerate(stages):
                if again := stage.tick(now):
                    mail.append(("acknowledge", i, again))
            if not mail:
                continue
            letter = mail.pop(rng.randrange(len(mail)))
            if rng.random() < 0.15:
                continue  # lost
            if rng.random() < 0.15:
                mail.append(letter)  # twice
            kind, i = letter[0], letter[1]
            action = None
            if kind == "propose":
                action = stages[i].propose(0, attempt, proposal)
                if action == "prepare":
                    action = stages[i].prepared(attempt, 1.0, now)
                    prepared.add(i)
                if isinstance(action, StepAnswer):
                    mail.append(("acknowledge", i, action))
            elif kind == "acknowledge":
                decided = head.acknowledged(
                    i, letter[2].attempt, letter[2].refused, letter[2].squared_norm
                )
                refused |= decided is not None and decided.refused is not None
                mail += (
                    [("decision", j, decided) for j in decided.stages if j > 0 or decided.refused]
                    if decided
                    else []
                )
            elif kind == "decision":
                decided = letter[2]
                action = (
                    stages[i].abort(0, attempt) if decided.refused else stages[i].commit(0, attempt)
                )
            elif kind == "done" and head.done(i, attempt):
                action = stages[0].commit(0, attempt)
                taken.add(0) if action == "take" else None
                assert taken - {0}, seed  # somebody else first
                continue
            if action == "take":
                assert prepared == set(range(count)), seed
                assert i not in taken, seed
                taken.add(i)
            if action in ("take", "confirm"):
                mail.append(("done", i))
        if taken:
            assert not refused, seed
            # the head dies now: one has taken it, the others can
            survivors = {(s.step, s.phase == "prepared") for s in stages[1:]}
            assert (1, False) in survivors <= {(1, False), (0, True)}, seed
            committed += 1
        elif refused:
            aborted += 1
            assert all(s.step == 0 for s in stages)
    assert committed > 300
    assert aborted > 300


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"step": 6}, "newer"),
        ({"step": 4}, "step"),
        ({"crew": b"x" * 16}, "crew"),
        ({"stage": 2}, "stage"),
    ],
)
def test_the_past_is_dropped(changed, reason):
    fence = Fence(Place(b"c" * 16, 0, 0), 3)
    place = {"crew": b"c" * 16, "stage": 1, "step": 5, **changed}
    assert fence.check(Place(**place), 1, 5) == reason
    assert fence.dropped == ({reason: 1} if reason else {})


def test_a_sender_that_the_crew_does_not_have_is_dropped_and_its_head_is_not():
    fence = Fence(Place(b"c" * 16, 1, 0), 3)
    assert fence.check(Place(b"c" * 16, 0, 5), 0, 5) is None
    assert fence.check(Place(b"c" * 16, 3, 5), 3, 5) == "stage"


def test_the_head_steps_with_the_first_other_stage_and_not_before_a_decision():
    head = Coordinator(3)
    attempt = head.begin()
    assert not head.done(1, attempt)
    for stage in range(3):
        head.acknowledged(stage, attempt, None, 1.0)
    assert not head.done(0, attempt)
    assert head.done(1, attempt)
    assert not head.done(2, attempt)
    assert not head.unfinished
    head.acknowledged(1, head.begin(), "not_finite", 0.0)
    assert not head.done(1, head.attempt)
    assert head.unfinished
