"""The command line: fast help, one-line errors, exit codes, and no import of large packages."""

import json
import os
import subprocess
import sys

import pytest
import structlog

from swarmnode import cli, settings
from swarmnode.cli import options as cli_options
from swarmnode.config import Config
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.wire.messages import ModelRef
from tests.support.manifests import founded

HEAVY = {
    "torch",
    "transformers",
    "libp2p",
    "reasoning_gym",
    "accelerate",
    "peft",
    "prometheus_client",
    "trio",
    "pydantic",
}


def swarmnode(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **kwargs,
    )


def test_help_loads_no_large_package():
    code = (
        "import sys\nfrom swarmnode.cli import run\nrun(['--help'])\nprint('\\nMODULES ' + '"
        " '.join(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    loaded = set(result.stdout.rpartition("MODULES ")[2].split())
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("swarmnode.daemon.node", {"torch", "transformers", "peft", "accelerate"}),
        ("swarmnode.daemon.supervisor", {"torch", "transformers", "libp2p"}),
        ("swarmnode.doctor.command", {"torch", "transformers", "libp2p"}),
        ("swarmnode.tasks.scorer", {"torch", "transformers", "libp2p"}),
        ("swarmnode.link.server", {"torch", "transformers"}),
    ],
)
def test_each_process_loads_only_its_packages(module, never):
    code = f"import sys, {module}\nprint(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not set(result.stdout.split()) & never


def test_bash_completes_commands_options_and_directories(tmp_path):
    """Source the output of `swarmnode completion bash` in a real shell."""
    (tmp_path / "here").mkdir()
    (tmp_path / "completion").write_text(swarmnode("completion", "bash").stdout)

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


def test_completion_is_installed_once(tmp_path):
    home = {**os.environ, "HOME": str(tmp_path)}
    for _ in range(2):
        done = swarmnode("completion", "bash", "--install", env=home)
        assert (done.returncode, done.stderr) == (0, "")
    (script,) = tmp_path.rglob("completions/swarmnode")
    assert str(script) in done.stdout
    assert (tmp_path / ".bashrc").read_text().count(
        str(script)
    ) == 2  # one line names it twice: [ -f … ] && . …


