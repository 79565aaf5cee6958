"""One decoding step of Llama, Mistral, Qwen2 and Qwen3, without transformers' modules.

transformers computes a step of one token in many small operations, each dispatched from Python.
With a small policy the dispatch takes longer than the arithmetic. This module writes the same
operations in sequence, for a single new token per row. Projections are called as modules, so that
adapters and quantised weights work, or use merged weights on a CPU (`merged.py`). The rotary
embedding is the model's own, so that every kind of RoPE scaling works.

A trial checks once whether the step computes the same as the model (`slots.writes_out`). Other
kinds of models, and models that fail the trial, decode with transformers' forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from swarmnode.policy.merged import MergedWeights
from swarmnode.policy.model import Policy
from swarmnode.policy.ways import sees_everything

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type` of the configurations whose forward pass equals the one below at every length; a
short trial cannot show this."""


def obstacle_to_step(policy: Policy) -> str:
    """Return the reason why the step below is not that of the model; empty if a trial decides."""
    kind = policy.base.config.model_type
    if kind not in MODEL_TYPES:
        return f"not written for models of type {kind}"
    if policy.is_spread:
        return "its layers lie on several devices"
    return "" if sees_everything(policy) else "a layer has a sliding window"


def written_step(
    policy: Policy,
    token: torch.Tensor,
    mask: torch.Tensor | None,
    position: torch.Tensor,
    cache: Cache,
    merged: MergedWeights | None = None,
) -> torch.Tensor:
    """Return the logits (N, V) of the next token of each row; see `slots.next_logits`."""
    model: Any = policy.base
    rows = len(token)
    with policy.accelerator.autocast(), policy.bypassed():
        hidden = model.model.embed_tokens(token[:, 0])  # (N, d)
        cos, sin = model.model.rotary_emb(hidden, position)  # each (N, 1, D)
        half = cos.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for number, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            size = attention.head_dim  # D
            normed = _normed(hidden, layer.input_layernorm)
            weights = merged.layers[number] if merged is not None else None
            query, key, value = (
                weights.qkv(normed)
                if weights is not None
                else (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
            )
            query = query.view(rows, -1, size)  # (N, heads, D)
            key = key.view(rows, -1, size)  # (N, key heads, D)
            value = value.view(rows, -1, 1, size)
            if hasattr(attention, "q_norm"):
                query = _normed(query, attention.q_norm)
                key = _normed(key, attention.k_norm)
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
            keys, values = cache.update(key[:, :, None], value, number)  # (N, key heads, L, D)
            # Grouped-query attention: the query heads of one key head become its query positions,
            # so that keys need not be repeated per query head.
            query = query.reshape(rows, keys.shape[1], -1, size).to(keys.dtype)
            mixed = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=attention.scaling
            )
            mixed = mixed.reshape(rows, -1)
            if weights is not None:
                hidden = hidden + weights.out(mixed)[0]
                normed = _normed(hidden, layer.post_attention_layernorm)
                gate, up = weights.gate_up(normed)
                hidden = hidden + weights.down(mlp.act_fn(gate) * up)[0]
            else:
                hidden = hidden + attention.o_proj(mixed)
                normed = _normed(hidden, layer.post_attention_layernorm)
                gated = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
                hidden = hidden + mlp.down_proj(gated)
        hidden = _normed(hidden, model.model.norm)
        logits: torch.Tensor = (
            merged.head(hidden)[0] if merged is not None else model.lm_head(hidden)
        )
    return policy.known_logits(logits)


def _normed(states: torch.Tensor, norm: Any) -> torch.Tensor:  # noqa: ANN401 - one class a model
    """Return `norm(states)`: RMSNorm over the last dimension."""
    weight = norm.weight
    return functional.rms_norm(states, weight.shape, weight, norm.variance_epsilon)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return states (N, heads, D) rotated by their positions (RoPE).

    The caller passes `sin` with its first half negated.
    """
    half = states.shape[-1] // 2
    swapped = torch.cat([states[..., half:], states[..., :half]], -1)
    return torch.addcmul(states * cos, swapped, sin)
