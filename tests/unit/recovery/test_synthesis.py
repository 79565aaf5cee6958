"""CheckFree's equations to the last bit, and refusals where they would harm."""

import pytest
import torch

from swarmnode.errors import Incompatible, Refused
from swarmnode.stages.trainer.checkfree import NeighbourLayers, synthesise
from tests.support.split_models import split_model

NAME = "model.layers.0.mlp.up_proj.weight"


def neighbour(model, layers, index, squared_norm):
    _, stage = split_model(model, layers)[index]
    return NeighbourLayers({name: p.detach() for name, p in stage.named_parameters()}, squared_norm)


@pytest.fixture
def four(models):
    model = models["llama"]
    specs = [spec for spec, _ in split_model(model, [1, 1, 1, 1])]
    return specs, [neighbour(model, [1, 1, 1, 1], i, float(3**i)) for i in range(4)], model


def test_checkfree_is_algorithm_1(four):
    specs, stages, model = four
    made = synthesise(specs[1], stages[0], stages[2])
    layer = model.model.layers
    expected = (1.0 * layer[0].mlp.up_proj.weight + 9.0 * layer[2].mlp.up_proj.weight) / 10.0
    assert torch.allclose(made[NAME], expected, rtol=1e-6, atol=1e-7)
    assert made.keys() == {
        name for name, _ in split_model(model, [1, 1, 1, 1])[1][1].named_parameters()
    }


def test_less_converged_neighbour_weighs_more(four):
    specs, stages, _ = four
    towards = synthesise(
        specs[2], NeighbourLayers(stages[1].layers, 1e-9), NeighbourLayers(stages[3].layers, 1e9)
    )
    assert torch.equal(towards[NAME], stages[3].layers[NAME])
    some = synthesise(
        specs[2], NeighbourLayers(stages[1].layers, 1.0), NeighbourLayers(stages[3].layers, 3.0)
    )
    same = synthesise(
        specs[2], NeighbourLayers(stages[1].layers, 1e200), NeighbourLayers(stages[3].layers, 3e200)
    )
    assert torch.allclose(some[NAME], same[NAME])


def test_checkfree_without_gradients_is_the_mean(four):
    specs, stages, _ = four
    mean = (stages[0].layers[NAME] + stages[2].layers[NAME]) / 2
    still = [NeighbourLayers(stages[i].layers, 0.0) for i in (0, 2)]
    assert torch.allclose(synthesise(specs[1], *still)[NAME], mean, atol=1e-7)


@pytest.mark.parametrize(
    ("lost", "source", "ends"),
    [(0, 1, ["model.embed_tokens.weight"]), (3, 2, ["model.norm.weight", "lm_head.weight"])],
)
def test_checkfree_plus_copies_layers_and_restores_the_end(four, lost, source, ends):
    specs, stages, _ = four
    kept = {name: stages[lost].layers[name] for name in ends}
    sides = (None, stages[source]) if lost == 0 else (stages[source], None)
    made = synthesise(specs[lost], *sides, ends=kept)
    assert torch.equal(made[NAME], stages[source].layers[NAME])
    assert all(torch.equal(made[name], kept[name]) for name in ends)
    with pytest.raises(Refused, match="no member has stored it"):
        synthesise(specs[lost], *sides)


def test_lost_or_unlike_neighbours_are_no_source(four, models):
    specs, stages, model = four
    with pytest.raises(Refused, match="lost too"):
        synthesise(specs[1], stages[0], None)
    with pytest.raises(Incompatible, match="2 layers"):
        synthesise(specs[1], stages[0], neighbour(model, [2, 2], 1, 1.0))
    with pytest.raises(Incompatible, match="norms"):
        synthesise(specs[1], stages[0], NeighbourLayers(stages[2].layers, float("nan")))
    broken = {**stages[2].layers, NAME: torch.full_like(stages[2].layers[NAME], float("inf"))}
    with pytest.raises(Incompatible, match="finite"):
        synthesise(specs[1], stages[0], NeighbourLayers(broken, 1.0))
