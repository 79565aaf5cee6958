"""The closed set of reasons for which a group is refused. Each is a metric label with a verdict.

    IGNORE  an honest node may send this: an old or repeated group, or too many at once
    REJECT  no honest node of this version sends this. It costs the holder reputation, and the
            author too if the signature is valid

Holders apply the same checks. REJECT is therefore only for checks with the same result on all
honest nodes of a swarm. A node with another clock or memory must not blame its neighbour.
"""

from __future__ import annotations

import enum
from typing import Final


class Verdict(enum.Enum):
    """Consequence of a refusal: IGNORE costs no reputation, REJECT does."""

    IGNORE = "ignore"
    REJECT = "reject"


REASONS: Final[dict[str, Verdict]] = {
    # decoding (wire.codec)
    "oversize": Verdict.REJECT,
    "malformed": Verdict.REJECT,
    "schema": Verdict.REJECT,
    "not_finite": Verdict.REJECT,
    "bounds": Verdict.REJECT,
    "compression": Verdict.REJECT,
    # the envelope
    "signature": Verdict.REJECT,  # also for frames of another swarm: the swarm id is signed
    "own": Verdict.IGNORE,
    "duplicate": Verdict.IGNORE,
    # a node that was restored to its last saved step repeats sequence numbers
    "sequence_reused": Verdict.IGNORE,
    "greylisted": Verdict.IGNORE,
    "rate": Verdict.IGNORE,
    # windows
    "stale": Verdict.IGNORE,
    "future": Verdict.IGNORE,  # most such clocks are wrong without intent
    "outdated": Verdict.IGNORE,
    # the question
    "seed": Verdict.REJECT,
    # tasks and versions are hashed into the swarm id, and the swarm id is signed
    "unknown_task": Verdict.REJECT,
    "unknown_version": Verdict.REJECT,
    # sender and receiver have the same task and version, so the sender could not generate it either
    "unregenerable": Verdict.REJECT,
    # the task version, which both sides share, fixes the number of turns
    "turns": Verdict.REJECT,
    # group size, sampling or model contradict the manifest, which all members have
    "agreement": Verdict.REJECT,
    # the answers
    # more text than its tokens can hold, or a sum of log-probabilities that is not their sum
    "tokens": Verdict.REJECT,
    # honest on a node with a larger limit
    "too_long": Verdict.IGNORE,
    "charset": Verdict.IGNORE,
    # sampled with this node's model, but sent without token ids: honest if these were too long
    "no_ids": Verdict.IGNORE,
    # the replay of an episode ends differently: two versions of a library may differ
    "trajectory": Verdict.IGNORE,
    "zero_advantage": Verdict.IGNORE,
    # this node
    "busy": Verdict.IGNORE,
    "scorer": Verdict.IGNORE,
    "not_pooled": Verdict.IGNORE,  # larger than its author's share of the pool, or already there
    "internal": Verdict.IGNORE,  # a defect here: counted, logged, never a peer's fault
    # against its listing
    "mismatch": Verdict.REJECT,  # another group than the listed one
    # checks of the trainer
    "forged_ids": Verdict.REJECT,  # the token ids do not decode to the text that earned the reward
    # compared with this node's policy, which may be the one that differs from all others
    "spot_check": Verdict.IGNORE,
    "surprise": Verdict.IGNORE,  # the same
    # nothing of the rewarded answers can be learned: honest for a lucky one
    "improbable": Verdict.IGNORE,
    # a token that is rare in own rewarded answers: a mark, or another notation of a right answer
    "drift": Verdict.IGNORE,
    # a policy may sample special tokens, but the text does not contain them
    "special_ids": Verdict.IGNORE,
    "temperature": Verdict.IGNORE,
    "untokenizable": Verdict.IGNORE,
    "too_large": Verdict.IGNORE,
    # the model raised an exception or returned a value that is not finite: a defect of this node
    # or its model
    "failed": Verdict.IGNORE,
    "no_gradient": Verdict.IGNORE,
}
"""Reason → verdict. Peers cannot create labels: another reason raises KeyError."""
