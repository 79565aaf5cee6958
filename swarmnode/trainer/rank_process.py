"""Process of a rank other than 0: it runs the commands of rank 0, one after the other.

This module also has the messages between ranks, their shared memory, and the collectives that all
ranks enter. See ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Literal

import msgspec
import structlog
import torch
import torch.distributed as dist

from swarmnode.config import Config
from swarmnode.errors import DeviceError, RankLost, SwarmNodeError
from swarmnode.link.messages import CardUse
from swarmnode.observe import logs
from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.engine.selector import OwnEngine, select_engine
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import RowTooLarge, free_memory, is_oom
from swarmnode.policy.ways import reason
from swarmnode.process import die_with_parent
from swarmnode.rollouts.groups import Outcome
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import RowScores
from swarmnode.swarm.manifest_store import load_current
from swarmnode.trainer.engine import Memory, card_uses, make_updater, open_policy
from swarmnode.trainer.update import PeersFailed, RowSelection, StartOver, Sums, Updater

log = structlog.get_logger("swarmnode.trainer")


COLLECTIVE_SECONDS = 60.0
"""Deadline of one reduction or broadcast, which all ranks enter at the same time."""
POLL_SECONDS = 0.5
"""Interval between checks of ranks that have not answered, in seconds."""
SPIN_SECONDS = 0.0005
"""Interval between checks of a collective in progress, in seconds."""
MICRO_BATCHES_PER_RANK = 3
"""Number of micro-batches per rank into which a step is cut, so that no rank waits long for the
slowest."""
PHASES = 3
"""Number of phases of a step's gradients: own rows, own rows with activation checkpointing, and
external rows."""
BUCKET_BYTES = 64 * 2**20
"""Size of the tensors that are reduced or broadcast together."""


@dataclass(frozen=True)
class Setup:
    config: str
    rank: int
    count: int
    store: str
    """Path of the file for torch.distributed's rendezvous."""


