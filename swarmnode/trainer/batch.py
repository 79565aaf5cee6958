"""From groups to rows: what one training step learns from, own and external side by side.

    own group        ids and log-probabilities as sampled here     ratio 1, each token corrected for how far the sampler is
    external group   what `judge` has made of a peer's             ratio 1, weight in [0, 1] by how far the peer's policy is

Ratio 1, since one step is taken on a batch: the old policy is the one that the step begins with. A crew, which has no second forward pass,
takes the ratio of its own groups against what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import Row
from swarmnode.rl.advantages import advantages, overlong_penalty, train_mask, zero_advantage


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
    was_cut: list[bool] = field(default_factory=list)
    """(G,) whether it ended at the length limit; empty: none did."""
    sampler_logprobs: list[list[float]] = field(default_factory=list)
    """(G, T_i) as recorded when it was sampled here; empty for a peer's, whose correction is in its weights."""


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
    sampler_logprobs: list[list[float]] = field(default_factory=list)
    """(N, T_i), a row's empty where its ratio is against `old_logprobs`; empty: every row's is."""
    masked: frozenset[int] = frozenset()
    """Rows that are neither learnt from nor counted, because they were cut."""

    def informative(self, external: bool) -> list[int]:
        """Indices of the own or external rows that carry a gradient."""
        live = (self.advantages * self.weights != 0).tolist()
        return [i for i, is_live in enumerate(live) if is_live and self.external[i] == external]


def own_group(sample: GroupSample, rewards: Sequence[float]) -> TrainingGroup:
    """A group sampled here, with the rewards of the scorer."""
    rows = [(sample.prompt_ids, completion.ids) for completion in sample.completions]
    was_cut = [c.finish == "length" for c in sample.completions]
    logprobs = [c.logprobs for c in sample.completions]
    return TrainingGroup(rows, logprobs, list(rewards), [1.0] * len(rows), was_cut=was_cut, sampler_logprobs=logprobs)


def silent_share(groups: Sequence[TrainingGroup]) -> float | None:
    """Share of `groups` whose rewards are all equal; None without any."""
    silent = [bool(zero_advantage(torch.tensor([g.rewards]))) for g in groups]
    return sum(silent) / len(silent) if silent else None


def components(group: TrainingGroup, shape_to: int) -> list[list[float]]:
    """(G, R) what each completion earned: its reward, and with `shape_to` what its length costs.

    The same for own groups and for peers', whose sender cannot say how long they are.
    """
    if not shape_to:
        return [[reward] for reward in group.rewards]
    cut = group.was_cut or [False] * len(group.rows)
    lengths = [len(completion) for _, completion in group.rows]
    return [[r, -overlong_penalty(n, c, shape_to)] for r, n, c in zip(group.rewards, lengths, cut, strict=True)]


def assemble(groups: Sequence[TrainingGroup], estimator: str, *, shape_to: int = 0, mask_cut: bool = False) -> Rows:
    """Advantages of every group, and all rows one after the other. Groups may have different G.

    shape_to: the longest completion, where being long costs reward; 0 is off. mask_cut: completions that were cut teach nothing.
    Reward and length are two components, which `gdpo` normalises each by itself, and the other estimators add up.
    """
    per_group: list[torch.Tensor] = [torch.zeros(0)] * len(groups)
    earned = [components(g, shape_to) for g in groups]
    for size in sorted({len(g.rewards) for g in groups}):
        which = [i for i, g in enumerate(groups) if len(g.rewards) == size]
        rewards = torch.tensor([earned[i] for i in which])
        values = advantages(rewards, estimator) * train_mask(rewards, estimator)
        for i, row in zip(which, values, strict=True):
            per_group[i] = row
    was_cut = [cut for g in groups for cut in g.was_cut or [False] * len(g.rows)]
    masked = frozenset(i for i, cut in enumerate(was_cut) if cut and mask_cut)
    keeps = torch.tensor([float(i not in masked) for i in range(len(was_cut))])
    return Rows(
        rows=[row for g in groups for row in g.rows],
        old_logprobs=[old for g in groups for old in g.old_logprobs],
        advantages=torch.cat(per_group) if groups else torch.zeros(0),
        weights=torch.tensor([w for g in groups for w in g.weights]) * keeps,
        groups=[i for i, g in enumerate(groups) for _ in g.rows],
        external=[bool(g.peer) for g in groups for _ in g.rows],
        sampler_logprobs=[sampler for g in groups for sampler in g.sampler_logprobs or [[]] * len(g.rows)],
        masked=masked,
    )
