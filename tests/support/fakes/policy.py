"""A tiny policy for tests: a random model of 100,000 parameters and its tokenizer, built in a tenth
of a second without a download."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.build_tiny import build_model, build_tokenizer, save


def write_tiny_policy(directory: Path) -> Path:
    """Write a directory for `policy.model`, in the format of `transformers`."""
    tokenizer = build_tokenizer(set())
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build_model(tokenizer)
    save(model, tokenizer, directory)
    return directory
