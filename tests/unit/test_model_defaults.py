"""Default training values by model, and the commands that use them."""

import json
import shutil
from importlib import resources

import pytest
from huggingface_hub import constants

from swarmnode import cli, model_defaults, settings
from swarmnode.doctor import checks
from swarmnode.swarm.membership import Membership
from tests.support.fakes.policy import write_tiny_policy

EMBEDDED = (3e-4, 8)
UNKNOWN, UNKNOWN_ADAPTER = (1e-6, 256), (1e-4, 256)
"""A model whose config.json is not here, and an adapter of rank 8 of it."""
SMALL, SMALL_ADAPTER = (1e-5, 256), (1e-3, 256)


@pytest.fixture(autouse=True)
def _no_file_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "default_file", lambda: tmp_path / "none.toml")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory for each name: a real model, the embedded policy exported, an adapter of it."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_policy(root / "real")
    with resources.as_file(resources.files("swarmnode.policy") / "embedded") as embedded:
        shutil.copytree(embedded, root / "exported")
        adapter = {"base_model_name_or_path": str(embedded)}
    config = root / "exported" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 8}))
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    (root / "damaged").mkdir()
    (root / "damaged" / "config.json").write_text("[1, 2")
    return root


def trained_with(config):
    return config.training.learning_rate, config.training.max_completion_length


@pytest.mark.parametrize(
    ("model", "rank", "expected"),
    [
        ("embedded", 0, EMBEDDED),
        ("org/model", 0, UNKNOWN),
        ("org/model", 8, UNKNOWN_ADAPTER),
        ("{models}/real", 0, SMALL),
        ("{models}/damaged", 0, UNKNOWN),
        ("{models}/none", 0, UNKNOWN),
        ("smollm2", 8, SMALL_ADAPTER),
        ("{models}/exported", 0, EMBEDDED),
        ("{models}/adapter", 0, EMBEDDED),
    ],
)
def test_defaults_follow_the_model(models, model, rank, expected):
    policy = [f"policy.model={model.format(models=models)}", f"policy.lora.r={rank}"]
    assert trained_with(settings.load(overrides=policy).config) == expected


def test_a_value_that_is_set_stays(models):
    printed = [f"policy.model={models / 'real'}", "training.learning_rate=3e-4"]
    assert trained_with(settings.load(overrides=printed).config) == (3e-4, 256)
    printed = ["policy.model=org/model", "training.max_completion_length=8"]
    assert trained_with(settings.load(overrides=printed).config) == (1e-6, 8)


def test_defaults_follow_when_the_model_changes(models):
    config = settings.load(overrides=["training.seed=3"]).config
    changed = settings.replaced(config, {"policy.model": str(models / "real")}, "test")
    assert trained_with(changed) == SMALL
    assert trained_with(settings.replaced(changed, {"policy.lora.r": 8}, "test")) == SMALL_ADAPTER
    back = settings.replaced(changed, {"policy.model": "embedded"}, "test")
    assert trained_with(back) == EMBEDDED
    assert not settings.is_set(changed, "training.learning_rate")


def test_init_warns_of_a_spoiling_learning_rate(tmp_path, models, capsys):
    printed = [f"policy.model={models / 'real'}", "training.max_completion_length=8"]
    options = [part for text in printed for part in ("--set", text)]
    assert cli.run(["init", "-d", str(tmp_path), *options]) == 0
    assert "warning: training.max_completion_length = 8 is" in capsys.readouterr().err
    other = tmp_path / "other"
    assert cli.run(["init", "-d", str(other), "--set", printed[0]]) == 0
    assert "warning" not in capsys.readouterr().err
    stored = Membership(settings.load(overrides=[f"node.data_dir={other}"]).config).store
    assert stored.get(stored.current()).manifest.rollouts.max_tokens == 256


@pytest.mark.parametrize(
    ("printed", "levels"),
    [
        ([], ["ok"]),
        (["policy.model=org/model"], ["ok"]),
        (["policy.model=org/model", "training.learning_rate=3e-4"], ["warn"]),
        (["policy.model=org/model", "training.max_completion_length=8"], ["warn"]),
    ],
)
def test_doctor_judges_training_by_the_model(printed, levels):
    config = settings.load(overrides=printed).config
    found = checks.check_training(config)
    assert [check.level for check in found] == levels


@pytest.mark.parametrize(
    ("parameters", "whole", "adapter"),
    [(134_515_008, 1e-5, 5e-4), (1.54e9, 3e-6, 1.5e-4), (7.6e9, 1.3e-6, 6.7e-5)],
)
def test_rate_falls_with_the_root_of_the_size(parameters, whole, adapter):
    rate = model_defaults.learning_rate
    assert (rate(parameters, 0, 32), rate(parameters, 16, 32)) == (whole, adapter)


def test_alpha_times_rate_is_constant():
    load = lambda *printed: settings.load(overrides=["policy.model=smollm2", *printed]).config
    for lora in ("policy.lora.r=4", "policy.lora.r=64", "policy.lora.lora_alpha=7"):
        config = load("policy.lora.r=16", lora)
        product = config.policy.lora.lora_alpha * config.training.learning_rate
        assert product == pytest.approx(32 * 5e-4, rel=0.05)


def test_default_alpha_is_twice_the_rank(models):
    config = settings.load(overrides=["policy.lora.r=24"]).config
    assert config.policy.lora.lora_alpha == 48
    assert not settings.is_set(config, "policy.lora.lora_alpha")
    other = settings.replaced(config, {"policy.lora.r": 4}, "test")
    assert other.policy.lora.lora_alpha == 8
    assert settings.replaced(other, {"policy.lora.lora_alpha": 5}, "").policy.lora.lora_alpha == 5


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""config.json of Qwen2.5-0.5B-Instruct."""


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of the Hub with the config.json of org/cached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--org--cached"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(QWEN))


def test_size_of_a_hub_model_is_that_of_its_cached_config(hub_cache):
    load = lambda *printed: settings.load(overrides=printed).config
    assert trained_with(load("policy.model=org/cached")) == (5.2e-6, 256)
    assert trained_with(load("policy.model=org/cached", "policy.lora.r=16")) == (2.6e-4, 256)
    assert trained_with(load("policy.model=org/cached", "policy.revision=other")) == UNKNOWN


def test_run_fetches_the_config_of_a_hub_model_for_its_rate(hub_cache, tmp_path, monkeypatch):
    fetched = []

    def download(model, name, revision):
        fetched.append((model, name))
        cache = tmp_path / "hub"
        (cache / "models--org--cached").rename(cache / "models--org--model")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    printed = [f"node.data_dir={tmp_path / 'node'}", "policy.model=org/model"]
    membership = Membership(settings.load(overrides=printed).config)
    assert trained_with(membership.prepare()) == (5.2e-6, 256)
    assert trained_with(membership.refresh()) == (5.2e-6, 256)
    assert fetched == [("org/model", "config.json")]
