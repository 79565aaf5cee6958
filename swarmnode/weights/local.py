"""What the trainer and the network process tell each other about averaging. Tensors go by file, in
the data directory. No torch.

    trainer                                        network process
    OuterStepDue                                ─▶ pairing
                 copy, encode, write            ◀─ TakeSnapshot    a partner was found
    SnapshotWritten                             ─▶ offered to the partner; the partner's is fetched
                 gate, probe, commit            ◀─ ApplyPayload    all of it is here, hashes
                 verified
    ExchangeEnded: committed, or refused and why ─▶ pairing
                 forget it                      ◀─ DropExchange    any time before: it must not be
                 applied any more
                 outer step without partner     ◀─ SoloStep

    WriteState ◀─ a neighbour wants φ              StateWritten ─▶ signed and offered
    AdoptState ◀─ a neighbour's φ                  StateAdopted ─▶

Five messages at most for an exchange. Either side may be replaced at any moment: an exchange that
one of them does not know is forgotten by the other.
"""

from __future__ import annotations

import msgspec

from swarmnode.weights import fingerprint, fragments
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
    """Empty: it was made by a solo step, for whoever wants to pull."""
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
    """One of `outcomes.OUTCOMES`."""
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
    """adopted, or why not: of `outcomes.ADOPTIONS`."""
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
    """As in `TakeSnapshot`, which is not sent before a pull."""


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
