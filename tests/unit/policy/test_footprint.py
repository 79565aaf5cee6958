"""The memory plan: its arithmetic against transformers, its activations against autograd, its total
against the peak of a trainer."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from swarmnode.cli import run
from swarmnode.config import PolicyConfig
from swarmnode.errors import Unavailable
from swarmnode.model_shape import Shape
from swarmnode.policy import load
from swarmnode.policy.device import count_parameters
from swarmnode.policy.footprint import (
    Method,
    averaging_bytes,
    footprint,
    micro_batch,
    sampling_tokens,
)
from swarmnode.policy.published import published_shape
from swarmnode.trainer import engine
from tests.support.model_zoo import build
from tests.unit.trainer.test_recipes import model_config

QWEN_7B, QWEN_1B5 = (model_config(f"Qwen2.5-{size}-Instruct") for size in ("7B", "1.5B"))


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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_parameters_by_config_headers_and_transformers_are_the_same(model_dir, policies, kind):
    directory = model_dir(kind)
    expected = count_parameters(policies[kind].model.config)
    if kind != "gpt2":  # the configuration of another architecture gives an estimate
        computed = Shape.of_config(json.loads((directory / "config.json").read_text()))
        assert (computed.parameters, computed.edges) == expected
    counted = published_shape(str(directory))
    assert (counted.parameters, counted.edges) == expected


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


def test_a_micro_batch_fills_the_memory_and_no_more():
    shape, method = Shape.of_config(QWEN_1B5), Method("cuda", "bfloat16", 16, checkpointing=True)
    tokens = micro_batch(shape, method, 16 * 10**9)
    total = lambda tokens: footprint(shape, method, tokens).total
    assert total(tokens) <= 16 * 10**9 < total(tokens + 2)
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
    parts = memory.training, memory.generation, memory.external
    assert [part.tokens for part in parts] == [4096, 100_000, 4096]


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


LIST = "\x02" + "\0" * 7 + "[]"
"""A file of tensors whose header is no object."""


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": '{"model_type": "resnet"}'}, "no hidden_size"),
        ({"config.json": json.dumps(QWEN_1B5), "model.safetensors": LIST}, "not a safetensors"),
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
    assert "24 means 24 bytes; write 24GB or 24GiB for more\n" in capsys.readouterr().err


def test_invalid_hub_name_fails_with_one_line(offline, capsys):
    assert run(["plan", "nobody/nothing"]) == 69
    assert capsys.readouterr().err.startswith("swarmnode: nobody/nothing: ")


# ---- 8-bit moments -------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [{"optim": "adamw_8bit"}, {"quantization": "8bit"}])
def test_unsupported_8_bits_fail_before_loading(monkeypatch, wanted):
    config = PolicyConfig.model_validate({"devices": "cpu", "lora": {"r": 8}, **wanted})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(Unavailable, match=r"needs bitsandbytes: pip install 'bitsandbytes>=0.45'$"):
        load.load_policy(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    with pytest.raises(Unavailable, match="needs a CUDA device, not cpu"):
        load.load_policy(config)
