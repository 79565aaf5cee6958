"""The command line: fast help, one-line errors, exit codes, and no import of large packages."""

import json
import os
import subprocess
import sys

import pytest

from swarmnode import cli, settings
from swarmnode.cli import options as cli_options


def swarmnode(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


TRAINING = {"torch", "transformers", "peft", "accelerate"}
HEAVY = TRAINING | {"libp2p", "reasoning_gym", "prometheus_client", "trio", "pydantic"}
HELP = "sys.stdout = sys.stderr; from swarmnode.cli import run; run(['--help'])"


@pytest.mark.parametrize(
    ("work", "never"),
    [
        (HELP, HEAVY),
        ("import swarmnode.daemon.node", TRAINING),
        ("import swarmnode.daemon.supervisor", TRAINING | {"libp2p"}),
        ("import swarmnode.doctor.command", TRAINING | {"libp2p"}),
        ("import swarmnode.tasks.scorer", TRAINING | {"libp2p"}),
        ("import swarmnode.link.server", TRAINING),
    ],
)
def test_each_process_loads_only_its_packages(work, never):
    code = f"import sys; {work}\nprint(' '.join(sys.modules), file=sys.__stdout__)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "swarmnode" in result.stdout
    assert not set(result.stdout.split()) & never


def test_bash_completes_commands_options_and_directories(tmp_path):
    """Source the installed script in a real shell."""
    (tmp_path / "here").mkdir()
    home = {**os.environ, "HOME": str(tmp_path)}
    swarmnode("--install-completion", "--shell", "bash", "-o", "completion", env=home, cwd=tmp_path)

    def completed(*words):
        script = (
            f"source ./completion; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1};"
            " _swarmnode; echo ${COMPREPLY[@]}"
        )
        shell = ["bash", "--norc", "--noprofile", "-c", script]
        return subprocess.run(
            shell, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        ).stdout.split()

    assert completed("swarmnode", "st") == ["status"]
    assert completed("swarmnode", "config", "s") == ["show", "set"]
    assert "--no-run" in completed("swarmnode", "join", "--no")
    assert completed("swarmnode", "status", "-d", "he") == ["here"]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ("run --bogus", 2, "--bogus"),
        ("run --stage-capacity=much", 78, "much"),
        ("run --stage-capacity=-1", 78, "-1"),
        ("status --url nonsense", 78, "nonsense: not an address such as 127.0.0.1:9464"),
        ("status -d {tmp}/none", 69, "run in {tmp}/none yet, or it has no status page: set"),
        ("status -d {tmp}/stopped", 69, "no node answers at http://127.0.0.1:9: Connection"),
        ("run --config {tmp}", 78, "{tmp}: Is a directory"),
        ("run --data-dir {tmp}/binary", 69, "{tmp}/binary cannot be used: it is not a directory"),
        ("run --set policy.model={tmp}/none", 78, "policy.model: {tmp}/none: no such directory"),
        ("manifest show -d {tmp}/damaged", 69, "does not hold a swarm id; join again"),
        ("config show -d {tmp}/moved", 78, "node.data_dir cannot be set in the directory itself"),
        ("--install-completion --shell bash -o {tmp}/binary/script", 69, "{tmp}/binary"),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path, capsys, arguments, code, problem):
    files = {
        "binary": "nonsense",
        "damaged/manifest/current": "nonsense",
        "stopped/run/addresses.json": '{"peer": "12D3KooW", "addrs": [], "http": "http://127.0.0.1:9"}',
        "moved/config.toml": '[node]\ndata_dir = "/elsewhere"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.run(arguments.replace("{tmp}", str(tmp_path)).split()) == code
    error = capsys.readouterr().err
    assert problem.replace("{tmp}", str(tmp_path)) in error
    assert "Errno" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GiB", 6 * 2**30), ("1.5 gb", 1_500_000_000), ("1048576", 2**20), ("0", 0)],
)
def test_a_stage_capacity_is_a_size(text, count):
    loaded = cli_options.load(cli_options.NODE, tasks=False, stage_capacity=text)
    assert loaded.config.stages.capacity == count


def test_crew_on_an_episode_task_does_not_start(tmp_path, capsys):
    asked = ['task.names=["gym/FrozenLake-v1"]', "stages.mode=always", f"node.data_dir={tmp_path}"]
    assert cli.run(["run", *(f"--set={each}" for each in asked)]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert "has episodes of several turns, and a crew trains on single answers" in line
    assert line.endswith("leave the task out, or set stages.mode to off")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Replace the user's configuration directory by an empty one."""
    monkeypatch.setattr(settings, "default_file", lambda: tmp_path / "home" / "config.toml")
    return tmp_path


def shown(capsys, *arguments):
    assert cli.run(["config", "show", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_saved_settings_are_overridden_in_order(home, capsys, monkeypatch):
    node = home / "node"
    (home / "home").mkdir()
    (home / "home" / "config.toml").write_text(
        '[node]\nname = "usual"\nquiet_hours = "22:00-07:00"\n'
    )
    listen = 'network.listen_addrs=["/ip4/0.0.0.0/tcp/9512"]'
    rest = ("policy.lora.r=8", "training.learning_rate=1e-5")
    for setting in ("node.name=bob smith", listen, *rest):
        assert cli.run(["config", "set", setting, "-d", str(node)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"saved in {node / 'config.toml'}"
    values = shown(capsys, "-d", node)
    assert values["node.name"] == {"value": "bob smith", "origin": str(node / "config.toml")}
    assert values["node.quiet_hours"]["value"] == "22:00-07:00"
    assert values["network.listen_addrs"]["value"] == ["/ip4/0.0.0.0/tcp/9512"]
    assert values["policy.lora.r"]["value"] == 8
    assert values["training.learning_rate"]["value"] == 1e-5
    (home / "named.toml").write_text('[node]\nname = "named"\n')
    assert shown(capsys, "-d", node, "-c", home / "named.toml")["node.name"]["value"] == "named"
    monkeypatch.setenv("SWARMNODE_NODE_NAME", "environment")
    assert shown(capsys, "-d", node)["node.name"]["value"] == "environment"
    assert shown(capsys, "-d", node, "--set", "node.name=now")["node.name"]["value"] == "now"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("node.nam=x", "unknown key node.nam (nearest: node.name)"),
        ("nonsense", "not key=value"),
        ("network.listen_addrs=/ip4/0.0.0.0/tcp/1", """listen_addrs=["/ip4/0.0.0.0/tcp/1"]'"""),
        ("node.data-dir=/elsewhere", "node.data_dir cannot be saved in the directory itself"),
    ],
)
def test_invalid_settings_are_not_saved(home, capsys, setting, problem):
    assert cli.run(["config", "set", setting, "-d", str(home / "node")]) == 78
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (home / "node").exists()
