"""What travels of a micro-batch: one row per token that is real and has a successor to predict, and
nothing of the padding.

    padded here                                   packed on the wire, R rows
    prompts      (Q, P)      padded on the left    their tokens, prompt after prompt
    completions  (N, T − 1)  padded on the right   their tokens but the last, completion after
    completion

Each prompt is run once for its G completions, as in `policy.logprobs`. Because a row is a token, a
token's activation is quantised alike whichever tokens it is batched with: in a prefill, in a decode
step, in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmnode.policy.logprobs import Batch


@dataclass(frozen=True)
class Packing:
    """Where the rows of a batch are."""

    prompts: tuple[torch.Tensor, ...]
    """(row, column) of each prompt token."""
    completions: tuple[torch.Tensor, ...]
    """(row, column) of each completion token that has a successor."""
    shape: tuple[int, int, int, int]
    """Q, P, N, T."""

    @property
    def rows(self) -> int:
        return len(self.prompts[0]) + len(self.completions[0])

    def pack(self, prompts: torch.Tensor, completions: torch.Tensor | None) -> torch.Tensor:
        """(Q, P, H) and (N, T − 1, H), None where T is 1 → (R, H)."""
        head = prompts[self.prompts]
        return head if completions is None else torch.cat([head, completions[self.completions]])

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The inverse; zeros on padding."""
        questions, width, count, longest = self.shape
        head, tail = rows.split([len(self.prompts[0]), len(self.completions[0])])
        prompts = rows.new_zeros(questions, width, rows.shape[1]).index_put(self.prompts, head)
        if longest == 1:
            return prompts, None
        return prompts, rows.new_zeros(count, longest - 1, rows.shape[1]).index_put(
            self.completions, tail
        )


def packing(batch: Batch) -> Packing:
    prompts = batch.prompt_mask.nonzero(as_tuple=True)
    completions = batch.completion_mask[:, 1:].nonzero(as_tuple=True)
    (questions, width), (count, longest) = batch.prompt_ids.shape, batch.completion_ids.shape
    return Packing(prompts, completions, (questions, width, count, longest))
