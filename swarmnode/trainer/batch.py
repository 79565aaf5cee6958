"""From groups to rows: what one training step learns from, own and external side by side.

    own group        ids and log-probabilities as sampled here     ratio against what was recorded, token by token
    external group   what `judge` has made of a peer's             ratio 1, weight in [0, 1] by how far the peer's policy is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import Row
from swarmnode.rl.advantages import advantages, train_mask, zero_advantage


@dataclass(frozen=True)
class TrainingGroup:
    """G completions of one question, ready to learn from."""

    rows: list[Row]
    """(G,) of (prompt ids, completion ids)."""
    old_logprobs: list[list[float]]
    """(G, T_i) what the ratio is taken against."""
    rewards: list[float]
    """(G,)."""
    weights: list[float]
    """(G,) 1 for own; the correction, or 0 for a completion that is left out, for external ones."""
    peer: str = ""
    """Empty for own."""


@dataclass(frozen=True)
class Rows:
    """All rows of a step, group after group. N = Σ G."""

    rows: list[Row]
    old_logprobs: list[list[float]]
    advantages: torch.Tensor
    """(N,) float32; 0 where nothing is learnt."""
    weights: torch.Tensor
    """(N,) float32."""
    groups: list[int]
    """(N,) which group a row is of."""
    external: list[bool]
    """(N,)."""
    zero_advantage_share: float | None
    """Share of the own groups whose rewards are all equal; None without any own group."""

    def informative(self, external: bool) -> list[int]:
        """Indices of the own or external rows that carry a gradient."""
        live = (self.advantages * self.weights != 0).tolist()
        return [i for i, is_live in enumerate(live) if is_live and self.external[i] == external]


def own_group(sample: GroupSample, rewards: Sequence[float]) -> TrainingGroup:
    """A group sampled here, with the rewards of the scorer."""
    rows = [(sample.prompt_ids, completion.ids) for completion in sample.completions]
    return TrainingGroup(rows, [c.logprobs for c in sample.completions], list(rewards), [1.0] * len(rows))


def assemble(groups: Sequence[TrainingGroup], estimator: str) -> Rows:
    """Advantages of every group, and all rows one after the other. Groups may have different G."""
    per_group: list[torch.Tensor] = [torch.zeros(0)] * len(groups)
    for size in sorted({len(g.rewards) for g in groups}):
        which = [i for i, g in enumerate(groups) if len(g.rewards) == size]
        rewards = torch.tensor([groups[i].rewards for i in which])
        values = advantages(rewards, estimator) * train_mask(rewards, estimator)
        for i, row in zip(which, values, strict=True):
            per_group[i] = row
    own = [g for g in groups if not g.peer]
    silent = [bool(zero_advantage(torch.tensor([g.rewards]))) for g in own]
    return Rows(
        rows=[row for g in groups for row in g.rows],
        old_logprobs=[old for g in groups for old in g.old_logprobs],
        advantages=torch.cat(per_group) if groups else torch.zeros(0),
        weights=torch.tensor([w for g in groups for w in g.weights]),
        groups=[i for i, g in enumerate(groups) for _ in g.rows],
        external=[bool(g.peer) for g in groups for _ in g.rows],
        zero_advantage_share=sum(silent) / len(silent) if silent else None,
    )
