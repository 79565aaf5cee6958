"""One pipeline stage of a Hugging Face model. Torch, no network.

load_stage       build one stage; this reads only its own weights
check_split      refuse an architecture whose stages would not equal the whole model
StageRuntime     forward, backward, log-probabilities, decoding with a cache
StageOptimizer   AdamW of one stage
describe         describe a micro-batch for a frame; `make_batch` and `compute_loss` read it
Packing          rows of a micro-batch without padding
encode, decode   activations as bytes
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import trio
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from swarmnode.averaging.codecs import (
    bfloat16_bits,
    bfloat16_values,
    int8_from_bytes,
    int8_to_bytes,
    to_bytes,
)
from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, ConfigError, DeviceError, Incompatible, Unavailable
from swarmnode.policy.fingerprint import weight_files
from swarmnode.policy.footprint import Shape, logits_tokens
from swarmnode.policy.load import rename_checkpointing_flag
from swarmnode.policy.logprobs import Batch, checkpointed, collate, in_pieces, needs_checkpointing
from swarmnode.policy.model import cache_keyword
from swarmnode.policy.ways import Row, reason
from swarmnode.rl.corrections import against_sampler, own_correction
from swarmnode.rl.objectives import WEIGHT_DECAY, Objective, policy_loss
from swarmnode.stages.wire import (
    ActivationCodec,
    LossInputs,
    MicroBatch,
    StagePart,
    StageSpec,
    WaveDescription,
    activation_bytes,
    int8_block,
    is_device_error,
    stage_specs,
)
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from peft import PeftConfig


# A stage is the model's own transformers class with a shorter config. If it has no output matrix,
# the identity replaces it, so its `logits` are the hidden states for the next stage.


def keep_layers(config: PretrainedConfig, indices: Sequence[int]) -> PretrainedConfig:
    """Return a copy of the config with these layers only, in this order."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = len(indices)
    for name in _layer_lists(config):
        setattr(own, name, [getattr(config, name)[index] for index in indices])
    return own


def _layer_lists(config: PretrainedConfig) -> list[str]:
    """Return the names of the config's lists with one value per layer, such as `layer_types`."""
    return [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
    ]


def stage_config(config: PretrainedConfig, spec: StageSpec) -> PretrainedConfig:
    """Return a copy of the whole model's config with this stage's layers only."""
    own = keep_layers(config, range(spec.first, spec.last))
    own.tie_word_embeddings = spec.tied and spec.stages == 1
    return own


