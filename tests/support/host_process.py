"""Start and end `host_child` processes, send them requests, and measure their memory and
liveness."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import trio

from tests.support import attacker, forked, host_child

START_SECONDS = 120.0
SERVE_SECONDS = 60.0
"""An honest peer is served within this time, also on a busy machine."""


class HostProcess:
    """One child. `address`, `peer` (its id), `pid`."""

    def __init__(self, **options: object) -> None:
        self._hello, hello = forked.context.Pipe(duplex=False)
        self.process = forked.context.Process(
            target=host_child.main, args=(options, hello), daemon=True
        )
        self.process.start()
        hello.close()
        self.pid = self.process.pid

    def wait_started(self) -> HostProcess:
        """Read the child's hello.

        Raises:
            RuntimeError: The child ended.
            TimeoutError: No hello within START_SECONDS.
        """
        if not self._hello.poll(START_SECONDS):
            raise TimeoutError("the host did not start")
        try:
            answer = self._hello.recv()
        except EOFError:
            raise RuntimeError("the host ended at its start") from None
        self.address, self.peer, self._control = (
            answer["address"],
            answer["peer"],
            answer["control"],
        )
        return self

    async def ask(self, do: str, seconds: float = 60.0, **arguments: object) -> dict:
        """Return the child's answer to one request. `answer["error"]` is the exception it raised.

        Raises:
            trio.TooSlowError: No answer within `seconds`.
        """
        with trio.fail_after(seconds):
            async with await trio.open_tcp_stream("127.0.0.1", self._control) as stream:
                await stream.send_all(json.dumps({"do": do, **arguments}).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    part = await stream.receive_some()
                    if not part:
                        raise ConnectionResetError("the host ended during a request")
                    answer += part
                return json.loads(answer)

    async def serves(self, seconds: float = SERVE_SECONDS, source: str | None = None) -> bool:
        """Return True if a new, honest peer gets 100 kB echoed within `seconds`."""
        data = os.urandom(100_000)
        with trio.move_on_after(seconds), contextlib.suppress(Exception):
            async with attacker.connect(self.address, source=source) as peer:
                stream = await peer.open("/test/echo/1")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.send, data)
                    same = await stream.receive(len(data)) == data
                await stream.close()
                return same
        return False

    async def settles(self, name: str, most: int) -> None:
        """Wait a minute at most until the child's statistic `name` is at most `most`."""
        with trio.fail_after(60.0):
            while (await self.ask("stat"))[name] > most:  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)

    async def rests(self) -> None:
        """Wait until the child is idle for half a second, except for its timers."""
        with trio.fail_after(240.0):
            since, (_, before) = trio.current_time(), self._activity()
            while trio.current_time() - since < 0.5:
                await trio.sleep(0.02)
                state, ticks = self._activity()
                if state == "R" or ticks > before + 2:
                    since, before = trio.current_time(), ticks

    def _activity(self) -> tuple[str, int]:
        """Return (process state, CPU time in hundredths of a second)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])

    async def counted(self, guard: str) -> int:
        """Return how often `guard` fired in the child."""
        return (await self.ask("stat"))["fired"][guard]

    async def dies(self) -> bool:
        """Return True if the process ends without a signal within a minute."""
        with trio.move_on_after(60.0):
            while self.process.is_alive():  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)
            return True
        return False

    def rss(self) -> int:
        """Return the resident memory in bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def sockets(self) -> int:
        """Return the number of open sockets."""
        names = (
            os.readlink(entry)
            for entry in Path(f"/proc/{self.pid}/fd").iterdir()
            if entry.is_symlink()
        )
        return sum(name.startswith("socket:") for name in names)

    def stop(self) -> None:
        """End the child and wait for it."""
        self.process.kill()
        self.process.join(10)
        self._hello.close()


@contextlib.contextmanager
def processes(*options: dict) -> Iterator[list[HostProcess]]:
    """Start one child for each of the options, and end them on exit."""
    children = [HostProcess(**one) for one in options]
    try:
        yield [child.wait_started() for child in children]
    finally:
        for child in children:
            child.stop()


def stock(**options: object) -> dict:
    """Return options of a host as py-libp2p builds it."""
    return {"guarded": False, **options}


def guarded(**options: object) -> dict:
    """Return options of a host with swarmnode's guards."""
    return {"guarded": True, **options}
