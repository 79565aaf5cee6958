"""Assembles the rows of a training step from own and external groups.

    own group        ids and log-probabilities from sampling
    external group   a peer's group that passed `judge`: log-probabilities of the judge's pass, and
                     a weight in [0, 1] for the most surprising stretch of each completion

The update corrects each token for the distance between these log-probabilities and its own
(`rl.corrections.importance_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import Row
from swarmnode.policy.text import PolicyText
from swarmnode.rl.advantages import advantages, overlong_penalty, zero_advantage


@dataclass(frozen=True)
class RewardParts:
    """The components of a group's rewards. Reward g is Σ_r weights[r] · values[g][r] over the
    components that apply, as TRL adds up reward functions."""

    values: list[list[float]]
    """(G, R), each in [0, 1], or NaN where a component does not apply to a completion."""
    weights: list[float]
    """(R,), their sum is 1."""


def reward_parts(
    components: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> RewardParts | None:
    """Return the reward components of a group; None if there are none.

    A completion without any component, for example because its reward failed, has 0 in each. A
    completion with other components has NaN for the ones that do not apply to it.

    Args:
        components: (G,), as the scorer returned them.
        weights: Weights by name; 1 for a missing name.
    """
    names = sorted({name for each in components for name in each})
    weighed = [weights.get(name, 1.0) for name in names]
    if not names or sum(weighed) <= 0:
        return None
    return RewardParts(
        [[each.get(name, math.nan if each else 0.0) for name in names] for each in components],
        [weight / sum(weighed) for weight in weighed],
    )


@dataclass(frozen=True)
class TrainingGroup:
    """G completions of one question, ready to learn from."""

    rows: list[Row]
    """(G,)."""
    sampler_logprobs: list[list[float]]
    """(G, T_i) log-probabilities recorded at sampling for own groups, or at judging for peers'
    groups; 0 at ids that were not sampled."""
    rewards: list[float]
    """(G,)."""
    weights: list[float]
    """(G,) 1 for own completions. For external ones the judge's weight, 0 if it is excluded."""
    peer: str = ""
    """Peer id of the sender; empty for an own group."""
    was_cut: list[bool] = field(default_factory=list)
    """(G,) True if a completion ended at the length limit; empty if none did."""
    parts: RewardParts | None = None
    """Components of the rewards; None if rewards are single numbers."""
    learnt: list[int] = field(default_factory=list)
    """(G,) number of leading ids of a peer's completion that are trained on if its advantage is
    positive; otherwise none are. Empty: all ids of all completions."""


@dataclass(frozen=True)
class Rows:
    """All rows of a step, group after group. N = Σ G.

    A peer's completion is cut to the tokens that are trained on. `lengths` has its full length,
    because the normaliser counts all tokens.
    """

    rows: list[Row]
    sampler_logprobs: list[list[float]]
    """(N, T_i), as in `TrainingGroup`."""
    advantages: torch.Tensor
    """(N,) float32; 0 for rows that are not trained on."""
    weights: torch.Tensor
    """(N,) float32."""
    groups: list[int]
    """(N,) number of each row's group."""
    external: list[bool]
    """(N,) True for rows of peers."""
    lengths: list[int] = field(default_factory=list)
    """(N,) number of tokens of each completion as sampled; empty: the same as in `rows`."""
    masked: frozenset[int] = frozenset()
    """Rows that are neither trained on nor counted, because they were cut."""

    def length(self, i: int) -> int:
        """Return the number of tokens of completion `i` as it was sampled."""
        return self.lengths[i] if self.lengths else self.rows[i].tokens

    def informative(self, external: bool) -> list[int]:
        """Return the indices of the own or external rows that have a gradient."""
        live = (self.advantages * self.weights != 0).tolist()
        return [i for i, is_live in enumerate(live) if is_live and self.external[i] == external]


def own_group(
    sample: GroupSample, rewards: Sequence[float], parts: RewardParts | None = None
) -> TrainingGroup:
    """Return a group that this node sampled, with the rewards of the scorer."""
    rows = [Row(sample.prompt_ids, c.ids, c.sampled) for c in sample.completions]
    was_cut = [c.finish == "length" for c in sample.completions]
    return TrainingGroup(
        rows,
        [c.logprobs for c in sample.completions],
        list(rewards),
        [1.0] * len(rows),
        was_cut=was_cut,
        parts=parts,
    )


def episode_row(
    text: PolicyText,
    prompt_ids: list[int],
    turns: Sequence[Sequence[int]],
    observations: Sequence[str],
    tools: bool = False,
) -> Row:
    """Return the row of an episode: the sampled ids of its turns, with the observations between
    them.

    Args:
        turns: Sampled ids of each action, none empty.
        observations: Text after each action, to which the chat template is applied. The text after
            the last action is ignored.
        tools: True if they are the results of tools (`PolicyText.has_tools`).
    """
    ids, sampled = list[int](), list[bool]()
    for number, turn in enumerate(turns):
        if number:
            between = text.observation_ids(observations[number - 1], turns[number - 1][-1], tools)
            ids += between
            sampled += [False] * len(between)
        ids += turn
        sampled += [True] * len(turn)
    return Row(prompt_ids, ids, sampled)


