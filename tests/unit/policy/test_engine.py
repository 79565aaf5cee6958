"""Engines: a completion does not depend on concurrent requests, and the records equal the sampled
tokens."""

from collections import Counter

import pytest
import torch

from swarmnode.errors import DeviceError
from swarmnode.policy import slots
from swarmnode.policy.engine import continuous
from swarmnode.policy.engine.continuous import BURST, Continuous
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.logprobs import score
from swarmnode.policy.micro import MicroBatcher
from tests.support.gaps import gaps, greedy, rows_of

KINDS = ["llama", "qwen2", "qwen3", "gpt2"]
PROMPTS = [
    "Calculate 10 + 8.",
    "12",
    "Find the Least Common Multiple (LCM) of these numbers: 6, 9",
    "Spell this word backward: tree",
]
BOUND = 1e-4
"""Nats between a recorded log-probability and the one that training computes, float32."""


def engine_of(policy, sampling, tokens=16384, seed=0, batcher=None):
    return Continuous(
        policy, batcher or MicroBatcher(tokens), sampling, policy.random_generator(seed)
    )


def steps_of(engine):
    """Return a list that gets one entry per decoding step."""
    steps, step = [], engine._step
    engine._step = lambda version: steps.append(version) or step(version)
    return steps


def drained(engine, version=0, bound=2000):
    """Return all finished requests by number."""
    found = {}
    for _ in range(bound):
        for finished in engine.finished(version):
            found[finished.number] = finished.sample
        if not engine.statistics().unfinished:
            return found
    raise AssertionError("it never ends")


def submitted(engine, prompts=PROMPTS):
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt))
    return engine