def run_rank(setup: Setup, connection: Connection, shared: Shared) -> None:
    """Entry point of another rank's process.

    The process has no state that rank 0 lacks, so it may be killed at any time.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 finishes its step and needs this rank
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    config = Config.model_validate_json(setup.config)
    logs.configure(config.log, "trainer")
    structlog.contextvars.bind_contextvars(rank=setup.rank)
    try:
        OtherRank(config, setup, connection, shared).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has ended
    except SwarmNodeError as error:
        with contextlib.suppress(OSError):
            connection.send_bytes(encoded(Failed("device", str(error))))
            connection.close()
    os._exit(0)  # no state to save, and torch's own cleanup takes a second


class OtherRank:
    """Runs the commands of rank 0, one after the other."""

    def __init__(
        self, config: Config, setup: Setup, connection: Connection, shared: Shared
    ) -> None:
        self._config = config
        self._setup = setup
        self._connection = connection
        self._shared = shared
        self._alive = lambda: shared.beat(setup.rank)
        opened = load_current(config.node.data_dir)
        manifest = opened.manifest if opened is not None else None
        self._policy = open_policy(config.policy, manifest, lambda line: self._alive())
        memory, updater = make_updater(config, self._policy, self._alive, setup.count)
        self._memory: Memory = memory
        self._updater: Updater = updater
        self._engine: OwnEngine | None = None
        self._seconds = 0.0

    def run(self) -> None:
        policy = self._policy
        device, dtype = str(policy.device), str(policy.dtype)
        self._send(Ready(policy.fingerprint, device, dtype, card_uses(policy)))
        while True:
            command = COMMANDS.decode(self._connection.recv_bytes())
            self._alive()
            if isinstance(command, Quit):
                return
            answer: Answer
            try:
                answer = self._do(command)
            except StartOver:
                bounds = [batcher.tokens for batcher in self._updater.batchers]
                answer = Failed("start over", tokens=bounds)
            except RowTooLarge as error:
                answer = Failed("row too large", str(error), error.row, [error.tokens])
            except PeersFailed:
                answer = Failed("peers failed")
            except DeviceError as error:
                answer = Failed("device", str(error))
            except Exception as error:  # a model's code may raise anything  # noqa: BLE001
                answer = Failed("device" if is_oom(error) else "error", reason(error))
            if isinstance(answer, Failed):
                self._updater.zero_grad()
                free_memory()
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        self._connection.send_bytes(encoded(answer))

    def _do(self, command: AnyCommand) -> Answer:
        match command:
            case Join():
                join(self._policy.device, self._setup.store, self._setup.rank, self._setup.count)
            case TakeWeights():
                self._take_weights()
            case Generate(prompts, sampling, seed):
                rng = self._policy.random_generator(seed)
                return Samples(
                    self._memory.generation.generate(self._policy, prompts, sampling, rng)
                )
            case StartGeneration(sampling, seed):
                rng = self._policy.random_generator(seed)
                self._engine = select_engine(
                    self._policy,
                    self._memory.generation,
                    self._config.training.options,
                    sampling,
                    rng,
                )
            case Advance():
                return self._advance(command)
            case Score(rows, temperature):
                return Scores(
                    self._memory.external.score_with_entropy(self._policy, rows, temperature)
                )
            case Accumulate():
                return self._accumulate(command)
            case AddGradients():
                add_gradients(self._policy, self._finish)
                self._updater.zero_grad()
        return Done()

    def _take_weights(self) -> None:
        parameters = [p.detach() for p in self._policy.trainable_parameters()]
        with self._engine.pause() if self._engine is not None else contextlib.nullcontext():
            broadcast = lambda flat: dist.broadcast(flat, 0, async_op=True)
            in_buckets(parameters, broadcast, self._finish)

    def _finish(self, work: dist.Work) -> None:
        finish(work, self._alive)

    def _advance(self, command: Advance) -> Advanced:
        assert self._engine is not None
        for number in command.cancel:
            self._engine.cancel(number)
        for request in command.submit:
            self._engine.submit(request)
        while True:
            started = time.monotonic()
            done = self._engine.finished(command.version)
            self._seconds += time.monotonic() - started
            self._alive()
            statistics = self._engine.statistics()
            last = not statistics.unfinished or self._connection.poll()
            answer = Advanced(done, statistics, self._seconds, last)
            if last:
                return answer
            if done:
                self._send(answer)

    def _accumulate(self, command: Accumulate) -> Accumulated:
        for batcher, tokens in zip(self._updater.batchers, command.tokens, strict=True):
            batcher.tokens = tokens
        scaler = self._policy.accelerator.scaler
        if scaler is not None and command.scaler is not None:
            scaler.load_state_dict(command.scaler)
        selection = RowSelection(
            command.own, command.external, set(command.recomputed), refused=command.refused
        )
        sharing = MicroBatchQueue(self._shared, self._setup.count)
        sums = self._updater.accumulate(command.rows, selection, sharing)
        return Accumulated(sums, card_uses(self._policy))


# ---- messages ------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, tag=True):
    """A command from rank 0. A rank sends exactly one final answer to each."""


class Join(Command, frozen=True):
    """Enter the process group."""


class TakeWeights(Command, frozen=True):
    """Enter the broadcast of the trained weights."""


class Generate(Command, frozen=True):
    prompts: list[str | list[int]]
    sampling: Sampling
    seed: int


class StartGeneration(Command, frozen=True):
    sampling: Sampling
    seed: int


class Advance(Command, frozen=True):
    """Answer questions until all are answered or another command arrives."""

    version: int
    submit: list[Request]
    cancel: list[int]


class Halt(Command, frozen=True):
    """Stop an `Advance` in progress; do nothing else."""


class Score(Command, frozen=True):
    rows: list[Row]
    temperature: float


class Accumulate(Command, frozen=True):
    """Accumulate gradients of micro-batches that no other rank has taken."""

    rows: Rows
    own: list[int]
    external: list[int]
    recomputed: list[int]
    refused: dict[int, Outcome]
    tokens: list[int]
    """Token bounds of `Updater.batchers`."""
    scaler: dict[str, float] | None
    """State of the loss scaler with float16; None otherwise."""


class AddGradients(Command, frozen=True):
    """Enter the all-reduce of the gradients."""


class Quit(Command, frozen=True):
    pass


AnyCommand = (
    Join
    | TakeWeights
    | Generate
    | StartGeneration
    | Advance
    | Halt
    | Score
    | Accumulate
    | AddGradients
    | Quit
)


class Answer(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(Answer, frozen=True):
    """The policy is loaded."""

    fingerprint: bytes
    device: str
    dtype: str
    cards: list[CardUse]


class Done(Answer, frozen=True):
    pass


class Samples(Answer, frozen=True):
    groups: list[GroupSample]


class Advanced(Answer, frozen=True):
    """Requests that a rank has finished. `last`: no further answer follows for the same command."""

    done: list[FinishedRequest]
    statistics: GenerationStatistics
    seconds: float
    last: bool


class Scores(Answer, frozen=True):
    values: list[RowScores]


class Accumulated(Answer, frozen=True):
    sums: Sums
    cards: list[CardUse]


class Failed(Answer, frozen=True):
    """The error that a command raised."""

    kind: Literal["start over", "row too large", "peers failed", "device", "error"]
    detail: str = ""
    row: int = 0
    tokens: list[int] = []
    """Token count of the row that is too large, or the remaining micro-batch bounds."""

    def raised(self, rank: int) -> Exception:
        match self.kind:
            case "start over":
                return StartOver()
            case "row too large":
                return RowTooLarge(self.row, self.tokens[0])
            case "peers failed":
                return PeersFailed()
            case "device":
                return DeviceError(f"rank {rank}: {self.detail}")
        return RuntimeError(f"rank {rank}: {self.detail}")


AnyAnswer = Ready | Done | Samples | Advanced | Scores | Accumulated | Failed


def encoded(message: Command | Answer) -> bytes:
    return ENCODER.encode(message)


# tensors are sent as lists
ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda tensor: tensor.tolist())
COMMANDS = msgspec.msgpack.Decoder(AnyCommand, dec_hook=lambda kind, values: torch.tensor(values))
ANSWERS = msgspec.msgpack.Decoder(AnyAnswer)


# ---- shared memory of all ranks ------------------------------------------------------------------


@dataclass
class MicroBatchQueue:
    """`update.Sharing` of one attempt. Each rank has one, and all count up the same shared
    numbers."""

    shared: Shared
    count: int
    others: Callable[[], list[Sums]] = list
    """Returns the sums of the other ranks; used only on rank 0."""
    _phase: int = 0

    def tokens(self, lengths: Sequence[int]) -> int:
        parts = self.count * MICRO_BATCHES_PER_RANK
        return max(max(lengths, default=1), -(-sum(lengths) // parts))

    def take(self, micro_batches: list[list[int]]) -> Iterator[list[int]]:
        phase, self._phase = self._phase, self._phase + 1
        # The largest run first: the last to finish are then small, and a micro-batch that does not
        # fit fails early.
        for rows in iter(lambda: self.shared.take(phase), -1):
            if rows >= len(micro_batches):
                return
            yield micro_batches[-1 - rows]


@dataclass(frozen=True)
class Shared:
    """Shared memory of all ranks: the number of micro-batches taken, and the last signs of life."""

    taken: SynchronizedArray[int]
    """Number of micro-batches taken, by phase."""
    beats: SynchronizedArray[float]
    """Time of the last sign of life by rank, from time.monotonic."""

    @classmethod
    def make(cls, context: SpawnContext, count: int) -> Shared:
        return cls(context.Array("q", PHASES), context.Array("d", count))

    def start_taking(self) -> None:
        with self._locked() as taken:
            for phase in range(PHASES):
                taken[phase] = 0

    def stop_taking(self) -> None:
        with self._locked() as taken:
            for phase in range(PHASES):
                taken[phase] = 2**62

    def take(self, phase: int) -> int:
        with self._locked() as taken:
            taken[phase] += 1
            return taken[phase] - 1

    @contextmanager
    def _locked(self) -> Iterator[SynchronizedArray[int]]:
        """Lock `taken`. Raises RankLost if a rank was killed while it held the lock."""
        lock = self.taken.get_lock()
        if not lock.acquire(timeout=COLLECTIVE_SECONDS):
            raise RankLost("a rank ended while it took a micro-batch")
        try:
            yield self.taken
        finally:
            lock.release()

    def beat(self, rank: int) -> None:
        self.beats.get_obj()[rank] = time.monotonic()

    def last_beat(self, rank: int) -> float:
        return float(self.beats.get_obj()[rank])


# ---- collectives ---------------------------------------------------------------------------------


def join(device: torch.device, store: str, rank: int, count: int) -> None:
    """Enter the process group. All communication stays on the loopback interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=2 * COLLECTIVE_SECONDS),
    )


