"""The int8 copy of a policy in stages: precision, bytes, and invalid input."""

import copy
import zlib

import pytest
import torch
from peft import LoraConfig

from swarmnode.errors import BadMessage
from swarmnode.policy import quantised as quantised_module
from swarmnode.policy.load import LORA_MODULES
from swarmnode.policy.quantised import Int8Matrix, build_quantised, quantise
from swarmnode.stages.trainer.copy_codec import (
    copied_layout,
    copy_bytes,
    decode_copy,
    encode_copy,
    install_copy,
)
from swarmnode.stages.trainer.stage_checkpoints import trained_layout
from swarmnode.stages.trainer.stage_model import add_adapter
from tests.support.split_models import split_model

IDS = torch.tensor([[5, 9, 17, 3, 8, 40]])
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=LORA_MODULES, task_type="CAUSAL_LM")


def trained_of(stage):
    return {name: p.detach() for name, p in stage.named_parameters() if p.requires_grad}


def base_of(model):
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return kept.__getitem__


def quantised(model, adapter=lambda bare: bare):
    return build_quantised(model.config, base_of(model), torch.float32, "cpu", adapter)


@torch.no_grad()
def move(model, by):
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += by * torch.randn(parameter.shape, generator=generator)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_weight_error_is_at_most_half_a_quantum():
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    weight[4] = 0
    codes, scales = quantise(weight)
    assert codes.dtype == torch.int8
    error = (codes.float() * scales[:, None] - weight).abs().amax(1)
    assert bool((error <= weight.abs().amax(1) / 253).all())
    moved = weight.clone()
    moved[2, 7] += 3 * float(scales[2])
    moved[3] *= 2  # does not fit its scale any more
    moved[4, 0] = 1.0  # had none
    later, chosen = quantise(moved, scales)
    assert (later != codes).nonzero()[:, 0].unique().tolist() == [2, 4]
    assert torch.equal(chosen[:3], scales[:3])
    assert bool((chosen[3:5] > scales[3:5]).all())
    assert bool(
        ((later.float() * chosen[:, None] - moved).abs().amax(1) <= moved.abs().amax(1) / 253).all()
    )


@pytest.mark.parametrize("block", [1, 100, 149])
def test_a_matrix_is_quantised_in_pieces_to_the_same_codes(monkeypatch, block):
    weight = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[4] = 0
    needed = weight.float().abs().amax(1) / 127
    scales = needed * torch.tensor([1.0, 0.999, 0.9, 1.1, 1.0, 2.0, 0.996])
    codes, chosen = quantise(weight, scales)  # the block is larger than the matrix
    monkeypatch.setattr(quantised_module, "BLOCK", block)
    in_pieces = quantise(weight, scales)
    assert torch.equal(in_pieces[0], codes)
    assert torch.equal(in_pieces[1], chosen)
    most = []
    monkeypatch.setattr(
        torch,
        "where",
        lambda *args, where=torch.where: (
            most.append(max(arg.numel() for arg in args[:2])) or where(*args)
        ),
    )
    quantise(weight, scales)
    assert max(most) <= max(block, 50), "or one row"


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_copy_is_close_to_its_stages(models, kind):
    model = copy.deepcopy(models[kind])
    base, ours = base_of(model), quantised(model)
    size = sum(
        m.codes.numel()
        for m in ours.modules()
        if isinstance(m, Int8Matrix) and m is not ours.lm_head
    )
    assert size > 0.8 * sum(p.numel() for p in model.parameters() if p is not model.lm_head.weight)
    before = logits(ours)
    move(model, 0.05)
    sent = 0
    for spec, stage in split_model(model, [1, 2, 1]):
        layout = copied_layout(spec, trained_layout(stage))
        body = encode_copy(spec, trained_of(stage), layout, base)
        sent += len(body)
        install_copy(ours, decode_copy(spec, body, layout, base))
    assert sent <= 1.1 * sum(p.numel() for p in model.parameters()) + 4096
    exact = logits(model)
    assert float((logits(ours) - exact).abs().mean()) < 0.1 * float((before - exact).abs().mean())


def test_what_has_hardly_moved_costs_next_to_nothing(models):
    model = copy.deepcopy(models["llama"])
    base = base_of(model)
    move(model, 1e-5)
    (spec, stage), *_ = split_model(model, [2, 2])
    layout = copied_layout(spec, trained_layout(stage))
    assert len(encode_copy(spec, trained_of(stage), layout, base)) < 0.12 * sum(
        tensor.elements for tensor in layout
    )


def test_copy_of_an_adapter_has_a_rounded_base(models):
    model = copy.deepcopy(models["llama-tied"])
    ours = quantised(model, lambda bare: add_adapter(bare, LORA))
    whole = add_adapter(model, LORA)
    untrained = logits(ours)
    move(whole, 0.2)
    for spec, stage in split_model(whole, [3, 1]):
        layout = copied_layout(spec, trained_layout(stage))
        body = encode_copy(spec, trained_of(stage), layout, None)
        assert len(body) == copy_bytes(layout, adapter=True)
        install_copy(ours, decode_copy(spec, body, layout, None))
    exact = logits(whole)
    assert float((logits(ours) - exact).abs().mean()) < 0.1 * float(
        (untrained - exact).abs().mean()
    )


@pytest.mark.parametrize("adapter", [False, True])
def test_hostile_copy_is_bounded_and_rejected(models, adapter):
    model = copy.deepcopy(models["llama"])
    base = None if adapter else base_of(model)
    whole = add_adapter(model, LORA) if adapter else model
    spec, stage = split_model(whole, [2, 2])[0]
    layout = copied_layout(spec, trained_layout(stage))
    good = encode_copy(spec, trained_of(stage), layout, base)
    plain = b"".join([bytes(4096)] * 512)

    def refused(body, reason):
        with pytest.raises(BadMessage) as caught:
            decode_copy(spec, body, layout, base)
        assert caught.value.reason == reason

    refused(good[:-5], "size")
    refused(good + b"\0", "size")
    if adapter:
        refused(b"\xff" * len(good), "not_finite")
        return
    refused(b"\x07" * 100, "malformed")
    # 128 MiB from some 100 KiB: no more than a stage is ever inflated
    refused(zlib.compress(plain * 64), "size")
    refused(
        zlib.compress(
            b"\xff"
            * sum(
                t.elements + 4 * t.shape[0] if len(t.shape) == 2 else 4 * t.elements for t in layout
            )
        ),
        "bounds",
    )
