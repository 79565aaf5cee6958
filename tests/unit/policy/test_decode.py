"""Decoding with memory of fixed size equals decoding with a growing cache. Recorded steps are in
test_gpu_policy.py."""

import pytest
import torch
from transformers import DynamicCache

from swarmnode.policy import decode

PROMPTS = [[5, 9, 7, 12, 8], [11, 6], [9, 9, 4]]
GENERATIONS, STEPS = 3, 7


def prefilled(policy):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[policy.pad_id] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=policy.model.config)
    policy.logits(ids, mask, positions, 1, cache)
    return (
        cache,
        mask.repeat_interleave(GENERATIONS, 0),
        positions[:, -1:].repeat_interleave(GENERATIONS, 0),
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
@torch.no_grad()
def test_fixed_memory_computes_what_growing_memory_computes(policies, kind):
    policy = policies[kind]
    assert decode.has_fixed_form(policy)
    fixed = decode.FixedDecoder(policy, *prefilled(policy), GENERATIONS, STEPS)
    growing = decode.GrowingDecoder(policy, *prefilled(policy), GENERATIONS, STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        token = torch.randint(4, 40, (len(PROMPTS) * GENERATIONS,), generator=generator)
        ours, theirs = fixed(token), growing(token)
        assert ours.std() > 0.1
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("llama", decode.GrowingDecoder),
        ("mistral", decode.GrowingDecoder),
        ("gpt2", decode.GrowingDecoder),
        ("llama", decode.FixedDecoder),
        ("gpt2", decode.FixedDecoder),
    ],
)
@torch.no_grad()
def test_kept_rows_do_not_depend_on_dropped_rows(policies, kind, way):
    policy, count = policies[kind], len(PROMPTS) * GENERATIONS
    all_of_them = decode.GrowingDecoder(policy, *prefilled(policy), GENERATIONS, STEPS)
    some = way(policy, *prefilled(policy), GENERATIONS, STEPS)
    tokens = torch.randint(4, 40, (STEPS, count), generator=torch.Generator().manual_seed(0))
    left = torch.arange(count)
    for number, token in enumerate(tokens):
        torch.testing.assert_close(
            some(token[left]), all_of_them(token)[left], atol=1e-4, rtol=1e-4
        )
        if number in (1, 4):
            going_on = torch.arange(number % 2, len(left), 2)
            some.keep(going_on)
            left = left[going_on]
    assert left.tolist() == [1, 5]


@torch.no_grad()
def test_memory_grows_when_it_is_used_up(policies, monkeypatch):
    monkeypatch.setattr(decode, "ROOM", 2)
    policy = policies["qwen2"]
    fixed = decode.FixedDecoder(policy, *prefilled(policy), GENERATIONS, 40)
    growing = decode.GrowingDecoder(policy, *prefilled(policy), GENERATIONS, 40)
    sizes = set()
    for number in range(40):
        token = torch.full((len(PROMPTS) * GENERATIONS,), 5 + number % 20)
        torch.testing.assert_close(fixed(token), growing(token), atol=1e-4, rtol=1e-4)
        sizes.add(fixed._allowed.shape[1])
    assert sizes == {8, 10, 14, 22, 38, 48}  # 6 of the prompts and 40, rounded up


@torch.no_grad()
def test_a_sliding_window_has_no_fixed_form(policies):
    assert not decode.has_fixed_form(policies["mistral"])


@torch.no_grad()
def test_a_cpu_records_nothing(policies):
    policy = policies["llama"]
    cache, mask, position = prefilled(policy)
    assert not decode.recordable(policy)
    assert isinstance(
        decode.decoder(
            policy, cache, mask[::GENERATIONS], position[::GENERATIONS], GENERATIONS, 100
        ),
        decode.FixedDecoder,
    )
