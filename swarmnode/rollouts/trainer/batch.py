"""Assembles the rows of a training step from own and external groups.

    own group        ids and log-probabilities from sampling
    external group   a peer's group that passed `judge`: log-probabilities of the judge's pass, and
                     a weight in [0, 1] for the most surprising stretch of each completion

The update corrects each token for the distance between these log-probabilities and its own
(`rl.corrections.importance_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import Row
from swarmnode.policy.text import PolicyText
from swarmnode.rl.advantages import advantages, zero_advantage


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
    learnt: list[int] = field(default_factory=list)
    """(G,) number of leading ids of a peer's completion that are trained on if its advantage is
    positive, apart from masked ones; otherwise none are. Empty: all ids of all completions."""


@dataclass(frozen=True)
class Rows:
    """All rows of a step, group after group. N = Σ G.

    A peer's completion is cut to the tokens that are trained on. `lengths` has the length before,
    because the normaliser counts all tokens except improbable ones.
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


def own_group(sample: GroupSample, rewards: Sequence[float]) -> TrainingGroup:
    """Return a group that this node sampled, with the rewards of the scorer."""
    rows = [Row(sample.prompt_ids, c.ids, c.sampled) for c in sample.completions]
    was_cut = [c.finish == "length" for c in sample.completions]
    return TrainingGroup(
        rows,
        [c.logprobs for c in sample.completions],
        list(rewards),
        [1.0] * len(rows),
        was_cut=was_cut,
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
    mask_cut: bool = False,
    per_sequence: bool = False,
) -> Rows:
    """Compute the advantages of every group and concatenate all rows. Groups may differ in G.

    Args:
        mask_cut: Exclude completions that ended at the length limit from training.
        per_sequence: True if the objective divides each completion by its length (`grpo`).
            A partly trained completion is then weighted by its trained share.
    """
    per_group: list[torch.Tensor] = [torch.zeros(0)] * len(groups)
    for size in {len(group.rewards) for group in groups}:
        which = [i for i, group in enumerate(groups) if len(group.rewards) == size]
        values = advantages(torch.tensor([groups[i].rewards for i in which]), estimator)
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
