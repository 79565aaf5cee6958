"""Loads a Hugging Face causal LM, or the embedded one, as a `Policy`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from swarmnode.gguf import is_gguf
from swarmnode.install import install_command
from swarmnode.model_defaults import is_on_hub
from swarmnode.policy.convert import local_copy, tell
from swarmnode.policy.device import Placement, fit, probe, set_threads, set_up
from swarmnode.policy.fingerprint import (
    fingerprint,
    refuse_pointers,
    tokenizer_hash,
    weight_files,
)
from swarmnode.policy.linear import use_onednn
from swarmnode.policy.model import Policy
from swarmnode.policy.published import GATED
from swarmnode.policy.text import Chat, vocabulary
from swarmnode.policy.ways import rounding

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    Model = PreTrainedModel | PeftModel

T = TypeVar("T")

LORA_MODULES = "all-linear"
"""Modules that have an adapter. It is not a setting, since nodes with different modules could not
average."""
LOSS_SCALE_GROWTH_STEPS = 100
"""Steps without an overflow after which float16's loss scale is doubled. torch's default of 2,000
is too large for reinforcement learning with hundreds of steps."""
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
"""Names of files of which every tokenizer has at least one."""
MODULES_NAMED = 6
"""Most modules that a message names."""
PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_policy(
    cfg: PolicyConfig, log: Callable[[str], None] = lambda line: None, trains: bool = True
) -> Policy:
    """Load `cfg.model`: `embedded`, `smollm2`, a directory, a GGUF file, or a Hub name
    (HF_HUB_OFFLINE is respected).

    Code that comes with a model never runs, and only safetensors are read. Methods of computing
    log-probabilities are tried at their first use.

    Args:
        log: Receives a line per stage of loading.
        trains: False for a policy that is only sampled: all weights are in the compute dtype, and
            memory for an update is not needed.

    Raises:
        Unavailable: The model or the device does not exist.
        DeviceError: The model does not fit; the message has the estimate.
    """
    set_threads(cfg)
    disable_progress_bar()  # `log` reports progress
    placement = probe(cfg)
    check_optim(cfg, placement)
    log(placement.reason)
    set_up(placement.device)
    with local_directory(cfg, fits=trains, log=log) as directory:
        config = offline(
            cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        )
        placement = offline(cfg, lambda: fit(cfg, config, placement, trains))
        weight_files(directory)
        log(f"loading {cfg.model}")
        tokenizer = load_tokenizer(cfg, directory)
        model = load_model(cfg, directory, placement, log, trains)
        log("hashing the base weights")
        identity = fingerprint(directory)
    embeddings = model.get_input_embeddings().get_parameter("weight")
    device = embeddings.device if placement.spread else placement.device
    accelerator = make_accelerator(placement)
    eos_ids = end_tokens(cfg, model.generation_config, tokenizer)
    eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(eos_ids)
    vocab_size, unused_ids = vocabulary(tokenizer, embeddings.shape[0])
    trained = add_adapter(cfg, model) if cfg.lora.r else model
    use_onednn(trained, device, placement.dtype)
    policy = Policy(
        model=trained,
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
        chat=Chat.of(cfg.chat, tokenizer, eos_ids),
        context=context_length(model.config),
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
        log("this model overflows in float16; using float32")
        del policy, trained, model, embeddings  # free their memory
        return load_policy(cfg.model_copy(update={"dtype": "float32"}), log, trains)
    return policy


@contextlib.contextmanager
def local_directory(
    cfg: PolicyConfig, fits: bool = True, log: Callable[[str], None] = tell
) -> Iterator[Path]:
    """Yield the directory of the model; download or convert it if necessary.

    Args:
        fits: True to refuse the download of a model that does not fit on this machine.
        log: Receives a line per stage of a conversion.

    Raises:
        Unavailable: There is no such model.
        DeviceError: The model does not fit.
    """
    if cfg.model == "embedded":
        with resources.as_file(resources.files("swarmnode.policy") / "embedded") as directory:
            yield directory
        return
    if is_gguf(cfg.model):
        directory = local_copy(cfg.model, log)
    else:
        directory = download(cfg, fits) if is_on_hub(cfg.model) else Path(cfg.model).expanduser()
    if not directory.is_dir():
        raise Unavailable(f"policy.model {cfg.model!r}: no such directory")
    if (directory / "adapter_config.json").is_file():
        raise Unavailable(
            f"policy.model {cfg.model!r}: {directory} contains an adapter, but training starts from"
            " a whole model: write one with `swarmnode export --merge`, or merge_and_unload of peft"
        )
    if not (directory / "config.json").is_file():
        raise Unavailable(f"policy.model {cfg.model!r}: no config.json in {directory}")
    offline(cfg, lambda: refuse_pointers(directory.glob("*.json")))
    yield directory


@contextlib.contextmanager
def config_directory(cfg: PolicyConfig, log: Callable[[str], None] = tell) -> Iterator[Path]:
    """Yield the directory of the model's config.json. Of a Hub model no other file is downloaded.

    Args:
        log: Receives a line per stage of a conversion.

    Raises:
        Unavailable: There is no such model.
    """
    if is_on_hub(cfg.model):
        yield hub_config(cfg).parent
        return
    with local_directory(cfg, log=log) as directory:
        yield directory


def hub_config(cfg: PolicyConfig) -> Path:
    """Download config.json of a Hub model and return its path. Raises Unavailable."""
    from huggingface_hub import hf_hub_download

    fetch = lambda: hf_hub_download(cfg.model, "config.json", revision=cfg.revision)
    return Path(offline(cfg, fetch))


def download(cfg: PolicyConfig, fits: bool = True) -> Path:
    """Download a Hub model and return its directory. config.json comes first, so that a model that
    does not fit is refused before its weights are downloaded."""
    from huggingface_hub import snapshot_download

    directory = hub_config(cfg).parent
    if fits:
        read = lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        config = offline(cfg, read)
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
    """Return `read()`.

    Raises:
        Unavailable: `read` failed; the message is one line.
    """
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
            why = GATED
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


def load_tokenizer(cfg: PolicyConfig, directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory.

    Raises:
        Unavailable: It is missing or damaged.
    """
    # transformers returns an empty tokenizer for some architectures.
    if not any(next(directory.glob(pattern), None) for pattern in VOCABULARY_FILES):
        raise Unavailable(
            f"policy.model {cfg.model!r}: no tokenizer in {directory}: copy tokenizer.json,"
            " tokenizer_config.json and chat_template.jinja of its base model into it"
        )
    refuse_pointers(path for each in VOCABULARY_FILES for path in directory.glob(each))
    read = lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    tokenizer: PreTrainedTokenizerBase = offline(cfg, read)
    return tokenizer


