"""Tiny random models of many architectures, as directories that `policy.model` can name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LAYERS = 2
LONG_ROPE_FROM = 64
LEARNED_POSITIONS = 64


def _phi3_longrope(vocabulary: int) -> PretrainedConfig:
    """Use long RoPE: the frequencies of all rows change once a pass is longer than
    LONG_ROPE_FROM."""
    # Four frequencies: a head has eight values.
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": LONG_ROPE_FROM,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 4.0, 8.0, 16.0],
    }
    return Phi3Config(
        vocab_size=vocabulary,
        num_key_value_heads=2,
        original_max_position_embeddings=LONG_ROPE_FROM,
        rope_parameters=rope,
        pad_token_id=0,
        **SHAPE,
    )


def _deepseek(vocabulary: int) -> PretrainedConfig:
    """Multi-head latent attention with 12 values per key and 8 per value. The second layer has
    experts."""
    return DeepseekV3Config(
        vocab_size=vocabulary,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        **SHAPE,
    )


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CONFIGS: dict[str, Callable[[int], PretrainedConfig]] = {
    "llama": lambda v: LlamaConfig(
        vocab_size=v, num_key_value_heads=4, tie_word_embeddings=True, **SHAPE
    ),
    "qwen2": lambda v: Qwen2Config(vocab_size=v, num_key_value_heads=2, **SHAPE),
    "qwen3": lambda v: Qwen3Config(vocab_size=v, num_key_value_heads=1, head_dim=16, **SHAPE),
    # a window shorter than a prompt
    "mistral": lambda v: MistralConfig(
        vocab_size=v, num_key_value_heads=2, sliding_window=6, **SHAPE
    ),
    "gemma": lambda v: GemmaConfig(vocab_size=v, num_key_value_heads=2, head_dim=8, **SHAPE),
    # caps its logits
    "gemma2": lambda v: Gemma2Config(
        vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=6, **SHAPE
    ),
    "gemma3": lambda v: Gemma3TextConfig(
        vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=6, **SHAPE
    ),
    "phi3-longrope": _phi3_longrope,
    "gemma4": lambda v: Gemma4TextConfig(
        vocab_size=v,
        vocab_size_per_layer_input=v,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        sliding_window=6,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        **SHAPE,
    ),
    # with a vision tower, which text does not use
    "gemma3-vision": lambda v: Gemma3Config(
        text_config=CONFIGS["gemma3"](v).to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
    # learned positions
    "gpt2": lambda v: GPT2Config(
        vocab_size=v, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=LEARNED_POSITIONS
    ),
    "gpt-neox": lambda v: GPTNeoXConfig(vocab_size=v, **SHAPE),
    "falcon-alibi": lambda v: FalconConfig(
        vocab_size=v,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=False,
    ),
    "deepseek-mla": _deepseek,
    "mixtral": lambda v: MixtralConfig(
        vocab_size=v, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SHAPE
    ),
    "qwen3-moe": lambda v: Qwen3MoeConfig(
        vocab_size=v, num_key_value_heads=2, head_dim=8, **EXPERTS, **SHAPE
    ),
    # a convolution layer and an attention layer
    "lfm2": lambda v: Lfm2Config(
        vocab_size=v,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        block_multiple_of=8,
        **SHAPE,
    ),
    # divides by the norm of a padding token, whose embedding is zero, in the backward pass
    "gemma3n": lambda v: Gemma3nTextConfig(
        vocab_size=v,
        vocab_size_per_layer_input=v,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0],
        **SHAPE,
    ),
    # computes positions from the mask, and rejects a 4-D mask
    "bloom": lambda v: BloomConfig(vocab_size=v, hidden_size=32, n_layer=2, n_head=4),
    # a window that the cache does not expose
    "gpt-neo": lambda v: GPTNeoConfig(
        vocab_size=v,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
    ),
    # no keys or values: refused
    "mamba": lambda v: MambaConfig(vocab_size=v, hidden_size=32, num_hidden_layers=2, state_size=4),
    # linear attention with state changed in place
    "qwen3-next": lambda v: Qwen3NextConfig(
        vocab_size=v,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        **EXPERTS,
        **SHAPE,
    ),
}


def build(
    kind: str,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    scale: float = 6.0,
    rows: int | None = None,
) -> Path:
    """Write a random model of `kind` with `tokenizer` to `directory`.

    Args:
        scale: Factor of all matrices. It makes the next token neither certain nor uniform.
        rows: Size of the vocabulary, if not the tokenizer's.
    """
    torch.manual_seed(5)
    config = CONFIGS[kind](rows or len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = None
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
