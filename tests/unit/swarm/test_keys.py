"""Backup, import and replacement of a node's key."""

import os

import pytest

from swarmnode import cli
from swarmnode.errors import Refused, Unavailable
from swarmnode.files import lock_data_dir
from swarmnode.p2p.identity import load_or_create
from swarmnode.swarm import keys


def node(directory):
    directory.mkdir(exist_ok=True)
    return load_or_create(directory / "identity.key").peer_id


@pytest.fixture
def backup(tmp_path):
    """The backup of a node's key, and its peer id."""
    node(tmp_path / "a")
    return tmp_path / "backup.key", keys.backup(tmp_path / "a", tmp_path / "backup.key")


def mode(path):
    return path.stat().st_mode & 0o777


def test_backup_is_private_and_overwrites_nothing(tmp_path, backup):
    file, peer = backup
    assert peer == node(tmp_path / "a")
    assert mode(file) == 0o600
    with pytest.raises(Refused, match="exists"):
        keys.backup(tmp_path / "a", file)
    with pytest.raises(Unavailable, match=f"there is no directory {tmp_path / 'stick'}$"):
        keys.backup(tmp_path / "a", tmp_path / "stick" / "node.key")


def test_imported_backup_is_the_same_node(tmp_path, backup):
    file, peer = backup
    assert keys.import_key(tmp_path / "b", file) == (peer, None)
    assert node(tmp_path / "b") == peer
    assert mode(tmp_path / "b" / "identity.key") == 0o600


def test_key_readable_by_others_is_not_imported(tmp_path, backup):
    backup[0].chmod(0o644)
    with pytest.raises(Refused, match="chmod 600"):
        keys.import_key(tmp_path / "b", backup[0])
    assert not (tmp_path / "b" / "identity.key").exists()


def test_key_is_replaced_only_on_request(tmp_path, backup):
    (file, peer), own = backup, node(tmp_path / "b")
    with pytest.raises(Refused, match="--replace"):
        keys.import_key(tmp_path / "b", file)
    assert node(tmp_path / "b") == own
    brought, kept = keys.import_key(tmp_path / "b", file, replace=True)
    assert (brought, node(tmp_path / "b")) == (peer, peer)
    assert keys.peer_id_of(kept.read_bytes(), kept) == own
    assert mode(kept) == 0o600


def test_rotation_keeps_the_old_key(tmp_path):
    peer = node(tmp_path)
    before, after, kept = keys.rotate(tmp_path)
    assert before == peer != after == node(tmp_path)
    assert keys.peer_id_of(kept.read_bytes(), kept) == peer
    assert mode(kept) == mode(tmp_path / "identity.key") == 0o600


def test_the_key_of_a_running_node_stays(tmp_path):
    peer = node(tmp_path)
    lock = lock_data_dir(tmp_path)
    try:
        with pytest.raises(Unavailable, match="in use"):
            keys.rotate(tmp_path)
    finally:
        os.close(lock)
    assert node(tmp_path) == peer


def test_no_command_prints_the_key(tmp_path, capsys):
    data = ["--data-dir", str(tmp_path)]
    cli.run(["key", "show", *data])
    assert cli.run(["key", "backup", str(tmp_path / "k"), *data]) == 0
    assert cli.run(["key", "rotate", *data]) == 0
    assert cli.run(["key", "import", str(tmp_path / "k"), *data]) == 77
    assert cli.run(["key", "import", str(tmp_path / "k"), "--replace", *data]) == 0
    printed = "".join(capsys.readouterr())
    for file in tmp_path.glob("*.key"):
        assert file.read_text().splitlines()[1] not in printed
