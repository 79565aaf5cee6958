"""Two crews of three real nodes with equal keys and seeds: one loses stages, and both end with
bit-identical weights.

tests/unit/recovery/test_restore.py does the same with stages in one process.
"""

import shutil

import pytest
import torch

from swarmnode.policy.build_deep import write_deep_model
from tests.support.whole_crew import (
    WholeCrew,
    at_rest,
    checkpoint_of,
    freeze,
    is_like,
    kill_trainers,
    like_nodes,
    policy_of,
    restored,
    start,
    until,
)

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(900)]

STAGES = 3
STEPS = 7
"""Committed steps of both crews."""
LOSSES = [(2, (2,), False, "checkpoint"), (4, (1, 2), True, "neighbour")]
"""(step of the loss, stages lost together, whether with their disks, source of the restore). Stage
0 is excluded: a restarted head skips group numbers, so its questions differ."""


def lose(crew, step, stages, disk, source):
    """Lose stages between two steps, when every copy is of the last step, so an exact restore loses
    nothing."""
    until(lambda: crew.at(step), crew.story)
    with at_rest(crew, copies=True) as seen:
        before = seen[0][1]["id"]
        lost = [seen[stage][0] for stage in stages]
        kill_trainers(lost)
        for node in lost if disk else ():
            shutil.rmtree(checkpoint_of(node).parent)
    until(lambda: crew.at(1, before), crew.story)
    for node in lost:
        restore_event = restored(node)
        assert (restore_event["source"], restore_event["source_step"]) == (
            source,
            restore_event["step"],
        )


def train(directory, model, losses=()):
    """Return (step, weights) after STEPS, with each loss restored as given. Steps are far enough
    apart that both neighbours have each snapshot before the next step: background transfers use a
    quarter of the bandwidth."""
    for attempt in range(8):
        nodes = like_nodes(
            directory / str(attempt),
            model,
            "paired",
            STAGES,
            training={"seed": 7, "step_interval": 2.5},
            weights={"rule": "off"},
            stages={"checkpoint_every": 1},
        )
        crew = WholeCrew(nodes, start(nodes), STAGES)
        try:
            if is_like(crew):
                for loss in losses:
                    lose(crew, *loss)
                return policy_of(freeze(crew, STEPS), model)
        finally:
            for node in nodes:
                node.kill()
    raise AssertionError("always another head")


def test_restored_run_equals_the_undisturbed_run(tmp_path):
    model = write_deep_model(tmp_path / "model", layers=6)
    step, weights = train(tmp_path / "lost", model, LOSSES)
    same, expected = train(tmp_path / "undisturbed", model)
    assert step == same == STEPS
    assert weights.keys() == expected.keys()
    assert {
        name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)
    } == set()
