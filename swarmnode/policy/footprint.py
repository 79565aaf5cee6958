"""Estimates the memory for training a causal LM from its shape, without torch and without weights.

    weights       float32 if they are trained; the compute dtype (or 8 or 4 bits) if they are frozen
                  under an adapter
    copies        trained weights in the compute dtype, made by autocast, from forward to backward
    gradients     float32
    optimizer     Adam's two moments: 4 bytes each, or 1 byte each in 8 bits
    activations   of a micro-batch, for the backward pass; with activation checkpointing the input
                  of every layer, and all activations of one layer
    head          logits of the tokens that are computed at a time
    runtime       the process with torch, or a CUDA context

The activation coefficients are bytes per token and layer, for each dimension of the layer. They
were counted with `torch.autograd.graph.saved_tensors_hooks` on Qwen2 and Qwen3 layers of
transformers 5.23, rows without padding. `tests/unit/policy/test_footprint.py` repeats the count and
compares the total with the peak of an update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from swarmnode.model_shape import Shape

Optim = Literal["adamw", "adamw_8bit"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_BYTES: dict[Optim, float] = {"adamw": 8.0, "adamw_8bit": 2.1}
"""Bytes per trained parameter; 8-bit moments include their block scales."""
LOGITS_BYTES = {"cuda": 512 * 2**20}
"""Size of the logits that are computed at a time, counted in float32. Each piece reads the whole
output head and adds to the head's whole gradient, and with more than one piece all logits are
computed twice. A head of 384 x 32,768 with 2,048 tokens took 2.5 s in one piece and 3.8 s in eight
(one CPU thread)."""
LOGITS_BYTES_ELSEWHERE = 256 * 2**20
LOGITS_COPIES = 3
"""Number of copies of the logits at the peak of the backward pass: the logits, their gradient, and
one more that is passed to the head. On a GPU the third is the slice converted to float32."""
CACHE_ROOM = 1.25
"""Allocated bytes per byte of keys and values. The cache grows layer by layer in steps, which
fragments the allocator's memory."""
SCORES_COPIES = 5
"""Number of float32 copies of the logits of all concurrent completions while tokens are drawn."""
RUNTIME_BYTES = {"cuda": 700 * 2**20, "cpu": 415 * 2**20}
"""Memory beside all tensors. On a GPU: a CUDA context with its kernels. On a CPU: the interpreter
with torch, transformers and accelerate (368 MiB before a model is loaded), plus 30 to 50 MiB after
loading it and after the first pass."""


@dataclass(frozen=True)
class Method:
    """Training method of a policy."""

    device: str
    """Device type: cpu, cuda, …"""
    dtype: str
    """Compute dtype."""
    lora_rank: int = 0
    """Rank of the adapter; 0 trains all weights."""
    base_bits: int | None = None
    """Bits per weight of a quantised base; None if it is not quantised."""
    optim: Optim = "adamw"
    checkpointing: bool = False


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of an update."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    runtime: int

    @property
    def resident(self) -> int:
        """Bytes that are allocated between computations too."""
        return self.weights + self.gradients + self.optimizer + self.runtime

    @property
    def total(self) -> int:
        return self.resident + self.copies + self.activations + self.head


