"""The decoder for any model, and the check that every decoder has to pass.

A decoder appends one token to each of its rows per step. Most models decode in `policy.slots`,
where keys and values are written in place. The decoder here has transformers' own cache, which is
copied at every step to grow by one column. It is for models with sliding windows or other caches,
and for models whose layers are on several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from transformers import DynamicCache

from swarmnode.policy.model import Policy
from swarmnode.policy.ways import mean_gap, obstacle, plain_logprobs, trial_rows


class Decoder(Protocol):
    """Rows that grow by one token per step."""

    def advance(self, tokens: torch.Tensor, /) -> torch.Tensor:
        """Append the newest token (n,) of every row; return the logits (n, V) of the next ones."""
        ...

    def keep(self, rows: Sequence[int], /) -> None:
        """Continue with the rows of these indices, in this order, and drop the other rows."""
        ...


Start = Callable[[Sequence[Sequence[int]]], tuple[Decoder, torch.Tensor]]
"""Prefills prompts; returns a decoder with a row for each, and the logits (n, V) that follow."""


@torch.no_grad()
def decoding_gap(policy: Policy, start: Start) -> float:
    """Return the mean difference in nats between log-probabilities of decoding and of the reference
    method, for two rows of different lengths. One row ends before the other."""
    rows = [trial_rows(policy)[0], trial_rows(policy)[2]]
    decoder, logits = start([row.prompt for row in rows])
    found: list[list[float]] = [[] for _ in rows]
    active = list(range(len(rows)))
    while active:
        scores = torch.log_softmax(logits.float(), -1)
        for place, i in enumerate(active):
            found[i].append(float(scores[place, rows[i].completion[len(found[i])]]))
        left = [p for p, i in enumerate(active) if len(found[i]) < len(rows[i].completion)]
        if 0 < len(left) < len(active):
            decoder.keep(left)
        active = [active[place] for place in left]
        if active:
            newest = [rows[i].completion[len(found[i]) - 1] for i in active]
            logits = decoder.advance(torch.tensor(newest, device=policy.device))
    expected = [x for row in rows for x in plain_logprobs(policy, row)]
    return mean_gap([x for each in found for x in each], expected)


def pads(policy: Policy) -> bool:
    """Return True if left-padded prompts of different lengths can share a pass. The trial runs
    once."""
    start: Start = lambda prompts: grow(policy, prompts, 1, 16)
    return not obstacle(policy, "padding", lambda: decoding_gap(policy, start))


def left_padded(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both (Q, P), of rows that end at the last column. The mask is 1 on
    tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


def reorder(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Replace row i of `cache` by row rows[i]. Every kind of cache layer supports this, each on its
    own device, unlike repeating and selecting."""
    cache.reorder_cache(cast("torch.LongTensor", rows))


def grow(
    policy: Policy, prompts: Sequence[Sequence[int]], generations: int, room: int
) -> tuple[GrowingDecoder, torch.Tensor]:
    """Prefill Q prompts in one pass.

    Args:
        generations: G, number of rows that continue each prompt.
        room: Largest number of new tokens per row.

    Returns:
        A decoder with N = Q · G rows, and the logits (N, V) of their first tokens.
    """
    # With left padding the next position of every row is the last column. Positions count tokens
    # without padding. All are (Q, P).
    ids, mask = left_padded(prompts, policy.pad_id, policy.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=policy.base.config)
    logits = policy.logits(ids, mask, positions, 1, cache)[:, -1]
    rows = torch.arange(len(prompts), device=policy.device).repeat_interleave(generations)
    reorder(cache, rows)
    return GrowingDecoder(policy, cache, mask[rows], positions[rows, -1:], room), logits[rows]


class GrowingDecoder:
    """Decoder with transformers' own cache, which grows by one column per step.

    Args:
        mask: (N, P), 1 at tokens and 0 at padding.
        position: (N, 1), position of each row's last token.
        room: Largest number of new tokens per row.
    """

    def __init__(
        self,
        policy: Policy,
        cache: DynamicCache,
        mask: torch.Tensor,
        position: torch.Tensor,
        room: int,
    ) -> None:
        self._policy, self._cache, self._position = policy, cache, position
        # (N, P + T); the part in use is a view
        self._mask = torch.cat([mask, mask.new_ones(len(mask), room)], 1)
        self._used = mask.shape[1]

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        self._used += 1
        self._position = self._position + 1
        return self._policy.logits(
            tokens[:, None], self._mask[:, : self._used], self._position, 1, self._cache
        )[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        kept = torch.tensor(rows, device=self._mask.device)
        reorder(self._cache, kept)
        self._position, self._mask = self._position[kept], self._mask[kept]
