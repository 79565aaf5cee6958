"""Swapped runs and rebuilt stages with rounded activations."""

import copy
import math

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.stages.stage_frames import FrameLimits
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_model import StageRuntime
from tests.support.crew import open_crew
from tests.support.lost_stages import quiet, rows_of
from tests.support.split_models import split_model

CFG = TrainingConfig(per_device_train_tokens=64)
LAYERS = [1, 1, 1, 1]
ROUNDED = {"bfloat16": 0.03, "int8": 0.08}
"""Codec of activations, and how far a token's log-probability may be from float32's after two
steps, nats."""


def settings_of(name):
    return WorkerSettings(name, swapped=True)


async def learn(crew, steps, first=0):
    for number in range(first, first + steps):
        result = await crew.head.update(rows_of(number), CFG, 30.0, 1e-4)
        assert result.refused is None
        assert math.isfinite(result.loss)
        assert result.grad_norm > 0
    await quiet()


async def scores_of(crew):
    rows = [(row.prompt_ids, row.completion_ids) for row in rows_of(99)]
    return torch.tensor([x for logprobs, _ in await crew.head.score(rows, 1.0) for x in logprobs])


async def two_steps(models, settings):
    runtimes = [
        StageRuntime(spec, stage)
        for spec, stage in split_model(copy.deepcopy(models["llama"]), LAYERS)
    ]
    async with open_crew(runtimes, settings, FrameLimits(hidden=32, vocab=61, tokens=1024)) as crew:
        before = await scores_of(crew)
        await learn(crew, 2)
        return before, await scores_of(crew)


@pytest.mark.parametrize("name", ROUNDED)
async def test_swapped_steps_with_rounded_activations_are_close_to_float32(models, name):
    before, after = await two_steps(models, settings_of(name))
    _, expected = await two_steps(models, WorkerSettings("float32", swapped=True))
    assert 0 < float((after - expected).abs().max()) < ROUNDED[name]
    assert float((after - before).abs().max()) > 1e-3  # something was learnt
