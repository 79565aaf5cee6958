"""Checks whether a policy near this node's may have sampled a peer's group, and weights the group.

Steps, with the reasons for refusal on the right:

    read      use the sender's ids, or tokenize its text here    `forged_ids`, `no_ids`,
                                                                 `special_ids`, `untokenizable`,
                                                                 `temperature`, `too_long`
    score     one forward pass of the own policy                 `too_large`, `failed`,
                                                                 `no_gradient`
    believe   surprise of the group and of each completion       `surprise`
              under the own policy at the own temperature
    compare   the sender's log-probabilities with the own ones   `spot_check`
    weigh     a factor for each completion's most surprising stretch
    shorten   drop the end of a rewarded answer if its reward does not     `failed`
              need it
              (`needed.py`)
    bound     drop answers with a token that peers write much more often than this node
              (`quota.py`)                                       `drift`
    mask      exclude tokens that the own policy almost never    `improbable`
              samples

One rule holds: no field that a sender may omit or forge makes its group more credible. Only the own
policy decides whether a text was sampled; every claim is one more thing that can be wrong. No peer
data can raise an exception out of this module: any exception refuses only the group that caused it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from swarmnode.errors import DeviceError, EngineGone, Incompatible, PeerTimeout
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.policy.text import PolicyText
from swarmnode.policy.ways import reason
from swarmnode.rl.corrections import (
    LEAST_PROBABILITY,
    burst_slack,
    burst_weight,
    excess_surprise,
    spot_check,
    surprise_check,
)
from swarmnode.rollouts.groups import ExternalGroup, Outcome, actions, turn_ids
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.rollouts.trainer.batch import TrainingGroup, episode_row
from swarmnode.rollouts.trainer.needed import asked_tokens, needed_only
from swarmnode.rollouts.trainer.quota import TokenQuota
from swarmnode.rollouts.trainer.rescore import Rescore, ScoringBudget
from swarmnode.wire.tensors import unpack_logprobs

RowScores = tuple[list[float], list[float]]
"""(log-probabilities, entropies) of the T ids of one completion under the own policy, in nats; 0 at
ids that were not sampled."""
Score = Callable[[Sequence[Row], float], list[RowScores]]
"""Function that scores rows at a temperature, without gradient."""


@dataclass(frozen=True)
class ExternalChecks:
    """Largest distance of a peer's group from samples of the own policy. The values were chosen by
    measurement (benchmarks/RESULTS.md, "Rollouts")."""

    spot_check_tolerance: float = 3.0
    """Median |difference of log-probability| per token, nats, above which a group is refused."""
    surprise_tolerance: float = 4.0
    """Mean surprise minus entropy per token of a group under the own policy, nats, above which a
    group is refused: no similar policy sampled it."""
    burst_slack: float | None = None
    """Excess that a completion's most surprising stretch may have, nats; None means
    `corrections.burst_slack` of the vocabulary."""
    temperature_factor: float = 2.0
    """Largest ratio of the sender's temperature to the own one, or its inverse. Beyond it, reported
    log-probabilities cannot be compared."""
    least_probability: float = LEAST_PROBABILITY
    """Tokens with a lower probability than this under the own policy are not trained on. With 0,
    they are, and so are completions that earned less than the group's mean."""


CHECKS = ExternalChecks()


@dataclass
class Judgement:
    """The outcome of every drawn external group, and those that are trained on."""

    accepted: list[TrainingGroup] = field(default_factory=list)
    outcomes: list[tuple[ExternalGroup, Outcome]] = field(default_factory=list)
    details: dict[Outcome, str] = field(default_factory=dict)
    """Description of the first refused group by reason, if it adds to the reason."""

    def refuse(self, group: ExternalGroup, refused: GroupRefused) -> None:
        """Record why a group is not trained on."""
        self.outcomes.append((group, refused.outcome))
        if refused.detail:
            self.details.setdefault(refused.outcome, refused.detail)


