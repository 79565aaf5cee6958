"""What a gossiped group costs the nodes that receive it: copies, CPU time, bytes, latency. `python
-m benchmarks.gossip`

N real hosts on loopback with the real rollout exchange, all in one process, so that its CPU time is
everybody's; the nodes publish groups in turn, at a rate that does not depend on the arm. An arm is
what a node runs today (`after`), the same with py-libp2p's own behaviour put back where a guard
saves something (`before`), or with one of the savings put back (`without …`). Every run is a
process of its own, and the arms take turns, because the machine may have other things to do:
compare CPU times of one table, and of no two.

Goal: at most 3.5 copies of a group per node, and at most a third of the CPU time that `before`
takes in the same table.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.pubsub import rpc_queue
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.utils import maybe_consume_signed_record
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from swarmnode.p2p.gossip import Validation
from swarmnode.rollouts.mode import Choice

from benchmarks import report
from swarmnode.config import NetworkConfig, SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, answer, swarm_of
from swarmnode.link.messages import Hello
from swarmnode.p2p import guards, identity
from swarmnode.p2p.guards import gossip, outbox, pubsub, yamux
from swarmnode.p2p.host import open_host
from swarmnode.p2p.network import Network
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import GroupRules, OwnGroup
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire import envelope, ids
from swarmnode.wire.envelope import Credentials

SWARM = swarm_of("gossip")
TOPIC = ids.rollout_topic(SWARM)
UPSTREAM_UPDATE = YamuxStream._auto_tune_and_send_window_update
SIZES = (2_000, 17_000)
RECEIPTS = 15.0
"""Groups received per second that are offered by all nodes together."""
KNOWN_PEERS = 8
"""Nodes that a node connects to, of those that were there before it; as many connect to it, on
average."""
JOIN_SECONDS = 300.0
MESH_SECONDS = 6.0
"""Heartbeats before anything is published: meshes have formed by then."""
IDLE_SECONDS = 5.0
LATE_SECONDS = 40.0
"""Waited for the last groups after the last was published."""
RUN_SECONDS = 900.0


class Run(msgspec.Struct, frozen=True):
    """One process: `nodes` hosts, groups of about `size` bytes, `arm` of ARMS; `receipts` groups
    received in all, about."""

    nodes: int
    size: int
    arm: str
    receipts: int
    seed: int = 0
    settings: dict[str, float] = {}
    exchange: Choice = "gossip"


class Outcome(msgspec.Struct, frozen=True):
    frame_bytes: float
    delivered: float
    """Share of the (group, node) pairs that arrived."""
    copies: float
    """Times a node was sent a group, for each that it received."""
    cpu_ms: float
    """CPU time of all hosts ÷ groups received by all hosts, without what they take when nothing is
    published."""
    idle_ms: float
    """CPU time of a host per second in which nothing is published."""
    bytes_ratio: float
    """Bytes read from sockets ÷ bytes of the groups received."""
    p95_seconds: float
    """From publishing to admission."""
    mesh: float
    connections: float


class Meter:
    """What all hosts of this process did: copies of messages, bytes from sockets, who received
    which group when."""

    def __init__(self) -> None:
        self.copies = 0
        self.bytes = 0
        self.published: dict[bytes, float] = {}
        self.latencies: list[float] = []

    def install(self) -> None:
        push, read = guards.GuardedPubsub.push_msg, TrioTCPStream.read

        async def push_msg(pubsub: guards.GuardedPubsub, forwarder: Any, message: Any) -> None:
            self.copies += forwarder != pubsub.my_id
            await push(pubsub, forwarder, message)

        async def counting(stream: TrioTCPStream, n: int | None = None) -> bytes:
            data = await read(stream, n)
            self.bytes += len(data)
            return data

        guards.GuardedPubsub.push_msg = push_msg  # type: ignore[method-assign]
        TrioTCPStream.read = counting  # type: ignore[method-assign]

    def watch(self, exchange: RolloutExchange) -> None:
        """Note when `exchange` admits a frame that was published here."""
        validate = exchange.validate

        def noting(frame: bytes, forwarder: str) -> Validation:
            verdict = validate(frame, forwarder)
            began = self.published.get(envelope.content_id(frame))
            if began is not None and verdict is Validation.ACCEPT:
                self.latencies.append(trio.current_time() - began)
            return verdict

        exchange.validate = noting  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def swarm(
    run: Run, meter: Meter, directory: Path
) -> AsyncIterator[list[tuple[RolloutExchange, Author, Network]]]:
    """The nodes, connected to others as they would be after some minutes."""
    rng = random.Random(run.seed)
    async with contextlib.AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nodes: list[tuple[RolloutExchange, Author, Network]] = []
        for number in range(run.nodes):
            where = directory / str(number)
            key = identity.load_or_create(where / "identity.key")
            known = [
                network.listen_addrs[0]
                for _, _, network in rng.sample(nodes, min(len(nodes), KNOWN_PEERS))
            ]
            cfg = NetworkConfig(mdns=False, relay="off", initial_peers=known)
            network = await stack.enter_async_context(open_host(cfg, key, where, swarm=SWARM))
            author = Author(SWARM, key=key.private_key)
            credentials = Credentials(author.key, SWARM)
            sharing = SharingConfig(exchange=run.exchange)
            exchange = RolloutExchange(
                network, InProcessScorer(), credentials, GroupRules(BUILTIN_TASKS), sharing, rng=rng
            )
            exchange.set_policy(Hello(MODEL, TOKENIZER, 0, 120))
            meter.watch(exchange)
            await nursery.start(exchange.run)
            nodes.append((exchange, author, network))
        with trio.move_on_after(JOIN_SECONDS):
            while any(  # noqa: ASYNC110
                len(network.connected()) < min(number, KNOWN_PEERS)
                for number, (_, _, network) in enumerate(nodes)
            ):
                await trio.sleep(0.2)
            while run.exchange == "gossip" and any(  # noqa: ASYNC110
                len(network.gossip.peers(TOPIC)) < len(network.connected())
                for _, _, network in nodes
            ):
                await trio.sleep(0.2)
        yield nodes
        nursery.cancel_scope.cancel()


def group(author: Author, sequence: int, size: int) -> OwnGroup:
    """A group whose frame has about `size` bytes: one right answer, and seven texts of random
    letters."""
    rng = random.Random(f"{author.peer} {sequence}")
    # a letter is a token: its id, its log-probability and itself, compressed
    letters = max(1, (size - 1_200) // 11)
    texts = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=letters)) for _ in range(7)
    ]
    return author.own_group(sequence, texts=[answer(author.task(sequence)), *texts])


async def measure(run: Run) -> Outcome:
    meter, rng = Meter(), random.Random(run.seed)
    guards.install()
    guards.swarm.INBOUND_PER_ADDRESS = run.nodes**2  # they are all at 127.0.0.1
    for put_back in ARMS[run.arm]:
        put_back()
    for name, value in run.settings.items():
        module, _, constant = name.rpartition(".")
        setattr(getattr(guards, module) if module else guards, constant, value)
    meter.install()
    with tempfile.TemporaryDirectory() as directory:
        async with swarm(run, meter, Path(directory)) as nodes:
            await trio.sleep(MESH_SECONDS)
            before = time.process_time()
            await trio.sleep(IDLE_SECONDS)
            idle = (time.process_time() - before) / IDLE_SECONDS
            meshes = [network.gossip.statistics().mesh[TOPIC] for _, _, network in nodes]
            connections = [len(network.connected()) for _, _, network in nodes]

            count = max(1, round(run.receipts / (run.nodes - 1)))
            pause = (run.nodes - 1) / RECEIPTS
            sizes: list[int] = []
            for _, _, network in nodes:
                _note_publishing(network, meter, sizes)
            order = [n % run.nodes for n in range(count)]
            rng.shuffle(order)
            sequences = Counter[int]()
            groups = []
            for index in order:
                groups.append(group(nodes[index][1], sequences[index], run.size))
                sequences[index] += 1
            copies, received, began, clock = (
                meter.copies,
                meter.bytes,
                time.process_time(),
                trio.current_time(),
            )
            for number, (index, made) in enumerate(zip(order, groups, strict=True)):
                await nodes[index][0].publish(made)
                await trio.sleep_until(clock + (number + 1) * pause)
            with trio.move_on_after(LATE_SECONDS):
                while len(meter.latencies) < count * (run.nodes - 1):  # noqa: ASYNC110 - counted where it is not worth an event
                    await trio.sleep(0.1)
            await trio.sleep(1.0)  # copies that are still under way belong to it
            cpu, wall = time.process_time() - began, trio.current_time() - clock
            arrived = max(1, len(meter.latencies))
            return Outcome(
                frame_bytes=statistics.fmean(sizes),
                delivered=len(meter.latencies) / (count * (run.nodes - 1)),
                copies=(meter.copies - copies) / arrived,
                cpu_ms=1000 * max(0.0, cpu - idle * wall) / arrived,
                idle_ms=1000 * idle / run.nodes,
                bytes_ratio=(meter.bytes - received) / (arrived * statistics.fmean(sizes)),
                p95_seconds=sorted(meter.latencies or [math.inf])[
                    int(0.95 * (len(meter.latencies) - 1))
                ],
                mesh=statistics.fmean(meshes),
                connections=statistics.fmean(connections),
            )


def _note_publishing(network: Network, meter: Meter, sizes: list[int]) -> None:
    publish = network.gossip.publish

    async def noting(topic: str, frame: bytes) -> None:
        meter.published[envelope.content_id(frame)] = trio.current_time()
        sizes.append(len(frame))
        await publish(topic, frame)

    network.gossip.publish = noting  # type: ignore[method-assign]


# -- what py-libp2p does where a guard saves something


class UpstreamQueue(rpc_queue.RpcQueue):
    """py-libp2p's queue, as long as ours."""

    def __init__(self) -> None:
        super().__init__(outbox.QUEUE_MESSAGES)

    def drop(self, message_id: bytes) -> None:
        """A duplicate is sent."""


