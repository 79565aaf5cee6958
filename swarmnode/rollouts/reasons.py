"""Every way a frame or a group can end, as a closed set, so that it can be a metric label and cost what it deserves.

    ACCEPT  worth passing on
    IGNORE  not taken and not passed on, nobody to blame: late, seen before, not ours, too much for now
    REJECT  no honest, current node sends this: costs its author (or, where nobody signed it, whoever passed it on) reputation

Whoever passes a frame on has checked the same things, so REJECT is only for what every honest node of the swarm sees alike: a node with
another clock or a shorter memory must not blame its neighbour for the difference.
"""

from __future__ import annotations

import enum
from typing import Final


class Verdict(enum.Enum):
    ACCEPT = "accept"
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
    "sequence_reused": Verdict.IGNORE,  # a node restored to its last saved step repeats its counter; not a crime
    "greylisted": Verdict.IGNORE,
    "rate": Verdict.IGNORE,
    # windows
    "stale": Verdict.IGNORE,
    "future": Verdict.IGNORE,  # clocks are wrong more often than they lie
    "outdated": Verdict.IGNORE,
    # the question
    "seed": Verdict.REJECT,
    "unknown_task": Verdict.REJECT,  # tasks and versions are hashed into the swarm id, and the swarm id is signed
    "unknown_version": Verdict.REJECT,
    "unregenerable": Verdict.REJECT,  # task and version are ours and the sender's, so it generated what nobody can
    "agreement": Verdict.REJECT,  # group size, sampling or model against the manifest, which everybody has
    # the answers
    "tokens": Verdict.REJECT,  # more text than its tokens can hold, or a sum of log-probabilities that is not their sum
    "too_long": Verdict.IGNORE,  # honest for a node with longer completions, but we will not train on it
    "charset": Verdict.IGNORE,
    "no_ids": Verdict.IGNORE,  # of our own model, without what it was sampled as: honest where that was too long to send
    "zero_advantage": Verdict.IGNORE,
    # this node
    "busy": Verdict.IGNORE,
    "scorer": Verdict.IGNORE,
    "pool_full": Verdict.IGNORE,
    "internal": Verdict.IGNORE,  # a defect here: counted, logged, never a peer's fault
    # announced groups
    "fetch_timeout": Verdict.IGNORE,
    "fetch_failed": Verdict.IGNORE,
    "fetch_unknown": Verdict.IGNORE,
    "fetch_busy": Verdict.IGNORE,
    "mismatch": Verdict.REJECT,  # not the bytes that its announcement named
    # what the trainer found
    "forged_ids": Verdict.REJECT,  # token ids that do not spell the text that earned the reward
    "spot_check": Verdict.IGNORE,  # against our own policy, which may be the one that is far from everybody else's
    "surprise": Verdict.IGNORE,  # the same
    "special_ids": Verdict.IGNORE,  # a policy may sample one; what it spells then is not what it is trained on
    "temperature": Verdict.IGNORE,
    "untokenizable": Verdict.IGNORE,
    "too_large": Verdict.IGNORE,
}
"""Reason → verdict. A reason outside this set is a KeyError in our own code, never a label made by a peer."""
