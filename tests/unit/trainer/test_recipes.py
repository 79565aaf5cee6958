"""Every recipe: its figures agree with the plan, and with a small model of its architecture it
samples, learns and splits."""

import json
import re
from importlib import resources

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from swarmnode import settings
from swarmnode.cli import run
from swarmnode.config import Config
from swarmnode.errors import ConfigError, DeviceError
from swarmnode.install import install_command
from swarmnode.model_shape import Shape
from swarmnode.policy import device
from swarmnode.policy.footprint import Method, footprint, micro_batch
from swarmnode.policy.generate import Sampling
from swarmnode.policy.micro import RowTooLarge
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.trainer.engine import make_whole_policy, open_policy
from swarmnode.trainer.state import Counters

NAMES = [recipe.name for recipe in settings.recipes()]
PROMPT = 512
"""Tokens of a question that the plan's rows leave room for."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content']"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}
"""hidden, intermediate, layers, heads, key-value heads, tied: config.json of Qwen2.5-*-Instruct."""


def text_of(name):
    return (resources.files("swarmnode") / "recipes" / f"{name}.toml").read_text()


def model_shape(model):
    size = re.search(r"-([\d.]+B)-", model)[1]
    hidden, intermediate, layers, heads, keys, tied = SHAPES[size]
    return Shape.of_config(
        {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "tie_word_embeddings": tied,
            "vocab_size": 152064 if size == "7B" else 151936,
        }
    )


def test_recipes_for_cpu_and_gpus_exist():
    assert {name.partition("-")[0] for name in NAMES} == {"cpu", "8gb", "24gb", "80gb"}
    assert {settings.load(recipe=name).config.policy.model for name in NAMES} == {
        f"Qwen/Qwen2.5-{size}-Instruct" for size in SHAPES
    }


@pytest.mark.parametrize("name", NAMES)
def test_recipe_figures_equal_the_plan(name):
    config = settings.load(recipe=name).config
    policy, training = config.policy, config.training
    where = policy.device if policy.device != "auto" else "cuda"
    method = Method(where, policy.dtype, policy.lora.r, None, policy.optim, checkpointing=True)
    shape, length, card = (
        model_shape(policy.model),
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


def test_recipe_is_shown(capsys):
    assert run(["recipes", "show", "cpu-0.5b-lora"]) == 0
    assert capsys.readouterr().out.strip() == text_of("cpu-0.5b-lora").strip()
    assert run(["recipes", "show", "cpu-0.5b-lora", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["set"]["policy.devices"] == "cpu"
    assert run(["recipes", "show", "12gb"]) == 78
    assert "no recipe '12gb'; there are 24gb-1.5b, " in capsys.readouterr().err


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    """A small Qwen2 with a byte-level BPE tokenizer trained on this file, and Qwen's chat
    template."""
    directory = tmp_path_factory.mktemp("qwen2")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([text_of(name) for name in NAMES], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT
    )
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_recipe_of_a_small_model_samples_cuts_and_learns(name, shrunk, tmp_path):
    """The recipe with a small model on a CPU (float32, 32-bit moments) and answers of at most 160
    tokens."""
    said = [
        f"policy.model={json.dumps(str(shrunk))}",
        "policy.devices=cpu",
        "policy.dtype=float32",
        "policy.optim=adamw",
        "training.max_completion_length=160",
        "training.num_generations=4",
        f"node.data_dir={json.dumps(str(tmp_path))}",
    ]
    config = settings.load(overrides=said, recipe=name).config
    training = config.training
    engine = make_whole_policy(
        config,
        open_policy(config.policy, None, lambda line: None),
        Counters(),
        send=lambda message: None,
    )
    sampling = Sampling(
        training.num_generations,
        training.max_completion_length,
        training.temperature,
        training.top_p,
    )
    samples = engine.generate(
        ["What is 3 + 4?", "Spell this word backward: tree"], sampling, engine.random_generator(1)
    )
    assert "<|im_start|>assistant" in engine.text.tokenizer.decode(samples[0].prompt_ids)
    completions = [completion for sample in samples for completion in sample.completions]
    assert any(c.finish == "length" and len(c.ids) == 160 for c in completions)
    rows = assemble(
        [own_group(sample, [1.0, 0.0, 0.0, 1.0]) for sample in samples], training.advantage
    )
    before = engine.score(rows.rows, training.temperature)
    for _ in range(2):
        assert engine.update(rows).stepped
    after = engine.score(rows.rows, training.temperature)
    gain = [sum(new) - sum(old) for (new, _), (old, _) in zip(after, before, strict=True)]
    assert float((torch.tensor(gain) * rows.advantages).sum()) > 0


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
    hidden, intermediate, layers, heads, keys, tied = SHAPES[
        re.search(r"-([\d.]+B)-", policy.model)[1]
    ]
    model = Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )
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


def test_error_of_a_large_row_names_the_remedy():
    line = str(RowTooLarge(3, 9000))
    assert "out of memory with 9000 tokens" in line
    assert all(
        remedy in line
        for remedy in (
            "training.max_completion_length",
            "policy.lora.r",
            "recipe",
            "`swarmnode plan`",
        )
    )


def test_the_defaults_suit_the_embedded_policy():
    assert settings.unsuitable_values(Config()) == []
