"""Specs name every tensor once, a tied embedding twice."""

from types import SimpleNamespace

import pytest

from swarmnode.errors import ConfigError
from swarmnode.stages.specs import stage_specs

CONFIG = SimpleNamespace(
    num_hidden_layers=4,
    tie_word_embeddings=True,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=32,
)


def holders(specs, name):
    return [spec.index for spec in specs if spec.local_name(name) is not None]


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_go_there_and_back(prefix):
    names = [f"{prefix}model.layers.{i}.mlp.up_proj.weight" for i in range(4)] + [
        f"{prefix}model.norm.weight"
    ]
    specs = stage_specs(CONFIG, [1, 2, 1])
    for name in names:
        (holder,) = holders(specs, name)
        assert specs[holder].whole_name(specs[holder].local_name(name)) == name
    assert specs[1].local_name(names[2]) == f"{prefix}model.layers.1.mlp.up_proj.weight"


def test_tied_embedding_belongs_to_both_ends():
    name = "model.embed_tokens.weight"
    specs = stage_specs(CONFIG, [1, 2, 1])
    assert holders(specs, name) == [0, 2]
    assert specs[2].local_name(name) == "lm_head.weight"
    assert specs[2].whole_name("lm_head.weight") == name
    untied = stage_specs(SimpleNamespace(**{**vars(CONFIG), "tie_word_embeddings": False}), [2, 2])
    assert holders(untied, name) == [0]
    assert holders(untied, "lm_head.weight") == [1]


@pytest.mark.parametrize("layers", [[4, 0], [2, 3]])
def test_layers_that_are_not_the_models_are_refused(layers):
    with pytest.raises(ConfigError, match="layers"):
        stage_specs(CONFIG, layers)
