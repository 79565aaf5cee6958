"""The Python of protocol/04-stages.md against swarmnode."""

import math
import re
from pathlib import Path

import pytest
import torch

from swarmnode.rl.corrections import importance_weights
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.stages.crew_messages import CrewMember, CrewRecord, HeldBlock
from swarmnode.stages.network.crew import MAX_STRIKE_SECONDS
from swarmnode.stages.network.crew_plan import is_usable_block, refusal_seconds
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import StageSpec
from swarmnode.stages.trainer.checkfree import NeighbourLayers, average

PROTOCOL = Path(__file__).parents[2] / "protocol"


@pytest.fixture(scope="module")
def document():
    namespace: dict = {}
    text = (PROTOCOL / "04-stages.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, namespace)
    return namespace


def test_step_retention_matches_swarmnode(document):
    seconds = set()
    for step in (0, 3, 4, 5, 6, 9):
        for lineage in (b"a" * 32, b"b" * 32):
            for where in ("memory", "disk", "neighbour"):
                record = CrewRecord(lineage, bytes(32), step, (CrewMember("p", 1),), bytes(8))
                copies = [
                    HeldBlock(b"a" * 32, (2,), 0, 5, where),
                    HeldBlock(b"a" * 32, (2,), 0, 2, "neighbour"),
                ]
                given = [as_dict(copy) for copy in copies]
                settings = MembershipSettings(base_wait_seconds=600.0)
                got = document["refusal_seconds"](given, {"lineage": lineage, "step": step})
                assert got == refusal_seconds(copies, record, settings)
                seconds.add(got)
                assert document["is_usable"](given[0], step) == is_usable_block(copies[0], step)
    assert seconds == {0.0, 12.0, 600.0}


def as_dict(copy):
    return {name: getattr(copy, name) for name in copy.__struct_fields__}


def test_exclusion_doubles_with_each_strike(document):
    seconds = [document["excluded_seconds"](count) for count in range(12)]
    assert seconds[:4] == [0, 20, 40, 80]
    assert seconds[-1] == MAX_STRIKE_SECONDS


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_loss_matches_the_trainer(document, kind):
    logprobs = -torch.rand(2, 5, generator=torch.Generator().manual_seed(1)) * 2
    weights = torch.tensor([[0.5, 1.0, 2.0, 1.0, 0.25], [1.0] * 5])
    advantages = torch.tensor([0.7, -1.3])
    mask = torch.ones(2, 5)
    ours = policy_loss(logprobs, advantages, mask, Objective(kind), 1.0, weights=weights)
    got = sum(
        document["completion_loss"](kind, *row)
        for row in zip(advantages.tolist(), logprobs.tolist(), weights.tolist(), strict=True)
    )
    assert got == pytest.approx(float(ours), rel=1e-5)


def test_correction_matches_the_trainer(document):
    old = torch.tensor([[0.1, 1.2, -0.9, 0.4], [0.3, -0.1, 0.2, -3.0]])
    sampler = torch.zeros(2, 4)
    weights = importance_weights(old, sampler, torch.ones(2, 4))
    for row, ours in zip(old.tolist(), weights.tolist(), strict=True):
        got = [document["correction"](math.exp(value)) for value in row]
        assert got == pytest.approx(ours, rel=1e-5)


def test_checkfree_matches_swarmnode(document):
    left, right = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, 4.0, 2.5])
    for a, b in ((3.0, 1.0), (0.0, 0.0), (0.0, 2.0)):
        before = NeighbourLayers({"model.layers.0.x": left}, a)
        after = NeighbourLayers({"model.layers.0.x": right}, b)
        spec = StageSpec(1, 3, 1, 2, False)
        ours = average(before, after, spec)["model.layers.0.x"]
        got = document["checkfree"]((left.tolist(), a), (right.tolist(), b))
        assert got == pytest.approx(ours.tolist())