def silent_share(groups: Sequence[TrainingGroup]) -> float | None:
    """Return the share of `groups` whose rewards are all equal; None without groups."""
    silent = [bool(zero_advantage(torch.tensor([g.rewards]))) for g in groups]
    return sum(silent) / len(silent) if silent else None


def components(group: TrainingGroup, shape_to: int) -> RewardParts:
    """Return the reward components of each completion, with `shape_to` including its length
    penalty.

    The penalty is computed alike for own and peers' groups, from the tokens and not from claims.

    Args:
        shape_to: Length limit of the overlong penalty in tokens; 0 disables it.
    """
    earned = group.parts or RewardParts([[reward] for reward in group.rewards], [1.0])
    if not shape_to:
        return earned
    cut = group.was_cut or [False] * len(group.rows)
    lengths = [row.longest_turn for row in group.rows]
    values = [
        [*r, -overlong_penalty(n, c, shape_to)]
        for r, n, c in zip(earned.values, lengths, cut, strict=True)
    ]
    return RewardParts(values, [*earned.weights, 1.0])


@dataclass(frozen=True)
class TrainedCompletion:
    """The part of one completion that is trained on."""

    row: Row
    sampler_logprobs: list[float]
    share: float
    """Share of the completion's tokens that are trained on."""


def trained_completions(
    group: TrainingGroup, advantages: Sequence[float]
) -> list[TrainedCompletion]:
    """Return the completions of a group, (G,), with a peer's completions cut to the trained part.

    A completion with no trained tokens stays whole with share 0, so that no row is empty.
    """
    found = []
    rows = [Row(*row) for row in group.rows]  # a plain pair is a valid row
    for i, (row, sampler) in enumerate(zip(rows, group.sampler_logprobs, strict=True)):
        count = group.learnt[i] if group.learnt else len(sampler)
        if group.learnt and advantages[i] <= 0:
            count = 0
        if count in (0, len(sampler)):
            found.append(TrainedCompletion(row, sampler, float(count > 0)))
        else:
            cut = row.first(count)
            found.append(TrainedCompletion(cut, sampler[:count], cut.tokens / row.tokens))
    return found


def assemble(
    groups: Sequence[TrainingGroup],
    estimator: str,
    *,
    shape_to: int = 0,
    mask_cut: bool = False,
    per_sequence: bool = False,
) -> Rows:
    """Compute the advantages of every group and concatenate all rows. Groups may differ in G.

    Reward components and the length penalty stay separate: `gdpo` normalises each separately, and
    the other estimators add them up by their weights.

    Args:
        shape_to: Length limit in tokens of a completion, or of a turn in an episode; the overlong
            penalty applies near it. 0 is off.
        mask_cut: Exclude completions that ended at the length limit from training.
        per_sequence: True if the objective divides each completion by its length (`grpo`).
            A partly trained completion is then weighted by its trained share.
    """
    per_group: list[torch.Tensor] = [torch.zeros(0)] * len(groups)
    earned = [components(g, shape_to) for g in groups]
    kinds = [
        (len(g.rewards), tuple(parts.weights)) for g, parts in zip(groups, earned, strict=True)
    ]
    for kind in sorted(set(kinds)):
        which = [i for i, each in enumerate(kinds) if each == kind]
        rewards, weights = torch.tensor([earned[i].values for i in which]), kind[1]
        values = advantages(rewards, estimator, weights)
        for i, row in zip(which, values, strict=True):
            per_group[i] = row
    was_cut = [cut for g in groups for cut in g.was_cut or [False] * len(g.rows)]
    masked = frozenset(i for i, cut in enumerate(was_cut) if cut and mask_cut)
    learnt = [
        each
        for g, values in zip(groups, per_group, strict=True)
        for each in trained_completions(g, values.tolist())
    ]
    keeps = torch.tensor(
        [
            (each.share if per_sequence else float(each.share > 0)) * (i not in masked)
            for i, each in enumerate(learnt)
        ]
    )
    return Rows(
        rows=[each.row for each in learnt],
        sampler_logprobs=[each.sampler_logprobs for each in learnt],
        advantages=torch.cat(per_group) if groups else torch.zeros(0),
        weights=torch.tensor([w for g in groups for w in g.weights]) * keeps,
        groups=[i for i, g in enumerate(groups) for _ in g.rows],
        external=[bool(g.peer) for g in groups for _ in g.rows],
        lengths=[Row(*row).tokens for g in groups for row in g.rows],
        masked=masked,
    )
