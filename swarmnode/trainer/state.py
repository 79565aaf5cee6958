"""What a trainer that was killed comes back to: one safetensors file.

    weights.<name>      the trainable parameters
    first.<name>        AdamW's first moment      second.<name>   its second moment
    optimizer.<k>.<name>  what another optimizer keeps of a parameter under its key k, as it is
    outer.phi.<name>    slow weights of the outer step, and outer.delta.<name> its momentum, where
    replicas are averaged
    outer.undo.<…>      what these and the weights were before the latest exchanges, until a
    held-out reward has shown that they were good
    rng                 state of the sampling generator, u8
    metadata            counters and fingerprint, JSON

One file and one rename, so weights and counters can never be of different steps. No pickle.

Of a large model the whole state is too much to write often. Between two whole states a second file,
`weights.safetensors`, has the same without AdamW's moments, and without the outer step's tensors
where these have not changed since the whole state. A restart takes from it what it has, where it is
the newer one, and the rest from the whole state: moments may be older than the weights.

A file is checked in full before anything is taken from it. `recover` falls back to the newest kept
state (`trainer.checkpoints`) where the last one is damaged.
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
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.errors import StateError
from swarmnode.files import pinned, sync_directory
from swarmnode.policy.load import check_shapes, overwrite, trainable
from swarmnode.swarm import rollback
from swarmnode.weights.revert_monitor import RevertMonitor

log = structlog.get_logger("swarmnode.trainer")

FILE = rollback.STATE
WEIGHTS_FILE = rollback.WEIGHTS
LARGEST_COUNTER = 2**63 - 1
RNG = "rng"

PEERS_USED = 256
"""Peers of which a trainer remembers how many groups it trained on: it saves them with its state,
and reports them at every step."""


class Counters(msgspec.Struct):
    """The numbers of a trainer that must survive it."""

    step: int = 0
    policy_version: int = 0
    sequence: int = 0
    """Next number of a group; never reused, see `SEQUENCE_MARGIN`."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
    """Sampled, in evaluations too."""
    episodes_total: int = 0
    evaluation_tokens_total: int = 0
    oom_retries_total: int = 0
    micro_batch_tokens: int = 0
    """Learnt from running out of memory in training; 0 while it never did, or does no more."""
    generation_tokens: int = 0
    """The same in generation."""
    loss_scale: float = 0.0
    """Loss scale in float16; 0 in a dtype that needs none."""
    groups_per_step: float = 0.0
    """Fitted to this node's speed; 0 before the first step."""
    useful_per_step: float = 0.0
    external_scale: float = 1.0
    reward_held_out: float | None = None
    reward_held_out_error: float | None = None
    reward_held_out_start: float | None = None
    peers_used: dict[str, int] = {}
    """Groups trained on, of the PEERS_USED latest peers; the latest is the last."""
    outer_clocks: list[int] = []
    """Number of outer steps, by fragment."""
    exchanges_total: int = 0
    solo_steps_total: int = 0
    revert: RevertMonitor = RevertMonitor()
    """What the latest exchanges are held to."""
    probation: bool = False
    """Our state is a neighbour's, and no exchange has shown yet that it fits."""
    peer: str = ""
    swarm: str = ""
    crew: str = ""
    """Id, hex, of the crew whose head counted this."""
    model: str = ""
    """policy.model; empty in states of before it was kept."""

    def note_use(self, peer: str) -> None:
        """Count a group of `peer` that was trained on; the peer that was used longest ago makes
        room."""
        self.peers_used[peer] = self.peers_used.pop(peer, 0) + 1
        while len(self.peers_used) > PEERS_USED:
            del self.peers_used[next(iter(self.peers_used))]


SEQUENCE_MARGIN = 4096
"""A restart skips so many numbers: groups of the lost step may already be with peers, who take each
number once."""


