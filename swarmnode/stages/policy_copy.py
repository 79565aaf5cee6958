"""The policy copy: a whole int8 copy of the crew's policy, to sample from. Torch.

`PolicyCopy` holds the copy, `MemberSampler` samples from it at a member, `encode_copy` and
`decode_copy` are the bytes of one stage. After each step the node fetches every stage's weights in
the background. Groups carry the copy's log-probabilities, so the crew corrects for rounding and
age. A fetched stage is encoded as

    adapter         bfloat16, tensor after tensor: 2 bytes per weight
    whole weights   int8 codes of each matrix with their scales, else float32; XOR those of the base
                    model, deflated: a value that changed by less than half a step of its row's
                    scale costs almost nothing

Each body is complete and does not depend on an earlier body, so a lost body spoils no later one.
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
from swarmnode.stages.model import add_adapter, tensor_reader
from swarmnode.stages.wire import StageSpec, is_device_error, stage_specs
from swarmnode.swarm.manifest import members_choose_difficulty
from swarmnode.swarm.manifest_store import load_current
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.loop import HEAD, Identity, skip_used_numbers
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.weights.layout import Layout, TensorSpec, elements

if TYPE_CHECKING:
    from swarmnode.policy.model import Model
    from swarmnode.stages.recovery import StateExchange
    from swarmnode.stages.trainer import CrewModel, MemberPolicy

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


class MemberSampler:
    """Sampler of a member that is not the head. It publishes a share of each step's groups.

    Its questions continue after this node's last questions, which it may have asked as a head.

    Args:
        engine: Engine that samples from the policy copy.
        trainer: Directory of the trainer.

    Raises:
        StateError: the saved counters belong to another model.
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
        choose = members_choose_difficulty(
            load_current(config.node.data_dir), names, training.options
        )
        questions = Questions(names, self._counters, choose, "curriculum" in training.options)
        self._sampler = Sampler(training, questions, engine, scorer, self._rng, self._counters)
        self._link = link
        self._groups = training.groups_per_step
        self._sampled_step = -1

    def sample(self, step: int, stages: int) -> None:
        """Publish `1 / stages` of a step's groups, once for each step.

        Raises:
            EngineGone: the crew has ended, or the copy is not recent enough.
            DeviceError: the samples do not fit.
            OSError: the disk is full.
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


# The bytes of a stage's weights for a policy copy.

DEFLATE_LEVEL: Final = 1
"""Level of compression. Higher levels take several times as long and save a few percent, because
most bytes are zero."""
DEFLATE_OVERHEAD_BYTES: Final = 1024
"""Deflate adds at most this and a thousandth of the data to data that it cannot shorten."""

Tensors = Mapping[str, torch.Tensor]
BaseTensors = Callable[[str], torch.Tensor]
"""Name in the whole model → tensor of the base model."""
CopyTensors = dict[str, tuple[torch.Tensor, ...]]
"""Name in the whole model → (codes, scales) of a matrix, else (tensor,)."""


def copied_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Return the tensors of a stage in a policy copy: all trained ones, except a tied embedding at
    the last stage, which stage 0 sends."""
    twice = spec.shares_embedding and spec.has_head
    return tuple(
        tensor for tensor in layout if not (twice and tensor.name.endswith("lm_head.weight"))
    )


def copy_bytes(layout: Layout, adapter: bool) -> int:
    """Return the length of an encoded stage in bytes: exact for an adapter, else the greatest."""
    if adapter:
        return 2 * elements(layout)
    plain = sum(_plain_bytes(tensor) for tensor in layout)
    return plain + plain // 1000 + DEFLATE_OVERHEAD_BYTES


def _plain_bytes(tensor: TensorSpec) -> int:
    return tensor.elements + 4 * tensor.shape[0] if len(tensor.shape) == 2 else 4 * tensor.elements


@torch.no_grad()
def encode_copy(
    spec: StageSpec, weights: Tensors, layout: Layout, base: BaseTensors | None
) -> bytes:
    """Return the encoded weights of a stage.

    Args:
        weights: Tensors by local name.
        base: Reads a tensor of the base model; None for an adapter.
    """
    if base is None:
        return b"".join(
            to_bytes(bfloat16_bits(weights[tensor.name].float()), "<i2") for tensor in layout
        )
    deflate = zlib.compressobj(DEFLATE_LEVEL)
    out = []
    for tensor in layout:
        before, scales = _tensor_bytes(base(spec.whole_name(tensor.name)), None)
        now, _ = _tensor_bytes(weights[tensor.name], scales)
        out.append(deflate.compress(np.bitwise_xor(now, before).tobytes()))
    return b"".join([*out, deflate.flush()])


def _tensor_bytes(
    tensor: torch.Tensor, scales: torch.Tensor | None
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return (bytes of the tensor, scales or None if it is not a matrix).

    Args:
        scales: Scales of the base model's matrix; None to choose them.
    """
    if tensor.ndim != 2:
        return np.frombuffer(to_bytes(tensor.float(), "<f4"), np.uint8), None
    codes, chosen = quantise(tensor, None if scales is None else scales.to(tensor.device))
    return np.frombuffer(to_bytes(codes, "i1") + to_bytes(chosen, "<f4"), np.uint8), chosen


def decode_copy(
    spec: StageSpec, body: bytes | bytearray, layout: Layout, base: BaseTensors | None
) -> CopyTensors:
    """Return the weights that `encode_copy` encoded, in host memory.

    Args:
        base: Reads a tensor of the base model; None for an adapter.

    Raises:
        BadMessage: The reason is `size`, `malformed`, `not_finite` or `bounds`.
    """
    pieces: Iterator[bytes | memoryview] = (
        _split(body, layout) if base is None else _inflate(body, layout)
    )
    found: CopyTensors = {}
    for tensor, piece in zip(layout, pieces, strict=True):
        name = spec.whole_name(tensor.name)
        if base is None:
            bits = torch.from_numpy(np.frombuffer(piece, "<i2").copy())
            found[name] = (_finite(bfloat16_values(bits).view(tensor.shape)),)
            continue
        raw = np.bitwise_xor(np.frombuffer(piece, np.uint8), _tensor_bytes(base(name), None)[0])
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
    """Yield the bytes of each tensor. Inflate at most the length of the tensor, for any `body`.

    Raises:
        BadMessage: The reason is `size` or `malformed`.
    """
    stream, rest = zlib.decompressobj(), bytes(body)
    try:
        for tensor in layout:
            piece = stream.decompress(rest, _plain_bytes(tensor))
            rest = stream.unconsumed_tail
            if len(piece) != _plain_bytes(tensor):
                raise BadMessage(
                    "size", f"{len(piece)} bytes of {tensor.name}, which has {_plain_bytes(tensor)}"
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
def install_copy(model: Model, parts: CopyTensors) -> None:
    """Write `parts` into a model that `policy.quantised.build_quantised` made."""
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
