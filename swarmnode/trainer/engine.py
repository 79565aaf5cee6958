"""Policies that the loop trains: each can be sampled, scored, trained, averaged and saved.

    WholePolicy             one device, or layers spread over several        this file
    DataParallelPolicy      one copy on each of several devices              ranks.py
    CrewPolicy              stages on several nodes; this node's is first    stages/trainer/

The loop calls all of them through `Engine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from swarmnode.config import Config, PolicyConfig, ServerSettings, WeightsConfig
from swarmnode.errors import DeviceError
from swarmnode.link.messages import CardUse
from swarmnode.policy.device import free_bytes, model_shape, spare_bytes
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.engine.selector import (
    OwnEngine,
    TrainingContinuous,
    answered,
    select_engine,
)
from swarmnode.policy.engine.served import Served, ServerFirst
from swarmnode.policy.engine.served_weights import ServedWeights
from swarmnode.policy.engine.vllm import ServerStatistics, VllmServer
from swarmnode.policy.footprint import (
    OPTIMIZER_BYTES,
    Method,
    Optim,
    footprint,
    host_bytes,
    micro_batch,
    sampling_tokens,
)
from swarmnode.policy.generate import GroupSample, Sampling
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.logprobs import SPARE_SHARE, Row
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.text import PolicyText
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import RowScores
from swarmnode.swarm.manifest import check_model
from swarmnode.trainer import state
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import Updater, UpdateStatistics
from swarmnode.weights import local
from swarmnode.weights.local import WeightsReport
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import LossProbe
from swarmnode.weights.trainer.lora import freeze_a
from swarmnode.weights.trainer.replica import Replica
from swarmnode.wire.messages import SwarmManifest

QUESTION_TOKENS = 512
"""Tokens of the question that the estimate of concurrent completions assumes."""
CPU_TOKENS = 4096
"""Largest number of tokens in a scored micro-batch on a CPU. A few hundred already use all cores;
more would only delay the progress report that follows each layer."""


@dataclass(frozen=True)
class EngineStatistics:
    device: str
    dtype: str
    device_memory_bytes: int | None
    micro_batch_tokens: int
    """Present bound of a micro-batch in training, padded tokens."""
    generation_tokens: int
    """Present bound of the tokens of concurrent completions in generation."""
    oom_retries: int
    """Number of times that a micro-batch ran out of memory and was retried."""
    engine: str = ""
    """Sampling engine: lockstep, continuous or served."""
    server: ServerStatistics | None = None
    """None if no server is configured."""
    cards: list[CardUse] = field(default_factory=list)


class Engine(Protocol):
    """A policy as the training loop uses it.

    All methods block and are called from one thread. Every wait has a timeout; methods that wait
    may raise EngineGone.
    """

    @property
    def text(self) -> PolicyText: ...

    def statistics(self) -> EngineStatistics: ...

    # ---- a step ----------------------------------------------------------------------------------

    def random_generator(self, seed: int) -> torch.Generator:
        """Return the random generator for `generate`."""
        ...

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        """Return a group of completions for each prompt (text or ids), in order."""
        ...

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        """Return the generation that samples for training. Its completions may continue across an
        update. There is one generation at a time."""
        ...

    def score(self, rows: Sequence[Row], temperature: float) -> list[RowScores]:
        """Return (log-probabilities, entropies) of the completion tokens of each peer's row,
        without gradient.

        Raises:
            DeviceError: A row does not fit into memory.
        """
        ...

    def update(self, rows: Rows) -> UpdateStatistics:
        """Take one optimizer step on `rows`."""
        ...

    # ---- between steps ---------------------------------------------------------------------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Process averaging with other replicas, see `Replica.between_steps`; return True if the
        policy has changed."""
        ...

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        """Store own completions for the probe.

        Args:
            rewarded: Completions with the highest reward of their group.
            own: All completions of the batch.
        """
        ...

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        """Return the description of the replica; None if no weights are averaged.

        Args:
            fresh: True if the policy has not been trained.
        """
        ...

    def averaging(self) -> WeightsReport | None: ...

    def wait_for_state(self, seconds: float, late: float) -> bool:
        """See `Replica.wait_for_state`. Return True at once if no weights are averaged."""
        ...

    # ---- across restarts -------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters | None:
        """Restore the engine's part of a saved snapshot; return its counters, None if there is no
        saved state.

        Raises:
            StateError: The state is damaged or belongs to another policy.
        """
        ...

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        """Return the present state that must survive a restart, see `state.take`."""
        ...


