"""The deep policy of the demo and of benchmarks needs each of its four stages."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.policy.build_deep import write_deep_model

LAYERS, STAGES = 8, 4


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(
        write_deep_model(tmp_path_factory.mktemp("deep"), LAYERS, middle=True), dtype=torch.float32
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_an_inner_stage_that_is_left_out_is_missed(deep, stage):
    tokens = torch.randint(
        3, deep.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1)
    )
    layers = deep.model.layers
    kept = {
        i: layers[i].forward
        for i in range(stage * LAYERS // STAGES, (stage + 1) * LAYERS // STAGES)
    }
    with torch.no_grad():
        whole = deep(tokens).logits.log_softmax(-1)
        for i in kept:
            layers[i].forward = lambda hidden, *args, **more: hidden
        without = deep(tokens).logits.log_softmax(-1)
        for i, forward in kept.items():
            layers[i].forward = forward
    assert (whole.exp() * (whole - without)).sum(-1).mean() > 0.1
