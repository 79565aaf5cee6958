"""The choice of an engine, and engines that stop, fail or are stale."""

from contextlib import contextmanager

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.errors import DeviceError
from swarmnode.policy.engine.keeper import (
    DEADLINE,
    FAILURES,
    SHORT,
    TRIALS,
    Canary,
    EngineChoice,
    Keeper,
    answered,
    keeper,
)
from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling, generate
from swarmnode.policy.micro import MicroBatcher

SAMPLE = GroupSample([1], [SampledCompletion([2, 3], [-0.5, -0.5], "x", "eos")])
TRUTH = [-1.0, -2.0]
LONG = ["continuous"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Scripted:
    """An engine that answers everything in `seconds`, unless it was made to be ill. Its tokens are
    two per request."""

    def __init__(self, clock, seconds=1.0, ill="", behind=0.0):
        self.clock, self.seconds, self.ill, self.behind = clock, seconds, ill, behind
        self.requests, self.steps, self.tokens = [], 0, 0

    def submit(self, request):
        self.requests.append(request)

    def cancel(self, number):
        if self.ill == "failed":
            raise RuntimeError("still broken")
        self.requests = [r for r in self.requests if r.number != number]

    def finished(self, version):
        if self.ill == "failed":
            raise RuntimeError("device-side assert\nmore of it")
        if self.ill == "silent" or not self.requests:
            return []
        self.clock.now += self.seconds
        self.steps += 1
        self.tokens += 2 * len(self.requests)
        done, self.requests = [FinishedRequest(r.number, SAMPLE) for r in self.requests], []
        return done

    @contextmanager
    def pause(self):
        yield

    def score(self, prompt_ids, ids):
        return [x + self.behind for x in TRUTH]

    def ahead(self, count):
        return 3

    def statistics(self):
        return GenerationStatistics(self.steps, self.tokens, len(self.requests))


@pytest.fixture
def clock():
    return Clock()


def kept(clock, engines, choice=None):
    """(keeper, kinds): the engines are built in turn, of the kinds that are noted."""
    made, kinds = iter(engines), []

    def build(kind):
        kinds.append(kind)
        return next(made)

    canary = Canary([1], [2, 3], lambda prompt, ids: TRUTH, 0.01)
    return Keeper(choice or EngineChoice.of(LONG, 500, ""), build, canary, clock, clock.wait), kinds


def asked(engine, numbers=(1, 2)):
    for number in numbers:
        engine.submit(Request(number, "?"))
    return engine


@pytest.mark.parametrize(
    ("options", "longest", "obstacle", "kind", "reason"),
    [
        (["lockstep"], 500, "", "lockstep", "configured"),
        (["continuous"], 8, "", "continuous", "configured"),
        (["continuous"], 500, "sliding", "lockstep", "sliding"),
        ([], SHORT, "", "lockstep", "at most 32 tokens"),
    ],
)
def test_what_needs_no_measuring_is_not_measured(options, longest, obstacle, kind, reason):
    choice = EngineChoice.of(options, longest, obstacle)
    assert (choice.kind, choice.trials) == (kind, [])
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("lockstep", "continuous", "chosen"), [(3.0, 1.0, "continuous"), (1.0, 3.0, "lockstep")]
)
def test_selects_the_faster_engine_and_logs_the_reason(clock, lockstep, continuous, chosen):
    seconds = [lockstep, continuous] * TRIALS
    seconds[0] *= 10  # warming up
    engine, kinds = kept(
        clock, [Scripted(clock, each) for each in [*seconds, 1.0]], EngineChoice.of([], 500, "")
    )
    with capture_logs() as said:
        for _ in range(2 * TRIALS):
            assert engine.ahead(8) == 0, "what is measured is not left half done"
            assert len(asked(engine).finished(0)) == 2
    assert engine.choice.kind == kinds[-1] == chosen
    assert engine.choice.trials == []
    assert engine.ahead(8) == 3
    (line,) = [entry for entry in said if entry["event"] == "engine"]
    assert line["engine"] == chosen
    assert (
        line["reason"]
        == f"continuous {4 / continuous:.0f} tokens/s, lockstep {4 / lockstep:.0f} tokens/s"
    )


@pytest.mark.parametrize(
    ("ill", "word"),
    [("silent", "no decoding step in 20 seconds"), ("failed", "device-side assert")],
)
def test_failed_engine_is_rebuilt_with_its_requests(clock, ill, word):
    engine, kinds = kept(clock, [Scripted(clock, ill=ill), Scripted(clock)])
    asked(engine)
    with capture_logs() as said:
        while not (done := engine.finished(0)):
            assert clock.now <= DEADLINE + 1
    assert [one.number for one in done] == [1, 2]
    assert (engine.rebuilds, kinds) == (1, LONG * 2)
    (line,) = [entry for entry in said if entry["event"] == "engine rebuilt"]
    assert (line["reason"], line["resubmitted"]) == (ill, 2)
    assert word in line["detail"]
    assert "more of it" not in str(said)


