"""Commands with closed descriptors, odd environment variables, and without a home directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode import cli, environment
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.files import locked_data_dir

PYTHON = {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}


def shell(line: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `line` in bash, with $SN as the command `swarmnode`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        ["bash", "-c", line.replace("$SN", f"{sys.executable} -m swarmnode")],
        env={**kept, **PYTHON, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
    )


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_descriptors_do_not_change_exit_codes(tmp_path, closed) -> None:
    data_dir = tmp_path / "node"
    with locked_data_dir(data_dir):
        ran = shell(f"$SN run -d {data_dir} {closed}", tmp_path)
        assert ran.returncode == Unavailable.exit_code
    assert shell(f"$SN key show -d {data_dir} {closed}", tmp_path).returncode == 0
    assert (data_dir / "identity.key").read_bytes().startswith(b"-----BEGIN")


def test_a_full_output_device_is_one_line(tmp_path) -> None:
    ran = shell("$SN config show >/dev/full", tmp_path)
    assert ran.returncode == Unavailable.exit_code
    assert ran.stderr.splitlines() == [
        f"swarmnode: cannot write to standard output: {os.strerror(errno.ENOSPC)}"
    ]
    short = shell("$SN --version >/dev/full", tmp_path)
    assert (short.returncode, len(short.stderr.splitlines())) == (Unavailable.exit_code, 1)
    assert shell("$SN config show -s a=b 2>/dev/full", tmp_path).returncode == ConfigError.exit_code
    assert shell("$SN config show | head -1; exit ${PIPESTATUS[0]}", tmp_path).returncode == 0


@pytest.fixture(scope="module")
def usual_help(tmp_path_factory):
    return shell("$SN run --help </dev/null", tmp_path_factory.mktemp("help"), LC_ALL="C.UTF-8")


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONWARNINGS": "error", "PYTHONSTARTUP": "/nonexistent", "PYTHONHASHSEED": "0"},
        {"LC_ALL": "tr_TR.ISO-8859-9", "LANG": "nonsense", "PYTHONUTF8": "0"},
        {"COLUMNS": "1000000000", "LINES": "abc"},
        {"TMPDIR": "/nonexistent", "HOME": "relative", "XDG_STATE_HOME": "", "USER": ""},
    ],
    ids=lambda variables: ",".join(variables),
)
def test_odd_variables_have_no_effect(tmp_path, variables, usual_help) -> None:
    (tmp_path / "config.toml").write_text('[node]\nname = "Größe–≤"\n', encoding="utf-8")
    odd = shell("$SN run --help </dev/null", tmp_path, **{"LC_ALL": "C.UTF-8", **variables})
    assert odd.returncode == 0
    words = lambda ran: [word for word in ran.stdout.split() if word.isalnum()]
    assert words(odd) == words(usual_help)
    command = f"$SN config show -d {tmp_path / 'node'} -c config.toml </dev/null"
    shown = shell(command, tmp_path, **{"LC_ALL": "C.UTF-8", **variables})
    assert shown.returncode == 0
    assert "swarmnode" not in shown.stderr
    assert "node.name" in shown.stdout


def test_escapes_text_beyond_the_encoding(tmp_path) -> None:
    (tmp_path / "config.toml").write_text('[node]\nname = "≤ß"\n', encoding="utf-8")
    command = f"$SN config show -d {tmp_path / 'node'} -c config.toml"
    shown = shell(command, tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\\u2264" in shown.stdout


def test_reads_files_as_utf_8_in_any_locale() -> None:
    assert environment.clean_variables({"PYTHONUTF8": "0"}, "ISO-8859-9") == {
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "ISO-8859-9:backslashreplace",
    }
    kept = {"PYTHONPATH": "x", "PYTHONWARNINGS": "ignore", "HOME": "/h"}
    assert environment.clean_variables({**kept, "PYTHONOPTIMIZE": "2"}, "utf-8") == kept


NO_USER_ENTRY = """
import os, pwd, sys
def missing(*_): raise KeyError("getpwuid(): uid not found")
pwd.getpwuid = missing
from swarmnode import cli, environment
environment.prepare()
code = cli.run(sys.argv[1:])
print(os.environ.get("HOME"), os.environ["LOGNAME"])
sys.exit(code)
"""


def test_runs_without_home_and_user_entry(tmp_path) -> None:
    (tmp_path / "no_user.py").write_text(NO_USER_ENTRY)
    gone = "env -u HOME -u XDG_STATE_HOME -u XDG_CONFIG_HOME -u USER -u LOGNAME -u USERNAME"
    command = f"{gone} {sys.executable} no_user.py key show"
    without = shell(command, tmp_path)
    assert without.returncode == ConfigError.exit_code
    assert "-d DIR" in without.stderr
    assert len(without.stderr.splitlines()) == 1
    within = shell(f"{command} -d node", tmp_path)
    assert within.returncode == 0
    assert within.stdout.splitlines()[-1] == f"{tmp_path / 'node'} uid{os.getuid()}"
    assert not any(tmp_path.glob("~*"))


@pytest.mark.parametrize("writable", [True, False])
def test_caches_are_in_the_data_directory_if_home_is_read_only(
    monkeypatch, tmp_path, writable
) -> None:
    """As in a container with a read-only root file system."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: writable or path != tmp_path)
    environment.provide_directories(tmp_path / "node")
    cache = tmp_path / "home" / ".cache" if writable else tmp_path / "node" / "cache"
    assert os.environ["XDG_CACHE_HOME"] == str(cache)


def test_errors_contain_no_control_characters(monkeypatch, capsys) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise Unavailable("the peer says \x1b]0;owned\x07\u202e\nsecond line")

    monkeypatch.setattr(cli, "app", refuses)
    assert cli.run(["status"]) == Unavailable.exit_code
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert all(character.isprintable() or character == "\n" for character in error)
