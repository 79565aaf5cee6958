"""Calls of a head: repeated with the next crew, smaller if memory is short, never twice for a
completed step."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import structlog
import torch

from swarmnode.config import LoraSettings, TrainingConfig
from swarmnode.errors import DeviceError, EngineGone, PeerError, PeerTimeout
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.stages.stage_frames import DEVICE_REASON
from swarmnode.stages.trainer import crew_policy
from swarmnode.stages.trainer.crew_policy import SLOW_TOKEN_SECONDS, CrewPolicy
from swarmnode.stages.trainer.head import CrewStepResult, WorkRefused
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters
from swarmnode.trainer.update import UpdateStatistics

LINEAGE = b"l" * 32


class Model:
    """The part of a `CrewModel` that a call without a crew needs."""

    text = SimpleNamespace(fingerprint=b"f" * 32)
    policy = SimpleNamespace(lora=LoraSettings())
    placement = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


class Crew:
    """The head of one crew. Its calls fail in turn with `errors`, then they succeed.

    An error may be a pair (error, number of steps of the crew after it).
    """

    stages = 3
    usable = True

    def __init__(self, *errors, step=5):
        self.errors = list(errors)
        self.participant = SimpleNamespace(step=step)
        self.calls = []

    def _fail(self, *call):
        self.calls.append(call)
        if self.errors:
            error, self.usable = self.errors.pop(0)
            raise error

    async def score(self, rows, temperature, tokens):
        self._fail(tokens)
        return ["scored"] * len(rows)

    async def update(self, rows, cfg, divisor, rate):
        self.rows = rows
        self._fail(cfg.per_device_train_tokens, len(rows), rate)
        return CrewStepResult(loss=1.0)


class Runner:
    """A `StageRunner` that has one crew after another."""

    def __init__(self, *crews):
        self.crews = list(crews)
        self.looks = 0

    def head(self):
        return self.crews[0] if self.crews and self.crews[0].usable else None

    def wait(self, what, seconds):
        self.looks += 1
        found = what()
        if found is None and self.crews:
            self.crews.pop(0)  # the crew ends, and the next one forms
        return found

    def members(self):
        return ("a", "b")

    def led_lineage(self):
        return LINEAGE

    def lost_leadership(self, lineage):
        return not self.crews

    def call_head(self, head, work):
        call = work(head)
        try:
            call.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it waits")


def policy_of(*crews, **training):
    training = TrainingConfig(per_device_train_tokens=4096, **training)
    return CrewPolicy(training, Model(), Runner(*crews), LINEAGE, threading.Event())


ROWS = [Row([1] * 200, [2] * 100)] * 6


def some_rows(*peers):
    group = TrainingGroup([Row([1], [2]), Row([1], [3])], [[-1.0]] * 2, [1.0, 0.0], [1.0] * 2)
    return assemble([replace(group, peer=peer) for peer in peers], "grpo")


ENDED = (PeerError("stage 1 is gone"), False)
LATE = (PeerTimeout("nothing arrived"), False)


def test_call_is_repeated_with_the_next_crew():
    crews = [Crew(ENDED), Crew(ENDED), Crew()]
    assert policy_of(*crews).score(ROWS, 1.0) == ["scored"] * 6
    assert [len(crew.calls) for crew in crews] == [1, 1, 1]
    assert len({tuple(crew.calls) for crew in crews}) == 1


def test_a_call_ends_when_another_node_leads():
    with pytest.raises(EngineGone, match="another node"):
        policy_of(Crew(ENDED)).score(ROWS, 1.0)


TOO_SMALL = (WorkRefused(1, DEVICE_REASON, divisible=False), True)


@pytest.mark.parametrize(
    "refusals",
    [[(WorkRefused(1, "not_finite", divisible=True), True)], [TOO_SMALL, TOO_SMALL]],
    ids=["not finite", "a member too small for one row"],
)
def test_a_refused_call_is_repeated_under_the_same_head(refusals):
    crew = Crew(*refusals)
    assert policy_of(crew).score(ROWS, 1.0) == ["scored"] * 6
    assert len(crew.calls) == len(refusals) + 1


def test_scores_in_halves_until_a_single_row_does_not_fit():
    halved = (WorkRefused(0, DEVICE_REASON, divisible=True), True)
    crew = Crew(halved, halved, (WorkRefused(0, DEVICE_REASON, divisible=False), True))
    policy = policy_of(crew)
    with pytest.raises(DeviceError, match="a row of 300 tokens"):
        policy.score(ROWS, 1.0)
    sizes = [tokens for (tokens,) in crew.calls]
    assert sizes == sorted(set(sizes), reverse=True)
    assert policy.statistics().oom_retries == 2


def test_slow_crew_gets_smaller_calls():
    crews = [Crew(LATE), Crew(LATE), Crew()]
    policy_of(*crews).score(ROWS, 1.0)
    sizes = [tokens for crew in crews for (tokens,) in crew.calls]
    assert sizes == sorted(set(sizes), reverse=True)
    slow = Crew(LATE), Crew()
    policy_of(*slow).update(some_rows("", ""))
    assert slow[1].calls[0][0] < slow[0].calls[0][0]


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ([5, 5], [1, 1]),
        ([5, 4], [1, 1]),
        ([5, 6], [1, 0]),
        ([5, 7], [1, 0]),
        ([5, 3, 4], [1, 1, 0]),
    ],
)
def test_step_of_a_lost_crew_is_repeated_only_if_it_is_not_taken(steps, calls):
    """`steps` are those from which one crew after another begins; all but the last end."""
    crews = [*(Crew(ENDED, step=step) for step in steps[:-1]), Crew(step=steps[-1])]
    assert policy_of(*crews).update(some_rows("")).stepped
    assert [len(crew.calls) for crew in crews] == calls


class Refusing(Crew):
    """A head whose updates are refused in turn, for (reason, divisible)."""

    def __init__(self, *refusals):
        super().__init__()
        self.refusals = list(refusals)

    async def update(self, rows, cfg, divisor, rate):
        done = await super().update(rows, cfg, divisor, rate)
        if not self.refusals:
            return done
        refused, divisible = self.refusals.pop(0)
        return CrewStepResult(refused=refused, divisible=divisible)


def test_a_step_that_does_not_fit_is_cut_smaller():
    crew = Refusing((DEVICE_REASON, True), (DEVICE_REASON, True))
    policy = policy_of(crew)
    assert policy.update(some_rows("", "", "")).stepped
    sizes = [tokens for tokens, *_ in crew.calls]
    assert sizes == sorted(set(sizes), reverse=True)
    assert policy.statistics().oom_retries == 2


@pytest.mark.parametrize(
    ("refusal", "skipped"),
    [
        (("not_finite", True), "not_finite"),
        ((DEVICE_REASON, False), "refused"),
        (("session", True), "refused"),
    ],
)
def test_refused_step_is_skipped_with_its_reason(refusal, skipped):
    crew = Refusing(refusal)
    done = policy_of(crew).update(some_rows(""))
    assert (done.stepped, done.skipped, len(crew.calls)) == (False, skipped, 1)


def test_peers_rows_that_fail_a_step_are_excluded():
    policy, taken = policy_of(Crew()), []

    def learn(rows, indices, without):
        taken.append((indices, without))
        return UpdateStatistics(stepped=not any(rows.external[i] for i in indices))

    policy._learn = learn
    done = policy.update(some_rows("", "p"))
    assert done.stepped
    assert done.refused == {1: "no_gradient"}
    assert taken == [([0, 1, 2, 3], frozenset()), ([0, 1], frozenset({1}))]


# Time that a head waits for its crew.


class Away(Runner):
    """The wait for a crew that is complete after `together` seconds and exists for `there`
    seconds."""

    def __init__(self, together, there, clock):
        super().__init__(Crew(step=7))
        self.together, self.there, self.clock = together, there, clock

    def wait(self, what, seconds):
        self.clock[0] += seconds
        return what()

    def head(self):
        return self.crews[0] if self.clock[0] >= self.together else None

    def led_lineage(self):
        return LINEAGE if self.clock[0] < self.there else None


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(crew_policy.time, "monotonic", lambda: now[0])
    return now


def engine(runner):
    return CrewPolicy(TrainingConfig(), Model(), runner, LINEAGE, threading.Event())


def test_a_stage_may_take_an_hour_to_be_restored(clock, tmp_path):
    assert engine(Away(3600.0, 1e9, clock)).restore(tmp_path, torch.Generator()).step == 7
    assert clock[0] >= 3600.0


def test_wait_for_a_crew_is_bounded(clock, tmp_path):
    with pytest.raises(PeerTimeout, match="no crew for 660 s"):
        engine(Away(1e9, 1000.0, clock)).restore(tmp_path, torch.Generator())
    assert 1600.0 <= clock[0] < 1700.0


def test_waiting_ends_when_the_node_stops(clock, tmp_path):
    waiting = engine(Away(1e9, 1e9, clock))
    waiting._stop.set()
    with pytest.raises(EngineGone, match="stopping"):
        waiting.score(ROWS, 1.0)


@pytest.mark.parametrize(("saved", "step", "rewards"), [(LINEAGE, 9, 0.5), (b"m" * 32, 5, None)])
def test_restarted_head_repeats_no_group_number(tmp_path, saved, step, rewards):
    policy, rng = policy_of(Crew(step=5)), torch.Generator()
    counters = Counters(step=9, sequence=70, crew=saved.hex(), reward_held_out=0.5)
    state.write(tmp_path, policy.snapshot(rng, counters))
    restored = policy.restore(tmp_path, rng)
    assert (restored.sequence, restored.step) == (70, step)
    assert restored.reward_held_out == rewards


def test_slow_sampling_recommends_a_copy_once():
    policy = policy_of()
    with structlog.testing.capture_logs() as logs:
        for seconds in (SLOW_TOKEN_SECONDS, 0.3, 0.4):
            policy._recommend_copy(seconds)
    assert [(log["latency_seconds"], log["remedy"]) for log in logs] == [
        (0.3, 'stages.policy_copy = "memory"')
    ]


def test_a_crew_learns_a_peers_answer_up_to_its_first_masked_token():
    rows = [Row([1], [2, 3, 4], [True, True, False]), Row([1], [5, 6], [False, True])]
    rows += [Row([1], [7, 8])]
    group = TrainingGroup(
        rows, [[-1.0] * len(row.completion) for row in rows], [1.0, 1.0, 0.0], [1.0] * 3, "p"
    )
    crew = Crew()
    lost = replace(group, rows=[rows[1], rows[1], rows[2]], learnt=[2] * 3)
    lost = replace(lost, sampler_logprobs=[[-1.0] * 2] * 3)
    both = assemble([replace(group, learnt=[3, 2, 2]), lost], "grpo")
    assert policy_of(crew).update(both).refused == {1: "improbable"}
    assert [each.completion_ids for each in crew.rows] == [[2, 3]]
    assert [each.sampler_logprobs for each in crew.rows] == [[-1.0, -1.0]]
