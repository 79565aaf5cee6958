"""The policy on a CUDA device; skipped without one."""

import logging

import pytest
import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy import logprobs, recorded, slots
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import answered
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import collate, completion_logprobs, score
from swarmnode.policy.micro import MicroBatcher
from tests.support.gaps import gaps, rows_of

pytestmark = [
    pytest.mark.usefixtures("precision_restored"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["Calculate 10 + 8.", "12", "Find the Least Common Multiple (LCM) of these numbers: 6, 9"]
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gpt2"]
BIG = 0.5 * 2**30  # bytes this process may hold while memory is short


def load(directory, **settings):
    return load_policy(
        PolicyConfig.model_validate(
            {"model": str(directory), "devices": "cuda", "dtype": "float32"} | settings
        )
    )


def test_auto_is_the_gpu_in_bfloat16():
    policy = load_policy(PolicyConfig())
    assert (policy.device.type, policy.dtype) == ("cuda", torch.bfloat16)
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    groups = generate(policy, PROMPTS, Sampling(8, 8), policy.random_generator(1))
    assert 0 < gaps(policy, groups).max() < 0.5
    assert policy.statistics().device_memory_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [4, 16])
def test_recorded_logprobs_are_those_that_training_recomputes(model_dir, kind, tokens):
    policy = load(model_dir(kind))
    groups = generate(policy, PROMPTS, Sampling(4, tokens), policy.random_generator(1))
    assert gaps(policy, groups).max() < 1e-3


@pytest.fixture
def made(monkeypatch):
    """The recordings that were made."""
    found, real = [], recorded.record
    monkeypatch.setattr(
        recorded, "record", lambda policy, step: (found.append(real(policy, step)), found[-1])[1]
    )
    return found


def launched(work):
    """Return what `work` returns when steps are launched singly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "recordable", lambda policy: False)
        return work()


def scale(policy):
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.01)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_recorded_step_samples_what_single_launches_sample(model_dir, kind, made):
    policy = load(model_dir(kind))
    # another batch shape, then changed weights: every call records again
    for prompts, count in [(PROMPTS, 4), (PROMPTS[:1], 9), (PROMPTS, 4)]:
        before = len(made)
        sampled = lambda prompts=prompts, count=count: rows_of(
            generate(policy, prompts, Sampling(count, 24), policy.random_generator(1))
        )
        found = sampled()
        assert len(made) > before
        assert found == launched(sampled)
        scale(policy)
    assert all(graph is not None for graph in made)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_steps_of_rows_that_come_and_go(model_dir, kind, temperature, made):
    """Recorded steps equal single launches if few rows fit and weights change between calls."""
    policy = load(model_dir(kind))

    def sampled(tokens):
        engine = Continuous(
            policy, MicroBatcher(tokens), Sampling(3, 40, temperature), policy.random_generator(1)
        )
        return rows_of(answered(engine, PROMPTS))

    for tokens in (400, 16384):
        assert sampled(tokens) == launched(lambda tokens=tokens: sampled(tokens))
        scale(policy)
    assert len(made) >= 2
    assert all(graph is not None for graph in made)


def test_unrecordable_step_is_launched(model_dir, monkeypatch, caplog):
    policy = load(model_dir("llama"))
    real, steps = slots.next_logits, []

    def looks_at_a_value(policy, token, *rest):
        steps.append(int(token[0, 0]))  # a copy to the host: forbidden while recording
        return real(policy, token, *rest)

    monkeypatch.setattr(slots, "next_logits", looks_at_a_value)
    with caplog.at_level(logging.WARNING):
        groups = generate(policy, PROMPTS, Sampling(4, 12), policy.random_generator(1))
    assert "cannot record a decoding step" in caplog.text
    assert len(steps) == 11
    assert gaps(policy, groups).max() < 1e-3


def test_cpu_and_gpu_agree(model_dir):
    directory = model_dir("qwen2")
    here = load_policy(PolicyConfig(model=str(directory), devices="cpu"))
    groups = generate(here, PROMPTS, Sampling(4, 8), here.random_generator(1))
    assert gaps(here, groups).max() < 1e-4
    assert gaps(load(directory), groups).max() < 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_packed_rows_are_run_as_one_batch(model_dir, kind):
    """Packed rows equal the same rows run singly on a CPU, and the trial finds no difference."""
    directory = model_dir(kind)
    policy, here = load(directory), load_policy(PolicyConfig(model=str(directory), devices="cpu"))
    rows = [
        (prompt, [8 + i % 9 for i in range(length)])
        for prompt, lengths in [([5, 6, 7], [3, 40, 1, 9]), ([9] * 20, [17, 2, 30, 5])]
        for length in lengths
    ]
    assert logprobs.takes_way(policy, "packed")
    batch = collate(rows, policy.pad_id, policy.device)
    chosen, _ = logprobs.logprobs_by("packed", policy, batch, 1.0)
    expected, _ = logprobs.logprobs_by(
        "row by row", here, collate(rows, here.pad_id, here.device), 1.0
    )
    torch.testing.assert_close(chosen.cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("quantization", ["none", "8bit", "4bit"])
def test_an_adapter_learns_on_a_frozen_base(model_dir, quantization):
    if quantization != "none":
        pytest.importorskip("bitsandbytes")
    policy = load(model_dir("qwen2"), dtype="bfloat16", lora={"r": 8}, quantization=quantization)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    groups = generate(policy, PROMPTS, Sampling(4, 12), policy.random_generator(1))
    assert gaps(policy, groups).median() < 0.2
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2, fused=True)
    batch = collate(rows_of(groups), policy.pad_id, policy.device)
    losses = []
    for _ in range(12):
        logprobs, _ = completion_logprobs(policy, batch, 1.0)
        loss = -logprobs.sum() / batch.completion_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in n for n in moved)


@pytest.fixture
def short_of_memory():
    """Make the allocator refuse to hold more than `BIG` bytes, like a small card."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(BIG / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_passes_shrink_to_the_memory_there_is(model_dir, short_of_memory):
    policy = load(model_dir("llama"))
    many = [([5, 6, 7], [8 + i % 9] * 40) for i in range(40_000)]
    batcher = MicroBatcher(10_000_000)
    whole = batcher.score(policy, many, 1.0)
    assert batcher.statistics().oom_retries > 0
    assert 40 < batcher.tokens < 10_000_000
    assert torch.cuda.max_memory_reserved() <= BIG
    retries = batcher.statistics().oom_retries
    batcher.score(policy, many, 1.0)
    assert batcher.statistics().oom_retries == retries
    few = score(policy, many[:3], 1.0)
    assert all(a == pytest.approx(b, abs=1e-3) for a, b in zip(whole, few, strict=False))


def test_sampling_shrinks_to_the_memory_there_is(model_dir, short_of_memory):
    policy = load(model_dir("llama"))
    batcher = MicroBatcher(100_000_000)
    rng = policy.random_generator(1)
    groups = batcher.generate(policy, PROMPTS * 100, Sampling(64, 96), rng)
    assert batcher.statistics().oom_retries > 0
    assert len(groups) == 300
    assert gaps(policy, groups[:2]).max() < 1e-3
