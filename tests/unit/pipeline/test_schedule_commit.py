"""1F1B takes the time and keeps the inputs that it should; a step is taken by all stages with one
set of micro-batches, or by none."""

import heapq
import random

import pytest

from swarmnode.stages.stage_frames import Fence, Place
from swarmnode.stages.trainer.schedule_1f1b import Schedule


def simulate(
    stages: int,
    micro_batches: int,
    rng: random.Random | None = None,
):
    """Event by event: when all backwards are done, the most inputs each stage kept, and each
    stage's order of work."""
    schedules = [Schedule(i, stages) for i in range(stages)]
    limits = ["limited"] * (stages - 1) + ["last"]
    busy, peak = [False] * stages, [0] * stages
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
        seconds = {"forward": 1.0, "backward": 2.0, "learn": 3.0}[work[0]]
        seconds *= rng.uniform(0.5, 2) if rng else 1
        count += 1
        heapq.heappush(events, (now + seconds, count, i, work))

    start(0)
    while events:
        now, _, i, (kind, m) = heapq.heappop(events)
        busy[i] = False
        if kind == "forward":
            assert schedules[i + 1].forward_arrived(m, limits[i + 1])
        elif i > 0:
            assert schedules[i - 1].backward_arrived(m)
        for j in range(stages):
            start(j)
    return now, peak, orders


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 16), (8, 8)]
)
def test_bubble_and_stored_inputs_are_those_of_1f1b(stages, micro_batches):
    seconds, peak, orders = simulate(stages, micro_batches)
    assert seconds == (micro_batches + stages - 1) * 3.0
    assert all(pending <= 2 * (stages - i) for i, pending in enumerate(peak))
    for order in orders[:-1]:
        kinds = [kind for kind, _ in order]
        last = len(kinds) - kinds[::-1].index("forward")
        assert all(
            kinds[at : at + 2].count("backward") for at in range(kinds.index("backward"), last)
        ), "never two forwards in a row"


def test_every_micro_batch_completes_at_any_speed():
    for seed in range(50):
        rng = random.Random(seed)
        stages, count = rng.randint(1, 6), rng.randint(1, 12)
        _, peak, orders = simulate(stages, count, rng=rng)
        for i, order in enumerate(orders):
            last = {m for kind, m in order if kind in ("backward", "learn")}
            assert last == set(range(count)), seed
            assert peak[i] <= 2 * (stages - i)


def test_frames_that_come_twice_or_unasked_change_nothing():
    schedule = Schedule(0, 2)
    assert schedule.forward_arrived(7, "limited")
    assert not schedule.forward_arrived(7, "limited")
    assert not schedule.backward_arrived(7)  # not sent on yet
    assert schedule.next() == ("forward", 7)
    assert schedule.backward_arrived(7)
    assert not schedule.backward_arrived(7)
    assert schedule.next() == ("backward", 7)
    assert not schedule.forward_arrived(7, "limited")
    assert schedule.next() is None


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
