"""Training defaults that depend on the model.

The embedded policy has 114,000 parameters and answers in a few tokens. Its learning rate would
spoil a real model, and it would learn nothing at a real model's. `Config` takes a value from this
table if none is set.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

EMBEDDED = "embedded"
"""Value of `policy.model` for the policy that is part of swarmnode."""
EMBEDDED_SHAPE = {
    "model_type": "llama",
    "vocab_size": 115,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
}
"""Entries of config.json that identify the embedded policy in a directory: exported after training,
or with more layers."""
CONFIG_BYTES = 1024 * 1024
"""Bytes of a config.json that are read. A longer one is not the embedded policy's."""


@dataclass(frozen=True)
class ModelDefaults:
    """Training values for one kind of model, and the limits beyond which a value does not suit
    it."""

    trained: str
    """Name of the trained part, for messages."""
    learning_rate: float
    max_completion_length: int
    """Sampled tokens."""
    spoiling_rate: float = math.inf
    """Smallest learning rate at which reinforcement learning spoils the model. Published recipes
    use 1e-6 for all weights, and 1e-5 to 1e-4 for an adapter."""
    shortest_answer: int = 1
    """Smallest sensible `max_completion_length`: a chat model writes some words before its
    answer."""

    def values(self) -> dict[str, float | int]:
        """Return the defaults by their names in `[training]`."""
        return {
            "learning_rate": self.learning_rate,
            "max_completion_length": self.max_completion_length,
        }


EMBEDDED_POLICY = ModelDefaults("the embedded policy", 3e-4, 8)
ALL_WEIGHTS = ModelDefaults("all weights", 1e-6, 256, spoiling_rate=1e-4, shortest_answer=64)
ADAPTER = ModelDefaults("an adapter", 1e-5, 256, spoiling_rate=1e-2, shortest_answer=64)


def defaults_for(model: str, lora_rank: int) -> ModelDefaults:
    """Return the row of the table for `policy.model` and `policy.lora.r`."""
    if model == EMBEDDED or _holds_embedded_policy(Path(model)):
        return EMBEDDED_POLICY
    return ADAPTER if lora_rank else ALL_WEIGHTS


def _holds_embedded_policy(directory: Path) -> bool:
    """Return True for a directory with a model of the embedded policy's shape, or with an adapter
    of one."""
    config = _read(directory, "config.json")
    base = _read(directory, "adapter_config.json").get("base_model_name_or_path")
    if not config and isinstance(base, str):
        config = _read(Path(base), "config.json")
    return all(config.get(key) == value for key, value in EMBEDDED_SHAPE.items())


def _read(directory: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file, or an empty one if there is none."""
    try:
        with open(directory.expanduser() / name, "rb") as file:
            found = json.loads(file.read(CONFIG_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