class GroupRefused(Exception):
    """Raised for a group that is not trained on."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.detail = detail


@contextlib.contextmanager
def contained(*others: type[Exception]) -> Iterator[None]:
    """Convert all exceptions inside the block to GroupRefused, except `others`.

    EngineGone and PeerTimeout are not converted. The group does not cause them; the next own pass
    would raise them too.
    """
    ends = KeyboardInterrupt, SystemExit, GeneratorExit
    passed: tuple[type[BaseException], ...] = (
        GroupRefused,
        EngineGone,
        PeerTimeout,
        *ends,
        *others,
    )
    try:
        yield
    except passed:
        raise
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        too_large = isinstance(error, DeviceError) or is_oom(error)
        outcome: Outcome = "too_large" if too_large else "failed"
        raise GroupRefused(outcome, reason(error)) from error


def judge(
    groups: Sequence[ExternalGroup],
    policy: PolicyText,
    score: Score,
    temperature: float,
    checks: ExternalChecks = CHECKS,
    quota: TokenQuota | None = None,
    rescore: Rescore | None = None,
    budget: ScoringBudget | None = None,
) -> Judgement:
    """Check groups with one forward pass of the local policy, and weight those that pass.

    Args:
        quota: Bounds how often peers' answers teach a token; None is no bound.
        rescore: Scores shortened answers to find needless tokens. If None, needless tokens are
            trained on.
        budget: Limits the time of `rescore` per peer; None is no limit.
    """
    judgement = Judgement()
    readable: list[tuple[ExternalGroup, list[Row]]] = []
    for group in groups:
        try:
            with contained():
                readable.append((group, rows_of(group, policy, temperature, checks)))
        except GroupRefused as refused:
            judgement.refuse(group, refused)
    scores = _scored(score, [rows for _, rows in readable], temperature)
    for (group, rows), scored in zip(readable, scores, strict=True):
        try:
            with contained():
                accepted = _weighed(group, rows, scored, policy, score, temperature, checks)
                scorer = rescore
                if rescore is not None and budget is not None:
                    scorer = budget.of(group.peer, rescore)
                if scorer is not None:
                    accepted = needed_only(group, accepted, policy, scorer)
                if quota is not None and accepted.learnt:
                    asked = asked_tokens(group, policy, scorer) | policy.eos_ids
                    accepted = _within_quota(
                        accepted, group.group.task.id, quota, asked, policy.token_name
                    )
                if accepted.learnt:
                    accepted = _masked(accepted, math.log(checks.least_probability))
        except GroupRefused as refused:
            judgement.refuse(group, refused)
        else:
            judgement.outcomes.append((group, "used"))
            judgement.accepted.append(accepted)
    return judgement


def _weighed(
    group: ExternalGroup,
    rows: list[Row],
    scored: list[RowScores] | GroupRefused,
    policy: PolicyText,
    score: Score,
    temperature: float,
    checks: ExternalChecks,
) -> TrainingGroup:
    """Return the group with its weights.

    Raises:
        GroupRefused: A check failed.
    """
    own = _numbers(scored)
    weights = believe(group.rewards, _at_sampled(rows, own), policy, checks)
    # The reported log-probabilities are at the sender's temperature.
    reported = group.group.sampling.temperature
    comparable = own if reported == temperature else _numbers(*_scored(score, [rows], reported))
    compare(group, [chosen for chosen, _ in _at_sampled(rows, comparable)], policy, checks)
    was_cut = [completion.finish == "length" for completion in group.group.completions]
    chosen = [each for each, _ in own]
    learnt = [len(each) for each in chosen] if checks.least_probability else []
    return TrainingGroup(
        rows,
        chosen,
        group.rewards,
        weights,
        group.peer,
        was_cut,
        learnt=learnt,
    )


def _within_quota(
    accepted: TrainingGroup,
    task: str,
    quota: TokenQuota,
    asked: Collection[int],
    name_of: Callable[[int], str],
) -> TrainingGroup:
    """Return the group without training on the rewarded answers that the quota refuses.

    Args:
        asked: Tokens that are not counted.
        name_of: Returns the text of a token.

    Raises:
        GroupRefused: No answer is left to train on.
    """
    mean = statistics.fmean(accepted.rewards)
    better = [reward > mean for reward in accepted.rewards]
    learnt = [
        0
        if is_better
        and count
        and not quota.takes(task, row.at_sampled(row.completion), row.first(count).tokens, asked)
        else count
        for count, is_better, row in zip(accepted.learnt, better, accepted.rows, strict=True)
    ]
    if not any(count and is_better for count, is_better in zip(learnt, better, strict=True)):
        raise GroupRefused("drift", quota.refused.words(name_of) if quota.refused else "")
    return replace(accepted, learnt=learnt)


def _masked(accepted: TrainingGroup, floor: float) -> TrainingGroup:
    """Return the group without training on tokens with a log-probability below `floor`, nats.

    Raises:
        GroupRefused: No token of a rewarded completion is left.
    """
    rows = [
        Row(
            row.prompt,
            row.completion,
            [
                was_sampled and logprob >= floor
                for was_sampled, logprob in zip(row.sampled or [True] * len(own), own, strict=True)
            ],
        )
        for row, own in zip(accepted.rows, accepted.sampler_logprobs, strict=True)
    ]
    learnt = [
        count if row.first(count).tokens else 0
        for count, row in zip(accepted.learnt, rows, strict=True)
    ]
    mean = statistics.fmean(accepted.rewards)
    taught = zip(accepted.rewards, learnt, accepted.weights, strict=True)
    if not any(count and weight > 0 for reward, count, weight in taught if reward > mean):
        raise GroupRefused(
            "improbable", "this node almost never samples a token of its rewarded answers"
        )
    return replace(accepted, rows=rows, learnt=learnt)


def _at_sampled(rows: Sequence[Row], scored: Sequence[RowScores]) -> list[RowScores]:
    """Return the scores of sampled tokens only."""
    return [
        (row.at_sampled(chosen), row.at_sampled(spread))
        for row, (chosen, spread) in zip(rows, scored, strict=True)
    ]


def _numbers(scored: list[RowScores] | GroupRefused) -> list[RowScores]:
    """Return the scores of a group.

    Raises:
        GroupRefused: Scoring failed, or a score is not finite.
    """
    if isinstance(scored, GroupRefused):
        raise scored
    if not all(math.isfinite(x) for chosen, spread in scored for x in (*chosen, *spread)):
        raise GroupRefused("no_gradient", "log-probabilities are not finite")
    return scored


def judge_until_full(
    groups: Sequence[ExternalGroup],
    room: int,
    judged: Callable[[Sequence[ExternalGroup]], Judgement],
    more: Callable[[int], list[ExternalGroup]] = lambda count: [],
) -> tuple[Judgement, list[ExternalGroup]]:
    """Judge groups in order until `room` groups are accepted.

    A refused group does not use up room. If several peers sent groups, at most half of the accepted
    groups come from one peer.

    Args:
        more: Returns additional groups to replace refused ones; called at most once, with their
            number.

    Returns:
        The judgement, and the groups that were not judged.
    """
    total, left, asked = Judgement(), list(groups), False
    while True:
        missing = room - len(total.accepted)
        taken = Counter(group.peer for group in total.accepted)
        alone = len({*taken, *(group.peer for group in left)}) <= 1
        some, left = _first(left, missing, room if alone else most_per_peer(room), taken)
        if some:
            judgement = judged(some)
            total.accepted += judgement.accepted
            total.outcomes += judgement.outcomes
            total.details = judgement.details | total.details
        elif missing > 0 and len(total.accepted) < len(total.outcomes) and not asked:
            left, asked = left + more(missing + reserve(missing)), True
        else:
            return total, left


def _first(
    groups: list[ExternalGroup], most: int, per_peer: int, taken: Counter[str]
) -> tuple[list[ExternalGroup], list[ExternalGroup]]:
    """Return the first `most` groups with at most `per_peer` of one peer, and the remaining groups.

    Args:
        taken: Number of groups that count already, by peer; updated.
    """
    first: list[ExternalGroup] = []
    others: list[ExternalGroup] = []
    for group in groups:
        fits = len(first) < most and taken[group.peer] < per_peer
        (first if fits else others).append(group)
        taken[group.peer] += fits
    return first, others


def reserve(room: int) -> int:
    """Return the number of groups to request in addition to `room`, to replace refused ones: half
    of it, rounded up."""
    return -(-room // 2)


def rows_of(
    group: ExternalGroup, policy: PolicyText, temperature: float, checks: ExternalChecks
) -> list[Row]:
    """Return the row of each completion, (G,).

    Raises:
        GroupRefused: The group cannot be read.
    """
    theirs = group.group.sampling.temperature
    if (
        not temperature / checks.temperature_factor
        <= theirs
        <= temperature * checks.temperature_factor
    ):
        raise GroupRefused("temperature")
    if _has_own_model(group, policy) and not all(
        c.token_ids and c.logprobs for c in group.group.completions
    ):
        raise GroupRefused("no_ids")
    try:
        prompt = policy.encode_prompt(group.prompt)
        rows = [
            completion_row(policy, group, prompt, number)
            for number in range(len(group.group.completions))
        ]
    except Incompatible as error:
        raise GroupRefused("untokenizable", str(error)) from None
    longest = len(prompt) + max(len(row.completion) for row in rows)
    if policy.context is not None and longest > policy.context:
        raise GroupRefused(
            "too_long", f"{longest:,} tokens, the model's context is {policy.context:,}"
        )
    return rows


def completion_row(policy: PolicyText, group: ExternalGroup, prompt: list[int], number: int) -> Row:
    """Return the row of one completion.

    The row uses the sender's ids if the sender has the same tokenizer; otherwise the text is
    tokenized here. Between the actions of an episode are the observations of the local replay, in
    the local chat template.

    Raises:
        Incompatible: The text has no tokens here.
        GroupRefused: Ids and text disagree (the text earned the reward, but the ids would be
            trained on), or the ids contain tokens that the text does not show.
    """
    completion = group.group.completions[number]
    comparable = completion.token_ids and group.group.tokenizer == policy.tokenizer_hash
    texts = actions(completion)
    finishes = ["eos"] * (len(texts) - 1) + [completion.finish]
    if comparable:
        turns = [
            checked_ids(policy, ids, text, finish)
            for ids, text, finish in zip(turn_ids(completion), texts, finishes, strict=True)
        ]
    else:
        turns = [
            policy.tokenize_completion(text, finish)
            for text, finish in zip(texts, finishes, strict=True)
        ]
    if not completion.turns:
        return Row(prompt, turns[0])
    tools = policy.has_tools(group.prompt)
    return episode_row(policy, prompt, turns, group.observations[number], tools)


def checked_ids(policy: PolicyText, ids: list[int], text: str, finish: str) -> list[int]:
    """Return `ids` if they are the tokens of `text`.

    Raises:
        Incompatible, GroupRefused: See `completion_row`.
    """
    ids = policy.check_ids(ids)
    ends = ids[-1] in policy.eos_ids
    if (
        ends != (finish == "eos")
        or any(i in policy.eos_ids for i in ids[:-1])
        or policy.decode(ids) != text
    ):
        raise GroupRefused("forged_ids")
    if policy.hides(ids):
        raise GroupRefused("special_ids")
    return ids


def believe(
    rewards: Sequence[float],
    scored: Sequence[RowScores],
    policy: PolicyText,
    checks: ExternalChecks,
) -> list[float]:
    """Return a weight for the most surprising stretch of each completion, (G,).

    Args:
        rewards: (G,).
        scored: (G,) scores of the sampled tokens at the own temperature.

    Raises:
        GroupRefused: No completion with the best reward has a positive weight, or no policy near
            the own one sampled this group (its mean surprise is too high).
    """
    excess = [
        excess_surprise(torch.tensor(chosen), torch.tensor(spread)) for chosen, spread in scored
    ]
    every = torch.cat(excess)
    if not surprise_check(every, checks.surprise_tolerance):
        mean = float(every.mean())
        raise GroupRefused("surprise", f"{mean:.1f} nats per token above this node's entropy")
    slack = burst_slack(policy.vocab_size) if checks.burst_slack is None else checks.burst_slack
    weights = [burst_weight(each, slack) for each in excess]
    best = [i for i, reward in enumerate(rewards) if reward == max(rewards)]
    if not any(weights[i] > 0 for i in best):
        raise GroupRefused(
            "surprise", "its best answers have parts that this node hardly ever samples"
        )
    return weights


def compare(
    group: ExternalGroup,
    local: Sequence[Sequence[float]],
    policy: PolicyText,
    checks: ExternalChecks,
) -> None:
    """Compare the sender's log-probabilities with the own ones.

    Sums are compared for every sender, since they do not depend on the tokenizer. Single tokens are
    compared too if the sender has the same model and tokenizer.

    Args:
        local: (G, T_i) own log-probabilities at the sender's temperature.

    Raises:
        GroupRefused: They differ too much.
    """
    completions, tolerance = group.group.completions, checks.spot_check_tolerance
    gaps = [
        abs(sum(row) - c.logprob) / max(len(row), 1)
        for row, c in zip(local, completions, strict=True)
    ]
    if not statistics.median(gaps) <= tolerance:
        raise GroupRefused("spot_check")
    if _has_own_model(group, policy):
        own = torch.tensor([x for row in local for x in row])
        packed = [x for c in completions for x in unpack_logprobs(c.logprobs).tolist()]
        if not spot_check(own, torch.tensor(packed), tolerance):
            raise GroupRefused("spot_check")


def _has_own_model(group: ExternalGroup, policy: PolicyText) -> bool:
    return (
        group.group.model == policy.fingerprint and group.group.tokenizer == policy.tokenizer_hash
    )


def _scored(
    score: Score, groups: list[list[Row]], temperature: float
) -> list[list[RowScores] | GroupRefused]:
    """Score all groups in one pass. If it fails, score each group separately, and refuse those that
    fail."""
    try:
        with contained():
            flat = iter(score([row for rows in groups for row in rows], temperature))
            return [[next(flat) for _ in rows] for rows in groups]
    except GroupRefused as refused:
        if len(groups) == 1:
            return [GroupRefused(refused.outcome, refused.detail)]
    # Outside of the handler, because the exception's frames refer to tensors.
    free_memory()
    return [one for rows in groups for one in _scored(score, [rows], temperature)]
