"""A trainer that trains on nothing, shares nothing or reads nothing reports it, and health shows
it."""

import math

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from structlog.testing import capture_logs

from swarmnode.errors import StateError
from swarmnode.observe.health import troubles
from swarmnode.policy.load import Policy
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.swarm import rollback
from swarmnode.trainer import loop, reporting, state
from tests.support.network_side import run_trainer
from tests.support.snapshots import example

pytestmark = pytest.mark.slow


async def train(data_dir, **training):
    """Train on a task in which more than half of the groups are useful, so that almost every step
    has a useful group."""
    settings = {
        "node": {"data_dir": data_dir},
        "training": {"groups_per_step": 8, "num_generations": 64, **training},
        "task": {"names": ["rg/base_conversion"], "held_out_per_task": 2},
    }
    return await run_trainer(settings)


def health(report):
    s = example()
    trainer = msgspec.structs.replace(s.trainer, report=report)
    return troubles(msgspec.structs.replace(s, trainer=trainer))


async def test_gradients_that_are_never_finite_are_a_trouble(tmp_path, monkeypatch):
    real = loop.make_whole_policy

    def spoilt(config, policy, *args):
        policy.trainable_parameters()[0].register_hook(lambda g: torch.full_like(g, math.inf))
        return real(config, policy, *args)

    monkeypatch.setattr(loop, "make_whole_policy", spoilt)
    with capture_logs() as lines:
        network = await train(tmp_path, max_steps=8)
    last = network.reports[-1]
    assert (last.step, last.policy_version) == (8, 0)
    assert last.drops["update"].since_kept["not_finite"] >= 5
    assert any("the gradient is not finite" in each for each in health(last))
    warned = [line for line in lines if line.get("reason") == "not_finite"]
    assert len(warned) == 1
    assert all(math.isfinite(r.loss or 0.0) for r in network.reports)


async def test_groups_that_are_never_shared_are_a_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(Policy, "hides", lambda self, ids: True)
    network = await train(tmp_path, max_steps=12)
    assert network.published == []
    assert any("own groups was shared" in each for each in health(network.reports[-1]))


async def test_a_healthy_trainer_has_no_trouble(tmp_path):
    network = await train(tmp_path, max_steps=6)
    last = network.reports[-1]
    assert last.drops["update"].kept == last.policy_version > 0
    assert last.drops["group"].kept == len(network.published) > 0
    assert health(last) == []


@pytest.mark.parametrize(
    ("lengths", "cut", "mean", "p95", "share"),
    [
        ([4], [False], 4.0, 4, 0.0),
        (list(range(1, 21)), [False] * 20, 10.5, 19, 0.0),
        ([8] * 19 + [100], [False] * 19 + [True], 12.6, 8, 0.05),
        ([8] * 18 + [100] * 2, [False] * 18 + [True] * 2, 17.2, 100, 0.1),
    ],
)
def test_lengths_of_completions_and_the_share_cut(lengths, cut, mean, p95, share):
    rows = [Row([1], [2] * length) for length in lengths]
    groups = [
        TrainingGroup(rows[at : at + 4], [], [], [], was_cut=cut[at : at + 4])
        for at in range(0, len(rows), 4)
    ]
    assert reporting.completion_lengths(groups) == {
        "completion_tokens": pytest.approx(mean),
        "completion_tokens_p95": p95,
        "completion_cut_share": pytest.approx(share),
    }


def test_cut_answers_that_earn_everything_are_measured():
    rows = [Row([1], [2])] * 4
    groups = [TrainingGroup(rows, [], [1.0, 1.0, 0.5, 0.0], [], was_cut=[True, False, True, True])]
    groups += [TrainingGroup(rows, [], [1.0] * 4, [])]
    assert reporting.cut_rewarded_share(groups) == 1 / 8


def test_nothing_sampled_has_no_lengths():
    assert reporting.cut_rewarded_share([]) is None
    assert set(reporting.completion_lengths([]).values()) == {None}


def spoil(path, name):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    key = next(key for key in tensors if key.startswith(name))
    tensors[key].view(-1)[0] = math.nan
    path.unlink()
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("part", ["weights.", "outer.phi."])
async def test_a_trainer_continues_from_the_kept_state(tmp_path, part):
    await train(tmp_path, max_steps=2)
    trainer = tmp_path / "trainer"
    (trainer / rollback.HISTORY).mkdir(exist_ok=True)
    (trainer / rollback.HISTORY / "0.safetensors").write_bytes((trainer / state.FILE).read_bytes())
    spoil(trainer / state.FILE, part)
    network = await train(tmp_path, max_steps=4)
    assert network.reports[0].step == 2
    assert network.reports[-1].step == 4
    (trainer / rollback.HISTORY / "0.safetensors").unlink()
    spoil(trainer / state.FILE, part)
    with pytest.raises(BaseException) as ended:
        await train(tmp_path, max_steps=5)
    assert ended.group_contains(StateError, match="move it away")
