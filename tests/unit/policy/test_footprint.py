"""The memory plan: its arithmetic against transformers, its activations against autograd, its total
against the peak of a trainer."""

import dataclasses
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from swarmnode.cli import run
from swarmnode.config import PolicyConfig
from swarmnode.errors import Unavailable
from swarmnode.model_shape import Shape
from swarmnode.policy import device
from swarmnode.policy import footprint as module
from swarmnode.policy.device import count_parameters
from swarmnode.policy.footprint import (
    Method,
    averaging_bytes,
    footprint,
    layer_bytes,
    micro_batch,
    sampling_tokens,
)
from swarmnode.policy.plan import CARD_BYTES, best, choices, settings, step_seconds
from swarmnode.policy.published import published_shape
from swarmnode.trainer import engine
from tests.support.model_zoo import build

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"""Qwen2.5-7B-Instruct's config.json."""
QWEN_1B5 = QWEN_7B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_dimensions_that_config_json_omits_are_read_from_the_tensors(tmp_path, policies):
    directory = build("gemma3-vision", tmp_path / "model", policies["llama"].tokenizer)
    whole = published_shape(str(directory))
    file = directory / "config.json"
    config = json.loads(file.read_text())
    omitted = {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k not in omitted}
    file.write_text(json.dumps(config))
    assert published_shape(str(directory)) == whole
    assert (whole.queries, whole.keys) == (32, 16)
    (directory / "model.safetensors").unlink()
    with pytest.raises(Unavailable, match="has no num_attention_heads"):
        published_shape(str(directory))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_parameters_by_config_headers_and_transformers_are_the_same(model_dir, policies, kind):
    directory = model_dir(kind)
    expected = count_parameters(policies[kind].model.config)
    computed = Shape.of_config(json.loads((directory / "config.json").read_text()))
    assert (computed.parameters, computed.edges) == expected
    counted = published_shape(str(directory))
    assert (counted.parameters, counted.edges) == expected


