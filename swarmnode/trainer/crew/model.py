"""What a node knows of a policy that it cannot hold alone: its text half, what its parts cost, how
much fits here; and one stage of it.

Nothing of the weights is read before a stage was assigned, except to hash them; and then no tensor
of another stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.config import LoraSettings, PolicyConfig, StagesConfig, TrainingConfig, WeightsConfig
from swarmnode.crew.local import Offering
from swarmnode.crew.plan import Capacity, ModelCost, model_cost
from swarmnode.errors import ConfigError, DeviceError, Refused, Unavailable
from swarmnode.pipeline.context import CrewSettings
from swarmnode.pipeline.frames import MICRO_BATCHES, ActivationCodec, FrameLimits, activation_bytes
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.spec import check_model_type, stage_specs
from swarmnode.pipeline.split import adapt, load_stage
from swarmnode.policy.device import (
    HEADROOM,
    TRAINED_BYTES,
    Placement,
    count_parameters,
    free_bytes,
    needed_bytes,
    probe,
    set_up,
)
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
from swarmnode.policy.footprint import (
    ITEM_BYTES,
    LOGITS_COPIES,
    UNDO_WEIGHTS,
    Method,
    Shape,
    host_bytes,
    layer_bytes,
    logits_tokens,
)
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import (
    configured_ends,
    context_of,
    local_directory,
    lora_settings,
    offline,
)
from swarmnode.policy.text import Chat, PolicyText, vocabulary
from swarmnode.recovery.sources import LEARNING_RATE_FACTOR, PaperMode, Run, check_paper
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.swarm.manifest import check_model
from swarmnode.swarm.manifest_store import stored

TOKENS = 16384
"""Padded tokens of a micro-batch or wave in any crew: what a member is ready to receive."""
WAVES = 4
"""Waves that are under way at a time, about: as many as stages."""
PROMPT_TOKENS = 64
"""A question's length, about: it says how much the caches of a step's waves take."""
WAYS_OF_AN_UPDATE = 4
"""To the last stage and back, while scores are computed and while gradients are."""
SPEED_SIZE = 512
"""Side of the matrices that are multiplied to measure a machine."""
SNAPSHOT_BYTES = 2 * 3
"""For each weight of a stage: bfloat16 of the own snapshot as it is written, and of both ring
neighbours' as they come, which over home lines is nearly always."""
SPEED_SECONDS = 0.1


@dataclass(frozen=True)
class CrewTerms:
    """What members of a crew must have alike. Nodes that would train otherwise name another model:
    they never meet."""

    codec: ActivationCodec
    gradient_codec: ActivationCodec
    paper_mode: PaperMode
    lora: LoraSettings
    frozen_a: bool
    """Adapters have one A everywhere, see `averaging.lora.shares_a`."""
    learning_rate: float

    def hash(self, identity: bytes) -> bytes:
        """32 bytes. identity: fingerprint of architecture and base weights."""
        terms = {
            "codec": self.codec,
            "gradient_codec": self.gradient_codec,
            "paper_mode": self.paper_mode,
            "lora": self.lora.model_dump() if self.lora.r else None,
            "shares_a": self.frozen_a,
            "weight_decay": WEIGHT_DECAY,
            "learning_rate": self.learning_rate,
        }
        return hashlib.blake2b(
            identity + json.dumps(terms, sort_keys=True, separators=(",", ":")).encode(),
            digest_size=32,
        ).digest()


def crew_terms(
    stages: StagesConfig, lora: LoraSettings, weights: WeightsConfig, training: TrainingConfig
) -> CrewTerms:
    return CrewTerms(
        stages.codec,
        stages.gradient_codec,
        stages.paper_mode,
        lora,
        shares_a(lora, weights),
        training.learning_rate,
    )


