"""What state transfers carry, in bytes and back, and how long each part of a stage is. Torch."""

from __future__ import annotations

import numpy as np
import torch

from swarmnode.errors import BadMessage
from swarmnode.pipeline.activations import decode, encode
from swarmnode.pipeline.frames import ActivationCodec
from swarmnode.pipeline.learning import batch_of
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.work import MicroBatch
from swarmnode.recovery.state import Tensors, by_name
from swarmnode.recovery.synthesis import end_names
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire.tensors import pack_logprobs


def layers_layout(layout: Layout) -> Layout:
    """What CheckFree takes from a neighbour."""
    return tuple(spec for spec in layout if ".layers." in spec.name)


def ends_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Embedding, or norm and head."""
    names = set(end_names(spec))
    return tuple(tensor for tensor in layout if tensor.name in names)


def tied_layout(spec: StageSpec, layout: Layout) -> Layout:
    """The tied embedding by this end's name for it; empty where it is not trained."""
    name = "model.embed_tokens.weight" if spec.has_embedding else "lm_head.weight"
    return tuple(tensor for tensor in layout if tensor.name == name)


def pack_floats(tensors: Tensors, layout: Layout) -> bytearray:
    """It takes 4 bytes per weight, and a tensor more."""
    body = bytearray(4 * elements(layout))
    flat, at = np.frombuffer(body, "<f4"), 0
    for spec in layout:
        flat[at : at + spec.elements] = (
            tensors[spec.name].detach().to("cpu", torch.float32).reshape(-1).numpy()
        )
        at += spec.elements
    return body


def read_floats(body: bytes | bytearray, layout: Layout) -> dict[str, torch.Tensor]:
    """float32 on the host; the length was checked. Raises BadMessage: not_finite."""
    flat = torch.from_numpy(np.frombuffer(body, "<f4").copy())
    if not bool(torch.isfinite(flat).all()):
        raise BadMessage("not_finite", "weights")
    return by_name(flat, layout)


def run_one(runtime: StageRuntime, work: MicroBatch, x: bytes, codec: ActivationCodec) -> bytes:
    """One micro-batch through one stage, without gradient: activations in the crew's codec in (none
    on stage 0), the same out; at the tail log-probabilities of the completion tokens, f32.

    Raises BadMessage for activations that are none, ValueError where the stage's own numbers are
    not finite.
    """
    batch = batch_of(work, runtime.device)
    entered = (
        None
        if runtime.spec.has_embedding
        else decode(x, work.rows, runtime.hidden_size, codec).to(runtime.device)
    )
    if not runtime.spec.has_head:
        return encode(runtime.forward(batch, entered), codec)
    logprobs = (
        runtime.score(batch, entered, work.temperature)[0][batch.completion_mask].float().cpu()
    )
    if not bool(torch.isfinite(logprobs).all()):
        raise ValueError("a log-probability is not finite")
    return pack_logprobs(logprobs.numpy())