def open_policy(
    cfg: PolicyConfig, manifest: SwarmManifest | None, log: Callable[[str], None]
) -> Policy:
    """Load the whole policy.

    Args:
        manifest: Manifest of the swarm; None without a swarm.
        log: Receives a line per stage of loading.

    Raises:
        LocalError: The policy does not exist, does not fit, or is not the swarm's.
    """
    policy = load_policy(cfg, log)
    if manifest is not None:
        check_model(manifest, policy.fingerprint, policy.tokenizer_hash)
    freeze_a(dict(policy.model.named_parameters()))
    return policy


def make_whole_policy(
    config: Config,
    policy: Policy,
    counters: Counters,
    send: Callable[[local.FromTrainer], None],
    alive: Callable[[], None] = lambda: None,
    ranks: int = 1,
    make: Callable[..., WholePolicy] | None = None,
) -> WholePolicy:
    """Return `policy` with its optimizer, and with a replica if weights are averaged.

    Args:
        counters: Counters of averaging; `WholePolicy.restore` replaces them.
        send: Sends a message to the network process; called from any thread.
        alive: Called regularly during all computation.
        ranks: Number of processes of this node that train, each with a copy of the policy.
        make: Makes a policy that uses all ranks, if there are several.

    Raises:
        DeviceError: The machine has too little memory for averaging and saving.
    """
    check_host_memory(
        config.policy,
        config.weights,
        sum(p.numel() for p in policy.trainable_parameters()),
        policy.device,
        ranks,
    )
    memory, updater = make_updater(config, policy, alive, ranks)
    training, cfg, replica, probe = config.training, config.weights, None, None
    adapter = state.adapter_shape(config.policy.lora)
    # Before a state is restored, because payloads are differences from the base weights.
    if cfg.rule != "off":
        trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        tensors = AveragedTensors(trained, cfg.fragments, updater.lock)
        # A separate batcher, since a row that is too long to train on may still be scored.
        scoring = MicroBatcher(memory.training.tokens, alive)
        probe = LossProbe(policy, scoring, training.temperature, tensors)
        replica = Replica(
            tensors, cfg, counters, config.node.data_dir, send=send, probe=probe, adapter=adapter
        )
    owner = state.owner(policy.fingerprint, adapter)
    directory = Path(config.policy.server.directory or config.node.data_dir / "served")
    server = config.policy.server if config.policy.server.url else None
    return (make or WholePolicy)(
        policy, updater, memory, replica, probe, owner, training.options, server, directory
    )


def make_updater(
    config: Config, policy: Policy, alive: Callable[[], None], ranks: int = 1
) -> tuple[Memory, Updater]:
    """Return the memory and the updater that a process needs to compute gradients with `policy`."""
    training, optim = config.training, config.policy.optim
    tokens = affordable_tokens(policy, training.per_device_train_tokens, optim, ranks)
    memory = Memory.of(
        tokens,
        max(tokens, concurrent_tokens(policy, training.max_completion_length, optim)),
        policy.device.type,
        alive,
    )
    updater = Updater(policy, training, memory.training, memory.external, optim)
    report_layers(policy.base, alive)
    return memory, updater


def check_host_memory(
    cfg: PolicyConfig, weights: WeightsConfig, trained: int, device: torch.device, ranks: int = 1
) -> None:
    """Raise DeviceError if averaging and saving would exceed the machine's free memory.

    Without this check the kernel would kill the process during a save, again after each restart. On
    a CPU, gradients and optimizer moments count as well. With several `ranks`, only rank 0 has
    moments; the other ranks have weights and gradients.

    Args:
        trained: Number of trained weights.
    """
    optim, free = cfg.optim, free_bytes(torch.device("cpu"))
    always, more = host_bytes(trained, weights.fragments if weights.rule != "off" else 0, optim)
    each, moments = 4 * trained, OPTIMIZER_BYTES[optim] * trained
    # Gradients of every rank, and weights of the ranks that are not started yet.
    here = ranks * each + moments + (ranks - 1) * each if device.type == "cpu" else 0
    need = here + always + more
    if free is None or need <= free:
        return
    remedies = [
        *(["weights.rule to off"] if always else []),
        *(["policy.lora.r to 16", "stages.mode to always"] if not cfg.lora.r else []),
    ]
    parts = f"{here / 1e9:.1f} GB to train, " * bool(
        here
    ) + f"{always / 1e9:.1f} GB to average, " * bool(always)
    raise DeviceError(
        f"{trained:,} trained weights need {need / 1e9:.1f} GB of the machine's memory"
        f" ({parts}{more / 1e9:.1f} GB during an outer step or a save), and"
        f" {free / 1e9:.1f} GB are free: set {' or '.join(remedies) or 'policy.model smaller'};"
        " `swarmnode plan` lists the memory of each"
    )


