"""Default training values by model, and the commands that use them."""

import json
import shutil
from importlib import resources

import pytest

from swarmnode import cli, settings
from swarmnode.config import Config
from swarmnode.doctor import checks
from swarmnode.swarm import export as exporting
from swarmnode.swarm import manifest
from swarmnode.swarm.membership import Membership
from swarmnode.wire.messages import ModelRef
from tests.support.fakes.policy import write_tiny_policy
from tests.support.manifests import founded

EMBEDDED, WHOLE, ADAPTER = (3e-4, 8), (1e-6, 256), (1e-5, 256)


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
        ("embedded", 8, EMBEDDED),
        ("org/model", 0, WHOLE),
        ("org/model", 8, ADAPTER),
        ("{models}/real", 0, WHOLE),
        ("{models}/real", 8, ADAPTER),
        ("{models}/damaged", 0, WHOLE),
        ("{models}/none", 0, WHOLE),
        ("{models}/exported", 0, EMBEDDED),
        ("{models}/exported", 8, EMBEDDED),
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


def test_recipe_overrides_defaults():
    config = settings.load(recipe="24gb-7b-lora").config
    assert trained_with(config) == (1e-5, 2048)


def test_defaults_follow_when_the_model_changes(models):
    config = settings.load(overrides=["training.seed=3"]).config
    changed = settings.replaced(config, {"policy.model": str(models / "real")}, "test")
    assert trained_with(changed) == WHOLE
    assert trained_with(settings.replaced(changed, {"policy.lora.r": 4}, "test")) == ADAPTER
    back = settings.replaced(changed, {"policy.model": "embedded"}, "test")
    assert trained_with(back) == EMBEDDED
    assert not settings.is_set(changed, "training.learning_rate")


def test_child_process_gets_the_same_values(models):
    config = settings.load(overrides=[f"policy.model={models / 'real'}"]).config
    assert trained_with(Config.model_validate_json(config.model_dump_json())) == WHOLE


def test_config_show_names_the_origin(models, capsys, tmp_path):
    printed = ["--set", f"policy.model={models / 'real'}", "-d", str(tmp_path)]
    assert cli.run(["config", "show", "--json", *printed]) == 0
    result = json.loads(capsys.readouterr().out)
    rate, length = result["training.learning_rate"], result["training.max_completion_length"]
    assert (rate["value"], length["value"]) == WHOLE
    assert rate["origin"] == length["origin"] == "default for this model"
    assert result["training.temperature"]["origin"] == "default"


def test_manifest_has_the_models_completion_length(models):
    config = Config.model_validate({"policy": {"model": str(models / "real")}})
    assert founded(config=config).manifest.rollouts.max_tokens == 256


def test_unset_values_follow_the_swarms_model():
    opened = founded(
        config=Config.model_validate({"policy": {"model": "org/model"}}),
        models=[ModelRef("org/model", "", b"\1" * 32, b"\2" * 32)],
    )
    agreed, _ = manifest.apply_terms(Config(), opened)
    assert agreed.policy.model == "org/model"
    assert trained_with(agreed) == WHOLE


def test_init_warns_of_a_spoiling_learning_rate(tmp_path, models, capsys):
    printed = [f"policy.model={models / 'real'}", "training.max_completion_length=8"]
    options = [part for text in printed for part in ("--set", text)]
    assert cli.run(["init", "-d", str(tmp_path), *options]) == 0
    assert "warning: training.max_completion_length = 8 cuts" in capsys.readouterr().err
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
    found = checks.check_training(config.policy, config.training)
    assert [check.level for check in found] == levels


def test_plan_shows_the_defaults_of_a_run(models, capsys):
    assert cli.run(["plan", str(models / "real"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {each["name"]: each["defaults"] for each in result["choices"]}
    assert found["all weights"] == {"learning_rate": 1e-6, "max_completion_length": 256}
    assert found["LoRA 16"] == {"learning_rate": 1e-5, "max_completion_length": 256}
    assert result["length"] == 256 + 512


def test_export_names_the_learning_rate(models):
    config = settings.load(overrides=[f"policy.model={models / 'real'}"]).config
    terms = {key: settings.value(config, key) for key in exporting.CARD_SETTINGS}
    assert terms["training.learning_rate"] == 1e-6


def test_template_names_values_of_other_models():
    line = next(line for line in settings.template().splitlines() if "learning_rate" in line)
    assert line == "# learning_rate = 0.0003  # another model: 1e-06, an adapter of one: 1e-05"
