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
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.errors import StateError
from swarmnode.files import held, sync_directory
from swarmnode.policy.load import check_shapes, overwrite, trainable
from swarmnode.swarm import rollback
from swarmnode.weights.revert_monitor import RevertMonitor

FILE = rollback.STATE


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
    evaluation_tokens_total: int = 0
    oom_retries_total: int = 0
    micro_batch_tokens: int = 0
    """Learnt from running out of memory in training; 0 while it never did, or does no more."""
    generation_tokens: int = 0
    """The same in generation."""
    groups_per_step: float = 0.0
    """Fitted to this node's speed; 0 before the first step."""
    useful_per_step: float = 0.0
    external_scale: float = 1.0
    reward_held_out: float | None = None
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

    tensors: Callable[[], dict[str, torch.Tensor]]
    """Copies them, at its only call, from any thread; see `take`."""
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
    """Everything as it is between two steps, to be copied to host memory.

    With the lock under which the weights move, that is left to whoever calls `Snapshot.tensors`:
    the lock is taken here and let go there, so that no step comes in between. Without one it is
    done at once. outer: the outer step's tensors, which never change once they are made, so they
    are not copied.
    """
    tensors = {
        "rng": rng.get_state().clone(),
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
    tensors = {"rng": rng.get_state().clone()}
    return Snapshot(lambda: tensors, copy.deepcopy(counters), owner)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(directory: Path, snapshot: Snapshot, before: Callable[[], None] = lambda: None) -> None:
    """Write to a temporary name, sync, rename; `before` the old file is replaced. Raises OSError;
    the old file is then untouched."""
    temporary = directory / f".{FILE}.tmp"
    metadata = {
        "counters": msgspec.json.encode(snapshot.counters).decode(),
        "fingerprint": snapshot.owner,
    }
    tensors = snapshot.tensors()
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if (directory / FILE).exists():
            before()
        os.replace(temporary, directory / FILE)
    except (SafetensorError, OSError) as error:
        # on a full disk, half a state would take the room of what is small
        temporary.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    sync_directory(directory)


def owner(fingerprint: bytes, lora_rank: int, shared_a: bool = False) -> str:
    """Whose state it is: the base and the kind of weights that are trained on it. shared_a: of the
    adapters, only B is."""
    return f"{fingerprint.hex()}/lora{lora_rank}" + "/b" * shared_a


def read(directory: Path, owner: str) -> tuple[Counters, dict[str, torch.Tensor]] | None:
    """(counters, tensors by the names above) of the last written state; None when there is none.

    Raises:
        StateError: the file is damaged, or belongs to another policy than `owner` says.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with held(path) as name, safe_open(name, "pt", device="cpu") as file:
            metadata = file.metadata() or {}
            counters = msgspec.json.decode(metadata["counters"], type=Counters)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise StateError(
            f"{path} is damaged ({error}); move it away to start from the base policy"
        ) from None
    if metadata.get("fingerprint") != owner:
        raise StateError(
            f"{path} belongs to another"
            f" model{_as_it_was(counters, metadata.get('fingerprint', ''))}, or move it away"
        )
    return counters, tensors


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
    outer: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Counters | None:
    """Put the last written state into model, optimizer and generator; None when there is none.
    `outer` is handed what `take` was.

    Raises:
        StateError: the file is damaged, or belongs to another policy. Nothing has been changed
        then.
    """
    found = read(directory, owner)
    if found is None:
        return None
    counters, tensors = found
    parameters = trainable(model)
    try:
        check_shapes(parameters, weights(tensors))
    except StateError as error:
        raise StateError(
            f"{directory / FILE}: {error}; move it away to start from the base policy"
        ) from None
    # may refuse: first
    outer({name.removeprefix(OUTER): t for name, t in tensors.items() if name.startswith(OUTER)})
    overwrite(parameters, weights(tensors))
    # of the other kind, moments begin anew
    plain, keys = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)), _keys(tensors)
    for name, parameter in parameters.items():
        if not plain:
            kept = {
                key: tensors[f"{OPTIMIZER}{key}.{name}"]
                for key in keys
                if f"{OPTIMIZER}{key}.{name}" in tensors
            }
            if kept:
                optimizer.state[parameter] = {
                    k: t.to(parameter.device) if t.ndim else int(t) for k, t in kept.items()
                }
        elif f"first.{name}" in tensors:
            step = tensors[f"steps.{name}"].reshape(())
            optimizer.state[parameter] = {
                "step": step.to(parameter.device) if optimizer.defaults.get("fused") else step,
                "exp_avg": tensors[f"first.{name}"].to(parameter.device),
                "exp_avg_sq": tensors[f"second.{name}"].to(parameter.device),
            }
    set_generator(rng, tensors["rng"])
    return counters


def _keys(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Under which an optimizer that is not AdamW kept something."""
    return frozenset(name.split(".")[1] for name in tensors if name.startswith(OPTIMIZER))


def set_generator(rng: torch.Generator, state: torch.Tensor) -> None:
    """Continue where `state` (bytes) was taken; that of another kind of device cannot be continued
    and becomes a seed."""
    if state.shape == rng.get_state().shape:
        rng.set_state(state)
    else:
        rng.manual_seed(
            int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "big") >> 1
        )