def move(policy):
    """Update the policy."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(0.02 * noise)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 64])
def test_greedy_equals_transformers_for_any_batch_size(policies, kind, rows):
    policy = policies[kind]
    sampling = Sampling(2, 12, 0.0)
    longest = max(len(policy.encode_prompt(p)) for p in PROMPTS) + sampling.max_tokens
    samples = drained(submitted(engine_of(policy, sampling, rows * longest)))
    for number, prompt in enumerate(PROMPTS):
        expected = greedy(policy, policy.encode_prompt(prompt), 12)
        assert [c.ids for c in samples[number].completions] == [expected] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_logprobs_are_those_that_training_recomputes(policies, kind):
    policy = policies[kind]
    samples = drained(submitted(engine_of(policy, Sampling(4, 24, 0.7), tokens=500, seed=3)))
    lengths = {len(ids) for _, ids in rows_of(samples.values())}
    assert len(lengths) > 1, "some end before others"
    assert gaps(policy, samples.values(), 0.7).max() < BOUND


def test_sampled_frequencies_are_those_of_lockstep(embedded):
    """Both engines sample the same distribution of first tokens: 2,000 for one question each."""
    samples = drained(submitted(engine_of(embedded, Sampling(500, 1)), [PROMPTS[0]] * 4))
    first = Counter(c.ids[0] for s in samples.values() for c in s.completions)
    (other,) = generate(embedded, [PROMPTS[0]], Sampling(2000, 1), embedded.random_generator(1))
    second = Counter(c.ids[0] for c in other.completions)
    assert sum(abs(first[t] - second[t]) for t in first | second) / 2000 < 0.2


def test_ended_rows_cost_no_further_steps(policies):
    """With different lengths, the number of steps is still about the sampled tokens divided by the
    number of rows."""
    policy = policies["llama"]
    rows = 8
    longest = max(len(policy.encode_prompt(p)) for p in PROMPTS) + 100
    engine = submitted(engine_of(policy, Sampling(8, 100), rows * longest), PROMPTS)
    steps, samples = steps_of(engine), drained(engine)
    lengths = [len(c.ids) for s in samples.values() for c in s.completions]
    assert min(lengths) < 50 < max(lengths)
    assert len(steps) <= sum(lengths) / rows + 100


def test_completion_spans_versions_with_token_attribution(policies):
    policy = policies["qwen2"].clone()
    engine = submitted(engine_of(policy, Sampling(2, 60)))
    assert engine.finished(7) is not None
    assert engine.statistics().oldest == 7
    with engine.pause():
        move(policy)
    engine.submit(Request(9, PROMPTS[0]))
    samples = drained(engine, version=8)
    crossed = [c for s in samples.values() for c in s.completions if set(c.versions) == {7, 8}]
    assert crossed
    assert all(c.versions == sorted(c.versions) and len(c.versions) == len(c.ids) for c in crossed)
    assert gaps(policy, [samples[9]]).max() < BOUND, "what began later is of the new weights"


def test_completions_begun_after_an_update_use_the_new_weights(policies):
    """This includes later completions of a request whose first completions began before the
    update."""
    policy = policies["qwen2"].clone()
    longest = len(policy.encode_prompt(PROMPTS[0])) + 20
    engine = engine_of(policy, Sampling(6, 20), tokens=2 * longest)
    engine.submit(Request(1, PROMPTS[0]))
    assert engine.finished(7) is not None
    with engine.pause():
        move(policy)
    sample = drained(engine, version=8)[1]
    later = [c for c in sample.completions if set(c.versions) == {8}]
    assert later
    again = score(policy, [(sample.prompt_ids, c.ids) for c in later], 1.0)
    for completion, expected in zip(later, again, strict=True):
        assert completion.logprobs == pytest.approx(expected, abs=BOUND)


def test_a_request_that_is_cancelled_disturbs_no_other(policies):
    policy = policies["llama"]
    sampling = Sampling(2, 12, 0.0)
    engine = submitted(engine_of(policy, sampling, tokens=3 * 80))
    engine.cancel(1)
    engine.finished(0)
    engine.cancel(2)
    samples = drained(engine)
    assert 1 not in samples
    for number in set(samples) - {2}:
        assert samples[number].completions[0].ids == greedy(
            policy, policy.encode_prompt(PROMPTS[number]), 12
        )


def test_out_of_memory_halves_active_rows_without_loss(policies, monkeypatch):
    policy = policies["llama"]
    batcher = MicroBatcher(16384)
    engine = submitted(engine_of(policy, Sampling(4, 12, 0.0), batcher=batcher))
    real = slots.next_logits

    def scarce(policy, token, *inputs):
        if len(token) > 5:
            raise torch.OutOfMemoryError("out of memory")
        return real(policy, token, *inputs)

    monkeypatch.setattr(slots, "next_logits", scarce)
    samples = drained(engine)
    monkeypatch.undo()
    assert batcher.statistics().oom_retries > 0
    for number, prompt in enumerate(PROMPTS):
        assert [c.ids for c in samples[number].completions] == [
            greedy(policy, policy.encode_prompt(prompt), 12)
        ] * 4


def test_single_row_that_does_not_fit_is_an_error(policies, monkeypatch):
    def none(*inputs):
        raise torch.OutOfMemoryError("out of memory")

    engine = submitted(engine_of(policies["llama"], Sampling(1, 100)), PROMPTS[:1])
    steps = steps_of(engine)
    engine.finished(0)
    assert len(steps) <= BURST, "a call ends though no completion does"
    monkeypatch.setattr(slots, "next_logits", none)
    with pytest.raises(DeviceError, match="out of memory with"):
        engine.finished(0)


def test_a_whole_burst_returns_all_that_ended_in_it(policies, monkeypatch):
    policy = policies["llama"]
    expected = drained(submitted(engine_of(policy, Sampling(2, 12, 0.0))))
    monkeypatch.setattr(continuous, "WHOLE_BURST", {"cpu": 64})
    engine = submitted(engine_of(policy, Sampling(2, 12, 0.0)))
    found = {finished.number: finished.sample for finished in engine.finished(0)}
    assert not engine.statistics().unfinished
    assert found == expected


def test_lockstep_answers_everything_at_once(embedded):
    rng = embedded.random_generator(3)
    sampling = Sampling(2, 8)
    engine = submitted(Lockstep(lambda prompts, count: generate(embedded, prompts, sampling, rng)))
    engine.cancel(1)
    found = {f.number: f.sample for f in engine.finished(0)}
    assert list(found) == [0, 2, 3]
    assert list(found.values()) == generate(
        embedded, [PROMPTS[i] for i in found], sampling, embedded.random_generator(3)
    )
    assert engine.finished(0) == []