def affordable_tokens(policy: Policy, configured: int, optim: Optim, ranks: int = 1) -> int:
    """Return the maximum number of tokens in a micro-batch.

    The result is the smaller of the configured number and the number that fits beside weights,
    gradients and moments according to the memory plan. On a CPU all `ranks` share the memory. The
    plan matters on a CPU: if memory runs out there, the kernel kills the process, whereas a GPU
    reports the error and the micro-batch is halved.
    """
    spare, shape = spare_bytes(policy.device), model_shape(policy.base)
    if spare is None or shape is None or policy.device.type != "cpu":
        return configured
    method = training_method(policy, optim)
    here = footprint(shape, method, 1)
    # Weights and torch are in memory already.
    fits = micro_batch(shape, method, SPARE_SHARE * spare / ranks + here.weights + here.runtime)
    return min(configured, max(64, fits))


def training_method(policy: Policy, optim: Optim) -> Method:
    """Return the training method of `policy` when memory is short: with activation
    checkpointing."""
    dtype = str(policy.dtype).removeprefix("torch.")
    return Method(policy.device.type, dtype, policy.lora_rank, optim=optim, checkpointing=True)


def concurrent_tokens(policy: Policy, longest: int, optim: Optim) -> int:
    """Return the number of tokens of concurrent completions for which a GPU has memory beside
    training; 0 if it cannot be estimated.

    More concurrent completions are faster, since a decoding step reads all weights for any number
    of completions.

    Args:
        longest: Largest number of tokens in a completion.
    """
    spare, shape = spare_bytes(policy.device), model_shape(policy.base)
    if policy.device.type != "cuda" or spare is None or shape is None or policy.is_spread:
        return 0
    return sampling_tokens(
        shape, training_method(policy, optim), QUESTION_TOKENS + longest, SPARE_SHARE * spare
    )


@dataclass(frozen=True)
class Memory:
    """Micro-batchers of the three kinds of work. Each adapts its own size when memory runs
    out."""

    training: MicroBatcher
    generation: MicroBatcher
    external: MicroBatcher
    """Micro-batcher of peers' rows, whose lengths this node did not choose."""

    @classmethod
    def of(cls, tokens: int, sampled: int, device: str, alive: Callable[[], None]) -> Memory:
        """Return batchers for the device type `device`.

        Args:
            tokens: Largest number of tokens in a micro-batch.
            sampled: Largest number of tokens in concurrent completions.
            alive: Called regularly during all computation.
        """
        scored = min(tokens, CPU_TOKENS) if device == "cpu" else tokens
        return cls(
            MicroBatcher(scored, alive), MicroBatcher(sampled, alive), MicroBatcher(scored, alive)
        )


