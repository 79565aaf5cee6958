"""`python -m tests.support.served.wide DIRECTORY` writes the embedded policy with heads of twice
the width.

vLLM's attention on a CPU needs heads of at least 32 dimensions; the embedded policy has 16. The
added dimensions are zero, so both models compute the same function. The output head is a separate
tensor: vLLM 0.32 on a CPU packs it, and keeps the packed copy of a tied head when weights are
reloaded.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEADS, HEAD = 4, 16


def widen(target: Path) -> Path:
    """Write the policy to `target`, a directory that transformers and vLLM load."""
    with resources.as_file(resources.files("swarmnode.policy") / "embedded") as source:
        shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    made = {name: _wide(name, tensor).contiguous() for name, tensor in weights.items()}
    made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["head_dim"], config["tie_word_embeddings"] = 2 * HEAD, False
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Widen one tensor.

    RoPE rotates dimension i with i + half, at the frequency theta^(-2i/width). In twice the width,
    pair i becomes pair 2i. The attention scale is 1/√width, so queries are scaled by √2.
    """
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj", "v_proj"):
        heads = tensor.reshape(HEADS, HEAD, -1)
        wide = heads.new_zeros(HEADS, 2 * HEAD, heads.shape[-1])
        wide[:, ::2] = heads * (2**0.5 if kind == "q_proj" else 1.0)
        return wide.reshape(2 * HEADS * HEAD, -1)
    if kind == "o_proj":
        heads = tensor.reshape(-1, HEADS, HEAD)
        wide = heads.new_zeros(heads.shape[0], HEADS, 2 * HEAD)
        wide[:, :, ::2] = heads
        return wide.reshape(heads.shape[0], -1)
    return tensor


if __name__ == "__main__":
    print(widen(Path(sys.argv[1])))
