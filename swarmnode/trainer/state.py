"""What a trainer that was killed comes back to: one safetensors file, written while the next step runs.

    weights.<name>      the trainable parameters
    first.<name>        AdamW's first moment      second.<name>   its second moment
    outer.phi.<name>    slow weights of the outer step, and outer.delta.<name> its momentum, where replicas are averaged
    rng                 state of the sampling generator, u8
    metadata            counters and fingerprint, JSON

One file and one rename, so weights and counters can never be of different steps. No pickle.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarmnode.errors import StateError
from swarmnode.files import sync_directory
from swarmnode.policy.load import check_shapes, overwrite, trainable

log = structlog.get_logger("swarmnode.trainer")

FILE = "state.safetensors"
COMPLAIN_SECONDS = 30.0
"""Between two complaints that the state cannot be saved."""


PEERS_USED = 256
"""Peers of which a trainer remembers how many groups it trained on: it saves them with its state, and reports them at every step."""


class Counters(msgspec.Struct):
    """The numbers of a trainer that must survive it."""

    step: int = 0
    policy_version: int = 0
    sequence: int = 0
    """Next number of a group; never reused, see `SEQUENCE_MARGIN`."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
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
    probation: bool = False
    """Our state is a neighbour's, and no exchange has shown yet that it fits."""
    peer: str = ""
    swarm: str = ""
    crew: str = ""
    """Id, hex, of the crew whose head counted this."""

    def note_use(self, peer: str) -> None:
        """Count a group of `peer` that was trained on; the peer that was used longest ago makes room."""
        self.peers_used[peer] = self.peers_used.pop(peer, 0) + 1
        while len(self.peers_used) > PEERS_USED:
            del self.peers_used[next(iter(self.peers_used))]


SEQUENCE_MARGIN = 4096
"""A restart skips so many numbers: groups of the lost step may already be with peers, who take each number once."""


@dataclass(frozen=True)
class Snapshot:
    """A state as it was when it was taken."""

    tensors: dict[str, torch.Tensor]
    counters: Counters
    owner: str
    """See `owner`."""


WEIGHTS, OUTER = "weights.", "outer."


def take(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator, counters: Counters, owner: str,
    outer: Mapping[str, torch.Tensor] | None = None,
) -> Snapshot:  # fmt: skip
    """Copy everything to host memory between two steps; writing the copy needs the model no more.

    outer: the outer step's tensors, which never change once they are made, so they are not copied.
    """
    tensors = {"rng": rng.get_state().clone(), **{f"{OUTER}{name}": tensor for name, tensor in (outer or {}).items()}}
    for name, parameter in trainable(model).items():
        tensors[f"{WEIGHTS}{name}"] = _host_copy(parameter)
        moments = optimizer.state.get(parameter)
        if moments:
            tensors[f"first.{name}"] = _host_copy(moments["exp_avg"])
            tensors[f"second.{name}"] = _host_copy(moments["exp_avg_sq"])
            tensors[f"steps.{name}"] = moments["step"].detach().cpu().clone().reshape(1)
    return Snapshot(tensors, copy.deepcopy(counters), owner)


def take_counters(rng: torch.Generator, counters: Counters, owner: str) -> Snapshot:
    """The same for a trainer whose weights are kept elsewhere."""
    return Snapshot({"rng": rng.get_state().clone()}, copy.deepcopy(counters), owner)


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
    metadata = {"counters": msgspec.json.encode(snapshot.counters).decode(), "fingerprint": snapshot.owner}
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


def read(directory: Path, owner: str) -> tuple[Counters, dict[str, torch.Tensor]] | None:
    """(counters, tensors by the names above) of the last written state; None when there is none.

    Raises:
        StateError: the file is damaged, or belongs to another policy than `owner` says.
    """
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt", device="cpu") as file:
            metadata = file.metadata() or {}
            counters = msgspec.json.decode(metadata["counters"], type=Counters)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise StateError(f"{path} is damaged ({error}); move it away to start from the base policy") from None
    if metadata.get("fingerprint") != owner:
        raise StateError(f"{path} belongs to another model; move it away, or set policy.model and policy.lora as they were")
    return counters, tensors


def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trainable parameters in what `read` gave, by their names in the model."""
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}


def restore(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator, owner: str,
    outer: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Counters | None:  # fmt: skip
    """Put the last written state into model, optimizer and generator; None when there is none. `outer` is handed what `take` was.

    Raises:
        StateError: the file is damaged, or belongs to another policy. Nothing has been changed then.
    """
    found = read(directory, owner)
    if found is None:
        return None
    counters, tensors = found
    parameters = trainable(model)
    try:
        check_shapes(parameters, weights(tensors))
    except StateError as error:
        raise StateError(f"{directory / FILE}: {error}; move it away to start from the base policy") from None
    outer({name.removeprefix(OUTER): t for name, t in tensors.items() if name.startswith(OUTER)})  # may refuse: first
    overwrite(parameters, weights(tensors))
    for name, parameter in parameters.items():
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
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
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
                self.saved_step, self.error = snapshot.counters.step, None
            except OSError as error:
                self.error = str(error)


class Snapshots(Protocol):
    """What a state is taken from: an engine."""

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot: ...


class Checkpoints:
    """When and of what the state is saved. Use as a context manager: leaving it waits for the last one to be on disk."""

    def __init__(self, directory: Path, source: Snapshots, rng: torch.Generator, counters: Counters) -> None:
        self._saver = Saver(directory)
        self._source = source
        self._rng = rng
        self._counters = counters
        self._complain_at = float("-inf")

    def __enter__(self) -> Self:
        self._saver.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._saver.close()

    @property
    def saved_step(self) -> int:
        return self._saver.saved_step

    def save(self, last: bool = False) -> None:
        """Save what there is now, unless the disk is still busy with what there was. last: then too."""
        if last or self._saver.idle:
            self._saver.submit(self._source.snapshot(self._rng, self._counters))
        now = time.monotonic()
        if self._saver.error and now >= self._complain_at:
            log.error("state not saved", error=self._saver.error, saved_step=self._saver.saved_step)
            self._complain_at = now + COMPLAIN_SECONDS
