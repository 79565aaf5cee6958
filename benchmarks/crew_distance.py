"""A crew whose nodes are apart: `python -m benchmarks.crew --distance`. Root, since each node has a
network namespace of its own.

Four whole nodes hold the embedded policy, eight layers deep, as four stages. The line of each takes
50 Mbit/s each way (tbf at both ends of it), and everything that is sent to a node arrives so many
milliseconds later, and so do its answers (`swarmnode.demo.distance.join`). Measured from outside,
ten times a second: seconds between steps that every stage has taken; then, stage after stage, the
trainer is killed -9 with its own checkpoint gone, so that its state comes over the lines: seconds
from the kill to the next step, and of these from its assignment to its weights being there
(`source_seconds`).

This policy's state is small. What a 7 B policy would take is computed below it, from the product's
own sizes of what travels.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from benchmarks import report
from benchmarks.crew import FORM_SECONDS, RETURN_SECONDS, STAGES, Crew, Recovery
from swarmnode.config import StagesConfig
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.distance import join
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.run import DemoOptions
from swarmnode.stages.pipeline import WorkerSettings
from swarmnode.stages.wire import activation_bytes
from tests.support.netns import Topology, enter, missing

MILLISECONDS = (0, 10, 50, 100)
RATE = 50_000
"""kbit/s of a node's line, each way."""
PORT, BEHIND = 4001, 4002
"""Where a node is reached, and where it listens behind its delay."""
SAMPLES = 64
"""Completions of a step: eight groups of eight."""


@dataclass(frozen=True)
class Line:
    """A home's, each way."""

    rate: int = RATE
    burst: str = "64kb"
    """As tc takes it."""
    queue: str = "400ms"
    """What waits before it and behind it, at most; what is more is dropped."""
    buffer_bytes: int = 0
    """Of the kernel, for a connection; 0 leaves it to the kernel."""

    def under_way(self, seconds: float) -> int:
        """Bytes that there may be on a way that is so long: twice of what the line takes. A proxy
        could keep far more."""
        return int(2 * seconds * self.rate * 1000 / 8)


LINE = Line()


@dataclass(frozen=True)
class Apart:
    """What was measured at one distance."""

    milliseconds: int
    formed: float | None
    steps: tuple[float, ...]
    """Seconds of each."""
    recoveries: tuple[Recovery, ...]
    restored: tuple[float, ...]
    """Seconds from an assignment to the weights being there, of each recovery."""
    measured: tuple[float, ...]
    """Seconds one way that the nodes have measured, of each."""


class FarNode(DemoNode):
    """A node in a namespace of its own, which is asked from there."""

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

    def sent_bytes(self) -> int:
        """That went out on its line."""
        return int(
            self._there.submit(Path("/proc/thread-self/net/dev").read_text)
            .result()
            .split("outside:")[1]
            .split()[8]
        )


class Delay:
    """In front of a node: what comes to `address`:PORT goes to `address`:BEHIND so late, and back.
    A thread that is in its namespace."""

    def __init__(self, namespace: str, address: str, seconds: float, line: Line) -> None:
        self._namespace, self._address, self._seconds, self._under_way = (
            namespace,
            address,
            seconds,
            line.under_way(seconds),
        )
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
                await join(near, far, self._seconds, self._under_way)


Settings = dict[str, dict[str, object]]


class FarCrew(Crew):
    def __init__(self, nodes: Sequence[FarNode], net: Topology) -> None:
        super().__init__(nodes)
        self._net = net

    def line(self, line: Line) -> None:
        """Each node's is like this from now on."""
        for number in range(len(self.nodes)):
            shape(self._net, number, line)


def shape(net: Topology, number: int, line: Line) -> None:
    """At both ends of the line of node `number`."""
    for place, device in ((f"n{number}", "outside"), ("wan", f"p{number + 2}")):
        rule = [
            "root",
            "tbf",
            "rate",
            f"{line.rate}kbit",
            "burst",
            line.burst,
            "latency",
            line.queue,
        ]
        net.run(place, ["tc", "qdisc", "replace", "dev", device, *rule], check=True)


