"""The passphrase of a key: typed, from the environment or a file, and not passed to the trainer."""

import io
import json
import stat
import sys

import pytest

from swarmnode import cli
from swarmnode.config import Config
from swarmnode.daemon.supervisor import Supervisor
from swarmnode.p2p import passphrase
from swarmnode.p2p.passphrase import FILE_VARIABLE, VARIABLE
from tests.support.waiting import until

WORDS = "five random words are good"


@pytest.fixture(autouse=True)
def no_passphrase(monkeypatch):
    for name in (VARIABLE, FILE_VARIABLE):
        # setenv first, so that monkeypatch removes what a command sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def typing(monkeypatch):
    """Return a function that simulates a terminal with typed answers, and returns the prompts."""

    def types(*answers):
        asked, left = [], list(answers)
        monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
        monkeypatch.setattr(
            passphrase.getpass, "getpass", lambda prompt: (asked.append(prompt), left.pop(0))[1]
        )
        return asked

    return types


def key(tmp_path, command, *arguments):
    return cli.run(["key", command, "-d", str(tmp_path), *arguments])


@pytest.fixture
def peer(tmp_path, capsys):
    assert key(tmp_path, "show") == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def locked(tmp_path, peer, capsys):
    """The peer id of a node whose key has the passphrase WORDS."""
    file = tmp_path / "new"
    file.write_text(f"{WORDS}\n")
    file.chmod(0o600)
    assert key(tmp_path, "passphrase", "--new-file", str(file)) == 0
    capsys.readouterr()
    file.unlink()
    return peer


def test_a_typed_passphrase_locks_and_opens_the_key(tmp_path, peer, typing, capsys, monkeypatch):
    assert len(typing(WORDS, WORDS)) == 0
    assert key(tmp_path, "passphrase") == 0
    path = tmp_path / "identity.key"
    assert path.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    capsys.readouterr()
    asked = typing(WORDS)
    assert key(tmp_path, "show") == 0
    assert capsys.readouterr().out.strip() == peer
    assert asked == [f"passphrase of {path}: "]
    monkeypatch.delenv(VARIABLE)
    typing("another one altogether")
    assert key(tmp_path, "show") == 77
    assert "wrong passphrase" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "code"), [(0o440, 0), (0o444, 77), (0o460, 77)])
def test_the_group_may_read_a_systemd_credential(tmp_path, locked, capsys, monkeypatch, mode, code):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (tmp_path / "credentials").mkdir()
    words = tmp_path / "credentials" / "passphrase"
    words.write_text(WORDS)
    words.chmod(mode)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(words.parent))
    monkeypatch.setenv(FILE_VARIABLE, str(words))
    assert key(tmp_path, "show") == code
    assert ("other users can read the passphrase file" in capsys.readouterr().err) is (code != 0)


def test_reads_the_passphrase_from_environment_or_file(tmp_path, locked, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert key(tmp_path, "show") == 77
    assert (
        f"has a passphrase: set {VARIABLE}, or the path of a file that holds it in {FILE_VARIABLE}"
        in capsys.readouterr().err
    )
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none"))
    assert key(tmp_path, "show") == 78
    (tmp_path / "words").write_text(f"{WORDS}\n")
    (tmp_path / "words").chmod(0o640)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "words"))
    assert key(tmp_path, "show") == 77
    assert (
        "other users can read the passphrase file (mode 0640): chmod 600" in capsys.readouterr().err
    )
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    assert key(tmp_path, "show") == 77
    (tmp_path / "words").chmod(0o600)
    assert key(tmp_path, "show") == 0
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    monkeypatch.setenv(VARIABLE, "something else")
    assert key(tmp_path, "show") == 77
    monkeypatch.setenv(VARIABLE, WORDS)
    assert key(tmp_path, "show") == 0
    assert capsys.readouterr().out.split()[-1] == locked


@pytest.mark.parametrize(
    "command",
    [["run"], ["init", "--any-model"], ["bootstrap"], ["key", "rotate"], ["key", "passphrase"]],
)
def test_a_locked_key_stops_commands_first(tmp_path, locked, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    before = (tmp_path / "identity.key").read_bytes()
    assert cli.run([*command, "-d", str(tmp_path)]) == 77
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"or the path of a file that holds it in {FILE_VARIABLE}")
    )
    assert (tmp_path / "identity.key").read_bytes() == before
    assert not (tmp_path / "manifest").exists()


def test_backup_rotation_import_and_removal(tmp_path, locked, capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, WORDS)
    assert key(tmp_path, "backup", str(tmp_path / "backup")) == 0
    assert (tmp_path / "backup").read_bytes() == (tmp_path / "identity.key").read_bytes()
    assert key(tmp_path, "rotate", "--json") == 0
    assert (
        (tmp_path / "identity.key")
        .read_bytes()
        .startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    )
    assert key(tmp_path, "import", str(tmp_path / "backup"), "--replace") == 0
    assert key(tmp_path, "passphrase", "--remove") == 0
    monkeypatch.delenv(VARIABLE)
    capsys.readouterr()
    assert key(tmp_path, "show") == 0
    assert capsys.readouterr().out.strip() == locked


@pytest.mark.parametrize(
    ("arguments", "typed", "code", "problem"),
    [
        ([], ["short", "short"], 78, "at least 12 characters"),
        ([], [WORDS, WORDS + "."], 78, "the two passphrases differ"),
        (["--new-file", "{tmp}/none"], [], 78, "no such file"),
        (["--new-file", "{tmp}/none", "--remove"], [], 78, "exclude each other"),
    ],
)
def test_an_invalid_passphrase_changes_nothing(
    tmp_path, peer, typing, capsys, arguments, typed, code, problem
):
    before = (tmp_path / "identity.key").read_bytes()
    typing(*typed)
    assert (
        key(
            tmp_path,
            "passphrase",
            *[argument.replace("{tmp}", str(tmp_path)) for argument in arguments],
        )
        == code
    )
    assert problem in capsys.readouterr().err
    assert (tmp_path / "identity.key").read_bytes() == before


def test_a_new_key_gets_the_passphrase(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, WORDS)
    assert key(tmp_path, "show") == 0
    assert passphrase.is_locked((tmp_path / "identity.key").read_bytes())


CHILD = """
import json, os, signal, sys, time
from swarmnode.process import Progress
progress = Progress()
with open({file!r}, "w") as file:
    json.dump(dict(os.environ), file)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True: progress("serving"); time.sleep(0.05)
"""


async def test_the_trainer_does_not_get_the_passphrase(tmp_path, monkeypatch, nursery):
    monkeypatch.setenv(VARIABLE, WORDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("network", "trainer"):
        (tmp_path / f"seen_{name}.py").write_text(CHILD.format(file=str(tmp_path / f"{name}.json")))
    config = Config.model_validate({"node": {"data_dir": tmp_path / "data"}})
    commands = {name: f"seen_{name}" for name in ("network", "trainer")}
    supervisor = Supervisor(config.node.data_dir, config.model_dump_json, commands)
    nursery.start_soon(supervisor.run)
    seen = {name: tmp_path / f"{name}.json" for name in commands}
    await until(
        lambda: all(file.exists() and file.read_text().endswith("}") for file in seen.values())
    )
    assert json.loads(seen["network"].read_text())[VARIABLE] == WORDS
    assert WORDS not in seen["trainer"].read_text()
    supervisor.finish()
