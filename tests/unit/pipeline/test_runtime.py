"""A single stage: its weights from disk, its memory, its statistics and the messages that it
refuses. `test_split_trial` compares chains of stages with whole models."""

import copy

import pytest
import torch

from swarmnode.errors import BadMessage, ConfigError, Unavailable
from swarmnode.policy.logprobs import collate
from swarmnode.stages.specs import stage_specs
from swarmnode.stages.trainer.stage_model import Prompts, StageRuntime, load_stage, make_packing
from tests.support.largest import Largest
from tests.support.split_models import split_model, whole_state

ROWS = [
    ([5, 6, 7, 8, 9, 10], [11, 12, 13]),
    ([5, 6, 7, 8, 9, 10], [3]),
    ([2, 4], [1, 20, 21, 22, 23]),
    ([2, 4], [9, 8]),
]


def chain(model, layers):
    return [StageRuntime(spec, stage) for spec, stage in split_model(model, layers)]


def test_logits_of_a_long_answer_are_computed_in_pieces(models, monkeypatch):
    """4,000 tokens of a vocabulary of 152,000 are 2.4 GB, several times over: no member could hold
    the last stage."""
    monkeypatch.setattr("swarmnode.stages.trainer.stage_model.logits_tokens", lambda *given: 40)
    last = chain(models["llama"], [2, 2])[1]
    batch = collate([([5, 6, 7], [8 + i % 9 for i in range(100)]), ([5, 6, 7], [9, 10])], 0)
    x = torch.randn(make_packing(batch).rows, 32, generator=torch.Generator().manual_seed(0))
    with Largest(61) as seen:
        last.learn(batch, x, 1.0, lambda logprobs, entropy: logprobs.sum())
        last.score(batch, x, 1.0)
    assert seen.rows == 40  # and the head's own gradient has 32


def test_layers_are_checkpointed_only_when_memory_is_short(models, monkeypatch):
    stage = chain(models["llama"], [1, 3])[1]
    batch = collate([([5, 6, 7], [8 + i % 9 for i in range(100)])] * 2, 0)
    x = torch.randn(make_packing(batch).rows, 32, generator=torch.Generator().manual_seed(0))

    def stored(spare):
        """Bytes that the graph holds before its backward pass."""
        sizes = {}
        monkeypatch.setattr("swarmnode.policy.logprobs.spare_bytes", lambda device: spare)
        note = lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor.numel() * 4) and tensor
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            stage.hidden(batch, x.clone().requires_grad_(), "layers")
        return sum(sizes.values())

    assert stored(2**10) < 0.5 * stored(2**40)


def test_finished_row_does_not_change_other_rows(models):
    prompts = Prompts(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long), 3)
    all_rows, some = chain(models["qwen3"], [4])[0], chain(models["qwen3"], [4])[0]
    for stage in (all_rows, some):
        stage.prefill(7, prompts, None)
        stage.decode(7, [0, 1, 2], torch.tensor([1, 2, 3]))
    expected = all_rows.decode(7, [0, 1, 2], torch.tensor([4, 5, 6]))[[0, 2]]
    assert torch.allclose(some.decode(7, [0, 2], torch.tensor([4, 6])), expected, atol=1e-5)
    caches = [
        stage.caches.step(7, rows).cache for stage, rows in ((some, [0, 2]), (all_rows, [0, 1, 2]))
    ]
    assert [len(cache.layers[0].keys) for cache in caches] == [2, 3]


@pytest.mark.parametrize("rows", [[2], [1, 0], [], [0, 0]])
def test_step_of_an_unknown_row_is_refused(models, rows):
    stage = chain(models["llama"], [4])[0]
    stage.prefill(7, Prompts(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.long), 2), None)
    with pytest.raises(BadMessage) as caught:
        stage.decode(7, rows, torch.zeros(len(rows), dtype=torch.long))
    assert caught.value.reason == "rows"


@pytest.mark.parametrize("layers", [[4], [2, 2], [1, 2, 1]])
def test_each_stage_counts_each_token_once(models, layers):
    stages = chain(copy.deepcopy(models["llama"]), layers)
    batch = collate(ROWS, 0, torch.device("cpu"))
    # two prompts once, and each completion without its last token
    rows = 6 + 2 + (3 + 1 + 5 + 2) - 4
    inputs = [None]
    for stage in stages[:-1]:
        inputs.append(stage.forward(batch, inputs[-1]))
    x = stages[-1].learn(batch, inputs.pop(), 1.0, lambda logprobs, entropy: logprobs.sum())
    for stage, x_in in zip(reversed(stages[:-1]), reversed(inputs), strict=True):
        x = stage.backward(batch, x_in, x)
    assert [stage.tokens for stage in stages] == [rows] * len(stages)
    x = None
    for stage in stages:
        x = stage.prefill(
            7,
            Prompts(torch.tensor([[0, 2, 4], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]]), 1),
            x,
        )
    x = x.argmax(-1)
    for stage in stages:
        x = stage.decode(7, [0, 1], x)
    assert [stage.tokens for stage in stages] == [rows + 5 + 2] * len(stages)


def test_a_stage_reads_only_its_own_tensors(models, tmp_path):
    models["qwen2"].save_pretrained(tmp_path)
    for (spec, stage), alone in zip(
        split_model(models["qwen2"], [1, 2, 1]),
        stage_specs(models["qwen2"].config, [1, 2, 1]),
        strict=True,
    ):
        loaded = load_stage(tmp_path, alone)
        assert sum(p.numel() for p in loaded.parameters()) < sum(
            p.numel() for p in models["qwen2"].parameters()
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                whole_state(spec, stage).values(), whole_state(alone, loaded).values(), strict=True
            )
        )
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Unavailable):
        load_stage(tmp_path, alone)


@pytest.mark.parametrize("layers", [[4, 0], [2, 3]])
def test_layers_that_are_not_the_models_are_refused(models, layers):
    with pytest.raises(ConfigError, match="layers"):
        stage_specs(models["llama"].config, layers)
