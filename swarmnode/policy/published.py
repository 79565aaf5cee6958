"""Reads the shape of a model from config.json and the headers of its safetensors files, without
weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from swarmnode import gguf
from swarmnode.errors import Unavailable
from swarmnode.model_defaults import cached_config, is_on_hub
from swarmnode.model_shape import Shape
from swarmnode.policy.convert import weight_name

HEADER_BYTES = 100 * 2**20
"""Largest header of a safetensors file that is read."""
NO_LAYER = ("embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out")
"""Parts of the names of matrices without an adapter."""

GATED = "accept its licence on the Hub, then run `hf auth login` or set HF_TOKEN"
"""Remedy if a Hub model is gated."""

Shapes = Mapping[str, Sequence[int]]
"""Tensor name → its dimensions."""


def published_shape(model: str, revision: str | None = None) -> Shape:
    """Return the shape of `embedded`, `smollm2`, a directory, a GGUF file, or a Hub name.

    Raises:
        Unavailable: The model does not exist, or a file is missing or damaged.
    """
    if model == "embedded":
        with resources.as_file(resources.files("swarmnode.policy") / "embedded") as directory:
            return shape_in(directory)
    if gguf.is_gguf(model):
        found = gguf.read(gguf.gguf_path(model))
        shapes = {weight_name(tensor.name): tensor.shape for tensor in found.tensors.values()}
        return _shape(found.config(), shapes)
    directory = Path(model).expanduser()
    if directory.is_dir():
        return shape_in(directory)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise Unavailable(f"{directory.absolute()}: no such directory")
    return shape_on_hub(model, revision)


def fetch_config(model: str, revision: str | None) -> bool:
    """Download config.json of a Hub model if it is not in the local cache. Return True if it was
    downloaded; the trainer reports a model that does not exist."""
    if not is_on_hub(model) or cached_config(model, revision) is not None:
        return False
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(model, "config.json", revision=revision)
    except (OSError, HfHubHTTPError, HFValidationError, ValueError):
        return False
    return True


def shape_in(directory: Path) -> Shape:
    """Return the shape of a model in a directory. Parameters are counted if the weights are there,
    and otherwise computed from the configuration.

    Raises:
        Unavailable: A file is missing or damaged.
    """
    config = _config(directory / "config.json")
    shapes = {
        name: dims
        for file in sorted(directory.glob("*.safetensors"))
        for name, dims in headers(file)
    }
    return _shape(config, shapes)


def shape_on_hub(model: str, revision: str | None) -> Shape:
    """Return the shape of a model on the Hub, from config.json and the headers of its weight files.

    Raises:
        Unavailable: The model does not exist, or the Hub cannot be reached.
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        config = _config(Path(hf_hub_download(model, "config.json", revision=revision)))
    except GatedRepoError:
        raise Unavailable(f"{model}: {GATED}") from None
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        raise Unavailable(
            f"{model}: neither a directory nor a model on the Hub ({_first_line(error)})"
        ) from None
    try:
        metadata = get_safetensors_metadata(model, revision=revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError, OSError, HfHubHTTPError, ValueError):
        return Shape.of_config(config)  # no headers are available
    shapes = {
        name: info.shape
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }
    return _shape(config, shapes)


def _shape(config: Mapping[str, object], shapes: Shapes) -> Shape:
    """Return the shape of a configuration, with the numbers of its tensors if there are any."""
    if not shapes:
        return Shape.of_config(config)
    shape = Shape.of_config(_add_dimensions(config, shapes))
    return shape.counted(*count(shapes, bool(config.get("tie_word_embeddings"))))


def _add_dimensions(config: Mapping[str, object], shapes: Shapes) -> Mapping[str, object]:
    """Return a configuration with the dimensions of its tensors, if config.json omits them. The
    config.json of Gemma 3 omits those that are defaults of its class in transformers.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, dict) else config
    rows = {
        part: max(
            (
                dims[0]
                for name, dims in shapes.items()
                if part in name and "vision" not in name and len(dims) == 2
            ),
            default=None,
        )
        for part in ("q_proj.weight", "k_proj.weight", "embed_tokens.weight")
    }
    if ("vocab_size" in text and "num_attention_heads" in text) or None in rows.values():
        return config
    heads, keys, vocabulary = rows.values()
    given = {"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": vocabulary}
    # Only heads × head size counts.
    return {**text, **given, "head_dim": 1, "text_config": None}


def _config(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise Unavailable(f"{path}: not JSON") from None
    if not isinstance(config, dict):
        raise Unavailable(f"{path}: not a model's configuration")
    return config


def headers(file: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield (name, dimensions) of each tensor in a safetensors file.

    Raises:
        Unavailable: The file is damaged.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= HEADER_BYTES:
                raise ValueError("no header")
            table = json.loads(stream.read(size))
        for name, entry in table.items():
            if name != "__metadata__":
                yield name, [int(n) for n in entry["shape"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(f"{file}: not a safetensors file ({_first_line(error)})") from None


def count(shapes: Shapes, tied: bool) -> tuple[int, int]:
    """Return (number of parameters, inputs + outputs summed over the matrices with an adapter).

    Args:
        tied: True if the head is the embedding; a stored head is then not counted.
    """
    parameters = edges = 0
    for name, dims in shapes.items():
        if len(dims) > 2 or (tied and "lm_head" in name):  # GPT-2 stores its causal masks
            continue
        numbers = 1
        for n in dims:
            numbers *= n
        parameters += numbers
        if len(dims) == 2 and not any(part in name for part in NO_LAYER):
            edges += sum(dims)
    return parameters, edges


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