@dataclass(frozen=True)
class CrewModel:
    """A model's directory and everything about it that fits any node."""

    directory: Path
    config: PretrainedConfig
    """transformers'."""
    text: PolicyText
    placement: Placement
    offering: Offering
    pretrained: bool
    """Whether its weights were trained before; those of a run from scratch are worth nothing to a
    stage that was lost."""
    policy: PolicyConfig
    terms: CrewTerms

    @property
    def run(self) -> Run:
        """What decides whether a lost stage may be made of its neighbours."""
        return run_of(self.terms, self.pretrained)

    def limits(self) -> FrameLimits:
        return FrameLimits(
            hidden=int(self.config.hidden_size), vocab=int(self.config.vocab_size), tokens=TOKENS
        )

    def settings(self) -> CrewSettings:
        terms = self.terms
        return CrewSettings(
            base=self.text.fingerprint,
            codec=terms.codec,
            gradient_codec=terms.gradient_codec,
            swapped=terms.paper_mode == "checkfree+",
            learning_rate=terms.learning_rate
            * (LEARNING_RATE_FACTOR if terms.paper_mode != "off" else 1.0),
        )

    def build(self, layers: tuple[int, ...], index: int) -> StageRuntime:
        """Stage `index` with the base model's weights, under an adapter where one is trained. Takes
        seconds.

        Raises ConfigError: the layers are not the model's; LocalError: a file is missing or
        damaged.
        """
        spec = stage_specs(self.config, layers)[index]
        lora = self.terms.lora.r > 0
        dtype = self.placement.dtype if lora else torch.float32
        stage = load_stage(self.directory, spec, dtype=dtype, device=self.placement.device)
        if lora:
            stage = adapt(stage, lora_settings(self.policy))
            if self.terms.frozen_a:
                freeze_a({spec.whole(name): p for name, p in stage.named_parameters()}, A_SEED)
        runtime = StageRuntime(
            spec, stage, dtype=self.placement.dtype, known_logits=self.text.known_logits
        )
        report_layers(stage, runtime.works)
        return runtime


