"""Models with random weights for timing: published shapes, whose weights need a download, and small
Llamas."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2Config,
)


def _qwen2(
    vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, groups: int, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )


SHAPES = {
    "qwen2.5-0.5b": _qwen2(151_936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-7b": _qwen2(152_064, 3584, 18_944, 28, 28, 4, tied=False),
}


def build(
    shape: str, tokenizer: PreTrainedTokenizerBase, directory: Path, device: str = "cpu"
) -> str:
    """Write a model of `shape` to `directory` in bfloat16, seed 0; return its name.

    The model rarely ends a completion, so both sides of a comparison sample equally many tokens.
    """
    config = SHAPES[shape]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = (
        None,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16
        )
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def random_llama(
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    hidden: int,
    *,
    seed: int = 0,
    head_scale: float = 1.0,
) -> str:
    """Write a Llama of 4 layers with float32 weights to `directory`; return its name.

    Args:
        head_scale: Factor of the head's weights. 0.1 makes all tokens, the end token too, about
            equally likely, so that the lengths of completions are geometric.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(head_scale)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
