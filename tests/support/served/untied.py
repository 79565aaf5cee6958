"""A copy of a model with tied embeddings whose output head is a tensor of its own.

Both compute the same function. vLLM 0.32 on a CPU packs the head, and keeps the packed copy of a
tied one when all weights are reloaded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def untie(source: Path, target: Path) -> Path:
    """Write the copy to `target` and return it."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
