"""A whole int8 copy of the crew's policy, to sample from. Torch.

After each step the node fetches every stage's weights in the background. Groups carry the copy's
log-probabilities, so the crew corrects for rounding and age. A fetched stage is encoded as

    adapter         bfloat16, tensor after tensor: 2 bytes per weight
    whole weights   int8 codes of each matrix with their scales, else float32; XOR the base
                    model's, deflated: a value within half a step of its row's scale
                    costs almost nothing

Each body is complete, not a difference to an earlier body, so a lost body spoils no later one.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import structlog
import torch
import trio

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values, to_bytes
from swarmnode.averaging.lora import A_SEED, freeze_a
from swarmnode.config import Config
from swarmnode.errors import BadMessage, DeviceError, PeerError, StateError, Unavailable
from swarmnode.link.client import Link
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.load import Policy, lora_settings, make_accelerator
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom
from swarmnode.policy.model import base_model
from swarmnode.policy.quantised import MOST, Int8Matrix, build_quantised, quantise
from swarmnode.policy.text import PolicyText
from swarmnode.stages.model import adapt, tensors_of
from swarmnode.stages.wire import StageSpec, is_device_error, stage_specs
from swarmnode.swarm.manifest import members_choose
from swarmnode.swarm.manifest_store import stored
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.loop import HEAD, Identity, skip_used_numbers
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.weights.layout import Layout, TensorSpec, elements

if TYPE_CHECKING:
    from swarmnode.policy.model import Model
    from swarmnode.stages.recovery import StatePeer
    from swarmnode.stages.trainer import CrewModel, MemberPolicy

log = structlog.get_logger("swarmnode.crew")

MAX_AGE = 4
"""Steps by which a copy may be behind its crew and still be sampled from. An older one is used
again when it has caught up."""


class WholeCopy:
    """A copy of the whole policy in this node's memory.

    `sample` and `release` belong to the thread that samples, `follow` to the crew's.

    Args:
        peer: returns this node's end of the state streams, while there is a crew.
        tokens: padded tokens of a batch of samples.
    """

    def __init__(self, model: CrewModel, peer: Callable[[], StatePeer | None], tokens: int) -> None:
        self._model = model
        self._peer = peer
        self._batcher = MicroBatcher(tokens)
        self._policy: Policy | None = None
        self._too_large = False
        """It did not fit and is not tried again."""
        self._step = 0
        """Steps that the weights in `_policy` have taken."""
        self._releases = 0
        """Number of calls of `release`: a fetch from before one is not installed after it."""
        self._fetched: tuple[int, int, list[Parts]] | None = None
        """Releases, step and weights of all stages, to be installed."""
        self._fetching = False
        self._bytes: int | None = None

    def facts(self, step: int) -> dict[str, int]:
        """Return the fields of StageStatus about the copy, for a crew at `step`."""
        if self._policy is None:
            return {}
        size = {} if self._bytes is None else {"copy_bytes": self._bytes}
        return {"copy_age_steps": max(0, step - self._step), **size}

    def has(self, step: int) -> bool:
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
        """Return completions of each prompt, for a crew at `step`.

        None if the copy is too old or ahead of the crew, if its numbers are not finite, or if the
        samples do not fit; in the last case the copy is released.
        """
        if self._policy is None and not self._too_large:
            self._build()
        fetched, self._fetched = self._fetched, None
        policy = self._policy
        if policy is None:
            return None
        if fetched is not None and fetched[0] == self._releases:
            for parts in fetched[2]:
                install(policy.model, parts)
            self._step = fetched[1]
        if not 0 <= step - self._step <= MAX_AGE:
            return None
        # the copy's own generator: a CPU needs 0.3 s to draw the next tokens of 64 answers
        generator = policy.random_generator(int(torch.randint(2**62, (1,), generator=rng)))
        try:
            samples = self._batcher.generate(policy, prompts, sampling, generator)
        except DeviceError as error:
            log.warning("copy of the policy released, sampling through stages", error=str(error))
            samples, policy, self._too_large = [], None, True
        # outside the handler: the exception's frames hold the memory that has to go
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
        """Free its memory. It is built again when it is needed."""
        self._releases += 1
        self._policy, self._fetched, self._step, self._bytes = None, None, 0, None
        free_memory()

    def _build(self) -> None:
        model, place, started = self._model, self._model.placement, time.monotonic()
        lora = lora_settings(model.policy) if model.terms.lora.r else None
        adapted = lambda bare: bare if lora is None else adapt(bare, lora)
        try:
            built = build_quantised(
                model.config, tensors_of(model.directory), place.dtype, place.device, adapted
            )
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._too_large = True
            log.warning("no room for a copy of the policy, sampling through stages")
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
        log.info("copy of the policy built", seconds=round(time.monotonic() - started, 2))

    # ---- in the crew's thread --------------------------------------------------------------------

    def follow(self, layers: Sequence[int], step: int) -> None:
        """Start to fetch the policy at `step` from a crew with these layers, unless it is here or a
        fetch is under way."""
        peer = self._peer()
        if peer is None or self._fetching or self._policy is None or self.has(step):
            return
        specs = stage_specs(self._model.config, layers)
        self._fetching = peer.channel.spawn(partial(self._fetch, peer, specs))

    async def _fetch(self, peer: StatePeer, specs: Sequence[StageSpec]) -> None:
        found: list[tuple[int, int, Parts]] = []
        releases = self._releases

        async def fetch_one(spec: StageSpec) -> None:
            try:
                found.append(await peer.fetch.copy(spec))
            except (PeerError, StateError, Unavailable, RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError | MemoryError) and not is_device_error(error):
                    raise
                log.info("no copy of a stage", stage=spec.index, reason=str(error))

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


class MemberSampler:
    """Sampling beside a stage: a member with a copy publishes a share of each step's groups, as any
    node does.

    Its questions continue where this node's last ones ended, as a head's or here.

    Raises:
        StateError: the saved counters are another model's.
    """

    def __init__(
        self, engine: MemberPolicy, config: Config, link: Link, scorer: Scorer, trainer: Path
    ) -> None:
        self.lineage = engine.lineage
        training, names = config.training, config.task.names
        self._engine = engine
        self._rng = engine.random_generator(training.seed)
        self._directory = trainer / HEAD
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._counters = engine.restore(self._directory, self._rng)
        skip_used_numbers(self._counters, trainer)
        self._identity = Identity(link, self._counters, config.swarm.id)
        choose = members_choose(stored(config.node.data_dir), names, training.options)
        questions = Questions(names, self._counters, choose, "curriculum" in training.options)
        self._sampler = Sampler(training, questions, engine, scorer, self._rng, self._counters)
        self._link = link
        self._groups = training.groups_per_step
        self._sampled_step = -1

    def sample(self, step: int, stages: int) -> None:
        """Publish one of `stages` shares of a step's groups, once for each step.

        Raises EngineGone, DeviceError; OSError: a full disk.
        """
        counters = self._counters
        if step == self._sampled_step or not (self._identity.adopt() or counters.peer):
            return
        self._sampled_step = step
        counters.policy_version = max(counters.policy_version, step)
        experience = self._sampler(math.ceil(self._groups / stages))
        # numbers are saved as used before they are published
        state.write(self._directory, self._engine.snapshot(self._rng, counters))
        for message in experience.messages:
            self._link.send(message)


# How a stage's weights travel for a copy.

DEFLATE_LEVEL: Final = 1
"""Higher levels take several times as long and save a few percent, since most bytes are zero."""
DEFLATE_OVERHEAD_BYTES: Final = 1024
"""Bytes that deflate may add to data that it cannot shorten, beside a thousandth of the data."""

Tensors = Mapping[str, torch.Tensor]
BaseTensors = Callable[[str], torch.Tensor]
"""Name in the whole model → tensor of the base model."""
Parts = dict[str, tuple[torch.Tensor, ...]]
"""Name in the whole model → (codes, scales) of a matrix, else (tensor,)."""


def copied(spec: StageSpec, layout: Layout) -> Layout:
    """Return what a copy has of a stage: all that is trained; a tied embedding only of stage 0."""
    twice = spec.shares_embedding and spec.has_head
    return tuple(
        tensor for tensor in layout if not (twice and tensor.name.endswith("lm_head.weight"))
    )


def copy_bytes(layout: Layout, adapter: bool) -> int:
    """Return the exact length of an adapter's copy, or the greatest length of another copy."""
    if adapter:
        return 2 * elements(layout)
    plain = sum(_size(tensor) for tensor in layout)
    return plain + plain // 1000 + DEFLATE_OVERHEAD_BYTES


