"""Every recipe: its figures agree with the plan, and with a small model of its architecture it
samples, learns and splits."""

import json
import re
from importlib import resources

import pytest
import torch
from transformers import Qwen2Config

from swarmnode import settings
from swarmnode.cli import run
from swarmnode.errors import ConfigError, DeviceError
from swarmnode.install import install_command
from swarmnode.model_shape import Shape
from swarmnode.policy import device
from swarmnode.policy.footprint import Method, footprint, micro_batch

NAMES = [recipe.name for recipe in settings.recipes()]
PROMPT = 512
"""Tokens of a question that the plan's rows leave room for."""
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}
"""hidden, intermediate, layers, heads, key-value heads, tied: config.json of Qwen2.5-*-Instruct."""


def text_of(name):
    return (resources.files("swarmnode") / "recipes" / f"{name}.toml").read_text()


def model_config(model):
    size = re.search(r"-([\d.]+B)-", model)[1]
    hidden, intermediate, layers, heads, keys, tied = SHAPES[size]
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "tie_word_embeddings": tied,
        "vocab_size": 152064 if size == "7B" else 151936,
    }


@pytest.mark.parametrize("name", NAMES)
def test_recipe_figures_equal_the_plan(name):
    config = settings.load(recipe=name).config
    policy, training = config.policy, config.training
    where = policy.device if policy.device != "auto" else "cuda"
    method = Method(where, policy.dtype, policy.lora.r, None, policy.optim, checkpointing=True)
    shape, length, card = (
        Shape.of_config(model_config(policy.model)),
        PROMPT + training.max_completion_length,
        int(re.search(r"(\d+)gb", name)[1]) if where == "cuda" else 8,
    )
    tokens = micro_batch(shape, method, card * 10**9)
    need = footprint(shape, method, length).total / 10**9
    assert (
        f"# Plan: rows of {length} tokens, {need:.1f} GB of {card}, micro-batches up to {tokens}"
        " tokens." in text_of(name)
    )
    assert length <= training.per_device_train_tokens <= tokens
    assert ("Needs the extra: quant" in text_of(name)) == (policy.optim == "adamw_8bit")
    # one question's completions, beside what stays
    sampled = shape.cache_bytes * length * training.num_generations
    assert footprint(shape, method, 1).resident + sampled < card * 10**9
    assert settings.unsuitable_values(config) == []


def test_recipe_overrides_stored_settings_only(tmp_path):
    (tmp_path / "config.toml").write_text("[training]\nlearning_rate = 0.5\nsave_every = 7\n")
    said = [f"node.data_dir={json.dumps(str(tmp_path))}", "training.num_generations=4"]
    resolved = settings.load(
        overrides=said, environment={"SWARMNODE_TRAINING_SAVE_EVERY": "9"}, recipe="24gb-7b-lora"
    )
    training = resolved.config.training
    assert (training.learning_rate, training.num_generations, training.save_every) == (6.6e-5, 4, 9)
    assert resolved.origins["training.learning_rate"] == "recipe 24gb-7b-lora"


def test_recipes_are_listed(capsys):
    assert run(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "24gb-7b-lora     An adapter for a 7 B model, on a card of 24 GB." in listed
    what = "All weights of a 1.5 B model, on a card of 24 GB."
    assert f"24gb-1.5b        {what} Needs: {install_command('quant')}" in listed
    bitsandbytes = {
        each.name
        for each in settings.recipes()
        if settings.load(recipe=each.name).config.policy.optim == "adamw_8bit"
    }
    assert {each.name for each in settings.recipes() if each.needs} == bitsandbytes
    with pytest.raises(ConfigError, match=r"no recipe '12gb'; there are 24gb-1\.5b, "):
        settings.load(recipe="12gb")
    assert run(["run", "--recipe", "../../etc"]) == 78


@pytest.mark.parametrize(
    ("said", "warnings"),
    [
        (["policy.model=a/b"], []),
        (["policy.model=a/b", "policy.lora.r=8"], []),
        (["policy.model=a/b", "training.learning_rate=2.9e-5"], []),
        (["policy.model=a/b", "training.learning_rate=3.1e-5"], ["learning_rate"]),
        (
            ["policy.model=a/b", "training.learning_rate=3e-4", "training.max_completion_length=8"],
            ["learning_rate", "max_completion_length"],
        ),
        (
            ["policy.model=a/b", "training.learning_rate=1e-6", "training.max_completion_length=8"],
            ["max_completion_length"],
        ),
        ([], []),
    ],
)
def test_settings_unsuited_to_a_real_model_are_named(said, warnings):
    config = settings.load(overrides=said).config
    found = settings.unsuitable_values(config)
    assert [line.split(" = ")[0].removeprefix("training.") for line in found] == warnings
    assert all("set " in line for line in found)


@pytest.mark.parametrize(
    ("device", "build", "driver", "warned"),
    [
        ("auto", "2.13.0+cpu", True, True),
        ("auto", "2.13.0+cpu", False, False),
        ("auto", "2.13.0", True, False),
        ("cpu", "2.13.0+cpu", True, False),
    ],
)
def test_names_a_gpu_without_torch_support(tmp_path, monkeypatch, device, build, driver, warned):
    if driver:
        (tmp_path / "version").touch()
    monkeypatch.setattr(settings.metadata, "version", lambda package: build)
    lines = settings.unused_gpu(
        settings.load(overrides=[f"policy.devices={device}"]).config.policy, tmp_path / "version"
    )
    assert [
        f"torch {build} is built for the CPU: pip uninstall -y torch" in line for line in lines
    ] == [True] * warned


@pytest.mark.parametrize(
    ("name", "free", "also"),
    [("24gb-7b-lora", 8, ""), ("24gb-1.5b", 8, "policy.lora.r = 16 trains an adapter")],
)
def test_too_large_recipe_error_names_a_fitting_one(name, free, also, monkeypatch):
    policy = settings.load(recipe=name, overrides=["policy.devices=cuda"]).config.policy
    model = Qwen2Config(**model_config(policy.model))
    card = device.Placement(torch.device("cuda"), torch.bfloat16, "")
    monkeypatch.setattr(device, "free_bytes", lambda where: 24 * 10**9)
    assert device.fit(policy, model, card) is card
    monkeypatch.setattr(device, "free_bytes", lambda where: free * 10**9)
    with pytest.raises(DeviceError, match=r"need about .* GiB free") as raised:
        device.fit(policy, model, card)
    line = str(raised.value)
    assert "\n" not in line
    assert policy.model in line
    assert also in line
    assert (
        "`swarmnode recipes` lists settings for smaller GPUs, `swarmnode plan` shows what fits"
        in line
    )
