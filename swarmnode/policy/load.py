"""Loads any Hugging Face causal LM, the embedded one by the same path, and holds it as a
`Policy`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from swarmnode.config import PolicyConfig
from swarmnode.errors import DeviceError, StateError, Unavailable
from swarmnode.install import install_command
from swarmnode.policy.decode import pads
from swarmnode.policy.device import Placement, fit, probe, set_up
from swarmnode.policy.engine.slots import unsuited
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
from swarmnode.policy.logprobs import WAYS, splits_head, takes_way
from swarmnode.policy.model import Policy
from swarmnode.policy.text import Chat, vocabulary
from swarmnode.policy.ways import rounding

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    Model = PreTrainedModel | PeftModel

T = TypeVar("T")

LORA_MODULES = "all-linear"
"""What gets an adapter: nodes with adapters elsewhere could not average, so that it is nobody's
choice alone."""
LOSS_SCALE_GROWTH_STEPS = 100
"""Steps without an overflow after which float16's loss scale is doubled. torch's 2,000 suit
training with millions of steps: a run of reinforcement learning has hundreds."""
PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_policy(cfg: PolicyConfig, log: Callable[[str], None] = lambda line: None) -> Policy:
    """Reads `cfg.model`: `embedded`, a directory, or a Hub name (HF_HUB_OFFLINE is respected).
    `log` gets a line per stage.

    Never runs code that comes with a model and reads only safetensors. Raises Unavailable when the
    model or device is not there, DeviceError, with the estimate, when it does not fit.
    """
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    disable_progress_bar()  # `log` says it, in lines
    placement = probe(cfg)
    check_optim(cfg, placement)
    log(placement.reason)
    set_up(placement.device)
    with local_directory(cfg) as directory:
        config = offline(
            cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
        placement = offline(cfg, lambda: fit(cfg, config, placement))
        weight_files(directory)
        log(f"loading {cfg.model}")
        tokenizer = offline(
            cfg, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
        model = load_model(cfg, directory, placement)
        log("hashing the base weights")
        identity = fingerprint(directory)
    embeddings = model.get_input_embeddings().get_parameter("weight")
    device = embeddings.device if placement.spread else placement.device
    accelerator = make_accelerator(placement)
    eos_ids = end_tokens(cfg, model, tokenizer)
    eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(eos_ids)
    vocab_size, unused_ids = vocabulary(tokenizer, embeddings.shape[0])
    policy = Policy(
        model=add_adapter(cfg, model) if cfg.lora.r else model,
        tokenizer=tokenizer,
        device=device,
        dtype=placement.dtype,
        fingerprint=identity,
        tokenizer_hash=tokenizer_hash(tokenizer),
        accelerator=accelerator,
        eos_id=eos_id,
        eos_ids=eos_ids,
        pad_id=padding_token(tokenizer, embeddings, eos_id),
        vocab_size=vocab_size,
        unused_ids=unused_ids,
        chat=Chat.of(cfg.chat, tokenizer),
        context=context_of(model.config),
    )
    s = policy.statistics()
    log(
        f"{cfg.model}: {s.parameters:,} parameters, {s.trainable_parameters:,} trained;"
        f" {placement.reason}"
    )
    if (
        cfg.dtype == "auto"
        and policy.dtype == torch.float16
        and not math.isfinite(rounding(policy))
    ):
        log("float16 cannot hold what this model computes; it computes in float32")
        del policy, model, embeddings  # its memory
        return load_policy(cfg.model_copy(update={"dtype": "float32"}), log)
    find_ways(cfg, policy)
    return policy


def find_ways(cfg: PolicyConfig, policy: Policy) -> None:
    """Try every way of computing on a few tokens. Raises DeviceError when memory runs out."""
    try:
        pads(policy)
        unsuited(policy)
        for way in WAYS:
            takes_way(policy, way)
        splits_head(policy)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"policy.model {cfg.model!r}: memory ran out in a trial") from error


@contextlib.contextmanager
def local_directory(cfg: PolicyConfig, fits: bool = True) -> Iterator[Path]:
    """The model as a directory, so that the rest knows one case only. Raises Unavailable with what
    was tried.

    fits: refuse to fetch, with DeviceError, what this machine could not hold.
    """
    if cfg.model == "embedded":
        with resources.as_file(resources.files("swarmnode.policy") / "embedded") as directory:
            yield directory
        return
    directory = Path(cfg.model).expanduser()
    if not directory.is_dir():
        if cfg.model.startswith((".", "/", "~")) or cfg.model.count("/") > 1:
            raise Unavailable(f"policy.model {cfg.model!r}: no such directory")
        directory = download(cfg, fits)
    if not (directory / "config.json").is_file():
        raise Unavailable(f"policy.model {cfg.model!r}: no config.json in {directory}")
    yield directory


@contextlib.contextmanager
def config_directory(cfg: PolicyConfig) -> Iterator[Path]:
    """Where the model's config.json is; of a Hub model nothing else is fetched. Raises
    Unavailable."""
    if (
        cfg.model != "embedded"
        and not Path(cfg.model).expanduser().is_dir()
        and not cfg.model.startswith((".", "/", "~"))
    ):
        from huggingface_hub import hf_hub_download

        yield Path(
            offline(cfg, lambda: hf_hub_download(cfg.model, "config.json", revision=cfg.revision))
        ).parent
        return
    with local_directory(cfg) as directory:
        yield directory


def download(cfg: PolicyConfig, fits: bool = True) -> Path:
    """The snapshot of a Hub model, config first: whether the model fits is known before its weights
    are fetched."""
    from huggingface_hub import hf_hub_download, snapshot_download

    config_file = offline(
        cfg, lambda: hf_hub_download(cfg.model, "config.json", revision=cfg.revision)
    )
    if fits:
        config = offline(
            cfg,
            lambda: AutoConfig.from_pretrained(Path(config_file).parent, trust_remote_code=False),
        )
        offline(cfg, lambda: fit(cfg, config, probe(cfg)))
    kinds = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    fetch = lambda: snapshot_download(
        cfg.model,
        revision=cfg.revision,
        allow_patterns=kinds,
        ignore_patterns=["*/*", "consolidated*"],
    )
    return Path(offline(cfg, fetch))


def offline(cfg: PolicyConfig, read: Callable[[], T]) -> T:
    """`read()`, its many ways to fail turned into one line. Raises Unavailable."""
    try:
        return read()
    except (OSError, ValueError, KeyError, ImportError) as error:
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        if isinstance(error, GatedRepoError):
            why = "its licence has to be accepted on the Hub first"
        elif isinstance(error, RepositoryNotFoundError):
            why = "neither a directory nor a model on the Hub"
        elif isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            cause = (
                "HF_HUB_OFFLINE is set"
                if os.environ.get("HF_HUB_OFFLINE")
                else "the Hub cannot be reached"
            )
            why = f"not a directory, not in the local cache, and {cause}"
        else:
            why = str(error).strip().split("\n")[0] or type(error).__name__
        raise Unavailable(f"policy.model {cfg.model!r}: {why}") from error


def load_model(cfg: PolicyConfig, directory: Path, placement: Placement) -> PreTrainedModel:
    """Weights on their device: float32 where they are trained, the compute dtype where they lie
    frozen under an adapter."""
    dtype = placement.dtype if cfg.lora.r else torch.float32
    target = "auto" if placement.spread else {"": placement.device}
    extra = (
        {} if cfg.quantization == "none" else {"quantization_config": quantization(cfg, placement)}
    )
    read = lambda: AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        device_map=target,
        use_safetensors=True,
        trust_remote_code=False,
        **extra,
    )
    try:
        model = offline(cfg, read)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"policy.model {cfg.model!r} does not fit on {placement.device}: {error}"
        ) from error
    except (RuntimeError, AttributeError, TypeError, SafetensorError) as error:
        # e.g. wrong shapes, a damaged file
        raise Unavailable(
            f"policy.model {cfg.model!r}: {str(error).strip().splitlines()[0]}"
        ) from error
    # no dropout: the log-probabilities of sampling and of training must be of one function
    return model.eval()


def quantization(cfg: PolicyConfig, placement: Placement) -> BitsAndBytesConfig:
    """How bitsandbytes is to keep the frozen base: LLM.int8() (arXiv 2208.07339) or NF4 with double
    quantisation (QLoRA, arXiv 2305.14314).

    Raises Unavailable without the extra `quant`, and on anything but a CUDA device.
    """
    check_bitsandbytes(f"policy.quantization {cfg.quantization!r}", placement)
    if cfg.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=placement.dtype,
    )


def check_optim(cfg: PolicyConfig, placement: Placement) -> None:
    """Raises Unavailable where the moments cannot be kept in 8 bits: before a model is downloaded
    for it."""
    if cfg.optim == "adamw_8bit":
        check_bitsandbytes(f"policy.optim {cfg.optim!r}", placement)


def check_bitsandbytes(key: str, placement: Placement) -> None:
    """Make sure that it can be used, and does not fill the log.

    Raises Unavailable, naming the setting that wants it, without the extra `quant` or a CUDA
    device.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable(f"{key} needs bitsandbytes: {install_command('quant')}")
    if placement.device.type != "cuda":
        raise Unavailable(f"{key} needs a CUDA device, not {placement.device}")
    # a warning for each product of bfloat16 in 8 bits
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def add_adapter(cfg: PolicyConfig, model: PreTrainedModel) -> PeftModel:
    """LoRA by peft: base frozen, adapter in float32. Raises Unavailable when the model has no
    linear layer to adapt."""
    from peft import get_peft_model

    settings = lora_settings(cfg)
    # not `prepare_model_for_kbit_training`, which makes embedding and head, and so all activations,
    # float32
    rename_checkpointing_flag(type(model))
    try:
        return get_peft_model(model, settings).eval()
    except ValueError as error:
        raise Unavailable(f"policy.lora: {str(error).splitlines()[0]}") from error


