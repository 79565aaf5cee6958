"""The saved state of a trainer: one safetensors file.

    weights.<name>        trainable parameters
    first.<name>          AdamW's first moment; second.<name>: its second moment
    optimizer.<k>.<name>  state of another optimizer for a parameter, under its key k
    outer.phi.<name>      slow weights of the outer step; outer.delta.<name>: its momentum
    rng                   state of the sampling generator, u8
    metadata              counters and fingerprint, JSON

One file is replaced by one rename, so that weights and counters always belong to the same step.
Nothing is unpickled.

A file is checked completely before any of it is used. If the last state is damaged, `recover` uses
the newest earlier state (`trainer.checkpoints`).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.config import LoraSettings
from swarmnode.errors import StateError
from swarmnode.files import pinned, sync_directory
from swarmnode.policy.load import LORA_MODULES, check_shapes, overwrite, trainable
from swarmnode.swarm import rollback
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.trainer.worker import AveragingCounters

log = structlog.get_logger("swarmnode.trainer")

FILE = rollback.STATE
LARGEST_COUNTER = 2**63 - 1
RNG = "rng"

PEERS_USED = 256
"""Number of peers for which the trainer counts the groups that it trained on. The counts are saved
with the state and reported at every step."""


class Counters(AveragingCounters):
    """Numbers of a trainer that survive a restart."""

    sequence: int = 0
    """Number of the next group; numbers are never reused, see `SEQUENCE_MARGIN`."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
    """Sampled tokens, including evaluations."""
    episodes_total: int = 0
    evaluation_tokens_total: int = 0
    oom_retries_total: int = 0
    useful_per_step: float = 0.0
    held_out_questions: str = ""
    """Name of the questions of the following rewards, see `Evaluation.questions`."""
    reward_held_out: float | None = None
    reward_held_out_error: float | None = None
    reward_held_out_step: int | None = None
    reward_held_out_start: float | None = None
    reward_held_out_start_error: float | None = None
    peers_used: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of groups trained on, by peer, for the PEERS_USED latest peers; the latest is last."""
    peer: str = ""
    swarm: str = ""
    crew: str = ""
    """Id, hex, of the crew whose head wrote these counters."""
    model: str = ""
    """policy.model."""

    def note_use(self, peer: str) -> None:
        """Count a group of `peer` that was trained on. Remove the least recently used peer if there
        are more than PEERS_USED."""
        self.peers_used[peer] = self.peers_used.pop(peer, 0) + 1
        while len(self.peers_used) > PEERS_USED:
            del self.peers_used[next(iter(self.peers_used))]


SEQUENCE_MARGIN = 4096
"""Number of group numbers that a restart skips. Peers may already hold groups of the lost steps,
and accept each number once."""


@dataclass(frozen=True)
class Snapshot:
    """The state at a point between two steps."""

    tensors: Callable[[], dict[str, torch.Tensor]]
    """Returns a copy of the tensors; called once, from any thread, see `take`."""
    counters: Counters
    owner: str
    """See `owner`."""


WEIGHTS, OUTER, OPTIMIZER = "weights.", "outer.", "optimizer."


def take(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: torch.Generator,
    counters: Counters,
    owner: str,
    outer: Mapping[str, torch.Tensor] | None = None,
    lock: threading.Lock | None = None,
) -> Snapshot:
    """Take a snapshot of the state between two steps.

    Args:
        outer: Tensors of the outer step, which are not copied, because they are never modified.
        lock: Lock under which weights change. If it is given, it is acquired here, and
            `Snapshot.tensors` copies the tensors to host memory and releases it, possibly in
            another thread; no step can happen in between. Without a lock the copy is made here.
    """
    tensors = {
        RNG: rng.get_state().clone(),
        **{f"{OUTER}{name}": tensor for name, tensor in (outer or {}).items()},
    }
    numbers = copy.deepcopy(counters)

    def copied() -> dict[str, torch.Tensor]:
        try:
            return tensors | _copied(model, optimizer)
        finally:
            if lock is not None:
                lock.release()

    if lock is None:
        done = copied()
        return Snapshot(lambda: done, numbers, owner)
    lock.acquire()
    return Snapshot(copied, numbers, owner)


def _copied(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in trainable(model).items():
        tensors[f"{WEIGHTS}{name}"] = _host_copy(parameter)
        moments = optimizer.state.get(parameter)
        # bitsandbytes stores 8-bit blocks with their scales, and the number of steps as an int.
        if moments and "exp_avg" not in moments:
            for key, value in moments.items():
                tensors[f"{OPTIMIZER}{key}.{name}"] = (
                    _host_copy(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
                )
        elif moments:
            tensors[f"first.{name}"] = _host_copy(moments["exp_avg"])
            tensors[f"second.{name}"] = _host_copy(moments["exp_avg_sq"])
            tensors[f"steps.{name}"] = moments["step"].detach().cpu().clone().reshape(1)
    return tensors


def take_counters(rng: torch.Generator, counters: Counters, owner: str) -> Snapshot:
    """Take a snapshot without weights, for a trainer whose weights are saved elsewhere."""
    tensors = {RNG: rng.get_state().clone()}
    return Snapshot(lambda: tensors, copy.deepcopy(counters), owner)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(directory: Path, snapshot: Snapshot, before: Callable[[], None] = lambda: None) -> None:
    """Write the state atomically: to a temporary name, sync, rename.

    Args:
        before: Called before the old file is replaced.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
        StateError: A tensor is not finite; the old file is unchanged.
    """
    path = directory / FILE
    temporary = path.with_name(f".{FILE}.tmp")
    metadata = {
        "counters": msgspec.json.encode(snapshot.counters).decode(),
        "fingerprint": snapshot.owner,
    }
    tensors = snapshot.tensors()
    check_tensors(tensors)
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            before()
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        # On a full disk a partial file would take space that small files need.
        temporary.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    sync_directory(directory)


def adapter_shape(lora: LoraSettings) -> LoraShape | None:
    """Return the shape of the trained adapter; None if all weights are trained."""
    return LoraShape(lora.r, lora.lora_alpha, (LORA_MODULES,)) if lora.r else None


def owner(fingerprint: bytes, adapter: LoraShape | None) -> str:
    """Return the owner of a state: everything that gives the saved tensors their meaning.

    Args:
        fingerprint: Fingerprint of the base model: its weights and its config.json, which includes
            the scaling of its rotary embedding.
        adapter: `adapter_shape`.
    """
    if adapter is None:
        return f"{fingerprint.hex()}/lora0"
    name = f"{fingerprint.hex()}/lora{adapter.r}"
    # Earlier versions did not save alpha and modules: these values are theirs, unless alpha was
    # configured.
    if adapter.alpha != 2 * adapter.r:
        name += f"/alpha{adapter.alpha}"
    if adapter.target_modules != ("all-linear",):
        name += f"/{','.join(adapter.target_modules)}"
    return name


class ForeignState(StateError):
    """Raised for a state of another model. Earlier states are then not tried."""


Tensors = dict[str, torch.Tensor]
Found = tuple[Counters, Tensors]


def read_file(path: Path, owner: str, only_weights: bool = False) -> Found | None:
    """Read a state file.

    Args:
        only_weights: Leave out the state of the optimizer and of the outer step.

    Returns:
        (counters, tensors by name); None if the file does not exist.

    Raises:
        ForeignState: The file does not belong to `owner`.
        StateError: The file is damaged, or a number is not finite or out of range.
    """
    if not path.exists():
        return None
    try:
        with pinned(path) as name, safe_open(name, "pt", device="cpu") as file:
            metadata = file.metadata() or {}
            counters = msgspec.json.decode(metadata["counters"], type=Counters)
            tensors = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 - not a mapping
                if not only_weights or name.startswith((RNG, WEIGHTS))
            }
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise StateError(f"{path} is damaged ({error})") from None
    if metadata.get("fingerprint") != owner:
        raise ForeignState(
            f"{path} belongs to another model or adapter"
            f"{_former_settings(counters, metadata.get('fingerprint', ''))}, or move it away"
        )
    try:
        check_counters(counters)
        check_tensors(tensors)
    except StateError as error:
        raise StateError(f"{path} is damaged ({error})") from None
    return counters, tensors


def check_counters(counters: Counters) -> None:
    """Check that every number is finite and from 0 to LARGEST_COUNTER.

    Raises:
        StateError: A number is out of range.
    """

    def numbers(value: object) -> list[float]:
        if isinstance(value, dict):
            return [number for each in value.values() for number in numbers(each)]
        if isinstance(value, list):
            return [number for each in value for number in numbers(each)]
        return [value] if isinstance(value, int | float) else []

    for name, value in msgspec.to_builtins(counters).items():
        if not all(math.isfinite(n) and 0 <= n <= LARGEST_COUNTER for n in numbers(value)):
            raise StateError(f"the counter {name} is {value}")


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the generator's state exists, and that all other numbers are finite.

    Raises:
        StateError: A tensor is missing, has a wrong type, or is not finite.
    """
    if RNG not in tensors or tensors[RNG].dtype != torch.uint8:
        raise StateError("the random generator's state is missing")
    for name, tensor in tensors.items():
        is_unchecked = name == RNG or name.startswith(OPTIMIZER)
        if not tensor.is_floating_point():
            if not is_unchecked:
                raise StateError(f"{name} has the type {tensor.dtype}")
            continue
        if not tensor.numel():
            continue
        low, high = torch.aminmax(tensor)  # both are NaN if any number is NaN; this makes no copy
        if not (math.isfinite(low) and math.isfinite(high)):
            raise StateError(f"{name} is not finite")
        if low < 0 and name.startswith(("second.", "steps.")):
            raise StateError(f"{name} is negative")


