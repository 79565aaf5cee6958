"""Log-probabilities of given completions: for training with gradients, and for judging peers' groups without.

The prompt of a group is run through the model **once**, with gradient, and shared by its G completions, as when sampling. Against
prompt + completion for every row this is the same function (equal to rounding) at a fraction of the tokens: measured 2.4 times faster
forward and backward at 64 prompt and 32 completion tokens, 1.3 times with the embedded policy's 8 and 5. Two ways, by what is cheaper:

    one pass     a row is a prompt and all of its completions, and a mask lets each completion see the prompt and itself only. Half of
                 the kernels to launch, which is what a GPU waits for; attention computes what the mask then drops
    two passes   the prompts, whose keys and values are then repeated for their completions: long rows, and models that make their own masks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import DynamicCache

from swarmnode.policy.decode import has_fixed_form
from swarmnode.policy.load import Policy

ONE_PASS = {"cuda": 1024}
"""Columns of a row, P + K · T, up to which one pass is faster. On an H200 with 0.5 B parameters 89 ms instead of 176 at 271 columns,
335 instead of 297 at 2233; on a CPU with the embedded policy 9.5 instead of 12.4 at 52, 49 instead of 39 at 268."""
ONE_PASS_ELSEWHERE = 96

Row = tuple[list[int], list[int]]
"""(prompt ids, completion ids), both non-empty."""


@dataclass(frozen=True)
class Batch:
    """N completions of Q distinct prompts. Prompts are padded on the left, completions on the right, so that they meet."""

    prompt_ids: torch.Tensor
    """(Q, P)."""
    prompt_mask: torch.Tensor
    """(Q, P) 1 on tokens, 0 on padding."""
    prompt_of: torch.Tensor
    """(N,) which prompt a completion answers."""
    completion_ids: torch.Tensor
    """(N, T)."""
    completion_mask: torch.Tensor
    """(N, T) bool, True on completion tokens."""

    @property
    def padded_tokens(self) -> int:
        """N × (P + T): what `MicroBatcher` counts. A bound, since a prompt is run once per group."""
        return len(self.completion_ids) * (self.prompt_ids.shape[1] + self.completion_ids.shape[1])

    @cached_property
    def places(self) -> tuple[torch.Tensor, int]:
        """(N,) which of its prompt's completions a row is, and K, how many the prompt with most has."""
        counts = [0] * len(self.prompt_ids)
        places = []
        for owner in self.prompt_of.tolist():
            places.append(counts[owner])
            counts[owner] += 1
        return torch.tensor(places, device=self.prompt_of.device), max(counts)


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Rows as one batch, in their order; equal prompts become one. Raises ValueError for an empty prompt or completion."""
    if not rows or not all(p and c for p, c in rows):
        raise ValueError("every row needs a prompt and a completion of at least one token")
    prompts: dict[tuple[int, ...], int] = {}
    prompt_of = [prompts.setdefault(tuple(p), len(prompts)) for p, _ in rows]
    width, longest = max(map(len, prompts)), max(len(c) for _, c in rows)
    return Batch(
        torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device),
        torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device),
        torch.tensor(prompt_of, device=device),
        torch.tensor([c + [pad_id] * (longest - len(c)) for _, c in rows], device=device),
        torch.tensor([[1] * len(c) + [0] * (longest - len(c)) for _, c in rows], dtype=torch.bool, device=device),
    )


def completion_logprobs(policy: Policy, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token at `temperature`, with gradient, and the entropy there, without: both (N, T), 0 on padding.

    The head sees one position per prompt and the completions; float32 is made of completion tokens only: with a real
    vocabulary the logits, not the model, decide how much fits.
    """
    ids, mask = batch.completion_ids, batch.completion_mask
    later, place = mask[:, 1:].nonzero(as_tuple=True)  # completion tokens but the first: of which row, and after which token
    logits = (_one_pass if fits_one_pass(policy, batch) else _two_passes)(policy, batch, later, place)  # M completion tokens
    first = torch.arange(len(ids), device=ids.device)
    row, column = torch.cat([first, later]), torch.cat([torch.zeros_like(first), place + 1])
    chosen, spread = token_logprobs(logits, ids[row, column], temperature)
    zeros = torch.zeros(ids.shape, device=chosen.device)
    return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