def load_model(
    cfg: PolicyConfig,
    directory: Path,
    placement: Placement,
    log: Callable[[str], None] = lambda line: None,
    trains: bool = True,
) -> PreTrainedModel:
    """Load the weights onto their device: in float32 if they are trained, in the compute dtype if
    they are frozen.

    Args:
        log: Receives a line if the files have weights that the model does not use.
        trains: False if all weights are frozen.

    Raises:
        Unavailable: The files are damaged or lack weights, or the architecture is unknown.
        DeviceError: The model does not fit.
    """
    dtype = placement.dtype if cfg.lora.r or not trains else torch.float32
    target = "auto" if placement.spread else {"": placement.device}
    extra = (
        {} if cfg.quantization == "none" else {"quantization_config": quantization(cfg, placement)}
    )
    read: Callable[[], Any] = lambda: AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        device_map=target,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below
        **extra,
    )
    try:
        model: PreTrainedModel
        model, found = offline(cfg, read)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"policy.model {cfg.model!r} does not fit on {placement.device}: {error}"
        ) from error
    except (RuntimeError, AttributeError, TypeError, SafetensorError) as error:
        # e.g. wrong shapes, a damaged file
        raise Unavailable(
            f"policy.model {cfg.model!r}: {str(error).strip().splitlines()[0]}"
        ) from error
    if mismatched := found["mismatched_keys"]:
        names = [name for name, *_ in mismatched]
        raise Unavailable(
            f"policy.model {cfg.model!r}: weights of the files have other shapes than config.json"
            f" describes ({name_modules(names)}): download the model again, or correct config.json"
        )
    # transformers fills missing weights with random numbers. Tied weights do not count as missing.
    if missing := found["missing_keys"]:
        raise Unavailable(
            f"policy.model {cfg.model!r}: the files lack {len(missing)} weights that config.json"
            f" describes ({name_modules(missing)}): download the model again, or correct"
            " config.json"
        )
    report_unexpected(found["unexpected_keys"], log)
    # Without dropout, so that sampling and training compute the same log-probabilities.
    return model.eval()


def report_unexpected(names: Iterable[str], log: Callable[[str], None]) -> None:
    """Log a line if the files have weights of these names, which the model does not use."""
    if names := set(names):
        log(
            f"{len(names)} weights of the files are not part of the model that config.json"
            f" describes, and are not used: {name_modules(names)}"
        )


def name_modules(names: Iterable[str]) -> str:
    """Return the modules of some weights for a message, e.g. "model.layers.4, lm_head"."""
    number = lambda text: [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)
    ]
    found = sorted({re.sub(r"(\.\d+)\..*|\.(weight|bias)$", r"\1", n) for n in names}, key=number)
    more = f" and {len(found) - MODULES_NAMED} more" if len(found) > MODULES_NAMED else ""
    return ", ".join(found[:MODULES_NAMED]) + more


