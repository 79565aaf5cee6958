"""Stages of a model type compute what the whole model computes, if the type is in SPLIT_TYPES.

Both checks of the trial use the code that builds and runs stages:

* At real size, on the meta device: the model is embedding, layers, norm and head. All layers have
  the same parameters, as many as the plan counts (`policy.footprint`). No attribute of a layer
  changes when a stage numbers its layers from 0.
* At tiny size, with random weights, in two and three stages: logits are equal to the bit;
  log-probabilities, gradients and decoding with a cache to 1e-5. The tiny config keeps every value
  but sizes. Each kind of layer is on both sides of the middle.

The trial cannot detect: effects of long rows, such as other rotary frequencies beyond the trained
length; effects of 16 bits or of a device; a forward pass that depends on a layer's number beyond
the tiny depth without an attribute.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarmnode.errors import ConfigError
from swarmnode.model_shape import Shape
from swarmnode.policy.logprobs import Batch, collate
from swarmnode.policy.quantised import build_quantised
from swarmnode.policy.ways import Row
from swarmnode.stages.specs import StagePart, StageSpec, stage_specs
from swarmnode.stages.trainer import stage_model
from swarmnode.stages.trainer.stage_model import (
    SPLIT_TYPES,
    Prompts,
    StageRuntime,
    build_stage,
    check_split,
    empty_stage,
    keep_layers,
    layer_lists,
)

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPLIT = {
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "mistral, no window": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, windows": Qwen2Config(**SHAPE, **WINDOW),
    "qwen3, tied": Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=True),
    "qwen3, biases": Qwen3Config(**SHAPE, attention_bias=True),
    "qwen3, windows": Qwen3Config(**SHAPE, **WINDOW),
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}
ONLY_BY_DEFAULT = {
    "bitnet": "its layers are meant for weights of three values",
    "doge": "a configuration may have experts",
    "hyperclovax": "embedding, residual and logits have factors, which are 1 by default",
}
"""Types whose default configuration passes the trial, but not every configuration."""
VOCABULARY = 64
TINY_WINDOW = 5
"""Sliding window in tokens, shorter than ROWS."""
TOLERANCE = 1e-5
"""Largest accepted difference, relative to max(1, largest value). Logits must be equal."""
ROWS = [
    ([5, 6, 7, 8, 9, 10, 63], [11, 12, 13, 0]),
    ([5, 6, 7, 8, 9, 10, 63], [3]),
    ([2, 4], [1, 20, 21, 22, 23, 5]),
]
"""(prompt ids, completion ids)."""
COUNT_TOLERANCE = 0.05
"""Share of a layer's parameters that the plan may miss, such as biases."""

Difference = tuple[str, torch.Tensor, torch.Tensor]
"""(name of a result, value in the chain of stages, value in the whole model)."""


class Different(Exception):
    """Stages do not compute what the whole model computes."""


@pytest.mark.parametrize("kind", [*SPLIT, *SPLIT_TYPES])
def test_stages_of_a_listed_type_equal_the_whole_model(kind):
    config = SPLIT[kind] if kind in SPLIT else CONFIG_MAPPING[kind]()
    check_split(config)
    trial(config)


@pytest.mark.parametrize("kind", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*SPLIT_TYPES}))
def test_a_type_that_passes_the_trial_is_listed(kind):
    if kind not in ONLY_BY_DEFAULT:
        with pytest.raises(Exception):  # noqa: B017 (a model's code may raise anything)
            trial(CONFIG_MAPPING[kind]())


def test_factors_of_activations_differ_in_stages():
    with pytest.raises(Different, match="in 2 stages logits differ"):
        trial(GraniteConfig(**GRANITE))


def test_a_type_that_is_not_listed_is_refused_in_one_line():
    with pytest.raises(ConfigError) as refused:
        check_split(GraniteConfig())
    line = str(refused.value)
    assert line.startswith("a 'granite' model cannot be trained in stages: set stages.mode to off")
    assert "\n" not in line


