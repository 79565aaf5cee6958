"""The choice of an engine, and lockstep in place of an engine that fails."""

from contextlib import contextmanager

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.engine.selector import (
    SHORT,
    EngineChoice,
    EngineSelector,
)
from swarmnode.policy.generate import GroupSample, SampledCompletion

SAMPLE = GroupSample([1], [SampledCompletion([2, 3], [-0.5, -0.5], "x", "eos")])
LONG = ["continuous"]


class Scripted:
    """An engine that answers everything, or raises `error`. Its tokens are two per request."""

    def __init__(self, error=None):
        self.error = error
        self.requests, self.steps, self.tokens = [], 0, 0

    def submit(self, request):
        self.requests.append(request)

    def cancel(self, number):
        self.requests = [r for r in self.requests if r.number != number]

    def finished(self, version):
        if self.error is not None:
            raise self.error
        if not self.requests:
            return []
        self.steps += 1
        self.tokens += 2 * len(self.requests)
        done, self.requests = [FinishedRequest(r.number, SAMPLE) for r in self.requests], []
        return done

    @contextmanager
    def pause(self):
        yield

    def ahead(self, count):
        return 3

    def statistics(self):
        return GenerationStatistics(self.steps, self.tokens, len(self.requests))


def selector(engines):
    """(selector, kinds): the engines are built in turn, of the kinds that are noted."""
    made, kinds = iter(engines), []

    def build(kind):
        kinds.append(kind)
        return next(made)

    return EngineSelector(EngineChoice.of(LONG, 500, ""), build), kinds


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
        ([], SHORT + 1, "", "continuous", "more than 32 tokens"),
    ],
)
def test_engine_follows_from_settings_and_model(options, longest, obstacle, kind, reason):
    choice = EngineChoice.of(options, longest, obstacle)
    assert choice.kind == kind
    assert reason in choice.reason


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, AttributeError, IndexError])
def test_lockstep_answers_the_requests_of_a_failed_engine(kind):
    failed = Scripted(error=kind("device-side assert\nmore of it"))
    engine, kinds = selector([failed, Scripted()])
    asked(engine)
    with capture_logs() as said:
        assert engine.finished(0) == []
    assert [one.number for one in engine.finished(0)] == [1, 2]
    assert (engine.failures, kinds) == (1, ["continuous", "lockstep"])
    (line,) = [entry for entry in said if entry["event"].startswith("engine failed")]
    assert (line["detail"], line["resubmitted"]) == ("device-side assert", 2)


def test_an_error_of_lockstep_is_raised():
    lockstep = Scripted(error=RuntimeError("still broken"))
    engine, _ = selector([Scripted(error=RuntimeError("broken")), lockstep])
    assert asked(engine).finished(0) == []
    with pytest.raises(RuntimeError, match="still broken"):
        engine.finished(0)


def test_out_of_memory_does_not_replace_the_engine():
    engine, kinds = selector([Scripted(error=torch.OutOfMemoryError("memory"))])
    with pytest.raises(torch.OutOfMemoryError):
        asked(engine).finished(0)
    assert (engine.failures, kinds) == (0, LONG)