def lora_settings(cfg: PolicyConfig) -> LoraConfig:
    """peft's LoraConfig."""
    from peft import LoraConfig

    return LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.lora_alpha,
        target_modules=LORA_MODULES,
        task_type="CAUSAL_LM",
    )


def make_accelerator(placement: Placement) -> Accelerator:
    """accelerate's mixed precision. Its state is global; two policies of different dtype in one
    process need it reset."""
    wanted = PRECISION[placement.dtype]
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        # autocast is of the state's kind of device
        elsewhere = state.device.type != placement.device.type
        if elsewhere or state.mixed_precision != wanted:
            AcceleratorState._reset_state(reset_partial_state=elsewhere)
    accelerator = Accelerator(
        mixed_precision=wanted,
        cpu=placement.device.type == "cpu",
        kwargs_handlers=[GradScalerKwargs(growth_interval=LOSS_SCALE_GROWTH_STEPS)],
    )
    if placement.dtype == torch.float16 and placement.device.type == "cpu":
        # accelerate scales the loss on other devices only; scaling on a CPU lets tests run the same
        # code
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=LOSS_SCALE_GROWTH_STEPS)
    return accelerator


def end_tokens(
    cfg: PolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Where generation stops: what the tokenizer and the generation config say together. Raises
    Unavailable when neither says."""
    return ends_of(cfg, model.generation_config, tokenizer)


def configured_ends(
    cfg: PolicyConfig, directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """`end_tokens` of a model that is not loaded."""
    try:
        generation = GenerationConfig.from_pretrained(directory)
    except OSError:  # it has none: transformers makes one of the model's config
        generation = GenerationConfig.from_model_config(config)
    return ends_of(cfg, generation, tokenizer)


def ends_of(
    cfg: PolicyConfig, generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    configured = getattr(generation, "eos_token_id", None)
    found = {
        tokenizer.eos_token_id,
        *(configured if isinstance(configured, list) else [configured]),
    } - {None}
    if not found:
        raise Unavailable(
            f"policy.model {cfg.model!r}: neither tokenizer nor generation config names an"
            " end-of-sequence token"
        )
    return frozenset(found)


def context_of(config: PretrainedConfig) -> int | None:
    """Most tokens of a row for which the model computes one function; None without a limit.

    Beyond `original_max_position_embeddings` a model with long-rope takes other frequencies for
    all positions of a pass: a short row would then depend on the longest row beside it.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx")
    limits = [getattr(text, name, None) for name in names]
    rope = getattr(text, "rope_parameters", None) or {}
    for one in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        if one.get("rope_type", one.get("type")) in ("longrope", "su"):
            limits += [
                one.get("original_max_position_embeddings"),
                getattr(text, "original_max_position_embeddings", None),
            ]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def padding_token(tokenizer: PreTrainedTokenizerBase, embeddings: torch.Tensor, eos_id: int) -> int:
    """A token to pad with: the tokenizer's own, unless its embedding is zero.

    A model that divides by the norm of a hidden state has no gradient at zero, and a gradient that
    is not a number spreads from padding to all weights.
    """
    wanted = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id
    for token in (wanted, eos_id):
        if token < len(embeddings) and bool(embeddings[token].any()):
            return token
    others = embeddings.detach().any(1).nonzero()
    return int(others[0]) if len(others) else wanted


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained tensors by name, not copied: what a state file has to hold beside the base."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def check_shapes(
    parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises StateError when `tensors` cannot take the place of `parameters`: other names or
    shapes."""
    wrong = {name: p.shape for name, p in parameters.items()}.items() ^ {
        name: t.shape for name, t in tensors.items()
    }.items()
    if wrong:
        raise StateError(f"these weights are of another policy: {min(name for name, _ in wrong)}")


@torch.no_grad()
def overwrite(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Set every parameter to the tensor of its name. Raises StateError, before anything has
    changed, when names or shapes differ."""
    check_shapes(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def rename_checkpointing_flag(model: type[PreTrainedModel]) -> None:
    """Let a class answer to the earlier name of `is_activation_checkpointing`. peft 0.21 still
    reads it, and transformers 5.23 deprecates it."""
    current = getattr(PreTrainedModel, "is_activation_checkpointing", None)
    if current is not None:
        model.is_gradient_checkpointing = current  # type: ignore[method-assign,assignment]
