"""Selects device and dtype of the policy, and checks that the model fits, before weights are
read."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from swarmnode.config import PolicyConfig
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.limits import available_memory, processors
from swarmnode.model_shape import Shape
from swarmnode.policy.footprint import OPTIMIZER_BYTES, Method, Optim, footprint

BASE_BITS = {"none": None, "8bit": 8, "4bit": 4}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRAINED_BYTES = 16
"""Bytes per trained parameter: float32 weight 4, gradient 4, Adam's two moments 8."""
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 32 * 2**20
"""Parameter of mallopt (malloc.h), and the smallest tensor in bytes that is mapped separately: the
largest value that glibc accepts."""
M_TRIM_THRESHOLD, NEVER = -1, -1
"""Parameter of mallopt for the free memory at the end of the heap that is returned, and its value
to return none."""
ROW_TOKENS = 1024
"""Tokens of the row that has to fit, if the length of rows is not given."""
SAMPLED_TOKENS = 4096
"""Tokens of concurrent conversations that must fit into memory together with the weights, for a
policy that is only sampled."""
HEADROOM = 1.1
"""Factor for activations and the allocator. Micro-batches shrink to the memory that is left."""


@dataclass(frozen=True)
class Placement:
    """Device and compute dtype of the policy."""

    device: torch.device
    dtype: torch.dtype
    """Compute dtype. Trained weights are always float32."""
    reason: str
    """A line for the log, for example "cuda:0, bfloat16: compute capability 9.0"."""
    spread: bool = False
    """True if accelerate spreads the layers over all GPUs of this machine."""


def probe(cfg: PolicyConfig) -> Placement:
    """Return device and dtype for `cfg`.

    Raises:
        Unavailable: The configured device does not exist here.
    """
    if cfg.device == "auto":
        name = (
            "cuda:0"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    else:
        name = cfg.device
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Unavailable(f"policy.devices {name!r} is not a device of torch") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise Unavailable(
                f"policy.devices {name!r}: torch {torch.__version__} sees {count} CUDA devices here"
            )
        device = torch.device("cuda", device.index or 0)
        major, minor = torch.cuda.get_device_capability(device)
        # A T4 (7.5) and a V100 (7.0) only emulate bfloat16. Earlier GPUs are slow in float16.
        best = torch.bfloat16 if major >= 8 else torch.float16 if major >= 7 else torch.float32
        why = (
            f"compute capability {major}.{minor}"
            if torch.version.hip is None
            else f"ROCm {torch.version.hip}"
        )
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise Unavailable("policy.devices 'mps' is not available here")
        best, why = torch.float32, "Apple GPU"
    elif device.type == "cpu":
        best, why = torch.float32, "no accelerator found" if cfg.device == "auto" else "configured"
    else:
        if device.type == "xpu" and not torch.xpu.is_available():
            raise Unavailable("policy.devices 'xpu' is not available here")
        best, why = torch.float32, "configured"
    if cfg.dtype != "auto":
        why += ", dtype configured"
    dtype = best if cfg.dtype == "auto" else DTYPES[cfg.dtype]
    return Placement(device, dtype, f"{device}, {str(dtype).removeprefix('torch.')}: {why}")


def without_float16(placement: Placement) -> Placement:
    """Replace float16 by float32 in a placement: pipeline stages have no loss scaling."""
    if placement.dtype != torch.float16:
        return placement
    reason = f"{placement.device}, float32: stages have no loss scale for float16"
    return replace(placement, dtype=torch.float32, reason=reason)


def devices(cfg: PolicyConfig) -> list[torch.device]:
    """Return the devices that `policy.devices` selects, without checking that the model fits.

    Raises:
        Unavailable: A selected device does not exist here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [torch.device("cuda", index) for index in range(gpus)]
    if cfg.devices.isdecimal():
        count = int(cfg.devices)
        if not gpus:
            return [torch.device("cpu")] * count
        if count > gpus:
            raise Unavailable(f"policy.devices {count}: {gpus} GPUs are here")
        return every[:count]
    if "," in cfg.devices:
        names = cfg.devices.split(",")
        return [probe(cfg.model_copy(update={"devices": name})).device for name in names]
    first = probe(cfg).device
    return every if cfg.devices in ("auto", "cuda") and gpus else [first]


@dataclass(frozen=True)
class Card:
    """A GPU of this machine."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.device} {self.name}, {self.free_bytes / 2**30:.1f} of"
            f" {self.total_bytes / 2**30:.1f} GiB free"
        )


