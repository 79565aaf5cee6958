"""From groups to rows: what one training step learns from, own and external side by side.

    own group        ids and log-probabilities as sampled here           ratio against what was recorded, token by token
    external group   ids or text of a peer, checked against our policy   ratio 1, weight in [0.8, 1] by how far the peer's policy is

A group that fails its check is judged and left out; nothing that a peer sent can raise from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from swarmnode.errors import Incompatible
from swarmnode.policy.generate import GroupSample
from swarmnode.policy.logprobs import Row
from swarmnode.policy.text import PolicyText
from swarmnode.rl.advantages import advantages, train_mask, zero_advantage
from swarmnode.rl.corrections import mean_logprob_floor, sequence_correction, spot_check, surprise_check
from swarmnode.rollouts.groups import ExternalGroup, Outcome
from swarmnode.wire.messages import Completion
from swarmnode.wire.tensors import unpack_ids, unpack_logprobs

Scored = tuple[list[float], list[float]]
"""(log-probabilities, entropies) of one completion's T tokens under our policy, nats."""
Score = Callable[[Sequence[Row], float], list[Scored]]
"""What scores rows at a temperature, without gradient."""


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


@dataclass
class Judgement:
    """The outcome of every drawn external group, and those that are trained on."""

    accepted: list[TrainingGroup] = field(default_factory=list)
    outcomes: list[tuple[ExternalGroup, Outcome]] = field(default_factory=list)


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


@dataclass(frozen=True)
class ExternalChecks:
    """How far a peer's group may be from what our policy would have sampled. Chosen by `benchmarks.tolerance`."""

    min_mean_logprob: float = -12.0
    """Groups of other models: completions less likely than this per token are not trained on."""
    spot_check_tolerance: float = 3.0
    """Groups of the same model: median |difference of log-probability| per token, nats, above which a group is not trained on."""
    surprise_tolerance: float = 4.0
    """Groups of the same model: mean excess of surprise over our policy's entropy per token, nats, above which nobody sampled them."""


CHECKS = ExternalChecks()


def judge(
    groups: Sequence[ExternalGroup], policy: PolicyText, score: Score, temperature: float, checks: ExternalChecks = CHECKS
) -> Judgement:
    """Check drawn groups by one forward pass of the local policy, and weigh what passes (rollouts.md 4 and 5)."""
    judgement = Judgement()
    readable: list[tuple[ExternalGroup, list[Row]]] = []
    for group in groups:
        try:
            prompt = policy.encode_prompt(group.prompt)
            readable.append((group, [(prompt, completion_ids(policy, group, c)) for c in group.group.completions]))
        except Incompatible:
            judgement.outcomes.append((group, "untokenizable"))
        except ForgedIds:
            judgement.outcomes.append((group, "forged_ids"))
    local = _score(score, [rows for _, rows in readable], temperature)
    for (group, rows), scored in zip(readable, local, strict=True):
        theirs = group.group.sampling.temperature  # what the peer says is of its policy at its temperature
        comparable = scored if theirs == temperature else _score(score, [rows], theirs)[0]
        outcome, weights = weigh(group, comparable, policy, checks)
        judgement.outcomes.append((group, outcome))
        if outcome == "used":
            judgement.accepted.append(TrainingGroup(rows, [chosen for chosen, _ in scored], group.rewards, weights, group.peer))
    return judgement


class ForgedIds(Exception):
    """Raised when a completion's token ids do not spell its text: the text earned the reward, the ids would be trained on."""


def completion_ids(policy: PolicyText, group: ExternalGroup, completion: Completion) -> list[int]:
    """Ids to train on: the sender's where it has our tokenizer, else its text in our tokens.

    Raises Incompatible when the text has no tokens here, ForgedIds when ids and text disagree.
    """
    if not completion.token_ids or group.group.tokenizer != policy.tokenizer_hash:
        return policy.tokenize_completion(completion.text, completion.finish)
    ids = policy.check_ids(unpack_ids(completion.token_ids).tolist())
    ends = ids[-1] in policy.eos_ids
    if ends != (completion.finish == "eos") or any(i in policy.eos_ids for i in ids[:-1]) or policy.decode(ids) != completion.text:
        raise ForgedIds
    return ids


def weigh(group: ExternalGroup, scored: list[Scored], policy: PolicyText, checks: ExternalChecks) -> tuple[Outcome, list[float]]:
    """The judgement of one group and its completions' weights. `scored` (G,): what our policy says at the sender's temperature."""
    local = [chosen for chosen, _ in scored]  # (G, T_i)
    completions = group.group.completions
    same_policy = group.group.model == policy.fingerprint and group.group.tokenizer == policy.tokenizer_hash
    packed = [unpack_logprobs(c.logprobs).tolist() for c in completions]
    kept = torch.ones(len(local), dtype=torch.bool)
    if same_policy and all(packed):
        ours = torch.tensor([x for row in local for x in row])
        theirs = torch.tensor([x for row in packed for x in row])
        entropy = torch.tensor([x for _, spread in scored for x in spread])
        if not spot_check(ours, theirs, checks.spot_check_tolerance) or not surprise_check(ours, entropy, checks.surprise_tolerance):
            return "spot_check", []
    else:
        tokens = torch.tensor([float(len(row)) for row in local])
        kept = mean_logprob_floor(torch.tensor([sum(row) for row in local]), tokens, checks.min_mean_logprob)
        best = max(group.rewards)
        if not any(keep and reward == best for keep, reward in zip(kept.tolist(), group.rewards, strict=True)):
            return "mean_logprob", []
    # per token of each side: with another tokenizer the same text has another length
    ours_mean = torch.tensor([sum(row) / max(len(row), 1) for row in local])
    theirs_mean = torch.tensor([c.logprob / max(c.tokens, 1) for c in completions])
    ones = torch.ones(len(local))
    return "used", (sequence_correction(ours_mean, theirs_mean, ones) * kept).tolist()


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


def _score(score: Score, groups: list[list[Row]], temperature: float) -> list[list[Scored]]:
    flat = score([row for rows in groups for row in rows], temperature)
    out, start = [], 0
    for rows in groups:
        out.append(flat[start : start + len(rows)])
        start += len(rows)
    return out
