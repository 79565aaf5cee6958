"""What a trainer that was killed comes back to: one safetensors file, written while the next step runs.

    weights.<name>      the trainable parameters
    first.<name>        AdamW's first moment      second.<name>   its second moment
    reference.<name>    the start policy, only with a KL penalty on full weights
    outer.phi.<name>    slow weights of the outer step, and outer.delta.<name> its momentum, where replicas are averaged
    rng                 state of the sampling generator, u8
    metadata            counters and fingerprint, JSON

One file and one rename, so weights and counters can never be of different steps. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.errors import StateError
from swarmnode.files import sync_directory

FILE = "state.safetensors"


class Counters(msgspec.Struct):
    """Everything of a trainer that is a number and must survive it."""

    step: int = 0
    policy_version: int = 0
    sequence: int = 0
    """Next number of a group; never reused, see `SEQUENCE_MARGIN`."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
    oom_retries_total: int = 0
    micro_batch_tokens: int = 0
    """Learnt from running out of memory; 0 while it never did."""
    groups_per_step: float = 0.0
    """Fitted to this node's speed; 0 before the first step."""
    useful_per_step: float = 0.0
    external_scale: float = 1.0
    reward_held_out: float | None = None
    reward_held_out_start: float | None = None
    held_out_step: int | None = None
    peers_used: dict[str, int] = {}
    outer_clocks: list[int] = []
    """Outer steps, by fragment."""
    exchanges_total: int = 0
    solo_steps_total: int = 0
    probation: bool = False
    """Our state is a neighbour's, and no exchange has shown yet that it fits."""
    peer: str = ""
    swarm: str = ""
    crew: str = ""
    """Hex; of the crew whose head counted this."""


SEQUENCE_MARGIN = 4096
"""A restart skips so many numbers: groups of the lost step may already be with peers, who take each number once."""


@dataclass(frozen=True)
class Snapshot:
    tensors: dict[str, torch.Tensor]
    counters: dict[str, Any]
    fingerprint: str


OUTER = "outer."


def take(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator, counters: Counters, fingerprint: str,
    outer: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot:  # fmt: skip
    """Copy everything to host memory between two steps; writing the copy needs the model no more.

    outer: the outer step's tensors, which never change once they are made, so they are not copied.
    """
    tensors = {"rng": rng.get_state().clone(), **{f"{OUTER}{name}": tensor for name, tensor in (outer or {}).items()}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"weights.{name}"] = _host_copy(parameter)
        moments = optimizer.state.get(parameter)
        if moments:
            tensors[f"first.{name}"] = _host_copy(moments["exp_avg"])
            tensors[f"second.{name}"] = _host_copy(moments["exp_avg_sq"])
            tensors[f"steps.{name}"] = moments["step"].detach().cpu().clone().reshape(1)
    return Snapshot(tensors, msgspec.to_builtins(counters), fingerprint)


def take_counters(rng: torch.Generator, counters: Counters, fingerprint: str) -> Snapshot:
    """Of a trainer whose weights are kept elsewhere."""
    return Snapshot({"rng": rng.get_state().clone()}, msgspec.to_builtins(counters), fingerprint)


def used_sequences(*directories: Path) -> int:
    """The highest group number that any of these states knows of; 0 where there is none. Damaged ones say nothing."""
    highest = 0
    for directory in directories:
        try:
            with safe_open(directory / FILE, "pt", device="cpu") as file:
                metadata = file.metadata() or {}
            highest = max(highest, int(json.loads(metadata["counters"])["sequence"]))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError):
            continue
    return highest


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def write(directory: Path, snapshot: Snapshot) -> None:
    """Write to a temporary name, sync, rename. Raises OSError; the old file is then untouched."""
    temporary = directory / f".{FILE}.tmp"
    metadata = {"counters": json.dumps(snapshot.counters), "fingerprint": snapshot.fingerprint}
    try:
        save_file(snapshot.tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, directory / FILE)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)  # on a full disk, half a state would take the room of what is small
        raise OSError(str(error)) from None
    sync_directory(directory)


def owner(fingerprint: bytes, lora_rank: int, shared_a: bool = False) -> str:
    """Whose state it is: the base and the kind of weights that are trained on it. shared_a: of the adapters, only B is."""
    return f"{fingerprint.hex()}/lora{lora_rank}" + "/b" * shared_a


def read(directory: Path, fingerprint: str) -> tuple[Counters, dict[str, torch.Tensor]] | None:
    """(counters, tensors by the names above) of the last written state; None when there is none.

    Raises:
        StateError: the file is damaged, or belongs to another policy than `fingerprint`'s (see `owner`).
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt", device="cpu") as file:
            metadata = file.metadata() or {}
            counters = msgspec.convert(json.loads(metadata["counters"]), Counters)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.ValidationError) as error:
        raise StateError(f"{path} is damaged ({error}); move it away to start from the base policy") from None
    if metadata.get("fingerprint") != fingerprint:
        raise StateError(f"{path} belongs to another model; move it away, or set policy.model and policy.lora as they were")
    return counters, tensors


def restore(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator, fingerprint: str,
    outer: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Counters | None:  # fmt: skip
    """Put the last written state into model, optimizer and generator; None when there is none. `outer` is handed what `take` was.

    Raises:
        StateError: the file is damaged, or belongs to another policy. Nothing has been changed then.
    """
    found = read(directory, fingerprint)
    if found is None:
        return None
    counters, tensors = found
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")}
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in trainable.items()}:
        raise StateError(f"{directory / FILE} has other tensors than the model; move it away to start from the base policy")
    outer({name.removeprefix(OUTER): t for name, t in tensors.items() if name.startswith(OUTER)})  # may refuse: first
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(weights[name])
            if f"first.{name}" in tensors:
                step = tensors[f"steps.{name}"].reshape(())
                optimizer.state[parameter] = {
                    "step": step.to(parameter.device) if optimizer.defaults.get("fused") else step,
                    "exp_avg": tensors[f"first.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"second.{name}"].to(parameter.device),
                }
    set_generator(rng, tensors["rng"])
    return counters


def set_generator(rng: torch.Generator, state: torch.Tensor) -> None:
    """Continue where `state` (bytes) was taken; that of another kind of device cannot be continued and becomes a seed."""
    if state.shape == rng.get_state().shape:
        rng.set_state(state)
    else:
        rng.manual_seed(int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "big") >> 1)


class Saver:
    """Writes snapshots in its own thread, the newest only: a disk slower than a step costs steps on a crash, not speed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._condition = threading.Condition()
        self._pending: Snapshot | None = None
        self._busy = False
        self._closing = False
        self.saved_step = 0
        self.error: str | None = None
        """Why the last write failed; None after one that succeeded. Training goes on either way."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether a snapshot submitted now would be written at once: if not, taking one is wasted work."""
        with self._condition:
            return not self._busy

    def submit(self, snapshot: Snapshot) -> None:
        with self._condition:
            self._pending = snapshot
            self._condition.notify_all()

    def close(self) -> None:
        """Write what is pending, then stop."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.wait_for(lambda: self._pending is not None or self._closing)
                snapshot, self._pending = self._pending, None
                if snapshot is None:
                    return
                self._busy = True
            try:
                write(self._directory, snapshot)
                self.saved_step, self.error = snapshot.counters["step"], None
            except OSError as error:
                self.error = str(error)