def fits_whole(
    policy: PolicyConfig,
    stages: StagesConfig,
    training: TrainingConfig,
    weights: WeightsConfig,
    directory: Path,
    placement: Placement,
) -> bool:
    """Whether this node trains the policy by itself. Raises DeviceError, ConfigError where it can
    be trained neither way."""
    mode = stages.mode
    hf = offline(policy, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
    if mode == "always":
        check_model_type(hf)
        return False
    room = capacity(stages.capacity, placement)
    need = whole_bytes(policy, hf, placement)
    if mode == "off" or room is None or need <= room:
        return True
    if (
        placement.device.type == "cuda"
        and policy.device == "auto"
        and not stages.capacity
        and torch.cuda.device_count() > 1
    ):
        return True  # `policy.device.fit` spreads it over all GPUs, or says why not
    reason = (
        f"{policy.model}: its weights need about {need / 2**30:.1f} GiB to train,"
        f" {placement.device} has {room / 2**30:.1f} GiB"
    )
    try:
        check_model_type(hf)
    except ConfigError as error:
        raise DeviceError(f"{reason}, and {error}") from None
    layer = least(cost_of(training, policy.lora, weights, hf, placement)) * HEADROOM
    if layer > room:
        raise DeviceError(f"{reason}, and one layer alone needs {layer / 2**30:.1f} GiB")
    return False


def capacity(limit: int, placement: Placement) -> int | None:
    """Bytes for a policy or a stage of one; None where it cannot be measured and is not configured.
    limit: 0 is none."""
    measured = free_bytes(placement.device)
    if not limit:
        return measured
    return limit if measured is None else min(limit, measured)


def whole_bytes(policy: PolicyConfig, hf: PretrainedConfig, placement: Placement) -> int:
    """To train all of it here. Whoever can, and has no room to save and average it, is told so by
    its trainer, with remedies."""
    parameters, edges = count_parameters(hf)
    return needed_bytes(parameters, policy.lora.r * edges, placement.dtype, optim=policy.optim)


def kept_bytes(weights: WeightsConfig) -> int:
    """Host memory for each trained weight, beside training: to save it, to average it, and for
    snapshots. Of what came before an exchange a stage keeps no more than one fragment, since it
    sees no reward."""
    parts, many = weights.fragments, weights.fragments * UNDO_WEIGHTS
    return sum(host_bytes(many, parts if weights.rule != "off" else 0)) // many + SNAPSHOT_BYTES


def on_host(
    memory: float, adapter: LoraSettings, weights: WeightsConfig, placement: Placement
) -> float:
    """Bytes of a stage's device, less where the machine's own memory could not keep what is saved
    and averaged of so much."""
    free = free_bytes(torch.device("cpu"))
    if adapter.r or free is None or placement.device.type == "cpu":
        return memory
    return min(memory, free * TRAINED_BYTES / kept_bytes(weights))


@contextlib.contextmanager
def open_model(
    cfg: PolicyConfig,
    stages: StagesConfig,
    training: TrainingConfig,
    weights: WeightsConfig,
    terms: CrewTerms,
    data_dir: Path,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[CrewModel]:
    """The model as a CrewModel, for as long as the context is open. terms: `crew_terms` of the same
    sections.

    Raises LocalError: it is not there, not the swarm's, cannot be split, or is to be trained in a
    way that a crew cannot.
    """
    check_trainable(cfg, training)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    placement = probe(cfg)
    set_up(placement.device)
    with local_directory(cfg, fits=False) as directory:
        hf = offline(cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
        check_model_type(hf)
        pretrained = not is_untrained(directory)
        check_paper(terms.paper_mode, stages.stages, run_of(terms, pretrained))
        tokenizer = offline(
            cfg, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
        report("hashing the base weights")
        identity = fingerprint(directory)
        ends = configured_ends(cfg, directory, hf, tokenizer)
        eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(ends)
        vocab_size, unused_ids = vocabulary(tokenizer, int(hf.vocab_size))
        text = PolicyText(
            tokenizer=tokenizer,
            fingerprint=identity,
            tokenizer_hash=tokenizer_hash(tokenizer),
            eos_id=eos_id,
            eos_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id,
            vocab_size=vocab_size,
            unused_ids=unused_ids,
            chat=Chat.of(cfg.chat, tokenizer),
            context=context_of(hf),
        )
        opened = stored(data_dir)
        if opened is not None:
            check_model(opened.manifest, text.fingerprint, text.tokenizer_hash)
        cost = over_lines(
            cost_of(training, cfg.lora, weights, hf, placement),
            training,
            int(hf.hidden_size),
            terms,
        )
        room = capacity(stages.capacity, placement)
        memory = float(room if room is not None else whole_bytes(cfg, hf, placement))
        memory = on_host(memory, cfg.lora, weights, placement)
        if stages.keep_policy in ("memory", "both"):
            memory = beside_copy(memory, copy_memory(cfg, training, hf), cost)
        offering = Offering(
            terms.hash(identity), Capacity(memory / HEADROOM, measure_speed(placement)), cost
        )
        report(
            f"{cfg.model} in stages: {offering.capacity.memory / 2**30:.2f} GiB of it here;"
            f" {placement.reason}"
        )
        yield CrewModel(directory, hf, text, placement, offering, pretrained, cfg, terms)


def run_of(terms: CrewTerms, pretrained: bool) -> Run:
    return Run(
        swapped=terms.paper_mode == "checkfree+", pretrained=pretrained, adapter=terms.lora.r > 0
    )


def is_untrained(directory: Path) -> bool:
    """Whether the weights of this model are as they were initialised: every norm's scale is exactly
    one, which no training leaves so.

    Raises Unavailable for a damaged file.
    """
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith("norm.weight") and not bool(
                        (tensors.get_tensor(name) == 1).all()
                    ):
                        return False
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None
    return True


def check_trainable(policy: PolicyConfig, training: TrainingConfig) -> None:
    """Raises Refused for what only a whole policy can do."""
    if training.beta > 0:
        raise Refused(
            "a KL penalty needs a second, frozen policy, which no crew holds: set training.beta to"
            " 0, or stages.mode to off"
        )
    if training.max_completion_length + PROMPT_TOKENS > TOKENS:
        raise Refused(
            f"a crew computes {TOKENS} tokens at a time, and an answer may have"
            f" {training.max_completion_length}: set training.max_completion_length to"
            f" {TOKENS - 1024} or lower, or stages.mode to off"
        )
    rows = training.groups_per_step * training.num_generations
    if rows > MICRO_BATCHES * (TOKENS // (training.max_completion_length + PROMPT_TOKENS)):
        raise Refused(
            f"a step of {rows} answers of {training.max_completion_length} tokens is more than"
            f" {MICRO_BATCHES} micro-batches of {TOKENS}: set training.groups_per_step lower, or"
            " stages.mode to off"
        )
    if policy.quantization != "none":
        raise Refused(
            "stages are not quantised: set policy.quantization to none, or stages.mode to off"
        )
    if policy.optim != "adamw":
        raise Refused(
            "stages keep Adam's moments in 32 bits: set policy.optim to adamw, or stages.mode"
            " to off"
        )


def cost_of(
    cfg: TrainingConfig,
    adapter: LoraSettings,
    weights: WeightsConfig,
    hf: PretrainedConfig,
    placement: Placement,
) -> ModelCost:
    """What the parts of the model cost as this swarm trains it, and on a CPU saves and averages it.

    Activations are those of the smallest micro-batch that there can be, the longest row alone: the
    head halves larger ones where they do not fit. Layers keep their input and are run again one by
    one, see `pipeline.runtime`.
    """
    lora = adapter.r > 0
    tokens = min(cfg.per_device_train_tokens, TOKENS)
    beside = kept_bytes(weights) if placement.device.type == "cpu" else 0
    cost = model_cost(
        hf,
        batch_tokens=tokens,
        cached_tokens=cached_tokens(cfg),
        weight_bytes=placement.dtype.itemsize if lora else 4,
        trained_bytes=0 if lora else TRAINED_BYTES - 4 + beside,
    )
    kind, shape = placement.device.type, Shape.of_config(hf.to_dict())
    method = Method(
        kind, str(placement.dtype).removeprefix("torch."), adapter.r, checkpointing=True
    )
    longest = PROMPT_TOKENS + cfg.max_completion_length
    state = 4.0 * shape.hidden * longest
    """Bytes of hidden states as one stage gives them to the next."""
    gradients = ITEM_BYTES[method.dtype] * (2 * shape.hidden + 3 * shape.intermediate)
    layer = (layer_bytes(shape, method) + gradients) * longest
    # the gradient of a trained embedding, or of a piece of tokens in the head, is made before it is
    # added to the one that is there
    table = 0.0 if lora else 4.0 * shape.vocabulary * shape.hidden
    head = (
        4.0 * shape.vocabulary * LOGITS_COPIES * min(longest, logits_tokens(shape.vocabulary, kind))
        + table
    )
    return replace(
        cost,
        stage=layer + WAVES * state,
        # not at once with a layer's
        embedding=replace(cost.embedding, memory=cost.embedding.memory + max(0.0, table - layer)),
        layers=tuple(replace(part, memory=part.memory + state) for part in cost.layers),
        head=replace(cost.head, memory=cost.head.memory + max(0.0, head - layer)),
    )


def least(cost: ModelCost) -> float:
    """Bytes of a stage with one layer."""
    return cost.stage + cost.layers[0].memory


def cached_tokens(cfg: TrainingConfig) -> int:
    """In the caches of a step's samples."""
    return min(
        cfg.groups_per_step * cfg.num_generations * (PROMPT_TOKENS + cfg.max_completion_length),
        WAVES * TOKENS,
    )


def copy_memory(policy: PolicyConfig, training: TrainingConfig, hf: PretrainedConfig) -> float:
    """Bytes of a whole int8 copy to sample from, with its adapter and its caches."""
    parameters, edges = count_parameters(hf)
    caches = model_cost(
        hf, batch_tokens=1, cached_tokens=cached_tokens(training), weight_bytes=0, trained_bytes=0
    ).layers
    return parameters + 4.0 * policy.lora.r * edges + sum(layer.memory for layer in caches)


def beside_copy(memory: float, copy: float, cost: ModelCost) -> float:
    """Bytes that a copy leaves for a stage. Raises DeviceError where that is less than a layer."""
    left, layer = memory - copy * HEADROOM, least(cost) * HEADROOM
    if left < layer:
        raise DeviceError(
            f"stages.keep_policy: a copy in memory needs {copy * HEADROOM / 2**30:.1f} GiB and one"
            f" layer to train {layer / 2**30:.1f} GiB, and {memory / 2**30:.1f} GiB are here: set"
            " it to off or disk"
        )
    return left


def over_lines(cost: ModelCost, cfg: TrainingConfig, hidden: int, terms: CrewTerms) -> ModelCost:
    """What a step costs lines besides: bytes of a micro-batch, and how often everybody waits for
    the way through all stages."""
    tokens = min(cfg.per_device_train_tokens, TOKENS)
    sampled = (
        cfg.groups_per_step * cfg.num_generations * (PROMPT_TOKENS + cfg.max_completion_length)
    )
    both = activation_bytes(terms.codec, tokens, hidden) + activation_bytes(
        terms.gradient_codec, tokens, hidden
    )
    ways = cfg.max_completion_length + WAYS_OF_AN_UPDATE
    batches = max(1.0, sampled / tokens)
    return replace(cost, batch_bytes=float(both), batches=batches, crossings=ways / batches)


def measure_speed(placement: Placement) -> float:
    """Floating-point operations per second of a matrix product, forward, to a power of two.

    So crews of like machines are split alike whatever else these are doing, and their stages can be
    averaged with each other's.
    """
    size = SPEED_SIZE
    dtype = placement.dtype if placement.device.type != "cpu" else torch.float32
    a = torch.ones(size, size, device=placement.device, dtype=dtype)
    float((a @ a).sum())  # the first one also starts the device
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SPEED_SECONDS or not done:
        for _ in range(4):
            b = a @ a
        float(b.sum())
        done += 4
    return 2.0 ** round(math.log2(done * 2.0 * size**3 / spent))
