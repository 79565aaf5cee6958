"""Several ranks compute what one computes: the same weights after the same steps, and the same
answers at temperature 0. On CPUs by gloo; each module starts its ranks once."""

import functools

import pytest
import torch

from swarmnode.config import Config
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.trainer.batch import TrainingGroup, assemble, own_group
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.rank_pool import RankPool, on_device
from swarmnode.trainer.ranks import DataParallelPolicy
from swarmnode.trainer.state import Counters

PROMPTS = [f"What is {a} + {b}?" for a, b in [(3, 4), (15, 6), (7, 8), (9, 10), (2, 2), (31, 5)]]
STEPS = 4


def configured(count, **sections):
    sections.setdefault("policy", {})
    return Config.model_validate(
        {
            **sections,
            "policy": {"devices": count, "threads": 1, **sections["policy"]},
            "weights": {"rule": "off", **sections.get("weights", {})},
            "training": {"learning_rate": 1e-4, **sections.get("training", {})},
        }
    )


class Fixture:
    """A pool of ranks, and engines with and without it that start with the same weights."""

    def __init__(self, config):
        torch.set_num_threads(1)
        count = int(config.policy.devices)
        devices = [torch.device("cpu")] * count
        self.config = config
        self.pool = RankPool(config, devices)
        self.policy = load_policy(on_device(config, devices, 0).policy)
        self.start = [p.detach().clone() for p in self.policy.trainable_parameters()]
        self.alone = self.policy.clone()

    def engine(self, ranks=True):
        policy = self.policy if ranks else self.alone
        with torch.no_grad():
            for parameter, value in zip(policy.trainable_parameters(), self.start, strict=True):
                parameter.copy_(value)
        make = functools.partial(DataParallelPolicy, self.pool) if ranks else None
        send = lambda message: None
        return make_whole_policy(self.config, policy, Counters(), send, make=make)

    def weights(self, ranks=True):
        policy = self.policy if ranks else self.alone
        return torch.cat([p.detach().flatten() for p in policy.trainable_parameters()])


KINDS = {
    "all weights, 2 ranks": configured(2),
    "adapter, 4 ranks": configured(4, policy={"lora": {"r": 4}}),
}


@pytest.fixture(scope="module", params=KINDS)
def fixture(request):
    fixture = Fixture(KINDS[request.param])
    yield fixture
    fixture.pool.close()


@pytest.fixture(scope="module")
def groups():
    """Two own groups and four of peers."""
    policy = load_policy(configured("cpu").policy)
    samples = generate(policy, PROMPTS, Sampling(4, 8), policy.random_generator(1))
    made = [own_group(sample, [1.0, 0.0, 0.0, 1.0]) for sample in samples]
    theirs = [
        TrainingGroup(g.rows, g.old_logprobs, g.rewards, [0.9] * 4, peer=f"p{n}")
        for n, g in enumerate(made[2:])
    ]
    return [*made[:2], *theirs]


def trained(fixture, groups, ranks):
    engine = fixture.engine(ranks)
    found = [engine.update(assemble(groups, "grpo")) for _ in range(STEPS)]
    return fixture.weights(ranks), found


@pytest.mark.parametrize("peers", [False, True])
def test_ranks_take_the_steps_of_one(fixture, groups, peers):
    chosen = groups if peers else [g for g in groups if not g.peer]
    one, expected = trained(fixture, chosen, ranks=False)
    all_, found = trained(fixture, chosen, ranks=True)
    assert float((one - torch.cat([p.flatten() for p in fixture.start])).abs().max()) > 1e-4
    assert float((one - all_).abs().max()) < 1e-5
    for a, b in zip(expected, found, strict=True):
        assert b.stepped
        assert b.loss == pytest.approx(a.loss, abs=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
        assert (a.agreement is None) == (not peers)
        assert b.agreement == pytest.approx(a.agreement, abs=1e-3)
