"""What the trainer and the network process tell each other about averaging. Tensors go by file, in the data directory. No torch.

    trainer                                      network process
    Due          an outer step is due        ─▶  pairing
                 snapshot, encode, write     ◀─  TakeSnapshot     a partner was found
    Snapshot     where it lies               ─▶  offered to the partner; the partner's is fetched
                 gate, between two steps     ◀─  JudgePayload     all of it is here, hashes verified
    Gated        taken or not, and why       ─▶  pairing
                 commit, between two steps   ◀─  CommitExchange
    Committed                                ─▶  pairing
                 forget it                   ◀─  DropExchange     any time before: it must not be applied any more
                 outer step without partner  ◀─  SoloStep

    WriteState ◀─ a neighbour wants φ and δ      StateWritten ─▶ signed and offered
    AdoptState ◀─ a neighbour's φ and δ          Adopted ─▶

Either side may be replaced at any moment: an exchange that one of them does not know is forgotten by the other.
"""

from __future__ import annotations

import msgspec

from swarmnode.weights import fingerprint, fragments
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.layout import Codec, Layout, TensorSpec, make_layout, payload_limit
from swarmnode.weights.manifest import TensorHash

DIRECTORY = "weights"
"""Below the data directory; everything in it may be deleted while the node is down."""


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What is averaged, from which everything that partners must agree on follows. Part of the trainer's Hello."""

    layout: Layout
    codec: Codec
    fragments: int
    clocks: list[int]
    """Outer steps taken, by fragment."""
    fresh: bool
    """Neither trained nor averaged: would rather have a neighbour's state."""
    lora: LoraShape | None = None

    def parts(self) -> tuple[Layout, ...]:
        """The tensors of each fragment."""
        return fragments.cut(self.layout, self.fragments)

    def fingerprint(self, swarm: bytes, base: bytes, tokenizer: bytes) -> bytes:
        """32 bytes; equal on two nodes that may average."""
        return fingerprint.fingerprint(swarm, base, tokenizer, self.layout, self.codec, self.fragments, self.lora)

    def limits(self) -> list[int]:
        """Longest payload of each fragment, bytes."""
        return [payload_limit(part, self.codec) for part in self.parts()]

    def state(self) -> Layout:
        """φ and δ as one payload's tensors."""
        return state_layout(self.layout)


def state_layout(layout: Layout) -> Layout:
    """`delta.<name>` and `phi.<name>` of every averaged tensor."""
    return make_layout((f"{half}.{spec.name}", spec.shape, "float32") for spec in layout for half in ("delta", "phi"))


def fragments_of(layout: Layout, wanted: int) -> int:
    """How many fragments a policy is cut into: `wanted`, but never more than it has layers."""
    layers = {layer for spec in layout if (layer := fragments.layer_of(spec.name)) is not None}
    return max(1, min(wanted, len(layers)))


# ---- trainer → network ----------------------------------------------------------------------------------------------------------


class Due(msgspec.Struct, frozen=True, tag="weights_due"):
    fragment: int
    clock: int
    """Outer steps that this fragment has taken."""
    step_seconds: float
    """How long a training step takes here: how long an answer of ours may take."""


class Snapshot(msgspec.Struct, frozen=True, tag="weights_snapshot"):
    session: bytes
    """Empty: made by a solo step, for whoever wants to pull."""
    fragment: int
    path: str
    """Empty: it could not be written."""
    clock: int


class Gated(msgspec.Struct, frozen=True, tag="weights_gated"):
    session: bytes
    ok: bool
    outcome: str
    """Of `outcomes.OUTCOMES`."""
    peer: str
    """Whose weights they were."""


class Committed(msgspec.Struct, frozen=True, tag="weights_committed"):
    session: bytes
    fragment: int
    clock: int
    """After it."""


class StateWritten(msgspec.Struct, frozen=True, tag="weights_state_written"):
    path: str
    """Empty: it could not be written."""
    outer_step: int
    tensors: list[TensorHash]


class Adopted(msgspec.Struct, frozen=True, tag="weights_adopted"):
    peer: str
    outcome: str
    """adopted, or why not: of `outcomes.ADOPTIONS`."""
    clocks: list[int]


# ---- network → trainer ----------------------------------------------------------------------------------------------------------


class TakeSnapshot(msgspec.Struct, frozen=True, tag="weights_take_snapshot"):
    session: bytes
    fragment: int


class JudgePayload(msgspec.Struct, frozen=True, tag="weights_judge"):
    session: bytes
    fragment: int
    peer: str
    clock: int
    """The partner's claim."""
    path: str


class CommitExchange(msgspec.Struct, frozen=True, tag="weights_commit"):
    session: bytes


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
    outer_step: int
    tensors: list[TensorHash]


FromTrainer = Due | Snapshot | Gated | Committed | StateWritten | Adopted
ToTrainer = TakeSnapshot | JudgePayload | CommitExchange | DropExchange | SoloStep | WriteState | AdoptState

__all__ = [
    "DIRECTORY", "AdoptState", "Adopted", "CommitExchange", "Committed", "DropExchange", "Due", "FromTrainer", "Gated", "JudgePayload",
    "ReplicaFacts", "Snapshot", "SoloStep", "StateWritten", "TakeSnapshot", "TensorSpec", "ToTrainer", "WriteState", "fragments_of",
    "state_layout",
]  # fmt: skip
