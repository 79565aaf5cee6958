"""Fragments, fingerprints, adapters and manifests, which all nodes must derive alike."""

import hashlib
import itertools
import math
import random

import msgspec
import pytest
import torch

from swarmnode.averaging.lora import RESIDUAL_LIMIT, freeze_a, pairs, residual, shared_a
from swarmnode.errors import BadMessage
from swarmnode.weights.fingerprint import LoraShape, fingerprint, state_fingerprint
from swarmnode.weights.fragments import (
    block_of,
    common,
    count,
    cut,
    due,
    layer_of,
    pack,
    unpack,
    within,
)
from swarmnode.weights.layout import make_layout
from swarmnode.weights.local import TensorHash
from swarmnode.weights.state import StateManifest, agreed_source, check_manifest

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


def test_sets_of_blocks_travel_in_bits():
    assert [pack(blocks).hex() for blocks in ((), (0,), (1, 2, 9), (1023,))] == [
        "",
        "01",
        "0602",
        "00" * 127 + "80",
    ]
    for seed in range(50):
        rng = random.Random(seed)
        one, other = (frozenset(rng.sample(range(1024), rng.randrange(60))) for _ in range(2))
        assert unpack(pack(one)) == one
        assert unpack(common(pack(one), pack(other))) == one & other
        parts = [unpack(within(pack(one), f, 5)) for f in range(5)]
        assert sorted(block for part in parts for block in part) == sorted(one)


def test_the_cut_depends_on_names_and_shapes_only():
    shuffled = LLAMA[:]
    random.Random(0).shuffle(shuffled)
    assert cut(make_layout(shuffled), 4) == cut(make_layout(LLAMA), 4)
    assert cut(make_layout(LLAMA), 1) == (make_layout(LLAMA),)


def test_layer_follows_from_the_parameter_name():
    assert layer_of("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight") == 11
    assert layer_of("transformer.h.0.attn.c_attn.weight") == 0
    assert layer_of("model.embed_tokens.weight") is None
    assert layer_of("lm_head2.weight") is None


def test_number_of_fragments_is_between_one_and_the_layers():
    assert [count(make_layout(LLAMA), wanted) for wanted in (1, 4, 14)] == [1, 4, 10]
    assert count(make_layout(LLAMA[-2:]), 4, layers=10) == 4  # as for the whole model
    assert count(make_layout(LLAMA[:1]), 4) == 1
    with pytest.raises(ValueError, match="at least 1"):
        cut(make_layout(LLAMA), 0)


@pytest.mark.parametrize(("every", "count"), [(50, 1), (50, 4), (20, 7), (5, 5), (10, 3)])
def test_fragments_are_due_at_even_distances(every, count):
    for start in (0, every, 40 * every):
        steps = [
            (step, f)
            for step in range(start + 1, start + every + 1)
            if (f := due(step, every, count)) is not None
        ]
        assert [f for _, f in steps] == list(range(count))
        assert steps[-1][0] == start + every
        gaps = [b - a for (a, _), (b, _) in itertools.pairwise(steps)]
        assert all(abs(g - every / count) < 1 for g in gaps)


# ---- fingerprint ---------------------------------------------------------------------------------

BASE = {
    "swarm": b"s" * 32,
    "base": b"b" * 32,
    "tokenizer": b"t" * 32,
    "layout": make_layout(LLAMA),
    "fragments": 4,
    "lora": None,
}
LORA = LoraShape(16, 32, ("k_proj", "q_proj"), 7)


def test_everything_that_must_agree_changes_the_fingerprint():
    other = [
        {"swarm": b"S" * 32},
        {"base": b"B" * 32},
        {"tokenizer": b"T" * 32},
        {"fragments": 3},
        {"lora": LORA},
        {"layout": make_layout([(LLAMA[0][0], (1000, 64), "bfloat16"), *LLAMA[1:]])},
        *(
            {"lora": msgspec.structs.replace(LORA, **change)}
            for change in (
                {"r": 8},
                {"alpha": 16},
                {"target_modules": ("q_proj",)},
                {"a_seed": 8},
                {"a_seed": None},
            )
        ),
    ]
    held = [
        {"layout": make_layout(LLAMA[1:])},
        {"layout": make_layout([("renamed", *LLAMA[0][1:]), *LLAMA[1:]])},
        {"layout": make_layout([(LLAMA[0][0], (64, 1000), "float32"), *LLAMA[1:]])},
    ]
    for of, differ in ((fingerprint, other), (state_fingerprint, other + held)):
        found = {of(**BASE), *(of(**{**BASE, **change}) for change in differ)}
        assert len(found) == len(differ) + 1
        assert all(len(f) == 32 for f in found)
    # whoever holds other layers of the same base is a partner for those that both hold, and no
    # source of a state
    assert {fingerprint(**{**BASE, **change}) for change in held} == {fingerprint(**BASE)}


def test_the_order_of_tensors_does_not():
    for of in (fingerprint, state_fingerprint):
        assert of(**{**BASE, "layout": BASE["layout"][::-1]}) == of(**BASE)


def test_a_hash_of_another_length_is_our_bug():
    with pytest.raises(ValueError, match="tokenizer"):
        fingerprint(**{**BASE, "tokenizer": b""})


