"""One thread for torch, the embedded policy, and a group that it has sampled."""

import pytest
import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from tests.support.updates import GCD_PROMPT, PROMPTS, sampled_groups


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr("swarmnode.trainer.loop.JOIN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def embedded():
    return load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture(scope="module")
def sample(embedded):
    """Four completions of `GCD_PROMPT`."""
    return generate(embedded, [GCD_PROMPT], Sampling(4, 8), embedded.random_generator(1))[0]


@pytest.fixture(scope="module")
def groups(embedded):
    """Two own groups and four of peers."""
    return sampled_groups(embedded, PROMPTS, own=2)
