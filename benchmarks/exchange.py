"""How fast is a bulk transfer against plain TLS? `python -m benchmarks.exchange [--quick]`

    serving process  ─ 256 MB ─▶  this process (fetches, verifies)     each round: plain TLS, bulk
            ▲                          ▲
            └── pings ── third process ┘      latency of other requests during a transfer

Plain TLS is the fastest that Python's ssl module reads and writes: a blocking socket in a thread at
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
import statistics
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
from swarmnode.errors import PeerError
from swarmnode.p2p import identity
from swarmnode.p2p.bulk import BulkSource, MemorySink
from swarmnode.p2p.network import Libp2pNetwork
from tests.support.hosts import host

MIB = 2**20
TRANSFER = b"exchange".ljust(32, b"\0")
PING = "/benchmark/ping/1"
PING_SECONDS = 0.02
PATHS = ("plain TLS", "bulk")
GOALS = {"bulk": 0.6}


async def pong(peer: str, data: bytes) -> bytes:
    await trio.lowlevel.checkpoint()
    return data


@contextlib.asynccontextmanager
async def node(directory: Path, known: list[str]) -> Any:
    """Open a host that answers pings."""
    async with host(directory, initial_peers=known) as network:
        network.requests.serve(PING, pong, max_request_bytes=64, max_response_bytes=64)
        yield network


def tls_context(directory: Path, *, server: bool) -> ssl.SSLContext:
    """Return a context with the libp2p certificate of the node in `directory`."""
    transport = TLSTransport(identity.load_or_create(directory / "identity.key").key_pair)
    return transport.create_ssl_context(server_side=server)


# -- the serving process


def serve(directory: Path, size: int, pipe: Connection) -> None:
    trio.run(_serve, directory, size, pipe)


async def _serve(directory: Path, size: int, pipe: Connection) -> None:
    source = BulkSource(os.urandom(size))
    async with node(directory, []) as network:
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


# -- the third process


def ping(directory: Path, known: list[str], pipe: Connection) -> None:
    trio.run(_ping, directory, known, pipe)


async def _ping(directory: Path, known: list[str], pipe: Connection) -> None:
    """Ping both every 20 ms until stopped, then send [(start, seconds)] of each, by the clock that
    processes share."""
    samples: list[list[tuple[float, float]]] = [[] for _ in known]
    async with node(directory, known) as network, trio.open_nursery() as nursery:
        await network.wait_connected(len(known))
        pipe.send("ready")
        for peer, series in zip(
            (address.rpartition("/")[2] for address in known), samples, strict=True
        ):
            nursery.start_soon(_ping_one, network, peer, series)
        await trio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()
    pipe.send(samples)


async def _ping_one(network: Libp2pNetwork, peer: str, series: list[tuple[float, float]]) -> None:
    while True:
        began = time.monotonic()
        with contextlib.suppress(PeerError):
            await network.requests.request(peer, PING, b"", deadline=10, max_response_bytes=64)
            series.append((began, time.monotonic() - began))
        await trio.sleep(PING_SECONDS)


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
        async with node(directory / "client", [address]) as network:
            await network.wait_connected()
            pinger, _ = start(ping, directory / "pinger", [network.listen_addrs[0], address])
            await trio.to_thread.run_sync(pinger.recv)
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
            pinger.send("stop")
            samples = await trio.to_thread.run_sync(pinger.recv)
            server.send("stop")
    spans: dict[str, list[tuple[float, float]]] = result.pop("spans")
    result["pings"] = {
        path: {
            who: _during(spans[path], series)
            for who, series in zip(("fetching", "serving"), samples, strict=True)
        }
        for path in spans
    }
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
    spans: dict[str, list[tuple[float, float]]] = {path: [] for path in ("idle", *PATHS)}
    for number in range(rounds + 1):
        began = time.monotonic()
        await trio.sleep(0.5)
        spans["idle"].append((began, time.monotonic()))
        for path in PATHS:
            sink = MemorySink(manifest, limit=size, memory=memory)
            used = _cpu(processes)
            began = time.monotonic()
            if path in GOALS:
                await network.bulk.fetch(peer, TRANSFER, manifest, sink, deadline=600)
            else:
                await plain(memory)
            ended = time.monotonic()
            if number:  # the first round warms up
                seconds[path].append(ended - began)
                cpu[path].append(
                    [after - before for after, before in zip(_cpu(processes), used, strict=True)]
                )
                spans[path].append((began, ended))
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
        "ratios": {
            path: [
                plain / each for plain, each in zip(seconds[PATHS[0]], seconds[path], strict=True)
            ]
            for path in GOALS
        },
        "spans": spans,
    }


def _cpu(processes: list[psutil.Process]) -> list[float]:
    """Return the CPU seconds of each process, in 10 ms steps."""
    return [times.user + times.system for times in (process.cpu_times() for process in processes)]


def _during(spans: list[tuple[float, float]], series: list[tuple[float, float]]) -> list[float]:
    """Return the milliseconds of pings that began in one of the spans."""
    return sorted(
        1000 * seconds
        for at, seconds in series
        if any(began <= at < ended for began, ended in spans)
    )


def show(results: dict[str, Any]) -> str:
    ratios, speed, cpu = results["ratios"], results["megabytes_per_second"], results["cpu_seconds"]
    rows = [
        [
            path,
            report.middle(speed[path], 0),
            report.middle(ratios[path]) if path in ratios else "1",
            GOALS.get(path, "–"),
            report.middle(cpu[path]["fetching"]),
            report.middle(cpu[path]["serving"]),
        ]
        for path in PATHS
    ]
    pings = [
        [path, *(_quantiles(results["pings"][path][who]) for who in ("fetching", "serving"))]
        for path in ("idle", *PATHS)
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
            (
                "\nA third process pings both ends every 20 ms meanwhile; milliseconds, p50 / p99 /"
                " most (count):\n"
            ),
            report.table(
                ["during", "the fetching node answers in", "the serving node answers in"], pings
            ),
        ]
    )


def _quantiles(values: list[float]) -> str:
    if len(values) < 2:
        return f"too few ({len(values)})"
    return (
        f"{statistics.median(values):.1f} / {values[int(0.99 * (len(values) - 1))]:.1f} /"
        f" {values[-1]:.1f} ({len(values)})"
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
