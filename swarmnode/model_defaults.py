"""Training defaults that depend on the model.

The embedded policy has 114,000 parameters and answers in a few tokens. Its learning rate would
spoil a real model, and it would learn nothing at a real model's. `Config` takes a value from here
if none is set. docs/learning.md, "Learning rate", has the measurements behind the rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import Unavailable
from swarmnode.gguf import SMOLLM2, is_gguf, published_config
from swarmnode.model_shape import Shape

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
REFERENCE_PARAMETERS = 134_515_008
"""Parameters of SmolLM2-135M, on which the rates were measured."""
LARGEST_RATE, SMALLEST_RATE = 1e-5, 1e-6
"""Bounds of the learning rate of all weights: the best one for SmolLM2-135M, and the one that
published recipes use for 1.5 B to 7 B."""
ADAPTER_FACTOR = 50.0
"""Learning rate of an adapter with `ADAPTER_ALPHA` relative to that of all weights."""
ADAPTER_ALPHA = 32
SPOILING_FACTOR = 3.0
"""Factor of the default from which a learning rate is reported as too large: with it, SmolLM2-135M
collapsed in three of four runs within nine steps (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class ModelDefaults:
    """Training values for one model, and the limits beyond which a value does not suit it."""

    trained: str
    """Name of the trained part, for messages."""
    learning_rate: float
    max_completion_length: int
    """Sampled tokens."""
    spoiling_rate: float = math.inf
    """Smallest learning rate at which reinforcement learning may spoil the model."""
    shortest_answer: int = 1
    """Smallest sensible `max_completion_length`."""

    def values(self) -> dict[str, float | int]:
        """Return the defaults by their names in `[training]`."""
        return {
            "learning_rate": self.learning_rate,
            "max_completion_length": self.max_completion_length,
        }


EMBEDDED_POLICY = ModelDefaults("the embedded policy", 3e-4, 8)
ANSWER_TOKENS = 256
"""Default `max_completion_length` of a real model."""


def default_alpha(rank: int) -> int:
    """Return the default scale of an adapter."""
    return 2 * rank


def learning_rate(parameters: float, rank: int, alpha: int) -> float:
    """Return the default learning rate of a real model, in two significant digits.

    It falls with the root of the number of parameters. The matrix B of an adapter starts at zero,
    so that the first step changes the policy by alpha × rate, independent of the rank.

    Args:
        rank: Rank of the adapter; 0 for all weights.
        alpha: Scale of the adapter.
    """
    rate = LARGEST_RATE * math.sqrt(REFERENCE_PARAMETERS / parameters)
    rate = min(LARGEST_RATE, max(SMALLEST_RATE, rate))
    if rank:
        rate *= ADAPTER_FACTOR * ADAPTER_ALPHA / alpha
    return float(f"{rate:.2g}")


def defaults_for(
    model: str,
    rank: int = 0,
    alpha: int | None = None,
    revision: str | None = None,
) -> ModelDefaults:
    """Return the defaults of a model: its name or directory, and its adapter.

    The number of parameters is that of config.json in the directory or in the cache of the Hub. A
    model of unknown size has the rate of a large model and the limit of a small one.
    """
    config = _config_of(model, revision)
    if model == EMBEDDED or all(config.get(key) == value for key, value in EMBEDDED_SHAPE.items()):
        return EMBEDDED_POLICY
    size = _parameters(model, config)
    scale = default_alpha(rank) if alpha is None else alpha
    rate = lambda parameters: learning_rate(parameters, rank, scale)
    return ModelDefaults(
        "an adapter" if rank else "all weights",
        rate(size or math.inf),
        ANSWER_TOKENS,
        spoiling_rate=SPOILING_FACTOR * rate(size or REFERENCE_PARAMETERS),
        shortest_answer=EMBEDDED_POLICY.max_completion_length + 1,
    )


def _parameters(model: str, config: Mapping[str, object]) -> int | None:
    """Return the number of parameters by config.json; None if it is unknown."""
    if model == SMOLLM2:
        return REFERENCE_PARAMETERS
    try:
        return Shape.of_config(config).parameters
    except Unavailable:
        return None


def _config_of(model: str, revision: str | None) -> Mapping[str, object]:
    """Return the config.json of a directory, of the base of the adapter in it, of a GGUF file, or
    of the Hub's cache; empty if there is none."""
    if is_gguf(model):
        try:
            return {} if model == SMOLLM2 else published_config(model)
        except Unavailable:
            return {}
    directory = Path(model)
    config = _read(directory, "config.json")
    base = _read(directory, "adapter_config.json").get("base_model_name_or_path")
    if not config and isinstance(base, str):
        config = _read(Path(base), "config.json")
    if not config and is_on_hub(model) and (cached := cached_config(model, revision)) is not None:
        config = _read(cached.parent, cached.name)
    return config


def is_on_hub(model: str) -> bool:
    """Return True for the name of a Hub model, not for `embedded`, a directory or a GGUF file."""
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or is_gguf(model)
    return model != EMBEDDED and not is_path and not Path(model).is_dir()


def cached_config(model: str, revision: str | None) -> Path | None:
    """Return the config.json of a Hub model in the local cache; None if it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, OSError, ValueError):  # ValueError: not a name on the Hub
        return None
    return Path(found) if isinstance(found, str) else None


def _read(directory: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file, or an empty one if there is none."""
    try:
        with open(directory.expanduser() / name, "rb") as file:
            found = json.loads(file.read(CONFIG_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
