"""Messages between the trainer and the network process about averaging, and what both know of the
replica. Tensors go by file, in the data directory. No torch.

    trainer                                        network process
    OuterStepDue                                 ─▶ a partner is sought
                 copy, encode, write             ◀─ TakeSnapshot    a swap is agreed on
    SnapshotWritten                              ─▶ offered to the partner; the partner's is fetched
                 gate, probe, commit             ◀─ ApplyPayload    it is here, hashes verified
    ExchangeEnded: committed, or refused and why ─▶ the swap is over
                 forget it                       ◀─ DropExchange    it must not be applied any more
                 outer step without partner      ◀─ SoloStep

    WriteState ◀─ a neighbour wants φ              StateWritten ─▶ signed and offered
    AdoptState ◀─ a neighbour's φ                  StateAdopted ─▶

At most five messages for a swap. Either side may restart at any moment: a swap that one of them
does not know is forgotten by the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from swarmnode.p2p.reputation import COST
from swarmnode.weights import fingerprint, fragments, manifest
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.layout import Layout, payload_limit
from swarmnode.weights.manifest import TensorHash

DIRECTORY = "weights"
"""Name of the folder below the data directory; everything in it may be deleted while the node is
down."""


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What is averaged, from which everything that partners must agree on follows. Part of the
    trainer's Hello."""

    layout: Layout
    fragments: int
    outer_steps: list[int]
    """Outer steps taken, by fragment."""
    fresh: bool
    """Neither trained nor averaged: would rather have a neighbour's state."""
    lora: LoraShape | None = None

    def parts(self) -> tuple[Layout, ...]:
        """The tensors of each fragment."""
        return fragments.cut(self.layout, self.fragments)

    def blocks(self) -> bytes:
        """What is held here, packed."""
        return fragments.blocks_of(spec.name for spec in self.layout)

    def fingerprint(self, swarm: bytes, base: bytes, tokenizer: bytes) -> bytes:
        """32 bytes; equal on two nodes that may average."""
        return fingerprint.fingerprint(
            swarm, base, tokenizer, self.layout, self.fragments, self.lora
        )

    def state_fingerprint(self, swarm: bytes, base: bytes, tokenizer: bytes) -> bytes:
        """32 bytes; equal on two nodes of which one may take the other's state."""
        return fingerprint.state_fingerprint(
            swarm, base, tokenizer, self.layout, self.fragments, self.lora
        )

    def limits(self) -> list[int]:
        """Longest payload of each fragment, bytes."""
        return [payload_limit(part) for part in self.parts()]


# ---- trainer → network ---------------------------------------------------------------------------


class OuterStepDue(msgspec.Struct, frozen=True, tag="weights_due"):
    fragment: int
    outer_step: int
    """Outer steps that this fragment has taken."""
    step_seconds: float
    """Duration of a training step here, which decides how long our answers may take."""
    blocks: bytes = b""
    """What of the fragment is due, packed; empty for all of it."""


class SnapshotWritten(msgspec.Struct, frozen=True, tag="weights_snapshot"):
    session: bytes
    """Id of the swap; here and below."""
    fragment: int
    path: str
    """Empty: it could not be written."""
    outer_step: int
    """Outer steps that the fragment had taken when it was copied."""
    blocks: bytes = b""
    """What of the fragment is in it, packed."""


class ExchangeEnded(msgspec.Struct, frozen=True, tag="weights_ended"):
    session: bytes
    fragment: int
    peer: str
    """Whose weights they were; empty where the exchange was not known any more."""
    outcome: str
    """One of OUTCOMES."""
    committed: bool
    """Whether the outer step was taken with what the partner sent."""
    outer_step: int
    """Outer steps of the fragment, after it."""


class ExchangeReverted(msgspec.Struct, frozen=True, tag="weights_reverted"):
    """Held-out reward fell after exchanges, one of them with `peer`, which were taken back."""

    peer: str


class StateWritten(msgspec.Struct, frozen=True, tag="weights_state_written"):
    path: str
    """Empty: it could not be written."""
    outer_step: int
    tensors: list[TensorHash]


