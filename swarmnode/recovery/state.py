"""Everything of a stage that training changes, as host memory, as bytes, and back into a stage.
Torch.

    exact    weights ‖ first moments ‖ second moments ‖ counts, float32, tensor after tensor by
    name: 12 bytes per parameter
    small    weights, bfloat16: 2 bytes per parameter, each off by 2⁻⁹ of itself; the optimizer
    begins anew

Under LoRA that is the adapter, otherwise every tensor of the stage. Names are the stage's own
(`model.layers.0.…`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values, to_bytes
from swarmnode.errors import BadMessage, Incompatible
from swarmnode.pipeline.commit import NO_HASH
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.split import adapt, cut_ends, stage_config
from swarmnode.recovery.messages import Form, state_bytes
from swarmnode.weights.layout import Layout, elements, make_layout

if TYPE_CHECKING:
    from peft import LoraConfig

    from swarmnode.pipeline.worker import StageWorker

Tensors = Mapping[str, torch.Tensor]
BLOCK: Final = 2**20
"""Values that are looked at at a time."""


@dataclass(frozen=True)
class StageState:
    """One stage after `step` committed steps. Tensors are float32 on the host, by the stage's own
    names."""

    step: int
    weights: Tensors
    first: Tensors = field(default_factory=dict)
    """AdamW's moments; empty where they are not kept. Likewise `second` and `counts`."""
    second: Tensors = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    """Steps that AdamW has taken for each tensor."""
    squared_norm: float = 0.0
    factor: float = 1.0
    """The stage's learning rate is the crew's times this."""
    hash: bytes = NO_HASH
    """The step hash."""


def layout_of(model: torch.nn.Module) -> Layout:
    return make_layout(
        (name, p.shape, "float32") for name, p in model.named_parameters() if p.requires_grad
    )


def stage_layouts(
    config: PretrainedConfig, specs: Sequence[StageSpec], lora: LoraConfig | None = None
) -> tuple[Layout, ...]:
    """What is trained of every stage of a model with transformers config `config`, under peft's
    settings `lora` where given.

    Shapes only: no weights are read, no memory is taken.
    """
    layouts = []
    for spec in specs:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                stage_config(config, spec), dtype=torch.float32
            )
            cut_ends(model, spec)
            model.tie_weights()
            model = model if lora is None else adapt(model, lora)
        layouts.append(layout_of(model))
    return tuple(layouts)


def take(worker: StageWorker, only: str = "") -> StageState:
    """A copy on the host. Between two steps; writing or sending it needs the member no more. only:
    a name; else all that is trained."""
    weights, first, second, counts = {}, {}, {}, {}
    optimizer, adam = worker.optimizer, worker.optimizer.adam
    for name, parameter in trained(worker.runtime).items():
        if only not in ("", name):
            continue
        weights[name] = host_copy(parameter)
        moments = adam.state.get(parameter) if adam is not None else None
        if moments:
            first[name], second[name] = (
                host_copy(moments["exp_avg"]),
                host_copy(moments["exp_avg_sq"]),
            )
            counts[name] = float(moments["step"])
    return StageState(
        worker.participant.step,
        weights,
        first,
        second,
        counts,
        optimizer.squared_norm,
        optimizer.lr_scale.factor,
        worker.participant.hash,
    )


def take_small(worker: StageWorker) -> tuple[StageState, bytearray]:
    """Likewise, as bytes in form `small`, which are made of the live tensors: 2 for each weight.
    The state is without tensors."""
    optimizer, at, layout = worker.optimizer, worker.participant, layout_of(worker.runtime.model)
    said = StageState(
        at.step,
        {},
        squared_norm=optimizer.squared_norm,
        factor=optimizer.lr_scale.factor,
        hash=at.hash,
    )
    live = {name: parameter.detach() for name, parameter in trained(worker.runtime).items()}
    return said, encode_state(replace(said, weights=live), layout, "small")


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def trained(runtime: StageRuntime) -> dict[str, torch.Tensor]:
    """The live tensors."""
    return {name: p for name, p in runtime.model.named_parameters() if p.requires_grad}


