"""The policy copy: a whole int8 copy of the crew's policy, to sample from. Torch.

After each step the head fetches every stage's weights in the background, as `copy_codec` encodes
them. Groups carry the copy's log-probabilities, so the crew corrects for rounding and age.
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

from swarmnode.errors import DeviceError, PeerError, StateError, Unavailable
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy, lora_settings, make_accelerator
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom
from swarmnode.policy.quantised import build_quantised
from swarmnode.policy.text import PolicyText
from swarmnode.stages.specs import StageSpec, stage_specs
from swarmnode.stages.stage_frames import is_device_error
from swarmnode.stages.trainer.copy_codec import CopyTensors, install_copy
from swarmnode.stages.trainer.crew_model import CrewModel
from swarmnode.stages.trainer.stage_model import add_adapter, tensor_reader
from swarmnode.stages.trainer.state_exchange import StateExchange
from swarmnode.weights.trainer.lora import freeze_a

log = structlog.get_logger("swarmnode.crew")

MAX_AGE = 4
"""The copy is sampled from while it is at most this many steps behind its crew."""


class PolicyCopy:
    """Copy of the whole policy in this node's memory.

    The thread that samples calls `sample` and `release`. The crew's thread calls `start_fetch`.

    Args:
        model: The model.
        exchange: Returns this node's end of the state streams; None without a crew.
        tokens: Most padded tokens of a batch of samples.
    """

    def __init__(
        self, model: CrewModel, exchange: Callable[[], StateExchange | None], tokens: int
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._batcher = MicroBatcher(tokens)
        self._policy: Policy | None = None
        self._too_large = False
        """True after the copy did not fit. It is not built again."""
        self._step = 0
        """Number of steps that the weights in `_policy` have taken."""
        self._releases = 0
        """Number of calls of `release`. A fetch that started before a release is not installed."""
        self._fetched: tuple[int, int, list[CopyTensors]] | None = None
        """(releases, step, weights of each stage) of a finished fetch."""
        self._fetching = False
        self._bytes: int | None = None
        """Bytes received for the last fetch."""

    def status_fields(self, step: int) -> dict[str, int]:
        """Return the fields of StageStatus about the copy, while the crew is at `step`."""
        if self._policy is None:
            return {}
        size = {} if self._bytes is None else {"copy_bytes": self._bytes}
        return {"copy_age_steps": max(0, step - self._step), **size}

    def is_at(self, step: int) -> bool:
        """Return True if the next sample is from the policy at `step`."""
        fetched = self._fetched
        current = fetched is not None and fetched[0] == self._releases
        return self._policy is not None and step == (
            fetched[1] if fetched is not None and current else self._step
        )

    def sample(
        self,
        step: int,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling,
        rng: torch.Generator,
    ) -> list[GroupSample] | None:
        """Return completions of each prompt, while the crew is at `step`.

        Returns:
            None if the copy is too old or newer than the crew, if its results are not finite, or if
            memory runs out. In the last case the copy is released.
        """
        if self._policy is None and not self._too_large:
            self._build()
        fetched, self._fetched = self._fetched, None
        policy = self._policy
        if policy is None:
            return None
        if fetched is not None and fetched[0] == self._releases:
            for parts in fetched[2]:
                install_copy(policy.model, parts)
            self._step = fetched[1]
        if not 0 <= step - self._step <= MAX_AGE:
            return None
        # a generator on the copy's device: a CPU needs 0.3 s to draw a token for each of 64 answers
        generator = policy.random_generator(int(torch.randint(2**62, (1,), generator=rng)))
        try:
            samples = self._batcher.generate(policy, prompts, sampling, generator)
        except DeviceError as error:
            log.warning("copy of the policy released, sampling through stages", error=str(error))
            samples, policy, self._too_large = [], None, True
        # outside the handler: the exception's frames hold the memory that is to be freed
        if policy is None:
            self.release()
            return None
        if all(
            math.isfinite(math.fsum(c.logprobs)) for sample in samples for c in sample.completions
        ):
            return samples
        log.warning("copy of the policy is not finite", step=self._step)
        return None

    def release(self) -> None:
        """Free the copy's memory. The next `sample` builds it again."""
        self._releases += 1
        self._policy, self._fetched, self._step, self._bytes = None, None, 0, None
        free_memory()

    def _build(self) -> None:
        model, place, started = self._model, self._model.placement, time.monotonic()
        lora = lora_settings(model.policy) if model.terms.lora.r else None
        adapted = lambda bare: bare if lora is None else add_adapter(bare, lora)
        try:
            built = build_quantised(
                model.config, tensor_reader(model.directory), place.dtype, place.device, adapted
            )
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._too_large = True
            log.warning("no room for a copy of the policy, sampling through stages")
            return
        freeze_a(dict(built.named_parameters()))
        text = {one.name: getattr(model.text, one.name) for one in fields(PolicyText)}
        self._policy = Policy(
            **text,
            model=built,
            device=place.device,
            dtype=place.dtype,
            accelerator=make_accelerator(place),
        )
        log.info("copy of the policy built", seconds=round(time.monotonic() - started, 2))

    # ---- in the crew's thread --------------------------------------------------------------------

    def start_fetch(self, layers: Sequence[int], step: int) -> None:
        """Start to fetch the policy at `step`, unless the copy has it or a fetch is running.

        Args:
            layers: Number of layers of each stage.
        """
        exchange = self._exchange()
        if exchange is None or self._fetching or self._policy is None or self.is_at(step):
            return
        specs = stage_specs(self._model.config, layers)
        self._fetching = exchange.channel.spawn(partial(self._fetch, exchange, specs))

    async def _fetch(self, exchange: StateExchange, specs: Sequence[StageSpec]) -> None:
        found: list[tuple[int, int, CopyTensors]] = []
        releases = self._releases

        async def fetch_one(spec: StageSpec) -> None:
            try:
                found.append(await exchange.fetch.policy_copy(spec))
            except (PeerError, StateError, Unavailable, RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError | MemoryError) and not is_device_error(error):
                    raise
                log.info(
                    "stage not fetched for the policy copy", stage=spec.index, reason=str(error)
                )

        try:
            async with trio.open_nursery() as nursery:
                for spec in specs:
                    nursery.start_soon(fetch_one, spec)
            steps = {step for _, step, _ in found}
            if len(found) == len(specs) and len(steps) == 1:
                self._bytes = sum(size for size, _, _ in found)
                self._fetched = releases, steps.pop(), [parts for _, _, parts in found]
        finally:
            self._fetching = False
