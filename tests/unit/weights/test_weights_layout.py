"""Fragments, fingerprints and adapters, which all nodes must derive alike."""

import hashlib
import math

import pytest
import torch

from swarmnode.weights.fragments import block_of, cut, due, layer_of
from swarmnode.weights.layout import make_layout
from swarmnode.weights.schedule import OuterSchedule
from swarmnode.weights.trainer.lora import freeze_a, shared_a

LLAMA = [
    ("model.embed_tokens.weight", (1000, 64), "float32"),
    ("lm_head.weight", (1000, 64), "float32"),
    ("model.norm.weight", (64,), "float32"),
    *(
        (f"model.layers.{i}.{part}.weight", (64, 64), "float32")
        for i in range(10)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    ),
]


def test_fragments_are_a_partition_with_strided_layers():
    layout = make_layout(LLAMA)
    parts = cut(layout, 4)
    assert sorted(s.name for part in parts for s in part) == [s.name for s in layout]
    for f, part in enumerate(parts):
        assert {layer for s in part if (layer := layer_of(s.name)) is not None} == set(
            range(f, 10, 4)
        )
    # embedding and head are larger than a layer: on different fragments
    assert [f for f, part in enumerate(parts) for s in part if s.elements == 64_000] == [0, 3]


def test_a_tensor_is_of_one_block_whoever_holds_it():
    assert [
        block_of(name)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    ] == [0, 1, 1]
    assert (
        block_of("base_model.model.model.layers.11.mlp.up_proj.lora_B.default.weight")
        == block_of("model.layers.11.a")
        == 13
    )
    assert block_of("layers.1021.a") == block_of("layers.1000000.a") == 1023
    whole = cut(make_layout(LLAMA), 4)
    for first, last in ((0, 1), (0, 7), (3, 10), (9, 10)):
        held = [
            spec
            for spec in LLAMA
            if (layer := layer_of(spec[0])) is not None and first <= layer < last
        ]
        for part, of_whole in zip(cut(make_layout(held), 4), whole, strict=True):
            assert set(part) == {spec for spec in of_whole if spec in make_layout(held)}


# ---- adapters ------------------------------------------------------------------------------------


def adapter(seed):
    rng = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.q.lora_{m}.default.weight": torch.randn(shape, generator=rng)
        for i in range(3)
        for m, shape in (("A", (4, 20)), ("B", (30, 4)))
    }


def test_every_node_makes_the_same_a():
    a = shared_a("layers.0.q.lora_A.default.weight", (16, 64))
    assert a.dtype == torch.float32
    assert float(a.abs().max()) <= 1 / 8
    assert float(a.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.05)
    assert abs(float(a.mean())) < 0.01
    assert not torch.equal(a, shared_a("layers.1.q.lora_A.default.weight", (16, 64)))
    # on every platform and with every version of torch
    assert hashlib.sha256(a.numpy().tobytes()).hexdigest() == PINNED_A


PINNED_A = "700b7b439007d79aaa97edfce4fab4168a9898d39c46e6f123bcfbdb33f86583"


def test_freezing_leaves_only_b_to_train():
    parameters = {n: torch.nn.Parameter(t) for n, t in adapter(1).items()}
    freeze_a(parameters)
    for name, parameter in parameters.items():
        assert parameter.requires_grad == (".lora_B." in name)
        if ".lora_A." in name:
            assert torch.equal(parameter, shared_a(name, (4, 20)))


BLOCKS = [2, 3, 4, 5]
"""Four layers: with two fragments, 2 and 4 are of fragment 0, 3 and 5 of fragment 1."""


def test_every_fragment_is_due_once_in_an_interval():
    schedule, seen = OuterSchedule(16, 2, BLOCKS), []
    for step in range(1, 65):
        if (found := schedule.due(step)) is not None:
            fragment, blocks = found
            assert blocks == ([2, 4], [3, 5])[fragment]
            seen.append((step, fragment))
            schedule.stepped(blocks, step)
    assert seen == [(step, due(step, 16, 2)) for step in range(8, 65, 8)]


def test_a_block_that_a_partner_averaged_recently_is_not_due():
    schedule = OuterSchedule(16, 2, BLOCKS)
    schedule.stepped([2], 17)
    assert schedule.due(24) == (0, [4])
    schedule.stepped([4], 25)
    assert schedule.due(40) == (0, [2, 4]), "both are due again"
    schedule.stepped([2, 4], 36)
    assert schedule.due(40) is None


def test_a_stage_without_a_layer_of_the_fragment_has_nothing_due():
    schedule = OuterSchedule(16, 2, [2, 4])
    assert schedule.due(8) == (0, [2, 4])
    assert schedule.due(16) is None