def load_weights(runtime: StageRuntime, weights: Tensors) -> None:
    """Overwrites what is trained. Raises Incompatible for other names or shapes, or values that are
    not finite; nothing changed then."""
    own = trained(runtime)
    if weights.keys() != own.keys():
        raise Incompatible(f"weights for another stage: {sorted(weights.keys() ^ own.keys())[:3]}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise Incompatible(f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise Incompatible(f"{name} is not finite")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def load_moments(worker: StageWorker, state: StageState) -> None:
    """AdamW goes on where it was, for the tensors whose moments are there."""
    adam = worker.optimizer.adam
    if adam is None:
        return
    for name, parameter in trained(worker.runtime).items():
        if state.counts.get(name, 0.0) > 0:
            adam.state[parameter] = {
                "step": torch.tensor(state.counts[name], dtype=torch.float32),
                "exp_avg": state.first[name].to(parameter.device, parameter.dtype, copy=True),
                "exp_avg_sq": state.second[name].to(parameter.device, parameter.dtype, copy=True),
            }


def encode_state(state: StageState, layout: Layout, form: Form) -> bytearray:
    """`state_bytes(layout, form)` bytes."""
    if form == "small":
        # one that grows would be there twice at times
        body, at = bytearray(state_bytes(layout, form)), 0
        for spec in layout:  # each is there twice for a moment, and never all
            part = to_bytes(bfloat16_bits(state.weights[spec.name]), "<i2")
            body[at : at + len(part)] = part
            at += len(part)
        return body
    parts = []
    for tensors in (state.weights, state.first, state.second):
        for spec in layout:
            parts.append(
                to_bytes(tensors[spec.name], "<f4")
                if spec.name in tensors
                else bytes(4 * spec.elements)
            )
    return bytearray().join(
        [*parts, np.array([state.counts.get(spec.name, 0.0) for spec in layout], "<f4").tobytes()]
    )


def check_state(body: bytes | bytearray | memoryview, layout: Layout, form: Form) -> None:
    """Whether `decode_state` will take it, a block at a time: a neighbour keeps it as it came.
    Raises BadMessage as that does."""
    if len(body) != state_bytes(layout, form):
        raise BadMessage("size", f"{len(body)} bytes of a state of {state_bytes(layout, form)}")
    values = np.frombuffer(body, "<u2" if form == "small" else "<f4")
    weights = elements(layout)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        # bfloat16's exponent
        if (
            not ((block & 0x7F80) != 0x7F80).all()
            if form == "small"
            else not np.isfinite(block).all()
        ):
            raise BadMessage("not_finite", "a state")
        if form == "exact" and (block[max(0, 2 * weights - start) :] < 0).any():
            raise BadMessage("bounds", "a second moment or a count below zero")


def decode_state(
    body: bytes | bytearray | memoryview,
    layout: Layout,
    form: Form,
    step: int,
    squared_norm: float,
    factor: float,
) -> StageState:
    """Raises BadMessage: size, not_finite, bounds (a second moment or a count below zero)."""
    check_state(body, layout, form)
    if form == "small":
        values = bfloat16_values(torch.from_numpy(np.frombuffer(body, "<i2").copy()))
        return StageState(step, by_name(values, layout), squared_norm=squared_norm, factor=factor)
    flat, size = torch.from_numpy(np.frombuffer(body, "<f4").copy()), elements(layout)
    weights, first, second = (by_name(flat[i * size : (i + 1) * size], layout) for i in range(3))
    counts = {
        spec.name: steps
        for spec, steps in zip(layout, flat[3 * size :].tolist(), strict=True)
        if steps > 0
    }
    keep = lambda tensors: {name: tensors[name] for name in counts}
    return StageState(step, weights, keep(first), keep(second), counts, squared_norm, factor)


def by_name(flat: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Tensor after tensor: parts of `flat`, which has all their values."""
    pieces = flat.split([spec.elements for spec in layout])
    return {spec.name: piece.view(spec.shape) for spec, piece in zip(layout, pieces, strict=True)}
