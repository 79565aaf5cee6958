"""How fast is a crew whose nodes are apart? `python -m benchmarks.crew_distance [--quick]
[--milliseconds …]`. Root only: each node has a network namespace.

Four whole nodes hold the embedded policy, eight layers deep, as four stages. The line of each takes
50 Mbit/s each way (tbf at both ends), and everything that is sent to a node arrives so many
milliseconds later (`swarmnode.demo.delay.forward_delayed`). Measured from outside, ten times a
second: seconds between steps of all stages; then, stage after stage, the trainer is killed -9 with
its own checkpoint deleted, so that its state crosses the lines: seconds from the kill to the next
step, and from the assignment to the restored weights.

The state of this policy is small. Below it stands what a 7 B policy would take, computed from the
product's own message sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from benchmarks import report
from benchmarks.lib.crews import FORM_SECONDS, RETURN_SECONDS, STAGES, Crew, Recovery
from swarmnode.config import StagesConfig
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.delay import forward_delayed
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.swarm import DemoOptions
from swarmnode.stages.pipeline import WorkerSettings
from swarmnode.stages.wire import activation_bytes
from tests.support.netns import Topology, enter, missing

MILLISECONDS = (0, 10, 50, 100)
RATE = 50_000
"""kbit/s of a node's line, each way."""
SHAPING = ["root", "tbf", "rate", f"{RATE}kbit", "burst", "64kb", "latency", "400ms"]
PORT, BEHIND = 4001, 4002
"""Port of a node's address, and port where it listens behind its delay."""
SAMPLES = 64
"""Completions of a step: eight groups of eight."""


@dataclass(frozen=True)
class Distance:
    """Results at one distance."""

    milliseconds: int
    formed: float | None
    steps: tuple[float, ...] = ()
    """Seconds of each step."""
    recoveries: tuple[Recovery, ...] = ()
    restored: tuple[float, ...] = ()
    """Seconds from the assignment to the restored weights, of each recovery."""
    measured: tuple[float, ...] = ()
    """One-way seconds that each node has measured."""


class FarNode(DemoNode):
    """A node in a network namespace, whose status page is read from there."""

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: dict[str, dict[str, object]],
        namespace: str,
        *prefix: str,
    ) -> None:
        super().__init__(name, directory, settings)
        self.prefix = prefix
        self._there = ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,))

    def ask(self) -> None:
        self._there.submit(super().ask).result()


class Delay:
    """A proxy in a node's namespace that forwards `address`:PORT to `address`:BEHIND, and back,
    after `seconds`."""

    def __init__(self, namespace: str, address: str, seconds: float) -> None:
        self._namespace, self._address, self._seconds = namespace, address, seconds
        # twice what the line takes in that time: a larger buffer would be a longer line
        self._under_way = int(2 * seconds * RATE * 1000 / 8)
        self._scope, self._token = trio.CancelScope(), None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def close(self) -> None:
        if self._token is not None:
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(5)

    def _run(self) -> None:
        enter(self._namespace)
        trio.run(self._serve)

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        listener = socket.create_server((self._address, PORT), backlog=64)
        self._ready.set()
        with self._scope:
            await trio.serve_listeners(
                self._connected, [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
            )

    async def _connected(self, near: trio.SocketStream) -> None:
        await trio.sleep(self._seconds)
        with contextlib.suppress(OSError):
            async with near:
                far = await trio.open_tcp_stream(self._address, BEHIND)
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._under_way)
                await forward_delayed(near, far, self._seconds, self._under_way)


@contextlib.contextmanager
def far_crew(directory: Path, milliseconds: int, copies: bool) -> Iterator[Crew]:
    """Start the demo's crew, its nodes so far apart. copies: the head samples from a whole copy."""
    options, model = DemoOptions(nodes=STAGES, http_port=0), write_model(directory / "model")
    with Topology() as net, contextlib.ExitStack() as stack:
        nodes: list[DemoNode] = []
        for number in range(STAGES):
            name, address = f"n{number}", f"10.5.5.{11 + number}"
            net.public(name, address)
            for place, device in ((name, "outside"), ("wan", f"p{number + 2}")):
                command = ["tc", "qdisc", "replace", "dev", device, *SHAPING]
                net.run(place, command, check=True)
            settings = crew_settings(options, number, model)
            settings["training"] |= {"eval_every": 10_000}
            settings["stages"] |= {"policy_copy": "memory" if copies else "off"}
            settings["network"] = settings.get("network", {}) | {
                "listen_addrs": [f"/ip4/{address}/tcp/{BEHIND if milliseconds else PORT}"],
                "announce_addrs": [f"/ip4/{address}/tcp/{PORT}"],
            }
            namespace = net.file(name)
            if milliseconds:
                stack.callback(Delay(namespace, address, milliseconds / 1000).close)
            prefix = ["ip", "netns", "exec", Path(namespace).name]
            where = directory / f"far{number}"
            nodes.append(FarNode(f"node{number}", where, settings, namespace, *prefix))
        crew = Crew(nodes)
        try:
            crew.start()
            yield crew
        finally:
            crew.end()


