"""One pipeline stage of a Hugging Face model. Torch, no network.

load_stage       build one stage; this reads only its own weights
check_split      refuse a model type whose stages would not equal the whole model
StageRuntime     forward, backward, log-probabilities, decoding with a cache
StageOptimizer   AdamW of one stage
Packing          rows of a micro-batch without padding
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import trio
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from swarmnode.errors import BadMessage, ConfigError, DeviceError, Incompatible, Unavailable
from swarmnode.policy.fingerprint import open_weights
from swarmnode.policy.footprint import logits_tokens
from swarmnode.policy.load import rename_checkpointing_flag
from swarmnode.policy.logprobs import Batch, checkpointed, in_pieces, needs_checkpointing
from swarmnode.policy.model import cache_keyword
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.stages.specs import StagePart, StageSpec
from swarmnode.stages.stage_frames import is_device_error

if TYPE_CHECKING:
    from peft import PeftConfig


# A stage is the model's own transformers class with a shorter config. If it has no output matrix,
# the identity replaces it, so its `logits` are the hidden states for the next stage.


def keep_layers(config: PretrainedConfig, indices: Sequence[int]) -> PretrainedConfig:
    """Return a copy of the config with these layers only, in this order."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = len(indices)
    for name in layer_lists(config):
        setattr(own, name, [getattr(config, name)[index] for index in indices])
    return own


def layer_lists(config: PretrainedConfig) -> list[str]:
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
    where = open_weights(directory)

    def read(name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = where[name].get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise Unavailable(f"{directory}: no weights {name} ({error})") from None
        return tensor

    return read


def find_unused(directory: Path, config: PretrainedConfig) -> set[str]:
    """Return the names of the weights of layers that the configuration does not have.

    A missing weight is an error of `tensor_reader`.

    Raises:
        Unavailable: A file is damaged.
    """
    layer = re.compile(r"model\.layers\.(\d+)\.")
    numbers = {name: layer.match(name) for name in open_weights(directory)}
    return {
        n for n, found in numbers.items() if found and int(found[1]) >= config.num_hidden_layers
    }


def add_adapter(stage: PreTrainedModel, settings: PeftConfig) -> Any:  # noqa: ANN401
    """Return the stage with a LoRA adapter in float32. The base is frozen."""
    from peft import get_peft_model

    rename_checkpointing_flag(type(stage))
    return get_peft_model(stage, copy.deepcopy(settings)).eval()


SPLIT_TYPES: Final = (
    "cwm",
    "ernie4_5",
    "exaone4",
    "glm",
    "glm4",
    "helium",
    "internlm3",
    "iquestcoder",
    "llama",
    "ministral3",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
)
"""Model types whose stages compute what the whole model computes. A trial compares this list with
the installed transformers: tests/unit/pipeline/test_split_trial.py."""


def check_split(config: PretrainedConfig) -> None:
    """Check that models of this type can be trained in stages.

    Raises:
        ConfigError: they cannot.
    """
    if config.model_type not in SPLIT_TYPES:
        raise ConfigError(
            f"a {config.model_type!r} model cannot be trained in stages: set stages.mode to off, or"
            f" choose a model of type {', '.join(SPLIT_TYPES)}"
        )


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
