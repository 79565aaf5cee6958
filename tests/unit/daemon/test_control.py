"""The commands pause and resume."""

import json
import os
import socket
import stat
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from swarmnode import cli, pauses
from swarmnode.daemon import control
from swarmnode.daemon.control import SOCKET, Control
from swarmnode.files import lock_data_dir, make_data_dir
from tests.support.waiting import until


def listens(path):
    """Between bind and listen the path exists but refuses connections."""
    with (
        socket.socket(socket.AF_UNIX) as client,
        suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        client.connect(str(path))
        return True
    return False


@asynccontextmanager
async def controlled(data_dir, trains=True):
    make_data_dir(data_dir)
    lock = lock_data_dir(data_dir)
    try:
        async with trio.open_nursery() as nursery:
            served = Control(data_dir, trains=trains)
            nursery.start_soon(served.run)
            await until(lambda: listens(data_dir / SOCKET))
            yield
            nursery.cancel_scope.cancel()
    finally:
        os.close(lock)


async def run_command(*arguments):
    """Run a command meanwhile; returns its exit code."""
    return await trio.to_thread.run_sync(cli.run, [str(argument) for argument in arguments])


async def test_pause_and_resume_are_saved_and_logged_once(tmp_path, capsys):
    async with controlled(tmp_path):
        assert await run_command("pause", "-d", tmp_path) == 0
        assert pauses.read(tmp_path) is not None
        assert last_line(capsys).startswith("the node pauses after the current step; ")
        assert await run_command("pause", "-d", tmp_path) == 0
        assert "the node is already paused, since 20" in capsys.readouterr().out
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    async with controlled(tmp_path):  # the node was started again
        assert pauses.read(tmp_path) is not None
        assert await run_command("resume", "-d", tmp_path, "--json") == 0
        assert json.loads(last_line(capsys)) == {"changed": True, "paused_since": None}
        assert pauses.read(tmp_path) is None
        assert await run_command("resume", "-d", tmp_path) == 0
        assert last_line(capsys) == "the node was not paused"


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_command_without_a_node_is_one_line(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "none", tmp_path / "file", tmp_path):
        assert cli.run([command, "-d", str(directory)]) == 69
        (printed,) = capsys.readouterr().err.splitlines()
        assert f"no node is running in {directory}: name its directory with -d" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert cli.run([command, "now"]) == 2


def test_node_without_control_socket_has_its_own_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_SECONDS", 0.2)
    lock = lock_data_dir(tmp_path)
    assert cli.run(["pause", "-d", str(tmp_path)]) == 69
    assert "has no control socket: see its log" in capsys.readouterr().err
    os.close(lock)


async def test_a_bootstrap_node_has_nothing_to_pause(tmp_path, capsys):
    async with controlled(tmp_path, trains=False):
        assert await run_command("pause", "-d", tmp_path) == 69
    assert "has no trainer, so there is nothing to pause" in capsys.readouterr().err
    assert pauses.read(tmp_path) is None


@pytest.mark.parametrize("sent", [b"", b"\n", b"{}\n", b'{"command":"explode"}\n', b"\xff" * 5000])
async def test_invalid_request_changes_nothing(tmp_path, sent):
    async with controlled(tmp_path):
        with trio.socket.socket(socket.AF_UNIX) as client:
            await client.connect(str(tmp_path / SOCKET))
            await client.send(sent)
            client.shutdown(socket.SHUT_WR)
            answer = await client.recv(4096)
        assert b"not a request" in answer
        assert await run_command("pause", "-d", tmp_path) == 0


async def test_pause_that_cannot_be_saved_is_refused(tmp_path, capsys, monkeypatch):
    async with controlled(tmp_path):
        monkeypatch.setattr(pauses, "write_atomically", full)
        assert await run_command("pause", "-d", tmp_path) == 69
        assert "cannot save the pause: No space left on device" in capsys.readouterr().err
        monkeypatch.undo()
        assert await run_command("resume", "-d", tmp_path) == 0
    assert last_line(capsys) == "the node was not paused"


def full(*_):
    raise OSError(28, "No space left on device")


def last_line(capsys):
    """Return the last printed line, which follows the log of the node in this process."""
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"owner": "yes"}', '{"owner": NaN}', '{"other": 1.0}', "x" * 9000]
)
def test_invalid_pause_file_pauses_nothing(tmp_path, text):
    (tmp_path / pauses.FILE).write_text(text)
    assert pauses.read(tmp_path) is None