def step_times(crew: Crew, count: int) -> tuple[float, ...]:
    """Return the seconds of the next `count` steps, without the one under way."""
    seconds: list[float] = []
    for _ in range(count + 1):
        before = min(crew.steps())
        took = crew.wait(lambda before=before: min(crew.steps()) > before, RETURN_SECONDS)
        steps = max(1, min(crew.steps()) - before)
        seconds.append((took if took is not None else float("nan")) / steps)
    return tuple(seconds[1:])


def measure_at(milliseconds: int, steps: int, losses: int, copies: bool) -> Distance:
    with (
        tempfile.TemporaryDirectory(prefix="swarmnode-far-") as directory,
        far_crew(Path(directory), milliseconds, copies) as crew,
    ):
        formed = crew.wait(crew.running, FORM_SECONDS)
        if formed is None:
            words = [node.last_log_line() for node in crew.nodes]
            print(f"{milliseconds} ms: the crew did not form: {words}", flush=True)
            return Distance(milliseconds, None)
        times = step_times(crew, steps)
        measured = tuple(node.view.peer_seconds for node in crew.nodes)
        recoveries, restored = [], []
        for stage in range(losses):
            before = max(node.view.stage_step for node in crew.nodes)
            ready = lambda before=before: crew.running() and min(crew.steps()) >= before + 2
            if crew.wait(ready, RETURN_SECONDS) is None:
                words = [node.last_log_line() for node in crew.nodes]
                print(f"{milliseconds} ms: the crew did not continue: {words}", flush=True)
                break
            recoveries.append(crew.lose("disk", (stage % STAGES,)))
            with contextlib.suppress(LookupError):
                restored.append(crew.holder(stage % STAGES).view.source_seconds or float("nan"))
            print(milliseconds, recoveries[-1], restored[-1:], flush=True)
        return Distance(milliseconds, formed, times, tuple(recoveries), tuple(restored), measured)


def rows(found: Sequence[Distance]) -> list[list[str]]:
    spread = lambda values, spec=".1f": (
        "–"
        if not values
        else f"{statistics.median(values):{spec}} [{min(values):{spec}} … {max(values):{spec}}]"
    )
    out = []
    for one in found:
        seconds = [r.seconds if r.seconds is not None else float("inf") for r in one.recoveries]
        sources = sorted({source for r in one.recoveries for source in r.sources})
        rate = f"{SAMPLES / statistics.median(one.steps):.1f}" if one.steps else "–"
        out.append(
            [
                str(one.milliseconds),
                "–" if one.formed is None else f"{one.formed:.0f}",
                spread(one.steps),
                rate,
                spread(one.restored),
                spread(seconds),
                ", ".join(
                    f"{source or 'none'} {sum(r.sources.count(source) for r in one.recoveries)}"
                    for source in sources
                ),
                spread([1000 * s for s in one.measured], ".0f"),
            ]
        )
    return out


HEADERS = [
    "ms, one way",
    "s to form",
    "s per step",
    "samples/s",
    "s to restore a stage",
    "s from the kill to the next step",
    "source",
    "ms measured",
]


def seven_billion() -> list[list[str]]:
    """Return what lines take for a 7 B policy in four stages, hidden size 4,096: bytes alone."""
    rows_of_a_step = 8 * 256 + 64 * 1024  # a prompt once for eight completions
    default = WorkerSettings(bytes(32), StagesConfig().codec)
    forward, backward = (
        activation_bytes(codec, rows_of_a_step, 4096) for codec in (default.codec, "bfloat16")
    )
    whole = 7e9 / STAGES
    things = [
        ("one update of 64 × (256 + 1,024) tokens, forward", forward),
        ("the same, the line of an inner stage (forward and backward)", forward + backward),
        ("a stage, small (bfloat16)", 2 * whole),
        ("a stage, exact (float32 with both moments)", 12 * whole),
        ("adapters of rank 16, all of them, int8", 23e6),
    ]
    return [
        [
            what,
            f"{size / 1e6:,.0f}",
            *(f"{8 * size / (rate * 1e6):,.0f}" for rate in (25, 50, 100, 1000)),
        ]
        for what, size in things
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crew_distance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="50 ms, two steps, one loss")
    parser.add_argument("--milliseconds", type=int, nargs="+", default=MILLISECONDS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--losses", type=int, default=3, help="lost stages")
    parser.add_argument("--copies", action="store_true", help="the head samples from a whole copy")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.quick:
        options.milliseconds, options.steps, options.losses = (50,), 2, 1
    why = missing()
    if why and options.quick:
        print(f"skipped: {why}")
        return
    if why:
        raise SystemExit(why)
    found = [
        measure_at(each, options.steps, options.losses, options.copies)
        for each in options.milliseconds
    ]
    if options.json is not None:
        report.write_json(options.json, [asdict(each) for each in found])
    print(report.heading(f"crew_distance: {RATE // 1000} Mbit/s per node"))
    print(report.table(HEADERS, rows(found)))
    print()
    computed = ["7 B, computed", "MB", "s at 25 Mbit/s", "50", "100", "1,000"]
    print(report.table(computed, seven_billion()))


if __name__ == "__main__":
    main()
