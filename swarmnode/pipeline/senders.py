"""Which stage sends which frame to which other one. Pure; no torch.

What another one sends counts for nothing, and is not answered: who answers what it should never
have been sent looks like one that refuses.
"""

from __future__ import annotations

from swarmnode.pipeline import frames
from swarmnode.pipeline.frames import Frame
from swarmnode.pipeline.routes import Routes, arriving, returning


def sends(frame: Frame, sender: int, stage: int, stages: int, routes: Routes) -> bool:
    """Whether `sender` has such a frame for `stage` (protocol/04, 2.1). What the head is to do
    itself it sends to itself."""
    tail = stages - 1
    match frame:
        case frames.Forward():
            return arriving(routes.of(frame.micro_batch, frame.purpose), sender, stage) is not None
        case frames.Backward():
            return returning(routes.of(frame.micro_batch), sender, stage) is not None
        case frames.Prefill() | frames.Decode():
            return sender == stage - 1 or sender == stage == 0
        case frames.Learnt() | frames.Scores() | frames.Tokens():
            return (sender, stage) == (tail, 0)
        case frames.Embedding():
            return {sender, stage} == {0, tail}
        case (
            frames.Lost()
            | frames.Failed()
            | frames.Acknowledge()
            | frames.Done()
            | frames.Located()
        ):
            return stage == 0
        case _:
            return sender == 0
