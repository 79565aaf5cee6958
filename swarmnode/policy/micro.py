"""Micro-batches bounded by padded tokens. The bound is halved when memory runs out, and raised
again after many successful passes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from swarmnode.errors import DeviceError
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, score_with_entropy

T = TypeVar("T")


def micro_batches(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Split rows into batches of at most `max_tokens` padded tokens (rows × longest row), with rows
    of similar length together.

    Rows of one group (equal value in `groups`) stay together if a batch can hold the group. A row
    longer than `max_tokens` is a batch of its own.

    Returns:
        Row indices of each batch. Every index occurs exactly once.
    """
    members: dict[int, list[int]] = {}
    for row in range(len(lengths)):
        members.setdefault(groups[row] if groups is not None else row, []).append(row)
    ordered = sorted(members.values(), key=lambda rows: max(lengths[r] for r in rows))
    batches: list[list[int]] = []
    longest = 0
    for rows in ordered:
        rows = sorted(rows, key=lambda r: lengths[r])
        width = lengths[rows[-1]]
        if batches and (len(batches[-1]) + len(rows)) * max(longest, width) <= max_tokens:
            batches[-1] += rows
            longest = max(longest, width)
        elif len(rows) * width <= max_tokens:
            batches.append(list(rows))
            longest = width
        else:  # the group does not fit into one batch
            for row in rows:
                if (
                    batches
                    and batches[-1][0] in rows
                    and (len(batches[-1]) + 1) * lengths[row] <= max_tokens
                ):
                    batches[-1].append(row)
                else:
                    batches.append([row])
                longest = lengths[row]
    return batches


def is_oom(error: BaseException) -> bool:
    """Return True if `error` means that memory ran out, on any device. Backends other than CUDA
    raise plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in text for s in NO_MEMORY)


def free_memory() -> None:
    """Return unreferenced memory to the device. Call it outside of the `except` block that caught
    the error, since the error's frames refer to tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",
)
"""Parts of backends' error messages when memory runs out. The last one is of cuBLAS and cuDNN,
which allocate a workspace at the first call on a device or stream."""


CALM_PASSES = 200
"""Number of successful passes near the bound after which it is raised."""


class RowTooLarge(DeviceError):
    """Raised if a single row (in `generate`: a single question) does not fit. `row` is its
    index."""

    def __init__(self, row: int, tokens: int) -> None:
        super().__init__(
            f"out of memory with {tokens} tokens, and a micro-batch cannot be smaller: set"
            " training.max_completion_length lower, train an adapter (policy.lora.r = 16), or use"
            " a recipe for a smaller GPU; `swarmnode plan` shows what fits"
        )
        self.row = row
        self.tokens = tokens


@dataclass(frozen=True)
class MicroBatchStatistics:
    tokens: int
    """Present bound of a micro-batch, padded tokens."""
    oom_retries: int


