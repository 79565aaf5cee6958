"""Scores of given completions equal those of the reference method, have a gradient, and are 0 on
padding."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from swarmnode.config import LoraSettings, PolicyConfig
from swarmnode.policy import footprint, logprobs, model
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import collate, completion_logprobs, score
from tests.support.largest import Alive, Largest
from tests.support.model_zoo import build

LONG = [5, 6, 7, 8, 9, 10, 6, 7, 8, 9, 10]
# groups apart
ROWS = [
    ([5, 9, 20], [30, 31, 1]),
    (LONG, [11, 12, 13, 14, 1]),
    ([7], [40]),
    ([5, 9, 20], [1]),
    (LONG, [12, 1]),
    # with the first group, a packed row holds two answers of several tokens
    ([5, 9, 20], [33, 30, 31, 1]),
]


def naive(policy, row, temperature):
    """One row without padding: log-softmax over the whole vocabulary at every position. (T,),
    (T,)."""
    prompt, completion = row
    logits = (
        policy.model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    )
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logp.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.fixture(
    params=[
        "one pass",
        "packed",
        "packed in one batch",
        "two passes",
        "row by row",
        "checkpointed",
        "in pieces",
    ]
)
def passes(request, monkeypatch):
    """Force one method, where the model allows it. `in pieces` is two passes with the logits of two
    tokens at a time."""
    monkeypatch.setattr(logprobs, "stands_alone", lambda batch: request.param == "row by row")
    monkeypatch.setattr(
        logprobs, "needs_checkpointing", lambda *given: request.param == "checkpointed"
    )
    monkeypatch.setattr(
        logprobs,
        "logits_tokens",
        lambda vocabulary, device: 2 if request.param == "in pieces" else 10**6,
    )
    monkeypatch.setattr(logprobs.Batch, "padded_tokens", 10**6)  # at any cost
    packed = request.param.startswith("packed")
    monkeypatch.setattr(logprobs, "PACKED_GAIN_ELSEWHERE", 0.0 if packed else 10**6)
    if request.param == "packed in one batch":
        monkeypatch.setattr(logprobs, "PACKED_TOGETHER", {"cpu"})
    # so that one prompt's answers are in two rows
    monkeypatch.setattr(logprobs, "PACKED_COLUMNS", 11)
    monkeypatch.setattr(logprobs, "ONE_PASS_ELSEWHERE", 1024 if request.param == "one pass" else 0)
    return request.param


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_equal_to_one_row_at_a_time(policies, kind, passes):
    policy = policies[kind]
    possible = kind != "mistral"  # the model builds its own masks for the sliding window
    assert logprobs.fits_one_pass(policy, collate(ROWS, policy.pad_id)) is (
        possible and passes == "one pass"
    )
    chosen, entropy = completion_logprobs(policy, collate(ROWS, policy.pad_id), 0.9)
    assert not entropy.requires_grad
    for i, row in enumerate(ROWS):
        expected, spread = naive(policy, row, 0.9)
        n = len(row[1])
        assert torch.allclose(chosen[i, :n], expected, atol=1e-4)
        assert torch.allclose(entropy[i, :n], spread, atol=1e-3)
        assert not chosen[i, n:].any()
        assert not entropy[i, n:].any()


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt2"])
def test_gradient_equals_that_of_one_row_at_a_time(policies, kind, passes):
    policy = policies[kind].clone()
    chosen, _ = completion_logprobs(policy, collate(ROWS, policy.pad_id), 1.0)
    chosen.sum().backward()
    assert_gradients_are_of_single_rows(policy)


def assert_gradients_are_of_single_rows(policy):
    together = [parameter.grad for parameter in policy.trainable_parameters()]
    separate = torch.autograd.grad(
        sum(naive(policy, row, 1.0)[0].sum() for row in ROWS), policy.trainable_parameters()
    )
    assert any(g.abs().max() > 0.1 for g in together)
    for a, b in zip(together, separate, strict=True):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-3)


def test_head_gradient_is_accumulated_in_place():
    """The gradient of a real head has more than half a gigabyte. At most one piece's gradient
    exists beside the accumulated sum."""
    head = nn.Linear(256, 20_000, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    outputs, tokens = torch.randn(100, 256, requires_grad=True), torch.arange(100)
    with Alive() as alive:
        logprobs.in_pieces(head, outputs, tokens, 1.0, 4)[0].sum().backward()
    together = head.weight.grad.clone()
    assert alive.peak < 1.5 * head.weight.nbytes
    head.weight.grad = None
    # nothing but the head is trained
    logprobs.in_pieces(head, outputs.detach(), tokens, 1.0, 4)[0].sum().backward()
    assert torch.allclose(together, head.weight.grad, atol=1e-5)


def test_a_frozen_heads_gradient_in_pieces_equals_that_at_once():
    torch.manual_seed(3)
    head = nn.Linear(4, 50).requires_grad_(False)
    tokens, factors = torch.arange(23), torch.linspace(-2, 1, 23)
    found = []
    for piece, frozen in ((100, False), (5, False), (5, True)):
        outputs = torch.randn(23, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
        with Largest(50) as seen:
            chosen, spread = logprobs.in_pieces(head, outputs, tokens, 0.7, piece, frozen)
            (chosen * factors).sum().backward()
        assert seen.rows == min(piece, 23)
        assert not spread.requires_grad
        found.append((chosen, spread, outputs.grad))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_model_without_logits_to_keep_gives_the_same(embedded, monkeypatch):
    expected = score(embedded, ROWS, 1.0)
    monkeypatch.setattr(model, "takes_logits_to_keep", lambda kind: False)
    assert score(embedded, ROWS, 1.0) == [pytest.approx(row, abs=1e-5) for row in expected]


@pytest.mark.parametrize("passes", ["one pass", "two passes", "packed"], indirect=True)
def test_prompt_is_computed_once_per_group(embedded, monkeypatch, passes):
    prompt = list(range(5, 25))
    monkeypatch.setattr(logprobs, "PACKED_COLUMNS", 1024)
    group = [(prompt, [30, 31, 1])] * 8
    score(embedded, group, 1.0)  # the first use tries the method
    seen = []
    forward = type(embedded.model).forward

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        seen.append((tuple(kwargs["input_ids"].shape), tuple(out.logits.shape[:2])))
        return out

    monkeypatch.setattr(embedded.model, "forward", spy.__get__(embedded.model))
    monkeypatch.setattr(model, "takes_logits_to_keep", lambda kind: True)
    score(embedded, group, 1.0)
    # 20 + 8 · 2 tokens, not 8 · 23
    expected = [((1, 20), (1, 1)), ((8, 2), (8, 2))] if passes == "two passes" else None
    assert seen == (expected or [((1, 36), (1, 17))])


@pytest.mark.parametrize("row", [([], [1]), ([1], [])])
def test_an_empty_side_is_refused(row):
    with pytest.raises(ValueError, match="at least one token"):
        collate([row], 0)


def test_one_pass_is_for_short_rows_and_full_groups(embedded):
    batch = lambda rows: collate(rows, embedded.pad_id)
    group = [([5, 9, 20], [30, 31, 1])] * 8
    assert logprobs.fits_one_pass(embedded, batch(group))
    assert not logprobs.fits_one_pass(embedded, batch([(p, c * 100) for p, c in group]))
    lonely = [([5, 9, 20 + i], [30, 31, 1]) for i in range(20)]
    # each would be padded to eight completions
    assert not logprobs.fits_one_pass(embedded, batch(group + lonely))


@pytest.mark.parametrize("lora", [0, 4])
def test_logits_of_a_long_row_are_computed_in_pieces(model_dir, lora, monkeypatch):
    policy = load_policy(
        PolicyConfig(model=str(model_dir("qwen2")), devices="cpu", lora=LoraSettings(r=lora))
    )
    vocabulary = policy.base.config.vocab_size
    monkeypatch.setattr(footprint, "LOGITS_BYTES_ELSEWHERE", 4 * vocabulary * 40)
    batch = collate(
        [([5, 9, 20], [30 + i % 9 for i in range(60)]), ([5, 9, 20], [31] * 40)], policy.pad_id
    )
    completion_logprobs(policy, batch, 1.0)  # the first use tries the method
    score(policy, [([5, 9, 20], [30] * 60)], 1.0)
    with Largest(vocabulary) as seen:
        chosen, _ = completion_logprobs(policy, batch, 1.0)
        chosen.sum().backward()
        score(policy, [([5, 9, 20], [30] * 60)], 1.0)
    assert seen.rows == 40  # and the head's own gradient has 32
    monkeypatch.setattr(footprint, "LOGITS_BYTES_ELSEWHERE", 2**30)
    with Largest(vocabulary) as seen:
        completion_logprobs(policy, batch, 1.0)
    assert seen.rows >= 100


def test_capped_logits_are_preserved(tmp_path, embedded, monkeypatch):
    directory = build("gemma2", tmp_path, embedded.tokenizer)
    capped = load_policy(PolicyConfig(model=str(directory), devices="cpu"))
    with torch.no_grad():
        capped.base.get_output_embeddings().weight.mul_(50)
    assert not logprobs.splits_head(capped)
    assert logprobs.splits_head(embedded)
    expected = score(capped, ROWS, 1.0)
    monkeypatch.setattr(footprint, "LOGITS_BYTES_ELSEWHERE", 8 * len(embedded.tokenizer))
    assert score(capped, ROWS, 1.0) == [pytest.approx(row, abs=1e-5) for row in expected]


def test_only_long_rows_run_one_by_one(embedded):
    batch = lambda rows: collate(rows, embedded.pad_id)
    assert logprobs.stands_alone(batch([([5] * 100, [30] * 1500), ([5] * 100, [30] * 1000)]))
    assert not logprobs.stands_alone(batch([([5] * 3, [30] * 200)] * 8))
    # the prompt would be run eight times
    assert not logprobs.stands_alone(batch([([5] * 1000, [30] * 100)] * 8))


def test_checkpointing_only_if_activations_do_not_fit(embedded, monkeypatch):
    batch = collate([([5] * 100, [30] * 1500)], embedded.pad_id)
    for spare, needed in ((None, False), (64 * 2**30, False), (2**20, True)):
        monkeypatch.setattr(logprobs, "spare_bytes", lambda device, spare=spare: spare)
        assert logprobs.needs_checkpointing(embedded.base, embedded.dtype, 0, batch) is needed


def test_checkpointing_saves_memory_and_restores_the_model(policies, monkeypatch):
    policy = policies["qwen2"].clone()
    batch = collate([([5] * 8, [30] * 100)], policy.pad_id)
    numbers = []
    for checkpointed in (False, True):
        monkeypatch.setattr(
            logprobs, "needs_checkpointing", lambda *given, checkpointed=checkpointed: checkpointed
        )
        sizes: dict[int, torch.Tensor] = {}
        keep = lambda t, sizes=sizes: sizes.update({t.data_ptr(): t}) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            graph = completion_logprobs(policy, batch, 1.0)
        del graph
        numbers.append(sum(t.numel() for t in sizes.values()))
    assert numbers[1] < numbers[0] / 2
    assert all("forward" not in layer.__dict__ for layer in policy.model.model.layers)


class HidesInput(torch.autograd.Function):
    """Compute 2 · x and store x where no hook sees it, like bitsandbytes' 8-bit product."""

    seen: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        HidesInput.seen.append(weakref.ref(x))
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.x is not None
        return 2 * gradient


@pytest.mark.parametrize("eight_bits", [False, True])
def test_checkpointing_frees_hidden_inputs_of_8_bit_layers(policies, monkeypatch, eight_bits):
    """Without this, 7 billion parameters in 8 bits took 27 GB for a row of 2,560 tokens instead of
    the planned 12 GB."""
    policy = policies["qwen2"].clone()
    monkeypatch.setattr(logprobs, "needs_checkpointing", lambda *given: True)
    if eight_bits:
        policy.base.is_loaded_in_8bit = True
    # as under an adapter: the first layer's input requires no gradient
    policy.base.get_input_embeddings().requires_grad_(False)
    for layer in policy.base.model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: HidesInput.apply(output))
    batch = collate(ROWS, policy.pad_id)
    HidesInput.seen.clear()
    chosen, _ = completion_logprobs(policy, batch, 1.0)
    kept = sum(one() is not None for one in HidesInput.seen)
    assert kept == (0 if eight_bits else len(HidesInput.seen))
    chosen.sum().backward()
    assert_gradients_are_of_single_rows(policy)
