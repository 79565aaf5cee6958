"""One thread for torch, the embedded policy, and a group that it has sampled."""

import pytest
import torch

from swarmnode.config import PolicyConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from tests.support.updates import GCD_PROMPT


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def embedded():
    return load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture(scope="module")
def sample(embedded):
    """Four completions of `GCD_PROMPT`."""
    return generate(embedded, [GCD_PROMPT], Sampling(4, 8), embedded.random_generator(1))[0]