def quantization(cfg: PolicyConfig, placement: Placement) -> BitsAndBytesConfig:
    """Return the bitsandbytes configuration of the frozen base: LLM.int8() (arXiv 2208.07339), or
    NF4 with double quantisation (QLoRA, arXiv 2305.14314).

    Raises:
        Unavailable: bitsandbytes is not installed, or the device is not a CUDA device.
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
    """Check before a download that 8-bit moments are possible, if they are configured.

    Raises:
        Unavailable: bitsandbytes is not installed, or the device is not a CUDA device.
    """
    if cfg.optim == "adamw_8bit":
        check_bitsandbytes(f"policy.optim {cfg.optim!r}", placement)


def check_bitsandbytes(key: str, placement: Placement) -> None:
    """Check that bitsandbytes can be used, and silence its warnings.

    Args:
        key: Setting that needs it, for the error message.

    Raises:
        Unavailable: bitsandbytes is not installed, or the device is not a CUDA device.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unavailable(f"{key} needs bitsandbytes: {install_command('quant')}")
    if placement.device.type != "cuda":
        raise Unavailable(f"{key} needs a CUDA device, not {placement.device}")
    # It logs a warning for each product of bfloat16 in 8 bits.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def add_adapter(cfg: PolicyConfig, model: PreTrainedModel) -> PeftModel:
    """Add a LoRA adapter in float32, and freeze the base.

    Raises:
        Unavailable: The model has no linear layer.
    """
    from peft import get_peft_model

    settings = lora_settings(cfg)
    # Not `prepare_model_for_kbit_training`: it converts embedding and head, and therefore all
    # activations, to float32.
    rename_checkpointing_flag(type(model))
    try:
        return get_peft_model(model, settings).eval()
    except ValueError as error:
        raise Unavailable(f"policy.lora: {str(error).splitlines()[0]}") from error


def lora_settings(cfg: PolicyConfig) -> LoraConfig:
    """Return the settings of the adapter for peft."""
    from peft import LoraConfig

    return LoraConfig(
        r=cfg.lora.r,
        lora_alpha=cfg.lora.lora_alpha,
        target_modules=LORA_MODULES,
        task_type="CAUSAL_LM",
    )


def make_accelerator(placement: Placement) -> Accelerator:
    """Return an accelerator for mixed precision. Its state is global; it is reset if another policy
    in this process has another dtype."""
    wanted = PRECISION[placement.dtype]
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        # Autocast applies to the state's device type.
        elsewhere = state.device.type != placement.device.type
        if elsewhere or state.mixed_precision != wanted:
            AcceleratorState._reset_state(reset_partial_state=elsewhere)
    accelerator = Accelerator(
        mixed_precision=wanted,
        cpu=placement.device.type == "cpu",
        kwargs_handlers=[GradScalerKwargs(growth_interval=LOSS_SCALE_GROWTH_STEPS)],
    )
    if placement.dtype == torch.float16 and placement.device.type == "cpu":
        # accelerate does not scale the loss on a CPU. It is scaled here so that tests run the same
        # code.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=LOSS_SCALE_GROWTH_STEPS)
    return accelerator


def configured_ends(
    cfg: PolicyConfig, directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return `end_tokens` of a model that is not loaded."""
    try:
        generation = GenerationConfig.from_pretrained(directory)
    except OSError:  # without one, transformers derives it from the model's config
        generation = GenerationConfig.from_model_config(config)
    return end_tokens(cfg, generation, tokenizer)


def end_tokens(
    cfg: PolicyConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the tokens that end a completion: those of tokenizer and generation config together.

    Raises:
        Unavailable: Neither of them names one.
    """
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


def context_length(config: PretrainedConfig) -> int | None:
    """Return the largest number of tokens in a row; None without a limit.

    For a model with long-rope the limit is `original_max_position_embeddings`. Beyond it, the model
    uses other frequencies for all positions of a pass, and a short row would depend on the longest
    row in its batch.
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
    """Return the padding token: the tokenizer's, unless its embedding is zero.

    A model that divides by the norm of a hidden state has a NaN gradient at zero, which would
    spread from padding to all weights.
    """
    wanted = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id
    for token in (wanted, eos_id):
        if token < len(embeddings) and bool(embeddings[token].any()):
            return token
    others = embeddings.detach().any(1).nonzero()
    return int(others[0]) if len(others) else wanted


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name, not copied."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def check_shapes(
    parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Check that `tensors` have the names and shapes of `parameters`.

    Raises:
        StateError: A name or shape differs.
    """
    wrong = {name: p.shape for name, p in parameters.items()}.items() ^ {
        name: t.shape for name, t in tensors.items()
    }.items()
    if wrong:
        raise StateError(f"weights of another policy: {min(name for name, _ in wrong)} differs")


@torch.no_grad()
def overwrite(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Set every parameter to the tensor of its name.

    Raises:
        StateError: A name or shape differs; nothing has changed.
    """
    check_shapes(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def rename_checkpointing_flag(model: type[PreTrainedModel]) -> None:
    """Add the former name of `is_activation_checkpointing` to a model class. peft 0.21 still reads
    it, and transformers 5.23 deprecates it."""
    current = getattr(PreTrainedModel, "is_activation_checkpointing", None)
    if current is not None:
        model.is_gradient_checkpointing = current  # type: ignore[method-assign,assignment]
