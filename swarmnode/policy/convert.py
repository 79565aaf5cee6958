"""Converts a GGUF file once into a Hugging Face directory with dequantised float32 weights.

    local_copy   file ─▶ hash ─▶ entry of the cache; under a lock: child ─▶ rename   any process
    main         file ─▶ config.json, tokenizer, safetensors in a new directory      the child

The child has limits of memory, file size and time, and needs neither torch nor transformers. The
files that it writes depend on the GGUF alone, so that all nodes compute one fingerprint.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import platformdirs

from swarmnode import gguf
from swarmnode.errors import Unavailable
from swarmnode.files import sync_directory
from swarmnode.gguf import SMOLLM2, SMOLLM2_SHA256, Gguf, Malformed, Tensor
from swarmnode.process import die_with_parent, run_main

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Version of the conversion, part of a cached directory's name. Incremented if the files differ."""
CHILD_BYTES = 2**30
"""Address space of the child beside the mapped file: Python, numpy and the vocabulary."""
CHILD_SECONDS = 120.0
"""Deadline of the child, with a second for each of `SLOWEST_BYTES` of the file."""
SLOWEST_BYTES = 2 * 10**6
OTHER_BYTES = 256 * 2**20
"""Limit for tokenizer.json, which is smaller than the header of the GGUF file."""
CHUNK_VALUES = 2**20
"""Weights that are dequantised at once, about."""
LOCK_SECONDS = 0.5
"""Interval between attempts to lock an entry of the cache."""
ATTEMPTS_PER_REPORT = 20


def tell(line: str) -> None:
    """Report progress to the operator: the default of `local_copy`."""
    print(f"swarmnode: {line}", file=sys.stderr, flush=True)


def cached_copy(model: str) -> Path:
    """Return the directory of a converted model, which need not exist yet.

    Args:
        model: A value of `policy.model` for which `gguf.is_gguf` is true.

    Raises:
        Unavailable: There is no such file.
    """
    if model == SMOLLM2:
        return _entry(SMOLLM2_SHA256)
    return _entry(_digest(gguf.gguf_path(model)))


