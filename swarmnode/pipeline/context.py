"""What all parts of a member work with: its stage, its links, where in the crew's life it is, and
what it refused. Torch."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from swarmnode.errors import BadMessage
from swarmnode.pipeline import faults, frames
from swarmnode.pipeline.activations import decode
from swarmnode.pipeline.commit import Participant
from swarmnode.pipeline.compute import Compute
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import ActivationCodec, Place
from swarmnode.pipeline.links import Links
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.runtime import StageRuntime


@dataclass(frozen=True)
class CrewSettings:
    """What all members of a crew agree on."""

    base: bytes
    """32 bytes: fingerprint of the policy that training began with."""
    codec: ActivationCodec = "bfloat16"
    gradient_codec: ActivationCodec = "bfloat16"
    swapped: bool = False
    """CheckFree+: half of the micro-batches of a step with the first two and the last two stages
    exchanged."""
    learning_rate: float = math.inf
    """This node's own bound: no stage here takes a step with more, whatever the head says."""


@dataclass
class StageContext:
    runtime: StageRuntime
    links: Links
    fence: Fence
    settings: CrewSettings
    compute: Compute
    participant: Participant
    observers: list[Observer] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Frames that passed their header and then were not what they said, by reason."""

    @property
    def index(self) -> int:
        return self.runtime.spec.index

    @property
    def stages(self) -> int:
        return self.runtime.spec.stages

    @property
    def place(self) -> Place:
        p = self.fence.place
        return Place(p.crew, p.stage, self.participant.step)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: the fingerprint of the policy that all stages together are at this step."""
        return frames.policy_fingerprint(self.settings.base, self.place, self.settings.codec)

    def activations(self, body: bytes, rows: int, codec: ActivationCodec) -> torch.Tensor:
        """(rows, H) on the device. Raises BadMessage, also for another codec than the crew's."""
        if codec != self.settings.codec:
            raise BadMessage(
                "schema", f"activations in {codec}, and the crew's are {self.settings.codec}"
            )
        return decode(body, rows, self.runtime.hidden_size, codec).to(self.runtime.device)

    @contextlib.contextmanager
    def caught(self, cannot: Callable[[frames.RefusalReason], None]) -> Iterator[None]:
        """What work may fail by is counted, and passed on with its reason by `cannot`."""
        try:
            yield
        except BadMessage as error:
            self.refused[error.reason] += 1
            cannot(_reason_of(error))
        except ValueError:  # `encode`: our own numbers are not finite
            self.refused["not_finite"] += 1
            cannot("not_finite")
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self.refused[faults.DEVICE] += 1
            cannot("device")


def _reason_of(error: BadMessage) -> frames.RefusalReason:
    match error.reason:
        case "session" | "fingerprint" | "rows" as reason:
            return reason
    return "frame"