class ByteByByte:
    """py-libp2p's way of reading a frame."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._limit = stream, limit

    async def read(self) -> bytes:
        return await read_varint_prefixed_bytes_limited(self._stream, self._limit)


def without_degree() -> None:
    guards.DEGREE, guards.DEGREE_LOW, guards.DEGREE_HIGH = 8, 6, 32  # type: ignore[misc]
    gossip._hold_degree = lambda router: None


def without_windows() -> None:
    yamux.upstream.YamuxStream._auto_tune_and_send_window_update = UPSTREAM_UPDATE  # type: ignore[method-assign]


def without_frames() -> None:
    pubsub.Frames = ByteByByte  # type: ignore[assignment, misc]


def without_records() -> None:
    def take(self: guards.GuardedPubsub, forwarder: Any, rpc: Any) -> bool:
        return maybe_consume_signed_record(rpc, self.host, forwarder.peer)

    def serialised(router: Any, message: Any) -> bytes:
        record, _ = env_to_send_in_RPC(router.pubsub.host)
        return rpc_pb2.RPC(publish=[message], senderRecord=record).SerializeToString()

    guards.GuardedPubsub.take_record = take  # type: ignore[method-assign]
    gossip._serialised = serialised


def without_outbox() -> None:
    """A copy, a serialisation and a frame for each recipient and message, at once."""
    gossip.upstream.RpcQueue = UpstreamQueue  # type: ignore[misc]
    guards.GuardedPubsub.handle_sending_messages = Pubsub.handle_sending_messages  # type: ignore[method-assign]
    gossip._send_once = lambda router: None


def without_waiting() -> None:
    outbox.FORWARD_SECONDS = 0.0


SAVINGS = {
    "degree": without_degree,
    "windows": without_windows,
    "frames": without_frames,
    "records": without_records,
    "outbox": without_outbox,
    "waiting": without_waiting,
}
ARMS: dict[str, tuple[Callable[[], None], ...]] = {
    "after": (),
    "before": tuple(SAVINGS.values()),
    **{f"without {name}": (put_back,) for name, put_back in SAVINGS.items()},
}


def run(one: Run) -> Outcome:
    """`one` in a process of its own. Raises subprocess.CalledProcessError, TimeoutExpired."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gossip",
        "--one",
        msgspec.json.encode(one).decode(),
    ]
    done = subprocess.run(command, check=True, capture_output=True, timeout=RUN_SECONDS)
    return msgspec.json.decode(done.stdout, type=Outcome)


