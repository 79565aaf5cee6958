"""Log-probabilities of given completions: for training with gradients, and for judging peers' groups without.

The prompt of a group is run through the model **once**, with gradient, and its keys and values are shared by the G completions, as when
sampling. Against prompt + completion for every row this is the same function (equal to rounding) at a fraction of the tokens: measured
2.4 times faster forward and backward at 64 prompt and 32 completion tokens, 1.3 times with the embedded policy's 8 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from swarmnode.policy.load import Policy

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
    ids, mask, owner = batch.completion_ids, batch.completion_mask, batch.prompt_of
    positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    cache = DynamicCache(config=policy.model.config)
    output = policy.logits(
        keep=1, input_ids=batch.prompt_ids, attention_mask=batch.prompt_mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    logits = [output.logits[:, -1][owner]]  # (N, V), they predict the first tokens
    row = torch.arange(len(ids), device=ids.device)
    column = torch.zeros_like(row)
    if ids.shape[1] > 1:
        cache.batch_select_indices(owner.cpu())  # layers may lie on several devices
        before = ids[:, :-1]  # (N, T - 1), they predict the others
        seen = torch.cat([batch.prompt_mask[owner], mask[:, :-1].to(batch.prompt_mask.dtype)], 1)
        after = positions[owner, -1:] + 1 + torch.arange(before.shape[1], device=ids.device)
        output = policy.logits(input_ids=before, attention_mask=seen, position_ids=after, past_key_values=cache, use_cache=True)
        later, place = mask[:, 1:].nonzero(as_tuple=True)
        logits.append(output.logits[later, place])
        row, column = torch.cat([row, later]), torch.cat([column, place + 1])
    chosen, spread = token_logprobs(torch.cat(logits), ids[row, column], temperature)  # M completion tokens
    zeros = torch.zeros(ids.shape, device=chosen.device)
    return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits (M, V) and tokens (M,): log-probability of each token, with gradient, and the entropy there, without; both (M,) float32."""
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
