"""A tiny Llama in eight stages that can be lost, for `benchmarks.checkfree`.

The model runs unsplit, which computes the same (tests/unit/pipeline) in a fraction of the time; a
stage is the tensors that its `StageSpec` names. The text is Python's own language reference
(`pydoc_data`, 0.4 MB of English that every interpreter brings), one token per character.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.stages.specs import stage_specs, swapped_order

STAGES, VOCABULARY = 8, 96
WIDTH, HEADS, MLP = 32, 2, 88
WINDOW, BATCH = 32, 16
CLIP = 1.0


def encode(text: str) -> torch.Tensor:
    """Return one id per character of printable ASCII and the line end; drop the others."""
    return torch.tensor(
        [95 if c == "\n" else ord(c) - 32 for c in text if c == "\n" or 32 <= ord(c) < 127]
    )


@dataclass(frozen=True)
class Corpus:
    train: torch.Tensor
    """(characters,)"""
    held_out: torch.Tensor
    """(windows, WINDOW + 1)"""

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """Return (BATCH, WINDOW + 1), the same for every run of a seed."""
        return windows(self.train, BATCH, random.Random(f"checkfree batch {seed} {iteration}"))


def windows(stream: torch.Tensor, count: int, rng: random.Random) -> torch.Tensor:
    starts = [rng.randrange(len(stream) - WINDOW - 1) for _ in range(count)]
    return torch.stack([stream[s : s + WINDOW + 1] for s in starts])


def language(held_out: int) -> Corpus:
    """Return the text of Python's language reference. Its last tenth is held out."""
    from pydoc_data.topics import topics

    stream = encode("\n".join(topics[name] for name in sorted(topics)))
    cut = len(stream) * 9 // 10
    return Corpus(
        stream[:cut], windows(stream[cut:], held_out, random.Random("checkfree held out"))
    )


def build(seed: int) -> LlamaForCausalLM:
    """Return random weights with the paper's spread relative to the width: N(0, 0.64²/width)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=STAGES,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
        initializer_range=0.64 * WIDTH**-0.5,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True)
class StageCopy:
    """A stored copy of a stage."""

    weights: dict[str, torch.Tensor]
    """Tensors by local name, in their own memory."""
    moments: dict[str, dict[str, torch.Tensor]] | None = None
    """Adam's state of each tensor; None if it is not stored."""


@dataclass
class Staged:
    """A model in training. swapped: half of every batch runs in CheckFree+'s order."""

    model: Any
    rate: float
    swapped: bool = False
    warmup: int = 20
    """Warm-up steps at the start."""
    squared_norms: list[float] = field(default_factory=lambda: [0.0] * STAGES)
    """Squared gradient norm of each stage's layers before clipping, at the last step: the ω of the
    paper."""

    def __post_init__(self) -> None:
        self.specs = stage_specs(self.model.config, [1] * STAGES)
        self.trained: list[dict[str, nn.Parameter]] = [{} for _ in range(STAGES)]
        """Stage → local name → parameter."""
        for name, parameter in self.model.named_parameters():
            for spec in self.specs:
                local = spec.local_name(name)
                if local is not None and parameter.requires_grad:
                    self.trained[spec.index][local] = parameter
        self.optimizer = torch.optim.Adam(
            [{"params": list(t.values())} for t in self.trained], lr=self.rate, fused=True
        )
        self.factors = [1.0] * STAGES
        self.warming = [(0, self.warmup)] * STAGES
        """Stage → (steps since its optimizer was fresh, warm-up steps)."""

    # ---- training

    def step(self, tokens: torch.Tensor) -> None:
        """Take one step on tokens (BATCH, WINDOW + 1)."""
        self.optimizer.zero_grad()
        if self.swapped:
            plain, other = tokens.chunk(2)
            (0.5 * self.loss(plain)).backward()
            with self.in_swapped_order():
                (0.5 * self.loss(other)).backward()
        else:
            self.loss(tokens).backward()
        self.squared_norms = [
            float(sum(p.grad.square().sum() for n, p in stage.items() if ".layers." in n))
            for stage in self.trained
        ]
        nn.utils.clip_grad_norm_([p for stage in self.trained for p in stage.values()], CLIP)
        for i, group in enumerate(self.optimizer.param_groups):
            age, warm = self.warming[i]
            group["lr"] = self.rate * self.factors[i] * min(1.0, (age + 1) / max(1, warm))
            self.warming[i] = (age + 1, warm)
        self.optimizer.step()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean next-character loss in nats."""
        return cross_entropy(self.logits(tokens).flatten(0, 1), tokens[:, 1:].flatten())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens[:, :-1], use_cache=False).logits

    @torch.no_grad()
    def measure(self, tokens: torch.Tensor) -> float:
        return float(self.loss(tokens))

    @contextmanager
    def in_swapped_order(self) -> Iterator[None]:
        inner = self.model.model
        layers = inner.layers
        inner.layers = nn.ModuleList([layers[i] for i in swapped_order(STAGES)])
        try:
            yield
        finally:
            inner.layers = layers

    # ---- copies, losses

    def copy_of(self, stage: int) -> StageCopy:
        """Return the stage as it is now, with Adam's moments."""
        named = self.trained[stage]
        moments = {
            n: copy.deepcopy(self.optimizer.state[p])
            for n, p in named.items()
            if p in self.optimizer.state
        }
        return StageCopy({n: p.detach().clone() for n, p in named.items()}, moments)

    @torch.no_grad()
    def lose(self, stage: int) -> None:
        """Fill the stage with NaN, so that a tensor that is not restored shows."""
        for parameter in self.trained[stage].values():
            parameter.fill_(float("nan"))
            self.optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def put(
        self, stage: int, kept: StageCopy, *, factor: float | None = None, warmup: int = 0
    ) -> None:
        """Restore a stage. Without moments its optimizer is fresh and warms up.

        Args:
            factor: Factor of the learning rate from now on; None leaves it.
            warmup: Warm-up steps of a fresh optimizer.
        """
        for name, parameter in self.trained[stage].items():
            parameter.copy_(kept.weights[name])
            self.optimizer.state.pop(parameter, None)
            if kept.moments is not None and name in kept.moments:
                self.optimizer.state[parameter] = copy.deepcopy(kept.moments[name])
        if kept.moments is None:
            self.warming[stage] = (0, warmup)
        if factor is not None:
            self.factors[stage] = factor

    def checkpoint(self) -> Any:
        """Return everything that `roll_back` needs."""
        copies = [self.copy_of(i) for i in range(STAGES)]
        return copies, list(self.factors), list(self.warming), list(self.squared_norms)

    def roll_back(self, checkpoint: Any) -> None:
        copies, factors, warming, norms = checkpoint
        for i, kept in enumerate(copies):
            self.put(i, kept)
        self.factors, self.warming, self.squared_norms = list(factors), list(warming), list(norms)
