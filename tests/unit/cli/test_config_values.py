"""`config set` refuses each value that a start would refuse, names its key, and saves nothing."""

import json

import pytest

from swarmnode import cli, settings
from swarmnode.wire import limits
from tests.support.fakes.policy import write_tiny_policy

BAD = [
    "policy.devices=gpu",
    "policy.devices=cuda:x",
    "policy.devices=",
    "policy.devices=cuda:0,cpu",
    "policy.devices=cuda:1,cuda:1",
    "policy.dtype=fp8",
    "policy.model=",
    "policy.model=~/no/such/model",
    "policy.model=not a model",
    "policy.model={tmp}/empty",
    "policy.model={tmp}/adapter",
    "policy.revision=a b",
    "policy.lora.r=-1",
    "policy.quantization=4",
    "policy.chat={system = 3}",
    "training.learning_rate=nan",
    "training.seed=99999999999999999999999",
    "training.step_interval=-inf",
    'training.options=["warm-up"]',
    'training.options=["lockstep", "continuous"]',
    "training.advantage=ppo",
    'stages.trust=["somebody"]',
    "network.listen_addrs=[]",
    'network.listen_addrs=["/dns4/example.org/tcp/9512"]',
    'network.listen_addrs=["0.0.0.0:9512"]',
    'network.announce_addrs=["/ip4/0.0.0.0/tcp/9512"]',
    'network.announce_addrs=["/ip4/203.0.113.5/tcp/0"]',
    'network.initial_peers=["/ip4/203.0.113.5/tcp/9512"]',
    "swarm.name=",
    "swarm.name=" + "ä" * 33,
    'swarm.name="a\\nb"',
    'node.name="\\u001b[2J"',
    "swarm.invite=/ip4/203.0.113.5/tcp/9512",
    "node.quiet_hours=25:00-07:00",
    "http.host=[::1]",
    "http.host=127.0.0.256",
    "http.host=",
    "http.metrics=9465",
    "http.metrics=0.0.0.0:65536",
    "http.port=65536",
    "task.names=[]",
    'task.names=["gsm8k"]',
    'task.names=["rg/chain_sum", "rg/chain_sum"]',
    'task.names=["data/mine"]',
    'task.modules=["no_such_module_here:reward"]',
]
GOOD = [
    "policy.devices=cuda:1",
    "policy.devices=2",
    "policy.devices=cuda:0,cuda:2",
    "policy.model=Qwen/Qwen2.5-0.5B-Instruct",
    "policy.model={tmp}/model",
    "policy.revision=7ae557604adf67be50417f59c2c2f167def9a775",
    "policy.revision=1e5",
    "node.name=1979-05-27",
    "swarm.name=日本語",
    "node.quiet_hours=22:00-07:00",
    "http.host=::",
    "http.metrics=[::]:9465",
    "http.host=my-machine.local",
    "training.seed=9223372036854775807",
    "training.max_completion_length=16384",
    'network.listen_addrs=["/ip6/::/tcp/9512"]',
    'network.announce_addrs=["/dns4/example.org/tcp/9512"]',
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("places")
    write_tiny_policy(root / "model")
    (root / "empty").mkdir()
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    return root


@pytest.fixture(autouse=True)
def _no_file_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "default_file", lambda: tmp_path / "none.toml")


@pytest.mark.parametrize("setting", BAD)
def test_invalid_values_are_not_saved(tmp_path, places, capsys, setting):
    setting = setting.replace("{tmp}", str(places))
    assert cli.run(["config", "set", setting, "-d", str(tmp_path)]) == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert setting.partition("=")[0] in error
    assert not settings.saved_file(tmp_path).exists()


@pytest.mark.parametrize("setting", GOOD)
def test_valid_values_are_saved(tmp_path, places, setting):
    setting = setting.replace("{tmp}", str(places))
    assert cli.run(["config", "set", setting, "-d", str(tmp_path)]) == 0
    key, _, value = setting.partition("=")
    kept = settings.value(settings.load(overrides=[f"node.data_dir={tmp_path}"]).config, key)
    assert kept == value or json.loads(value) == kept


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("policy.devices=cpu", "policy.optim=adamw_8bit"),
        ("policy.optim=adamw_8bit", "policy.devices=mps"),
    ],
)
def test_conflicting_values_are_not_saved(tmp_path, capsys, first, second):
    assert cli.run(["config", "set", first, "-d", str(tmp_path)]) == 0
    kept = settings.saved_file(tmp_path).read_text()
    assert cli.run(["config", "set", second, "-d", str(tmp_path)]) == 78
    assert capsys.readouterr().err.count("\n") == 1
    assert settings.saved_file(tmp_path).read_text() == kept


def test_checks_environment_variables(monkeypatch, capsys):
    monkeypatch.setenv("SWARMNODE_POLICY_DEVICES", "gpu")
    assert cli.run(["config", "show"]) == 78
    assert "environment SWARMNODE_POLICY_DEVICES: policy.devices:" in capsys.readouterr().err


def test_a_relative_model_path_becomes_absolute(tmp_path, places, monkeypatch):
    monkeypatch.chdir(places)
    assert cli.run(["config", "set", "policy.model=./model", "-d", str(tmp_path / "node")]) == 0
    monkeypatch.chdir(tmp_path)
    kept = settings.load(overrides=[f"node.data_dir={tmp_path / 'node'}"]).config
    assert kept.policy.model == str(places / "model")


def test_unshared_completions_may_be_longer(tmp_path):
    overrides = ["training.max_completion_length=32768", "sharing.enabled=false"]
    assert settings.load(overrides=overrides).config.training.max_completion_length == 32768


def test_limits_equal_those_of_the_protocol():
    from swarmnode import config

    assert config.TOKENS == limits.TOKENS
    assert config.TEMPERATURE == limits.TEMPERATURE
    assert config.GROUPS_PER_SECOND == limits.GROUPS_PER_SECOND
    assert config.NAME_BYTES == limits.MANIFEST_NAME_BYTES == limits.SUMMARY_NAME_BYTES