@dataclass(frozen=True)
class Snapshot:
    """A state as it was when it was taken."""

    tensors: Callable[..., dict[str, torch.Tensor]]
    """Copies them, at its only call, from any thread; see `take`. One argument, True: with the
    optimizer's moments."""
    counters: Counters
    owner: str
    """See `owner`."""
    outer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the outer step, by their names there; they never change once they are made."""


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
    """Everything as it is between two steps, to be copied to host memory.

    With the lock under which the weights move, that is left to whoever calls `Snapshot.tensors`:
    the lock is taken here and let go there, so that no step comes in between. Without one it is
    done at once. outer: the outer step's tensors, which never change once they are made, so they
    are not copied.
    """
    tensors = {
        RNG: rng.get_state().clone(),
        **{f"{OUTER}{name}": tensor for name, tensor in (outer or {}).items()},
    }
    numbers = copy.deepcopy(counters)

    def copied(with_moments: bool = True) -> dict[str, torch.Tensor]:
        try:
            return tensors | _copied(model, optimizer, with_moments)
        finally:
            if lock is not None:
                lock.release()

    if lock is None:
        done = copied()
        return Snapshot(lambda with_moments=True: done, numbers, owner, outer or {})
    lock.acquire()
    return Snapshot(copied, numbers, owner, outer or {})


def _copied(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, with_moments: bool
) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in trainable(model).items():
        tensors[f"{WEIGHTS}{name}"] = _host_copy(parameter)
        moments = optimizer.state.get(parameter) if with_moments else None
        # bitsandbytes: blocks of 8 bits with their scales, and a plain number of steps
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
    """The same for a trainer whose weights are kept elsewhere."""
    tensors = {RNG: rng.get_state().clone()}
    return Snapshot(lambda with_moments=True: tensors, copy.deepcopy(counters), owner)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(directory: Path, snapshot: Snapshot, before: Callable[[], None] = lambda: None) -> None:
    """Write the whole state to a temporary name, sync, rename; `before` the old file is replaced.
    Raises OSError, and StateError for tensors that are not finite; the old file is then
    untouched."""
    _replace(directory / FILE, snapshot.tensors(True), snapshot, before)
    (directory / WEIGHTS_FILE).unlink(missing_ok=True)


def write_weights(directory: Path, snapshot: Snapshot, with_outer: bool) -> None:
    """The same without moments, beside the last whole state."""
    kept = (WEIGHTS, OUTER) if with_outer else (WEIGHTS,)
    tensors = {
        name: tensor
        for name, tensor in snapshot.tensors(False).items()
        if name == RNG or name.startswith(kept)
    }
    _replace(directory / WEIGHTS_FILE, tensors, snapshot)


def _replace(
    path: Path,
    tensors: dict[str, torch.Tensor],
    snapshot: Snapshot,
    before: Callable[[], None] = lambda: None,
) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    metadata = {
        "counters": msgspec.json.encode(snapshot.counters).decode(),
        "fingerprint": snapshot.owner,
    }
    check_tensors(tensors)
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            before()
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        # on a full disk, half a state would take the room of what is small
        temporary.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    sync_directory(path.parent)


def owner(fingerprint: bytes, lora_rank: int, shared_a: bool = False) -> str:
    """Whose state it is: the base and the kind of weights that are trained on it. shared_a: of the
    adapters, only B is."""
    return f"{fingerprint.hex()}/lora{lora_rank}" + "/b" * shared_a


class ForeignState(StateError):
    """Raised for a state of another model, which no earlier state can replace."""


Tensors = dict[str, torch.Tensor]
Found = tuple[Counters, Tensors]


def read(directory: Path, owner: str) -> Found | None:
    """(counters, tensors by the names above) of the last written state, its weights newer than its
    moments where they were saved since; None when there is none.

    Raises as `read_file`. Newer weights that are damaged are left out.
    """
    found = read_file(directory / FILE, owner)
    if found is None:
        return None
    try:
        newer = read_file(directory / WEIGHTS_FILE, owner)
    except ForeignState:
        raise
    except StateError as error:
        log.warning("weights that are newer than the state cannot be used", reason=str(error))
        return found
    if newer is None or newer[0].step <= found[0].step:
        return found
    counters, changed = newer
    tensors = found[1]
    if any(name.startswith(OUTER) for name in changed):
        tensors = {n: t for n, t in tensors.items() if not n.startswith(OUTER)}
    return counters, tensors | changed


def read_file(path: Path, owner: str) -> Found | None:
    """(counters, tensors by the names above) of a state file; None when there is none.

    Raises:
        ForeignState: the file belongs to another policy than `owner` says.
        StateError: the file is damaged, or holds numbers that nothing can be trained with.
    """
    if not path.exists():
        return None
    try:
        with pinned(path) as name, safe_open(name, "pt", device="cpu") as file:
            metadata = file.metadata() or {}
            counters = msgspec.json.decode(metadata["counters"], type=Counters)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise StateError(f"{path} is damaged ({error})") from None
    if metadata.get("fingerprint") != owner:
        raise ForeignState(
            f"{path} belongs to another"
            f" model{_as_it_was(counters, metadata.get('fingerprint', ''))}, or move it away"
        )
    try:
        check_counters(counters)
        check_tensors(tensors)
    except StateError as error:
        raise StateError(f"{path} is damaged ({error})") from None
    return counters, tensors


def check_counters(counters: Counters) -> None:
    """Raise StateError unless every number is finite and from 0 to LARGEST_COUNTER."""

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
    """Raise StateError unless there is a state of the generator, and every other number is
    finite."""
    if RNG not in tensors or tensors[RNG].dtype != torch.uint8:
        raise StateError("the random generator's state is missing")
    for name, tensor in tensors.items():
        kept_as_it_is = name == RNG or name.startswith(OPTIMIZER)
        if not tensor.is_floating_point():
            if not kept_as_it_is:
                raise StateError(f"{name} has the type {tensor.dtype}")
            continue
        if not tensor.numel():
            continue
        low, high = torch.aminmax(tensor)  # both are NaN where one number is, and need no copy
        if not (math.isfinite(low) and math.isfinite(high)):
            raise StateError(f"{name} is not finite")
        if low < 0 and name.startswith(("second.", "steps.")):
            raise StateError(f"{name} is negative")


def recover(
    directory: Path, owner: str, use: Callable[[Counters, Tensors], None]
) -> Counters | None:
    """Hand the last written state to `use`; None when there is none.

    Where the state is damaged, or `use` refuses it with a StateError, the newest kept state that
    can be used takes its place, and the damaged file is kept as `rollback.DAMAGED`.

    Raises:
        ForeignState: the state belongs to another policy than `owner` says.
        StateError: neither the state nor a kept one can be used.
    """

    last = directory / FILE

    def usable(path: Path) -> Counters | None:
        found = read(directory, owner) if path == last else read_file(path, owner)
        if found is None:
            return None
        try:
            use(*found)
        except StateError as error:
            raise StateError(f"{path} cannot be used ({error})") from None
        return found[0]

    if not last.exists():  # moved away by the operator, who wants to start anew
        (directory / WEIGHTS_FILE).unlink(missing_ok=True)
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
            log.warning("a kept state cannot be used", reason=str(error))
            continue
        if counters is None:  # gone since it was listed
            continue
        rollback.replace_damaged(directory, path)
        log.error(
            "the state is damaged, continuing from a kept one",
            reason=str(damage),
            step=counters.step,
            damaged=str(directory / rollback.DAMAGED),
        )
        return counters
    raise StateError(f"{damage}; move it away to start from the base policy")


def _as_it_was(counters: Counters, owner: str) -> str:
    """What to set for a state of `owner`."""
    rank = re.search(r"/lora(\d+)", owner)
    if not counters.model or rank is None:
        return "; set policy.model and policy.lora as they were"
    return (
        f", saved with policy.model = {counters.model}, policy.lora.r = {rank[1]}; set them so"
        " (`swarmnode config set`)"
    )


def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trainable parameters in what `read` gave, by their names in the model."""
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
    """Put the last written state that can be used into model, optimizer and generator; None when
    there is none. `outer` is handed what `take` was, and may raise StateError.

    Raises StateError as `recover`. Model and optimizer are then unchanged.
    """
    parameters = trainable(model)

    def use(counters: Counters, tensors: Tensors) -> None:
        check_shapes(parameters, weights(tensors))
        moments = moments_of(optimizer, parameters, tensors)
        outer({n.removeprefix(OUTER): t for n, t in tensors.items() if n.startswith(OUTER)})
        overwrite(parameters, weights(tensors))
        for name, kept in moments.items():
            optimizer.state[parameters[name]] = kept
        set_generator(rng, tensors[RNG])

    return recover(directory, owner, use)


def moments_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, object]]:
    """What `optimizer` keeps of each parameter, by the parameter's name; none of them where the
    state was saved by an optimizer of another kind, whose moments cannot be continued.

    Raises StateError where a moment is missing, or has another shape than its parameter.
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
"""Keys under which bitsandbytes keeps what has the parameter's shape."""


def _keys(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Under which an optimizer that is not AdamW kept something."""
    return frozenset(name.split(".")[1] for name in tensors if name.startswith(OPTIMIZER))


def set_generator(rng: torch.Generator, state: torch.Tensor) -> None:
    """Continue where `state` (bytes) was taken; that of another kind of device cannot be continued
    and becomes a seed."""
    if state.shape == rng.get_state().shape:
        with contextlib.suppress(RuntimeError):  # bytes that are no state of it
            rng.set_state(state)
            return
    seed = hashlib.sha256(state.numpy().tobytes()).digest()[:8]
    rng.manual_seed(int.from_bytes(seed, "big") >> 1)
