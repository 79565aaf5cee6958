"""oneDNN's products equal torch's, with and without an adapter, and merged weights follow the
policy's."""

import copy

import pytest
import torch

from swarmnode.config import LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.policy import linear, merged, slots
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import Row, score
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.trainer.update import Updater
from tests.support.gaps import gaps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN is used with AVX-512"
)
PROMPTS = ["What is 3 + 4? Answer: ", "Calculate 12 + 25 - 3. Answer: "]


@pytest.fixture(params=[0, 8], ids=["all weights", "adapter"])
def policy(request, monkeypatch):
    monkeypatch.setattr(linear, "SMALLEST", 0)
    policy = load_policy(PolicyConfig(devices="cpu", lora=LoraSettings(r=request.param)))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return policy


def results(module, states):
    """Return the output of `module`, and the gradients of its input and its parameters."""
    module.zero_grad(set_to_none=True)
    states = states.clone().requires_grad_()
    out = module(states)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out.detach(), states.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (1, 8), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradients_equal_torchs(shape, bias, monkeypatch):
    monkeypatch.setattr(linear, "SMALLEST", 0)
    torch.manual_seed(0)
    module, states = torch.nn.Linear(8, 6, bias=bias), torch.randn(shape)
    expected = results(module, states)
    linear.use_onednn(module, torch.device("cpu"), torch.float32)
    assert isinstance(module, linear.OneDnnLinear)
    assert_equal(results(module, states), expected)


def test_a_small_layer_and_another_dtype_keep_torchs_product():
    for module, dtype in (
        (torch.nn.Linear(8, 6), torch.float32),
        (torch.nn.Linear(512, 512), torch.bfloat16),
    ):
        linear.use_onednn(module, torch.device("cpu"), dtype)
        assert type(module) is torch.nn.Linear


@pytest.mark.parametrize("frozen_a", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
def test_adapted_layer_equals_pefts(shape, frozen_a, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(linear, "SMALLEST", 0)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6))
    net = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"])).eval()
    layer = net.base_model.model[0]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    layer.lora_A["default"].weight.requires_grad_(not frozen_a)
    states = torch.randn(shape)
    expected = results(layer, states)
    linear.use_onednn(net, torch.device("cpu"), torch.float32)
    assert type(layer).__name__ == "OneDnnLora"
    assert_equal(results(layer, states), expected)
    assert_equal(results(copy.deepcopy(layer), states), expected)
    with torch.no_grad(), net.disable_adapter():
        assert torch.allclose(layer(states), layer.base_layer(states), atol=1e-6)


def sampled_gap(policy):
    groups = generate(policy, PROMPTS, Sampling(4, 12), policy.random_generator(0))
    return gaps(policy, groups, alone=True).max()


def test_sampling_with_merged_weights_equals_scoring(policy):
    assert slots.writes_out(policy)
    assert merged.merged_weights(policy) is merged.merged_weights(policy), "built once"
    before = [p.clone() for p in policy.model.parameters()]
    assert sampled_gap(policy) < 1e-4
    assert all(map(torch.equal, before, policy.model.parameters())), "the policy is unchanged"


def test_merged_weights_follow_the_policy(policy):
    assert sampled_gap(policy) < 1e-4
    with torch.no_grad():
        policy.trainable_parameters()[-1].add_(0.5)
    assert sampled_gap(policy) < 1e-4
    updater = Updater(policy, TrainingConfig(learning_rate=0.05), MicroBatcher(4096))
    answers = [Row([5, 6, 7], [8, 9]), Row([5, 6, 7], [10, 11])]
    advantages, old_logprobs = torch.tensor([1.0, -1.0]), score(policy, answers, 1.0)
    rows = Rows(answers, old_logprobs, advantages, torch.ones(2), [0, 0], [False, False])
    old = merged.merged_weights(policy)
    assert updater.update(rows).stepped
    assert policy.base not in merged._copies, "the update needs the memory"
    assert merged.merged_weights(policy) is not old
    merged._copies[policy.base] = merged._copies[policy.base][0], old
    assert updater.update(rows).stepped
    assert sampled_gap(policy) < 1e-4


def test_short_memory_keeps_the_policys_own_weights(policy, monkeypatch):
    merged.forget_merged(policy)
    monkeypatch.setattr(merged, "spare_bytes", lambda device: 1000)
    assert merged.merged_weights(policy) is None
    assert sampled_gap(policy) < 1e-4
