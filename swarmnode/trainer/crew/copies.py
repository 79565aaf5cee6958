"""A whole copy of the crew's policy at a member, in int8, to sample from: a token needs no way
through the stages.

Training tolerates distance, decoding does not. After each step the member asks every stage for its
weights (`recovery.copies`), in the background, while it samples from the copy as it is; so the copy
is a step old as a rule. What it samples is recorded with the log-probabilities of the copy, and the
crew corrects for these: rounding and age weigh as any other policy's would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import structlog
import torch
import trio

from swarmnode.averaging.lora import A_SEED, freeze_a
from swarmnode.errors import DeviceError, PeerError, StateError, Unavailable
from swarmnode.pipeline import faults
from swarmnode.pipeline.commit import NO_HASH
from swarmnode.pipeline.spec import StageSpec, stage_specs
from swarmnode.pipeline.split import adapt, tensors_of
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy, lora_settings, make_accelerator
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom
from swarmnode.policy.quantised import build_quantised
from swarmnode.policy.text import PolicyText
from swarmnode.recovery.copies import Parts, install
from swarmnode.recovery.transfer import StatePeer
from swarmnode.trainer.crew.model import CrewModel

log = structlog.get_logger("swarmnode.crew")

At = tuple[int, bytes]
"""Steps taken and the step hash: two crews may have gone on differently from one."""
BASE: At = (0, NO_HASH)
AGE = 4
"""Steps by which a copy may be behind its crew and still be sampled from; else the stages sample
until it has caught up."""


class WholeCopy:
    """peer: this node's end of the state streams, while there is a crew. tokens: padded tokens of a
    batch of samples.

    `sample` and `release` are of the thread that samples; `follow` is of the crew's.
    """

    def __init__(self, model: CrewModel, peer: Callable[[], StatePeer | None], tokens: int) -> None:
        self._model = model
        self._peer = peer
        self._batcher = MicroBatcher(tokens)
        self._policy: Policy | None = None
        self._lacks = False
        """It did not fit: it is not tried again."""
        self._at = BASE
        """What is in `_policy`."""
        self._released = 0
        """How often its memory was given up: what was asked for before is not of the policy that is
        built next."""
        self._arrived: tuple[int, At, list[Parts]] | None = None
        """What is not in it yet, and what `_released` was when it was asked for."""
        self._busy = False
        self._bytes: int | None = None

    def facts(self, step: int) -> dict[str, int]:
        """The fields of StageStatus about it, when the crew is at `step`."""
        if self._policy is None:
            return {}
        return {
            "copy_age_steps": max(0, step - self._at[0]),
            **({} if self._bytes is None else {"copy_bytes": self._bytes}),
        }

    def has(self, at: At) -> bool:
        """Whether the next sample is of a policy `at` that step and hash."""
        arrived = self._arrived
        return (
            self._policy is not None
            and (arrived[1] if arrived is not None and arrived[0] == self._released else self._at)
            == at
        )

    def sample(
        self, step: int, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample] | None:
        """Completions of each prompt, for a crew at `step`. None where there is no copy that is new
        enough, or only one of steps that are lost, where its numbers are not finite, and where they
        do not fit, which gives it up."""
        if self._policy is None and not self._lacks:
            self._build()
        arrived, self._arrived = self._arrived, None
        policy = self._policy
        if policy is None:
            return None
        if arrived is not None and arrived[0] == self._released:
            for parts in arrived[2]:
                install(policy.model, parts)
            self._at = arrived[1]
        if not 0 <= step - self._at[0] <= AGE:
            return None
        seed = int(torch.randint(2**62, (1,), generator=rng))
        # a CPU draws 0.3 s for the next tokens of 64 answers, of a vocabulary of 150,000
        there = policy.random_generator(seed)
        try:
            samples = self._batcher.generate(policy, prompts, sampling, there)
        except DeviceError as error:
            log.warning(
                "the copy of the whole policy is given up: the stages sample", error=str(error)
            )
            samples, policy, self._lacks = [], None, True
        # outside the handler: the exception's frames hold the memory that has to go
        if policy is None:
            self.release()
            return None
        if all(
            math.isfinite(math.fsum(c.logprobs)) for sample in samples for c in sample.completions
        ):
            return samples
        log.warning("the copy's numbers are not finite", step=self._at[0])
        return None

    def release(self) -> None:
        """Its memory; it is built again when it is needed."""
        self._released += 1
        self._policy, self._arrived, self._at, self._bytes = None, None, BASE, None
        free_memory()

    def _build(self) -> None:
        model, started = self._model, time.monotonic()
        place = model.placement
        adapter = (
            (lambda bare: adapt(bare, lora_settings(model.policy)))
            if model.terms.lora.r
            else (lambda bare: bare)
        )
        try:
            built = build_quantised(
                model.config, tensors_of(model.directory), place.dtype, place.device, adapter
            )
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._lacks = True
            log.warning("no copy of the whole policy fits: the stages sample")
            return
        if model.terms.frozen_a:
            freeze_a(dict(built.named_parameters()), A_SEED)
        text = {one.name: getattr(model.text, one.name) for one in fields(PolicyText)}
        self._policy = Policy(
            **text,
            model=built,
            device=place.device,
            dtype=place.dtype,
            accelerator=make_accelerator(place),
        )
        log.info("a copy of the whole policy", seconds=round(time.monotonic() - started, 2))

    # ---- in the crew's thread --------------------------------------------------------------------

    async def follow(self, layers: Sequence[int], at: At) -> None:
        """Begins to fetch what a crew has that is cut into `layers` and `at` this step and hash,
        unless that is here or something is on the way."""
        peer = self._peer()
        if peer is None or self._busy or self._policy is None or self.has(at):
            return
        self._busy = peer.channel.spawn(
            partial(self._fetch, peer, stage_specs(self._model.config, layers))
        )

    async def _fetch(self, peer: StatePeer, specs: Sequence[StageSpec]) -> None:
        found: list[tuple[int, At, Parts]] = []
        released = self._released

        async def one(spec: StageSpec) -> None:
            try:
                found.append(await peer.fetch.copy(spec))
            except (PeerError, StateError, Unavailable, RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError | MemoryError) and not faults.of_device(error):
                    raise
                log.info("a stage gives no copy", stage=spec.index, reason=str(error))

        try:
            async with trio.open_nursery() as nursery:
                for spec in specs:
                    nursery.start_soon(one, spec)
            of = {at for _, at, _ in found}
            if len(found) == len(specs) and len(of) == 1:
                self._bytes = sum(size for size, _, _ in found)
                self._arrived = released, of.pop(), [parts for _, _, parts in found]
        finally:
            self._busy = False