def cards() -> list[Card]:
    """Return all GPUs that torch sees. The query allocates some memory on each until process
    exit."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(Card(f"cuda:{index}", name, total, free))
    return found


def training_devices(
    cfg: PolicyConfig, named: Sequence[torch.device], here: Sequence[Card], need: int
) -> tuple[list[torch.device], list[str]]:
    """Select the GPUs that train, one rank each, from those that `policy.devices` selects.

    `auto` excludes GPUs with too little free memory. If the model fits on no GPU, return the first
    one and let `fit` decide.

    Args:
        named: Devices that `policy.devices` selects.
        here: All GPUs of this machine.
        need: Bytes that training needs, as `update_bytes` estimates them.

    Returns:
        The device of each rank, and one line of text for each excluded GPU.

    Raises:
        DeviceError: The configuration names a GPU that would be excluded.
    """
    known = {card.device: card for card in here}
    chosen = [known[str(device)] for device in named]
    good: list[torch.device] = []
    problems: list[str] = []
    for device, card in zip(named, chosen, strict=True):
        if card.free_bytes < need:
            problems.append(f"{card}; training needs about {need / 2**30:.1f} GiB")
        else:
            good.append(device)
    if problems and cfg.devices not in ("auto", "cuda"):
        raise DeviceError(f"policy.devices {cfg.devices}: {problems[0]}: name other devices")
    return good or list(named[:1]), problems if good else []


def set_up(device: torch.device) -> None:
    """Configure torch for a device, before a policy or a stage computes there."""
    if device.type == "cuda":
        # cuDNN attention takes 0.1 s to plan each new shape, and every step has new shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors of up to MAPPED_BYTES for the next ones.

    Otherwise the kernel unmaps freed memory, and clears each page again at the next use. An update
    of SmolLM2 (16 rows, an adapter) then takes 4.5 instead of 3.0 CPU seconds. Its peak is 2.23
    instead of 2.12 GB, since the heap fragments. Other C libraries have no such call.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)


class _HeapUse(ctypes.Structure):
    """Result of mallinfo2 (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def freed_bytes() -> int:
    """Return the bytes that `keep_freed_memory` has kept; 0 with another C library than glibc."""
    with contextlib.suppress(AttributeError, OSError):
        query = ctypes.CDLL(None).mallinfo2
        query.restype = _HeapUse
        return int(query().fordblks)
    return 0


def count_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """Return (number of parameters, inputs + outputs summed over the linear layers) of the
    architecture, without allocating it.

    Raises:
        Unavailable: transformers has no causal language model for this configuration.
    """
    # An exported text part has the text configuration, which also needs a class.
    needed = (config, config.get_text_config(decoder=True))
    if not all(type(each) in MODEL_FOR_CAUSAL_LM_MAPPING for each in needed):
        raise Unavailable(
            f"policy.model: transformers has no causal language model of type {config.model_type}:"
            " use a text model"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    matrices = [
        m.weight
        for m in model.modules()
        if m is not head and not isinstance(m, torch.nn.Embedding) and is_matrix(m)
    ]
    return sum(p.numel() for p in model.parameters()), sum(sum(w.shape) for w in matrices)


def is_matrix(module: torch.nn.Module) -> bool:
    """Return True if an adapter can be attached: to nn.Linear and GPT-2's Conv1D."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def needed_bytes(
    parameters: int,
    lora_parameters: int,
    dtype: torch.dtype,
    base_bits: int | None = None,
    optim: Optim = "adamw",
) -> int:
    """Return the bytes for training, without activations.

    With LoRA (`lora_parameters` > 0) the base is frozen in `dtype` or in `base_bits`, and only the
    adapter has gradients. Embeddings and norms are not quantised; the headroom includes them.
    """
    trained = 8 + OPTIMIZER_BYTES[optim]  # weight, gradient, moments
    if lora_parameters:
        base = parameters * (dtype.itemsize if base_bits is None else base_bits / 8)
        return int(HEADROOM * (base + lora_parameters * trained))
    return int(HEADROOM * parameters * trained)


def update_bytes(
    cfg: PolicyConfig, config: PretrainedConfig, placement: Placement, tokens: int = ROW_TOKENS
) -> int:
    """Return the least bytes for an update with one row of `tokens` tokens, without torch itself,
    as in `swarmnode plan`. It assumes activation checkpointing, which is used if memory is
    short."""
    parameters, edges = count_parameters(config)
    try:
        shape = Shape.of_config(config.to_dict()).counted(parameters, edges)
    except Unavailable:
        # The configuration of this architecture is unknown, so only its weights can be counted.
        return needed_bytes(
            parameters, cfg.lora.r * edges, placement.dtype, BASE_BITS[cfg.quantization], cfg.optim
        )
    dtype = str(placement.dtype).removeprefix("torch.")
    method = Method(
        placement.device.type,
        dtype,
        cfg.lora.r,
        BASE_BITS[cfg.quantization],
        cfg.optim,
        checkpointing=True,
    )
    planned = footprint(shape, method, tokens)
    return planned.total - planned.runtime


def sampling_bytes(cfg: PolicyConfig, config: PretrainedConfig, placement: Placement) -> int:
    """Return the bytes of the weights, and of the keys and values of SAMPLED_TOKENS tokens."""
    parameters, edges = count_parameters(config)
    bits = BASE_BITS[cfg.quantization]
    weights = parameters * (placement.dtype.itemsize if bits is None else bits / 8)
    try:
        cache = Shape.of_config(config.to_dict()).cache_bytes * placement.dtype.itemsize / 2
    except Unavailable:  # the architecture's configuration is unknown
        cache = 0
    return int(HEADROOM * (weights + 4 * cfg.lora.r * edges + SAMPLED_TOKENS * cache))


FEW_PROCESSORS = 4


def thread_count() -> int:
    """Return the number of CPU threads without `policy.threads`: torch's default, within the quota
    of a control group. Of few processors, one is left for the network process and the scorers."""
    count = processors()
    return min(torch.get_num_threads(), count - 1 if 1 < count <= FEW_PROCESSORS else count)


def set_threads(cfg: PolicyConfig) -> None:
    """Set the number of CPU threads of torch."""
    torch.set_num_threads(cfg.threads or thread_count())


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device in bytes; None if it cannot be queried."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        return available_memory()
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return None


def spare_bytes(device: torch.device) -> int | None:
    """Return `free_bytes` plus the unused memory in this process's allocator, in bytes."""
    free = free_bytes(device)
    if device.type == "cpu" and free is not None:
        return free + freed_bytes()
    if device.type != "cuda" or free is None:
        return free
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def model_shape(model: PreTrainedModel) -> Shape | None:
    """Return the shape of a loaded model without its adapter; None if its configuration lacks a
    dimension."""
    if model not in _shapes:
        try:
            _shapes[model] = Shape.of_config(model.config.to_dict())
        except Unavailable:
            _shapes[model] = None
    return _shapes[model]


_shapes: weakref.WeakKeyDictionary[PreTrainedModel, Shape | None] = weakref.WeakKeyDictionary()


def fit(
    cfg: PolicyConfig, config: PretrainedConfig, placement: Placement, trains: bool = True
) -> Placement:
    """Return `placement`; spread over all GPUs if one is too small and the configuration names
    none.

    Args:
        trains: False if the policy is only sampled.

    Raises:
        DeviceError: The model does not fit.
    """
    need = (update_bytes if trains else sampling_bytes)(cfg, config, placement)
    free = free_bytes(placement.device)
    if free is None or need <= free:
        return placement
    if placement.device.type == "cuda" and cfg.devices in ("auto", "cuda"):
        everywhere = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
        if need <= everywhere:
            reason = (
                f"{placement.reason}; layers over {torch.cuda.device_count()} GPUs,"
                f" {need / 2**30:.1f} GiB do not fit on one"
            )
            return Placement(placement.device, placement.dtype, reason, spread=True)
    if not trains:
        raise DeviceError(
            f"{cfg.model}: {count_parameters(config)[0]:,} parameters need about"
            f" {need / 2**30:.1f} GiB to answer, {placement.device} has {free / 2**30:.1f} GiB free"
            ": stop the node meanwhile, or choose another device with --set"
            " policy.devices"
        )
    hint = "" if cfg.lora.r else "; policy.lora.r = 16 trains an adapter instead of all weights"
    hint += (
        "; `swarmnode recipes` lists settings for smaller GPUs, `swarmnode plan` shows what fits"
    )
    raise DeviceError(
        f"{cfg.model}: {count_parameters(config)[0]:,} parameters need about {need / 2**30:.1f} GiB"
        f" to train (weights, gradients, Adam), {placement.device} has {free / 2**30:.1f} GiB"
        f" free{hint}"
    )
