"""Decoding steps of slots that are recorded once per shape.

A CPU has no CUDA graphs; here a recording runs the step again on the memory of its first run.
"""

import contextlib

import pytest

from swarmnode.policy import recorded
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.engine.selector import answered
from swarmnode.policy.generate import Sampling
from tests.support.gaps import rows_of
from tests.unit.policy.test_engine import PROMPTS, engine_of


def answers(policy, tokens=16384):
    """Return greedy answers of the continuous engine."""
    return rows_of(answered(engine_of(policy, Sampling(2, 40, 0.0), tokens), PROMPTS))


class Graph:
    """A fake recording: it runs the step again and checks that keys and values have not moved."""

    def __init__(self, step, layers):
        self._step, self._layers = step, layers
        self._memory = [layer.keys.data_ptr() for layer in layers]
        self.replays = 0
        step()

    def replay(self):
        assert self._memory == [layer.keys.data_ptr() for layer in self._layers]
        self.replays += 1
        self._step()


@pytest.fixture
def graphs(monkeypatch):
    """Recordings that were made."""
    made, steps = [], []
    real = recorded.RecordedSteps.step

    def step(self, work, tokens, places, shape):
        steps.append(work.__self__)
        return real(self, work, tokens, places, shape)

    def record(policy, work):
        made.append(Graph(work, steps[-1]._layers))
        return made[-1]

    monkeypatch.setattr(recorded.RecordedSteps, "step", step)
    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(recorded, "recordable", lambda policy: True)
    monkeypatch.setattr(recorded, "side_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(recorded, "ROWS", 4)
    monkeypatch.setattr(recorded, "COLUMNS", 32)
    return made


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("tokens", [300, 16384])
def test_recorded_steps_sample_what_single_steps_sample(policies, kind, tokens, graphs):
    """If two rows fit, other rows wait. If all fit, rows end at different times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "recordable", lambda policy: False)
        expected = answers(policies[kind], tokens)
    assert not graphs
    assert answers(policies[kind], tokens) == expected
    assert sum(graph.replays for graph in graphs) > 2 * len(graphs)


def test_nothing_recorded_outlives_a_call(policies, graphs):
    engine = engine_of(policies["llama"], Sampling(2, 60, 0.0))
    engine.submit(Request(0, PROMPTS[0]))
    engine.finished(0)
    assert len(graphs) == 1
    assert not engine._slots._recorded._recordings
    engine.finished(0)
    assert len(graphs) > 1


def test_a_step_that_cannot_be_recorded_is_launched(policies, graphs, monkeypatch):
    expected = answers(policies["llama"])
    tried = []
    monkeypatch.setattr(recorded, "record", lambda policy, work: tried.append(policy))
    assert answers(policies["llama"]) == expected
    # one for each set of slots: those of the engine
    assert len(tried) == 1


def test_shapes_are_rounded_up(policies, graphs):
    steps = recorded.RecordedSteps(policies["llama"])
    assert steps.shape(1, 1) == (4, 32)
    assert steps.shape(4, 32) == (4, 32)
    assert steps.shape(5, 33) == (8, 64)
