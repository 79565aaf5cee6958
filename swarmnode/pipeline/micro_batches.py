"""One stage's part in training and scoring: the micro-batches that are here, forward, backward and
on to the next stage. Torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.errors import BadMessage, Refused
from swarmnode.pipeline import frames
from swarmnode.pipeline.activations import decode, encode
from swarmnode.pipeline.context import StageContext
from swarmnode.pipeline.learning import batch_of, loss_of
from swarmnode.pipeline.routes import Part, Route, Routes, arriving, returning
from swarmnode.pipeline.schedule import Limit, Schedule, Work
from swarmnode.pipeline.whereabouts import path_of
from swarmnode.pipeline.work import MicroBatch, read_micro_batch
from swarmnode.policy.logprobs import Batch
from swarmnode.wire import limits
from swarmnode.wire.tensors import pack_logprobs

KEPT = limits.STAGE_WAITING
"""Micro-batches of others whose gradient is awaited, with what an aborted attempt has left: a
schedule has no more than 32 in flight, or as many as there are stages."""


@dataclass
class Kept:
    """A micro-batch whose gradient has not come: its input, and nothing of its graph."""

    route: Route
    hop: int
    """Which visit of the route this is."""
    work: MicroBatch
    about: bytes
    batch: Batch
    x: torch.Tensor | None
    gradient: torch.Tensor | None = None


class MicroBatches:
    """finished: called on stage 0 with the number of a micro-batch whose gradient went all the way
    through.

    Raises Refused for swapped stages where there are fewer than four, or under an adapter.
    """

    def __init__(self, context: StageContext, finished: Callable[[int], None]) -> None:
        if context.settings.swapped and hasattr(context.runtime.model, "peft_config"):
            raise Refused(
                "swapped stages are for whole weights, and only an adapter is trained here"
            )
        self.schedule = Schedule(context.index, context.stages)
        self.kept: dict[tuple[int, int], Kept] = {}
        self._proposed: dict[int, bytes] | None = None
        """Micro-batch → hash of its description, of the present attempt; None until the head has
        said."""
        self._early: list[tuple[int, frames.Forward, bytes]] = []
        """What came before the proposal: of this attempt, if it came another way sooner, or left of
        the one before."""
        self._context = context
        self._finished = finished
        self.routes = Routes(context.stages, context.settings.swapped)

    async def propose(self, hashes: dict[int, bytes]) -> None:
        """The step is made of these micro-batches, whose descriptions have these hashes. What came
        before is taken up, if it is one."""
        early, self._early, self._proposed = self._early, [], hashes
        at = self._context
        for sender, frame, body in early:
            failed = lambda reason, n=frame.micro_batch, source=sender: at.links.send(
                0, frames.Failed(at.place, n, reason, source)
            )
            with at.caught(failed):
                await self.forward(sender, frame, body)

    async def forward(self, sender: int, frame: frames.Forward, body: bytes) -> None:
        """Takes it up, or scores it at once. Raises BadMessage, ValueError."""
        at = self._context
        about = body[: frame.about]
        if (
            sender != at.index
            and sum(kept.x is not None for kept in self.kept.values()) + len(self._early) >= KEPT
        ):
            raise BadMessage("bounds", "more micro-batches than are ever in flight")
        if frame.purpose == "learn":
            if self._proposed is None:
                self._early.append((sender, frame, body))
                return
            if frame.micro_batch not in self._proposed:
                return  # of an attempt that is over
            if frames.description_hash(about) != self._proposed[frame.micro_batch]:
                raise BadMessage("shape", "not the description that the head has proposed")
        work = read_micro_batch(about, frame.rows, at.links.limits, frame.purpose)
        route = self.routes.of(frame.micro_batch, frame.purpose)
        hop = arriving(route, sender, at.index)
        assert hop is not None, "see `senders`"
        x = None if hop == 0 else at.activations(body[frame.about :], frame.rows, frame.codec)
        kept = Kept(route, hop, work, about, batch_of(work, at.runtime.device), x)
        if frame.purpose == "score":
            await self._score(frame.micro_batch, kept)
        elif at.participant.may_accumulate(frame.micro_batch) and self.schedule.forward_arrived(
            (frame.micro_batch, hop), self._limit(kept)
        ):
            self.kept[frame.micro_batch, hop] = kept
            for observer in at.observers:
                observer.received(frame.micro_batch, about, sender, body[frame.about :])

    def backward(self, sender: int, frame: frames.Backward, body: bytes) -> None:
        """The gradient of what was sent on. Raises BadMessage."""
        at = self._context
        hop = returning(self.routes.of(frame.micro_batch), sender, at.index)
        assert hop is not None, "see `senders`"
        kept = self.kept.get((frame.micro_batch, hop))
        if kept is None or kept.work.rows != frame.rows:
            raise BadMessage("shape", "not a gradient that is waited for")
        gradient = decode(body, frame.rows, at.runtime.hidden_size, frame.codec)
        if self.schedule.backward_arrived((frame.micro_batch, hop)):
            kept.gradient = gradient.to(at.runtime.device)

    def path(self, micro_batch: int, purpose: frames.Purpose) -> tuple[int, ...]:
        """The stages that it visits, from the head and back to it."""
        return path_of(self.routes.of(micro_batch, purpose), returns=purpose == "learn")

    def next(self) -> Work | None:
        """What to `do` next, where there is room for what comes of it."""
        return self.schedule.next(self._blocked)

    def ready(self) -> int:
        """Pieces of work that could be done now. From any thread."""
        return self.schedule.ready(self._blocked)

    def _blocked(self, key: tuple[int, int]) -> bool:
        kept = self.kept.get(key)
        return kept is not None and self._context.links.full(kept.route[kept.hop + 1].stage)

    def _limit(self, kept: Kept) -> Limit:
        if kept.hop == len(kept.route) - 1:
            return "learn"
        return "free" if self._context.settings.swapped and kept.hop > 0 else "counted"

    async def do(self, work: Work) -> None:
        kind, (micro_batch, hop) = work
        at, kept = self._context, self.kept[micro_batch, hop]
        part = kept.route[hop].part
        before = kept.route[hop + (1 if kind == "backward" else -1 if hop else 0)].stage
        failed = lambda reason: at.links.send(
            0,
            frames.Failed(
                at.place, micro_batch, reason, at.index if reason == "device" else before
            ),
        )
        with at.caught(failed):
            if kind == "forward":
                self._pass_on(
                    micro_batch,
                    kept,
                    "learn",
                    await at.compute(lambda: at.runtime.forward(kept.batch, kept.x, part)),
                )
                return
            if kind == "learn":
                sums: list[float] = []
                gradient = await at.compute(lambda: self._learn(micro_batch, kept, sums))
            else:
                gradient = await at.compute(lambda: self._backward(kept, part))
            del self.kept[micro_batch, hop]
            if hop == min(i for i, visit in enumerate(kept.route) if visit.stage == at.index):
                at.participant.accumulated(micro_batch)
            if hop > 0:
                assert gradient is not None
                codec = at.settings.gradient_codec
                frame = frames.Backward(at.place, micro_batch, codec, kept.work.rows)
                at.links.send(kept.route[hop - 1].stage, frame, encode(gradient, codec))
            else:
                self._finished(micro_batch)
            if kind == "learn":
                at.links.send(0, frames.Learnt(at.place, micro_batch, *sums))

    def _backward(self, kept: Kept, part: Part) -> torch.Tensor | None:
        assert kept.gradient is not None
        return self._context.runtime.backward(kept.batch, kept.x, kept.gradient, part)

    def _learn(self, micro_batch: int, kept: Kept, sums: list[float]) -> torch.Tensor | None:
        at = self._context

        def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            value, parts = loss_of(kept.work, kept.batch, logprobs, entropy)
            sums.extend(parts)
            for observer in at.observers:
                observer.learnt(
                    micro_batch, logprobs.detach()[kept.batch.completion_mask].float().cpu()
                )
            return value

        return at.runtime.learn(
            kept.batch, kept.x, kept.work.temperature, loss, kept.route[kept.hop].part
        )

    async def _score(self, micro_batch: int, kept: Kept) -> None:
        at = self._context
        if not at.runtime.spec.has_head:
            self._pass_on(
                micro_batch,
                kept,
                "score",
                await at.compute(lambda: at.runtime.forward(kept.batch, kept.x)),
            )
            return
        scores = await at.compute(
            lambda: at.runtime.score(kept.batch, kept.x, kept.work.temperature)
        )
        mask = kept.batch.completion_mask
        body = b"".join(pack_logprobs(values[mask].cpu().numpy()) for values in scores)
        at.links.send(0, frames.Scores(at.place, micro_batch, int(mask.sum())), body)

    def _pass_on(
        self, micro_batch: int, kept: Kept, purpose: frames.Purpose, y: torch.Tensor
    ) -> None:
        at = self._context
        frame = frames.Forward(
            at.place, micro_batch, purpose, at.settings.codec, kept.work.rows, len(kept.about)
        )
        body, receiver = encode(y, at.settings.codec), kept.route[kept.hop + 1].stage
        at.links.send(receiver, frame, kept.about + body)
        for observer in at.observers if purpose == "learn" else ():
            observer.sent(micro_batch, receiver, body)

    def clear(self) -> None:
        self.schedule.clear()
        self.kept.clear()
        self._proposed = None
        self._early.clear()
