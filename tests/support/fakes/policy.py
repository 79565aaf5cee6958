"""A policy for tests: a random model of 100,000 parameters and its tokenizer, made in a tenth of a
second, downloaded from nowhere."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy.load import Policy, load_policy
from tools.build_tiny import build_model, build_tokenizer, save


def write_tiny_policy(directory: Path, phrases: Collection[str] = (), seed: int = 0) -> Path:
    """Writes what `policy.model` can point at, a directory as `transformers` reads it. `phrases`:
    each is one token of its own, beside printable ASCII character by character; a short prompt
    makes a quick test. Equal arguments make equal files."""
    tokenizer = build_tokenizer(set(phrases))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = build_model(tokenizer)
    save(model, tokenizer, directory)
    return directory


def tiny_policy(directory: Path, phrases: Collection[str] = (), seed: int = 0) -> Policy:
    """The same, loaded on the CPU as a node loads it: `policy.generate.generate` samples from it,
    and the trainer can train it."""
    return load_policy(
        PolicyConfig(model=str(write_tiny_policy(directory, phrases, seed)), devices="cpu")
    )
