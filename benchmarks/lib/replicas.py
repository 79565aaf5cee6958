"""Replicas of a tiny Llama in one tensor each, and unlike shards of text, for benchmarks.noloco.

R replicas, B windows, T tokens, D hidden, H heads, F MLP, V vocabulary. Every parameter is (R, …):
one batched matrix product computes a layer of all replicas, and gradients stay apart because no
operation mixes along R.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from importlib import resources

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tools.build_tiny import SETTINGS, questions

D, HEADS, LAYERS, F, T = 40, 4, 4, 112, 32
EOS = 1
TRAIN_BLOCK, HELD_OUT_BLOCK, PROBE_BLOCK = 10, 11, 12

Parameters = dict[str, torch.Tensor]


def vocabulary() -> Tokenizer:
    """Return the embedded policy's tokenizer: 115 tokens, one per fixed phrase of a task."""
    return Tokenizer.from_str(
        (resources.files("swarmnode.policy") / "embedded" / "tokenizer.json").read_text(
            encoding="utf-8"
        )
    )


def initial(seed: int, replicas: int, size: int) -> Parameters:
    """Return equal replicas, since a swarm starts from one base policy."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape, std: torch.randn(*shape, generator=rng) * std
    one = {"embed.weight": normal(size, D, std=0.02), "norm.weight": torch.ones(D)}
    for i in range(LAYERS):
        one |= {
            f"layers.{i}.attention_norm": torch.ones(D),
            f"layers.{i}.qkv": normal(D, 3 * D, std=D**-0.5),
            f"layers.{i}.out": normal(D, D, std=(2 * LAYERS * D) ** -0.5),
            f"layers.{i}.mlp_norm": torch.ones(D),
            f"layers.{i}.up": normal(D, 2 * F, std=D**-0.5),
            f"layers.{i}.down": normal(F, D, std=(2 * LAYERS * F) ** -0.5),
        }
    return {name: p.expand(replicas, *p.shape).clone() for name, p in one.items()}


def losses(parameters: Parameters, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss of each replica in nats: tokens (R, B, T + 1) → (R,)."""
    r, b, t = tokens[:, :, 1:].shape
    flat = tokens[:, :, :-1].reshape(r, b * t)
    # (R, BT, D)
    x = torch.stack(
        [w[ids] for w, ids in zip(parameters["embed.weight"].unbind(), flat.unbind(), strict=True)]
    )
    cos, sin = _rotation(t)
    for i in range(LAYERS):
        p = lambda name, i=i: parameters[f"layers.{i}.{name}"]
        qkv = torch.bmm(_norm(x, p("attention_norm")), p("qkv")).view(
            r * b, t, 3, HEADS, D // HEADS
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # (RB, H, T, D/H)
        mixed = scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(r, b * t, D), p("out"))
        gate, up = torch.bmm(_norm(x, p("mlp_norm")), p("up")).chunk(2, -1)
        x = x + torch.bmm(silu(gate) * up, p("down"))
    # (R, BT, V)
    logits = torch.bmm(
        _norm(x, parameters["norm.weight"]), parameters["embed.weight"].transpose(1, 2)
    )
    each = cross_entropy(logits.flatten(0, 1), tokens[:, :, 1:].reshape(-1), reduction="none")
    return each.view(r, b * t).mean(1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight[:, None]


def _rotation(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = D // HEADS // 2
    angles = torch.arange(t)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass(frozen=True)
class Text:
    """Token streams by task: question, answer, end, question, …"""

    train: list[torch.Tensor]
    held_out: torch.Tensor
    """(W, T + 1), all tasks equally often."""
    probe: torch.Tensor
    """(W, T + 1), all tasks equally often; questions neither trained on nor held out."""
    vocabulary: int


def read_text(per_task: int, windows: int, probe_windows: int) -> Text:
    """Return demonstrations of the nine tasks. A window starts anywhere in its task's stream."""
    tokenizer = vocabulary()
    rng = random.Random("noloco windows")

    def streams(count: int, block: int) -> list[torch.Tensor]:
        ids: dict[str, list[int]] = {task: [] for task in SETTINGS}
        for q in questions(SETTINGS, count, block):
            ids[q.task] += [
                *tokenizer.encode(q.prompt + q.answer, add_special_tokens=False).ids,
                EOS,
            ]
        return [torch.tensor(stream) for stream in ids.values()]

    held_out = streams(max(60, per_task // 5), HELD_OUT_BLOCK)
    probe = streams(60, PROBE_BLOCK)
    return Text(
        streams(per_task, TRAIN_BLOCK),
        torch.stack([window(held_out[i % len(held_out)], rng) for i in range(windows)]),
        torch.stack([window(probe[i % len(probe)], rng) for i in range(probe_windows)]),
        tokenizer.get_vocab_size(),
    )


def window(stream: torch.Tensor, rng: random.Random) -> torch.Tensor:
    start = rng.randrange(len(stream) - T - 1)
    return stream[start : start + T + 1]


def batches(
    text: Text, replicas: int, steps: int, batch: int, own_share: float, seed: int
) -> torch.Tensor:
    """Return (steps, R, batch, T + 1). Replica i draws task i with probability `own_share`, else
    any task."""
    rng = random.Random(f"noloco batches {seed}")
    tasks = len(text.train)
    draw = lambda i: text.train[i % tasks if rng.random() < own_share else rng.randrange(tasks)]
    return torch.stack(
        [
            torch.stack(
                [torch.stack([window(draw(i), rng) for _ in range(batch)]) for i in range(replicas)]
            )
            for _ in range(steps)
        ]
    )


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Return the rate of a linear warm-up and a cosine to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))
