"""A tiny policy for tests: a random model of 100,000 parameters and its tokenizer, built in a tenth
of a second without a download."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

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
