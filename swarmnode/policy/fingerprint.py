"""Hashes that identify a policy: of the architecture with the base weights, and of the
tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from swarmnode.errors import Unavailable

BOOKKEEPING = {
    "_name_or_path",
    "_attn_implementation",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "finetuning_task",
    "task_specific_params",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
}
"""Keys of config.json that do not affect the network's function of token ids."""


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of the model: those of the index if there is one.

    Raises:
        Unavailable: A file is missing or a pointer of Git LFS, or the index is damaged.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise Unavailable(f"{index}: not a safetensors index ({error})") from None
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise Unavailable(
            f"{directory}: no {missing[0]}; only safetensors weights are loaded, never pickled ones"
        )
    refuse_pointers(files)
    return files


LFS_POINTER = b"version https://git-lfs.github.com/"
"""Start of the file that Git stores in place of a large one."""


def refuse_pointers(files: Iterable[Path]) -> None:
    """Check that files were downloaded.

    Raises:
        Unavailable: One of them is a pointer of Git LFS.
    """
    for path in files:
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise Unavailable(
                    f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in"
                    f" {path.parent}"
                )


def open_weights(directory: Path) -> dict[str, safe_open]:
    """Return the open file of each tensor of the model, by the tensor's name.

    Raises:
        Unavailable: A file is missing or damaged.
    """
    try:
        handles = [safe_open(file, framework="pt") for file in weight_files(directory)]
        return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise Unavailable(f"{directory}: damaged weights ({error})") from None


def fingerprint(directory: Path) -> bytes:
    """Return SHA-256 (32 bytes) over config.json without bookkeeping keys, then name, dtype, shape
    and bytes of every tensor, sorted by name.

    One tensor is in memory at a time. The division of a model into files does not matter. Training
    does not change the hash, since it covers the base weights.

    Raises:
        Unavailable: A file is missing or unreadable.
    """
    config: dict[str, object] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(b"swarmnode policy 1\n")
    digest.update(canonical({k: v for k, v in config.items() if k not in BOOKKEEPING}))
    where = open_weights(directory)
    try:
        for name in sorted(where):
            tensor = where[name].get_tensor(name).contiguous()
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    except SafetensorError as error:
        raise Unavailable(f"{directory}: damaged weights ({error})") from None
    return digest.digest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return SHA-256 (32 bytes) over tokenizer.json, the end-of-sequence token and the chat
    template, which is part of every prompt.

    Padding and truncation are excluded. They are state of the object and do not affect the mapping
    from text to ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = (
        json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    )
    content = {k: v for k, v in content.items() if k not in ("padding", "truncation")}
    kind = "fast" if backend is not None else type(tokenizer).__name__
    extra = {"class": kind, "eos": tokenizer.eos_token, "chat": tokenizer.chat_template}
    return hashlib.sha256(b"swarmnode tokenizer 1\n" + canonical([content, extra])).digest()


def canonical(value: object) -> bytes:
    """Return a JSON encoding that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