def _size(tensor: TensorSpec) -> int:
    return tensor.elements + 4 * tensor.shape[0] if len(tensor.shape) == 2 else 4 * tensor.elements


@torch.no_grad()
def encode_copy(
    spec: StageSpec, weights: Tensors, layout: Layout, base: BaseTensors | None
) -> bytes:
    """Encode `weights`, named as in the stage. `base` is None for an adapter."""
    if base is None:
        return b"".join(
            to_bytes(bfloat16_bits(weights[tensor.name].float()), "<i2") for tensor in layout
        )
    deflate = zlib.compressobj(DEFLATE_LEVEL)
    out = []
    for tensor in layout:
        before, scales = _bytes(base(spec.whole(tensor.name)), None)
        now, _ = _bytes(weights[tensor.name], scales)
        out.append(deflate.compress(np.bitwise_xor(now, before).tobytes()))
    return b"".join([*out, deflate.flush()])


def _bytes(
    tensor: torch.Tensor, scales: torch.Tensor | None
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return the tensor's bytes, and the scales if it is a matrix."""
    if tensor.ndim != 2:
        return np.frombuffer(to_bytes(tensor.float(), "<f4"), np.uint8), None
    codes, chosen = quantise(tensor, None if scales is None else scales.to(tensor.device))
    return np.frombuffer(to_bytes(codes, "i1") + to_bytes(chosen, "<f4"), np.uint8), chosen


def decode_copy(
    spec: StageSpec, body: bytes | bytearray, layout: Layout, base: BaseTensors | None
) -> Parts:
    """Return the weights that `encode_copy` encoded, on the host.

    Raises:
        BadMessage: size, malformed, not_finite or bounds.
    """
    pieces: Iterator[bytes | memoryview] = (
        _split(body, layout) if base is None else _inflate(body, layout)
    )
    found: Parts = {}
    for tensor, piece in zip(layout, pieces, strict=True):
        name = spec.whole(tensor.name)
        if base is None:
            bits = torch.from_numpy(np.frombuffer(piece, "<i2").copy())
            found[name] = (_finite(bfloat16_values(bits).view(tensor.shape)),)
            continue
        raw = np.bitwise_xor(np.frombuffer(piece, np.uint8), _bytes(base(name), None)[0])
        if len(tensor.shape) != 2:
            found[name] = (_finite(torch.from_numpy(raw.view("<f4").copy()).view(tensor.shape)),)
            continue
        codes = torch.from_numpy(raw[: tensor.elements].view("i1")).view(tensor.shape)
        scales = _finite(torch.from_numpy(raw[tensor.elements :].copy().view("<f4")))
        if bool((codes < -MOST).any()) or bool((scales < 0).any()):
            raise BadMessage("bounds", "not a quantised matrix")
        found[name] = (codes, scales)
    return found


def _split(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    if len(body) != copy_bytes(layout, adapter=True):
        raise BadMessage(
            "size", f"{len(body)} bytes of an adapter of {copy_bytes(layout, adapter=True)}"
        )
    at = 0
    for tensor in layout:
        yield memoryview(body)[at : at + 2 * tensor.elements]
        at += 2 * tensor.elements


def _inflate(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    """Yield the bytes of each tensor, never more than its length, whatever `body` holds."""
    stream, rest = zlib.decompressobj(), bytes(body)
    try:
        for tensor in layout:
            piece = stream.decompress(rest, _size(tensor))
            rest = stream.unconsumed_tail
            if len(piece) != _size(tensor):
                raise BadMessage(
                    "size", f"{len(piece)} bytes of {tensor.name}, which has {_size(tensor)}"
                )
            yield piece
        if stream.decompress(rest, 1) or not stream.eof or stream.unused_data:
            raise BadMessage("size", "more than a stage")
    except zlib.error as error:
        raise BadMessage("malformed", f"does not inflate: {error}") from None


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise BadMessage("not_finite", "weights")
    return tensor


@torch.no_grad()
def install(model: Model, parts: Parts) -> None:
    """Write `parts` into the copy that `policy.quantised.build_quantised` made of the model."""
    matrices = {
        name.replace(".base_layer", ""): m
        for name, m in base_model(model).named_modules()
        if isinstance(m, Int8Matrix)
    }
    others = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    for name, tensors in parts.items():
        owner, _, last = name.rpartition(".")
        if len(tensors) == 2:
            matrices[owner].codes.copy_(tensors[0])
            matrices[owner].scales.copy_(tensors[1])
        elif last == "bias" and owner in matrices:
            bias = matrices[owner].bias
            assert bias is not None
            bias.copy_(tensors[0])
        else:
            others[name].copy_(tensors[0])