def recover(
    directory: Path, owner: str, use: Callable[[Counters, Tensors], None]
) -> Counters | None:
    """Pass the last usable state to `use`.

    If the last state is damaged, or `use` raises StateError for it, the newest usable earlier state
    replaces it, and the damaged file is renamed to `rollback.DAMAGED`.

    Returns:
        The counters of the state; None if there is no state.

    Raises:
        ForeignState: The state does not belong to `owner`.
        StateError: Neither the state nor an earlier one can be used.
    """

    last = directory / FILE

    def usable(path: Path) -> Counters | None:
        found = read_file(path, owner)
        if found is None:
            return None
        try:
            use(*found)
        except StateError as error:
            raise StateError(f"{path} cannot be used ({error})") from None
        return found[0]

    try:
        return usable(last)
    except ForeignState:
        raise
    except StateError as error:
        damage = error
    for path in rollback.earlier_states(directory):
        try:
            counters = usable(path)
        except StateError as error:
            log.warning("cannot use an earlier state", reason=str(error))
            continue
        if counters is None:  # deleted since it was listed
            continue
        rollback.replace_damaged(directory, path)
        log.error(
            "the state is damaged, continuing from an earlier one",
            reason=str(damage),
            step=counters.step,
            damaged=str(directory / rollback.DAMAGED),
        )
        return counters
    raise StateError(f"{damage}; move it away to start from the base policy")


