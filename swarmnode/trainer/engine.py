"""What the loop trains, wherever its weights are: a policy that can be sampled, scored, taught, averaged and kept.

    WholePolicy             all of it on this machine: policy, optimizer and replica         here
    CrewPolicy              in stages on several, of which this node holds the first         trainer/crew_policy.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.config import Config
from swarmnode.link.messages import WeightsReport
from swarmnode.policy.generate import GroupSample, generate
from swarmnode.policy.load import LORA_MODULES, Policy, load_policy
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.text import PolicyText
from swarmnode.swarm.manifest import check_model
from swarmnode.swarm.manifest_store import stored
from swarmnode.trainer import state
from swarmnode.trainer.batch import Rows, Scored
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import Updater, UpdateStatistics, learning_rate
from swarmnode.trainer.weights import Replica
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape

log = logging.getLogger("swarmnode.trainer")


class EngineGone(Exception):
    """Raised by an engine that this node does not train any more, as when another has become the head of its crew. Not an error."""


@dataclass(frozen=True)
class EngineStatistics:
    device: str
    dtype: str
    device_memory_bytes: int | None
    micro_batch_tokens: int
    """Present bound of a micro-batch, padded tokens."""
    oom_retries: int


class Engine(Protocol):
    """Calls block, from one thread, one at a time. None of them ever waits without an end; what waits may raise EngineGone."""

    @property
    def text(self) -> PolicyText: ...

    def statistics(self) -> EngineStatistics: ...

    # ---- a step ---------------------------------------------------------------------------------------------------------

    def random_generator(self, seed: int) -> torch.Generator:
        """What `generate` draws with."""
        ...

    def generate(
        self, prompts: Sequence[str], num_generations: int, max_tokens: int, temperature: float, top_p: float, rng: torch.Generator
    ) -> list[GroupSample]:
        """Completions of each prompt, in order."""
        ...

    def score(self, rows: Sequence[Row], temperature: float) -> list[Scored]:
        """(log-probabilities, entropies) at the completion tokens of each row, without gradient."""
        ...

    def update(self, rows: Rows, step: int) -> UpdateStatistics:
        """Learn from `rows`. `step` decides the learning rate."""
        ...

    def learning_rate(self, step: int) -> float: ...

    # ---- between steps --------------------------------------------------------------------------------------------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Whatever is due with other replicas; see `Replica.between_steps`. Whether the policy has changed."""
        ...

    def remember(self, rows: Sequence[Row]) -> None:
        """Own completions that earned their group's highest reward."""
        ...

    def observe(self, reward: float) -> None:
        """A held-out reward was measured."""
        ...

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        """What is averaged here; None where nothing is."""
        ...

    def averaging(self) -> WeightsReport | None: ...

    def wait_for_state(self, seconds: float) -> bool:
        """Whether it is known what there is to adopt from neighbours; at once where nothing ever will be."""
        ...

    # ---- across restarts ------------------------------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters | None:
        """Take back what `snapshot` gave, as far as it is the engine's to keep. Raises StateError."""
        ...

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        """Everything that must survive this process, copied."""
        ...


def open_policy(config: Config, say: Callable[[str], None] = lambda line: None) -> Policy:
    """The whole policy. Raises LocalError: it does not exist or fit, or is not the swarm's."""
    policy = load_policy(config.policy, log=say)
    opened = stored(config.node.data_dir)
    if opened is not None:
        check_model(opened.manifest, policy.fingerprint, policy.tokenizer_hash)
    if shares_a(config):
        freeze_a(dict(policy.model.named_parameters()), A_SEED)
    return policy


