"""Messages between the trainer and the network process about averaging, and the facts about the
replica that both need. Tensors travel as files in the data directory. No torch.

    trainer                                        network process
    OuterStepDue                                 ─▶ find a partner
                 copy, encode, write             ◀─ TakeSnapshot    a peer and this node agreed
    SnapshotWritten                              ─▶ offer the file, fetch the partner's
                 gate, probe, commit             ◀─ ApplyPayload    the partner's file is verified
    SwapEnded: committed, or refused and why     ─▶ end the swap
                 forget the swap                 ◀─ DropSwap        the swap has failed
                 outer step without a partner    ◀─ SoloStep

                 write φ                         ◀─ WriteState      a neighbour requests φ
    StateWritten                                 ─▶ offer φ
                 take a neighbour's φ            ◀─ AdoptState
    StateAdopted                                 ─▶

A swap takes at most five messages. Either process may restart at any time: a process ignores
messages about a swap that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from swarmnode.p2p.reputation import COST
from swarmnode.weights import fingerprint, fragments
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.layout import Codec, Layout, payload_limit

DIRECTORY = "weights"
"""Folder below the data directory. Its files may be deleted while the node is stopped."""

MOST_SWAPS: Final = 4
"""Maximum number of swaps under way, each of another fragment. Each stores a copy of its
fragment."""
STATE_CODEC: Final[Codec] = "bfloat16"
"""Codec of a state. Its error is about as large as the difference between replicas late in
training. δ is not sent: a few outer steps restore it."""
WRITTEN_PER_SECOND: Final = 1e8
"""Least bytes per second that a trainer rounds, hashes and writes while it trains."""


def writing_seconds(layout: Layout) -> float:
    """Return the time that a neighbour needs to write a state of this layout, seconds."""
    return payload_limit(layout, STATE_CODEC) / WRITTEN_PER_SECOND


class ReplicaFacts(msgspec.Struct, frozen=True):
    """The averaged tensors. The fingerprint that partners compare follows from them. Part of the
    trainer's Hello."""

    layout: Layout
    fragments: int
    outer_steps: list[int]
    """Outer steps taken, by fragment: of the block with the fewest."""
    fresh: bool
    """True if the replica has neither trained nor averaged, so that it can take a neighbour's
    state."""
    lora: LoraShape | None = None
    """None if whole weights are averaged."""

    def parts(self) -> tuple[Layout, ...]:
        """Return the tensors of each fragment."""
        return fragments.cut(self.layout, self.fragments)

    def blocks(self) -> bytes:
        """Return the blocks of this replica, as a bitmask (`fragments.pack`)."""
        return fragments.blocks_of(spec.name for spec in self.layout)

    def fingerprint(self, swarm: bytes, base: bytes, tokenizer: bytes) -> bytes:
        """Return 32 bytes that are equal on two nodes that may average."""
        return fingerprint.fingerprint(
            swarm, base, tokenizer, self.layout, self.fragments, self.lora
        )

    def limits(self) -> list[int]:
        """Return the longest payload of each fragment, bytes."""
        return [payload_limit(part) for part in self.parts()]


# ---- trainer → network ---------------------------------------------------------------------------


class OuterStepDue(msgspec.Struct, frozen=True, tag="weights_due"):
    """An outer step of some blocks of a fragment is due."""

    fragment: int
    outer_step: int
    """Outer steps that this fragment has taken."""
    step: int
    """Training steps (inner steps) that this node has taken. The network process measures their
    pace by it."""
    step_seconds: float
    """Duration of the last training step, for the time limits of a swap until the pace is
    measured."""
    blocks: bytes
    """The due blocks, as a bitmask (`fragments.pack`)."""


class SnapshotWritten(msgspec.Struct, frozen=True, tag="weights_snapshot"):
    """The copy for a swap is encoded and written."""

    session: bytes
    """Id of the swap, as in all messages below."""
    fragment: int
    path: str
    """Empty if the copy could not be written."""
    outer_step: int
    """Outer steps that the blocks had taken when they were copied."""


class SwapEnded(msgspec.Struct, frozen=True, tag="weights_ended"):
    """The trainer's part of a swap is over."""

    session: bytes
    fragment: int
    peer: str
    """The partner; empty if the trainer did not know the swap."""
    outcome: str
    """One of OUTCOMES."""
    committed: bool
    """True if an outer step was taken: with the average, or with this node's weights alone if the
    outcome is `lagging`."""
    outer_step: int
    """Outer steps of the fragment after the swap."""


class StateWritten(msgspec.Struct, frozen=True, tag="weights_state_written"):
    """The state for neighbours is written."""

    path: str
    """Empty if the state could not be written."""
    outer_step: int


class StateAdopted(msgspec.Struct, frozen=True, tag="weights_adopted"):
    """The trainer has taken a neighbour's state, or refused it."""

    peer: str
    outcome: str
    """One of ADOPTIONS."""
    outer_steps: list[int]
    """Outer steps by fragment, afterwards."""


# ---- network → trainer ---------------------------------------------------------------------------


class TakeSnapshot(msgspec.Struct, frozen=True, tag="weights_take_snapshot"):
    """Copy and encode the weights for a swap."""

    session: bytes
    fragment: int
    blocks: bytes
    """The swapped blocks of the fragment, as a bitmask (`fragments.pack`)."""