def plan(quick: bool) -> list[Run]:
    """The runs, arms taking turns."""
    nodes, sizes, repeats = ((4, 8), SIZES[:1], 1) if quick else ((4, 8, 16, 32, 48), SIZES, 2)
    pairs = [
        Run(count, size, arm, receipts=max(150, 12 * count), seed=seed)
        for count in nodes
        for size in sizes
        for seed in range(repeats if count <= 16 else 1)
        for arm in ("before", "after")
    ]
    alone = [
        Run(16, SIZES[1], arm, receipts=200, seed=seed)
        for seed in range(repeats)
        for arm in ARMS
        if arm != "before"
    ]
    return pairs if quick else pairs + alone


def row(runs: list[Outcome]) -> list[str]:
    """One line of the table."""
    mean = lambda name: statistics.fmean(getattr(each, name) for each in runs)
    return [
        f"{mean('copies'):.1f}",
        report.middle([each.cpu_ms for each in runs], 1),
        f"{mean('bytes_ratio'):.1f}",
        f"{mean('p95_seconds'):.2f}",
        f"{100 * mean('delivered'):.0f} %",
        f"{mean('mesh'):.1f} of {mean('connections'):.0f}",
        f"{mean('idle_ms'):.1f}",
    ]


def show(outcomes: list[tuple[Run, Outcome]]) -> str:
    """Tables: before and after by nodes and size; then, at 16 nodes, what each saving alone is
    worth."""
    rows: dict[tuple[int, int, str], list[Outcome]] = {}
    for one, outcome in outcomes:
        rows.setdefault((one.nodes, one.size, one.arm), []).append(outcome)
    what = ["copies", "CPU ms per group", "bytes ÷ size", "p95 s", "delivered", "mesh", "idle ms/s"]
    pairs = [
        [nodes, f"{size / 1000:g} KB", arm, *row(runs)]
        for (nodes, size, arm), runs in rows.items()
        if not arm.startswith("without")
    ]
    alone = [[arm, *row(runs)] for (_, _, arm), runs in rows.items() if arm.startswith("without")]
    parts = [
        report.heading("gossip: what a group costs whoever receives it"),
        report.table(["nodes", "group", "arm", *what], pairs),
    ]
    if alone:
        parts.append("\n" + report.table(["16 nodes, 17 KB", *what], alone))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 and 8 nodes, small groups")
    parser.add_argument("--json", type=Path, help="write the outcomes there, too")
    parser.add_argument("--one", help="a Run as JSON, done here and now; prints its Outcome")
    arguments = parser.parse_args()
    if arguments.one:
        print(
            msgspec.json.encode(
                trio.run(measure, msgspec.json.decode(arguments.one, type=Run))
            ).decode()
        )
        return
    outcomes = []
    for one in plan(arguments.quick):
        outcomes.append((one, run(one)))
        print(one, outcomes[-1][1], file=sys.stderr, flush=True)
    print(show(outcomes))
    if arguments.json:
        report.write_json(arguments.json, msgspec.to_builtins(outcomes))


if __name__ == "__main__":
    main()