def local_copy(
    model: str,
    report: Callable[[str], None] = tell,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Return the directory of a model in a GGUF file; convert it if that has not been done yet.

    Args:
        model: A value of `policy.model` for which `gguf.is_gguf` is true.
        report: Receives a line at least with every tenth of the work, and while another process
            converts the same file.
        wait: Called between attempts to lock the entry.

    Raises:
        Unavailable: There is no such file, it is refused, or it cannot be converted.
    """
    entry = cached_copy(model)
    if not entry.is_dir():
        try:
            _make_private(entry.parent)
            with _locked(entry, lambda: report(f"waiting for the conversion of {model}"), wait):
                if not entry.is_dir():
                    _convert(model, entry, report)
        except OSError as error:
            raise Unavailable(
                f"policy.model {model!r}: cannot write {entry.parent} ({error.strerror or error}):"
                " set XDG_CACHE_HOME to a directory with room"
            ) from None
    return entry


def _make_private(directory: Path) -> None:
    """Create a directory and its parents; no other user can read those that are new."""
    if not directory.is_dir():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def prepare(model: str, report: Callable[[str], None] = tell) -> None:
    """Convert the model of a value of `policy.model` if it is in a GGUF file. Commands call this
    before they start a child whose progress nobody sees. Arguments and errors: see `local_copy`."""
    if gguf.is_gguf(model):
        local_copy(model, report)


def _entry(digest: str) -> Path:
    label = SMOLLM2 if digest == SMOLLM2_SHA256 else "gguf"
    name = f"{label}-{digest[:32]}-v{VERSION}"
    return platformdirs.user_cache_path("swarmnode") / "models" / name


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex, computed once per process and state of the file."""
    about = path.stat()
    return _digest_of(path.resolve(), about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache(16)
def _digest_of(path: Path, *state: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(
    entry: Path, waiting: Callable[[], None], wait: Callable[[float], None]
) -> Iterator[None]:
    """Lock an entry of the cache. The child inherits the lock, so that it ends with the last of
    both processes."""
    fd = os.open(entry.with_name(f".{entry.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for attempt in itertools.count():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt % ATTEMPTS_PER_REPORT == 0:
                    waiting()
                wait(LOCK_SECONDS)
        os.set_inheritable(fd, True)
        yield
    finally:
        os.close(fd)


def _convert(model: str, entry: Path, report: Callable[[str], None]) -> None:
    """Convert a model in a child process, and rename the result to `entry`."""
    path = gguf.gguf_path(model)
    found = gguf.read(path)
    if model == SMOLLM2 and _digest(path) != SMOLLM2_SHA256:
        raise Unavailable(
            f"{path} is not the file of {gguf.SMOLLM2_PACKAGE}:"
            f" {gguf.SMOLLM2_COMMAND} --force-reinstall"
        )
    need, free = float_bytes(found) + OTHER_BYTES, shutil.disk_usage(entry.parent).free
    if need > free:
        raise Unavailable(
            f"policy.model {model!r}: its float32 weights need {need / 1e9:.1f} GB in"
            f" {entry.parent}, where {free / 1e9:.1f} GB are free: set XDG_CACHE_HOME to a"
            " directory with room"
        )
    for stale in entry.parent.glob(f".{entry.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed
    partial = Path(tempfile.mkdtemp(".partial", f".{entry.name}.", entry.parent))
    try:
        report(f"converting {model} to float32 (once): {float_bytes(found) / 1e6:,.0f} MB")
        _run_child(path, partial, lambda tenth: report(f"converting {model}: {tenth}0 %"))
        sync_directory(partial)
        os.rename(partial, entry)
        sync_directory(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_child(path: Path, target: Path, report: Callable[[int], None]) -> None:
    """Run `main` in a child process with limits.

    Raises:
        Unavailable: It failed, or did not end before its deadline.
    """
    seconds = CHILD_SECONDS + path.stat().st_size / SLOWEST_BYTES
    deadline = time.monotonic() + seconds
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            close_fds=False,  # it inherits the lock
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for tenth in _lines_before(child.stdout, deadline):
                report(int(tenth))
            code = child.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise Unavailable(f"{path}: not converted within {seconds:,.0f} s") from None
        finally:
            child.kill()
        errors.seek(0)
        lines = errors.read(2**20).decode(errors="replace").strip().splitlines()
    if code:
        raise Unavailable(lines[-1] if lines else f"{path}: its conversion ended with code {code}")


def _lines_before(stream: IO[bytes], deadline: float) -> Iterator[bytes]:
    """Yield the lines of a pipe until its end. Raises TimeoutError at the deadline."""
    while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (line := stream.readline()):
            return
        yield line
    raise TimeoutError


def float_bytes(found: Gguf) -> int:
    """Return the bytes of all tensors in float32."""
    return 4 * sum(_values(tensor) for tensor in found.tensors.values())


def _values(tensor: Tensor) -> int:
    _, values, width = gguf.TYPES[tensor.type]
    return tensor.size // width * values


# ---- in the child --------------------------------------------------------------------------------


def main() -> int:
    die_with_parent()
    path, target = (Path(argument) for argument in sys.argv[1:])
    found = gguf.read(path)
    limit = CHILD_BYTES + path.stat().st_size
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    largest = float_bytes(found) + OTHER_BYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    try:
        write_directory(path, found, target)
    except Malformed as error:
        raise Unavailable(f"{path}: {error}") from None
    except MemoryError:
        raise Unavailable(f"{path}: its conversion needs more than {limit / 1e9:.1f} GB") from None
    except OSError as error:
        raise Unavailable(f"{target}: {error.strerror or error}") from None
    return 0


def write_directory(path: Path, found: Gguf, target: Path) -> None:
    """Write a model into an empty directory, durably.

    Raises:
        Malformed: The vocabulary is of an unsupported kind or damaged.
        OSError: The disk is full.
    """
    config = found.config()
    special = {
        name: found.token_id(key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    if special["eos"] is None:
        raise Malformed("its vocabulary has no end-of-sequence token")
    ends = [special["eos"], *({found.token_id("eot")} - {None, special["eos"]})]
    generation = {"bos_token_id": special["bos"], "pad_token_id": special["pad"]}
    named = {
        f"{name}_token": found.tokens[token] for name, token in special.items() if token is not None
    }
    template = found.settings.get("tokenizer.chat_template")
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(
            {name: token for name, token in generation.items() if token is not None}
            | {"eos_token_id": ends}
        ),
        "tokenizer.json": _json(tokenizer(found)),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
                **named,
            }
        ),
        **({"chat_template.jinja": template} if isinstance(template, str) else {}),
    }
    for name, text in texts.items():
        with (target / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    write_weights(path, found, target / "model.safetensors")


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


# ---- weights -------------------------------------------------------------------------------------

WEIGHTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Module in GGUF → module in transformers."""


def weight_name(name: str) -> str:
    """Return a tensor's name in transformers: blk.3.attn_q.weight → model.layers.3.self_attn…"""
    *block, module, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{WEIGHTS[module]}.{kind}"


def write_weights(path: Path, found: Gguf, target: Path) -> None:
    """Write all tensors as a safetensors file in float32, a chunk of a tensor at a time. Print a
    digit with each tenth of the work."""
    import numpy as np

    tensors = sorted(found.tensors.values(), key=lambda tensor: weight_name(tensor.name))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 4 * _values(tensor)
        table[weight_name(tensor.name)] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    data = np.memmap(path, np.uint8, "r")
    config, done = found.config(), 0
    with target.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            rows = data[tensor.start : tensor.start + tensor.size].reshape(
                tensor.shape[0] if len(tensor.shape) == 2 else 1, -1
            )
            order = _row_order(tensor, config)
            step = max(1, CHUNK_VALUES // tensor.shape[-1])
            for first in range(0, len(rows), step):
                some = (
                    order[first : first + step] if order is not None else slice(first, first + step)
                )
                values = dequantise(rows[some], tensor.type)
                file.write(values.astype("<f4", copy=False).tobytes())
                before, done = done, done + 4 * values.size
                if before * 10 // end < done * 10 // end < 10:
                    print(done * 10 // end, flush=True)
        file.flush()
        os.fsync(file.fileno())


def _row_order(tensor: Tensor, config: dict[str, object]) -> np.ndarray | None:
    """Return the order in which transformers stores the rows of a tensor; None for the same.

    GGUF stores the queries and keys of Llama so that the two values which a rotation pairs are
    neighbours. transformers pairs the first half of a head with the second.
    """
    import numpy as np

    module = tensor.name.split(".")[-2]
    if config["model_type"] != "llama" or module not in ("attn_q", "attn_k"):
        return None
    heads = cast(
        "int", config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
    )
    order: np.ndarray = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2)
    return order.reshape(-1)


def dequantise(rows: np.ndarray, kind: int) -> np.ndarray:
    """Return the weights of rows of encoded bytes, in float32.

    A block has 32 weights. Q8_0: a scale d in float16 and 32 signed bytes, w = d × q. Q4_1: a scale
    d, a minimum m, and 32 halves of bytes, the first 16 weights in the lower ones; w = d × q + m.
    """
    import numpy as np

    rows = np.ascontiguousarray(rows)
    name, _, width = gguf.TYPES[kind]
    if name == "F32":
        return rows.view("<f4")
    if name == "F16":
        return rows.view("<f2").astype(np.float32)
    blocks = rows.reshape(-1, width)
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    if name == "Q8_0":
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    least = blocks[:, 2:4].view("<f2").astype(np.float32)
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    return scale * halves.astype(np.float32) + least


# ---- tokenizer -----------------------------------------------------------------------------------

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + WORDS + r"|\p{N}{1,3}" + OTHERS
QWEN2 = CONTRACTIONS + WORDS + r"|\p{N}" + OTHERS
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Kinds of tokens in `tokenizer.ggml.token_type`."""


def _bytes_pattern(use_regex: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[dict[str, object]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _bytes_pattern(False)]


SPLITS = {
    "gpt-2": [_bytes_pattern(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes_pattern(True)],
    "llama-bpe": _split(LLAMA3),
    "qwen2": _split(QWEN2),
}
"""`tokenizer.ggml.pre` → how the model's own tokenizer.json splits a text before it merges. A
tokenizer with another rule would give the model other tokens than those it was trained on."""


def tokenizer(found: Gguf) -> dict[str, object]:
    """Return the content of tokenizer.json.

    Raises:
        Malformed: The vocabulary is damaged, or of a kind that is not supported.
    """
    settings, tokens = found.settings, found.tokens
    kind, rule = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in SPLITS or not isinstance(rule, str):
        raise Malformed(
            f"tokenizer {str(kind)[:40]!r} with rule {str(rule)[:40]!r} is not supported, only"
            f" 'gpt2' with {', '.join(SPLITS)}: {gguf.REMEDY}"
        )
    kinds = settings.get("tokenizer.ggml.token_type")
    merges = settings.get("tokenizer.ggml.merges")
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not isinstance(merges, list):
        raise Malformed("damaged: its vocabulary has no types or no merges")
    pairs = [merge.split(" ") for merge in merges]
    vocabulary = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED
    }
    if any(len(pair) != 2 or "".join(pair) not in vocabulary for pair in pairs):
        raise Malformed("damaged: a merge in its vocabulary is not a pair of tokens")
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    bos = found.token_id("bos")
    begins = bos is not None and settings.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[rule]},
        "post_processor": _begin_with(tokens[bos], bos) if begins and bos is not None else None,
        "decoder": _bytes_pattern(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule == "llama-bpe",
            "vocab": vocabulary,
            "merges": pairs,
        },
    }


def _begin_with(token: str, number: int) -> dict[str, object]:
    """Return the rule that puts a token before each text."""
    first: dict[str, object] = {"SpecialToken": {"id": token, "type_id": 0}}
    text: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
    other: dict[str, object] = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, other],
        "special_tokens": special,
    }


if __name__ == "__main__":
    sys.exit(run_main("swarmnode convert", main))
