"""Engine with continuous batching: a finished completion frees its row at once.

Each step samples one token for every active row, removes the rows that have ended, and runs the
model on the remaining rows. A prompt is prefilled once for all completions of its request, and
prompts that start together are prefilled in one pass. The weights may change between two calls:
active rows keep their keys and values. Each token is recorded with its log-probability at sampling
and the policy version of that moment, so the denominator of the importance ratio is exact
(PipelineRL, arXiv 2509.19128 §3, keeps the cache as well).

The keys and values of an episode's row are kept while the environment answers (`KeptRow`), so that
the next turn prefills only its new tokens.

docs/learning.md explains why this is not transformers' continuous batching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling, sample
from swarmnode.policy.load import Policy
from swarmnode.policy.micro import MicroBatcher, RowTooLarge, is_oom
from swarmnode.policy.slots import PrefilledRow, Slots, prefill

BURST = 16
"""Maximum number of decoding steps in one call if no row ends. Weights are cast to the compute
dtype once per call."""
WHOLE_BURST = {"cuda": 64}
"""Number of decoding steps of one call with CUDA graphs, even if rows end before. Recording the
graph again costs as much as two launched steps or ten replayed steps."""
AHEAD = 1
"""Number of additional requests per request of a step. They use the rows that would otherwise wait
for the longest completion of a group. Training data is older by as many updates."""


@dataclass
class ActiveRow:
    """An unfinished completion."""

    request: int
    place: int
    """Index among the completions of its request."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class ActiveGroup:
    """An unfinished request."""

    prompt_ids: list[int]
    most: int
    """Largest number of tokens in a completion."""
    generations: int
    continues: bool = False
    known: PrefilledRow | None = None
    """Keys and values of the prompt's first tokens, if the request follows another one."""
    done: dict[int, SampledCompletion] = field(default_factory=dict)
    """Finished completions by their index."""
    since: int | None = None
    """Policy version of its first token."""


@dataclass(frozen=True)
class KeptRow:
    """A finished row whose keys and values are kept for the request that will follow it."""

    ids: list[int]
    """All tokens of the row except the last, which the model has not processed."""
    known: PrefilledRow


