"""`main(options, hello)` runs one libp2p host, stock or guarded, that a test drives from outside
(see host_process.py).

options   guarded: bool · port: int · seed: int of the key
          sweep: seconds between sweeps of dead streams
          limits: {"inbox.PROCESS_BYTES": 1, …}, constants of the guards
hello     a pipe that receives {"address": "/ip4/127.0.0.1/tcp/…", "peer": "12D3Koo…",
          "control": <port>} when the host listens
control   a loopback TCP port: one JSON request per line, {"do": "<name of an async function
          below>", …}, answered by one line

Protocols: /test/echo/1 returns its input; /test/hold/1 never reads; /test/sink/1 counts;
/test/pause/1 counts after 6 s; /test/raise/1 raises ValueError; /test/ends/1 lets the end of the
stream escape; /test/leave/1 returns at once and closes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from multiprocessing.connection import Connection

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.stream_muxer.yamux import yamux
from multiaddr import Multiaddr

from swarmnode.p2p import guards


class Node:
    """The host under test and the observations of its handlers."""

    def __init__(self, options: dict, hello: Connection) -> None:
        self.hello = hello
        self.guarded: bool = options["guarded"]
        yamux._STALE_STREAM_SWEEP_INTERVAL = options.get("sweep", 30.0)
        seed = options.get("seed")
        keys = create_new_key_pair(os.urandom(32) if seed is None else bytes([seed]) * 32)
        self.address = Multiaddr(f"/ip4/127.0.0.1/tcp/{options.get('port', 0)}")
        if self.guarded:
            guards.install()
            for name, value in options.get("limits", {}).items():
                module, constant = name.split(".")
                setattr(getattr(guards, module), constant, value)
        self.host = self.build(keys)
        self.counted = 0
        self.streams: list = []
        for name in ("echo", "hold", "sink", "pause", "raise", "ends", "leave"):
            self.host.set_stream_handler(f"/test/{name}/1", getattr(self, f"on_{name}"))

    def build(self, keys):
        """Return a host as py-libp2p builds it, or as swarmnode builds it."""
        if not self.guarded:
            return new_host(key_pair=keys)
        config = ConnectionConfig(
            max_connections=250, high_watermark=250, low_watermark=0, min_connections=0
        )
        return guards.guard_host(
            new_host(
                key_pair=keys,
                sec_opt=guards.noise_only(keys),
                muxer_opt=guards.YAMUX_ONLY,
                connection_config=config,
            )
        )

    # Protocols that peers can reach.

    async def on_echo(self, stream) -> None:
        with contextlib.suppress(Exception):
            while True:
                await stream.write(await stream.read(65536))
        await stream.close()

    async def on_hold(self, stream) -> None:
        await trio.sleep_forever()

    async def on_sink(self, stream) -> None:
        with contextlib.suppress(Exception):
            while True:
                self.counted += len(await stream.read(65536))
        await stream.close()

    async def on_pause(self, stream) -> None:
        await trio.sleep(6)
        await self.on_sink(stream)

    async def on_raise(self, stream) -> None:
        raise ValueError("a handler with a bug")

    async def on_ends(self, stream) -> None:
        while True:
            await stream.read(65536)

    async def on_leave(self, stream) -> None:
        await stream.read(1)

    # Requests of the test.

    async def stat(self) -> dict:
        network = self.host.get_network()
        muxers = [one.muxed_conn for one in network.get_connections()]
        return {
            "connections": len(network.get_connections()),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "streams": sum(len(one.streams) for one in muxers),
            "slots": network._inbound_limiter.borrowed_tokens,
            "fired": guards.statistics().fired,
            "counted": self.counted,
        }

    async def _stream(self, address: str, peer: str, protocol: str):
        await self.host.connect(PeerInfo(ID.from_base58(peer), [Multiaddr(address)]))
        return await self.host.new_stream(ID.from_base58(peer), [f"/test/{protocol}/1"])

    async def connect(self, address: str, peer: str) -> dict:
        await self.host.connect(PeerInfo(ID.from_base58(peer), [Multiaddr(address)]))
        return {}

    async def cycle(self, address: str, peer: str, times: int) -> dict:
        """Start another host in this process, connect from it and close it, `times` times."""
        for _ in range(times):
            other = self.build(create_new_key_pair(os.urandom(32)))
            with trio.move_on_after(5):
                async with (guards.running if self.guarded else type(other).run)(
                    other, [Multiaddr("/ip4/127.0.0.1/tcp/0")]
                ):
                    await other.connect(PeerInfo(ID.from_base58(peer), [Multiaddr(address)]))
                    await (await other.new_stream(ID.from_base58(peer), ["/test/echo/1"])).close()
        return {}

    async def cancel_reads(self, address: str, peer: str, size: int) -> dict:
        """Send and read back `size` bytes while reads are cancelled at random."""
        stream, rng, sent, got = (
            await self._stream(address, peer, "echo"),
            random.Random(0),
            os.urandom(size),
            bytearray(),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, sent)
            while len(got) < size:
                with trio.move_on_after(rng.random() * 0.004):
                    got += await stream.read(65536)
        await stream.close()
        return {"intact": bytes(got) == sent}

    async def cancel_writes(self, address: str, peer: str, times: int) -> dict:
        """Cancel `times` large writes half-way, each on its own stream. Then request an echo on the
        same connection."""
        for number in range(times):
            stream = await self._stream(address, peer, "echo")
            with trio.move_on_after(0.02 + 0.003 * number):
                await stream.write(bytes(20_000_000))
            await stream.reset()
        return await self.cancel_reads(address, peer, 1000)

    async def give_up(self, address: str, peer: str, times: int, size: int = 200_000) -> dict:
        """Have `size` bytes echoed and reset the stream while they are unread, `times` times. Then
        request an echo on the same connection."""
        for _ in range(times):
            stream = await self._stream(address, peer, "echo")
            await stream.write(bytes(size))
            unread = stream.muxed_stream.conn.stream_buffers[stream.muxed_stream.stream_id]
            while len(unread) < size:  # noqa: ASYNC110 - another process
                await trio.sleep(0.001)
            await stream.reset()
        return await self.cancel_reads(address, peer, 1000)

    async def reset_while_reading(self, address: str, peer: str, just_woken: bool) -> dict:
        """Reset a stream while another task reads from it. Return the result of that read.

        Args:
            just_woken: A frame wakes the reader immediately before the reset.
        """
        stream, heard = await self._stream(address, peer, "hold"), []

        async def read() -> None:
            try:
                await stream.read(10)
            except StreamError as error:
                heard.append(type(error).__name__)

        with trio.move_on_after(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.sleep(0.2)
                if just_woken:
                    muxed = stream.muxed_stream
                    muxed.conn.stream_events[muxed.stream_id].set()
                await stream.reset()
        return {"heard": "".join(heard)}

    async def break_connections(self) -> dict:
        """Raise an error inside every connection's own task, as a bug in the muxer would."""

        async def bug() -> None:
            raise RuntimeError("a muxer with a bug")

        for one in self.host.get_network().get_connections():
            one.muxed_conn._nursery.start_soon(bug)
        return {}

    async def cancel_opens(self, address: str, peer: str, times: int) -> dict:
        """Cancel `new_stream` after 0, 1, 2, … scheduler steps. Return how many of the 256 outbound
        slots are free afterwards."""
        await self.connect(address, peer)
        other = ID.from_base58(peer)

        async def attempt(scope: trio.CancelScope) -> None:
            with scope:
                await (await self.host.new_stream(other, ["/test/echo/1"])).reset()

        for number in range(times):
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                nursery.start_soon(attempt, scope)
                for _ in range(number % 20):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        await trio.sleep(0.5)
        return {
            "free": min(
                one.muxed_conn.stream_backlog_semaphore.value
                for one in self.host.get_network().get_connections(other)
            )
        }

    async def unclosed(self, address: str, peer: str, count: int) -> dict:
        """Open streams and close none. Return how many opened and the error that stopped the
        loop."""
        await self.connect(address, peer)
        for number in range(count):
            try:
                self.streams.append(await self.host.get_network().new_stream(ID.from_base58(peer)))
            except Exception as error:
                return {"opened": number, "error": str(error)}
        return {"opened": count, "error": ""}

    async def keep(self, address: str, peer: str, protocol: str) -> dict:
        """Open a stream for a later `write_kept`."""
        self.streams.append(await self._stream(address, peer, protocol))
        return {}

    async def write_kept(self, size: int) -> dict:
        """Write on the last kept stream."""
        await self.streams[-1].write(bytes(size))
        return {}

    async def write_paused(
        self, address: str, peer: str, size: int, protocol: str = "pause"
    ) -> dict:
        stream = await self._stream(address, peer, protocol)
        await stream.write(bytes(size))
        await stream.close()
        return {}

    # Main loop.

    async def run(self) -> None:
        start = guards.running if self.guarded else type(self.host).run
        async with start(self.host, [self.address]), trio.open_nursery() as nursery:
            control = await nursery.start(
                functools.partial(trio.serve_tcp, self._control, 0, host="127.0.0.1")
            )
            listener = next(iter(self.host.get_network().listeners.values()))
            self.hello.send(
                {
                    "address": str(listener.get_addrs()[0]),
                    "peer": str(self.host.get_id()),
                    "control": control[0].socket.getsockname()[1],
                }
            )

    async def _control(self, stream: trio.SocketStream) -> None:
        async for request in _lines(stream):
            arguments = json.loads(request)
            try:
                answer = await getattr(self, arguments.pop("do"))(**arguments)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            await stream.send_all(json.dumps(answer).encode() + b"\n")


async def _lines(stream: trio.SocketStream):
    pending = b""
    async for part in stream:
        *lines, pending = (pending + part).split(b"\n")
        for one in lines:
            yield one


def main(options: dict, hello: Connection) -> None:
    """Run until killed. stderr is discarded unless HOST_CHILD_STDERR is set: a stock host logs a
    screenful per attack."""
    if not os.environ.get("HOST_CHILD_STDERR"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    trio.run(Node(options, hello).run)
