"""Both ends of the link over a real Unix socket: order, restarts, bad frames, long paths."""

import socket
import struct

import pytest
import trio
import trio.testing

from swarmnode.link.client import MAX_QUEUED_FRAMES, Link
from swarmnode.link.frames import FrameError, Unpacker, pack, socket_path, to_network
from swarmnode.link.messages import Hello, Report, Welcome
from swarmnode.link.server import LinkServer
from swarmnode.rollouts.groups import Drawn
from swarmnode.stages.crew_messages import (
    CrewEnd,
)
from tests.support.groups import external_group
from tests.support.waiting import until

HELLO = Hello(model=b"m" * 32, tokenizer=b"t" * 32, policy_version=3)
WELCOME = Welcome(peer="12D3KooWtest", swarm=b"s" * 32)
THEIRS = external_group("peer", 0)


class Recorder:
    """Records what the network process receives."""

    def __init__(self):
        self.seen = []

    def hello(self, hello):
        self.seen.append(hello)
        return WELCOME

    async def own_group(self, group):
        self.seen.append(group)

    def draw(self, draw):
        return Drawn(draw.request, [THEIRS] * draw.count)

    def judged(self, judged):
        self.seen.append(judged)

    def report(self, report):
        self.seen.append(report)

    def stages(self, message):
        self.seen.append(message)

    def reports(self):
        return [message.step for message in self.seen if isinstance(message, Report)]


@pytest.fixture
def data_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path


async def test_network_restart_loses_no_queued_message(data_dir):
    recorder = Recorder()
    with Link(data_dir, lambda: HELLO) as link:
        link.send(Report(phase="training", step=1))
        link.request_external(4, 0, 2)
        assert link.take_external(5.0) == []  # not connected: returns at once
        async with trio.open_nursery() as nursery:
            await nursery.start(LinkServer(data_dir, recorder).run)
            await until(lambda: recorder.reports() == [1])
            nursery.cancel_scope.cancel()
        await until(lambda: not link.statistics().connected)
        link.send(Report(phase="training", step=2))
        async with trio.open_nursery() as nursery:
            await nursery.start(LinkServer(data_dir, recorder).run)
            await until(lambda: recorder.reports() == [1, 2])
            assert link.statistics().connections == 2
            nursery.cancel_scope.cancel()


async def test_a_new_trainer_replaces_the_old(data_dir):
    server = LinkServer(data_dir, Recorder())
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        path, _ = socket_path(data_dir)
        old = await trio.open_unix_socket(path)
        await old.send_all(pack(HELLO))
        await old.receive_some(1)
        with Link(data_dir, lambda: HELLO) as link:
            assert await trio.to_thread.run_sync(link.welcome, 30.0) == WELCOME
            with trio.fail_after(60):
                while await old.receive_some(4096):
                    pass
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert server.send_to_trainer(CrewEnd("it is connected"))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "data", [struct.pack(">I", 2**31), struct.pack(">I", 3) + b"\xc1\xc1\xc1", pack(WELCOME)]
)
async def test_a_bad_frame_closes_the_connection(data_dir, data):
    server = LinkServer(data_dir, Recorder())
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        stream = await trio.open_unix_socket(socket_path(data_dir)[0])
        await stream.send_all(data)
        with trio.fail_after(60):
            assert await stream.receive_some(1) == b""
        nursery.cancel_scope.cancel()


async def test_invalid_message_is_logged_once_and_retried(data_dir, caplog):
    recorder = Recorder()
    recorder.hello = lambda hello: hello  # as one of another version may
    async with trio.open_nursery() as nursery:
        await nursery.start(LinkServer(data_dir, recorder).run)
        with Link(data_dir, lambda: HELLO) as link:
            await until(lambda: link.statistics().connections >= 3)
        nursery.cancel_scope.cancel()
    assert len([record for record in caplog.records if "another version" in record.message]) == 1


async def test_the_outbox_is_bounded_and_drops_the_oldest(data_dir):
    link = Link(data_dir, lambda: HELLO)  # not started: nothing leaves
    for step in range(MAX_QUEUED_FRAMES + 3):
        link.send(Report(phase="training", step=step))
    assert link.statistics().dropped_frames == 3
    recorder = Recorder()
    async with trio.open_nursery() as nursery:
        await nursery.start(LinkServer(data_dir, recorder).run)
        with link:
            await until(lambda: len(recorder.reports()) == MAX_QUEUED_FRAMES)
        nursery.cancel_scope.cancel()
    assert recorder.reports() == list(range(3, MAX_QUEUED_FRAMES + 3))


def test_frames_survive_any_cut():
    data = pack(HELLO) + pack(Report(phase="training", step=7))
    unpacker = Unpacker(to_network)
    messages = [message for byte in data for message in unpacker.feed(bytes([byte]))]
    assert [type(message) for message in messages] == [Hello, Report]
    with pytest.raises(FrameError):
        Unpacker(to_network).feed(struct.pack(">I", 1) + b"\xc0")


async def test_deep_data_directory_works(tmp_path):
    deep = tmp_path / ("d" * 120)
    (deep / "run").mkdir(parents=True)
    with pytest.raises(OSError, match="too long"):
        socket.socket(socket.AF_UNIX).bind(str(deep / "run" / "link.sock"))
    async with trio.open_nursery() as nursery:
        await nursery.start(LinkServer(deep, Recorder()).run)
        with Link(deep, lambda: HELLO) as link:
            assert await trio.to_thread.run_sync(link.welcome, 30.0) == WELCOME
        nursery.cancel_scope.cancel()
