"""A crew's policy from the journals of its stages: all of them, of one step, or nothing."""

from dataclasses import asdict

import pytest
import torch

from swarmnode.errors import StateError
from swarmnode.stages.recovery import disk
from swarmnode.stages.spec import StageSpec
from swarmnode.trainer.export import weights_of_stages

SPECS = [StageSpec(0, 2, 0, 1, True), StageSpec(1, 2, 1, 3, True)]
HELD = [["model.embed_tokens.weight", "model.layers.0.w"], ["model.layers.0.w", "model.layers.1.w", "model.norm.weight", "lm_head.weight"]]


def journal(path, stage, step=5, crew="c0"):
    tensors = {f"weights.{name}": torch.full((2,), float(10 * stage + i)) for i, name in enumerate(HELD[stage])}
    if stage == 1:
        tensors["weights.lm_head.weight"] = torch.zeros(2)  # tied: the first tensor of stage 0, under the other end's name
    tensors |= {f"first.{HELD[stage][0]}": torch.ones(2), "rng": torch.zeros(3, dtype=torch.uint8)}
    disk.save(path, tensors, {"crew": crew, "spec": asdict(SPECS[stage]), "step": step})
    return path


def test_stages_become_one_policy_by_the_names_of_the_whole_model(tmp_path):
    step, weights = weights_of_stages([journal(tmp_path / "b", 1), journal(tmp_path / "a", 0)])
    assert step == 5
    assert {name: float(tensor[0]) for name, tensor in weights.items()} == {
        "model.embed_tokens.weight": 0.0, "model.layers.0.w": 1.0, "model.layers.1.w": 10.0, "model.layers.2.w": 11.0,
        "model.norm.weight": 12.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("second", "says"),
    [({"stage": 1, "step": 6}, "crew and step"), ({"stage": 1, "crew": "c1"}, "crew and step"), ({"stage": 0}, r"stages \[0, 0\] of 2")],
)
def test_what_is_no_policy_is_refused(tmp_path, second, says):
    with pytest.raises(StateError, match=says):
        weights_of_stages([journal(tmp_path / "a", 0), journal(tmp_path / "b", **second)])


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    disk.save(tmp_path / "x", {"w": torch.zeros(1)}, {"step": 1})
    for files in ([tmp_path / "x"], [tmp_path / "gone"], []):
        with pytest.raises(StateError):
            weights_of_stages(files)
