"""The closed set of reasons for which a group is refused. Each is a metric label with a verdict.

    IGNORE  nobody to blame: too old, seen before, too much for now
    REJECT  no honest, current node sends this: it costs its author reputation, and its holder where
            no author signed it

Holders apply the same checks, so REJECT is only for what all honest nodes of a swarm see alike. A
node whose clock or memory differs must not blame its neighbour for the difference.
"""

from __future__ import annotations

import enum
from typing import Final


class Verdict(enum.Enum):
    """Whether a refusal costs reputation."""

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
    "signature": Verdict.REJECT,  # another swarm's frames land here: the swarm id is signed
    "own": Verdict.IGNORE,
    "duplicate": Verdict.IGNORE,
    # a node restored to its last saved step repeats its counter; not a crime
    "sequence_reused": Verdict.IGNORE,
    "greylisted": Verdict.IGNORE,
    "rate": Verdict.IGNORE,
    # windows
    "stale": Verdict.IGNORE,
    "future": Verdict.IGNORE,  # clocks are wrong more often than they lie
    "outdated": Verdict.IGNORE,
    # the question
    "seed": Verdict.REJECT,
    # tasks and versions are hashed into the swarm id, and the swarm id is signed
    "unknown_task": Verdict.REJECT,
    "unknown_version": Verdict.REJECT,
    # task and version are ours and the sender's, so it generated what nobody can
    "unregenerable": Verdict.REJECT,
    # the task version, which is ours and the sender's, fixes how many turns an episode has
    "turns": Verdict.REJECT,
    # group size, sampling or model against the manifest, which everybody has
    "agreement": Verdict.REJECT,
    # the answers
    # more text than its tokens can hold, or a sum of log-probabilities that is not their sum
    "tokens": Verdict.REJECT,
    # honest for a node with longer completions, but we will not train on it
    "too_long": Verdict.IGNORE,
    "charset": Verdict.IGNORE,
    # of our own model, without what it was sampled as: honest where that was too long to send
    "no_ids": Verdict.IGNORE,
    # the replay of an episode ends elsewhere: two versions of a library may differ
    "trajectory": Verdict.IGNORE,
    "zero_advantage": Verdict.IGNORE,
    # this node
    "busy": Verdict.IGNORE,
    "scorer": Verdict.IGNORE,
    "pool_full": Verdict.IGNORE,
    "internal": Verdict.IGNORE,  # a defect here: counted, logged, never a peer's fault
    # against its listing
    "mismatch": Verdict.REJECT,  # not the group that was listed
    # what the trainer found
    "forged_ids": Verdict.REJECT,  # token ids that do not spell the text that earned the reward
    # against our own policy, which may be the one that is far from everybody else's
    "spot_check": Verdict.IGNORE,
    "surprise": Verdict.IGNORE,  # the same
    # a token that is rare in own rewarded answers: a mark, or another notation of a right answer
    "drift": Verdict.IGNORE,
    # a policy may sample one; what it spells then is not what it is trained on
    "special_ids": Verdict.IGNORE,
    "temperature": Verdict.IGNORE,
    "untokenizable": Verdict.IGNORE,
    "too_large": Verdict.IGNORE,
    # our model raised an exception on it, or made something of it that is not a number: a defect
    # here, or of the model
    "failed": Verdict.IGNORE,
    "no_gradient": Verdict.IGNORE,
}
"""Reason → verdict. A reason outside this set is a KeyError in our own code, never a label made by
a peer."""
