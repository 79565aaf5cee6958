"""Wrong arguments and damaged directories: each command prints one line with cause and remedy, has
the exit code of docs/operations.md, and changes no file."""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from swarmnode import cli
from swarmnode.files import FORMAT, FORMAT_FILE, lock_data_dir
from swarmnode.p2p.identity import load_or_create
from swarmnode.swarm import membership
from swarmnode.swarm.manifest_store import ManifestStore
from tests.support.manifests import founded
from tests.support.small_disk import fill, mounted, needs_mount, read_only

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


# ---- directories


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a founder's data directory, next to the files that commands need."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("SWARMNODE_")]:
        monkeypatch.delenv(name)
    return make_founder(tmp_path / "node")


def make_founder(data):
    for command in (
        ["key", "show"],
        ["config", "set", "node.name=mine", 'task.names=["builtin/copy"]'],
    ):
        assert cli.run([*command, "-d", str(data)]) == 0
    opened = founded(load_or_create(data / "identity.key").private_key, bootstrap=[ADDRESS])
    store = ManifestStore(data)
    store.add(opened)
    store.choose(opened.swarm)
    (data / "trainer").mkdir()
    (data / "trainer" / "state.safetensors").write_bytes(b"\x10" + bytes(7) + b'{"__metadata__":')
    load_or_create(data.parent / "new.key")
    (data.parent / "secret").write_text("five random words are good")
    (data.parent / "secret").chmod(0o600)
    (data.parent / "m").write_bytes(opened.signed)
    return data


def run(words, data):
    """Run a command with the data directory `data` and return its exit code."""
    names = ("new.key", "old.key", "secret", "m", "policy")
    arguments = {name: str(data.parent / name) for name in names}
    if "INVITE" in words:
        arguments["INVITE"] = f"{ADDRESS}/swarm/{ManifestStore(data).current().hex()}"
    return cli.run([*(arguments.get(word, word) for word in words.split()), "-d", str(data)])


def tree(directory):
    """Return path → content of the files in a directory, without `run` and `log`."""
    found = {path.relative_to(directory): path for path in directory.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if not {"run", "log"} & set(name.parts)
    }


def check_error(capsys, *phrases):
    """Check that the last line of stderr is an error with these phrases, and the only error."""
    *shown, error = capsys.readouterr().err.splitlines()
    assert error.startswith("swarmnode: ")
    assert not [line for line in shown if line.startswith(("swarmnode: ", "Traceback"))], shown
    assert "Errno" not in error
    assert all(phrase in error for phrase in phrases), error


SUCCESSOR = "init --successor --yes --name other"
WRITES = [
    "run",
    "join INVITE",
    SUCCESSOR,
    "bootstrap",
    "bootstrap --manifest m",
    "key rotate",
    "key import new.key --replace",
    "config set node.name=other",
    "rollback 3",
]
READS = ["config show", "status", "pause", "task try builtin/copy --no-sample"]


@pytest.mark.parametrize(
    "words",
    [*WRITES, *READS, "init", "key show", "key backup old.key", "export policy", "manifest follow"],
)
def test_a_newer_directory_is_not_changed(node, capsys, words):
    (node / FORMAT_FILE).write_text(f"{FORMAT + 1}\n")
    before = tree(node.parent)
    assert run(words, node) == 69
    check_error(capsys, "belongs to a newer version", "upgrade, or use another directory with -d")
    assert tree(node.parent) == before


def test_doctor_reports_a_newer_directory(node, capsys):
    (node / FORMAT_FILE).write_text(f"{FORMAT + 1}\n")
    assert run("doctor --json", node) == 69
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert "belongs to a newer version" in check["text"]


def test_a_directory_states_its_format(node, capsys):
    assert (node / FORMAT_FILE).read_text() == f"{FORMAT}\n"
    (node / FORMAT_FILE).unlink()
    assert run("key show", node) == 0
    assert (node / FORMAT_FILE).read_text() == f"{FORMAT}\n"
    (node / FORMAT_FILE).write_text("")
    capsys.readouterr()
    assert run("key show", node) == 69
    check_error(capsys, "format is damaged: copy the directory again")


