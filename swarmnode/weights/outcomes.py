"""What can become of an exchange, by name: closed sets, so that each can be a metric's label. No
torch.

How a try or an exchange ended on the wire is `pairing.OUTCOMES`. What our gate made of a partner's
weights is here, with what that costs the partner's standing (`p2p.reputation`): a payload that is
not what was agreed on proves a lie. What an honest node can cause costs none, but time: weights
that make us worse, or are far away, are those of a node that learned something else, until they
prove otherwise.
"""

from __future__ import annotations

from typing import Final

from swarmnode.p2p.reputation import COST

PROOF: Final = COST
VANISHED: Final = 2.0
"""Cost of a proposal after which nothing came, from the second in a row on: once is what a crash
looks like."""

OUTCOMES: Final[dict[str, float]] = {
    "accepted": 0.0,
    "clipped": 0.0,  # accepted, shortened: honest replicas differ in speed
    "probation": 0.0,  # passed everything, mixed with weight 0
    "lagging": 0.0,  # too many outer steps behind us: served, not mixed with
    "payload": PROOF,  # what `payload` or `codecs` refused
    "names": PROOF,
    "dtype": PROOF,
    "shape": PROOF,
    "bounds": PROOF,
    "not_finite": PROOF,
    "norm_ratio": PROOF,
    "too_far": 0.0,
    "probe": 0.0,
    "lora_residual": 0.0,
    "reverted": 0.0,
    "own_not_finite": 0.0,  # our own weights are broken; nobody else's fault
    "local": 0.0,  # no file, or our weights had moved on
}
"""Every outcome of an exchange, with its cost."""

OURS: Final = frozenset(("own_not_finite", "local"))
"""Outcomes that are nobody else's fault. For all others without a commit the partner is left alone
for a while (`pairing`)."""
TAKEN: Final = frozenset(("accepted", "clipped"))
"""Outcomes after which a partner's weights are in ours."""

ADOPTIONS: Final[dict[str, float]] = {
    "adopted": 0.0,
    "payload": PROOF,
    "hash": PROOF,
    "not_finite": PROOF,
    "norm_ratio": PROOF,
    "worse": 0.0,
    "local": 0.0,
}
"""Every outcome of adopting a neighbour's state, with its cost."""
