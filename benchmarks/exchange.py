"""How fast is a bulk transfer against plain TLS? `python -m benchmarks.exchange [--quick]`

A serving process and this one, on loopback, 256 MB; in each round plain TLS and then bulk. Plain
TLS is the fastest that Python's ssl module reads and writes: a blocking socket in a thread at
either end, 1 MiB writes, received into the destination, nothing hashed. A bulk transfer shares the
libp2p connection and hashes every chunk. Goal: 0.6 of plain TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import trio
from libp2p.security.tls.transport import TLSTransport

from benchmarks import report
from swarmnode.p2p import identity
from swarmnode.p2p.bulk import BulkSource, MemorySink
from swarmnode.p2p.network import Libp2pNetwork
from tests.support.hosts import host
from tests.support.waiting import wait_connected

MIB = 2**20
TRANSFER = b"exchange".ljust(32, b"\0")
PLAIN, BULK = PATHS = ("plain TLS", "bulk")
GOAL = 0.6
"""Goal: speed of bulk ÷ plain TLS in the same round."""


def tls_context(directory: Path, *, server: bool) -> ssl.SSLContext:
    """Return a context with the libp2p certificate of the node in `directory`."""
    transport = TLSTransport(identity.load_or_create(directory / "identity.key").key_pair)
    return transport.create_ssl_context(server_side=server)


# -- the serving process


def serve(directory: Path, size: int, pipe: Connection) -> None:
    trio.run(_serve, directory, size, pipe)


async def _serve(directory: Path, size: int, pipe: Connection) -> None:
    source = BulkSource(os.urandom(size))
    async with host(directory, initial_peers=[]) as network:
        network.bulk.offer(TRANSFER, source)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(
                target=_serve_plain,
                args=(listener, tls_context(directory, server=True), source),
                daemon=True,
            ).start()
            pipe.send((network.listen_addrs[0], listener.getsockname()[1]))
            await trio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True)


def _serve_plain(listener: socket.socket, context: ssl.SSLContext, source: BulkSource) -> None:
    while True:
        tcp, _ = listener.accept()
        with context.wrap_socket(tcp, server_side=True) as tls:
            for start in range(0, source.size, MIB):
                tls.sendall(source.chunk(start // MIB))


# -- this process


def fetch_plain(context: ssl.SSLContext, port: int, data: memoryview) -> None:
    """Fetch the content over plain TLS."""
    filled, size = 0, len(data)
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as tls:
        while filled < size:
            filled += tls.recv_into(data[filled:])


async def measure(size: int, rounds: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)

        def start(target: Any, *args: Any) -> tuple[Connection, int]:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(*args, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, 20)
            return ours, process.pid or 0

        server, pid = start(serve, directory / "server", size)
        address, port = await trio.to_thread.run_sync(server.recv)
        async with host(directory / "client", initial_peers=[address]) as network:
            await wait_connected(network)
            plain = functools.partial(
                trio.to_thread.run_sync,
                fetch_plain,
                tls_context(directory / "client", server=False),
                port,
            )
            result = await _measure(
                network,
                address.rpartition("/")[2],
                plain,
                [psutil.Process(), psutil.Process(pid)],
                rounds,
            )
            server.send("stop")
    return result


async def _measure(
    network: Libp2pNetwork,
    peer: str,
    plain: Callable[[memoryview], Awaitable[Any]],
    processes: list[psutil.Process],
    rounds: int,
) -> dict[str, Any]:
    """Measure `rounds` rounds. processes: the fetching and the serving one, for their CPU time."""
    manifest = await network.bulk.manifest(peer, TRANSFER)
    size = manifest.size
    # one buffer with its pages in place: their allocation is not part of a transfer
    memory = memoryview(bytearray(size))
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    cpu: dict[str, list[list[float]]] = {path: [] for path in PATHS}
    for number in range(rounds + 1):
        await trio.sleep(0.5)
        for path in PATHS:
            sink = MemorySink(manifest, limit=size, memory=memory)
            used = _cpu(processes)
            began = time.monotonic()
            if path == BULK:
                await network.bulk.fetch(peer, TRANSFER, manifest, sink, deadline=600)
            else:
                await plain(memory)
            ended = time.monotonic()
            if number:  # the first round warms up
                seconds[path].append(ended - began)
                cpu[path].append(
                    [after - before for after, before in zip(_cpu(processes), used, strict=True)]
                )
    return {
        "bytes": size,
        "rounds": rounds,
        "megabytes_per_second": {
            path: [size / each / 1e6 for each in seconds[path]] for path in PATHS
        },
        "cpu_seconds": {
            path: dict(zip(("fetching", "serving"), zip(*cpu[path], strict=True), strict=True))
            for path in PATHS
        },
        "ratios": [p / b for p, b in zip(seconds[PLAIN], seconds[BULK], strict=True)],
    }


def _cpu(processes: list[psutil.Process]) -> list[float]:
    """Return the CPU seconds of each process, in 10 ms steps."""
    return [times.user + times.system for times in (process.cpu_times() for process in processes)]


def show(results: dict[str, Any]) -> str:
    ratios, speed, cpu = results["ratios"], results["megabytes_per_second"], results["cpu_seconds"]
    rows = [
        [
            path,
            report.middle(speed[path], 0),
            report.middle(ratios) if path == BULK else "1",
            GOAL if path == BULK else "–",
            report.middle(cpu[path]["fetching"]),
            report.middle(cpu[path]["serving"]),
        ]
        for path in PATHS
    ]
    return "\n".join(
        [
            report.heading("exchange: bulk transfer between two processes"),
            (
                f"{results['bytes'] / 1e6:.0f} MB on loopback, {results['rounds']} rounds, the"
                " two in turn; median [least–greatest]:\n"
            ),
            report.table(
                [
                    "path",
                    "MB/s",
                    "of plain TLS, same round",
                    "goal",
                    "CPU s, fetching",
                    "CPU s, serving",
                ],
                rows,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="32 MB, two rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    megabytes, rounds = (32, 2) if arguments.quick else (256, arguments.rounds)
    results = trio.run(measure, megabytes * 10**6, rounds)
    print(show(results))
    if arguments.json:
        report.write_json(arguments.json, results)


if __name__ == "__main__":
    main()
