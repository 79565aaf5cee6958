"""Small GGUF files, written by ggml's own `gguf` package, and files that break its rules."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KEYS, LAYERS = 64, 96, 4, 2, 2
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def alphabet() -> list[str]:
    """Return the 256 characters of byte-level BPE, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    codes = {byte: byte for byte in plain} | {byte: 256 + n for n, byte in enumerate(rest)}
    return [chr(codes[byte]) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Return tokens, their kinds, and merges: two words besides the bytes."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ 1", "Ċ Ġ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet()]
    tokens += ["".join(merge.split()) for merge in merges]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    padding = -len(tokens) % 32
    return tokens + [f"[PAD{n}]" for n in range(padding)], kinds + [5] * padding, merges


def shapes(architecture: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model by their names in GGUF, as in PyTorch."""
    words, keys = len(vocabulary()[0]), HIDDEN // HEADS * KEYS
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (words, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        found["output.weight"] = (words, HIDDEN)
    for layer in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HIDDEN, HIDDEN),
            "attn_k.weight": (keys, HIDDEN),
            "attn_v.weight": (keys, HIDDEN),
            "attn_output.weight": (HIDDEN, HIDDEN),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (HIDDEN,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        found |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return found


def write_model(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    *,
    tied: bool = True,
    rule: str = "smollm",
    changes: Mapping[str, object] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda found: None,
) -> dict[str, np.ndarray]:
    """Write a model with random weights; return what its tensors dequantise to, by GGUF name.

    Args:
        kind: Type of the matrices. Vectors are F32, as llama.cpp writes them.
        rule: `tokenizer.ggml.pre`.
        changes: Settings to replace; None removes one.
        tensors: Changes the float tensors before they are quantised.
    """
    random = np.random.default_rng(0)
    words, kinds, merges = vocabulary()
    settings: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    settings = {f"{architecture}.{key}": value for key, value in settings.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    plain = {
        name: random.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes(architecture, tied).items()
    }
    tensors(plain)
    found = {}
    for name, values in plain.items():
        used = TYPES[kind] if values.ndim == 2 else TYPES["F32"]
        encoded = gguf.quants.quantize(values, used)
        found[name] = gguf.quants.dequantize(encoded, used).reshape(values.shape)
        writer.add_tensor(name, encoded, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def smallest_model() -> bytes:
    """Return a whole Llama of one layer and two tokens, as a seed for mutations."""
    numbers = {
        "block_count": 1,
        "context_length": 8,
        "embedding_length": 2,
        "feed_forward_length": 1,
        "attention.head_count": 1,
    }
    entries = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    entries += [
        text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()
    ]
    key = text("llama.attention.layer_norm_rms_epsilon")
    entries.append(key + struct.pack("<If", 6, 1e-5))
    for name, value in (("model", "gpt2"), ("pre", "smollm")):
        entries.append(text(f"tokenizer.ggml.{name}") + struct.pack("<I", 8) + text(value))
    for name, values in (("tokens", ["a", "aa"]), ("merges", ["a a"])):
        content = b"".join(map(text, values))
        key = text(f"tokenizer.ggml.{name}")
        entries.append(key + struct.pack("<IIQ", 9, 8, len(values)) + content)
    entries.append(text("tokenizer.ggml.token_type") + struct.pack("<IIQ2i", 9, 5, 2, 1, 1))
    dims = {
        "token_embd": (2, 2),
        "output_norm": (2,),
        "blk.0.attn_norm": (2,),
        "blk.0.attn_q": (2, 2),
        "blk.0.attn_k": (2, 2),
        "blk.0.attn_v": (2, 2),
        "blk.0.attn_output": (2, 2),
        "blk.0.ffn_norm": (2,),
        "blk.0.ffn_gate": (2, 1),
        "blk.0.ffn_up": (2, 1),
        "blk.0.ffn_down": (1, 2),
    }
    rows = [
        row(f"{name}.weight", shape, 0, 32 * number)
        for number, (name, shape) in enumerate(dims.items())
    ]
    whole = header(len(rows), len(entries)) + b"".join(entries + rows)
    return whole + bytes(-len(whole) % 32 + 32 * len(rows))


# ---- bytes by hand, for files that no writer writes ----------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int, settings: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings)


def row(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return a row of the table of tensors, dimensions in the order of GGUF."""
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )
