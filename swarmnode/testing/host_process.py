"""Runs `host_child` processes for a test: start, ask, see whether it still serves, how much memory it holds, end it by its pid."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trio

from swarmnode.testing import attacker

START_SECONDS = 30.0
SERVE_SECONDS = 6.0


class HostProcess:
    """One child. `address`, `peer` (its id), `pid`."""

    def __init__(self, **options: object) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LIBP2P_DEBUG")}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "swarmnode.testing.host_child", json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("HOST_CHILD_STDERR") else subprocess.DEVNULL,
            env=environment,
        )
        self.pid = self.process.pid

    def wait_started(self) -> HostProcess:
        """Read the child's first line; RuntimeError if it ended instead, TimeoutError after `START_SECONDS`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        hello = self.process.stdout.readline() if ready else None
        if not hello:
            self.stop()
            raise TimeoutError("the host did not start") if hello is None else RuntimeError("the host ended at its start")
        answer = json.loads(hello)
        self.address, self.peer, self._control = answer["address"], answer["peer"], answer["control"]
        return self

    async def ask(self, do: str, seconds: float = 20.0, **arguments: object) -> dict:
        """The child's answer to one request; `answer["error"]` is what it raised. trio.TooSlowError after `seconds`."""
        with trio.fail_after(seconds):
            async with await trio.open_tcp_stream("127.0.0.1", self._control) as stream:
                await stream.send_all(json.dumps({"do": do, **arguments}).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    part = await stream.receive_some()
                    if not part:
                        raise ConnectionResetError("the host ended while it was asked")
                    answer += part
                return json.loads(answer)

    async def serves(self, seconds: float = SERVE_SECONDS, source: str | None = None) -> bool:
        """Whether a new, honest peer gets 100 kB echoed and a signed message delivered within `seconds`."""
        data, mark = os.urandom(100_000), os.urandom(8)
        with trio.move_on_after(seconds), contextlib.suppress(Exception):
            async with attacker.connect(self.address, source=source) as peer:
                stream = await peer.open("/test/echo/1")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.send, data)
                    same = await stream.receive(len(data)) == data
                await stream.close()
                await peer.publish("test", mark)
                while (await self.ask("stat"))["last"] != mark.hex():
                    await trio.sleep(0.02)
                return same
        return False

    async def dies(self, seconds: float = 10.0) -> bool:
        """Whether the process ends by itself within `seconds`."""
        with trio.move_on_after(seconds):
            while self.process.poll() is None:
                await trio.sleep(0.02)
            return True
        return False

    def rss(self) -> int:
        """Resident bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def sockets(self) -> int:
        """Open sockets."""
        names = (os.readlink(entry) for entry in Path(f"/proc/{self.pid}/fd").iterdir() if entry.is_symlink())
        return sum(name.startswith("socket:") for name in names)

    def stop(self) -> None:
        """End the child and wait for it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def processes(*options: dict) -> Iterator[list[HostProcess]]:
    """Children with these options, started side by side, ended when the block is left."""
    children = [HostProcess(**one) for one in options]
    try:
        yield [child.wait_started() for child in children]
    finally:
        for child in children:
            child.stop()


def stock(**options: object) -> dict:
    """Options of a host as py-libp2p builds it."""
    return {"guarded": False, **options}


def guarded(**options: object) -> dict:
    """Options of a host with our guards."""
    return {"guarded": True, **options}