def fits_one_pass(policy: Policy, batch: Batch) -> bool:
    """Whether one pass is possible, no more tokens than two, and not so long that attention is what costs."""
    prompts, width = batch.prompt_ids.shape
    columns = width + batch.places[1] * batch.completion_ids.shape[1]
    if columns > ONE_PASS.get(batch.prompt_ids.device.type, ONE_PASS_ELSEWHERE) or prompts * columns > batch.padded_tokens:
        return False
    return has_fixed_form(policy.base, DynamicCache(config=policy.base.config))


def _one_pass(policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """(M, V) logits that predict the first token of each row, then the tokens `place` + 1 of rows `later`."""
    ids, owner = batch.completion_ids, batch.prompt_of
    (prompts, width), length = batch.prompt_ids.shape, ids.shape[1]
    which, most = batch.places
    tokens = ids.new_zeros(prompts, most, length)
    tokens[owner, which] = ids
    real = torch.zeros_like(tokens, dtype=torch.bool)
    real[owner, which] = batch.completion_mask

    before = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    after = before[:, -1:, None] + 1 + torch.arange(length, device=ids.device)  # (Q, 1, T)
    column = torch.arange(width + most * length, device=ids.device)
    segment = torch.where(column < width, -1, (column - width) // length)  # -1: the prompt
    sees = (column <= column[:, None]) & ((segment == -1) | (segment == segment[:, None]))  # (S, S)
    there = torch.cat([batch.prompt_mask.bool(), real.flatten(1)], 1)  # (Q, S)
    sees = (sees & there[:, None]) | torch.eye(len(column), dtype=torch.bool, device=ids.device)  # padding must see something: itself

    logits = policy.logits(
        torch.cat([batch.prompt_ids, tokens.flatten(1)], 1),
        sees[:, None],
        torch.cat([before, after.expand(-1, most, -1).flatten(1)], 1),
        keep=most * length + 1,  # from the last token of the prompt
    )
    return torch.cat([logits[:, 0][owner], logits[owner[later], 1 + which[later] * length + place]])


def _two_passes(policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """As `_one_pass`."""
    ids, mask, owner = batch.completion_ids, batch.completion_mask, batch.prompt_of
    positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    cache = DynamicCache(config=policy.base.config)
    first = policy.logits(batch.prompt_ids, batch.prompt_mask, positions, 1, cache)[:, -1]  # (Q, V), they predict the first tokens
    logits = [first[owner]]
    if ids.shape[1] > 1:
        cache.batch_select_indices(owner.cpu())  # layers may lie on several devices
        before = ids[:, :-1]  # (N, T - 1), they predict the others
        seen = torch.cat([batch.prompt_mask[owner], mask[:, :-1].to(batch.prompt_mask.dtype)], 1)
        after = positions[owner, -1:] + 1 + torch.arange(before.shape[1], device=ids.device)
        logits.append(policy.logits(before, seen, after, cache=cache)[later, place])
    return torch.cat(logits)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token (M,) under logits (M, V), with gradient, and the entropy there, without; both (M,) float32."""
    scores = logits.float() / (temperature or 1.0)
    total = scores.logsumexp(-1)
    chosen = scores.gather(-1, tokens[:, None])[:, 0] - total
    with torch.no_grad():
        spread = total.detach() - (scores.detach() - total.detach()[:, None]).exp().mul_(scores.detach()).sum(-1)
    return chosen, spread


@torch.no_grad()
def score_with_entropy(policy: Policy, rows: Sequence[Row], temperature: float) -> list[tuple[list[float], list[float]]]:
    """(log-probabilities, entropies) at the completion tokens of each row, without gradient, in one pass."""
    logprobs, entropy = completion_logprobs(policy, collate(rows, policy.pad_id, policy.device), temperature)
    values = zip(logprobs.tolist(), entropy.tolist(), rows, strict=True)
    return [(chosen[: len(c)], spread[: len(c)]) for chosen, spread, (_, c) in values]


def score(policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """Log-probability of each completion token of each row, without gradient, in one pass."""
    return [chosen for chosen, _ in score_with_entropy(policy, rows, temperature)]
