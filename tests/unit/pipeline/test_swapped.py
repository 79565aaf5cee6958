"""A swapped run is the whole model with its layers in another order for half of the micro-batches
(CheckFree+)."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import Refused
from swarmnode.policy.logprobs import WAYS, collate, completion_logprobs
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import importance_weights
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.stages.specs import backward_hop, forward_hop, swapped_route
from swarmnode.stages.stage_frames import FrameLimits
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_model import StageRuntime
from tests.support.crew import open_crew
from tests.support.lost_stages import rows_of
from tests.support.split_models import split_model, whole_state

SETTINGS = WorkerSettings("float32", swapped=True)
CFG = TrainingConfig(per_device_train_tokens=64)


@pytest.fixture(autouse=True)
def _unclipped(monkeypatch):
    monkeypatch.setattr("swarmnode.stages.trainer.head.MAX_GRAD_NORM", 1e9)


def crew_of(model, layers, settings=SETTINGS):
    runtimes = [StageRuntime(spec, stage) for spec, stage in split_model(model, layers)]
    return open_crew(runtimes, settings, FrameLimits(hidden=32, vocab=61, tokens=4096))


class Unsplit:
    """The whole model's trainer, with `layers` in another order for every other micro-batch."""

    def __init__(self, model, order):
        self.model = copy.deepcopy(model)
        self.order, self.turn = order, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)

    def step(self, rows, normalizer, rate):
        plain = list(self.model.model.layers)
        for piece in micro_batches(
            [len(r.prompt_ids) + len(r.completion_ids) for r in rows], 64, [r.group for r in rows]
        ):
            self.turn += 1
            self.model.model.layers = torch.nn.ModuleList(
                [plain[i] for i in self.order] if self.turn % 2 else plain
            )
            part = [rows[i] for i in piece]
            batch = collate([(r.prompt_ids, r.completion_ids) for r in part], 0)

            def logits(view, input_ids, attention_mask, position_ids, keep=0, cache=None):
                inputs = {
                    "input_ids": input_ids,
                    "attention_mask": attention_mask,
                    "position_ids": position_ids,
                }
                return self.model(
                    **inputs,
                    past_key_values=cache,
                    use_cache=cache is not None,
                    logits_to_keep=keep,
                ).logits

            view = type(
                "P",
                (),
                {
                    "model": self.model,
                    "base": self.model,
                    "logits": logits,
                    "dtype": torch.float32,
                    "lora_rank": 0,
                    "obstacles": dict.fromkeys(WAYS, ""),
                    "accelerator": SimpleNamespace(scaler=None),
                },
            )()
            logprobs, _ = completion_logprobs(view, batch, 1.0)
            mask = batch.completion_mask
            sampler = torch.full_like(logprobs, -3.0)
            loss = policy_loss(
                logprobs,
                torch.tensor([r.advantage for r in part]),
                mask,
                Objective.of(CFG),
                normalizer,
                weights=importance_weights(logprobs, sampler, mask),
            )
            loss.backward()
        self.model.model.layers = torch.nn.ModuleList(plain)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layers", "order"), [([1, 1, 1, 1], (1, 0, 3, 2)), ([1, 2, 1, 1, 1, 1], (1, 2, 0, 3, 4, 6, 5))]
)  # the order of layers that `swapped_order` of stages makes
async def test_swapped_steps_equal_those_of_the_swapped_whole_model(models, layers, order):
    model = copy.deepcopy(models["llama"])
    if len(order) > 4:
        torch.manual_seed(5)
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = len(order)
        model = type(model)(config).eval()
    rows = rows_of(2, 21)
    unsplit = Unsplit(model, order)
    async with crew_of(model, layers) as crew:
        for _ in range(2):
            result = await crew.head.update(rows, CFG, 30.0, 1e-3)
            assert result.refused is None
            unsplit.step(rows, 30.0, 1e-3)
        mine = {
            name: t
            for m in crew.members
            for name, t in whole_state(m.runtime.spec, m.runtime.model).items()
        }
        moved = {
            name: float((t - models["llama"].state_dict()[name]).abs().max())
            for name, t in mine.items()
            if len(order) == 4
        }
        assert all(value > 1e-4 for value in moved.values())
        for name, tensor in unsplit.model.state_dict().items():
            assert torch.allclose(mine[name], tensor, atol=2e-4), name
        assert sum(
            float((mine[n] - t).abs().mean()) for n, t in unsplit.model.state_dict().items()
        ) < 1e-4 * len(mine)
        assert all(not m.micro_batches.schedule.in_flight for m in crew.members)


async def test_generation_and_scores_use_the_plain_order(models):
    async with (
        crew_of(models["llama"], [1, 1, 1, 1]) as swapping,
        crew_of(models["llama"], [4], WorkerSettings("float32")) as one,
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
        async with crew_of(models["llama"], [2, 1, 1]):
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