@pytest.mark.parametrize("kind", [*SPLIT, *SPLIT_TYPES])
def test_a_listed_type_can_be_copied_in_8_bits(kind):
    """The head samples from such a copy."""
    torch.manual_seed(0)
    config = tiny_config(SPLIT[kind] if kind in SPLIT else CONFIG_MAPPING[kind]())
    whole = AutoModelForCausalLM.from_config(config).eval()
    copied = build_quantised(config, whole.state_dict().__getitem__, torch.float32, "cpu")
    ids = torch.tensor([[5, 9, 3, 33, 7, 12, 8]])
    with torch.no_grad():
        want, have = whole(input_ids=ids).logits, copied(input_ids=ids).logits
    assert 0 < (have - want).abs().max() < 0.05 * want.abs().max()


def trial(config: PretrainedConfig) -> None:
    """Raise Different, or what the model's code raises, unless stages equal the whole model."""
    check_layers(config)
    with torch.random.fork_rng(devices=[]):
        whole = tiny_model(tiny_config(config))
        depth = whole.config.num_hidden_layers
        compare(whole, (depth // 2, depth // 2))
        compare(whole, (1, depth - 2, 1), swapped=True)


def check_layers(config: PretrainedConfig) -> None:
    """Raise Different unless the model at real size is a row of equal layers."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parts = {name for name, _ in whole.named_children()} - {"model"}
    parts |= {name for name, _ in getattr(whole, "model", whole).named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb", "lm_head"}:
        raise Different(
            "it does not consist of embed_tokens, layers, norm and lm_head, but of"
            f" {', '.join(sorted(parts))}"
        )
    layers = whole.model.layers
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise Different(f"layer {number} has other parameters than layer 0")
    count = sum(p.numel() for p in layers[0].parameters())
    planned = Shape.of_config(config.to_dict()).layer_parameters
    if abs(count - planned) > COUNT_TOLERANCE * planned:
        raise Different(f"a layer has {count:,} parameters, and the plan counts {planned:,}")
    if len(layers) == 1:
        return
    # a stage without the first layer, so that each layer has another number than in the whole model
    spec = StageSpec(1, 2, 1, len(layers), bool(config.tie_word_embeddings))
    stage = empty_stage(config, spec, torch.float32).model.layers
    for number, (mine, its) in enumerate(zip(stage, layers[1:], strict=True), 1):
        for part, twin in zip(mine.modules(), its.modules(), strict=True):
            have, want = attributes(part), attributes(twin)
            for name in sorted(have.keys() | want.keys()):
                if have.get(name) != want.get(name):
                    raise Different(f"{name} of layer {number} depends on the layer's number")


def attributes(module: nn.Module) -> dict[str, object]:
    """Return the module's attributes with plain values, except its number."""
    plain = (bool, int, float, str, tuple, type(None))
    return {"class": type(module)} | {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "layer_idx" and not name.startswith("_")
    }


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config with tiny sizes and few layers of each kind.

    All other values are the same, also the size of an attention head, to which rotary settings
    refer.
    """
    lists = [getattr(config, name) for name in layer_lists(config)]
    kinds: dict[str, int] = {}
    for number in range(config.num_hidden_layers):
        kinds.setdefault(repr([values[number] for values in lists]), number)
    # mirrored: each kind is on both sides of the middle, and later stages start with another kind
    mirrored = [*kinds.values(), *reversed(kinds.values())]
    tiny = keep_layers(config, mirrored if len(kinds) > 1 else mirrored * 2)
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or width // heads
    tiny.num_attention_heads = 2
    tiny.num_key_value_heads = 2 if config.num_key_value_heads == heads else 1
    tiny.hidden_size = 2 * head if width == heads * head else head
    tiny.intermediate_size = 40
    tiny.vocab_size = VOCABULARY
    if isinstance(tiny.pad_token_id, int):
        tiny.pad_token_id %= VOCABULARY
    if getattr(tiny, "sliding_window", None):
        tiny.sliding_window = TINY_WINDOW
    return tiny


@torch.no_grad()
def tiny_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a whole model with random weights, norms and biases included."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def compare(whole: PreTrainedModel, layers: tuple[int, ...], swapped: bool = False) -> None:
    """Check that a chain of stages equals the whole model.

    Args:
        layers: Number of layers of each stage.
        swapped: True to run embedding and head alone, as in a swapped run, to checkpoint layers,
            and to compute logits of two tokens at a time.

    Raises:
        Different: A result differs.
    """
    read = whole.state_dict().__getitem__
    chain = [
        StageRuntime(spec, build_stage(whole.config, spec, read))
        for spec in stage_specs(whole.config, layers)
    ]
    batch = replace(collate([Row(*row) for row in ROWS], 0), recompute=swapped)
    for results in (logits, decoding, partial(training, swapped=swapped)):
        for name, have, want in results(whole, chain, batch):
            gap = float((have - want).abs().max()) if have.shape == want.shape else math.inf
            largest = max(1.0, float(want.abs().max()))
            if not gap <= (0.0 if results is logits else TOLERANCE * largest):
                raise Different(f"in {len(layers)} stages {name} differ by {gap:.2g}")


@torch.no_grad()
def logits(whole: PreTrainedModel, chain: list[StageRuntime], batch: Batch) -> Iterator[Difference]:
    mask = batch.prompt_mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    x = batch.prompt_ids
    for stage in chain:
        x = stage.run(x, mask, positions)
    ids = {"input_ids": batch.prompt_ids, "attention_mask": mask, "position_ids": positions}
    yield "logits", x, whole(**ids).logits


@torch.no_grad()
def decoding(
    whole: PreTrainedModel, chain: list[StageRuntime], batch: Batch
) -> Iterator[Difference]:
    """Compare stages with caches, token by token, with the whole model without a cache."""
    tokens = torch.tensor([[14, 3, 60, 7], [8, 8, 2, 31]])  # (Q, 4)
    ids = torch.cat([batch.prompt_ids, tokens], 1)
    mask = torch.cat([batch.prompt_mask, torch.ones_like(tokens)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = whole(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    x = None
    for stage in chain:
        x = stage.prefill(0, Prompts(batch.prompt_ids, batch.prompt_mask, 1), x)
    for column, token in enumerate(tokens.T, batch.prompt_ids.shape[1]):
        x = token
        for stage in chain:
            x = stage.decode(0, list(range(len(tokens))), x)
        yield "logits from caches", x, want[:, column]


def training(
    whole: PreTrainedModel, chain: list[StageRuntime], batch: Batch, swapped: bool
) -> Iterator[Difference]:
    """Compare log-probabilities and gradients of their weighted mean with those of the whole model,
    which runs each row by itself."""
    temperature, shape = 0.8, batch.completion_ids.shape
    weight = torch.linspace(-1.0, 1.5, shape.numel()).view(shape) / shape.numel()
    want = torch.zeros(shape)
    whole.zero_grad()
    for row, (prompt, completion) in enumerate(ROWS):
        logits = whole(input_ids=torch.tensor([prompt + completion])).logits[0]
        logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        want[row, : len(completion)] = logprobs[range(len(completion)), completion]
    (want * weight).sum().backward()

    # run forward to the last hop, which computes the loss
    hops: list[tuple[StageRuntime, StagePart]] = [(stage, "all") for stage in chain]
    if swapped:
        ends: list[tuple[StagePart, StagePart]] = [("embed", "layers"), ("layers", "head")]
        hops[:1], hops[-1:] = ([(chain[i], part) for part in ends[i]] for i in (0, -1))
    inputs: list[torch.Tensor | None] = [None]
    for stage, part in hops[:-1]:
        inputs.append(stage.forward(batch, inputs[-1], part))
    have = torch.zeros(0)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        nonlocal have
        have = logprobs.detach()
        return (logprobs * weight).sum()

    (stage, part), x = hops.pop(), inputs.pop()
    with pytest.MonkeyPatch.context() as patch:
        if swapped:
            patch.setattr(stage_model, "logits_tokens", lambda *given: 2)
        gradient = stage.learn(batch, x, temperature, loss, part)
    yield "log-probabilities", have, want.detach()
    for (stage, part), x in zip(reversed(hops), reversed(inputs), strict=True):
        assert gradient is not None
        gradient = stage.backward(batch, x, gradient, part)
    gradients = dict.fromkeys((name for name, _ in whole.named_parameters()), torch.zeros(()))
    for stage in chain:
        for name, parameter in stage.model.named_parameters():
            # each end has a term of a tied embedding's gradient
            gradients[stage.spec.whole_name(name)] = (
                gradients[stage.spec.whole_name(name)] + parameter.grad
            )
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        yield f"gradients of {name}", gradients[name], parameter.grad