class WholePolicy:
    """A policy that fits on this machine.

    Args:
        probe: Probe of the replica.
        owner: Owner of the state that may be restored, see `state.owner`.
        options: The training options.
        server: Inference server that samples instead of the own engine. It loads the weights from
            the directory `served`.
    """

    def __init__(
        self,
        policy: Policy,
        updater: Updater,
        memory: Memory,
        replica: Replica | None,
        probe: LossProbe | None,
        owner: str,
        options: Collection[str] = (),
        server: ServerSettings | None = None,
        served: Path = Path("served"),
    ) -> None:
        self._server, self._served = server, served
        self._policy = policy
        self._updater = updater
        self._memory = memory
        self._replica = replica
        self._probe = probe
        self._owner = owner
        self._options = options
        self._generation: OwnEngine | ServerFirst | None = None

    @property
    def text(self) -> PolicyText:
        return self._policy

    def statistics(self) -> EngineStatistics:
        policy, memory = self._policy.statistics(), self._memory
        training, generation = memory.training.statistics(), memory.generation.statistics()
        retries = (
            training.oom_retries + generation.oom_retries + memory.external.statistics().oom_retries
        )
        first = self._generation if isinstance(self._generation, ServerFirst) else None
        own = self._own()
        kind = own.kind if own is not None else ""
        return EngineStatistics(
            policy.device,
            policy.dtype,
            policy.device_memory_bytes,
            training.tokens,
            generation.tokens,
            retries,
            first.kind() if first is not None else kind,
            first.server() if first is not None else None,
            card_uses(self._policy),
        )

    def _own(self) -> OwnEngine | None:
        """The own engine; None until it is first needed."""
        if isinstance(self._generation, ServerFirst):
            return self._generation.own
        return self._generation

    def random_generator(self, seed: int) -> torch.Generator:
        return self._policy.random_generator(seed)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        batcher, own = self._memory.generation, self._own()
        if isinstance(self._generation, ServerFirst):
            groups = self._generation.answered(prompts, sampling)
            if groups is not None:
                return groups
        if own is not None and own.kind == "continuous":
            return answered(TrainingContinuous(self._policy, batcher, sampling, rng), prompts)
        return batcher.generate(self._policy, prompts, sampling, rng)

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        policy, batcher, alive = (
            self._policy,
            self._memory.generation,
            self._memory.generation.alive,
        )
        own = lambda: select_engine(policy, batcher, self._options, sampling, rng)
        if self._server is None:
            self._generation = own()
            return self._generation
        server = VllmServer(self._server.url, adapter=policy.lora_rank > 0)
        self._generation = ServerFirst(
            server,
            lambda: ServedWeights(server, policy, self._served, alive),
            lambda weights, how: Served(server, weights, policy, how, alive),
            sampling,
            own,
        )
        return self._generation

    def _weights_move(self) -> contextlib.AbstractContextManager[None]:
        return (
            self._generation.pause() if self._generation is not None else contextlib.nullcontext()
        )

    def score(self, rows: Sequence[Row], temperature: float) -> list[RowScores]:
        return self._memory.external.score_with_entropy(self._policy, rows, temperature)

    def update(self, rows: Rows) -> UpdateStatistics:
        with self._weights_move():
            return self._updater.update(rows)

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        if self._replica is None:
            return False
        with self._weights_move():
            return self._replica.between_steps(connected, step_seconds, stepped)

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        if self._probe is not None:
            self._probe.remember(rewarded, own)

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        return self._replica.facts(fresh) if self._replica is not None else None

    def averaging(self) -> WeightsReport | None:
        return self._replica.report() if self._replica is not None else None

    def wait_for_state(self, seconds: float, late: float) -> bool:
        return self._replica.wait_for_state(seconds, late) if self._replica is not None else True

    def receive(self, message: local.ToTrainer) -> None:
        """Handle a message of the network process about averaging; called from the link's
        thread."""
        if self._replica is not None:
            self._replica.receive(message)

    def restore(self, directory: Path, rng: torch.Generator) -> Counters | None:
        has_outer = False

        def take_outer(tensors: dict[str, torch.Tensor]) -> None:
            nonlocal has_outer
            has_outer = bool(tensors)
            if self._replica is not None and has_outer:
                self._replica.restore(tensors)

        counters = state.restore(
            directory, self._policy.model, self._updater.optimizer, rng, self._owner, take_outer
        )
        if counters is None:
            return None
        if self._replica is not None:
            self._replica.set_counters(counters)
            if not has_outer:
                self._replica.restore({})
        return counters

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        outer: Mapping[str, torch.Tensor] | None = (
            self._replica.tensors() if self._replica is not None else None
        )
        return state.take(
            self._policy.model,
            self._updater.optimizer,
            rng,
            counters,
            self._owner,
            outer,
            self._updater.lock,
        )


def card_uses(policy: Policy) -> list[CardUse]:
    """Return the GPUs on which this process computes: several if the layers are spread."""
    placed = [policy.device, *map(torch.device, set(policy.device_map.values()))]
    found = []
    for index in sorted({device.index or 0 for device in placed if device.type == "cuda"}):
        free, total = torch.cuda.mem_get_info(index)
        name, held = torch.cuda.get_device_name(index), torch.cuda.memory_reserved(index)
        found.append(CardUse(f"cuda:{index}", name, total, free, held))
    return found
