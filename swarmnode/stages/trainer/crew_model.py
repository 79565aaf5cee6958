"""The model of a crew: tokenizer, costs of its parts, capacity of this node, and one stage.

`open_model` is the entry point. `fits_whole` decides whether this node trains alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, PretrainedConfig

from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.errors import ConfigError, DeviceError, Refused
from swarmnode.model_shape import Shape
from swarmnode.policy.device import (
    HEADROOM,
    TRAINED_BYTES,
    Placement,
    count_parameters,
    free_bytes,
    probe,
    set_threads,
    set_up,
    update_bytes,
    without_float16,
)
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash
from swarmnode.policy.footprint import (
    ITEM_BYTES,
    LOGITS_COPIES,
    Method,
    host_bytes,
    layer_bytes,
    logits_tokens,
)
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import (
    configured_ends,
    context_length,
    load_tokenizer,
    local_directory,
    lora_settings,
    offline,
    report_unexpected,
)
from swarmnode.policy.text import Chat, PolicyText, vocabulary
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.stages.crew_messages import TrainerOffer
from swarmnode.stages.specs import ModelCost, PartCost, stage_specs
from swarmnode.stages.stage_frames import MAX_MICRO_BATCHES, ActivationCodec, FrameLimits
from swarmnode.stages.trainer.checkfree import LEARNING_RATE_FACTOR, check_checkfree
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.stage_model import (
    StageRuntime,
    add_adapter,
    check_split,
    find_unused,
    load_stage,
)
from swarmnode.swarm.manifest import check_model
from swarmnode.swarm.manifest_store import load_current
from swarmnode.tasks.registry import TASKS
from swarmnode.trainer import state
from swarmnode.weights.trainer.lora import freeze_a

# The model: tokenizer, costs of its parts, capacity of this node, and one stage. Tensors of other
# stages are read only to hash the files.

MAX_TOKENS = 16384
"""Maximum number of padded tokens of a micro-batch or wave. Protocol/04 fixes it for all crews."""
ASSUMED_WAVES = 4
"""Assumed number of waves in flight, which is at most the number of stages."""
PROMPT_TOKENS = 64
"""Assumed length of a question, for the size of the caches."""
SPEED_MATRIX_SIZE = 512
"""Side of the matrices that measure a machine's speed."""
SPEED_SECONDS = 0.1
"""Duration of that measurement."""
CHECKPOINT_BYTES = 2 * 3
"""Host memory per weight of a stage for checkpoints in bfloat16: the own one while it is written,
and those of both ring neighbours while they arrive."""