class MicroBatcher:
    """Runs passes in micro-batches of at most `tokens` padded tokens, and halves the bound when
    memory runs out.

    Another program may have caused the shortage. Therefore the bound is raised by a quarter after
    CALM_PASSES passes near it, up to `most`.

    Args:
        most: Largest bound, in padded tokens.
        alive: Called after every micro-batch.
        first: Initial bound, if the memory of other nodes is unknown (slow start). It doubles after
            each pass near it until memory runs out for the first time.
    """

    def __init__(
        self, most: int, alive: Callable[[], None] = lambda: None, first: int | None = None
    ) -> None:
        self.tokens = most if first is None else min(first, most)
        self.alive = alive
        self._most = most
        self._doubles = first is not None
        self._longest: int | None = None
        """Length of the longest row that may fit; None while every single row has fit."""
        self._retries = 0
        self._calm = 0

    def statistics(self) -> MicroBatchStatistics:
        return MicroBatchStatistics(self.tokens, self._retries)

    def run(
        self,
        lengths: Sequence[int],
        work: Callable[[list[int]], T],
        groups: Sequence[int] | None = None,
    ) -> list[tuple[list[int], T]]:
        """Run `work` on all micro-batches; return (row indices, result) of each.

        If memory runs out, the failed micro-batch is repeated in smaller pieces.

        Raises:
            RowTooLarge: A single row does not fit into memory.
        """
        self._check(lengths)
        waiting = micro_batches(lengths, self.tokens, groups)
        largest = max((_padded(rows, lengths) for rows in waiting), default=0)
        done: list[tuple[list[int], T]] = []
        while waiting:
            try:
                done.append((waiting[0], self._attempt(waiting[0], lengths, work)))
                waiting.pop(0)
            except MemoryError:
                left = sorted(row for batch in waiting for row in batch)
                some = None if groups is None else [groups[row] for row in left]
                waiting = [
                    [left[i] for i in batch]
                    for batch in micro_batches([lengths[row] for row in left], self.tokens, some)
                ]
                largest = 0
        self.passed(largest)
        return done

    def run_once(
        self,
        lengths: Sequence[int],
        work: Callable[[list[int]], T],
        groups: Sequence[int] | None = None,
        most: int | None = None,
        take: Callable[[list[list[int]]], Iterable[list[int]]] = iter,
    ) -> list[T]:
        """Run `work` on micro-batches without repeating any, because a failed backward pass has
        added some gradients. Return the results.

        Args:
            most: Largest number of padded tokens in a micro-batch, if the bound is higher.
            take: Receives all micro-batches and yields those that this rank runs.

        Raises:
            MemoryError: Memory ran out; the bound has been halved.
            RowTooLarge: A single row does not fit into memory.
        """
        self._check(lengths)
        batches = micro_batches(lengths, min(self.tokens, most or self.tokens), groups)
        done = [self._attempt(rows, lengths, work) for rows in take(batches)]
        self.passed(max((_padded(rows, lengths) for rows in batches), default=0))
        return done

    def _check(self, lengths: Sequence[int]) -> None:
        """Raise RowTooLarge for a row that is known not to fit."""
        for row, length in enumerate(lengths):
            if self._longest is not None and length > self._longest:
                raise RowTooLarge(row, length)

    def _attempt(
        self, rows: list[int], lengths: Sequence[int], work: Callable[[list[int]], T]
    ) -> T:
        """Run `work` on one micro-batch. Raises MemoryError and RowTooLarge, as `run_once`."""
        try:
            result = work(rows)
        except Exception as error:
            if not is_oom(error):
                raise
            if len(rows) == 1:
                self._longest = lengths[rows[0]] - 1
                raise RowTooLarge(rows[0], lengths[rows[0]]) from error
        else:
            self.alive()
            return result
        # Outside of the handler, because the exception's frames refer to tensors.
        failed = _padded(rows, lengths)
        self.ran_out(failed)
        raise MemoryError(f"out of memory with {failed} tokens")

    def generate(
        self,
        policy: Policy,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> list[GroupSample]:
        """Run `generate.generate` in micro-batches of whole questions; return one group per
        prompt, in order."""
        longest = (
            max((len(policy.prompt_ids(prompt)) for prompt in prompts), default=0)
            + sampling.max_tokens
        )
        out: list[GroupSample | None] = [None] * len(prompts)
        work = lambda rows: generate(
            policy, [prompts[r] for r in rows], sampling, generator, self.alive
        )
        for rows, groups in self.run([sampling.num_generations * longest] * len(prompts), work):
            for row, group in zip(rows, groups, strict=True):
                out[row] = group
        return [g for g in out if g is not None]

    def score_with_entropy(
        self, policy: Policy, rows: Sequence[Row], temperature: float
    ) -> list[tuple[list[float], list[float]]]:
        """Run `logprobs.score_with_entropy` in micro-batches."""
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        work = lambda indices: score_with_entropy(policy, [rows[i] for i in indices], temperature)
        for indices, values in self.run([len(p) + len(c) for p, c, *_ in rows], work):
            for index, value in zip(indices, values, strict=True):
                out[index] = value
        return out

    def score(self, policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
        """Run `logprobs.score` in micro-batches."""
        return [chosen for chosen, _ in self.score_with_entropy(policy, rows, temperature)]

    def cut(
        self, lengths: Sequence[int], groups: Sequence[int] | None = None, tokens: int | None = None
    ) -> int:
        """Return the padded tokens of the largest micro-batch of rows with these lengths.

        Args:
            tokens: Bound of a micro-batch; None means the present one.
        """
        return max(
            (
                _padded(rows, lengths)
                for rows in micro_batches(lengths, tokens or self.tokens, groups)
            ),
            default=0,
        )

    def ran_out(self, failed: int) -> None:
        """Process a shortage of memory in a micro-batch of `failed` padded tokens."""
        self.shrink(failed)
        self._retries += 1
        free_memory()

    def shrink(self, failed: int) -> None:
        """Set the bound to half of `min(bound, failed)`: the bound may be far above every
        micro-batch so far.

        Args:
            failed: Padded tokens of the micro-batch that ran out of memory.
        """
        self.tokens = max(min(self.tokens, failed) // 2, 1)
        self._calm, self._doubles = 0, False

    def passed(self, largest: int) -> None:
        """Process a successful pass.

        Args:
            largest: Padded tokens of its largest micro-batch.
        """
        if self._longest is None and self.tokens >= self._most:
            return
        if self._doubles:
            self.tokens = min(
                self._most, 2 * self.tokens if 2 * largest > self.tokens else self.tokens
            )
            return
        self._calm += 1 if self._longest is not None or 2 * largest > self.tokens else 0
        if self._calm >= CALM_PASSES:
            self._calm = 0
            self.tokens = min(self._most, self.tokens + max(1, self.tokens // 4))
            self._longest = (
                None
                if self._longest is None or self._longest >= self._most
                else self._longest + max(1, self._longest // 4)
            )


def _padded(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return len(rows) * max(lengths[r] for r in rows)
