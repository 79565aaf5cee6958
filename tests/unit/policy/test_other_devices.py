"""Rules of devices that a test machine does not have: no float64 on MPS, and no mixing of GPUs."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy import logprobs
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import answered
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.model import Policy
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import Rows, assemble, own_group
from swarmnode.trainer import update
from swarmnode.trainer.update import RowSelection, Updater
from tests.support.gaps import rows_of


class Mps(TorchFunctionMode):
    """A tensor is on MPS, unless it was copied to the host: it cannot become float64 there."""

    def __init__(self):
        super().__init__()
        self.host = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        wide = (
            function is torch.Tensor.double
            or torch.float64 in args[1:]
            or kwargs.get("dtype") is torch.float64
        )
        on_device = tensor is not None and tensor.dtype != torch.float64
        if wide and on_device and not any(tensor is one for one in self.host):
            raise TypeError("Cannot convert a MPS Tensor to float64")
        if function is torch.Tensor.cpu:
            self.host.append(tensor.detach().clone())
            return self.host[-1]
        return function(*args, **kwargs)


def test_an_update_makes_no_float64_on_the_device():
    policy = load_policy(PolicyConfig(devices="cpu"))
    first, second = generate(
        policy, ["What is 3 + 4?", "What is 9 + 1?"], Sampling(4, 8), policy.random_generator(1)
    )
    theirs = own_group(second, [0.0, 1.0, 0.0, 0.0])
    rows = assemble(
        [own_group(first, [1.0, 0.0, 0.0, 1.0]), replace(theirs, weights=[0.9] * 4, peer="p")],
        "grpo",
    )
    updater = Updater(policy, TrainingConfig(), MicroBatcher(4096))
    with Mps():
        done = updater.update(rows)
    assert done.stepped
    assert done.loss is not None


def test_sampling_and_scoring_make_no_float64_on_the_device():
    policy = load_policy(PolicyConfig(devices="cpu"))
    prompts, asked = ["What is 3 + 4?", "What is 9 + 1?"], Sampling(2, 8, top_p=0.9)
    with Mps():
        rng = policy.random_generator(1)
        groups = generate(policy, prompts, asked, rng)
        groups += answered(Continuous(policy, MicroBatcher(4096), asked, rng), prompts)
        batch = logprobs.collate(rows_of(groups), policy.pad_id)
        found = [logprobs.logprobs_by(way, policy, batch, 1.0)[0] for way in logprobs.WAYS]
    assert all(torch.allclose(each, found[0], atol=1e-4) for each in found)


class Indices(TorchFunctionMode):
    """An index must be on the device of the indexed tensor; FakeTensor does not check this."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.index_put):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for one in index:
                if isinstance(one, torch.Tensor) and one.device not in (args[0].device, CPU):
                    raise RuntimeError("indices should be on the same device as the tensor")
        return function(*args, **(kwargs or {}))


CPU = torch.device("cpu")


@pytest.fixture
def cards():
    """Yield two simulated cards whose tensors have no values. Operations refuse to mix them.

    This is the only device type whose tensors a torch build without its runtime can slice.
    """
    with FakeTensorMode(), Indices():
        yield torch.device("lazy:0"), torch.device("lazy:1")


@pytest.mark.parametrize("piece", [2, 100])
@torch.no_grad()
def test_a_head_on_another_card_scores_tokens(cards, piece):
    here, there = cards
    weight = torch.zeros(11, 4, device=there)
    head = lambda states: states.to(there) @ weight.T
    states, tokens = torch.zeros(5, 4, device=here), torch.zeros(5, dtype=torch.long, device=here)
    chosen, spread = logprobs.in_pieces(head, states, tokens, 1.0, piece)
    assert chosen.device == spread.device == there


@pytest.mark.parametrize("way", ["one pass", "two passes"])
@torch.no_grad()
def test_states_of_another_card_are_picked_by_row(cards, way, monkeypatch):
    """Tied embeddings: ids and head are on one card, the last layer is on another."""
    here, there = cards
    ids = lambda *shape: torch.zeros(shape, dtype=torch.long, device=here)
    batch = logprobs.Batch(ids(2, 3), ids(2, 3), ids(4), ids(4, 5), *[ids(4, 5).bool()] * 2)
    batch.__dict__["layout"] = logprobs.Layout(ids(4), 9, 3)
    monkeypatch.setattr(
        logprobs,
        "_outputs",
        lambda policy, asked, mask, positions, keep=0, cache=None: torch.zeros(
            len(asked), keep or asked.shape[1], 4, device=there
        ),
    )
    policy = SimpleNamespace(base=SimpleNamespace(config=LlamaConfig(num_hidden_layers=1)))
    states = logprobs._PASSES[way](policy, batch, ids(7), ids(7))
    assert states.shape == (4 + 7, 4)
    assert states.device == there


@torch.no_grad()
def test_logits_lie_where_ids_do(cards):
    here, there = cards
    answer = SimpleNamespace(logits=torch.zeros(2, 3, 11, device=there))
    policy = SimpleNamespace(
        model=lambda **inputs: answer,
        base=LlamaForCausalLM.__new__(LlamaForCausalLM),
        accelerator=SimpleNamespace(autocast=contextlib.nullcontext),
        bypassed=contextlib.nullcontext,
        known_logits=lambda logits: logits,
    )
    ids = torch.zeros(2, 3, dtype=torch.long, device=here)
    assert Policy.logits(policy, ids, None, ids).device == here


def test_an_update_follows_log_probabilities_to_another_card(cards, monkeypatch):
    """Ids are on one card. The head, mask, weights and advantages are on another."""
    here, there = cards
    weight = torch.nn.Parameter(torch.zeros(3, device=there))
    policy = SimpleNamespace(
        device=here,
        pad_id=0,
        trainable_parameters=lambda: [weight],
        accelerator=SimpleNamespace(
            prepare_optimizer=lambda optimizer: optimizer, backward=lambda loss: loss.backward()
        ),
    )

    def logprobs_there(policy, batch, temperature):
        assert batch.prompt_ids.device == here
        made = weight.sum() + torch.zeros(batch.completion_ids.shape, device=there)
        return made, made.detach()

    monkeypatch.setattr(update, "completion_logprobs", logprobs_there)
    answers, ones = [Row([1, 2], [3, 4]), Row([1, 2], [5])], torch.ones(2, device="cpu")
    rows = Rows(answers, [[-1.0, -1.0], [-1.0]], ones, ones, [0, 0], [False, False])
    # numbers of a fake tensor cannot be read
    monkeypatch.setattr(update.TokenSums, "read", lambda sums: update.TokenSums(tokens=len(sums)))
    updater = Updater(policy, TrainingConfig(), MicroBatcher(4096))
    sums = updater.accumulate(rows, RowSelection([0, 1], []))
    assert weight.grad.device == there
    assert sums.own.tokens == 6, "all sums are on one device"