def test_the_fingerprint_is_pinned():
    """It is on the wire: another value is another protocol."""
    layout = make_layout([("w", (2, 3), "float32")])
    got = [
        of(bytes(32), bytes(32), bytes(32), layout, 1, LoraShape(8, 16, ("q_proj",), 1)).hex()
        for of in (state_fingerprint, fingerprint)
    ]
    assert got == PINNED


PINNED = [
    "db206324b50353c519b62ab3ea9a3ebbc5c7ff666db7d0f0673001c10ca1dce3",
    "550ee514d8c22cd723ecb5c5b39be939b37618c6cfb792c860b523b34e8e89e1",
]


# ---- adapters ------------------------------------------------------------------------------------


def adapter(seed, r=4, spread=1.0):
    rng = torch.Generator().manual_seed(seed)
    names = [f"layers.{i}.q.lora_{m}.default.weight" for i in range(3) for m in "AB"]
    return {
        n: spread * torch.randn((r, 20) if ".lora_A." in n else (30, r), generator=rng)
        for n in names
    }


def mean_product(mine, theirs, a, b):
    """½ (B₁A₁ + B₂A₂), (out, in): the wanted average."""
    return (mine[b] @ mine[a] + theirs[b] @ theirs[a]) / 2


def test_the_residual_is_what_averaging_factors_gets_wrong():
    mine, theirs = adapter(1), adapter(2)
    wrong = product = 0.0
    for a, b in pairs(mine):
        exact = mean_product(mine, theirs, a, b)
        factors = (mine[b] + theirs[b]) / 2 @ ((mine[a] + theirs[a]) / 2)
        wrong += float((exact - factors).square().sum())
        product += float(exact.square().sum())
    assert residual(mine, theirs).ratio == pytest.approx(math.sqrt(wrong / product), rel=1e-4)
    assert not residual(mine, theirs).allowed


def test_with_one_shared_a_averaging_b_is_exact():
    mine, theirs = adapter(1), adapter(2)
    theirs |= {a: mine[a] for a, _ in pairs(mine)}
    assert residual(mine, theirs).ratio == 0.0
    a, b = pairs(mine)[0]
    torch.testing.assert_close(
        (mine[b] + theirs[b]) / 2 @ mine[a], mean_product(mine, theirs, a, b)
    )


def test_replicas_close_to_each_other_may_average_both_factors():
    mine = adapter(1)
    noise = adapter(2, spread=0.05)
    close = residual(mine, {n: t + noise[n] for n, t in mine.items()})
    assert 0 < close.ratio < RESIDUAL_LIMIT
    assert close.allowed


def test_zero_adapter_causes_no_division_by_zero():
    zero = {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in adapter(1).items()}
    assert residual(zero, zero).ratio == 0.0
    other = {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in adapter(2).items()}
    assert residual(zero, other).ratio == 0.0


def test_every_node_makes_the_same_a():
    a = shared_a("layers.0.q.lora_A.default.weight", (16, 64), 7)
    assert a.dtype == torch.float32
    assert float(a.abs().max()) <= 1 / 8
    assert float(a.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.05)
    assert abs(float(a.mean())) < 0.01
    assert not torch.equal(a, shared_a("layers.1.q.lora_A.default.weight", (16, 64), 7))
    assert not torch.equal(a, shared_a("layers.0.q.lora_A.default.weight", (16, 64), 8))
    # on every platform and with every version of torch
    assert hashlib.sha256(a.numpy().tobytes()).hexdigest() == PINNED_A


PINNED_A = "aa9d9ed1f96ee369acc4126dc2ae12f0554e70f5d8f983a62b8fe124982f5258"


def test_freezing_leaves_only_b_to_train():
    parameters = {n: torch.nn.Parameter(t) for n, t in adapter(1).items()}
    frozen = freeze_a(parameters, 7)
    assert (
        {n for n, p in parameters.items() if not p.requires_grad}
        == set(frozen)
        == {a for a, _ in pairs(parameters)}
    )
    assert torch.equal(parameters[frozen[0]], shared_a(frozen[0], (4, 20), 7))


# ---- manifests -----------------------------------------------------------------------------------

FP = b"f" * 32


def manifest(step, fp=FP, names=("a", "b")):
    return StateManifest(fp, step, 0, [TensorHash(n, bytes(32)) for n in names])


def test_single_liar_does_not_set_the_outer_step():
    assert agreed_source({"liar": manifest(10**8), "p": manifest(40), "q": manifest(38)}, FP) == "p"
    assert agreed_source({"low": manifest(0), "p": manifest(40), "q": manifest(40)}, FP) == "p"


def test_rejects_impossible_step_counts():
    sybils = {"a": manifest(10**8 + 1), "b": manifest(2**62)}
    assert agreed_source(sybils, FP) is None
    assert agreed_source({**sybils, "p": manifest(40), "q": manifest(38)}, FP) == "q"


def test_one_answer_agrees_with_nobody():
    assert agreed_source({"p": manifest(40)}, FP) is None
    assert agreed_source({"p": manifest(40), "q": manifest(40, fp=b"g" * 32)}, FP) is None
    assert agreed_source({}, FP) is None


def test_a_manifest_speaks_of_our_tensors_or_is_refused():
    check_manifest(manifest(3), ["b", "a"])
    for bad in (
        manifest(3, names=("a",)),
        manifest(3, names=("b", "a")),
        manifest(-1),
        manifest(2**63),
        manifest(3, fp=b""),
    ):
        with pytest.raises(BadMessage) as error:
            check_manifest(bad, ["a", "b"])
        assert error.value.reason == "bounds"
