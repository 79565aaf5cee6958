"""Precedence, and that every mistake is one line naming origin, key and the nearest valid key."""

import json

import pytest

from swarmnode import settings
from swarmnode.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_file_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "default_file", lambda: tmp_path / "none.toml")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        "[training]\nlearning_rate = 0.001\nnum_generations = 4\n[policy.lora]\nr = 8\n"
    )
    return path


def test_precedence_of_sources(file):
    environment = {
        "SWARMNODE_TRAINING_LEARNING_RATE": "0.002",
        "SWARMNODE_TRAINING_SEED": "7",
        "PATH": "x",
    }
    resolved = settings.load(file, environment, ["training.seed=9"])
    assert resolved.config.training.learning_rate == 0.002
    assert resolved.config.training.num_generations == 4
    assert resolved.config.training.seed == 9
    assert resolved.config.policy.lora.r == 8
    origins = {key: origin for key, _, origin in resolved.rows()}
    assert origins["training.seed"] == "command line"
    assert origins["training.learning_rate"] == "environment SWARMNODE_TRAINING_LEARNING_RATE"
    assert origins["policy.lora.r"] == str(file)
    assert origins["training.temperature"] == "default"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[training]\nlearning_rat = 1\n",
            "{file}: unknown key training.learning_rat (nearest: training.learning_rate)",
        ),
        (
            "[trainin]\nx = 1\n",
            "{file}: unknown key trainin; correct or remove this line",
        ),
        (
            '[task.settings."rg/gcd"]\nx = [1, 2]\n',
            '{file}: task.settings."rg/gcd".x: Input should be true, false, a number or a text',
        ),
        (
            "[training]\nlearning_rate = -1\n",
            "{file}: training.learning_rate: Input should be greater than 0",
        ),
        ("[policy.lora]\nr = 'a'\n", "{file}: policy.lora.r: Input should be a valid integer"),
        ("[training]\nlearning_rate = [1\n", "{file}: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, text, line):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings.load(path)
    assert str(caught.value).startswith(line.format(file=path))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 78


def test_mistakes_name_their_origin():
    with pytest.raises(
        ConfigError,
        match=r"environment: unknown key SWARMNODE_HTTP_PROT \(nearest: SWARMNODE_HTTP_PORT\)",
    ):
        settings.load(environment={"SWARMNODE_HTTP_PROT": "1"})
    with pytest.raises(
        ConfigError, match=r"command line: unknown key http.prot \(nearest: http.port\)"
    ):
        settings.load(overrides=["http.prot=1"])
    with pytest.raises(ConfigError, match="not key=value"):
        settings.load(overrides=["http.port"])
    with pytest.raises(
        ConfigError, match=r"command line: policy\.quantization: .*needs an adapter"
    ):
        settings.load(overrides=["policy.quantization=4bit"])


def test_manifest_only_keys_are_not_settings():
    with pytest.raises(ConfigError, match=r"command line: unknown key swarm.id"):
        settings.load(overrides=["swarm.id=" + "0" * 64])


def test_configuration_page_is_up_to_date():
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == settings.reference(), (
        "run: python -m swarmnode.settings > docs/configuration.md"
    )
    assert "None |" not in settings.reference(), "a key without a description"
    rows = [line for line in settings.reference().splitlines() if line.startswith("| `")]
    assert all(line.endswith(" |") for line in rows), "a row of a table is one line"


def test_table_entry_is_set_by_its_quoted_name(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[task.settings."my-task"]\nx = 1\ny = 2\n')
    found = settings.load(
        path,
        overrides=[
            'task.settings."my-task".x=3',
            'task.settings."games.more:guess".turns = 6',
            "task.settings.a-b.c=text with spaces",
            "policy.chat.system=Be brief.",
        ],
    )
    assert found.config.task.settings == {
        "my-task": {"x": 3, "y": 2},
        "games.more:guess": {"turns": 6},
        "a-b": {"c": "text with spaces"},
    }
    assert found.config.policy.chat == {"system": "Be brief."}
    assert found.origins["task.settings"] == "command line"


def test_an_entry_of_a_table_is_kept(tmp_path):
    settings.save(tmp_path, ['task.settings={"my-task" = {x = 1, y = 2}}'])
    settings.save(tmp_path, ['task.settings."my-task".x=3'])
    data_dir = f"node.data_dir={json.dumps(str(tmp_path))}"
    kept = settings.load(overrides=[data_dir]).config.task.settings
    assert kept == {"my-task": {"x": 3, "y": 2}}


def test_unquoted_name_is_one_line_with_the_remedy():
    with pytest.raises(ConfigError, match=r'quote .*: task\.settings\."games:guess"\.turns$'):
        settings.load(overrides=["task.settings.games:guess.turns=6"])
    with pytest.raises(ConfigError, match=r"command line: task\.settings: 7 is not a table"):
        settings.load(overrides=["task.settings=7", "task.settings.a.b=1"])
    with pytest.raises(ConfigError, match=r"unknown key task\.setting\.a"):
        settings.load(overrides=["task.setting.a=1"])