def empty_stage(config: PretrainedConfig, spec: StageSpec, dtype: torch.dtype) -> PreTrainedModel:
    """Return the stage on the meta device: shapes without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            stage_config(config, spec), dtype=dtype, trust_remote_code=False
        )
    cut_ends(model, spec)
    return model


def build_stage(
    config: PretrainedConfig,
    spec: StageSpec,
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Return the stage with its weights, in memory for its own tensors only.

    Args:
        read: Returns a tensor by its name in the whole model.

    Raises:
        Incompatible: the weights do not have the shapes of `config`.
    """
    model = empty_stage(config, spec, dtype)
    state = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensor = read(spec.whole_name(name))
        if tensor.shape != parameter.shape:
            raise Incompatible(
                f"{spec.whole_name(name)} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    model.load_state_dict(state, strict=False, assign=True)
    # no file has the frequencies of the rotary embedding
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Incompatible(f"the value of {name} is in no weights file")
    model.tie_weights()
    return model.requires_grad_(True).eval()  # no dropout, as in `policy.load`


def cut_ends(model: PreTrainedModel, spec: StageSpec) -> None:
    """Replace embedding, norm and head by the identity where the stage does not hold them."""
    if not spec.has_embedding:
        model.model.embed_tokens = nn.Identity()
    if not spec.has_head:
        model.model.norm = nn.Identity()
        model.lm_head = nn.Identity()


def load_stage(
    directory: Path,
    spec: StageSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Return the stage from a model's directory. This reads only its own tensors.

    Raises:
        Unavailable: a tensor is missing or a file is damaged.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return build_stage(config, spec, tensor_reader(directory), dtype=dtype, device=device)


def tensor_reader(directory: Path) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one tensor of a model's directory by name.

    Raises:
        Unavailable: A file is damaged. The function raises it too, also for a missing tensor.
    """
    try:
        handles = [safe_open(file, framework="pt") for file in weight_files(directory)]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None

    def read(name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = where[name].get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise Unavailable(f"{directory}: no weights {name} ({error})") from None
        return tensor

    return read


def add_adapter(stage: PreTrainedModel, settings: PeftConfig) -> Any:  # noqa: ANN401
    """Return the stage with a LoRA adapter in float32. The base is frozen."""
    from peft import get_peft_model

    rename_checkpointing_flag(type(stage))
    return get_peft_model(stage, copy.deepcopy(settings)).eval()


# The trial of a split: a chain of stages must compute what the whole model computes.

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that pass the trial with all settings in the tests."""
TRIAL_VOCABULARY: Final = 64
TRIAL_WINDOW: Final = 5
"""Sliding window in tokens, shorter than the trial's rows."""
TRIAL_KINDS: Final = 8
"""Most kinds of layers that a trial supports."""
TRIAL_TOLERANCE: Final = 1e-5
"""Largest accepted difference, relative to max(1, largest value). Logits must be equal."""
TRIAL_ROWS: Final = [
    ([5, 6, 7, 8, 9, 10, 63], [11, 12, 13, 0]),
    ([5, 6, 7, 8, 9, 10, 63], [3]),
    ([2, 4], [1, 20, 21, 22, 23, 5]),
]
"""(prompt ids, completion ids)."""
COUNT_TOLERANCE: Final = 0.05
"""Share of a layer's parameters that the plan may miss, such as biases."""

Difference = tuple[str, torch.Tensor, torch.Tensor]
"""(name of a result, value in the chain of stages, value in the whole model)."""
_refusals: dict[str, str] = {}
"""Config that was tried in this process → reason why it cannot be split; empty if it can."""


def check_split(config: PretrainedConfig) -> None:
    """Check that stages of this model compute what the whole model computes. This reads no weights.

    Both checks use the code that builds and runs stages:

    * At real size, on the meta device: the model is embedding, layers, norm and head. All layers
      have the same parameters, as many as the plan counts (`policy.footprint`). No attribute of a
      layer changes when a stage numbers its layers from 0.
    * At tiny size, with random weights, in two and three stages: logits are equal to the bit;
      log-probabilities, gradients and decoding with a cache to 1e-5. The tiny config keeps every
      value but sizes. Each kind of layer is on both sides of the middle.

    The trial cannot detect: effects of long rows, such as other rotary frequencies beyond the
    trained length; effects of 16 bits or of a device; a forward pass that depends on a layer's
    number beyond the tiny depth without an attribute.

    Raises:
        ConfigError: the model cannot be trained in stages. The message names the difference.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _refusals:
        _refusals[key] = _refusal(config)
    if _refusals[key]:
        raise ConfigError(
            f"a {config.model_type!r} model cannot be trained in stages: {_refusals[key]}; set"
            f" stages.mode to off, or choose a model of type {', '.join(FAMILIES)}"
        )


def _refusal(config: PretrainedConfig) -> str:
    try:
        _check_layers(config)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            whole = _tiny_model(tiny_config(config))
            depth = whole.config.num_hidden_layers
            _compare(whole, (depth // 2, depth // 2))
            _compare(whole, (1, depth - 2, 1), swapped=True)
    except Incompatible as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (a model's code may raise anything)
        return f"{type(error).__name__}: {reason(error)}"
    return ""


def _check_layers(config: PretrainedConfig) -> None:
    """Raise Incompatible unless the model at real size is a row of equal layers."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parts = {name for name, _ in whole.named_children()} - {"model"}
    parts |= {name for name, _ in getattr(whole, "model", whole).named_children()}
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb", "lm_head"}:
        raise Incompatible(
            "it does not consist of embed_tokens, layers, norm and lm_head, but of"
            f" {', '.join(sorted(parts))}"
        )
    layers = whole.model.layers
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise Incompatible(f"layer {number} has other parameters than layer 0")
    count = sum(p.numel() for p in layers[0].parameters())
    planned = Shape.of_config(config.to_dict()).layer_parameters
    if abs(count - planned) > COUNT_TOLERANCE * planned:
        raise Incompatible(f"a layer has {count:,} parameters, and the plan counts {planned:,}")
    if len(layers) == 1:
        return
    # a stage without the first layer, so that each layer has another number than in the whole model
    spec = StageSpec(1, 2, 1, len(layers), bool(config.tie_word_embeddings))
    stage = empty_stage(config, spec, torch.float32).model.layers
    for number, (mine, its) in enumerate(zip(stage, layers[1:], strict=True), 1):
        for part, twin in zip(mine.modules(), its.modules(), strict=True):
            have, want = _attributes(part), _attributes(twin)
            for name in sorted(have.keys() | want.keys()):
                if have.get(name) != want.get(name):
                    raise Incompatible(f"{name} of layer {number} depends on the layer's number")


def _attributes(module: nn.Module) -> dict[str, object]:
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
    lists = [getattr(config, name) for name in _layer_lists(config)]
    kinds: dict[str, int] = {}
    for number in range(config.num_hidden_layers):
        kinds.setdefault(repr([values[number] for values in lists]), number)
    if len(kinds) > TRIAL_KINDS:
        raise Incompatible(f"its layers are of {len(kinds)} kinds, and a trial has {TRIAL_KINDS}")
    # mirrored: each kind is on both sides of the middle, and later stages start with another kind
    mirrored = [*kinds.values(), *reversed(kinds.values())]
    tiny = keep_layers(config, mirrored if len(kinds) > 1 else mirrored * 2)
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "head_dim", None) or width // heads
    tiny.num_attention_heads = 2
    tiny.num_key_value_heads = 2 if config.num_key_value_heads == heads else 1
    tiny.hidden_size = 2 * head if width == heads * head else head
    tiny.intermediate_size = 40
    tiny.vocab_size = TRIAL_VOCABULARY
    if isinstance(tiny.pad_token_id, int):
        tiny.pad_token_id %= TRIAL_VOCABULARY
    if getattr(tiny, "sliding_window", None):
        tiny.sliding_window = TRIAL_WINDOW
    return tiny


@torch.no_grad()
def _tiny_model(config: PretrainedConfig) -> PreTrainedModel:
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


def _compare(whole: PreTrainedModel, layers: tuple[int, ...], swapped: bool = False) -> None:
    """Check that a chain of stages equals the whole model.

    Args:
        layers: Number of layers of each stage.
        swapped: True to run embedding and head alone, as in a swapped run, and to checkpoint
            layers.

    Raises:
        Incompatible: A result differs.
    """
    read = whole.state_dict().__getitem__
    chain = [
        StageRuntime(spec, build_stage(whole.config, spec, read))
        for spec in stage_specs(whole.config, layers)
    ]
    batch = replace(collate([Row(*row) for row in TRIAL_ROWS], 0), recompute=swapped)
    for results in (_logits, _decoding, partial(_training, swapped=swapped)):
        for name, have, want in results(whole, chain, batch):
            gap = float((have - want).abs().max()) if have.shape == want.shape else math.inf
            largest = max(1.0, float(want.abs().max()))
            if not gap <= (0.0 if results is _logits else TRIAL_TOLERANCE * largest):
                raise Incompatible(f"in {len(layers)} stages {name} differ by {gap:.2g}")


@torch.no_grad()
def _logits(
    whole: PreTrainedModel, chain: list[StageRuntime], batch: Batch
) -> Iterator[Difference]:
    mask = batch.prompt_mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    x = batch.prompt_ids
    for stage in chain:
        x = stage.run(x, mask, positions)
    ids = {"input_ids": batch.prompt_ids, "attention_mask": mask, "position_ids": positions}
    yield "logits", x, whole(**ids).logits


@torch.no_grad()
def _decoding(
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


def _training(
    whole: PreTrainedModel, chain: list[StageRuntime], batch: Batch, swapped: bool
) -> Iterator[Difference]:
    """Compare log-probabilities and gradients of their weighted mean with those of the whole model,
    which runs each row by itself."""
    temperature, shape = 0.8, batch.completion_ids.shape
    weight = torch.linspace(-1.0, 1.5, shape.numel()).view(shape) / shape.numel()
    want = torch.zeros(shape)
    whole.zero_grad()
    for row, (prompt, completion) in enumerate(TRIAL_ROWS):
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


# The stage's computation.
#
#     R rows of a packed micro-batch, H hidden size, V vocabulary
#     first stage    token ids         → hidden (R, H)
#     middle stage   hidden (R, H)     → hidden (R, H)
#     last stage     hidden (R, H)     → log-probabilities (N, T), or logits of the next token
#
# In a swapped run (CheckFree+) the first and the last stage also run their embedding, layers or
# head alone: `part`. A stage stores inputs but no graphs: backward runs forward again. Large models
# run completions one by one, with checkpointed layers.

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities (N, T), entropies (N, T)) → scalar."""


class StageRuntime:
    """Computation of one stage on this node.

    Args:
        model: The result of `load_stage` or `add_adapter`.
        dtype: Type of the computation, float32 or bfloat16.
        known_logits: Reduces logits to the tokens of the tokenizer (`PolicyText.known_logits`).
    """

    def __init__(
        self,
        spec: StageSpec,
        model: Any,  # noqa: ANN401
        *,
        dtype: torch.dtype = torch.float32,
        known_logits: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    ) -> None:
        self.spec = spec
        self.known_logits = known_logits
        self.model = model
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        """The transformers model; an adapter is inside its layers."""
        self.dtype = dtype
        self.device = next(model.parameters()).device
        self.hidden_size = int(model.config.hidden_size)
        self.caches = WaveCaches()
        self.work_count = 0
        """Number that grows with each forward, backward and decoding step, and each call of
        `count_work`."""
        self.tokens = 0
        """Number of tokens that were run forward, for any purpose."""
        self._layers: Any = None

    def count_work(self) -> None:
        """Count progress inside a piece of work, which may take minutes on a CPU.
        `policy.layers.report_layers` calls it for each layer."""
        self.work_count += 1

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def embedding(self) -> torch.nn.Parameter | None:
        """Return the tied tensor that both ends hold; None if it is not trained or not tied. Each
        end has a term of its gradient."""
        if not self.spec.shares_embedding:
            return None
        module = (
            self.model.get_input_embeddings()
            if self.spec.has_embedding
            else self.model.get_output_embeddings()
        )
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight if weight.requires_grad else None

    def run(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache | None = None,
        keep: int = 0,
        part: StagePart = "all",
    ) -> torch.Tensor:
        """Run the stage on padded rows.

        Args:
            x: Token ids (N, L) on stage 0, else hidden states (N, L, H).
            mask: (N, cached + L), 1 on tokens.
            positions: (N, L).
            cache: Keys and values of earlier tokens; it is extended.
            keep: Number of positions, from the end, whose logits are returned; 0 for all.
            part: With "layers", input and output are hidden states on every stage.

        Returns:
            Hidden states (N, L, H), or logits (N, keep, V) on the last stage.
        """
        whole = part == "all"
        inputs = (
            {"inputs_embeds": x.to(self.model.dtype)} if x.is_floating_point() else {"input_ids": x}
        )
        if self.spec.has_head and whole:
            inputs["logits_to_keep"] = keep  # type: ignore[assignment]
        model = self.model if whole else self._without_ends()
        with self._autocast():
            output = model(
                **inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=cache is not None,
                **{cache_keyword(self._base.__class__.forward): cache},
            )
        return self.known_logits(output.logits) if self.spec.has_head and whole else output.logits

    def _without_ends(self) -> Any:  # noqa: ANN401
        """Return a model with the same layers, without norm and head."""
        if self._layers is None:
            self._layers, inner = _shallow(self._base), _shallow(self._base.model)
            inner.norm = self._layers.lm_head = torch.nn.Identity()
            self._layers.model = inner
        return self._layers

    @property
    def _lora_rank(self) -> int:
        return max(
            (config.r for config in getattr(self.model, "peft_config", {}).values()), default=0
        )

    @torch.no_grad()
    def forward(
        self, batch: Batch, x: torch.Tensor | None, part: StagePart = "all"
    ) -> torch.Tensor:
        """Return the hidden states (R, H) for the next stage, without gradient.

        Args:
            x: Hidden states (R, H) of the previous stage; None if the input is token ids.
        """
        self.work_count += 1
        out = self.hidden(batch, x, part)
        self.tokens += len(out)
        return out

    def backward(
        self, batch: Batch, x: torch.Tensor | None, gradient: torch.Tensor, part: StagePart = "all"
    ) -> torch.Tensor | None:
        """Add to the weights' gradients, and return the gradient of `x`; None on stage 0.

        Args:
            x: Input of the forward, (R, H) or None.
            gradient: Gradient (R, H) of the result of `forward`.
        """
        self.work_count += 1
        inputs = None if x is None else x.detach().requires_grad_()
        hidden = self.hidden(batch, inputs, part)
        if hidden.requires_grad:  # False on a first stage without trained weights
            hidden.backward(gradient.to(hidden.device))
        return None if inputs is None else inputs.grad

    def learn(
        self,
        batch: Batch,
        x: torch.Tensor | None,
        temperature: float,
        loss: LossFunction,
        part: StagePart = "all",
    ) -> torch.Tensor | None:
        """Run forward, loss and backward of the last stage. Return the gradient (R, H) of `x`; None
        if this is the only stage."""
        self.work_count += 2
        inputs = None if x is None else x.detach().requires_grad_()
        loss(*self.logprobs(batch, inputs, temperature, part)).backward()
        return None if inputs is None else inputs.grad

    @torch.no_grad()
    def score(
        self, batch: Batch, x: torch.Tensor | None, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies, (N, T) each, of the last stage, without
        gradient."""
        self.work_count += 1
        return self.logprobs(batch, x, temperature)

    @torch.no_grad()
    def prefill(self, wave: int, prompts: Prompts, x: torch.Tensor | None) -> torch.Tensor:
        """Run the prompts of a wave, and store their cache.

        Args:
            wave: Number of the wave.
            x: Hidden states (prompt tokens, H); None on stage 0.

        Returns:
            Hidden states (prompt tokens, H), or logits (Q, V) on the last stage.
        """
        self.work_count += 1
        where = prompts.mask.nonzero(as_tuple=True)
        self.tokens += len(where[0])
        positions = (prompts.mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        padded = (
            prompts.ids
            if x is None
            else x.new_zeros(*prompts.mask.shape, x.shape[1]).index_put(where, x)
        )
        out = self.run(padded, prompts.mask, positions, cache, keep=1)
        self.caches.open(wave, cache, prompts)
        return out[:, -1] if self.spec.has_head else out[where].float()

    @torch.no_grad()
    def decode(self, wave: int, rows: list[int], x: torch.Tensor) -> torch.Tensor:
        """Run one more token of each of `rows`. Other rows are removed from the cache.

        Args:
            x: Token ids (n,) on stage 0, else hidden states (n, H).

        Returns:
            Hidden states (n, H), or logits (n, V) on the last stage.

        Raises:
            BadMessage: The rows are wrong.
        """
        self.work_count += 1
        self.tokens += len(rows)
        kept = self.caches.step(wave, rows)
        out = self.run(x[:, None], kept.mask, kept.position, kept.cache, keep=1)
        return out[:, -1] if self.spec.has_head else out[:, 0].float()

    def _autocast(self) -> AbstractContextManager:
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, self.dtype)
        )

    def hidden(self, batch: Batch, x: torch.Tensor | None, part: StagePart = "all") -> torch.Tensor:
        """Return the same as `forward`, with gradient."""
        where = make_packing(batch)
        if part == "embed":
            embed = self.model.get_input_embeddings()
            with self._autocast():
                return where.pack(
                    embed(batch.prompt_ids), embed(batch.completion_ids[:, :-1])
                ).float()
        return where.pack(*self._both(batch, where, x, part)).float()

    def _both(
        self, batch: Batch, where: Packing, x: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states of the prompts (Q, P, H) and of the completions (N, T − 1, H). The
        latter are None if T is 1."""
        prompts, later = (
            where.unpack(x) if x is not None else (batch.prompt_ids, batch.completion_ids[:, :-1])
        )
        if part == "head":
            return prompts, later
        if torch.is_grad_enabled() and (
            batch.recompute or needs_checkpointing(self._base, self.dtype, self._lora_rank, batch)
        ):
            with checkpointed(self._base):
                return self._one_by_one(batch, prompts, later, part)
        return self._prompts_once(batch, prompts, later, part)

    def _one_by_one(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same as `_both`. Each completion runs behind its prompt without a cache, so
        that layers can be run again in the backward pass."""
        first: dict[int, torch.Tensor] = {}
        rest = []
        for row, owner in enumerate(batch.prompt_of.tolist()):
            real, count = batch.prompt_mask[owner].bool(), int(batch.completion_mask[row].sum()) - 1
            asked = prompts[owner][real]
            # (L,) or (L, H)
            ids = asked if later is None else torch.cat([asked, later[row, :count]])
            positions = torch.arange(len(ids), device=ids.device)[None]
            out = self.run(ids[None], torch.ones_like(positions), positions, part=part)[0]  # (L, H)
            if owner not in first:
                padding = out.new_zeros(len(real) - len(asked), out.shape[1])
                first[owner] = torch.cat([padding, out[: len(asked)]])
            if later is not None:
                padding = out.new_zeros(later.shape[1] - count, out.shape[1])
                rest.append(torch.cat([out[len(asked) :], padding]))
        shared = torch.stack([first[owner] for owner in range(len(prompts))])
        return shared, torch.stack(rest) if rest else None

    def _prompts_once(
        self, batch: Batch, prompts: torch.Tensor, later: torch.Tensor | None, part: StagePart
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same as `_both`. Prompts run first, and completions use their keys and
        values."""
        positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
        cache = DynamicCache(config=self.model.config)
        first = self.run(prompts, batch.prompt_mask, positions, cache, part=part)
        if batch.completion_ids.shape[1] == 1:
            return first, None
        assert later is not None
        owner = batch.prompt_of
        cache.batch_select_indices(owner.cpu())
        seen = torch.cat(
            [batch.prompt_mask[owner], batch.completion_mask[:, :-1].to(batch.prompt_mask.dtype)], 1
        )
        after = positions[owner, -1:] + 1 + torch.arange(later.shape[1], device=owner.device)
        return first, self.run(later, seen, after, cache, part=part)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            logits = self._base.lm_head(self._base.model.norm(hidden.to(self.model.dtype)))
        return self.known_logits(logits)

    def logprobs(
        self, batch: Batch, x: torch.Tensor | None, temperature: float, part: StagePart = "all"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `score`, with gradient."""
        where = make_packing(batch)
        self.tokens += where.rows
        first, later = self._both(batch, where, x, "head" if part == "head" else "layers")
        row = torch.arange(len(batch.completion_ids), device=first.device)
        column = torch.zeros_like(row)
        states = [first[:, -1][batch.prompt_of]]  # (N, H), predict the first tokens
        if later is not None:
            states.append(later[where.completions])
            row = torch.cat([row, where.completions[0]])
            column = torch.cat([column, where.completions[1] + 1])
        piece = logits_tokens(self.model.config.vocab_size, self.device.type)
        chosen, spread = in_pieces(
            self._head, torch.cat(states), batch.completion_ids[row, column], temperature, piece
        )
        zeros = torch.zeros(batch.completion_ids.shape, device=chosen.device)
        return zeros.index_put((row, column), chosen), zeros.index_put((row, column), spread)


def _shallow(module: Any) -> Any:  # noqa: ANN401
    """Return a new module with the same parameters and submodules. Replacing a submodule does not
    change `module`."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


# The stage's optimizer, which outlives crews.


@dataclass
class LrScale:
    """Learning rate of one stage relative to the crew's."""

    factor: float = 1.0
    warmup: int = 0
    """Number of steps over which the rate rises to the factor after the optimizer was created."""
    taken: int = 0
    """Number of steps taken."""

    def next(self) -> float:
        """Count a step, and return its factor."""
        self.taken += 1
        return self.factor * (1.0 if self.taken >= self.warmup else self.taken / self.warmup)


class StageOptimizer:
    """AdamW of one stage.

    Args:
        runtime: The stage.
        most: Highest learning rate of any step.
    """

    def __init__(self, runtime: StageRuntime, most: float = math.inf) -> None:
        self.adam = make_adam(runtime)
        self.lr_scale = LrScale()
        self.squared_norm = 0.0
        """Squared norm of the last gradient of the layers before clipping: CheckFree's weight."""
        self.lock = threading.Lock()
        """Held while the weights change."""
        self.moving = trio.Lock()
        """Held from the moment when a step is counted until it is taken."""
        self._runtime = runtime
        self._most = most

    def measure(self) -> float | None:
        """Return the squared norm of the final gradients; None if it is not finite. Only the first
        stage counts a tied embedding."""
        shared, index = self._runtime.embedding(), self._runtime.spec.index
        squared = layers = 0.0
        for name, parameter in self._runtime.model.named_parameters():
            if parameter.grad is not None and not (parameter is shared and index > 0):
                # square it on the host, because MPS has no float64
                part = float(torch.linalg.vector_norm(parameter.grad.float())) ** 2
                squared += part
                layers += part if ".layers." in name else 0.0
        if not math.isfinite(squared):
            return None
        self.squared_norm = layers
        return squared

    def step(self, clip: float, learning_rate: float) -> bool:
        """Take a step. Return False if the learning rate was reduced to the bound.

        Args:
            clip: Factor of the gradients, at most 1.

        Raises:
            DeviceError: the device failed during the step, so the weights are undefined.
        """
        if self.adam is None:
            return True
        try:
            with self.lock:
                return self._move(self.adam, clip, learning_rate)
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            raise DeviceError(f"half of a step: {error}") from error

    def _move(self, adam: torch.optim.AdamW, clip: float, learning_rate: float) -> bool:
        for parameter in self._runtime.parameters():
            if parameter.grad is not None and clip < 1.0:
                parameter.grad.mul_(clip)
        own = self.lr_scale.next()
        rates = [learning_rate * (1.0 if group["shared"] else own) for group in adam.param_groups]
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = min(rate, self._most)
        adam.step()
        return max(rates) <= self._most


def make_adam(runtime: StageRuntime) -> torch.optim.AdamW | None:
    """Return the optimizer of the stage's trained parameters; None if there are none.

    A tied embedding always has the crew's learning rate, so that it stays equal at both ends.
    """
    shared = runtime.embedding()
    own = [p for p in runtime.parameters() if p is not shared]
    groups = [
        {"params": params, "shared": ends}
        for params, ends in ((own, False), ([] if shared is None else [shared], True))
        if params
    ]
    return torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY) if groups else None


# Micro-batches: rows to learn from, their description in a frame, and their loss.


@dataclass(frozen=True)
class LearnRow:
    """One completion to learn from."""

    prompt_ids: list[int]
    completion_ids: list[int]
    old_logprobs: list[float]
    advantage: float
    weight: float = 1.0
    group: int = 0
    """Number of its group. Completions of one group share their prompt, and a micro-batch if they
    fit."""
    sampled: bool = False
    """True if its sampler recorded `old_logprobs`; the loss corrects for the difference."""


def describe(
    rows: Sequence[tuple[list[int], list[int]]], temperature: float, loss: LossInputs | None = None
) -> MicroBatch:
    """Return the description of a micro-batch. Equal prompts become one, in the order of
    `policy.logprobs.collate`.

    Args:
        rows: (prompt ids, completion ids) of each completion.
        loss: Inputs of the loss; None for scores.
    """
    prompts: dict[tuple[int, ...], int] = {}
    owner = tuple(prompts.setdefault(tuple(prompt), len(prompts)) for prompt, _ in rows)
    return MicroBatch(
        prompt_lengths=tuple(map(len, prompts)),
        prompt_ids=pack_ids([i for prompt in prompts for i in prompt]),
        prompt_of=owner,
        completion_lengths=tuple(len(c) for _, c in rows),
        completion_ids=pack_ids([i for _, c in rows for i in c]),
        temperature=float(temperature),
        loss=loss,
    )


def describe_loss(rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float) -> LossInputs:
    """Return the inputs of the loss for a description.

    Args:
        normalizer: Normaliser of the whole batch.
    """
    objective, (correction, level) = Objective.of(cfg), own_correction(cfg.options)
    return LossInputs(
        old_logprobs=pack_logprobs([x for row in rows for x in row.old_logprobs]),
        advantages=pack_logprobs([row.advantage for row in rows]),
        weights=pack_logprobs([row.weight for row in rows]),
        normalizer=float(normalizer),
        loss_type=cfg.loss_type,
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        delta=objective.delta,
        sampled=tuple(row.sampled for row in rows),
        correction=correction,
        level=level,
    )


def make_batch(work: MicroBatch, device: torch.device) -> Batch:
    """Return the padded batch of a checked description. Padding is token 0 and masked."""
    prompts = _ragged(unpack_ids(work.prompt_ids).tolist(), work.prompt_lengths)
    completions = _ragged(unpack_ids(work.completion_ids).tolist(), work.completion_lengths)
    return collate(
        [Row(prompts[owner], ids) for owner, ids in zip(work.prompt_of, completions, strict=True)],
        0,
        device,
    )


def make_prompts(description: WaveDescription, device: torch.device) -> Prompts:
    """Return the padded prompts of a checked description."""
    prompts = _ragged(unpack_ids(description.ids).tolist(), description.lengths)
    width = max(description.lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return Prompts(ids, mask, description.num_generations)


def compute_loss(
    work: MicroBatch, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and the sums of `LearntFrame`.

    Args:
        logprobs: (N, T).
        entropy: (N, T).
    """
    loss = work.loss
    assert loss is not None
    mask = batch.completion_mask
    per_token = lambda data: (
        torch.zeros(mask.shape)
        .masked_scatter(mask.cpu(), torch.tensor(unpack_logprobs(data)))
        .to(logprobs.device)
    )
    per_row = lambda data: torch.tensor(unpack_logprobs(data), device=logprobs.device)
    objective = Objective(
        loss.loss_type, epsilon=loss.epsilon, epsilon_high=loss.epsilon_high, delta=loss.delta
    )
    sampled = torch.tensor(loss.sampled, device=logprobs.device)
    old, weights = against_sampler(
        logprobs,
        per_token(loss.old_logprobs),
        sampled,
        per_row(loss.weights),
        mask,
        loss.correction,
        loss.level,
    )
    out = policy_loss(
        logprobs, old, per_row(loss.advantages), mask, objective, loss.normalizer, weights=weights
    )
    tokens = out.tokens.detach()
    sums = [
        out.loss,
        out.clip_fraction * tokens,
        (entropy * mask).sum(),
        tokens,
        weights.sum(),
        weights.square().sum(),
    ]
    return out.loss, [float(x.detach()) for x in sums]


def _ragged(flat: list, lengths: Sequence[int]) -> list[list]:
    out, start = [], 0
    for length in lengths:
        out.append(flat[start : start + length])
        start += length
    return out


# Packed rows of a micro-batch: one row per real token that has a successor, without padding.
#
#     padded here                                   packed on the wire, R rows
#     prompts      (Q, P)      padded on the left    tokens, one prompt after another
#     completions  (N, T − 1)  padded on the right   tokens but the last, one after another
#
# Each prompt runs once for its G completions, as in `policy.logprobs`. A row is one token, so
# its rounding does not depend on the other rows of the batch.


@dataclass(frozen=True)
class Packing:
    """Places of the rows in a padded batch."""

    prompts: tuple[torch.Tensor, ...]
    """(row, column) of each prompt token."""
    completions: tuple[torch.Tensor, ...]
    """(row, column) of each completion token that has a successor."""
    shape: tuple[int, int, int, int]
    """Q, P, N, T."""

    @property
    def rows(self) -> int:
        return len(self.prompts[0]) + len(self.completions[0])

    def pack(self, prompts: torch.Tensor, completions: torch.Tensor | None) -> torch.Tensor:
        """Return the packed rows (R, H) of padded prompts (Q, P, H) and completions (N, T − 1, H).
        `completions` are None if T is 1."""
        head = prompts[self.prompts]
        return head if completions is None else torch.cat([head, completions[self.completions]])

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return padded prompts and completions, as inverse of `pack`. Padding is zero."""
        questions, width, count, longest = self.shape
        head, tail = rows.split([len(self.prompts[0]), len(self.completions[0])])
        prompts = rows.new_zeros(questions, width, rows.shape[1]).index_put(self.prompts, head)
        if longest == 1:
            return prompts, None
        return prompts, rows.new_zeros(count, longest - 1, rows.shape[1]).index_put(
            self.completions, tail
        )


def make_packing(batch: Batch) -> Packing:
    """Return the places of the rows of `batch`."""
    prompts = batch.prompt_mask.nonzero(as_tuple=True)
    completions = batch.completion_mask[:, 1:].nonzero(as_tuple=True)
    (questions, width), (count, longest) = batch.prompt_ids.shape, batch.completion_ids.shape
    return Packing(prompts, completions, (questions, width, count, longest))


# Caches of generation. All are dropped when the weights change.


@dataclass(frozen=True)
class Prompts:
    """Q prompts padded on the left, each with `num_generations` completions."""

    ids: torch.Tensor
    """(Q, P)."""
    mask: torch.Tensor
    """(Q, P) 1 on tokens."""
    num_generations: int


@dataclass
class WaveCache:
    """Cache of one wave of completions."""

    cache: DynamicCache
    rows: list[int]
    """(n,) unfinished completions, ascending."""
    mask: torch.Tensor
    """(n, tokens so far)."""
    position: torch.Tensor
    """(n, 1) of the latest token."""


class WaveCaches:
    """Caches of the open waves by number."""

    def __init__(self) -> None:
        self._caches: dict[int, WaveCache] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def open(self, wave: int, cache: DynamicCache, prompts: Prompts) -> None:
        """Store a prefilled cache of Q prompts, repeated for their completions."""
        cache.batch_repeat_interleave(prompts.num_generations)
        mask = prompts.mask.repeat_interleave(prompts.num_generations, 0)
        position = mask.sum(1, keepdim=True) - 1
        self._caches[wave] = WaveCache(cache, list(range(len(mask))), mask, position)

    def step(self, wave: int, rows: list[int]) -> WaveCache:
        """Return the cache with room for one more token of each of `rows`, without other rows.

        Raises:
            BadMessage: `rows` are not remaining completions of the wave in ascending order.
            KeyError: The wave is not open.
        """
        kept = self._caches[wave]
        if rows != kept.rows:
            where = {row: i for i, row in enumerate(kept.rows)}
            if not rows or sorted(set(rows)) != rows or not where.keys() >= set(rows):
                raise BadMessage("rows", "not an ascending choice of the remaining rows")
            index = torch.tensor([where[row] for row in rows])
            kept.cache.batch_select_indices(index)
            kept.mask, kept.position, kept.rows = kept.mask[index], kept.position[index], rows
        kept.mask = torch.cat([kept.mask, torch.ones_like(kept.position)], 1)
        kept.position = kept.position + 1
        return kept

    def drop(self, wave: int) -> None:
        self._caches.pop(wave, None)

    def clear(self) -> None:
        """Drop all caches: the weights change, or a new crew starts."""
        self._caches.clear()


# Activations and gradients as bytes: float32, bfloat16, or int8 with a scale per 64 values. A crew
# generates and trains with one activation codec, because rounding is part of the policy. Error per
# hop: bfloat16 2⁻⁹ of the value, int8 1/254 of the largest value of its block.


def encode(rows: torch.Tensor, codec: ActivationCodec) -> bytes:
    """Return activations (R, H) float32 as bytes.

    Raises:
        ValueError: A value is not finite.
    """
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("an activation is not finite")
    if codec == "float32":
        return to_bytes(rows, "<f4")
    if codec == "bfloat16":
        return to_bytes(bfloat16_bits(rows), "<i2")
    return int8_to_bytes(rows.reshape(-1), int8_block(rows.shape[1]))


def decode(
    body: bytes | memoryview, rows: int, hidden: int, codec: ActivationCodec
) -> torch.Tensor:
    """Return activations (rows, hidden), float32 in host memory.

    Raises:
        BadMessage: The reason is `size`, `bounds` or `not_finite`.
    """
    if len(body) != activation_bytes(codec, rows, hidden):
        raise BadMessage("size", f"{len(body)} bytes of {codec} for {rows} × {hidden}")
    if codec == "float32":
        flat = torch.from_numpy(np.frombuffer(body, "<f4").copy())
    elif codec == "bfloat16":
        flat = bfloat16_values(torch.from_numpy(np.frombuffer(body, "<i2").copy()))
    else:
        flat = int8_from_bytes(body, rows * hidden, int8_block(hidden))
    if not bool(torch.isfinite(flat).all()):
        raise BadMessage("not_finite", "activations")
    return flat.view(rows, hidden)
