"""The command line as a person meets it: fast help, one-line errors, exit codes; and nothing heavy loaded for either."""

import contextlib
import json
import resource
import subprocess
import sys

import pytest

from swarmnode import cli
from swarmnode.cli import options as cli_options

HEAVY = {"torch", "transformers", "libp2p", "reasoning_gym", "accelerate", "peft", "prometheus_client", "trio", "pydantic"}


def swarmnode(*arguments, **kwargs):
    return subprocess.run([sys.executable, "-m", "swarmnode", *arguments], capture_output=True, text=True, timeout=60, **kwargs)


def test_help_answers_within_half_a_second_and_names_the_commands():
    times = []
    for _ in range(5):  # CPU seconds, the best of five: that others keep the machine busy is not the command's fault
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = swarmnode("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert result.returncode == 0
    for command in ("demo", "run", "status", "top", "config", "key"):
        assert command in result.stdout
    assert min(times) < 0.5


def test_help_loads_nothing_heavy():
    code = "import sys\nfrom swarmnode.cli import run\nrun(['--help'])\nprint('\\nMODULES ' + ' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(result.stdout.rpartition("MODULES ")[2].split())
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("swarmnode.daemon.node", {"torch", "transformers", "peft", "accelerate"}),
        ("swarmnode.daemon.supervisor", {"torch", "transformers", "libp2p"}),
        ("swarmnode.tasks.scorer", {"torch", "transformers", "libp2p"}),
        ("swarmnode.link.server", {"torch", "transformers"}),
    ],
)
def test_each_process_loads_only_what_it_may(module, never):
    code = f"import sys, {module}\nprint(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(result.stdout.split()) & never


def test_a_wrong_flag_is_one_line_and_exit_two(capsys):
    assert cli.run(["run", "--bogus"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--bogus" in error


def test_a_wrong_key_is_one_line_and_exit_78(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("[training]\nlearning_rat = 1\n")
    assert cli.run(["run", "--config", str(path)]) == 78
    assert capsys.readouterr().err == f"swarmnode: {path}: unknown key training.learning_rat (nearest: training.learning_rate)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["demo", "--nodes", "0"], 2, "--nodes"),
        (["demo", "--minutes", "-5"], 2, "--minutes"),
        (["demo", "--kill", "-1"], 2, "--kill"),
        (["demo", "--http-port", "99999"], 2, "--http-port"),
        (["demo", "--data-dir", "{tmp}/binary"], 69, "--data-dir {tmp}/binary cannot be used: File exists"),
        (["status", "--url", "nonsense"], 78, "--url nonsense: not an address such as http://127.0.0.1:9464"),
        (["top", "--url", "ftp://x"], 78, "--url ftp://x"),
        (["status", "--url", "http://127.0.0.1:9"], 69, "Connection refused; does it run, and with this http.port?"),
        (["run", "--config", "{tmp}"], 78, "{tmp}: Is a directory"),
        (["run", "--config", "{tmp}/binary"], 78, "not UTF-8 text"),
        (["run", "--data-dir", "{tmp}/binary"], 69, "data directory {tmp}/binary cannot be used: it is not a directory"),
        (["key", "show", "--data-dir", "{tmp}/binary"], 69, "data directory {tmp}/binary cannot be used: it is not a directory"),
        (["key", "rotate", "--data-dir", "{tmp}/binary/below"], 69, "data directory {tmp}/binary/below cannot be used"),
        (["manifest", "show", "--data-dir", "{tmp}/damaged"], 69, "does not hold a swarm id; join again"),
    ],
)
def test_a_wrong_call_is_one_line_that_says_what_is_wrong(tmp_path, capsys, arguments, code, says):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "damaged" / "manifest").mkdir(parents=True)
    (tmp_path / "damaged" / "manifest" / "current").write_text("nonsense")
    assert cli.run([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert says.replace("{tmp}", str(tmp_path)) in error
    assert "Errno" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("task", "says"), [("rg/countdown", "countdown"), ("rg/chain_sun", "rg/chain_sum")])
def test_a_task_that_is_not_allowed_is_refused_by_name(tmp_path, capsys, task, says):
    assert cli.run(["run", "--data-dir", str(tmp_path), "--set", f'task.names=["{task}"]']) == 78
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_config_show_tells_where_a_value_was_set(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWARMNODE_HTTP_PORT", "9999")
    assert cli.run(["config", "show", "--json", "--data-dir", str(tmp_path), "--peer", "/ip4/1.2.3.4/tcp/5/p2p/x"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["http.port"] == {"value": 9999, "origin": "environment SWARMNODE_HTTP_PORT"}
    assert shown["network.initial_peers"] == {"value": ["/ip4/1.2.3.4/tcp/5/p2p/x"], "origin": "command line"}
    assert shown["training.seed"]["origin"] == "default"


def test_key_show_prints_the_same_peer_id_twice_and_never_the_key(tmp_path, capsys):
    assert cli.run(["key", "show", "--data-dir", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert cli.run(["key", "show", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("12D3KooW")
    assert (tmp_path / "identity.key").stat().st_mode & 0o777 == 0o600


def test_key_commands_answer_a_script(tmp_path, capsys):
    def key(*argv):
        assert cli.run(["key", *argv, "--data-dir", str(tmp_path / "node"), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    first = key("show")["peer"]
    assert key("backup", str(tmp_path / "copy.key")) == {"peer": first, "file": str(tmp_path / "copy.key")}
    rotated = key("rotate")
    assert rotated["former_peer"] == first != rotated["peer"]
    brought = key("import", str(tmp_path / "copy.key"), "--replace")
    assert brought["peer"] == first
    assert {rotated["former_key"], brought["former_key"]} == {str(path) for path in (tmp_path / "node").glob("identity-*.key")}


@pytest.mark.parametrize("command", ["run", "join", "doctor", "config show", "key rotate", "export"])
def test_the_options_that_commands_share_are_explained_in_each(command, capsys):
    with contextlib.suppress(SystemExit):
        cli.run([*command.split(), "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "TOML file. Without it" in said
    assert "Where this node keeps its identity and state" in said


@pytest.mark.parametrize(("text", "count"), [("6GiB", 6 * 2**30), ("1.5 gb", 1_500_000_000), ("1048576", 2**20), ("0", 0)])
def test_a_stage_capacity_is_a_size(text, count):
    assert cli_options.load(cli_options.NODE, tasks=False, stage_capacity=text).config.stages.capacity == count


@pytest.mark.parametrize("text", ["much", "-1", "6 parsecs", "", "1e400GB"])
def test_a_stage_capacity_that_is_none_is_one_line_and_the_exit_code_of_configuration(text, capsys):
    assert cli.run(["run", f"--stage-capacity={text}"]) == 78
    assert capsys.readouterr().err.count("\n") == 1
