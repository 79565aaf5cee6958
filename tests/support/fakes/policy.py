"""A tiny policy for tests: a random model of 100,000 parameters and its tokenizer, built in a tenth
of a second without a download."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy.load import Policy, load_policy
from tools.build_tiny import build_model, build_tokenizer, save


def write_tiny_policy(directory: Path, phrases: Collection[str] = (), seed: int = 0) -> Path:
    """Write a directory for `policy.model`, in the format of `transformers`. Equal arguments
    produce equal files.

    Args:
        phrases: Each becomes one token, beside printable ASCII by character. Short prompts keep
            tests fast.
    """
    tokenizer = build_tokenizer(set(phrases))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = build_model(tokenizer)
    save(model, tokenizer, directory)
    return directory


def tiny_policy(directory: Path, phrases: Collection[str] = (), seed: int = 0) -> Policy:
    """Write the policy and load it on the CPU as a node does. `policy.generate.generate` can sample
    from it and the trainer can train it."""
    return load_policy(
        PolicyConfig(model=str(write_tiny_policy(directory, phrases, seed)), devices="cpu")
    )