@contextlib.contextmanager
def far_crew(
    directory: Path, milliseconds: int, settings_of: Callable[[int], Settings], line: Line = LINE
) -> Iterator[FarCrew]:
    """Four nodes so far apart, started. settings_of: a node's number → its configuration, without
    its addresses."""
    with Topology() as net, contextlib.ExitStack() as stack:
        nodes: list[DemoNode] = []
        for number in range(STAGES):
            name, address = f"n{number}", f"10.5.5.{11 + number}"
            net.public(name, address)
            shape(net, number, line)
            for buffer in ("tcp_wmem", "tcp_rmem") if line.buffer_bytes else ():
                net.run(
                    name,
                    [
                        "sysctl",
                        "-qw",
                        f"net.ipv4.{buffer}=4096 {line.buffer_bytes} {line.buffer_bytes}",
                    ],
                    check=True,
                )
            settings = settings_of(number)
            behind = f"/ip4/{address}/tcp/{BEHIND if milliseconds else PORT}"
            reached = {"listen_addrs": [behind], "announce_addrs": [f"/ip4/{address}/tcp/{PORT}"]}
            settings["network"] = {**settings.get("network", {}), **reached}
            if milliseconds:
                stack.callback(Delay(net.file(name), address, milliseconds / 1000, line).close)
            prefix = ["ip", "netns", "exec", Path(net.file(name)).name]
            nodes.append(
                FarNode(
                    f"node{number}", directory / f"far{number}", settings, net.file(name), *prefix
                )
            )
        crew = FarCrew(nodes, net)
        try:
            crew.start()
            yield crew
        finally:
            crew.end()


def step_times(crew: Crew, count: int) -> tuple[float, ...]:
    """Seconds of the next steps of all, the one under way not counted."""
    seconds: list[float] = []
    for _ in range(count + 1):
        before = min(crew.steps())
        took = crew.wait(lambda before=before: min(crew.steps()) > before, RETURN_SECONDS)
        seconds.append(
            (took if took is not None else float("nan")) / max(1, min(crew.steps()) - before)
        )
    return tuple(seconds[1:])


def small_crew(directory: Path, copies: bool) -> Callable[[int], Settings]:
    """The demo's crew. copies: the head samples from a whole copy of its own."""
    options, model = DemoOptions(nodes=STAGES, http_port=0), write_model(directory / "model")

    def settings_of(number: int) -> Settings:
        settings = crew_settings(options, number, model)
        settings["training"] |= {"eval_every": 10_000}
        settings["stages"] |= {"policy_copy": "memory" if copies else "off"}
        return settings

    return settings_of


def measure_at(milliseconds: int, steps: int, losses: int, copies: bool) -> Apart:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-far-")))
        crew = stack.enter_context(far_crew(directory, milliseconds, small_crew(directory, copies)))
        formed = crew.wait(crew.running, FORM_SECONDS)
        if formed is None:
            print(
                f"{milliseconds} ms: the crew did not form:"
                f" {[node.last_words() for node in crew.nodes]}",
                flush=True,
            )
            return Apart(milliseconds, None, (), (), (), ())
        times = step_times(crew, steps)
        measured = tuple(node.view.peer_seconds for node in crew.nodes)
        recoveries, restored = [], []
        for stage in range(losses):
            before = max(node.view.stage_step for node in crew.nodes)
            if (
                crew.wait(
                    lambda before=before: crew.running() and min(crew.steps()) >= before + 2,
                    RETURN_SECONDS,
                )
                is None
            ):
                print(
                    f"{milliseconds} ms: the crew did not go on:"
                    f" {[node.last_words() for node in crew.nodes]}",
                    flush=True,
                )
                break
            lost = crew.lose("disk", (stage % STAGES,))
            recoveries.append(lost)
            with contextlib.suppress(LookupError):
                restored.append(crew.holder(stage % STAGES).view.source_seconds or float("nan"))
            print(milliseconds, lost, restored[-1:], flush=True)
        return Apart(milliseconds, formed, times, tuple(recoveries), tuple(restored), measured)


def rows(found: Sequence[Apart]) -> list[list[str]]:
    some = lambda values, spec=".1f": (
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
                some(one.steps),
                rate,
                some(one.restored),
                some(seconds),
                ", ".join(
                    f"{source or 'none'} {sum(r.sources.count(source) for r in one.recoveries)}"
                    for source in sources
                ),
                some([1000 * s for s in one.measured], ".0f"),
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
    "by",
    "ms measured",
]


def seven_billion() -> list[list[str]]:
    """What a line of so many Mbit/s takes, and nothing else, for a 7 B policy in four stages, of
    hidden size 4,096 with 32 layers."""
    rows_of_a_step = 8 * 256 + 64 * 1024  # a prompt is there once for its eight completions
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


def run(
    milliseconds: Sequence[int],
    steps: int,
    losses: int,
    copies: bool = False,
    out: Path | None = None,
) -> list[Apart]:
    """Measure and print. Raises SystemExit where there can be no namespaces."""
    if why := missing():
        raise SystemExit(why)
    found = [measure_at(one, steps, losses, copies) for one in milliseconds]
    if out is not None:
        report.write_json(out, [asdict(one) for one in found])
    print(report.heading(f"crew: at a distance, {RATE // 1000} Mbit/s per node"))
    print(report.table(HEADERS, rows(found)))
    print()
    print(
        report.table(
            ["7 B, computed", "MB", "s at 25 Mbit/s", "50", "100", "1,000"], seven_billion()
        )
    )
    return found
