"""Weights of peers' answers by capability, as HACPO has them (arXiv 2603.02604, §3), for an arm of
`benchmarks.real`.

Of HACPO's four corrections, two change the weight of a peer's answer:

    capability   × mean reward of the peer ÷ own mean reward, over the last groups
    importance   × s², where s is the geometric mean over the tokens of own probability ÷ peer's
                 probability, at most 1; 0 if s is below LEAST_RATIO

Its baseline is a mean over the answers of all agents to one question. Here every node has its own
questions, so this correction does not exist. The bound on s does not become narrower within a
step, because a step has one update.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.lib.turns import TurnNode
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.judge import Judgement

WINDOW = 5
"""Groups of a peer, or steps of this node, in a mean reward (HACPO's K)."""
CAPABILITY = 0.5, 2.0
"""Bounds of the ratio of mean rewards, a guess: a mean of five groups varies much."""
LEAST_RATIO = 0.8


def weigh_by_capability(node: TurnNode) -> None:
    """Multiply the weights of the peers' answers that a node trains on by HACPO's."""
    external = node.loop._external
    judge = external._judge
    own: deque[float] = deque(maxlen=WINDOW)
    peers: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def judged(groups: Sequence[ExternalGroup]) -> Judgement:
        own.append(node.report.reward_own or 0.0)
        judgement = judge(groups)
        used = [group for group, outcome in judgement.outcomes if outcome == "used"]
        for group in groups:
            peers[group.peer].append(fmean(group.rewards))
        judgement.accepted = [
            replace(
                accepted,
                weights=[
                    weight
                    * capability(fmean(peers[group.peer]), fmean(own))
                    * importance(sum(local), completion.logprob, len(local))
                    for weight, local, completion in zip(
                        accepted.weights,
                        accepted.sampler_logprobs,
                        group.group.completions,
                        strict=True,
                    )
                ],
            )
            for group, accepted in zip(used, judgement.accepted, strict=True)
        ]
        return judgement

    external._judge = judged  # type: ignore[method-assign]


def capability(theirs: float, own: float) -> float:
    """Return the ratio of two mean rewards within CAPABILITY."""
    least, most = CAPABILITY
    return min(max(theirs / own, least), most) if own > 0 else most


def importance(local: float, reported: float, tokens: int) -> float:
    """Return the weight of an answer for the distance between two policies.

    Args:
        local, reported: Log-probability of the answer under the own policy and at the peer, nats.
    """
    ratio = math.exp(min(0.0, (local - reported) / max(tokens, 1)))
    return ratio**2 if ratio >= LEAST_RATIO else 0.0
