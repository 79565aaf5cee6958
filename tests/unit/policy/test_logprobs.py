"""Scoring given completions: equal to the plain way, with gradient, and nothing on padding."""

import pytest
import torch

from swarmnode.policy import load
from swarmnode.policy.logprobs import collate, completion_logprobs, score

ROWS = [([5, 9, 20], [30, 31, 1]), ([7], [40]), ([5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 1])]


def naive(policy, row, temperature):
    """One row without padding: log-softmax over the whole vocabulary at every position. (T,), (T,)."""
    prompt, completion = row
    logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logp.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_equal_to_one_row_at_a_time(policies, kind):
    policy = policies[kind]
    logprobs, entropy = completion_logprobs(policy, collate(ROWS, policy.pad_id), 0.9)
    for i, row in enumerate(ROWS):
        expected, spread = naive(policy, row, 0.9)
        n = len(row[1])
        assert torch.allclose(logprobs[i, :n], expected, atol=1e-4)
        assert torch.allclose(entropy[i, :n], spread, atol=1e-3)
        assert not logprobs[i, n:].any()
        assert not entropy[i, n:].any()


def test_gradient_equals_that_of_one_row_at_a_time(policies):
    policy = policies["qwen2"].clone()
    logprobs, _ = completion_logprobs(policy, collate(ROWS, policy.pad_id), 1.0)
    together = torch.autograd.grad(logprobs.sum(), policy.trainable_parameters())
    separate = torch.autograd.grad(sum(naive(policy, row, 1.0)[0].sum() for row in ROWS), policy.trainable_parameters())
    assert any(g.abs().max() > 0.1 for g in together)
    for a, b in zip(together, separate, strict=True):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)


def test_entropy_carries_no_gradient(embedded):
    _, entropy = completion_logprobs(embedded, collate(ROWS, embedded.pad_id), 1.0)
    assert not entropy.requires_grad


def test_scoring_carries_no_gradient_and_drops_padding(embedded):
    values = score(embedded, ROWS, 1.0)
    assert [len(v) for v in values] == [3, 1, 5]
    assert all(x <= 0 for v in values for x in v)


def test_a_model_that_always_makes_all_logits_gives_the_same(embedded, monkeypatch):
    expected = score(embedded, ROWS, 1.0)
    monkeypatch.setattr(load, "takes_logits_to_keep", lambda kind: False)
    got = score(embedded, ROWS, 1.0)
    assert max(abs(a - b) for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True)) < 1e-5


def test_the_head_runs_on_no_more_than_it_must(embedded, monkeypatch):
    seen = []
    forward = type(embedded.model).forward

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        seen.append(out.logits.shape[1])
        return out

    monkeypatch.setattr(embedded.model, "forward", spy.__get__(embedded.model))
    prompt = list(range(5, 25))
    monkeypatch.setattr(load, "takes_logits_to_keep", lambda kind: True)
    score(embedded, [(prompt, [30, 1]), ([*prompt, 6], [1])], 1.0)
    assert seen == [3]


def test_batch_is_right_padded():
    batch = collate(ROWS, 0)
    assert batch.input_ids.tolist()[1] == [7, 40, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert batch.attention_mask.sum(1).tolist() == [6, 2, 11]
    assert batch.completion_mask.sum(1).tolist() == [3, 1, 5]
    assert batch.completion_ids.tolist()[0] == [30, 31, 1, 0, 0]
    assert batch.prompt_lengths.tolist() == [3, 1, 6]
