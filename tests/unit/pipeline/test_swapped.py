"""A swapped run is the whole model with its layers in another order for half of the micro-batches
(CheckFree+)."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import Refused
from swarmnode.policy.logprobs import WAYS
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.stages.specs import backward_hop, forward_hop, swapped_route
from swarmnode.stages.trainer import head
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.trainer import update
from tests.support.crew_rows import crew_of, together
from tests.support.lost_stages import rows_of
from tests.support.stage_models import build

SETTINGS = WorkerSettings("float32", swapped=True)
CFG = TrainingConfig(per_device_train_tokens=64, learning_rate=1e-3)


@pytest.fixture(autouse=True)
def _unclipped(monkeypatch):
    for module in (head, update):
        monkeypatch.setattr(module, "MAX_GRAD_NORM", 1e9)


def unsplit_updater(policy, order, monkeypatch):
    """The whole model's updater, with `layers` in another order for every other micro-batch."""
    layers, turns = list(policy.model.model.layers), itertools.count()
    real = update.completion_logprobs

    def swapping(policy, batch, temperature):
        some = layers if next(turns) % 2 else [layers[i] for i in order]
        policy.model.model.layers = torch.nn.ModuleList(some)
        try:
            return real(policy, batch, temperature)
        finally:
            policy.model.model.layers = torch.nn.ModuleList(layers)

    monkeypatch.setattr(update, "completion_logprobs", swapping)
    return update.Updater(policy, CFG, MicroBatcher(64))


@pytest.mark.parametrize(
    ("layers", "order"), [([1, 1, 1, 1], (1, 0, 3, 2)), ([1, 2, 1, 1, 1, 1], (1, 2, 0, 3, 4, 6, 5))]
)  # the order of layers that `swapped_order` of stages makes
async def test_swapped_steps_equal_those_of_the_swapped_whole_model(
    embedded, layers, order, monkeypatch
):
    model = build("llama", len(order))
    start = copy.deepcopy(model.state_dict())
    whole = replace(embedded, model=copy.deepcopy(model), obstacles=dict.fromkeys(WAYS, ""))
    rows = [row for row in rows_of(2, 30) if row.advantage]
    assembled = Rows(
        [Row(row.prompt_ids, row.completion_ids) for row in rows],
        [row.sampler_logprobs for row in rows],
        torch.tensor([row.advantage for row in rows]),
        torch.ones(len(rows)),
        [row.group for row in rows],
        [False] * len(rows),
    )
    updater = unsplit_updater(whole, order, monkeypatch)
    tokens = float(sum(len(row.completion_ids) for row in rows))
    async with crew_of(model, layers, SETTINGS) as crew:
        for _ in range(2):
            result = await crew.head.update(rows, CFG, tokens, CFG.learning_rate)
            assert result.refused is None
            assert updater.update(assembled).stepped
        mine = together(crew)
        assert all(float((t - start[name]).abs().max()) > 1e-4 for name, t in mine.items())
        expected = whole.model.state_dict()
        for name, tensor in expected.items():
            assert torch.allclose(mine[name], tensor, atol=2e-4), name
        off = sum(float((mine[name] - tensor).abs().mean()) for name, tensor in expected.items())
        assert off < 1e-4 * len(mine)
        assert all(not m.micro_batches.schedule.in_flight for m in crew.members)


async def test_generation_and_scores_use_the_plain_order(models):
    async with (
        crew_of(models["llama"], [1, 1, 1, 1], SETTINGS) as swapping,
        crew_of(models["llama"], [4]) as one,
    ):
        prompts, ends = [[5, 6, 7], [8, 9]], frozenset()
        waves = [
            await crew.head.generate(prompts, 2, 5, 0.0, 1.0, ends, random.Random(1))
            for crew in (swapping, one)
        ]
        assert [ids for wave in waves[0] for ids in wave.ids] == [
            ids for wave in waves[1] for ids in wave.ids
        ]
        scored = [
            await crew.head.score([([5, 6], [7, 8, 9]), ([3], [4])], 1.0)
            for crew in (swapping, one)
        ]
        assert torch.allclose(
            torch.tensor(scored[0][0][0]), torch.tensor(scored[1][0][0]), atol=1e-4
        )


async def test_too_few_stages_cannot_be_swapped(models):
    with pytest.raises(Refused, match="four"):
        async with crew_of(models["llama"], [2, 1, 1], SETTINGS):
            pass


@pytest.mark.parametrize("stages", [4, 5, 8])
def test_every_hop_is_known_by_who_it_comes_from(stages):
    route = swapped_route(stages)
    assert [hop.part for hop in route] == ["embed", *["layers"] * stages, "head"]
    assert forward_hop(route, 0, 0) == 0
    for i in range(1, len(route)):
        assert forward_hop(route, route[i - 1].stage, route[i].stage) == i
        assert backward_hop(route, route[i].stage, route[i - 1].stage) == i - 1
    assert forward_hop(route, 2, 0) is None
    assert backward_hop(route, 0, stages - 1) is None