def test_an_engine_with_nothing_to_do_is_not_silent(clock):
    engine, _ = kept(clock, [Scripted(clock)])
    clock.now += 10 * DEADLINE
    assert engine.finished(0) == []
    asked(engine)
    assert len(engine.finished(0)) == 2
    assert engine.rebuilds == 0


def test_repeated_failures_end_with_the_remedy(clock):
    engine, _ = kept(clock, [Scripted(clock, ill="failed") for _ in range(FAILURES + 1)])
    asked(engine)
    for _ in range(FAILURES):
        assert engine.finished(0) == []
    with pytest.raises(DeviceError, match="lockstep"):
        engine.finished(0)


def test_out_of_memory_does_not_rebuild_the_engine(clock):
    class Full(Scripted):
        def finished(self, version):
            raise torch.OutOfMemoryError("out of memory")

    engine, _ = kept(clock, [Full(clock)])
    with pytest.raises(torch.OutOfMemoryError):
        asked(engine).finished(0)
    assert engine.rebuilds == 0


@pytest.mark.parametrize("behind", [0.1, float("nan")])
def test_stale_engine_is_rebuilt(clock, behind):
    engine, kinds = kept(clock, [Scripted(clock, behind=behind), Scripted(clock, behind=0.001)])
    asked(engine)
    with engine.pause():
        pass
    assert (engine.rebuilds, kinds) == (1, LONG * 2)
    with engine.pause():
        pass
    assert engine.rebuilds == 1, "rounding is no reason"
    assert len(engine.finished(0)) == 2


def test_falls_back_to_lockstep_if_rebuilding_fails(clock):
    engine, kinds = kept(
        clock, [Scripted(clock, behind=0.1), Scripted(clock, behind=0.1), Scripted(clock)]
    )
    asked(engine)
    with engine.pause():
        pass
    assert kinds == [*LONG * 2, "lockstep"]
    assert engine.choice.kind == "lockstep"
    assert len(engine.finished(0)) == 2


class CannotScore(Scripted):
    """An engine whose cache is not the model's."""

    def score(self, prompt_ids, ids):
        raise ValueError("The expanded size of the tensor (16) must match the existing size (8)")


def test_an_engine_that_cannot_score_gives_way_to_lockstep(clock):
    engine, kinds = kept(clock, [CannotScore(clock), CannotScore(clock), Scripted(clock)])
    asked(engine)
    with engine.pause():
        pass
    assert kinds == [*LONG * 2, "lockstep"]
    assert len(engine.finished(0)) == 2


@pytest.mark.parametrize("error", [ValueError, AttributeError, IndexError])
def test_whatever_an_engine_raises_it_is_built_anew(clock, error):
    class Broken(Scripted):
        def finished(self, version):
            raise error("a model's own")

    engine, _ = kept(clock, [Broken(clock), Scripted(clock)])
    asked(engine)
    assert engine.finished(0) == []
    assert len(engine.finished(0)) == 2


def test_no_canary_after_a_failed_update(clock):
    engine, _ = kept(clock, [Scripted(clock, behind=0.1)])
    with pytest.raises(KeyError), engine.pause():
        raise KeyError
    assert engine.rebuilds == 0


def test_canary_detects_wrong_weights_of_a_real_engine(policies):
    policy = policies["qwen2"].clone()
    engine = keeper(policy, MicroBatcher(4096), LONG, Sampling(2, 40), policy.random_generator(0))
    canary = Canary.of(policy)
    assert canary(engine) < canary.bound / 10
    other = policy.clone()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.05)
    assert Canary.of(other)(engine) > canary.bound


def test_both_engines_answer_all_prompts_in_order(policies):
    policy = policies["llama"]
    prompts = ["12", "Calculate 10 + 8.", "Spell this word backward: tree"]
    for options in (["lockstep"], LONG):
        engine = keeper(
            policy, MicroBatcher(4096), options, Sampling(2, 12, 0.0), policy.random_generator(0)
        )
        found = answered(engine, prompts)
        expected = generate(policy, prompts, Sampling(2, 12, 0.0), policy.random_generator(0))
        assert [[c.ids for c in s.completions] for s in found] == [
            [c.ids for c in s.completions] for s in expected
        ]