class Continuous:
    """Engine with continuous batching.

    Args:
        batcher: Bounds active rows × longest possible length, and lowers the bound when memory runs
            out.
    """

    kind: Final = "continuous"

    def __init__(
        self, policy: Policy, batcher: MicroBatcher, sampling: Sampling, rng: torch.Generator
    ) -> None:
        self._policy = policy
        self._batcher = batcher
        self._sampling = sampling
        self._rng = rng
        self._groups: dict[int, ActiveGroup] = {}
        self._waiting: deque[ActiveRow] = deque()
        self._heads: dict[int, PrefilledRow] = {}
        """Prefilled prompts by request, for waiting rows."""
        self._active: list[ActiveRow] = []
        """Active rows by slot."""
        self._kept: dict[int, list[KeptRow]] = {}
        """Kept rows by request, oldest first."""
        self._slots = Slots(policy)
        self._logits = torch.zeros(0)
        """(n, V) logits of the next token of every active row."""

    def submit(self, request: Request) -> None:
        prompt_ids = self._policy.prompt_ids(request.prompt)
        most = self._policy.room(prompt_ids, self._sampling.max_tokens)
        count = request.generations or self._sampling.num_generations
        known = self._take_kept(request.follows, prompt_ids)
        self._groups[request.number] = ActiveGroup(
            prompt_ids, most, count, request.continues, known
        )
        rows = [ActiveRow(request.number, place) for place in range(count)]
        if request.follows is None:
            self._waiting.extend(rows)
        else:  # started episodes continue before others start
            self._waiting.extendleft(reversed(rows))

    def cancel(self, number: int) -> None:
        self._kept.pop(number, None)
        self._heads.pop(number, None)
        self._waiting = deque(row for row in self._waiting if row.request != number)
        if self._groups.pop(number, None) is not None:
            self._remove([slot for slot, row in enumerate(self._active) if row.request == number])

    @torch.no_grad()
    def finished(self, version: int) -> list[FinishedRequest]:
        """Decode until a request is finished, for at most one burst of steps.

        On CUDA, always decode the whole burst.

        Raises:
            DeviceError: A single row does not fit into memory.
        """
        done: list[FinishedRequest] = []
        whole = WHOLE_BURST.get(self._policy.device.type)
        try:
            with self._policy.accelerator.autocast():
                for _ in range(whole or BURST):
                    if (done and not whole) or not (self._active or self._waiting):
                        break
                    self._admit()
                    done += self._step(version) if self._active else []
                    self._batcher.alive()
        finally:
            self._slots.forget_weights()
        if not self._groups:
            # Free the memory for training.
            self._slots, self._logits = Slots(self._policy), torch.zeros(0)
        return done

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Allow weights to change inside the block. Active rows keep their cache; later prompts are
        prefilled with the new weights."""
        try:
            yield
        finally:
            self._heads.clear()

    def ahead(self, count: int) -> int:
        return AHEAD * count

    def statistics(self) -> GenerationStatistics:
        versions = [group.since for group in self._groups.values() if group.since is not None]
        return GenerationStatistics(len(self._groups), min(versions, default=None))

    # ---- one step --------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting rows until no further row fits."""
        longest = (
            max(len(group.prompt_ids) for group in self._groups.values())
            + self._sampling.max_tokens
        )
        room = max(1, self._batcher.tokens // longest) - len(self._active)
        rows = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not rows:
            return
        self._active += rows
        self._in_memory(lambda: self._begin(rows))
        wanted = {row.request for row in self._waiting}
        self._heads = {number: head for number, head in self._heads.items() if number in wanted}

    def _begin(self, rows: list[ActiveRow]) -> None:
        heads = self._prefilled(rows)
        for head in heads:
            self._slots.add(head)
        logits = torch.stack([head.logits for head in heads])
        self._logits = torch.cat([self._logits, logits]) if len(self._logits) else logits

    def _prefilled(self, rows: list[ActiveRow]) -> list[PrefilledRow]:
        """Prefill rows and return their keys and values.

        A prompt is prefilled once for all rows of its request. An interrupted row is prefilled with
        the tokens sampled so far. A prompt that follows another request is prefilled without its
        known tokens.
        """
        wanted: dict[tuple[int, int | None], list[int]] = {}
        key_of: Callable[[ActiveRow], tuple[int, int | None]] = lambda row: (
            row.request,
            row.place if row.ids else None,
        )
        for row in rows:
            if row.ids or row.request not in self._heads:
                wanted.setdefault(key_of(row), self._groups[row.request].prompt_ids + row.ids)
        keys, sequences = list(wanted), list(wanted.values())
        made: dict[tuple[int, int | None], PrefilledRow] = {}
        known = [self._groups[request].known for request, _ in keys]
        for follows in (False, True):
            alike = [i for i in range(len(keys)) if (known[i] is not None) == follows]
            work = lambda some, alike=alike: prefill(
                self._policy,
                [sequences[alike[i]] for i in some],
                [each for i in some if (each := known[alike[i]]) is not None],
            )
            for chosen, heads in self._batcher.run([len(sequences[i]) for i in alike], work):
                made |= zip((keys[alike[i]] for i in chosen), heads, strict=True)
        for request, _ in keys:
            self._groups[request].known = None
        self._heads |= {number: head for (number, place), head in made.items() if place is None}
        return [made[key_of(row)] if row.ids else self._heads[row.request] for row in rows]

    def _step(self, version: int) -> list[FinishedRequest]:
        """Sample one token for every active row; return the requests that have finished."""
        sampling = self._sampling
        drawn, chances = sample(self._logits, sampling.temperature, sampling.top_p, self._rng)
        tokens, logprobs = drawn.tolist(), chances.tolist()
        ended: list[int] = []
        for slot, (row, token, logprob) in enumerate(
            zip(self._active, tokens, logprobs, strict=True)
        ):
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            group = self._groups[row.request]
            group.since = version if group.since is None else group.since
            if token in self._policy.eos_ids or len(row.ids) == group.most:
                ended.append(slot)
        for slot in ended:
            self._keep(slot)
        done = [self._end(self._active[slot]) for slot in ended]
        self._remove(ended)
        if self._active:
            self._in_memory(self._advance)
        return [finished for finished in done if finished is not None]

    def _end(self, row: ActiveRow) -> FinishedRequest | None:
        """End a row; return its request if it was the last row of it."""
        group = self._groups[row.request]
        finish: Literal["eos", "length"] = (
            "eos" if row.ids[-1] in self._policy.eos_ids else "length"
        )
        group.done[row.place] = SampledCompletion(
            row.ids, row.logprobs, self._policy.decode(row.ids), finish, row.versions
        )
        if len(group.done) < group.generations:
            return None
        del self._groups[row.request]
        return FinishedRequest(
            row.request,
            GroupSample(
                group.prompt_ids, [completion for _, completion in sorted(group.done.items())]
            ),
        )

    def _keep(self, slot: int) -> None:
        """Keep the keys and values of a row that ends, if another request will follow it.

        The number of kept tokens is at most the number that may be active; the oldest rows are
        dropped first.
        """
        row = self._active[slot]
        group = self._groups[row.request]
        if not group.continues:
            return
        kept = KeptRow(group.prompt_ids + row.ids[:-1], self._slots.copy(slot))
        self._kept.setdefault(row.request, []).append(kept)
        while sum(len(k.ids) for each in self._kept.values() for k in each) > self._batcher.tokens:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]

    def _take_kept(self, request: int | None, ids: list[int]) -> PrefilledRow | None:
        """Remove and return the kept row of `request` that is the longest prefix of `ids`.

        Several rows may match, since one completion may be a prefix of another.
        """
        rows = self._kept.get(request, []) if request is not None else []
        fitting = [kept for kept in rows if ids[: len(kept.ids)] == kept.ids]
        if not fitting:
            return None
        longest = max(fitting, key=lambda kept: len(kept.ids))
        rows[:] = [kept for kept in rows if kept is not longest]
        return longest.known

    def _remove(self, slots: list[int]) -> None:
        """Remove rows; the last row moves to each freed slot."""
        order = list(range(len(self._active)))
        for slot in sorted(slots, reverse=True):
            self._slots.remove(slot)
            self._active[slot], order[slot] = self._active[-1], order[-1]
            self._active.pop()
            order.pop()
        if slots:
            self._logits = self._logits[
                torch.tensor(order, dtype=torch.long, device=self._logits.device)
            ]

    def _advance(self) -> None:
        tokens = torch.tensor([row.ids[-1] for row in self._active], device=self._policy.device)
        self._logits = self._slots.advance(tokens)

    def _in_memory(self, work: Callable[[], None]) -> None:
        """Run `work`. If memory runs out, all active rows are queued with their tokens, and fewer
        of them continue.

        Raises:
            RowTooLarge: A single row does not fit into memory.
        """
        try:
            work()
            return
        except Exception as error:
            if not is_oom(error):
                raise
            lengths = [
                len(self._groups[row.request].prompt_ids) + len(row.ids) for row in self._active
            ]
            if len(lengths) == 1:
                raise RowTooLarge(0, lengths[0]) from error
        # Outside of the handler, because the exception's frames refer to tensors.
        self._waiting.extendleft(reversed(self._active))
        self._active, self._slots, self._logits = [], Slots(self._policy), torch.zeros(0)
        self._heads.clear()
        self._kept.clear()
        for group in self._groups.values():
            group.known = None
        self._batcher.ran_out(len(lengths) * max(lengths))
