"""Models with random weights, for timing: published shapes, since no weights can be downloaded, and
small Llamas."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

SHAPES: dict[str, PretrainedConfig] = {
    "qwen2-22m": Qwen2Config(
        vocab_size=32_768,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
}


def build(
    shape: str, tokenizer: PreTrainedTokenizerBase, directory: Path, device: str = "cpu"
) -> str:
    """Write a model of `shape` to `directory` in bfloat16, seed 0; return its name.

    It rarely ends a completion, so both sides of a comparison sample equally many tokens.
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
