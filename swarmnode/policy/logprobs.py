"""Log-probabilities of given completions: for training with gradients, and for judging peers' groups without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnode.policy.load import Policy

Row = tuple[list[int], list[int]]
"""(prompt ids, completion ids), both non-empty."""


@dataclass(frozen=True)
class Batch:
    """N rows of prompt and completion, right-padded: L is the longest row, T the longest completion."""

    input_ids: torch.Tensor
    """(N, L) prompt, completion, padding."""
    attention_mask: torch.Tensor
    """(N, L) 1 on tokens, 0 on padding."""
    completion_ids: torch.Tensor
    """(N, T)."""
    completion_mask: torch.Tensor
    """(N, T) bool, True on completion tokens."""
    prompt_lengths: torch.Tensor
    """(N,)."""


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Rows as one batch."""
    length = max(len(p) + len(c) for p, c in rows)
    longest = max(len(c) for _, c in rows)
    padded = lambda ids, width: ids + [pad_id] * (width - len(ids))
    ones = lambda n, width: [1] * n + [0] * (width - n)
    return Batch(
        torch.tensor([padded(p + c, length) for p, c in rows], device=device),
        torch.tensor([ones(len(p) + len(c), length) for p, c in rows], device=device),
        torch.tensor([padded(c, longest) for _, c in rows], device=device),
        torch.tensor([ones(len(c), longest) for _, c in rows], dtype=torch.bool, device=device),
        torch.tensor([len(p) for p, _ in rows], device=device),
    )


def completion_logprobs(policy: Policy, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token at `temperature`, with gradient, and the entropy there, without: both (N, T), 0 on padding.

    One forward pass. The head runs from the shortest prompt's end on only, float32 is made of completion tokens only:
    with a real vocabulary the logits, not the model, decide how much fits.
    """
    shortest = int(batch.prompt_lengths.min())
    keep = batch.input_ids.shape[1] - shortest + 1  # the token at position i is predicted at i - 1
    logits = policy.logits(keep=keep, input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits  # (N, keep, V)
    row, column = batch.completion_mask.nonzero(as_tuple=True)  # (M,) each, M completion tokens
    where = batch.prompt_lengths[row] - shortest + column
    scores = logits[row, where].float() / (temperature or 1.0)  # (M, V)
    total = scores.logsumexp(-1)
    chosen = scores.gather(-1, batch.completion_ids[row, column][:, None])[:, 0] - total
    with torch.no_grad():
        spread = total.detach() - (scores.detach() - total.detach()[:, None]).exp().mul_(scores.detach()).sum(-1)
    zeros = torch.zeros(batch.completion_ids.shape, device=chosen.device)
    return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


@torch.no_grad()
def score(policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """Log-probability of each completion token of each row, without gradient, in one pass."""
    logprobs, _ = completion_logprobs(policy, collate(rows, policy.pad_id, policy.device), temperature)
    return [values[: len(c)] for values, (_, c) in zip(logprobs.tolist(), rows, strict=True)]