class WholePolicy:
    """A policy that fits this machine.

    counters: where the numbers of averaging live; `restore` replaces them. send: to the network process, from any thread.
    """

    def __init__(self, config: Config, policy: Policy, counters: Counters, send: Callable[[local.FromTrainer], None]) -> None:
        self._config = config
        self._policy = policy
        cfg = config.training
        self._batcher = MicroBatcher(cfg.per_device_train_tokens)
        reference = self._policy.reference() if cfg.beta > 0 else None
        self._updater = Updater(self._policy, cfg, self._batcher, reference)
        self._owner = state.owner(self._policy.fingerprint, config.policy.lora.r, shares_a(config))
        self._replica: Replica | None = None
        if config.weights.rule != "off":
            self._replica = self._make_replica(counters, send)

    def _make_replica(self, counters: Counters, send: Callable[[local.FromTrainer], None]) -> Replica:
        """Before a state is restored: the base weights are what the codec is relative to."""
        return Replica(
            self._policy, self._config.weights, counters, self._batcher, self._config.node.data_dir,
            lock=self._updater.lock, send=send, temperature=self._config.training.temperature, adapter=adapter_shape(self._config),
        )  # fmt: skip

    @property
    def text(self) -> PolicyText:
        return self._policy

    def statistics(self) -> EngineStatistics:
        policy, batcher = self._policy.statistics(), self._batcher.statistics()
        return EngineStatistics(policy.device, policy.dtype, policy.device_memory_bytes, batcher.tokens, batcher.oom_retries)

    def random_generator(self, seed: int) -> torch.Generator:
        return self._policy.random_generator(seed)

    def generate(
        self, prompts: Sequence[str], num_generations: int, max_tokens: int, temperature: float, top_p: float, rng: torch.Generator
    ) -> list[GroupSample]:
        return generate_in_pieces(self._policy, self._batcher, prompts, num_generations, max_tokens, temperature, top_p, rng)

    def score(self, rows: Sequence[Row], temperature: float) -> list[Scored]:
        return self._batcher.score_with_entropy(self._policy, rows, temperature)

    def update(self, rows: Rows, step: int) -> UpdateStatistics:
        return self._updater.update(rows, step)

    def learning_rate(self, step: int) -> float:
        return learning_rate(self._config.training, step)

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        return self._replica.between_steps(connected, step_seconds, stepped) if self._replica is not None else False

    def remember(self, rows: Sequence[Row]) -> None:
        if self._replica is not None:
            self._replica.remember(rows)

    def observe(self, reward: float) -> None:
        if self._replica is not None:
            self._replica.observe(reward)

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        return self._replica.facts(fresh) if self._replica is not None else None

    def averaging(self) -> WeightsReport | None:
        return self._replica.report() if self._replica is not None else None

    def wait_for_state(self, seconds: float) -> bool:
        return self._replica.settled(seconds) if self._replica is not None else True

    def receive(self, message: local.ToTrainer) -> None:
        """What the network process says about averaging; from the link's thread."""
        if self._replica is not None:
            self._replica.receive(message)

    def restore(self, directory: Path, rng: torch.Generator) -> Counters | None:
        outer: dict[str, torch.Tensor] = {}
        counters = state.restore(directory, self._policy.model, self._updater.optimizer, rng, self._owner, outer.update)
        if counters is None:
            return None
        if self._replica is not None:
            self._replica.counters(counters)
            self._replica.restore(outer)
        if counters.micro_batch_tokens:  # learnt from running out of memory
            self._batcher.tokens = min(self._batcher.tokens, counters.micro_batch_tokens)
        return counters

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        outer: Mapping[str, torch.Tensor] | None = self._replica.tensors() if self._replica is not None else None
        return state.take(self._policy.model, self._updater.optimizer, rng, counters, self._owner, outer)


def generate_in_pieces(
    policy: Policy, batcher: MicroBatcher, prompts: Sequence[str], num_generations: int, max_tokens: int, temperature: float,
    top_p: float, rng: torch.Generator,
) -> list[GroupSample]:  # fmt: skip
    """`policy.generate.generate` in micro-batches."""

    def work(some: Sequence[str]) -> list[GroupSample]:
        return generate(policy, some, num_generations, max_tokens, temperature, top_p, rng)

    longest = max((len(policy.encode_prompt(prompt)) for prompt in prompts), default=0) + max_tokens
    return batcher.generate(prompts, num_generations, longest, work)


def adapter_shape(config: Config) -> LoraShape | None:
    """Of the adapter that is trained; None where all weights are."""
    lora = config.policy.lora
    if not lora.r:
        return None
    return LoraShape(lora.r, lora.lora_alpha, (LORA_MODULES,), A_SEED if shares_a(config) else None)
