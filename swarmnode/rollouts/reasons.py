"""Every way a frame or a group can end, as a closed set, so that it can be a metric label and cost
what it deserves.

    ACCEPT  worth passing on
    IGNORE  not taken and not passed on, nobody to blame: late, seen before, not ours, too much for
    now
    REJECT  no honest, current node sends this: costs its author (or, where nobody signed it,
    whoever passed it on) reputation

Whoever passes a frame on has checked the same things, so REJECT is only for what every honest node
of the swarm sees alike: a node with another clock or a shorter memory must not blame its neighbour
for the difference.
"""

from __future__ import annotations

from typing import Final

from swarmnode.p2p.gossip import Validation

REASONS: Final[dict[str, Validation]] = {
    # decoding (wire.codec)
    "oversize": Validation.REJECT,
    "malformed": Validation.REJECT,
    "schema": Validation.REJECT,
    "not_finite": Validation.REJECT,
    "bounds": Validation.REJECT,
    "compression": Validation.REJECT,
    # the envelope
    "signature": Validation.REJECT,  # another swarm's frames land here: the swarm id is signed
    "own": Validation.IGNORE,
    "duplicate": Validation.IGNORE,
    # a node restored to its last saved step repeats its counter; not a crime
    "sequence_reused": Validation.IGNORE,
    "greylisted": Validation.IGNORE,
    "rate": Validation.IGNORE,
    # windows
    "stale": Validation.IGNORE,
    "future": Validation.IGNORE,  # clocks are wrong more often than they lie
    "outdated": Validation.IGNORE,
    # the question
    "seed": Validation.REJECT,
    # tasks and versions are hashed into the swarm id, and the swarm id is signed
    "unknown_task": Validation.REJECT,
    "unknown_version": Validation.REJECT,
    # task and version are ours and the sender's, so it generated what nobody can
    "unregenerable": Validation.REJECT,
    # group size, sampling or model against the manifest, which everybody has
    "agreement": Validation.REJECT,
    # the answers
    # more text than its tokens can hold, or a sum of log-probabilities that is not their sum
    "tokens": Validation.REJECT,
    # honest for a node with longer completions, but we will not train on it
    "too_long": Validation.IGNORE,
    "charset": Validation.IGNORE,
    # of our own model, without what it was sampled as: honest where that was too long to send
    "no_ids": Validation.IGNORE,
    "zero_advantage": Validation.IGNORE,
    # this node
    "busy": Validation.IGNORE,
    "scorer": Validation.IGNORE,
    "pool_full": Validation.IGNORE,
    "internal": Validation.IGNORE,  # a defect here: counted, logged, never a peer's fault
    # announced groups
    "fetch_timeout": Validation.IGNORE,
    "fetch_failed": Validation.IGNORE,
    "fetch_unknown": Validation.IGNORE,
    "fetch_busy": Validation.IGNORE,
    "mismatch": Validation.REJECT,  # not the bytes that its announcement named
    # what the trainer found
    "forged_ids": Validation.REJECT,  # token ids that do not spell the text that earned the reward
    # against our own policy, which may be the one that is far from everybody else's
    "spot_check": Validation.IGNORE,
    "surprise": Validation.IGNORE,  # the same
    # a policy may sample one; what it spells then is not what it is trained on
    "special_ids": Validation.IGNORE,
    "temperature": Validation.IGNORE,
    "untokenizable": Validation.IGNORE,
    "too_large": Validation.IGNORE,
    # our model raised an exception on it, or made something of it that is not a number: a defect
    # here, or of the model
    "failed": Validation.IGNORE,
    "no_gradient": Validation.IGNORE,
}
"""Reason → verdict. A reason outside this set is a KeyError in our own code, never a label made by
a peer."""
