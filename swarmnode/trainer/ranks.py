"""Data parallelism on one machine: one process per device, each with a copy of the policy.

    rank 0          the trainer: runs the loop; only it has optimizer, averaging and saved state
    ranks 1, 2, …   child processes: sample, score and accumulate gradients on rank 0's command

    questions       go to the rank that will be free first, by its measured tokens per second
    micro-batches   go to the next free rank: all ranks cut a step alike and share one counter
    gradients       are summed on rank 0, which clips them and takes the optimizer step
    weights         are broadcast by rank 0 after a step, an average or a restored state

Commands and answers are messages in a pipe, so that a rank may wait for hours, for example during
quiet hours. Only tensors use torch.distributed: NCCL between GPUs, gloo on CPUs, both on the
loopback interface. Rank 0 detects a rank that has ended or hangs in every wait, and raises
RankLost: the trainer then saves its state and exits, and the supervisor restarts it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoConfig

from swarmnode.config import Config
from swarmnode.errors import DeviceError
from swarmnode.policy.device import cards, devices, probe, training_devices, update_bytes
from swarmnode.policy.engine.protocol import (
    FinishedRequest,
    Generation,
    GenerationStatistics,
    Request,
)
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy, config_directory, offline
from swarmnode.policy.logprobs import Row
from swarmnode.policy.ways import reason
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import RowScores
from swarmnode.trainer.engine import EngineStatistics, WholePolicy
from swarmnode.trainer.rank_pool import RankPool
from swarmnode.trainer.rank_process import (
    POLL_SECONDS,
    Advance,
    Advanced,
    Done,
    Generate,
    Samples,
    Score,
    Scores,
    StartGeneration,
)
from swarmnode.trainer.state import Counters
from swarmnode.trainer.update import UpdateStatistics

T = TypeVar("T")


def choose_devices(config: Config, log: Callable[[str], None]) -> list[torch.device]:
    """Return one device per rank, and log each excluded GPU. Raises LocalError."""
    cfg = config.policy
    found = devices(cfg)
    if len(found) < 2 or found[0].type != "cuda":
        return found
    with config_directory(cfg, log) as directory:
        read = lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        need = update_bytes(cfg, offline(cfg, read), probe(cfg))
    # query in a separate process, because querying a GPU's memory allocates some of it
    child = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        here = child.submit(cards).result(QUERY_SECONDS)
    except Exception as error:
        raise DeviceError(f"cannot query the memory of the GPUs: {reason(error)}") from error
    finally:
        child.shutdown(wait=False, cancel_futures=True)
    found, left_out = training_devices(cfg, found, here, need)
    for line in left_out:
        log(f"not used: {line}")
    return found


QUERY_SECONDS = 120.0
"""Deadline of the process that queries the memory of all GPUs."""


@contextmanager
def other_ranks(
    config: Config, devices: Sequence[torch.device], alive: Callable[[], None]
) -> Iterator[Callable[..., WholePolicy] | None]:
    """Run a rank process on each device except the first.

    Yields:
        A function that makes a policy on all ranks; None for a single device.
    """
    if len(devices) == 1:
        yield None
        return
    pool = RankPool(config, devices, alive)
    try:
        yield functools.partial(DataParallelPolicy, pool)
    finally:
        pool.close()


class DataParallelPolicy(WholePolicy):
    """A whole policy on several devices. Rank 0 is this process; `pool` manages the others."""

    def __init__(self, pool: RankPool, *whole: object) -> None:
        """Create the policy from rank 0's pool and the arguments `whole` of `WholePolicy`."""
        super().__init__(*whole)  # type: ignore[arg-type]
        self._pool = pool
        self._questions: SharedGeneration | None = None
        pool.attach(self._policy, self._updater)
        self._updater.ranks = pool

    def statistics(self) -> EngineStatistics:
        own = super().statistics()
        cards = [*own.cards, *(card for some in self._pool.cards.values() for card in some)]
        return replace(own, device=self._pool.devices_text, cards=cards)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        if self._server is not None:
            return super().generate(prompts, sampling, rng)
        shares = self._pool.split([len(prompt) for prompt in prompts])
        with self._pool.working() as pool:
            for rank, some in enumerate(shares[1:], 1):
                if some:
                    chosen = [
                        p if isinstance(p, str) else list(p) for p in map(prompts.__getitem__, some)
                    ]
                    pool.tell(rank, Generate(chosen, sampling, drawn_seed(rng)))
            own = super().generate([prompts[i] for i in shares[0]], sampling, rng)
            answers = pool.answers(Samples)
        return merged(shares, {0: own, **{rank: each.groups for rank, each in answers.items()}})

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        own = super().generation(sampling, rng)
        if self._server is not None:  # the server samples for all ranks; rank 0 is its fallback
            return own
        self._questions = SharedGeneration(own, self._pool, self._policy, sampling, rng)
        return self._questions

    def _weights_move(self) -> contextlib.AbstractContextManager[None]:
        questions = self._questions
        return questions.pause() if questions is not None else super()._weights_move()

    def score(self, rows: Sequence[Row], temperature: float) -> list[RowScores]:
        shares = self._pool.split([len(row.prompt) + len(row.completion) for row in rows])
        with self._pool.working() as pool:
            for rank, some in enumerate(shares[1:], 1):
                if some:
                    pool.tell(rank, Score([rows[i] for i in some], temperature))
            own = super().score([rows[i] for i in shares[0]], temperature)
            answers = pool.answers(Scores)
        return merged(shares, {0: own, **{rank: each.values for rank, each in answers.items()}})

    def update(self, rows: Rows) -> UpdateStatistics:
        try:
            return super().update(rows)
        finally:
            self._pool.weights_moved()

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        try:
            return super().average(connected, step_seconds, stepped)
        finally:
            self._pool.weights_moved()

    def restore(self, directory: Path, rng: torch.Generator) -> Counters | None:
        try:
            return super().restore(directory, rng)
        finally:
            self._pool.weights_moved()


