"""Rank 0's connection to the other ranks: it sends commands, receives answers, and detects lost
ranks. See ranks.py."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import TypeVar

import structlog
import torch
import torch.distributed as dist

from swarmnode.config import Config
from swarmnode.errors import DeviceError, RankLost
from swarmnode.link.messages import CardUse
from swarmnode.policy.device import probe, thread_count
from swarmnode.policy.load import Policy
from swarmnode.policy.ways import reason
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.trainer.rank_process import (
    ANSWERS,
    POLL_SECONDS,
    Accumulate,
    Accumulated,
    AddGradients,
    Advanced,
    Answer,
    AnyAnswer,
    Command,
    Done,
    Failed,
    Halt,
    Join,
    MicroBatchQueue,
    Quit,
    Ready,
    Setup,
    Shared,
    TakeWeights,
    add_gradients,
    encoded,
    finish,
    in_buckets,
    join,
    run_rank,
)
from swarmnode.trainer.update import RowSelection, Updater

log = structlog.get_logger("swarmnode.trainer")


A = TypeVar("A", bound=Answer)

SILENCE_SECONDS = 60.0
"""Seconds without progress after which a working rank counts as hung; a rank reports after every
layer and decoding step."""
STARTUP_SECONDS = 300.0
"""Seconds without progress after which a rank that has not joined yet counts as hung."""
GOODBYE_SECONDS = 5.0
"""Seconds after which a rank that was asked to exit is killed."""


def on_device(config: Config, devices: Sequence[torch.device], rank: int) -> Config:
    """Return the configuration of one rank: its device, and on a CPU its share of the threads."""
    if len(devices) == 1 and devices[0] == probe(config.policy).device:
        return config  # whose model may lie on several devices
    policy = config.policy.model_copy(update={"devices": str(devices[rank])})
    if devices[rank].type == "cpu" and not policy.threads:
        threads = max(1, thread_count() // len(devices))
        policy = policy.model_copy(update={"threads": threads})
    return config.model_copy(update={"policy": policy})


@dataclass
class RankProcess:
    process: SpawnProcess
    connection: Connection
    device: str
    owed: int = 1
    """Number of final answers still to be received; the first one is Ready."""


class RankPool:
    """Rank 0's handle for the other ranks.

    Args:
        devices: Devices of all ranks; the first is this process's.
        alive: Called while rank 0 waits, as long as the ranks that it waits for make progress.
        entry: Function that a rank's process runs.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[torch.device],
        alive: Callable[[], None] = lambda: None,
        entry: Callable[[Setup, Connection, Shared], None] = run_rank,
    ) -> None:
        self.count = len(devices)
        self.others = range(1, self.count)
        self._devices = devices
        self._alive = alive
        self.silence_seconds = SILENCE_SECONDS
        """Seconds without progress after which a working rank counts as hung."""
        self._startup = STARTUP_SECONDS
        self._folder = tempfile.TemporaryDirectory(prefix="swarmnode-ranks-")
        self._store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("spawn")
        self._shared = Shared.make(context, self.count)
        self._ranks = {rank: self._start(context, rank, config, entry) for rank in self.others}
        self.advanced: Callable[[int, Advanced], None] = lambda rank, answer: None
        """Called with each rank's sampled answers, also while rank 0 waits for another answer."""
        self._joined = False
        self._stale = True
        """True if the other ranks' weights differ from rank 0's."""
        self.cards: dict[int, list[CardUse]] = {}
        """GPU use by rank, as last reported."""
        self._rank_0: tuple[Policy, Updater] | None = None

    def _start(
        self,
        context: SpawnContext,
        rank: int,
        config: Config,
        entry: Callable[[Setup, Connection, Shared], None],
    ) -> RankProcess:
        here, there = context.Pipe()
        text = on_device(config, self._devices, rank).model_dump_json()
        device = str(self._devices[rank])
        setup = Setup(text, rank, self.count, self._store)
        process = context.Process(
            target=entry, args=(setup, there, self._shared), name=f"rank {rank}", daemon=True
        )
        self._shared.beat(rank)
        process.start()
        there.close()
        return RankProcess(process, here, device)

    @property
    def _attached(self) -> tuple[Policy, Updater]:
        assert self._rank_0 is not None
        return self._rank_0

    @property
    def devices_text(self) -> str:
        """Device names for reports: "cuda:0, cuda:1", or "2 × cpu"."""
        names = [str(device) for device in self._devices]
        return f"{len(names)} × {names[0]}" if len(set(names)) == 1 else ", ".join(names)

    def attach(self, policy: Policy, updater: Updater) -> None:
        """Wait until every rank has loaded its policy, and enter the process group with them.

        Args:
            policy, updater: Rank 0's policy and updater from now on.
        """
        self._rank_0 = policy, updater
        self._stale = True
        if self._joined:
            return
        for rank, ready in self.answers(Ready).items():
            if ready.fingerprint != policy.fingerprint:
                raise RankLost(f"rank {rank} ({ready.device}) has loaded other weights")
            if ready.dtype != str(policy.dtype):
                raise DeviceError(
                    f"rank {rank} ({ready.device}) computes in {ready.dtype}, rank 0"
                    f" ({policy.device}) in {policy.dtype}: set policy.dtype to float32"
                )
        for rank in self.others:
            self.tell(rank, Join())
        with self._lost_if_failed():
            join(policy.device, self._store, 0, self.count)
        self._joined = True
        self.answers(Done)
        self.broadcast_weights()
        log.info("ranks", count=self.count, devices=self.devices_text)

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(encoded(Quit()))
        late = time.monotonic() + GOODBYE_SECONDS
        for rank in self._ranks.values():
            rank.process.join(max(0.0, late - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.connection.close()
        if self._joined:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
            self._joined = False
        self._folder.cleanup()

    # ---- messages ----

    def tell(self, rank: int, command: Command) -> None:
        """Send a command to a rank. Raises RankLost."""
        try:
            self._ranks[rank].connection.send_bytes(encoded(command))
        except OSError:
            raise self._lost(rank) from None
        self._ranks[rank].owed += 1
        self._shared.beat(rank)

    def is_busy(self, rank: int) -> bool:
        return self._ranks[rank].owed > 0

    def poll(self, seconds: float) -> dict[int, AnyAnswer]:
        """Return the answers that arrive within `seconds`, by rank.

        Raises:
            RankLost: A rank's process has ended or hangs.
            Exception: The error that a command raised on a rank.
        """
        busy = {each.connection: rank for rank, each in self._ranks.items() if each.owed}
        found: dict[int, AnyAnswer] = {}
        for connection in wait(list(busy), seconds):
            assert isinstance(connection, Connection)
            rank = busy[connection]
            try:
                answer = ANSWERS.decode(connection.recv_bytes())
            except (EOFError, OSError):
                raise self._lost(rank) from None
            self._shared.beat(rank)  # it may have been blocked until this read
            if isinstance(answer, Ready | Accumulated):
                self.cards[rank] = answer.cards
            self._ranks[rank].owed -= not isinstance(answer, Advanced) or answer.last
            found[rank] = answer
            if isinstance(answer, Advanced):
                self.advanced(rank, answer)
        failures = [(rank, each) for rank, each in found.items() if isinstance(each, Failed)]
        for _, failed in failures:
            self._take_bounds(failed)
        for rank, failed in failures:
            raise failed.raised(rank)
        self._watch()
        return found

    def answers(self, kind: type[A]) -> dict[int, A]:
        """Wait without a deadline for every rank's final answer.

        Raises:
            RankLost: A rank's process has ended or hangs.
            Exception: The first error that a command raised, after all ranks have finished.
        """
        found: dict[int, A] = {}
        failure: Exception | None = None
        while any(each.owed for each in self._ranks.values()):
            try:
                for rank, answer in self.poll(POLL_SECONDS).items():
                    if isinstance(answer, kind):
                        found[rank] = answer
            except RankLost:
                raise
            except Exception as error:  # noqa: BLE001
                failure = failure or error
        if failure is not None:
            raise failure
        return found

    def halt(self) -> None:
        """Stop sampling on every rank, and wait until all have stopped."""
        for rank in self.others:
            if self.is_busy(rank):
                self.tell(rank, Halt())
        self.answers(Done)

    @contextmanager
    def working(self) -> Iterator[RankPool]:
        """Synchronise weights, then let the caller send work to the ranks.

        If the block raises, wait for the ranks' current work and drop its results.
        """
        self.broadcast_weights()
        self.halt()
        try:
            yield self
        except RankLost:
            raise
        except BaseException:
            self._shared.stop_taking()
            with contextlib.suppress(Exception):
                self.answers(Done)
            raise

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide row indices among ranks so that the work is about equal; each rank's rows are
        adjacent."""
        shares: list[list[int]] = [[] for _ in range(self.count)]
        total, before = sum(lengths), 0
        for index, length in enumerate(lengths):
            shares[min(self.count - 1, self.count * before // max(total, 1))].append(index)
            before += length
        return shares

    # ---- weights and gradients ----

    def weights_moved(self) -> None:
        self._stale = True

    def broadcast_weights(self) -> None:
        """Broadcast rank 0's weights if the other ranks' may differ."""
        if not self._stale:
            return
        policy, _ = self._attached
        self.halt()
        for rank in self.others:
            self.tell(rank, TakeWeights())
        parameters = [p.detach() for p in policy.trainable_parameters()]
        in_buckets(parameters, lambda flat: dist.broadcast(flat, 0, async_op=True), self._finish)
        self.answers(Done)
        self._stale = False

    @contextmanager
    def accumulating(self, rows: Rows, selection: RowSelection) -> Iterator[MicroBatchQueue]:
        policy, updater = self._attached
        scaler = policy.accelerator.scaler
        command = Accumulate(
            rows,
            selection.own,
            [] if selection.one_by_one else selection.external,
            sorted(selection.recomputed),
            dict(selection.refused),
            [batcher.tokens for batcher in updater.batchers],
            None if scaler is None else scaler.state_dict(),
        )
        with self.working():
            self._shared.start_taking()
            for rank in self.others:
                self.tell(rank, command)
            others = lambda: [each.sums for each in self.answers(Accumulated).values()]
            yield MicroBatchQueue(self._shared, self.count, others)

    def add_gradients(self) -> None:
        for rank in self.others:
            self.tell(rank, AddGradients())
        add_gradients(self._attached[0], self._finish)
        self.answers(Done)

    def _take_bounds(self, failed: Failed) -> None:
        """Lower the micro-batch bounds of all ranks to those of the GPU with the least memory."""
        if failed.kind == "start over":
            for batcher, tokens in zip(self._attached[1].batchers, failed.tokens, strict=True):
                if tokens < batcher.tokens:
                    batcher.ran_out(2 * tokens)

    # ---- failures ----

    def _watch(self) -> None:
        """Report progress while all ranks with pending commands make progress. Raises RankLost."""
        now = time.monotonic()
        most = self.silence_seconds if self._joined else self._startup
        for rank, each in self._ranks.items():
            if not each.process.is_alive():
                raise self._lost(rank)
            if each.owed and now - self._shared.last_beat(rank) > most:
                raise RankLost(
                    f"rank {rank} ({each.device}) has made no progress for {most:.0f} seconds"
                )
        self._alive()

    def _lost(self, rank: int) -> RankLost:
        each = self._ranks[rank]
        each.process.join(GOODBYE_SECONDS)
        code = each.process.exitcode
        how = (
            "has closed its pipe"
            if code is None
            else f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return RankLost(f"rank {rank} ({each.device}) {how}")

    @contextmanager
    def _lost_if_failed(self) -> Iterator[None]:
        """Convert torch's errors in the block to RankLost if a rank has ended."""
        try:
            yield
        except RuntimeError as error:
            # The kernel closes a killed process's connections and its sentinel before waitpid
            # sees its end: is_alive() may still be true here, so the sentinels decide.
            sentinels = {each.process.sentinel: rank for rank, each in self._ranks.items()}
            for ended in wait(list(sentinels), GOODBYE_SECONDS):
                assert isinstance(ended, int)
                raise self._lost(sentinels[ended]) from error
            raise RankLost(f"the ranks cannot reach each other: {reason(error)}") from error

    def _finish(self, work: dist.Work) -> None:
        """Wait for a collective. Raises RankLost."""
        with self._lost_if_failed():
            finish(work, self._watch)