def logits_tokens(vocabulary: int, device: str) -> int:
    """Return the number of tokens whose logits are computed at a time."""
    return max(1, LOGITS_BYTES.get(device, LOGITS_BYTES_ELSEWHERE) // (4 * vocabulary))


def trained_parameters(shape: Shape, method: Method) -> int:
    return method.lora_rank * shape.edges if method.lora_rank else shape.parameters


def layer_bytes(shape: Shape, method: Method) -> float:
    """Return the bytes that one layer stores per token for the backward pass."""
    lora, norms = method.lora_rank > 0, shape.query_key_norms
    if method.dtype == "float32":
        h, q, kv, m = (16.0 if lora else 24.0), 8.25, 8.0, 16.0
        per_rank, per_norm = 28.0, (4.25 if lora else 8.25)
    else:
        h, q, kv, m = (18.0, 6.25, 4.0, 8.0) if lora else (26.0, 4.25, 4.0, 8.0)
        per_rank, per_norm = 14.5, (4.25 if lora else 6.25)
    if norms:
        q, kv = q + per_norm, kv + per_norm
    return (
        h * shape.hidden
        + q * shape.queries
        + kv * shape.keys
        + m * shape.intermediate
        + per_rank * method.lora_rank
    )


def token_bytes(shape: Shape, method: Method) -> float:
    """Return the bytes of activations per token in all layers. With activation checkpointing: the
    inputs of all layers, and all activations of one layer."""
    # Trained embeddings are float32.
    stream = shape.hidden * (ITEM_BYTES[method.dtype] if method.lora_rank else 4)
    layer = layer_bytes(shape, method)
    return (shape.layers + 1) * stream + (layer if method.checkpointing else shape.layers * layer)


def footprint(shape: Shape, method: Method, tokens: int) -> Footprint:
    """Return the memory of an update whose largest micro-batch has `tokens` tokens without
    padding."""
    trained = trained_parameters(shape, method)
    adapter = method.lora_rank > 0
    item = ITEM_BYTES[method.dtype]
    bits = 8 * item if method.base_bits is None else method.base_bits
    base = (
        (shape.parameters - shape.embeddings) * bits / 8 + shape.embeddings * item
        if adapter
        else 0.0
    )
    copies = 0 if adapter or item == 4 or method.checkpointing else item * shape.parameters
    at_once = min(tokens, logits_tokens(shape.vocabulary, method.device))
    # The gradient of a trained head or embedding is computed before it is added to the stored one.
    head = shape.vocabulary * (
        item * at_once * LOGITS_COPIES + (0 if adapter else 4 * shape.hidden)
    )
    return Footprint(
        weights=int(base + 4 * trained),
        copies=copies,
        gradients=4 * trained,
        optimizer=int(OPTIMIZER_BYTES[method.optim] * trained),
        activations=int(token_bytes(shape, method) * tokens),
        head=head,
        runtime=RUNTIME_BYTES.get(method.device, 0),
    )


def averaging_bytes(trained: int, fragments: int = 4) -> tuple[int, int]:
    """Return the bytes of host memory for averaging: (always, additional maximum).

    Always: φ, δ and the base weights for differences, in float32. Additional maximum, during an
    exchange: its copy, the partner's weights, their average, and the new φ and δ.

    Args:
        trained: Number of trained weights.
    """
    return 12 * trained, 20 * trained // fragments


def saving_bytes(trained: int, optim: Optim = "adamw") -> int:
    """Return the bytes of host memory for a save: copies of weights and moments."""
    return int((4 + OPTIMIZER_BYTES[optim]) * trained)


def host_bytes(trained: int, fragments: int = 0, optim: Optim = "adamw") -> tuple[int, int]:
    """Return the bytes of host memory for averaging and saving: (permanent, additional at peak).

    Args:
        trained: Number of trained weights.
        fragments: Number of fragments; 0 if weights are not averaged.
    """
    always, more = averaging_bytes(trained, fragments) if fragments else (0, 0)
    return always, max(more, saving_bytes(trained, optim))


def micro_batch(shape: Shape, method: Method, room: float) -> int:
    """Return the tokens of the largest micro-batch whose update fits into `room` bytes; 0 if none
    fits."""
    fixed = footprint(shape, method, 1)
    left = (
        room
        - fixed.total
        - ITEM_BYTES[method.dtype]
        * shape.vocabulary
        * (logits_tokens(shape.vocabulary, method.device) - 1)
        * LOGITS_COPIES
    )
    return max(0, int(left / token_bytes(shape, method)))


def sampling_tokens(shape: Shape, method: Method, longest: int, room: float) -> int:
    """Return the number of completions that can be sampled concurrently, times `longest`; 0 if not
    even one fits.

    Args:
        longest: Largest number of tokens of a completion with its prompt.
        room: Bytes beside the weights. Unfinished completions stay in memory during an update,
            therefore the update of one row of that length has to fit too.
    """
    row = footprint(shape, replace(method, checkpointing=True), longest)
    left = room - (row.total - row.weights - row.runtime)
    cache = CACHE_ROOM * shape.cache_bytes / 2 * ITEM_BYTES[method.dtype] * longest
    return max(0, int(left / (cache + SCORES_COPIES * 4 * shape.vocabulary))) * longest