def merged(shares: Sequence[Sequence[int]], parts: Mapping[int, Sequence[T]]) -> list[T]:
    """Merge the results of all ranks into the order before the split."""
    found = {
        index: one
        for rank, some in enumerate(shares)
        for index, one in zip(some, parts.get(rank, []), strict=True)
    }
    return [found[index] for index in sorted(found)]


def drawn_seed(rng: torch.Generator) -> int:
    """Draw a seed for another rank's generator, reproducible from the saved state of `rng`."""
    return int(torch.randint(2**62, (1,), generator=rng, device=rng.device))


class SharedGeneration:
    """Sampling on all ranks, each with its own engine. `own` is rank 0's engine."""

    def __init__(
        self,
        own: Generation,
        pool: RankPool,
        policy: Policy,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> None:
        self._own = own
        self._pool = pool
        self._policy = policy
        self._done: list[FinishedRequest] = []
        """Finished requests of other ranks that are not yet returned to the caller."""
        self._asked: dict[int, int] = {}
        """Rank by active request."""
        self._kept: dict[int, int] = {}
        """Rank by finished request that another request will follow: its engine keeps the row."""
        self._new: dict[int, list[Request]] = {rank: [] for rank in pool.others}
        self._cancelled: dict[int, list[int]] = {rank: [] for rank in pool.others}
        self._statistics = {rank: GenerationStatistics(0) for rank in pool.others}
        self._seconds = dict.fromkeys(range(pool.count), 0.0)
        """Seconds spent on sampling, by rank."""
        self._tokens = dict.fromkeys(range(pool.count), 0)
        """Number of tokens of finished answers, by rank."""
        pool.advanced = self._advanced
        with pool.working():
            for rank in pool.others:
                pool.tell(rank, StartGeneration(sampling, drawn_seed(rng)))
            pool.answers(Done)

    def submit(self, request: Request) -> None:
        rank = self._kept.get(request.follows) if request.follows is not None else None
        if rank is None:
            rank = min(range(self._pool.count), key=self._free_at)
        if request.continues:
            self._kept[request.number] = rank
        if rank == 0:
            self._own.submit(request)
        else:
            self._policy.room(self._policy.prompt_ids(request.prompt), 1)
            self._new[rank].append(request)
        self._asked[request.number] = rank

    def _free_at(self, rank: int) -> float:
        """Return the time until a rank would finish one more question, for comparing ranks.

        It is in seconds once the speed of every rank is known, and before that the number of
        questions of the rank.
        """
        load = 1 + sum(busy == rank for busy in self._asked.values())
        if min(self._tokens.values()) == 0:
            return load
        return load * self._seconds[rank] / self._tokens[rank]

    def cancel(self, number: int) -> None:
        kept = self._kept.pop(number, 0)
        rank = self._asked.pop(number, kept)
        self._done = [one for one in self._done if one.number != number]
        if rank == 0:
            self._own.cancel(number)
            return
        self._new[rank] = [one for one in self._new[rank] if one.number != number]
        self._cancelled[rank].append(number)

    def finished(self, version: int) -> list[FinishedRequest]:
        self._pool.broadcast_weights()
        busy = set(self._asked.values())
        for rank in self._pool.others:
            # a busy rank finishes its current work and continues with the new requests
            idle = not self._pool.is_busy(rank)
            if self._new[rank] or self._cancelled[rank] or (idle and rank in busy):
                command = Advance(version, self._new[rank], self._cancelled[rank])
                self._pool.tell(rank, command)
                self._new[rank], self._cancelled[rank] = [], []
        done = []
        if 0 in busy:
            started = time.monotonic()
            done = self._own.finished(version)
            self._seconds[0] += time.monotonic() - started
        self._pool.poll(0.0 if done or 0 in busy or self._done else POLL_SECONDS)
        done += self._done
        self._done = []
        for one in done:
            rank = self._asked.pop(one.number, 0)
            self._tokens[rank] += sum(len(each.ids) for each in one.sample.completions)
        return done

    def _advanced(self, rank: int, answer: Advanced) -> None:
        known = self._asked
        self._done += [one for one in answer.done if known.get(one.number) == rank]
        self._statistics[rank] = answer.statistics
        self._seconds[rank] = answer.seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        self._pool.halt()
        with self._own.pause():
            yield

    def ahead(self, count: int) -> int:
        return self._own.ahead(count)

    def statistics(self) -> GenerationStatistics:
        all_ = [self._own.statistics(), *self._statistics.values()]
        versions = [each.oldest for each in all_ if each.oldest is not None]
        return GenerationStatistics(len(self._asked), min(versions, default=None))