@dataclass(frozen=True)
class CrewTerms:
    """Settings that all members of a crew share. They are part of `CrewRecord.model`, so nodes with
    other terms form no crew."""

    codec: ActivationCodec
    recovery: Literal["checkpoints", "checkfree", "checkfree+"]
    lora: LoraSettings
    learning_rate: float

    def hash(self, identity: bytes) -> bytes:
        """Return the hash, 32 bytes, of these terms and of a model.

        Args:
            identity: Fingerprint of architecture and base weights.
        """
        terms = {
            "codec": self.codec,
            "recovery": self.recovery,
            "lora": self.lora.model_dump() if self.lora.r else None,
            "weight_decay": WEIGHT_DECAY,
            "learning_rate": self.learning_rate,
        }
        text = json.dumps(terms, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(identity + text.encode(), digest_size=32).digest()


def crew_terms(config: Config) -> CrewTerms:
    """Return the shared settings of this node's configuration."""
    lora = config.policy.lora
    return CrewTerms(
        config.stages.codec,
        config.stages.recovery,
        lora,
        config.training.learning_rate,
    )


@dataclass(frozen=True)
class CrewModel:
    """A model's directory, and facts about the model that do not depend on a stage."""

    directory: Path
    config: PretrainedConfig
    """Configuration in transformers."""
    text: PolicyText
    placement: Placement
    trainer_offer: TrainerOffer
    policy: PolicyConfig
    terms: CrewTerms

    @property
    def owner(self) -> str:
        """Name of the policy in saved state (`trainer.state.owner`)."""
        adapter = state.adapter_shape(self.terms.lora)
        return state.owner(self.text.fingerprint, adapter)

    def limits(self) -> FrameLimits:
        """Return the bounds of frames for this model."""
        return FrameLimits(
            hidden=int(self.config.hidden_size),
            vocab=int(self.config.vocab_size),
            tokens=MAX_TOKENS,
        )

    def settings(self) -> WorkerSettings:
        """Return the settings of a stage's worker."""
        terms = self.terms
        factor = 1.0 if terms.recovery == "checkpoints" else LEARNING_RATE_FACTOR
        return WorkerSettings(
            codec=terms.codec,
            swapped=terms.recovery == "checkfree+",
            learning_rate=terms.learning_rate * factor,
        )

    def build(self, layers: tuple[int, ...], index: int) -> StageRuntime:
        """Load stage `index` with the base model's weights, and an adapter if one is trained.

        Args:
            layers: Number of layers of each stage.

        Raises:
            ConfigError: the numbers do not add up to the model's layers.
            LocalError: a file is missing or damaged.
        """
        spec = stage_specs(self.config, layers)[index]
        lora = self.terms.lora.r > 0
        dtype = self.placement.dtype if lora else torch.float32
        stage = load_stage(self.directory, spec, dtype=dtype, device=self.placement.device)
        if lora:
            stage = add_adapter(stage, lora_settings(self.policy))
            freeze_a({spec.whole_name(name): p for name, p in stage.named_parameters()})
        runtime = StageRuntime(
            spec, stage, dtype=self.placement.dtype, known_logits=self.text.known_logits
        )
        report_layers(stage, runtime.count_work)
        return runtime


@contextlib.contextmanager
def open_model(
    config: Config, report: Callable[[str], None] = lambda line: None
) -> Iterator[CrewModel]:
    """Open the configured model for use in stages.

    Args:
        report: Called with a line about each part of the work.

    Raises:
        LocalError: the model is missing or is not the swarm's, cannot be split, or the settings
            require a whole policy.
        DeviceError: this node has no room for one layer.
    """
    cfg, terms = config.policy, crew_terms(config)
    check_trainable(cfg, config.training, config.task.names)
    set_threads(cfg)
    placement = without_float16(probe(cfg))
    set_up(placement.device)
    with local_directory(cfg, fits=False) as directory:
        hf = offline(cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
        check_split(hf)
        check_checkfree(terms.recovery, config.stages.stages, adapter=terms.lora.r > 0)
        tokenizer = load_tokenizer(cfg, directory)
        report_unexpected(find_unused(directory, hf), report)
        report("hashing the base weights")
        ends = configured_ends(cfg, directory, hf, tokenizer)
        eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(ends)
        vocab_size, unused_ids = vocabulary(tokenizer, int(hf.vocab_size))
        text = PolicyText(
            tokenizer=tokenizer,
            fingerprint=fingerprint(directory),
            tokenizer_hash=tokenizer_hash(tokenizer),
            eos_id=eos_id,
            eos_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id,
            vocab_size=vocab_size,
            unused_ids=unused_ids,
            chat=Chat.of(cfg.chat, tokenizer, ends),
            context=context_length(hf),
        )
        opened = load_current(config.node.data_dir)
        if opened is not None:
            check_model(opened.manifest, text.fingerprint, text.tokenizer_hash)
        cost = estimate_cost(config, hf, placement)
        memory = stage_room(config, hf, placement, cost)
        trainer_offer = TrainerOffer(
            terms.hash(text.fingerprint),
            memory / HEADROOM,
            measure_speed(placement),
            cost,
        )
        report(
            f"{cfg.model} in stages: at most {trainer_offer.memory / 2**30:.2f} GiB here;"
            f" {placement.reason}"
        )
        yield CrewModel(directory, hf, text, placement, trainer_offer, cfg, terms)


def check_trainable(
    policy: PolicyConfig, training: TrainingConfig, tasks: Sequence[str] = ()
) -> None:
    """Check that a crew supports the settings.

    Args:
        tasks: Names of the tasks that are trained on.

    Raises:
        Refused: a setting requires a whole policy. The message has the remedy.
    """
    episodes = [task for task in tasks if task in TASKS and TASKS[task].turns > 1]
    answer = training.max_completion_length
    longest, rows = answer + PROMPT_TOKENS, training.groups_per_step * training.num_generations
    for unsupported, remedy in (
        (
            bool(episodes),
            f"{', '.join(episodes)}: a crew learns from whole answers, and the rows of an episode"
            " hold observations as well: leave the task out",
        ),
        (
            longest > MAX_TOKENS,
            f"a crew computes {MAX_TOKENS} tokens at a time, and an answer may have {answer}: set"
            f" training.max_completion_length to {MAX_TOKENS - 1024} or lower",
        ),
        (
            rows > MAX_MICRO_BATCHES * (MAX_TOKENS // longest),
            f"a step of {rows} answers of {answer} tokens is more than {MAX_MICRO_BATCHES}"
            f" micro-batches of {MAX_TOKENS}: set training.groups_per_step lower",
        ),
        (
            policy.quantization != "none",
            "stages are not quantised: set policy.quantization to none",
        ),
        (
            policy.optim != "adamw",
            "stages keep Adam's moments in 32 bits: set policy.optim to adamw",
        ),
    ):
        if unsupported:
            raise Refused(f"{remedy}, or set stages.mode to off")


# Memory: the bytes that a stage needs, and the bytes of this node.


def fits_whole(config: Config, directory: Path, placement: Placement) -> bool:
    """Return True if this node trains the whole policy by itself.

    Raises:
        DeviceError, ConfigError: the policy can be trained neither whole nor in stages.
    """
    policy, stages = config.policy, config.stages
    hf = offline(policy, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
    if stages.mode == "always":
        check_split(hf)
        return False
    room, need = capacity(config, placement), update_bytes(policy, hf, placement)
    if stages.mode == "off" or room is None or need <= room:
        return True
    if (
        placement.device.type == "cuda"
        and policy.device == "auto"
        and not stages.capacity
        and torch.cuda.device_count() > 1
    ):
        return True  # `policy.device.fit` spreads it over all GPUs, or raises with the reason
    reason = (
        f"{policy.model}: its weights need about {need / 2**30:.1f} GiB to train,"
        f" {placement.device} has {room / 2**30:.1f} GiB"
    )
    try:
        check_split(hf)
    except ConfigError as error:
        raise DeviceError(f"{reason}, and {error}") from None
    layer = smallest_stage(estimate_cost(config, hf, placement))
    if layer > room:
        raise DeviceError(f"{reason}, and one layer alone needs {layer / 2**30:.1f} GiB")
    return False


def capacity(config: Config, placement: Placement) -> int | None:
    """Return the bytes of this node for a policy or stage; None if unknown."""
    limit, measured = config.stages.capacity, free_bytes(placement.device)
    if not limit or measured is None:
        return limit or measured
    return min(limit, measured)


def stage_room(
    config: Config, hf: PretrainedConfig, placement: Placement, cost: ModelCost
) -> float:
    """Return the bytes of this node for a stage, beside a policy copy.

    Raises:
        DeviceError: that is less than one layer needs.
    """
    room = capacity(config, placement)
    memory = float(room if room is not None else update_bytes(config.policy, hf, placement))
    memory = within_host_memory(memory, config, placement)
    if config.stages.policy_copy not in ("memory", "both"):
        return memory
    copy, layer = HEADROOM * copy_memory(config, hf), smallest_stage(cost)
    if memory - copy < layer:
        raise DeviceError(
            f"stages.policy_copy: a copy in memory needs {copy / 2**30:.1f} GiB, training one layer"
            f" needs {layer / 2**30:.1f} GiB, and this node has {memory / 2**30:.1f} GiB: set it to"
            " off or disk"
        )
    return memory - copy


def within_host_memory(memory: float, config: Config, placement: Placement) -> float:
    """Return `memory` bytes of the device, or less if the host memory is too small to save and
    average a stage of that size."""
    free = free_bytes(torch.device("cpu"))
    if config.policy.lora.r or free is None or placement.device.type == "cpu":
        return memory
    return min(memory, free * TRAINED_BYTES / host_bytes_per_weight(config.weights))


def host_bytes_per_weight(weights: WeightsConfig) -> int:
    """Return the host bytes per trained weight for saving, averaging and checkpoints."""
    parts, many = weights.fragments, weights.fragments * 2**20
    averaging = host_bytes(many, parts if weights.rule != "off" else 0)
    return sum(averaging) // many + CHECKPOINT_BYTES


def copy_memory(config: Config, hf: PretrainedConfig) -> float:
    """Return the bytes of an int8 policy copy, with its adapter and caches."""
    parameters, edges = count_parameters(hf)
    caches = Shape.of_config(hf.to_dict()).cache_bytes * cached_tokens(config.training)
    return parameters + 4.0 * config.policy.lora.r * edges + caches


def estimate_cost(config: Config, hf: PretrainedConfig, placement: Placement) -> ModelCost:
    """Return the costs of the model's parts in training; on a CPU also for saving and averaging.

    Activations are those of the smallest micro-batch, the longest row alone, because the head
    halves larger ones that do not fit. A layer stores its input and is recomputed in the backward
    pass, see `StageRuntime`.
    """
    cfg, rank, kind = config.training, config.policy.lora.r, placement.device.type
    shape = Shape.of_config(hf.to_dict())
    beside = host_bytes_per_weight(config.weights) if kind == "cpu" else 0
    per_weight = placement.dtype.itemsize if rank else TRAINED_BYTES + beside
    method = Method(kind, str(placement.dtype).removeprefix("torch."), rank, checkpointing=True)
    longest = PROMPT_TOKENS + cfg.max_completion_length
    state = 4.0 * shape.hidden * longest  # hidden states from one stage to the next
    gradients = ITEM_BYTES[method.dtype] * (2 * shape.hidden + 3 * shape.intermediate)
    compute = (layer_bytes(shape, method) + gradients) * longest
    cache = shape.cache_bytes / shape.layers * cached_tokens(cfg)
    table = shape.vocabulary * shape.hidden
    # the gradient of a trained embedding or head exists twice while it is added
    copy = 0.0 if rank else 4.0 * table
    at_once = min(longest, logits_tokens(shape.vocabulary, kind))
    logits = 4.0 * shape.vocabulary * LOGITS_COPIES * at_once
    layer = PartCost(
        shape.layer_parameters * per_weight + cache + state, float(shape.layer_parameters)
    )
    # embedding and head are not computed at the same time as a layer
    return ModelCost(
        embedding=PartCost(table * per_weight + max(0.0, copy - compute), 0.0),
        layers=(layer,) * shape.layers,
        head=PartCost(table * per_weight + max(0.0, logits + copy - compute), float(table)),
        stage=compute + ASSUMED_WAVES * state,
    )


def smallest_stage(cost: ModelCost) -> float:
    """Return the bytes of a stage with one layer, including headroom."""
    return HEADROOM * (cost.stage + cost.layers[0].memory)


def cached_tokens(cfg: TrainingConfig) -> int:
    """Return the number of tokens in the caches of a step's samples."""
    rows = cfg.groups_per_step * cfg.num_generations
    return min(rows * (PROMPT_TOKENS + cfg.max_completion_length), ASSUMED_WAVES * MAX_TOKENS)


def measure_speed(placement: Placement) -> float:
    """Return the floating-point operations per second of a matrix product, as a power of two.

    The rounding gives crews of similar machines the same blocks, so that their stages can be
    averaged.
    """
    size = SPEED_MATRIX_SIZE
    dtype = placement.dtype if placement.device.type != "cpu" else torch.float32
    a = torch.ones(size, size, device=placement.device, dtype=dtype)
    float((a @ a).sum())  # the first product also starts the device
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SPEED_SECONDS or not done:
        for _ in range(4):
            b = a @ a
        float(b.sum())
        done += 4
    return 2.0 ** round(math.log2(done * 2.0 * size**3 / spent))