class ApplyPayload(msgspec.Struct, frozen=True, tag="weights_apply"):
    """Check a partner's weights with the gate, and commit θ̄ if they pass."""

    session: bytes
    fragment: int
    peer: str
    outer_step: int
    """The partner's claim."""
    path: str


class DropSwap(msgspec.Struct, frozen=True, tag="weights_drop"):
    """Forget a swap: it has failed."""

    session: bytes


class SoloStep(msgspec.Struct, frozen=True, tag="weights_solo"):
    """Take the outer step of some blocks of a fragment without a partner."""

    fragment: int
    blocks: bytes
    """As in `TakeSnapshot`."""


class WriteState(msgspec.Struct, frozen=True, tag="weights_write_state"):
    """Write φ to a file for neighbours."""


class AdoptState(msgspec.Struct, frozen=True, tag="weights_adopt"):
    """Take the state of a neighbour."""

    peer: str
    """Empty if there is no state to take: start with the own weights."""
    path: str
    """Empty while the state is being fetched. A message with a path or without a peer follows."""
    outer_step: int


FromTrainer = OuterStepDue | SnapshotWritten | SwapEnded | StateWritten | StateAdopted
ToTrainer = TakeSnapshot | ApplyPayload | DropSwap | SoloStep | WriteState | AdoptState

SendToTrainer = Callable[[ToTrainer], bool]
"""Returns False if no trainer is connected."""
JOIN_SECONDS: Final = 15.0
"""Time for which a node without state waits for a neighbour's state, before it starts from the base
policy."""


# ---- outcomes of a partner's weights: closed sets, each a metric's label -------------------------

PROOF: Final = COST
"""Cost in reputation of a proven lie."""

OUTCOMES: Final[dict[str, float]] = {
    "accepted": 0.0,  # the only one with which the partner's weights are averaged into this node's
    "lagging": 0.0,  # too many outer steps behind this node: served, averaged with weight 0
    "payload": PROOF,  # refused by `payload` or `codecs`
    "shape": PROOF,  # other names, shapes or dtypes
    "bounds": PROOF,
    "not_finite": PROOF,
    "norm_ratio": PROOF,
    "probe": 0.0,
    "own_not_finite": 0.0,  # this node's weights are not finite
    "local": 0.0,  # the file is missing, or this node's φ changed during the swap
}
"""Every outcome of a swap at the trainer → its cost in the partner's reputation."""

OWN_FAULTS: Final = frozenset(("own_not_finite", "local"))
"""Outcomes that are this node's fault. All others without a commit lengthen the partner's backoff
(`network.swaps.PeerBackoff`)."""

ADOPTIONS: Final[dict[str, float]] = {
    "adopted": 0.0,
    "payload": PROOF,
    "not_finite": PROOF,
    "norm_ratio": PROOF,
    "worse": 0.0,
    "local": 0.0,
}
"""Every outcome of taking a neighbour's state → its cost in the neighbour's reputation."""


class WeightsReport(msgspec.Struct, frozen=True):
    """State of averaging in the trainer, a part of its report. Totals are counted since the
    trainer's first start."""

    fragments: int = 1
    outer_step: int = 0
    """Number of outer steps of the fragment with the fewest."""
    exchanges_total: int = 0
    solo_steps_total: int = 0
    distance: float | None = None
    """‖θ_j − θ_i‖ / ‖θ_i‖ at the last exchange: the distance between replicas."""
    stall_seconds_total: float = 0.0
    """Seconds since the process started in which training stopped for the probe and commits, plus
    those in which a copy may have blocked the optimizer."""


# ---- the network process's view of the replica ---------------------------------------------------


class LocalReplica:
    """The network process's view of the replica. One object lives as long as the service; `facts`
    is None while no trainer is connected, or the trainer averages nothing."""

    def __init__(self) -> None:
        self.facts: ReplicaFacts | None = None
        self.fingerprint = b""
        """32 bytes that are equal on two nodes that may average their common blocks."""
        self.blocks = b""
        """Blocks of this replica, as a bitmask (`fragments.pack`)."""
        self.limits: list[int] = []
        """Longest payload of each fragment, bytes."""
        self.outer_steps: list[int] = []
        """Outer steps taken, by fragment."""

    def start(self, facts: ReplicaFacts, swarm: bytes, base: bytes, tokenizer: bytes) -> None:
        """Take the facts of a trainer's Hello."""
        self.facts, self.blocks = facts, facts.blocks()
        self.fingerprint = facts.fingerprint(swarm, base, tokenizer)
        self.limits, self.outer_steps = facts.limits(), list(facts.outer_steps)

    def stop(self) -> None:
        """Forget the facts: the trainer has disconnected."""
        self.facts = None

    @property
    def least_outer_step(self) -> int:
        """Outer steps of the fragment with the fewest."""
        return min(self.outer_steps, default=0)

    @property
    def writing_seconds(self) -> float:
        """`writing_seconds` of this replica; 0 without one."""
        return writing_seconds(self.facts.layout) if self.facts is not None else 0.0

    def has(self, fragment: int) -> bool:
        """Return True if the replica has a fragment of this number."""
        return 0 <= fragment < len(self.limits)

    def within(self, blocks: bytes, fragment: int) -> bytes:
        """Return the subset of `blocks` that is in `fragment`, as a bitmask."""
        return fragments.within(blocks, fragment, len(self.limits)) if self.has(fragment) else b""
