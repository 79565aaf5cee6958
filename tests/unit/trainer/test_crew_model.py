"""Properties of a crew that are known before a stage is built."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.errors import ConfigError, DeviceError, Refused
from swarmnode.model_shape import Shape
from swarmnode.policy import device
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.policy.device import TRAINED_BYTES, probe
from swarmnode.policy.logprobs import collate
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.specs import stage_memory, stage_specs
from swarmnode.stages.trainer import crew_model
from swarmnode.stages.trainer.crew_model import (
    cached_tokens,
    check_trainable,
    crew_terms,
    estimate_cost,
    fits_whole,
    host_bytes_per_weight,
    open_model,
)
from swarmnode.stages.trainer.pipeline import gradient_codec
from swarmnode.stages.trainer.stage_averaging import averaged_parameters
from swarmnode.stages.trainer.stage_model import StageRuntime, add_adapter, load_stage, make_packing
from swarmnode.swarm.manifest import AGREED_KEYS
from swarmnode.trainer.engine import open_policy
from swarmnode.weights.fragments import EMBEDDING, block_of
from swarmnode.weights.trainer.lora import A_MARK
from tests.support.crew_models import opened, stage_of
from tests.support.largest import Alive

SHAPE = {
    "vocab_size": 5000,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(tmp_path, **stages) -> Config:
    return Config.model_validate(
        {
            "node": {"data_dir": str(tmp_path / "data")},
            "policy": {"devices": "cpu"},
            "stages": {"mode": "always", **stages},
        }
    )


@pytest.mark.parametrize(
    ("stages", "error", "line"),
    [
        ({"mode": "always"}, ConfigError, "^a 'granite' model cannot be trained in stages: "),
        (
            {"mode": "auto", "capacity": 2**20},
            DeviceError,
            r"need about .* GiB to train, cpu has .* GiB, and a 'granite' model cannot be trained",
        ),
    ],
)
def test_unsplittable_model_is_refused_by_its_config(tmp_path, stages, error, line):
    GraniteConfig(**SHAPE, logits_scaling=8.0).save_pretrained(tmp_path)
    config = Config.model_validate({"policy": {"devices": "cpu"}, "stages": stages})
    with pytest.raises(error, match=line) as refused:
        fits_whole(config, tmp_path, probe(config.policy))
    assert "set stages.mode to off" in str(refused.value)


@pytest.mark.parametrize("quantization", ["none", "8bit"])
def test_plan_of_a_whole_policy_agrees_with_loading(tmp_path, monkeypatch, quantization):
    shape = LlamaConfig(**SHAPE, num_hidden_layers=12)
    shape.save_pretrained(tmp_path)
    policy = {"devices": "cpu", "quantization": quantization, "lora": {"r": 4}}
    config = Config.model_validate({"policy": policy})
    placement = probe(config.policy)
    need = device.update_bytes(config.policy, shape, placement)
    for free in (need, need - 1):
        for module in (device, crew_model):
            monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
        assert fits_whole(config, tmp_path, placement) is (free == need)
        with nullcontext() if free == need else pytest.raises(DeviceError):
            device.fit(config.policy, shape, placement)


@pytest.mark.parametrize("mode", ["checkfree", "checkfree+"])
def test_only_checkfree_plus_trains_in_swapped_order(tmp_path, mode):
    with open_model(config_of(tmp_path, recovery=mode, stages=4)) as model:
        assert model.settings().swapped == (mode == "checkfree+")


@pytest.mark.parametrize(
    ("mode", "stages", "rank", "match"),
    [
        ("checkfree", 2, 0, "needs 3 or more stages"),
        ("checkfree+", 3, 0, "needs 4 or more stages"),
        ("checkfree", 0, 0, "needs 3 or more stages, and stages.stages is 0"),
        ("checkfree", 4, 8, "set stages.recovery to checkpoints"),
    ],
)
def test_impossible_recovery_names_the_remedy(tmp_path, mode, stages, rank, match):
    config = config_of(tmp_path, recovery=mode, stages=stages)
    adapted = config.policy.model_copy(update={"lora": LoraSettings(r=rank)})
    with (
        pytest.raises(Refused, match=match),
        open_model(config.model_copy(update={"policy": adapted})),
    ):
        pass


def test_whole_policy_settings_name_the_remedy():
    check_trainable(PolicyConfig(), TrainingConfig(loss_type="dr_grpo"))
    with pytest.raises(Refused, match=r"Blackjack.*leave the task out, or set stages.mode to off"):
        check_trainable(PolicyConfig(), TrainingConfig(), ["rg/gcd", "gym/Blackjack-v1"])
    with pytest.raises(Refused, match=r"set training\.\w+ to .*stages.mode to off"):
        check_trainable(PolicyConfig(), TrainingConfig(max_completion_length=20_000))
    check_trainable(
        PolicyConfig(), TrainingConfig(groups_per_step=128, max_completion_length=10_000)
    )
    with pytest.raises(Refused, match=r"set training.groups_per_step lower"):
        check_trainable(
            PolicyConfig(), TrainingConfig(groups_per_step=129, max_completion_length=10_000)
        )


def assert_it_says_that_it_goes_on(runtime):
    """Progress is reported after every layer, forward and backward, because a piece of work takes
    minutes with a real model on a CPU."""
    batch = collate([([5, 6], [7, 8, 9])], 0)
    x = (
        None
        if runtime.spec.has_embedding
        else torch.randn(make_packing(batch).rows, runtime.hidden_size)
    )
    before = runtime.work_count
    out = runtime.forward(batch, x, "layers" if x is not None else "all")
    assert runtime.work_count - before > 2 * runtime.spec.layers, "prompt and completion"
    before = runtime.work_count
    runtime.backward(batch, x, torch.zeros_like(out), "layers" if x is not None else "all")
    assert runtime.work_count - before > 3 * runtime.spec.layers
    for parameter in runtime.parameters():
        parameter.grad = None


@pytest.mark.parametrize("rank", [0, 4])
def test_block_names_do_not_depend_on_the_cut(tmp_path, rank):
    path = write_deep_model(tmp_path / "model", layers=4)
    policy = {"model": str(path), "devices": "cpu", "lora": {"r": rank}}
    whole = open_policy(PolicyConfig.model_validate(policy), None, lambda line: None)
    trained = {name: p for name, p in whole.model.named_parameters() if p.requires_grad}
    seeded = {name: p for name, p in whole.model.named_parameters() if A_MARK in name}
    by_block = lambda parameters, block: {
        n: (p.shape, p.dtype) for n, p in parameters.items() if block_of(n) == block
    }
    with opened(node={"data_dir": str(tmp_path)}, policy=policy) as (_, model):
        assert (model.text.fingerprint, model.text.tokenizer_hash) == (
            whole.fingerprint,
            whole.tokenizer_hash,
        )
        for cut in ((1, 3), (2, 2), (2, 1, 1)):
            held = set()
            for index in range(len(cut)):
                members = ("a",) * len(cut)
                assigned = StageAssignment(b"c" * 32, b"l" * 32, index, cut, members, 0, "")
                stage = stage_of(model, assigned)
                mine = averaged_parameters(stage)
                assert_it_says_that_it_goes_on(stage.runtime)
                blocks = {block_of(name) for name in mine}
                assert not held & blocks
                held |= blocks
                assert all(by_block(mine, block) == by_block(trained, block) for block in blocks)
                names = {
                    stage.runtime.spec.whole_name(n): p
                    for n, p in stage.runtime.model.named_parameters()
                    if A_MARK in n
                }
                assert all(torch.equal(p, seeded[n]) for n, p in names.items())
            # tied: both ends hold it, and neither averages it
            assert held == {block_of(name) for name in trained} - {EMBEDDING}


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("index", [0, 1])
def test_the_plan_has_room_for_the_longest_row(tmp_path, monkeypatch, index, rank):
    """The memory of a stage is checked before any computation. It includes the layers and the head
    for one row, once."""
    shape = LlamaConfig(**SHAPE, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    monkeypatch.setattr(
        "swarmnode.stages.trainer.stage_model.needs_checkpointing", lambda *given: True
    )
    monkeypatch.setattr("swarmnode.policy.footprint.LOGITS_BYTES_ELSEWHERE", 2**20)
    config = Config(
        policy=PolicyConfig(devices="cpu", lora=LoraSettings(r=rank)),
        training=TrainingConfig(max_completion_length=700),
    )
    placement, cut = probe(config.policy), (2, 2)
    cost = estimate_cost(config, shape, placement)
    sizes = Shape.of_config(shape.to_dict())
    per_weight = 4 if rank else TRAINED_BYTES + host_bytes_per_weight(config.weights)
    weights = cut[index] * sizes.layer_parameters + shape.vocab_size * shape.hidden_size
    caches = cut[index] * sizes.cache_bytes / sizes.layers * cached_tokens(config.training)
    planned = stage_memory(cost, cut, index) - weights * per_weight - caches
    stage = load_stage(tmp_path, stage_specs(shape, cut)[index])
    adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    runtime = StageRuntime(
        stage_specs(shape, cut)[index], add_adapter(stage, adapter) if rank else stage
    )
    for parameter in runtime.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = collate([([5] * 64, [7 + i % 90 for i in range(700)])], 0)
    states = torch.randn(make_packing(batch).rows, runtime.hidden_size)
    with Alive() as alive:
        if index:
            runtime.learn(batch, states, 1.0, lambda logprobs, entropy: logprobs.sum())
        else:
            runtime.backward(batch, None, states)
    assert alive.peak < planned < 2 * alive.peak, (alive.peak, planned)


# ---- terms: nodes with different terms of training never share a crew ----------------------------

BASE = bytes(32)


def terms(**sections):
    return crew_terms(Config.model_validate(sections)).hash(BASE)


def test_nodes_of_one_configuration_name_one_model():
    local = {"capacity": 10**9, "checkpoint_every": 7, "policy_copy": "disk"}
    assert terms() == terms(node={"name": "another"}, stages=local)


def test_terms_cover_every_setting_of_training():
    other = [
        {"stages": {"codec": "bfloat16"}},
        {"stages": {"recovery": "checkfree"}},
        {"stages": {"recovery": "checkfree+"}},
        {"policy": {"lora": {"r": 4}}},
        {"policy": {"lora": {"r": 8}}},
        {"training": {"learning_rate": 1e-5}},
    ]
    named = [terms(), *(terms(**sections) for sections in other)]
    named.append(crew_terms(Config()).hash(b"\1" * 32))
    assert len(set(named)) == len(other) + 2


def test_a_swarm_agrees_on_how_its_crews_train():
    assert {"stages.codec", "stages.recovery"} <= set(AGREED_KEYS)


def test_gradients_are_rounded_to_bfloat16_at_most():
    codecs = {codec: gradient_codec(codec) for codec in ("float32", "bfloat16", "int8")}
    assert codecs == {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}