def test_an_unknown_flag_is_one_line(capsys):
    assert cli.run(["run", "--bogus"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--bogus" in error


def test_an_unknown_key_is_one_line(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("[training]\nlearning_rat = 1\n")
    assert cli.run(["run", "--config", str(path)]) == 78
    assert (
        capsys.readouterr().err == f"swarmnode: {path}: unknown key training.learning_rat (nearest:"
        " training.learning_rate)\n"
    )


@pytest.fixture
def not_started(monkeypatch):
    """Replace the supervisor, so that `run` starts no process."""
    monkeypatch.setattr("swarmnode.daemon.supervisor.run", lambda *arguments: 0)
    monkeypatch.setattr("swarmnode.observe.logs.configure", lambda *arguments, **others: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("model", ["embedded", "smollm2"])
@pytest.mark.usefixtures("not_started")
def test_run_names_a_real_model_if_it_trains_the_toy(tmp_path, monkeypatch, model):
    monkeypatch.setattr("swarmnode.cli.node._find_model_problems", lambda policy: [])
    with structlog.testing.capture_logs() as lines:
        assert cli.run(["run", "-d", str(tmp_path), "--set", f"policy.model={model}"]) == 0
    named = any("--set policy.model=smollm2" in line.get("real_model", "") for line in lines)
    assert named is (model == "embedded")


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ([], []),
        (
            ["--set", "training.learning_rate=3e-4"],
            ["training.learning_rate = 0.0003 with all weights of org/model"],
        ),
    ],
)
@pytest.mark.usefixtures("not_started")
def test_run_warns_of_values_unsuited_to_the_model(tmp_path, capsys, options, warned):
    opened = founded(models=[ModelRef("org/model", "main", b"\x11" * 32, b"\x22" * 32)])
    store = ManifestStore(tmp_path)
    store.add(opened)
    store.choose(opened.swarm)
    assert (
        cli.run(
            ["run", "-d", str(tmp_path), "--set", "training.max_completion_length=64", *options]
        )
        == 0
    )
    warnings = [line for line in capsys.readouterr().err.splitlines() if "learning_rate" in line]
    assert [line.partition(" probably spoils it")[0] for line in warnings] == [
        f"swarmnode: warning: {each}" for each in warned
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["status", "--url", "nonsense"], 78, "nonsense: not an address such as 127.0.0.1:9464"),
        (
            ["status", "-d", "{tmp}/none"],
            69,
            "run in {tmp}/none yet, or it has no status page: set another -d DIR, or HOST:PORT",
        ),
        (
            ["status", "-d", "{tmp}/stopped"],
            69,
            "no node answers at http://127.0.0.1:9: Connection refused",
        ),
        (["run", "--config", "{tmp}"], 78, "{tmp}: Is a directory"),
        (
            ["run", "--data-dir", "{tmp}/binary"],
            69,
            "data directory {tmp}/binary cannot be used: it is not a directory",
        ),
        (
            ["run", "--set", "policy.model={tmp}/none"],
            78,
            "command line: policy.model: {tmp}/none: no such directory",
        ),
        (
            ["manifest", "show", "--data-dir", "{tmp}/damaged"],
            69,
            "does not hold a swarm id; join again",
        ),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path, capsys, arguments, code, problem):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "text.gguf").write_text("nonsense")
    (tmp_path / "damaged" / "manifest").mkdir(parents=True)
    (tmp_path / "damaged" / "manifest" / "current").write_text("nonsense")
    for name, text in (
        ("damaged", "{"),
        ("stopped", '{"peer": "12D3KooW", "addrs": [], "http": "http://127.0.0.1:9"}'),
    ):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "addresses.json").write_text(text)
    assert cli.run([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert problem.replace("{tmp}", str(tmp_path)) in error
    assert "Errno" not in error
    assert error.count("\n") == 1


def test_config_show_prints_origins(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWARMNODE_HTTP_PORT", "9999")
    assert (
        cli.run(
            [
                "config",
                "show",
                "--json",
                "--data-dir",
                str(tmp_path),
                "--peer",
                "/ip4/1.2.3.4/tcp/5/p2p/x",
            ]
        )
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["http.port"] == {"value": 9999, "origin": "environment SWARMNODE_HTTP_PORT"}
    assert shown["network.initial_peers"] == {
        "value": ["/ip4/1.2.3.4/tcp/5/p2p/x"],
        "origin": "command line",
    }
    assert shown["training.seed"]["origin"] == "default"


def test_key_commands_print_json(tmp_path, capsys):
    def key(*argv):
        assert cli.run(["key", *argv, "--data-dir", str(tmp_path / "node"), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    first = key("show")["peer"]
    assert key("backup", str(tmp_path / "copy.key")) == {
        "peer": first,
        "file": str(tmp_path / "copy.key"),
    }
    rotated = key("rotate")
    assert rotated["former_peer"] == first != rotated["peer"]
    brought = key("import", str(tmp_path / "copy.key"), "--replace")
    assert brought["peer"] == first
    assert {rotated["former_key"], brought["former_key"]} == {
        str(path) for path in (tmp_path / "node").glob("identity-*.key")
    }


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GiB", 6 * 2**30), ("1.5 gb", 1_500_000_000), ("1048576", 2**20), ("0", 0)],
)
def test_a_stage_capacity_is_a_size(text, count):
    assert (
        cli_options.load(cli_options.NODE, tasks=False, stage_capacity=text).config.stages.capacity
        == count
    )


@pytest.mark.parametrize("text", ["much", "-1"])
def test_an_invalid_stage_capacity_is_one_line(text, capsys):
    assert cli.run(["run", f"--stage-capacity={text}"]) == 78
    assert capsys.readouterr().err.count("\n") == 1


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
    for setting in (
        "node.name=bob smith",
        listen,
        "policy.lora.r=8",
        "training.learning_rate=1e-5",
    ):
        assert cli.run(["config", "set", setting, "-d", str(node)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"saved in {node / 'config.toml'}"
    values = shown(capsys, "-d", node)
    assert values["node.name"] == {"value": "bob smith", "origin": str(node / "config.toml")}
    assert values["node.quiet_hours"]["value"] == "22:00-07:00"
    assert values["network.listen_addrs"]["value"] == ["/ip4/0.0.0.0/tcp/9512"]
    assert (values["policy.lora.r"]["value"], values["training.learning_rate"]["value"]) == (
        8,
        1e-5,
    )
    (home / "named.toml").write_text('[node]\nname = "named"\n')
    assert shown(capsys, "-d", node, "-c", home / "named.toml")["node.name"]["value"] == "named"
    monkeypatch.setenv("SWARMNODE_NODE_NAME", "environment")
    assert shown(capsys, "-d", node)["node.name"]["value"] == "environment"
    assert shown(capsys, "-d", node, "--set", "node.name=now")["node.name"]["value"] == "now"


def test_settings_override_a_saved_recipe(home, capsys):
    node = home / "node"
    assert (
        cli.run(["config", "set", "--recipe", "24gb-7b-lora", "policy.lora.r=8", "-d", str(node)])
        == 0
    )
    capsys.readouterr()
    values = shown(capsys, "-d", node)
    kept = {
        key: each["value"]
        for key, each in values.items()
        if each["origin"] == str(node / "config.toml")
    }
    assert (kept["policy.model"], kept["policy.lora.r"]) == ("Qwen/Qwen2.5-7B-Instruct", 8)
    assert kept["training.max_completion_length"] == 2048


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["set", "node.nam=x"], 78, "unknown key node.nam (nearest: node.name)"),
        (["set", "nonsense"], 78, "not key=value"),
        (
            ["set", "network.listen_addrs=/ip4/0.0.0.0/tcp/1"],
            78,
            """write 'network.listen_addrs=["/ip4/0.0.0.0/tcp/1"]'""",
        ),
        (
            ["set", "node.data-dir=/elsewhere"],
            78,
            "node.data_dir cannot be saved in the directory itself",
        ),
        (["init", "{tmp}/there.toml"], 69, "exists; `swarmnode config set`"),
    ],
)
def test_invalid_settings_are_not_saved(home, capsys, arguments, code, problem):
    (home / "there.toml").write_text("")
    node = ["-d", str(home / "node")] if arguments[0] == "set" else []
    assert (
        cli.run(
            ["config", *(argument.replace("{tmp}", str(home)) for argument in arguments), *node]
        )
        == code
    )
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (home / "node").exists()


def test_a_data_directory_cannot_set_another(home, capsys):
    (home / "node").mkdir()
    (home / "node" / "config.toml").write_text('[node]\ndata_dir = "/elsewhere"\n')
    assert cli.run(["config", "show", "-d", str(home / "node")]) == 78
    assert "node.data_dir cannot be set in the directory itself" in capsys.readouterr().err


def test_the_template_contains_the_defaults(home, capsys):
    assert cli.run(["config", "init"]) == 0
    file = settings.default_file()
    assert str(file) in capsys.readouterr().out
    assert settings.load().origins == {}
    uncommented = [line.removeprefix("# ") for line in file.read_text().splitlines()[1:]]
    file.write_text("\n".join(line for line in uncommented if not line.endswith(" =")))
    assert settings.load().config == Config()


def test_config_path_lists_the_files(home, capsys):
    assert cli.run(["config", "path", "-d", str(home / "node"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [
        str(settings.default_file()),
        str(home / "node" / "config.toml"),
    ]
    (home / "c.toml").write_text("")
    assert cli.run(["config", "path", "-d", str(home / "node"), "-c", str(home / "c.toml")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{home / 'node' / 'config.toml'}  (absent)",
        str(home / "c.toml"),
    ]