class StateAdopted(msgspec.Struct, frozen=True, tag="weights_adopted"):
    peer: str
    outcome: str
    """adopted, or why not: of ADOPTIONS."""
    outer_steps: list[int]


# ---- network → trainer ---------------------------------------------------------------------------


class TakeSnapshot(msgspec.Struct, frozen=True, tag="weights_take_snapshot"):
    session: bytes
    fragment: int
    blocks: bytes
    """What the partner and we hold, of this and other fragments, packed."""


class ApplyPayload(msgspec.Struct, frozen=True, tag="weights_apply"):
    """Judge a partner's weights, and commit what the gate makes of them."""

    session: bytes
    fragment: int
    peer: str
    outer_step: int
    """The partner's claim."""
    path: str
    blocks: bytes
    """As in `TakeSnapshot`, which is not sent where a copy of some seconds ago is served."""


class DropExchange(msgspec.Struct, frozen=True, tag="weights_drop"):
    session: bytes


class SoloStep(msgspec.Struct, frozen=True, tag="weights_solo"):
    fragment: int


class WriteState(msgspec.Struct, frozen=True, tag="weights_write_state"):
    pass


class AdoptState(msgspec.Struct, frozen=True, tag="weights_adopt"):
    peer: str
    """Empty: there is nothing to adopt; start as you are."""
    path: str
    """Empty: it is on its way, and worth waiting for; said again when more of it is here. Whatever
    comes of it, another message follows."""
    outer_step: int
    tensors: list[TensorHash]


FromTrainer = (
    OuterStepDue | SnapshotWritten | ExchangeEnded | ExchangeReverted | StateWritten | StateAdopted
)
ToTrainer = TakeSnapshot | ApplyPayload | DropExchange | SoloStep | WriteState | AdoptState

SendToTrainer = Callable[[ToTrainer], bool]
"""Returns False where there is no trainer."""


# ---- what becomes of a partner's weights: closed sets, each a metric's label ---------------------

PROOF: Final = COST
"""What a proved lie costs a peer's standing."""

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
"""Outcomes that are not the partner's fault. All others without a commit lengthen its backoff
(`exchange.PeerBackoff`)."""
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


# ---- the network process's view of the replica ---------------------------------------------------


class LocalReplica:
    """One object for the life of the service; `facts` is None while there is no trainer, or it
    averages nothing."""

    def __init__(self) -> None:
        self.facts: ReplicaFacts | None = None
        self.fingerprint = b""
        """32 bytes; equal on two nodes that may average what both hold."""
        self.state_fingerprint = b""
        """32 bytes; equal on two nodes that hold the same and may average it."""
        self.blocks = b""
        """What is held here, packed."""
        self.limits: list[int] = []
        """Longest payload of each fragment, bytes."""
        self.outer_steps: list[int] = []
        """Outer steps taken, by fragment."""

    def start(self, facts: ReplicaFacts, swarm: bytes, base: bytes, tokenizer: bytes) -> None:
        """A trainer has said Hello."""
        self.facts, self.blocks = facts, facts.blocks()
        self.fingerprint, self.state_fingerprint = (
            of(swarm, base, tokenizer) for of in (facts.fingerprint, facts.state_fingerprint)
        )
        self.limits, self.outer_steps = facts.limits(), list(facts.outer_steps)

    def stop(self) -> None:
        self.facts = None

    @property
    def least_outer_step(self) -> int:
        """Outer steps of the fragment that has fewest."""
        return min(self.outer_steps, default=0)

    @property
    def writing_seconds(self) -> float:
        """As `manifest.writing_seconds`, of what is averaged here; 0 while that is nothing."""
        return manifest.writing_seconds(self.facts.layout) if self.facts is not None else 0.0

    def has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.limits)

    def within(self, blocks: bytes, fragment: int) -> bytes:
        """Those of `blocks` that are in `fragment`; packed, both."""
        return fragments.within(blocks, fragment, len(self.limits)) if self.has(fragment) else b""