def finish(work: dist.Work, watch: Callable[[], None] = lambda: None) -> None:
    """Wait at most COLLECTIVE_SECONDS for a collective, calling `watch` regularly.

    Raises:
        RuntimeError: The collective failed or timed out.
    """
    started = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - started > COLLECTIVE_SECONDS:
            raise RuntimeError(f"not done within {COLLECTIVE_SECONDS:.0f} seconds")
        if now - looked > POLL_SECONDS:
            looked = now
            watch()
        time.sleep(SPIN_SECONDS)
    work.wait()


def in_buckets(
    tensors: Sequence[torch.Tensor],
    collective: Callable[[torch.Tensor], dist.Work | None],
    wait_for: Callable[[dist.Work], None] = finish,
) -> None:
    """Run a collective in place on `tensors`, BUCKET_BYTES at a time."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room or tensor.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        work = collective(flat)
        assert work is not None
        wait_for(work)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def add_gradients(
    policy: Policy,
    wait_for: Callable[[dist.Work], None] = finish,
) -> None:
    """Sum all ranks' gradients on every rank. A weight without gradient on all ranks stays
    without."""
    parameters = policy.trainable_parameters()
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has = has.to(policy.device)
    work = dist.all_reduce(has, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    wait_for(work)
    summed = [p for p, there in zip(parameters, has.tolist(), strict=True) if there]
    for parameter in summed:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    total = lambda flat: dist.all_reduce(flat, async_op=True)
    in_buckets([p.grad for p in summed if p.grad is not None], total, wait_for)