@pytest.mark.parametrize(
    ("file", "words", "code", "problem"),
    [
        ("identity.key", "run", 69, "is not a PEM key; restore it"),
        ("manifest/current", "run", 69, "join again"),
        ("manifest", "run", 69, "is damaged"),
        ("config.toml", "run", 78, "config.toml"),
        ("trainer/state.safetensors", "rollback 3", 69, "no state of step 3"),
    ],
)
def test_a_truncated_file_is_named(node, capsys, file, words, code, problem):
    path = node / file if not (node / file).is_dir() else next((node / file).glob("*.manifest"))
    path.write_bytes(path.read_bytes()[: -4 if file == "config.toml" else path.stat().st_size // 2])
    before = tree(node)
    assert run(words, node) == code
    check_error(capsys, problem)
    assert tree(node) == before


def test_a_missing_manifest_asks_to_join_again(node, capsys):
    next((node / "manifest").glob("*.manifest")).unlink()
    for words in ("run", "bootstrap", "manifest show", SUCCESSOR):
        assert run(words, node) == 69
        check_error(capsys, "join again")


@contextmanager
def copied(node, size):
    """Yield a file system of its own with a copy of the node and its files, and the copy."""
    with mounted(node.parent / "disk", size) as disk:
        for name in ("new.key", "secret", "m"):
            shutil.copy2(node.parent / name, disk / name)
        yield disk, shutil.copytree(node, disk / "node")


@needs_mount
@pytest.mark.parametrize("words", WRITES)
def test_a_read_only_disk_stops_a_command_first(node, capsys, words):
    with copied(node, "8m") as (disk, data):
        read_only(disk)
        before = tree(disk)
        assert run(words, data) == 69
        check_error(capsys, "Read-only file system")
        assert tree(disk) == before


@needs_mount
@pytest.mark.parametrize(
    "words", [words for words in WRITES if words not in ("run", "bootstrap", "rollback 3")]
)
def test_a_full_disk_loses_no_file(node, capsys, words, monkeypatch):
    opened = founded(load_or_create(node / "identity.key").private_key, bootstrap=[ADDRESS])
    answer = {"peer": "12D3KooWAbsent", "manifest": opened.signed.hex(), "successor": ""}
    printed = subprocess.CompletedProcess([], 0, json.dumps(answer), "")
    with copied(node, "1m") as (disk, data):
        fill(disk)
        before = tree(disk)
        # Only `python -m swarmnode.swarm.join` is replaced; mount and umount are real.
        with monkeypatch.context() as patched:
            patched.setattr(membership.subprocess, "run", lambda *_, **__: printed)
            assert run(words, data) == 69
        check_error(capsys)
        assert tree(disk) == before


@pytest.mark.parametrize(
    "words",
    [words for words in WRITES if not words.startswith(("init", "config", "bootstrap --manifest"))],
)
def test_a_second_node_names_the_first(node, capsys, words):
    held = lock_data_dir(node)
    before = tree(node)
    assert run(words, node) == 69
    check_error(capsys, f"in use by another node (pid {os.getpid()})")
    assert tree(node) == before
    os.close(held)


def write_manifest(tmp_path, opened):
    (tmp_path / "theirs").write_bytes(opened.signed)
    return str(tmp_path / "theirs")


OTHERS = ["join {invite}", "bootstrap {invite}", "run -s swarm.invite={invite}", "init"]


@pytest.mark.parametrize("words", [*OTHERS, "bootstrap --manifest {file}"])
def test_a_directory_stays_with_its_swarm(node, capsys, words):
    other = founded(name="another")
    invite = f"{ADDRESS}/swarm/{other.swarm.hex()}"
    before = tree(node)
    assert run(words.format(invite=invite, file=write_manifest(node.parent, other)), node) == 77
    check_error(capsys, "belongs to swarm 'test'", "another --data-dir")
    assert tree(node) == before


def test_a_forged_successor_is_not_followed(node, capsys):
    store = ManifestStore(node)
    present = store.get(store.current())
    # signed by another key
    theirs = founded(
        predecessor=present.swarm, created_at=present.manifest.created_at + 1, name="theirs"
    )
    before = tree(node)
    assert run(f"bootstrap --manifest {write_manifest(node.parent, theirs)}", node) == 77
    check_error(capsys, "the founder of 'test' did not sign")
    assert tree(node) == before
    store.add(theirs)
    assert run("manifest follow", node) == 77
    check_error(capsys, "no successor is known here")
    assert run("manifest show", node) == 0
    assert json.loads(capsys.readouterr().out)["successor"] is None
    assert store.current() == present.swarm


def test_only_the_founder_signs_a_successor(node, capsys):
    assert run("key rotate", node) == 0
    before = tree(node)
    capsys.readouterr()
    assert run("init --successor --yes --name other", node) == 77
    check_error(capsys, "only the founder's key can sign a successor")
    assert tree(node) == before
