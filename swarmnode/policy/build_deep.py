"""Builds the embedded policy with enough layers for a crew: `python -m swarmnode.policy.build_deep
DIR --layers 8`.

It computes the same function as the embedded policy and can be trained; `swarmnode demo --crew`
uses it. Besides the two trained layers it has random layers whose output projections are zero, so
that they initially add nothing to the residual stream.
"""

from __future__ import annotations

import argparse
import shutil
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_deep_model(
    directory: Path, layers: int = 8, tied: bool = True, middle: bool = False
) -> Path:
    """Write the model; return its directory.

    Args:
        layers: Number of layers.
        tied: True for a head that is tied to the embedding, as in the embedded policy; otherwise
            the head is a copy.
        middle: True to place the trained layers in the middle, so that each of up to four stages
            holds a part that the policy needs (embedding, trained layer or head); otherwise they
            are the first and the last.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with resources.as_file(resources.files("swarmnode.policy") / "embedded") as embedded:
        small = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
        config = AutoConfig.from_pretrained(embedded)
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ):
            shutil.copy(embedded / name, directory / name)
    config.num_hidden_layers = layers
    config.tie_word_embeddings = tied
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        trained = ((layers - 2) // 2, layers // 2) if middle else (0, layers - 1)
        for layer in (
            layer for number, layer in enumerate(model.model.layers) if number not in trained
        ):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for number, layer in zip(trained, small.model.layers, strict=True):
            model.model.layers[number].load_state_dict(layer.state_dict())
        model.model.norm.load_state_dict(small.model.norm.state_dict())
        model.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
        if not tied:
            model.lm_head.weight.copy_(small.model.embed_tokens.weight)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the deep embedded policy to a directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    write_deep_model(arguments.directory, arguments.layers, middle=True)