def _former_settings(counters: Counters, owner: str) -> str:
    """Return the part of an error message with the settings that a state of `owner` needs."""
    adapter = re.search(r"/lora(\d+)(?:/alpha(\d+))?", owner)
    if not counters.model or adapter is None:
        return "; set policy.model and policy.lora to their former values"
    rank = int(adapter[1])
    scale = f", policy.lora.lora_alpha = {adapter[2] or 2 * rank}" if rank else ""
    return (
        f", saved with policy.model = {counters.model}, policy.lora.r = {rank}{scale}; set them so"
        " (`swarmnode config set`)"
    )


def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the trainable parameters among the tensors of a state, by their names in the model."""
    return {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in tensors.items()
        if name.startswith(WEIGHTS)
    }


def restore(
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: torch.Generator,
    owner: str,
    outer: Callable[[Tensors], None] = lambda tensors: None,
) -> Counters | None:
    """Restore model, optimizer and generator from the last usable state.

    Args:
        outer: Called with the tensors of the outer step; may raise StateError.

    Returns:
        The counters of the state; None if there is no state.

    Raises:
        ForeignState, StateError: See `recover`. Model and optimizer are unchanged.
    """
    parameters = trainable(model)

    def use(counters: Counters, tensors: Tensors) -> None:
        check_shapes(parameters, weights(tensors))
        moments = read_moments(optimizer, parameters, tensors)
        outer({n.removeprefix(OUTER): t for n, t in tensors.items() if n.startswith(OUTER)})
        overwrite(parameters, weights(tensors))
        for name, kept in moments.items():
            optimizer.state[parameters[name]] = kept
        set_generator(rng, tensors[RNG])

    return recover(directory, owner, use)


def read_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, object]]:
    """Return the state of `optimizer` for each parameter, by the parameter's name. It is empty if
    another kind of optimizer saved the tensors.

    Raises:
        StateError: A moment is missing, or has another shape than its parameter.
    """
    plain = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    keys = () if plain else _keys(tensors)
    found: dict[str, dict[str, object]] = {}
    for name, parameter in parameters.items():
        if plain:
            moments = {
                part: tensors[f"{part}.{name}"] for part in ADAM if f"{part}.{name}" in tensors
            }
            if not moments:
                continue
            if len(moments) < len(ADAM) or moments["steps"].numel() != 1:
                raise StateError(f"the optimizer's state of {name} is incomplete")
            shaped, step = ["first", "second"], moments["steps"].reshape(()).float()
            fused = optimizer.defaults.get("fused")
            found[name] = {
                "step": step.to(parameter.device) if fused else step,
                "exp_avg": moments["first"].to(parameter),
                "exp_avg_sq": moments["second"].to(parameter),
            }
        else:
            moments = {
                key: tensors[f"{OPTIMIZER}{key}.{name}"]
                for key in keys
                if f"{OPTIMIZER}{key}.{name}" in tensors
            }
            if not moments:
                continue
            shaped = [key for key in EIGHT_BIT if key in moments]
            found[name] = {
                k: t.to(parameter.device) if t.ndim else int(t) for k, t in moments.items()
            }
        for part in shaped:
            if moments[part].shape != parameter.shape:
                raise StateError(
                    f"the optimizer's {part} moment of {name} has the shape"
                    f" {tuple(moments[part].shape)}, not {tuple(parameter.shape)}"
                )
    return found


ADAM = ("first", "second", "steps")
EIGHT_BIT = ("state1", "state2")
"""Keys of bitsandbytes whose tensors have the parameter's shape."""


def _keys(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the keys of an optimizer other than AdamW."""
    return frozenset(name.split(".")[1] for name in tensors if name.startswith(OPTIMIZER))


def set_generator(rng: torch.Generator, state: torch.Tensor) -> None:
    """Restore the generator from `state` (bytes). The state of another kind of device cannot be
    restored; its hash becomes the seed."""
    if state.shape == rng.get_state().shape:
        with contextlib.suppress(RuntimeError):  # not a valid state of this generator
            rng.set_state(state)
            return
    seed = hashlib.sha256(state.numpy().tobytes()).digest()[:8]
    rng.manual_seed(int.from_bytes(seed, "big") >> 1)