def test_headers_override_the_estimate_of_other_architectures(model_dir, policies):
    counted = published_shape(str(model_dir("gpt2")))
    assert (counted.parameters, counted.edges) == count_parameters(policies["gpt2"].model.config)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_layer_bytes_equal_those_saved_by_autograd(kind, dtype, lora):
    def saved(layers, tokens=1024):
        config = kind(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
        )
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype if lora else torch.float32
        ).eval()
        if lora:
            model = get_peft_model(
                model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
            ).eval()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}
        keep = lambda t: kept.update({t.untyped_storage().data_ptr(): t}) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(
                    input_ids=torch.ones(1, tokens, dtype=torch.long),
                    use_cache=False,
                    logits_to_keep=1,
                ).logits.sum()
        del loss
        sizes = {
            place: t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights
        }
        return sum(sizes.values()), Shape.of_config(config.to_dict()), tokens

    (two, shape, tokens), (three, _, _) = saved(2), saved(3)
    method = Method("cpu", str(dtype).removeprefix("torch."), lora)
    # autocast's, of a layer
    copies = 0 if lora or dtype == torch.float32 else 2 * (shape.parameters - shape.embeddings) / 2
    assert (three - two - copies) / tokens == pytest.approx(layer_bytes(shape, method), rel=0.06)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak"
)
def test_plan_is_within_15_percent_of_an_update(tmp_path, embedded):
    """Measured in a separate process by the kernel's peak resident set size."""
    kinds = {
        "small": Qwen2Config(
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8192,
            tie_word_embeddings=True,
        ),
        "larger": Qwen2Config(
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=10,
            num_attention_heads=10,
            num_key_value_heads=2,
            vocab_size=12000,
            tie_word_embeddings=True,
        ),
    }
    for name, config in kinds.items():
        config.eos_token_id = embedded.eos_id
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        embedded.tokenizer.save_pretrained(tmp_path / name)
    cases = [
        ("small", 600, 0, False),
        ("small", 600, 0, True),
        ("small", 600, 8, False),
        ("larger", 300, 0, False),
    ]
    asked = [
        {
            "policy": {"model": str(tmp_path / name), "devices": "cpu", "lora": {"r": rank}},
            "length": length,
            "checkpointing": again,
        }
        for name, length, rank, again in cases
    ]
    command = [sys.executable, "-m", "tests.support.peak_memory"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=280
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    for (name, length, rank, again), peak in zip(cases, measured, strict=True):
        shape = published_shape(str(tmp_path / name))
        assert 8e6 < shape.parameters < 1e8
        plan = footprint(shape, Method("cpu", "float32", rank, checkpointing=again), length + 16)
        assert plan.total == pytest.approx(peak, rel=0.15), (name, length, rank, again, plan)


def test_7b_adapter_fits_24_gb_only_with_checkpointing():
    shape = Shape.of_config(QWEN_7B)
    assert shape.parameters == 7_615_616_512  # as its safetensors headers count
    plan = {
        again: footprint(shape, Method("cuda", "bfloat16", 16, checkpointing=again), 4096).total
        for again in (False, True)
    }
    assert plan[True] < 24e9 < plan[False]
    assert plan[True] < 20.5e9


def test_1b5_fits_24_gb_with_8_bit_moments():
    shape = Shape.of_config(QWEN_1B5)
    assert shape.parameters == 1_543_714_304
    chosen = best(choices(shape, "cuda", "bfloat16", 16, 2048, 24 * CARD_BYTES))
    assert chosen is not None
    assert (chosen.name, settings(chosen), chosen.method.checkpointing) == (
        "all weights",
        ['policy.optim="adamw_8bit"'],
        True,
    )
    assert chosen.micro_batch >= 2048


def test_a_micro_batch_fills_the_memory_and_no_more():
    shape, method = Shape.of_config(QWEN_1B5), Method("cuda", "bfloat16", 16, checkpointing=True)
    tokens = micro_batch(shape, method, 16 * 10**9)
    assert (
        footprint(shape, method, tokens).total
        <= 16 * 10**9
        < footprint(shape, method, tokens + 2).total
    )
    assert micro_batch(shape, method, 10**9) == 0


def test_concurrent_completions_fit_beside_an_update():
    shape, method = Shape.of_config(QWEN_7B), Method("cuda", "bfloat16", 16)
    update = footprint(shape, dataclasses.replace(method, checkpointing=True), 2560)
    room = 24e9 - update.weights - update.runtime
    tokens = sampling_tokens(shape, method, 2560, room)
    assert tokens % 2560 == 0
    # keys and values of 28 layers, 4 heads of 128, in bfloat16
    kept = tokens * 2 * 28 * 512 * 2 * 1.25 + tokens / 2560 * 5 * 4 * 152_064
    row = 2560 * 2 * 28 * 512 * 2 * 1.25 + 5 * 4 * 152_064
    left = room - (update.total - update.weights - update.runtime)
    assert kept <= left < kept + row
    assert tokens > 10_240, "the recipe's micro-batch: four answers at a time"
    assert sampling_tokens(shape, dataclasses.replace(method, dtype="float32"), 2560, room) < tokens
    assert sampling_tokens(shape, method, 2560, 1e9) == 0
    assert sampling_tokens(shape, Method("cuda", "bfloat16"), 2560, room) == 0, (
        "gradients and moments of all weights come first"
    )


@pytest.mark.parametrize(
    ("kind", "spread", "more"),
    [("cuda", {}, True), ("cuda", {"a": 0, "b": 1}, False), ("cpu", {}, False)],
)
def test_only_a_single_gpu_samples_more_than_it_trains(embedded, monkeypatch, kind, spread, more):
    monkeypatch.setattr(engine, "spare_bytes", lambda device: 24 * 10**9)
    monkeypatch.setattr(embedded.base, "hf_device_map", spread, raising=False)
    policy = dataclasses.replace(embedded, device=torch.device(kind), dtype=torch.bfloat16)
    assert (engine.concurrent_tokens(policy, 2048, "adamw") > 100_000) is more
    memory = engine.Memory.of(4096, 100_000, kind, lambda: None)
    assert (memory.training.tokens, memory.generation.tokens, memory.external.tokens) == (
        4096,
        100_000,
        4096,
    )


def test_footprint_parts_have_their_documented_sizes():
    shape, plain = Shape.of_config(QWEN_1B5), Method("cuda", "bfloat16")
    at = lambda **changed: footprint(shape, dataclasses.replace(plain, **changed), 2048)
    assert at().weights == at().gradients == 4 * shape.parameters
    assert at().optimizer == 8 * shape.parameters
    assert at(optim="adamw_8bit").optimizer < 2.2 * shape.parameters
    assert at(checkpointing=True).activations < at().activations / 5
    assert (
        at(lora_rank=16, base_bits=4).weights
        < at(lora_rank=16, base_bits=8).weights
        < at(lora_rank=16).weights
    )
    assert at(lora_rank=16).gradients == 4 * 16 * shape.edges
    assert module.logits_tokens(152_064, "cuda") * 152_064 * 4 <= 2**29


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_fits(model_dir, capsys):
    directory = model_dir("qwen2")
    assert run(["plan", str(directory), "--length", "512", "--memory", "8GB"]) == 0
    out = capsys.readouterr().out
    assert "parameters; rows of 512 tokens in bfloat16, on a GPU" in out
    assert "Fits: all weights, micro-batches of up to" in out
    assert out.splitlines()[-1].endswith(f" swarmnode run --set policy.model={directory}")
    assert "Host memory for weight averaging: all weights: " in out
    assert "Host memory while the state is saved: all weights: " in out
    assert run(["plan", str(directory), "--length", "512", "--memory", "100MB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == published_shape(str(directory)).parameters
    assert not any(choice["micro_batch_tokens"] for choice in told["choices"])
    assert run(["plan", "embedded", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "8 GB" in out
    assert re.search(r"A step of 64 answers of 8 tokens takes about \d+ s on this CPU", out)


def test_a_step_is_estimated_as_measured():
    """Within a factor of three of the measured figures, see benchmarks/RESULTS.md."""
    smollm2 = dataclasses.replace(published_shape("embedded"), layers=30, parameters=134_515_008)
    core = 54e9  # matrix products of one core of the machine
    assert 9 / 3 < step_seconds(smollm2, "float32", 10, 32, core) < 9 * 3, "row alone of `real`"
    seven = dataclasses.replace(smollm2, layers=28, parameters=7_600_000_000)
    sampling = step_seconds(seven, "bfloat16", 64, 512, None) / 2
    assert 4469 / 3 < 64 * 512 / sampling < 4469, "tokens/s on an H200, which reads 4.8 TB/s"


def test_averaging_uses_the_planned_host_memory():
    from swarmnode.weights.trainer.averaged import AveragedTensors
    from swarmnode.weights.trainer.outer import OuterState, host_copy, prepare

    layers = {f"layers.{i}.w": torch.nn.Parameter(torch.randn(64, 64)) for i in range(4)}
    averaged, outer = (AveragedTensors(layers, 4, threading.Lock()), OuterState(layers))
    size = lambda tensors: sum(t.nbytes for t in tensors.values())
    anchors = size(host_copy(layers))  # `AveragedTensors` has a private copy
    always, more = averaging_bytes(4 * 64 * 64, 4)
    assert size(outer.tensors()) + anchors == always
    for _ in range(2):
        for fragment in range(4):
            copy = host_copy(layers, averaged.names(fragment))
            prepared = prepare(outer.rule, outer.slow(averaged.names(fragment)), copy)
            # own weights, the partner's, their average
            under_way = 3 * size(copy) + size(prepared.phi) + size(prepared.delta)
            assert outer.take(prepared)
            outer.merge_parameters(averaged.parameters, copy)
    assert under_way == more


def test_the_command_does_not_load_torch():
    code = (
        "import sys; from swarmnode.cli import run; assert run(['plan', 'embedded', '-n', '64']) =="
        " 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": '{"model_type": "resnet"}'}, "no hidden_size"),
        (
            {"config.json": json.dumps(QWEN_1B5), "model.safetensors": "\x02" + "\0" * 7 + "[]"},
            "not a safetensors file",
        ),
    ],
)
def test_invalid_model_is_refused_in_one_line(tmp_path, files, says, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Unavailable, match=says):
        published_shape(str(tmp_path))
    assert run(["plan", str(tmp_path)]) == 69
    assert capsys.readouterr().err.count("\n") == 1


def test_invalid_length_is_refused(capsys):
    assert run(["plan", "embedded", "--length", "0"]) == 78
    assert run(["plan", "embedded", "--memory", "much"]) == 78
    capsys.readouterr()
    assert run(["plan", "embedded", "--memory", "24"]) == 78
    assert (
        capsys.readouterr().err
        == "swarmnode: command line: 24 means 24 bytes; write 24GB or 24GiB for more\n"
    )


def test_invalid_hub_name_fails_with_one_line(offline, capsys):
    assert run(["plan", "nobody/nothing"]) == 69
    assert capsys.readouterr().err.startswith("swarmnode: nobody/nothing: ")


# ---- 8-bit moments -------------------------------------------------------------------------------


def test_8_bit_products_do_not_flood_the_log(monkeypatch):
    """bitsandbytes warns at each one that bfloat16 is cast, 196 times a pass of a 7 B model."""
    from swarmnode.policy import load

    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: object())
    talkative = logging.getLogger("bitsandbytes.autograd._functions")
    monkeypatch.setattr(talkative, "level", logging.NOTSET)
    load.check_bitsandbytes(
        "here",
        dataclasses.replace(device.probe(PolicyConfig(devices="cpu")), device=torch.device("cuda")),
    )
    assert not talkative.isEnabledFor(logging.WARNING)
    assert talkative.isEnabledFor(logging.ERROR)


def test_unsupported_8_bit_moments_fail_before_loading(monkeypatch):
    from swarmnode.policy import load

    wanted = PolicyConfig(devices="cpu", optim="adamw_8bit")
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        Unavailable,
        match=r"^policy.optim 'adamw_8bit' needs bitsandbytes: pip install 'bitsandbytes>=0.45'$",
    ):
        load.load_policy(wanted)
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(Unavailable, match="needs a CUDA device, not cpu"):
        load.load_policy(wanted)
