"""Micro-batches by padded tokens, and what to do when memory runs out: halve them and start the pass again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from swarmnode.errors import DeviceError
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, score_with_entropy

T = TypeVar("T")


def micro_batches(lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Row indices in batches of at most `max_tokens` padded tokens (rows × longest row), short rows with short ones.

    Rows of one group (equal value in `groups`) stay together where a batch can hold the group. A row longer than
    `max_tokens` is a batch by itself. Every index comes exactly once.
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
        else:  # a group that no batch can hold
            for row in rows:
                if batches and batches[-1][0] in rows and (len(batches[-1]) + 1) * lengths[row] <= max_tokens:
                    batches[-1].append(row)
                else:
                    batches.append([row])
                longest = lengths[row]
    return batches


def is_oom(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on whichever device; backends other than CUDA raise plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in text for s in NO_MEMORY)


def free_memory() -> None:
    """What nobody refers to any more, back to the device. Outside the `except` that caught the failure: its frames refer to a lot."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "status_alloc_failed")
"""In what backends say; the last is cuBLAS and cuDNN, which allocate a workspace at the first call on a device or stream."""


@dataclass(frozen=True)
class MicroBatchStatistics:
    tokens: int
    """Present bound of a micro-batch, padded tokens."""
    oom_retries: int


class MicroBatcher:
    """Runs passes in micro-batches of at most `tokens` padded tokens (`per_device_train_tokens`) and halves that on out-of-memory.

    The bound stays halved: write `tokens` to disk and give it back after a restart.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._retries = 0

    def statistics(self) -> MicroBatchStatistics:
        return MicroBatchStatistics(self.tokens, self._retries)

    def run(
        self, lengths: Sequence[int], work: Callable[[list[int]], T], groups: Sequence[int] | None = None,
        restart: Callable[[], None] = lambda: None,
    ) -> list[tuple[list[int], T]]:  # fmt: skip
        """[(row indices, work(row indices))] for all micro-batches.

        On out-of-memory everything is done again after `restart()`, which has to undo what `work` left, e.g. zero the
        gradients: a backward pass that dies has added some of them already. Raises DeviceError
        when one row (of `generate`: one question) alone is too much.
        """
        while True:
            done: list[tuple[list[int], T]] = []
            batches = micro_batches(lengths, self.tokens, groups)
            try:
                for rows in batches:
                    done.append((rows, work(rows)))
                return done
            except Exception as error:
                if not is_oom(error):
                    raise
                failed = batches[len(done)]
                padded = len(failed) * max(lengths[r] for r in failed)
                if len(failed) == 1:
                    raise DeviceError(f"out of memory with {padded} tokens, and a micro-batch cannot be smaller") from error
            # Outside the handler: the exception's frames hold the tensors that have to go.
            del done
            self._shrink(padded)
            restart()

    def generate(self, policy: Policy, prompts: Sequence[str], sampling: Sampling, generator: torch.Generator) -> list[GroupSample]:
        """`generate.generate` in pieces of whole questions, in order of `prompts`."""
        longest = max((len(policy.encode_prompt(prompt)) for prompt in prompts), default=0) + sampling.max_tokens
        out: list[GroupSample | None] = [None] * len(prompts)
        work = lambda rows: generate(policy, [prompts[r] for r in rows], sampling, generator)
        for rows, groups in self.run([sampling.num_generations * longest] * len(prompts), work):
            for row, group in zip(rows, groups, strict=True):
                out[row] = group
        return [g for g in out if g is not None]

    def score_with_entropy(self, policy: Policy, rows: Sequence[Row], temperature: float) -> list[tuple[list[float], list[float]]]:
        """`logprobs.score_with_entropy` in micro-batches."""
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        work = lambda indices: score_with_entropy(policy, [rows[i] for i in indices], temperature)
        for indices, values in self.run([len(p) + len(c) for p, c in rows], work):
            for index, value in zip(indices, values, strict=True):
                out[index] = value
        return out

    def score(self, policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
        """`logprobs.score` in micro-batches."""
        return [chosen for chosen, _ in self.score_with_entropy(policy, rows, temperature)]

    def _shrink(self, failed: int) -> None:
        """Half of what failed: the bound itself may be far above any batch there was."""
        self.tokens = max(min(self.tokens, failed) // 2, 1)
        self._retries += 1
        free_memory()
