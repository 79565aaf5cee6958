"""Dimensions of a causal LM, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swarmnode.errors import Unavailable

QUERY_KEY_NORMS = frozenset({"qwen3", "qwen3_moe", "olmo2", "gemma3", "gemma3_text"})


@dataclass(frozen=True)
class Shape:
    """Dimensions of a causal LM on which its memory depends."""

    layers: int
    hidden: int
    queries: int
    """Number of heads × head size."""
    keys: int
    """Number of key-value heads × head size."""
    intermediate: int
    vocabulary: int
    query_key_norms: bool
    parameters: int
    embeddings: int
    """Parameters of embedding and head, which are not quantised."""
    edges: int
    """Inputs + outputs, summed over all linear layers except the head. An adapter has `rank ·
    edges` parameters."""

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Shape:
        """Return the shape of a config.json. Parameters are counted as for Llama; `counted`
        replaces them by exact numbers.

        Raises:
            Unavailable: A dimension is missing.
        """
        nested = config.get("text_config")
        text = {**config, **nested} if isinstance(nested, dict) else config
        hidden = _number(text, "hidden_size", "n_embd")
        layers = _number(text, "num_hidden_layers", "n_layer")
        heads = _number(text, "num_attention_heads", "n_head")
        size = _number(text, "head_dim", default=hidden // heads)
        queries, keys = heads * size, _number(text, "num_key_value_heads", default=heads) * size
        intermediate = _number(text, "intermediate_size", "n_inner", default=4 * hidden)
        vocabulary = _number(text, "vocab_size")
        kind = str(text.get("model_type", ""))
        norms = kind in QUERY_KEY_NORMS
        biases = queries + 2 * keys if kind == "qwen2" or text.get("attention_bias") else 0
        matrices = hidden * (2 * queries + 2 * keys + 3 * intermediate)
        per_layer = matrices + biases + 2 * hidden + (2 * size if norms else 0)
        embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
        edges = layers * (4 * hidden + 2 * queries + 2 * keys + 3 * (hidden + intermediate))
        return cls(
            layers,
            hidden,
            queries,
            keys,
            intermediate,
            vocabulary,
            norms,
            layers * per_layer + embeddings + hidden,
            embeddings,
            edges,
        )

    def counted(self, parameters: int, edges: int) -> Shape:
        """Return the same shape with numbers that were counted in the model."""
        return replace(self, parameters=parameters, edges=edges)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.embeddings - self.hidden) // self.layers

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a token, two bytes each."""
        return self.layers * 2 * self.keys * 2


def _number(config: Mapping[str, object], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
            return value
    if default is None:
        raise Unavailable(f"config.json has no {names[0]}: not a causal LM that can be planned for")
    return default
