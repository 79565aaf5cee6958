"""The trainer of a node that holds one stage of a policy; it runs the loop while it holds the
first.

    main thread      waits; as the head it runs the loop of a whole policy over a `CrewPolicy`
    crew's thread    `StageRunner`: the stage, its streams, its recovery
    link's thread    delivers messages of the network process to both
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import queue
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import structlog
import torch
import trio
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.lora import A_MARK, A_SEED, freeze_a, shares_a
from swarmnode.averaging.outer import UNDO, Tensors, unmoved
from swarmnode.averaging.probe import LEAST_PROBE, PROBE_SEQUENCES, Answer, compare
from swarmnode.config import (
    Config,
    LoraSettings,
    PolicyConfig,
    StagesConfig,
    TrainingConfig,
    WeightsConfig,
)
from swarmnode.errors import (
    ConfigError,
    DeviceError,
    EngineGone,
    Incompatible,
    LocalError,
    PeerError,
    PeerTimeout,
    Refused,
    StateError,
    SwarmNodeError,
    Unavailable,
)
from swarmnode.files import socket_address, write_atomically
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello, WeightsReport
from swarmnode.pauses import Told
from swarmnode.policy.device import (
    HEADROOM,
    TRAINED_BYTES,
    Placement,
    count_parameters,
    free_bytes,
    needed_bytes,
    probe,
    set_up,
)
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.engine.protocol import Generation
from swarmnode.policy.fingerprint import fingerprint, tokenizer_hash, weight_files
from swarmnode.policy.footprint import (
    ITEM_BYTES,
    LOGITS_COPIES,
    UNDO_WEIGHTS,
    Method,
    Shape,
    host_bytes,
    layer_bytes,
    logits_tokens,
)
from swarmnode.policy.generate import GroupSample, Sampled, Sampling
from swarmnode.policy.layers import report_layers
from swarmnode.policy.load import (
    Policy,
    config_directory,
    configured_ends,
    context_of,
    local_directory,
    lora_settings,
    make_accelerator,
    offline,
)
from swarmnode.policy.logprobs import Row
from swarmnode.policy.micro import MicroBatcher, free_memory, is_oom, micro_batches
from swarmnode.policy.quantised import build_quantised
from swarmnode.policy.text import Chat, PolicyText, vocabulary
from swarmnode.process import Progress
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.rollouts.groups import Outcome
from swarmnode.stages import wire
from swarmnode.stages.head import PATIENCE, TOO_MUCH, CannotScore, Head, StepResult, Wave
from swarmnode.stages.model import (
    LearnRow,
    StageOptimizer,
    StageRuntime,
    adapt,
    check_split,
    load_stage,
    tensors_of,
)
from swarmnode.stages.recovery import Base, base_adapter, base_stage, restore
from swarmnode.stages.recovery import Replica as StageReplica
from swarmnode.stages.transfer import (
    LEARNING_RATE_FACTOR,
    SNAPSHOTS,
    Begun,
    Journal,
    LocalStage,
    OnDisk,
    PaperMode,
    Parts,
    RecoverySettings,
    Run,
    SnapshotRecorder,
    SnapshotStore,
    StatePeer,
    check_paper,
    find_journals,
    find_snapshots,
    host_copy,
    install,
    journal_every,
    journal_file,
    ring,
    run_one,
    stage_layouts,
    work_of,
)
from swarmnode.stages.transfer import trained as trained_tensors
from swarmnode.stages.wire import (
    COPIES,
    CREW_BYTES,
    MICRO_BATCHES,
    NO_HASH,
    ActivationCodec,
    Assigned,
    Capacity,
    Copy,
    Edge,
    Fence,
    FrameLimits,
    Kind,
    ModelCost,
    Offering,
    Open,
    Participant,
    Place,
    StageSpec,
    StageStatus,
    Where,
    activation_bytes,
    is_device_error,
    model_cost,
    stage_memory,
    stage_specs,
)
from swarmnode.stages.worker import CrewSettings, Links, Observer, StageWorker
from swarmnode.swarm.manifest import check_model, members_choose
from swarmnode.swarm.manifest_store import stored
from swarmnode.tasks.client import Scorer
from swarmnode.trainer import state
from swarmnode.trainer.batch import Rows
from swarmnode.trainer.engine import EngineStatistics, adapter_shape
from swarmnode.trainer.judge import Scored
from swarmnode.trainer.loop import HEAD, Identity, Loop, Pauses, Trainer, skip_used_numbers
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters, Snapshot
from swarmnode.trainer.update import UpdateStatistics, normalizer, trained
from swarmnode.trainer.weights import Replica
from swarmnode.trainer.weights_worker import read_state
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.layout import Layout
from swarmnode.weights.manifest import writing_seconds
from swarmnode.wire import headed
from swarmnode.wire.tensors import unpack_logprobs

log = structlog.get_logger("swarmnode.crew")
T = TypeVar("T")


# The probe of an average: does another crew's average make this crew's policy worse?
#
#     here      the newest committed micro-batches through this stage, own and averaged weights
#     others    both outputs through the stages behind it: `Run` of the state streams
#     loss      − log-probability of completions better than their group, nats per token; of
#               all completions while there are too few, and KL (`averaging.probe`)
#
# The stage works with its own weights until the verdict arrives; no verdict rejects the average.

PROBE_MICRO_BATCHES = 4
"""The newest, at most."""
SECONDS = (120.0, 3.0)
"""For a verdict, and for each second that a step takes: what travels for it grows with the policy
as a step does, and shares the lines with it. A partner waits for six minutes and eight steps
(`weights/exchange.py`)."""


class CrewProbe:
    """The probe of one stage's averages, while `peer` is there: in one crew, in the crew's thread
    that `token` is of."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """What the last step took."""
        self._peer: StatePeer | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    def open(self, peer: StatePeer) -> None:
        """In the crew's thread."""
        self._peer, self._token = peer, trio.lowlevel.current_trio_token()

    def close(self) -> None:
        self._peer = None

    def measure(self, mine: Tensors, mean: Tensors, answer: Answer) -> bool:
        """Where a step has just been taken: nothing is remembered meanwhile. Tensors by their names
        in the whole model.

        False where there is too little to judge by; else `answer` is called, in the crew's thread:
        None where there is no verdict.
        """
        peer, token = self._peer, self._token
        if peer is None or token is None:
            return False
        known = _newest(peer)
        rewarded = sum(len(_better(peer, edge)) for edge in known) >= LEAST_PROBE
        judged, count = list[tuple[Edge, list[int]]](), 0
        for edge in reversed(known):
            if count < PROBE_SEQUENCES:  # more of them are minutes of a home's line at 7 B
                judged.append((edge, (_better if rewarded else _all)(peer, edge)))
                count += len(judged[-1][1])
        if count < LEAST_PROBE:
            return False
        seconds = SECONDS[0] + SECONDS[1] * self.step_seconds

        def begin() -> None:
            # the crew has ended meanwhile
            if not peer.channel.spawn(
                lambda: _judge(peer, judged, rewarded, mine, mean, answer, seconds)
            ):
                answer(None)

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:  # this process ends
            return False
        return True


async def _judge(
    peer: StatePeer,
    known: Sequence[tuple[Edge, list[int]]],
    rewarded: bool,
    mine: Mapping[str, torch.Tensor],
    mean: Mapping[str, torch.Tensor],
    answer: Answer,
    seconds: float,
) -> None:
    """known: micro-batches, each with the completions that count. rewarded: see `compare`."""
    losses = None
    try:
        with trio.move_on_after(seconds):  # around waiting only
            as_is, averaged = [
                await peer.channel.compute(partial(_with, peer.stage.runtime, tensors))
                for tensors in (mine, mean)
            ]
            before, after = list[float](), list[float]()
            for edge, chosen in known:
                found = await _logprobs(peer, edge, chosen, as_is)
                try:
                    after += await _logprobs(peer, edge, chosen, averaged)
                except (Incompatible, ValueError):  # with theirs, a number somewhere is not finite
                    after += [-math.inf] * len(found)
                before += found
            losses = compare(before, after, rewarded) if before else None
    except (PeerError, ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(error, PeerError | ValueError) and not is_device_error(error):
            raise
        log.info("no verdict on an average", error=str(error))
    finally:
        answer(losses)


def _newest(peer: StatePeer) -> list[Edge]:
    """What arrived at this stage of each micro-batch; for those that began here, what was sent."""
    own = peer.stage.spec.index
    edges = [
        edge
        for edge in peer.stage.recorder.edges
        if own == (edge.source if peer.stage.spec.has_embedding else edge.target)
    ]
    return edges[-PROBE_MICRO_BATCHES:]


def _better(peer: StatePeer, edge: Edge) -> list[int]:
    """Completions of `edge` whose advantage is above zero."""
    loss = work_of(edge, peer.stage.limits).loss
    return [] if loss is None else (unpack_logprobs(loss.advantages) > 0).nonzero()[0].tolist()


def _all(peer: StatePeer, edge: Edge) -> list[int]:
    return list(range(len(work_of(edge, peer.stage.limits).completion_lengths)))


async def _logprobs(
    peer: StatePeer, edge: Edge, completions: list[int], runtime: StageRuntime
) -> list[float]:
    """Log-probabilities of their tokens. Raises PeerError: a stage is gone; Incompatible or
    ValueError: a number is not finite."""
    work, spec = work_of(edge, peer.stage.limits), peer.stage.spec
    x = b"" if spec.has_embedding else edge.body
    x = await peer.channel.compute(lambda: run_one(runtime, work, x, peer.stage.codec))
    tokens = sum(work.completion_lengths)
    for stage in range(spec.index + 1, spec.stages):
        x = await peer.fetch.run_at(stage, edge, tokens, x)
    rows = torch.from_numpy(unpack_logprobs(x).copy()).split(list(work.completion_lengths))
    chosen = torch.cat([rows[i] for i in completions] or [torch.zeros(0)])
    if not bool(torch.isfinite(chosen).all()):
        raise ValueError("a log-probability is not finite")
    return list(map(float, chosen))


def _with(runtime: StageRuntime, tensors: Mapping[str, torch.Tensor]) -> StageRuntime:
    """The same stage with other values for some weights; the others are shared, and nobody who
    works with `runtime` sees a difference."""
    local = {str(runtime.spec.local(name)): tensor for name, tensor in tensors.items()}
    return StageRuntime(
        runtime.spec,
        _replaced(runtime.model, local, ""),
        dtype=runtime.dtype,
        known_logits=runtime.known_logits,
    )


def _replaced(module: Any, tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:  # noqa: ANN401
    new = copy.copy(module)
    inside = lambda name, child: (
        child if child is None else _replaced(child, tensors, f"{prefix}{name}.")
    )
    new._modules = {name: inside(name, child) for name, child in module._modules.items()}
    new._parameters = {
        name: own
        if (other := tensors.get(prefix + name)) is None
        else torch.nn.Parameter(other.to(own.device, own.dtype), False)
        for name, own in module._parameters.items()
    }
    return new


# The stage that this node holds, across crews: weights, optimizer, and a worker for each crew.

HEAD_SECONDS = 120.0
"""Bounds the time in which no work arrives in one of a head's calls."""
PATIENCE_SHARE = 0.8
"""Share of the time that the others give a head for a step, after which it goes on without whoever
had the work for most of it."""


class Meter(Observer):
    """Computes in a thread, and says how much of the time that was."""

    def __init__(self) -> None:
        self.computing = 0
        self._busy = 0.0
        self._since = time.monotonic()
        self._tokens = 0
        self.waited_share: float | None = None
        """The share of the last step's time in which nothing was computed."""
        self.tokens_per_second: float | None = None
        """In the last step's time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        self.computing += 1
        started = time.monotonic()
        try:
            return await trio.to_thread.run_sync(work)
        finally:
            self.computing -= 1
            self._busy += time.monotonic() - started

    def committed(self, worker: StageWorker) -> None:
        now, tokens = time.monotonic(), worker.runtime.tokens
        elapsed = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one lineage in this process. `optimizer` goes from one crew to the next."""

    def __init__(
        self, assigned: Assigned, runtime: StageRuntime, settings: CrewSettings, limits: FrameLimits
    ) -> None:
        self.lineage, self.index, self.layers = assigned.lineage, assigned.stage, assigned.layers
        self.runtime = runtime
        self.meter = Meter()
        self.optimizer = StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = [self.meter]
        self._settings = settings
        self._limits = limits
        self._began = assigned.step
        self.source: str | None = None if assigned.step else ""
        """One of `wire.RUNGS`: where its weights came from; None while they are not what its crew
        goes on from."""
        self._dropped: Counter[str] = Counter()
        self.worker = self._make(assigned, {})

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.worker.participant.step

    def is_of(self, assigned: Assigned) -> bool:
        return (self.lineage, self.index, self.layers) == (
            assigned.lineage,
            assigned.stage,
            assigned.layers,
        )

    async def follow(self, assigned: Assigned) -> bool:
        """Whether these weights are what the crew begins with; a step that was prepared here and
        taken elsewhere is taken. The last worker has stopped."""
        participant = self.worker.participant
        if self.source is None:  # its crew ended before they were there
            return False
        if (
            participant.next_hash == assigned.hash
            and participant.commit(self.step, participant.attempt) == "take"
        ):
            await self.worker.take(assigned.taken.clip, assigned.taken.learning_rate)
        return participant.hash == assigned.hash

    def copy(self) -> Copy | None:
        """What others are told of the weights in memory; None of those that have taken no step, or
        were not restored. The last worker has stopped. What came from others and has not taken a
        step here is kept, not learnt."""
        spec, participant, last = (
            self.runtime.spec,
            self.worker.participant,
            self.optimizer.last_commit,
        )
        if participant.step == 0 or self.source is None:
            return None
        where: Where = (
            "memory" if self.source in ("", "R0") or participant.step > self._began else "neighbour"
        )
        return Copy(
            self.lineage,
            spec.first,
            spec.last,
            participant.step,
            participant.hash,
            where,
            last,
            participant.next_hash,
        )

    def begin(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        """A new worker in a new crew, with the stage's weights and optimizer. To be `run`."""
        self._dropped = Counter(self.dropped())
        self.worker = self._make(assigned, streams)
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.sessions.clear()
        return self.worker

    def _make(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        place = Place(assigned.crew[:CREW_BYTES], self.index, assigned.step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, len(assigned.layers))
        worker: StageWorker
        if self.index == 0:
            worker = Head(
                self.runtime,
                links,
                fence,
                self._settings,
                self.meter,
                self.optimizer,
                seconds=HEAD_SECONDS,
            )
            worker.search.patience = PATIENCE_SHARE * assigned.step_seconds
        else:
            worker = StageWorker(
                self.runtime, links, fence, self._settings, self.meter, self.optimizer
            )
        worker.participant.hash = assigned.hash
        worker.context.observers = self.observers
        return worker

    def progress(self) -> int:
        """Grows with each piece of work done."""
        return self.runtime.worked + self.worker.links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Frames that counted for nothing, in all crews, by reason."""
        return dict(self._dropped + self.worker.dropped)

    def load(self) -> int:
        """Pieces of work in hand. What waits for a gradient, or for a slow link, is none: no new
        trainer would do it sooner."""
        return self.meter.computing + self.worker.ready()


# NoLoCo of one stage: `trainer.weights` over this stage's tensors, by the whole model's names.
#
# A stage pairs with any stage or whole policy that shares a block of layers. Corrections apply
# right after a step, when no wave is in flight. A trained tied embedding is not averaged: both ends
# hold it.

CLOCKS = "clocks"
SEEK_SECONDS = 30.0
"""For another crew to be found, beyond the time that writing its state takes."""
FETCH_SECONDS = 240.0
"""For more of its state to come: less than the five minutes after which the others give up a stage
that makes no progress."""


class StageAveraging(Observer):
    """Make it while the stage has the base weights: payloads are differences to them. connected: is
    there a network process? averages: may this stage be averaged now?"""

    def __init__(
        self,
        cfg: WeightsConfig,
        adapter: LoraShape | None,
        data_dir: Path,
        stage: Stage,
        send: Callable[[local.FromTrainer], None],
        connected: Callable[[], bool] = lambda: True,
        averages: Callable[[], bool] = lambda: True,
    ) -> None:
        self._counters = Counters()
        self._connected = connected
        self._averages = averages
        self._send = send
        self._since = time.monotonic()
        self._marker = data_dir / "trainer" / "stage" / "averaged"
        self._whose = f"{stage.lineage.hex()} {stage.index}"
        self._marked = False
        self._seeking: queue.SimpleQueue[local.AdoptState] | None = None
        self.arrived = 0
        """Grows while a state of another crew comes."""
        self.probe = CrewProbe()
        self._tensors = AveragedTensors(
            averaged(stage), cfg.fragments, stage.optimizer.lock, sum(stage.layers)
        )
        self._replica = Replica(
            self._tensors,
            cfg,
            self._counters,
            data_dir,
            send=send,
            probe=self.probe,
            adapter=adapter,
        )

    def begin(self, outer: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """The stage has its weights. outer: what `tensors` gave with them, if anything did; else
        slow weights are theirs, without momentum.

        Raises StateError for another stage's.
        """
        self._seeking = None
        tensors = dict(outer)
        clocks = tensors.pop(CLOCKS, None)
        self._replica.restore(tensors)
        self._counters.outer_clocks = [] if clocks is None else clocks.tolist()
        self._replica.set_counters(self._counters)  # as many of them as there are fragments now

    def tensors(self) -> dict[str, torch.Tensor]:
        """`phi.<name>`, `delta.<name>`, float32, and CLOCKS (fragments,): what a restart needs to
        go on. None of them ever changes.

        Between two steps, in the thread that takes them: only there do they move, with the weights.
        """
        tensors = {n: t for n, t in self._replica.tensors().items() if not n.startswith(UNDO)}
        return {**tensors, CLOCKS: torch.tensor(self._counters.outer_clocks)}

    def committed(self, worker: StageWorker) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._counters.step, self.probe.step_seconds = worker.participant.step, seconds
        if not self._averages():  # the last step of a crew that is suspended
            return
        self._replica.between_steps(self._connected(), seconds, stepped=True)
        self._replica.keep()  # reward is the head's to see
        if self._counters.exchanges_total and not self._marked:
            self._mark()

    def receive(self, message: local.ToTrainer) -> None:
        """From the link's thread."""
        seeking = self._seeking
        if isinstance(message, local.AdoptState):
            if seeking is not None:
                seeking.put(message)
            elif message.path:
                # one stage with another crew's weights, and the others with ours, would be no
                # policy at all
                self._send(
                    local.StateAdopted(message.peer, "local", list(self._counters.outer_clocks))
                )
        elif seeking is None:
            self._replica.receive(message)
        else:
            self.refuse(message)

    def refuse(self, message: local.ToTrainer) -> None:
        """Say that nothing is averaged now. The network process would wait for minutes, and refuse
        all other partners meanwhile."""
        if isinstance(message, local.TakeSnapshot | local.ApplyPayload):
            outer_step = self._counters.outer_clocks[message.fragment]
            self._send(
                local.ExchangeEnded(
                    message.session, message.fragment, "", "local", False, outer_step
                )
            )
        elif isinstance(message, local.WriteState):
            self._send(local.StateWritten("", 0, []))

    def facts(self) -> local.ReplicaFacts:
        """While a state is sought, as one that has none."""
        return self._replica.facts(self._seeking is not None)

    # ---- R1: the state of the same stage in another crew -----------------------------------------

    def met(self) -> bool:
        """Whether this stage has been averaged with another crew's, by this node: then there is, or
        was, somebody to ask."""
        try:
            return self._marker.read_text() == self._whose
        except OSError:
            return False

    def seek(self) -> None:
        """From now on it is φ and δ of somebody else that are waited for; say so to the network
        process."""
        self._seeking = queue.SimpleQueue()

    async def fetch(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """φ of another crew, by names in the whole model, and what `begin` is given with it. Raises
        PeerError when nothing was found."""
        assert self._seeking is not None
        said = partial(trio.to_thread.run_sync, self._seeking.get, True, abandon_on_cancel=True)
        try:
            message = await said(SEEK_SECONDS + writing_seconds(self._tensors.layout))
            while message.peer and not message.path:  # on its way
                self.arrived += 1
                message = await said(FETCH_SECONDS)
        except queue.Empty:
            raise PeerError("no other crew answers") from None
        if not message.peer:
            raise PeerError("no other crew has this stage")
        read = await trio.to_thread.run_sync(read_state, message, self._tensors.layout)
        self._send(
            local.StateAdopted(
                message.peer,
                read.outcome or "adopted",
                [message.outer_step] * len(self._counters.outer_clocks),
            )
        )
        if read.outcome:
            raise PeerError(f"the state of {message.peer}: {read.outcome}")
        clocks = torch.tensor([message.outer_step] * len(self._counters.outer_clocks))
        return read.tensors, {**unmoved(read.tensors), CLOCKS: clocks}

    def _mark(self) -> None:
        self._marked = True
        with contextlib.suppress(OSError):  # without it, R1 is not tried
            write_atomically(self._marker, self._whose.encode())

    def report(self) -> WeightsReport:
        return self._replica.report()

    def close(self) -> None:
        self._replica.close()


def averaged(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Name in the whole model → what is averaged of this stage; empty where that is nothing."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {
        spec.whole(n): p
        for n, p in stage.runtime.model.named_parameters()
        if p.requires_grad and p is not shared
    }


# The model that this node cannot hold alone: tokenizer, costs of its parts, capacity, and one
# stage. No tensor of another stage is read, except to hash the files.

TOKENS = 16384
"""Padded tokens of a micro-batch or wave in any crew: what a member is ready to receive."""
WAVES = 4
"""Waves that are under way at a time, about: as many as stages."""
PROMPT_TOKENS = 64
"""A question's length, about: it says how much the caches of a step's waves take."""
WAYS_OF_AN_UPDATE = 4
"""To the last stage and back, while scores are computed and while gradients are."""
SPEED_SIZE = 512
"""Side of the matrices that are multiplied to measure a machine."""
SNAPSHOT_BYTES = 2 * 3
"""For each weight of a stage: bfloat16 of the own snapshot as it is written, and of both ring
neighbours' as they come, which over home lines is nearly always."""
SPEED_SECONDS = 0.1


@dataclass(frozen=True)
class CrewTerms:
    """What members of a crew must have alike. Nodes that would train otherwise name another model:
    they never meet."""

    codec: ActivationCodec
    gradient_codec: ActivationCodec
    paper_mode: PaperMode
    lora: LoraSettings
    frozen_a: bool
    """Adapters have one A everywhere, see `averaging.lora.shares_a`."""
    learning_rate: float

    def hash(self, identity: bytes) -> bytes:
        """32 bytes. identity: fingerprint of architecture and base weights."""
        terms = {
            "codec": self.codec,
            "gradient_codec": self.gradient_codec,
            "paper_mode": self.paper_mode,
            "lora": self.lora.model_dump() if self.lora.r else None,
            "shares_a": self.frozen_a,
            "weight_decay": WEIGHT_DECAY,
            "learning_rate": self.learning_rate,
        }
        return hashlib.blake2b(
            identity + json.dumps(terms, sort_keys=True, separators=(",", ":")).encode(),
            digest_size=32,
        ).digest()


def crew_terms(
    stages: StagesConfig, lora: LoraSettings, weights: WeightsConfig, training: TrainingConfig
) -> CrewTerms:
    return CrewTerms(
        stages.codec,
        stages.gradient_codec,
        stages.paper_mode,
        lora,
        shares_a(lora, weights),
        training.learning_rate,
    )


@dataclass(frozen=True)
class CrewModel:
    """A model's directory and everything about it that fits any node."""

    directory: Path
    config: PretrainedConfig
    """transformers'."""
    text: PolicyText
    placement: Placement
    offering: Offering
    pretrained: bool
    """Whether its weights were trained before; those of a run from scratch are worth nothing to a
    stage that was lost."""
    policy: PolicyConfig
    terms: CrewTerms

    @property
    def run(self) -> Run:
        """What decides whether a lost stage may be made of its neighbours."""
        return run_of(self.terms, self.pretrained)

    def limits(self) -> FrameLimits:
        return FrameLimits(
            hidden=int(self.config.hidden_size), vocab=int(self.config.vocab_size), tokens=TOKENS
        )

    def settings(self) -> CrewSettings:
        terms = self.terms
        return CrewSettings(
            base=self.text.fingerprint,
            codec=terms.codec,
            gradient_codec=terms.gradient_codec,
            swapped=terms.paper_mode == "checkfree+",
            learning_rate=terms.learning_rate
            * (LEARNING_RATE_FACTOR if terms.paper_mode != "off" else 1.0),
        )

    def build(self, layers: tuple[int, ...], index: int) -> StageRuntime:
        """Stage `index` with the base model's weights, under an adapter where one is trained. Takes
        seconds.

        Raises ConfigError: the layers are not the model's; LocalError: a file is missing or
        damaged.
        """
        spec = stage_specs(self.config, layers)[index]
        lora = self.terms.lora.r > 0
        dtype = self.placement.dtype if lora else torch.float32
        stage = load_stage(self.directory, spec, dtype=dtype, device=self.placement.device)
        if lora:
            stage = adapt(stage, lora_settings(self.policy))
            if self.terms.frozen_a:
                freeze_a({spec.whole(name): p for name, p in stage.named_parameters()}, A_SEED)
        runtime = StageRuntime(
            spec, stage, dtype=self.placement.dtype, known_logits=self.text.known_logits
        )
        report_layers(stage, runtime.works)
        return runtime


def fits_whole(
    policy: PolicyConfig,
    stages: StagesConfig,
    training: TrainingConfig,
    weights: WeightsConfig,
    directory: Path,
    placement: Placement,
) -> bool:
    """Whether this node trains the policy by itself. Raises DeviceError, ConfigError where it can
    be trained neither way."""
    mode = stages.mode
    hf = offline(policy, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
    if mode == "always":
        check_split(hf)
        return False
    room = capacity(stages.capacity, placement)
    need = whole_bytes(policy, hf, placement)
    if mode == "off" or room is None or need <= room:
        return True
    if (
        placement.device.type == "cuda"
        and policy.device == "auto"
        and not stages.capacity
        and torch.cuda.device_count() > 1
    ):
        return True  # `policy.device.fit` spreads it over all GPUs, or says why not
    reason = (
        f"{policy.model}: its weights need about {need / 2**30:.1f} GiB to train,"
        f" {placement.device} has {room / 2**30:.1f} GiB"
    )
    try:
        check_split(hf)
    except ConfigError as error:
        raise DeviceError(f"{reason}, and {error}") from None
    layer = least(cost_of(training, policy.lora, weights, hf, placement)) * HEADROOM
    if layer > room:
        raise DeviceError(f"{reason}, and one layer alone needs {layer / 2**30:.1f} GiB")
    return False


def capacity(limit: int, placement: Placement) -> int | None:
    """Bytes for a policy or a stage of one; None where it cannot be measured and is not configured.
    limit: 0 is none."""
    measured = free_bytes(placement.device)
    if not limit:
        return measured
    return limit if measured is None else min(limit, measured)


def whole_bytes(policy: PolicyConfig, hf: PretrainedConfig, placement: Placement) -> int:
    """To train all of it here. Whoever can, and has no room to save and average it, is told so by
    its trainer, with remedies."""
    parameters, edges = count_parameters(hf)
    return needed_bytes(parameters, policy.lora.r * edges, placement.dtype, optim=policy.optim)


def kept_bytes(weights: WeightsConfig) -> int:
    """Host memory for each trained weight, beside training: to save it, to average it, and for
    snapshots. Of what came before an exchange a stage keeps no more than one fragment, since it
    sees no reward."""
    parts, many = weights.fragments, weights.fragments * UNDO_WEIGHTS
    return sum(host_bytes(many, parts if weights.rule != "off" else 0)) // many + SNAPSHOT_BYTES


def on_host(
    memory: float, adapter: LoraSettings, weights: WeightsConfig, placement: Placement
) -> float:
    """Bytes of a stage's device, less where the machine's own memory could not keep what is saved
    and averaged of so much."""
    free = free_bytes(torch.device("cpu"))
    if adapter.r or free is None or placement.device.type == "cpu":
        return memory
    return min(memory, free * TRAINED_BYTES / kept_bytes(weights))


@contextlib.contextmanager
def open_model(
    cfg: PolicyConfig,
    stages: StagesConfig,
    training: TrainingConfig,
    weights: WeightsConfig,
    terms: CrewTerms,
    data_dir: Path,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[CrewModel]:
    """The model as a CrewModel, for as long as the context is open. terms: `crew_terms` of the same
    sections.

    Raises LocalError: it is not there, not the swarm's, cannot be split, or is to be trained in a
    way that a crew cannot.
    """
    check_trainable(cfg, training)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    placement = probe(cfg)
    set_up(placement.device)
    with local_directory(cfg, fits=False) as directory:
        hf = offline(cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))
        check_split(hf)
        pretrained = not is_untrained(directory)
        check_paper(terms.paper_mode, stages.stages, run_of(terms, pretrained))
        tokenizer = offline(
            cfg, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
        report("hashing the base weights")
        identity = fingerprint(directory)
        ends = configured_ends(cfg, directory, hf, tokenizer)
        eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(ends)
        vocab_size, unused_ids = vocabulary(tokenizer, int(hf.vocab_size))
        text = PolicyText(
            tokenizer=tokenizer,
            fingerprint=identity,
            tokenizer_hash=tokenizer_hash(tokenizer),
            eos_id=eos_id,
            eos_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id,
            vocab_size=vocab_size,
            unused_ids=unused_ids,
            chat=Chat.of(cfg.chat, tokenizer),
            context=context_of(hf),
        )
        opened = stored(data_dir)
        if opened is not None:
            check_model(opened.manifest, text.fingerprint, text.tokenizer_hash)
        cost = over_lines(
            cost_of(training, cfg.lora, weights, hf, placement),
            training,
            int(hf.hidden_size),
            terms,
        )
        room = capacity(stages.capacity, placement)
        memory = float(room if room is not None else whole_bytes(cfg, hf, placement))
        memory = on_host(memory, cfg.lora, weights, placement)
        if stages.keep_policy in ("memory", "both"):
            memory = beside_copy(memory, copy_memory(cfg, training, hf), cost)
        offering = Offering(
            terms.hash(identity), Capacity(memory / HEADROOM, measure_speed(placement)), cost
        )
        report(
            f"{cfg.model} in stages: {offering.capacity.memory / 2**30:.2f} GiB of it here;"
            f" {placement.reason}"
        )
        yield CrewModel(directory, hf, text, placement, offering, pretrained, cfg, terms)


def run_of(terms: CrewTerms, pretrained: bool) -> Run:
    return Run(
        swapped=terms.paper_mode == "checkfree+", pretrained=pretrained, adapter=terms.lora.r > 0
    )


def is_untrained(directory: Path) -> bool:
    """Whether the weights of this model are as they were initialised: every norm's scale is exactly
    one, which no training leaves so.

    Raises Unavailable for a damaged file.
    """
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith("norm.weight") and not bool(
                        (tensors.get_tensor(name) == 1).all()
                    ):
                        return False
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None
    return True


def check_trainable(policy: PolicyConfig, training: TrainingConfig) -> None:
    """Raises Refused for what only a whole policy can do."""
    if training.beta > 0:
        raise Refused(
            "a KL penalty needs a second, frozen policy, which no crew holds: set training.beta to"
            " 0, or stages.mode to off"
        )
    if training.max_completion_length + PROMPT_TOKENS > TOKENS:
        raise Refused(
            f"a crew computes {TOKENS} tokens at a time, and an answer may have"
            f" {training.max_completion_length}: set training.max_completion_length to"
            f" {TOKENS - 1024} or lower, or stages.mode to off"
        )
    rows = training.groups_per_step * training.num_generations
    if rows > MICRO_BATCHES * (TOKENS // (training.max_completion_length + PROMPT_TOKENS)):
        raise Refused(
            f"a step of {rows} answers of {training.max_completion_length} tokens is more than"
            f" {MICRO_BATCHES} micro-batches of {TOKENS}: set training.groups_per_step lower, or"
            " stages.mode to off"
        )
    if policy.quantization != "none":
        raise Refused(
            "stages are not quantised: set policy.quantization to none, or stages.mode to off"
        )
    if policy.optim != "adamw":
        raise Refused(
            "stages keep Adam's moments in 32 bits: set policy.optim to adamw, or stages.mode"
            " to off"
        )


def cost_of(
    cfg: TrainingConfig,
    adapter: LoraSettings,
    weights: WeightsConfig,
    hf: PretrainedConfig,
    placement: Placement,
) -> ModelCost:
    """What the parts of the model cost as this swarm trains it, and on a CPU saves and averages it.

    Activations are those of the smallest micro-batch that there can be, the longest row alone: the
    head halves larger ones where they do not fit. Layers keep their input and are run again one by
    one, see `StageRuntime`.
    """
    lora = adapter.r > 0
    tokens = min(cfg.per_device_train_tokens, TOKENS)
    beside = kept_bytes(weights) if placement.device.type == "cpu" else 0
    cost = model_cost(
        hf,
        batch_tokens=tokens,
        cached_tokens=cached_tokens(cfg),
        weight_bytes=placement.dtype.itemsize if lora else 4,
        trained_bytes=0 if lora else TRAINED_BYTES - 4 + beside,
    )
    kind, shape = placement.device.type, Shape.of_config(hf.to_dict())
    method = Method(
        kind, str(placement.dtype).removeprefix("torch."), adapter.r, checkpointing=True
    )
    longest = PROMPT_TOKENS + cfg.max_completion_length
    state = 4.0 * shape.hidden * longest
    """Bytes of hidden states as one stage gives them to the next."""
    gradients = ITEM_BYTES[method.dtype] * (2 * shape.hidden + 3 * shape.intermediate)
    layer = (layer_bytes(shape, method) + gradients) * longest
    # the gradient of a trained embedding, or of a piece of tokens in the head, is made before it is
    # added to the one that is there
    table = 0.0 if lora else 4.0 * shape.vocabulary * shape.hidden
    head = (
        4.0 * shape.vocabulary * LOGITS_COPIES * min(longest, logits_tokens(shape.vocabulary, kind))
        + table
    )
    return replace(
        cost,
        stage=layer + WAVES * state,
        # not at once with a layer's
        embedding=replace(cost.embedding, memory=cost.embedding.memory + max(0.0, table - layer)),
        layers=tuple(replace(part, memory=part.memory + state) for part in cost.layers),
        head=replace(cost.head, memory=cost.head.memory + max(0.0, head - layer)),
    )


def least(cost: ModelCost) -> float:
    """Bytes of a stage with one layer."""
    return cost.stage + cost.layers[0].memory


def cached_tokens(cfg: TrainingConfig) -> int:
    """In the caches of a step's samples."""
    return min(
        cfg.groups_per_step * cfg.num_generations * (PROMPT_TOKENS + cfg.max_completion_length),
        WAVES * TOKENS,
    )


def copy_memory(policy: PolicyConfig, training: TrainingConfig, hf: PretrainedConfig) -> float:
    """Bytes of a whole int8 copy to sample from, with its adapter and its caches."""
    parameters, edges = count_parameters(hf)
    caches = model_cost(
        hf, batch_tokens=1, cached_tokens=cached_tokens(training), weight_bytes=0, trained_bytes=0
    ).layers
    return parameters + 4.0 * policy.lora.r * edges + sum(layer.memory for layer in caches)


def beside_copy(memory: float, copy: float, cost: ModelCost) -> float:
    """Bytes that a copy leaves for a stage. Raises DeviceError where that is less than a layer."""
    left, layer = memory - copy * HEADROOM, least(cost) * HEADROOM
    if left < layer:
        raise DeviceError(
            f"stages.keep_policy: a copy in memory needs {copy * HEADROOM / 2**30:.1f} GiB and one"
            f" layer to train {layer / 2**30:.1f} GiB, and {memory / 2**30:.1f} GiB are here: set"
            " it to off or disk"
        )
    return left


def over_lines(cost: ModelCost, cfg: TrainingConfig, hidden: int, terms: CrewTerms) -> ModelCost:
    """What a step costs lines besides: bytes of a micro-batch, and how often everybody waits for
    the way through all stages."""
    tokens = min(cfg.per_device_train_tokens, TOKENS)
    sampled = (
        cfg.groups_per_step * cfg.num_generations * (PROMPT_TOKENS + cfg.max_completion_length)
    )
    both = activation_bytes(terms.codec, tokens, hidden) + activation_bytes(
        terms.gradient_codec, tokens, hidden
    )
    ways = cfg.max_completion_length + WAYS_OF_AN_UPDATE
    batches = max(1.0, sampled / tokens)
    return replace(cost, batch_bytes=float(both), batches=batches, crossings=ways / batches)


def measure_speed(placement: Placement) -> float:
    """Floating-point operations per second of a matrix product, forward, to a power of two.

    So crews of like machines are split alike whatever else these are doing, and their stages can be
    averaged with each other's.
    """
    size = SPEED_SIZE
    dtype = placement.dtype if placement.device.type != "cpu" else torch.float32
    a = torch.ones(size, size, device=placement.device, dtype=dtype)
    float((a @ a).sum())  # the first one also starts the device
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SPEED_SECONDS or not done:
        for _ in range(4):
            b = a @ a
        float(b.sum())
        done += 4
    return 2.0 ** round(math.log2(done * 2.0 * size**3 / spent))


# A whole int8 copy of the crew's policy, to sample from. After each step the member fetches every
# stage's weights in the background. Groups carry the copy's log-probabilities, so the crew corrects
# for rounding and age.

At = tuple[int, bytes]
"""Steps taken and the step hash: two crews may have gone on differently from one."""
BASE: At = (0, NO_HASH)
AGE = 4
"""Steps by which a copy may be behind its crew and still be sampled from; else the stages sample
until it has caught up."""


class WholeCopy:
    """peer: this node's end of the state streams, while there is a crew. tokens: padded tokens of a
    batch of samples.

    `sample` and `release` are of the thread that samples; `follow` is of the crew's.
    """

    def __init__(self, model: CrewModel, peer: Callable[[], StatePeer | None], tokens: int) -> None:
        self._model = model
        self._peer = peer
        self._batcher = MicroBatcher(tokens)
        self._policy: Policy | None = None
        self._lacks = False
        """It did not fit: it is not tried again."""
        self._at = BASE
        """What is in `_policy`."""
        self._released = 0
        """How often its memory was given up: what was asked for before is not of the policy that is
        built next."""
        self._arrived: tuple[int, At, list[Parts]] | None = None
        """What is not in it yet, and what `_released` was when it was asked for."""
        self._busy = False
        self._bytes: int | None = None

    def facts(self, step: int) -> dict[str, int]:
        """The fields of StageStatus about it, when the crew is at `step`."""
        if self._policy is None:
            return {}
        return {
            "copy_age_steps": max(0, step - self._at[0]),
            **({} if self._bytes is None else {"copy_bytes": self._bytes}),
        }

    def has(self, at: At) -> bool:
        """Whether the next sample is of a policy `at` that step and hash."""
        arrived = self._arrived
        return (
            self._policy is not None
            and (arrived[1] if arrived is not None and arrived[0] == self._released else self._at)
            == at
        )

    def sample(
        self, step: int, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample] | None:
        """Completions of each prompt, for a crew at `step`. None where there is no copy that is new
        enough, or only one of steps that are lost, where its numbers are not finite, and where they
        do not fit, which gives it up."""
        if self._policy is None and not self._lacks:
            self._build()
        arrived, self._arrived = self._arrived, None
        policy = self._policy
        if policy is None:
            return None
        if arrived is not None and arrived[0] == self._released:
            for parts in arrived[2]:
                install(policy.model, parts)
            self._at = arrived[1]
        if not 0 <= step - self._at[0] <= AGE:
            return None
        seed = int(torch.randint(2**62, (1,), generator=rng))
        # a CPU draws 0.3 s for the next tokens of 64 answers, of a vocabulary of 150,000
        there = policy.random_generator(seed)
        try:
            samples = self._batcher.generate(policy, prompts, sampling, there)
        except DeviceError as error:
            log.warning(
                "the copy of the whole policy is given up: the stages sample", error=str(error)
            )
            samples, policy, self._lacks = [], None, True
        # outside the handler: the exception's frames hold the memory that has to go
        if policy is None:
            self.release()
            return None
        if all(
            math.isfinite(math.fsum(c.logprobs)) for sample in samples for c in sample.completions
        ):
            return samples
        log.warning("the copy's numbers are not finite", step=self._at[0])
        return None

    def release(self) -> None:
        """Its memory; it is built again when it is needed."""
        self._released += 1
        self._policy, self._arrived, self._at, self._bytes = None, None, BASE, None
        free_memory()

    def _build(self) -> None:
        model, started = self._model, time.monotonic()
        place = model.placement
        adapter = (
            (lambda bare: adapt(bare, lora_settings(model.policy)))
            if model.terms.lora.r
            else (lambda bare: bare)
        )
        try:
            built = build_quantised(
                model.config, tensors_of(model.directory), place.dtype, place.device, adapter
            )
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._lacks = True
            log.warning("no copy of the whole policy fits: the stages sample")
            return
        if model.terms.frozen_a:
            freeze_a(dict(built.named_parameters()), A_SEED)
        text = {one.name: getattr(model.text, one.name) for one in fields(PolicyText)}
        self._policy = Policy(
            **text,
            model=built,
            device=place.device,
            dtype=place.dtype,
            accelerator=make_accelerator(place),
        )
        log.info("a copy of the whole policy", seconds=round(time.monotonic() - started, 2))

    # ---- in the crew's thread --------------------------------------------------------------------

    async def follow(self, layers: Sequence[int], at: At) -> None:
        """Begins to fetch what a crew has that is cut into `layers` and `at` this step and hash,
        unless that is here or something is on the way."""
        peer = self._peer()
        if peer is None or self._busy or self._policy is None or self.has(at):
            return
        self._busy = peer.channel.spawn(
            partial(self._fetch, peer, stage_specs(self._model.config, layers))
        )

    async def _fetch(self, peer: StatePeer, specs: Sequence[StageSpec]) -> None:
        found: list[tuple[int, At, Parts]] = []
        released = self._released

        async def one(spec: StageSpec) -> None:
            try:
                found.append(await peer.fetch.copy(spec))
            except (PeerError, StateError, Unavailable, RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError | MemoryError) and not is_device_error(error):
                    raise
                log.info("a stage gives no copy", stage=spec.index, reason=str(error))

        try:
            async with trio.open_nursery() as nursery:
                for spec in specs:
                    nursery.start_soon(one, spec)
            of = {at for _, at, _ in found}
            if len(found) == len(specs) and len(of) == 1:
                self._bytes = sum(size for size, _, _ in found)
                self._arrived = released, of.pop(), [parts for _, _, parts in found]
        finally:
            self._busy = False


# Unix sockets to the network process, one per other stage, and a gate that stops all of them. While
# the gate is shut nothing is read.

CONNECT_SECONDS = 10.0
"""To a socket on this machine; the network process may be on its way back."""
RETRY_SECONDS = 0.1


class Gate:
    """Open to begin with."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._event.set()

    def shut(self) -> None:
        if self._event.is_set():
            self._event = trio.Event()

    def let(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class GatedStream(trio.abc.Stream):
    """`inner`, read only while the gate is open."""

    def __init__(self, inner: trio.abc.Stream, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self._gate.wait()
        return bytes(await self._inner.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


async def connect(assigned: Assigned, stage: int, kind: Kind) -> trio.abc.Stream:
    """A stream to the trainer of `stage`; it need not be there yet. Raises PeerError when our
    network process is not."""
    opened = headed.pack(Open(assigned.crew, stage, kind))
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            address, directory = socket_address(Path(assigned.socket))
            try:
                return await _opened(await trio.open_unix_socket(address), opened)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(RETRY_SECONDS)
            finally:
                if directory is not None:
                    os.close(directory)
    raise PeerError("the network process takes no streams for stages")


async def _opened(stream: trio.abc.Stream, data: bytes) -> trio.abc.Stream:
    try:
        await stream.send_all(data)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


async def connect_all(assigned: Assigned, kind: Kind, gate: Gate) -> dict[int, trio.abc.Stream]:
    """To every other stage. Raises PeerError."""
    streams: dict[int, trio.abc.Stream] = {}
    try:
        for stage in range(len(assigned.members)):
            if stage != assigned.stage:
                streams[stage] = GatedStream(await connect(assigned, stage, kind), gate)
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def close_all(streams: dict[int, trio.abc.Stream]) -> None:
    for stream in streams.values():
        await trio.aclose_forcefully(stream)


# A trio program in a thread of its own, controlled from other threads.


class TrioThread:
    """main: the program; it ends soon after `ending` is true. ended: called in the thread when it
    is over, however it ended."""

    def __init__(
        self, name: str, main: Callable[[], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        self.ending = False
        self.death: BaseException | None = None
        """What ended the program, if anything did."""
        self._main = main
        self._ended = ended
        self._begun = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake: trio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- from other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Its loop runs when this returns."""
        self._thread.start()
        self._begun.wait()

    def stop(self, seconds: float = 10.0) -> None:
        self.ending = True
        self.wake()
        self._thread.join(seconds)

    def wake(self) -> None:
        """`woken` returns, now or the next time."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._woken)

    def check(self) -> None:
        """Raises what ended the program, if anything did."""
        if self.death is not None:
            raise self.death

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """`await work()` in the loop. Raises what it raises, and EngineGone when the loop has
        ended."""
        if self._token is None:
            raise EngineGone("the crew's thread has not begun")
        try:
            return trio.from_thread.run(work, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            self.check()
            raise EngineGone("the crew's thread has ended") from None

    # ---- in the thread ---------------------------------------------------------------------------

    async def woken(self) -> None:
        """Returns once `wake` was called since the last time that it returned."""
        assert self._wake is not None
        await self._wake.wait()
        self._wake = trio.Event()

    def _woken(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _run(self) -> None:
        try:
            trio.run(self._program)
        except BaseException as error:  # raised again where somebody waits  # noqa: BLE001
            self.death = error
        finally:
            self._begun.set()
            self._ended()

    async def _program(self) -> None:
        self._token, self._wake = trio.lowlevel.current_trio_token(), trio.Event()
        self._begun.set()
        await self._main()


# This node's stage in a crew, one trio program in a thread of its own:
#
#     Assigned    the previous session ends; a stage at the crew's step hash is active, else it
#                 goes through loading and probation
#     Resumed     the head starts
#     Suspended   the gate is shut: nothing starts, received frames wait
#     Released    the session ends; weights and optimizer stay in memory
#
# Other threads read its state through `wait`; only the head's calls come from outside
# (`thread.call`).

STATUS_SECONDS = 1.0


Notify = Callable[[wire.StagePhase, str], None]
"""What is being done now: phase, and source of `wire.RUNGS`."""


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error in it, however many nurseries it came through."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class StageSession:
    assigned: Assigned
    since: float = field(default_factory=time.monotonic)
    phase: wire.StagePhase = "loading"
    reason: str = ""
    source: str = ""
    restore_seconds: float | None = None
    probe_kl: float | None = None
    gate: Gate = field(default_factory=Gate)
    resumed: bool = False
    """All stages are active: the head may begin."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)
    """Nothing of it runs any more."""


class StageRunner:
    """build(assigned): makes the stage with the base's weights, in a thread. built(stage): it has
    its own now. send: to the network process, from any thread. lacked(assigned): this stage does
    not fit our device. offer(stage): there is no crew, and this is in memory; in a thread."""

    def __init__(
        self,
        build: Callable[[Assigned], Stage],
        recovery: StageRecovery,
        send: Callable[[wire.FromTrainer], None],
        progress: Progress,
        built: Callable[[Stage], None] = lambda stage: None,
        lacked: Callable[[Assigned], None] = lambda assigned: None,
        offer: Callable[[Stage | None], None] = lambda stage: None,
    ) -> None:
        self._build = build
        self._built = built
        self._lacked = lacked
        self._offer = offer
        self._recovery = recovery
        self._send = send
        self._progress = progress
        self._changed = threading.Condition()
        self._waiting: deque[wire.ToTrainer] = deque()
        self.thread = TrioThread("crew", self._run, self._notify_all)
        self._session: StageSession | None = None
        self.stage: Stage | None = None
        self._shown = -1

    # ---- from other threads ----------------------------------------------------------------------

    def receive(self, message: wire.ToTrainer) -> None:
        """From the link's thread; returns at once."""
        with self._changed:
            self._waiting.append(message)
        self.thread.wake()

    def wait(self, what: Callable[[], T | None], seconds: float) -> T | None:
        """The first true value of `what()`, which is asked at each change; None after `seconds`.
        Raises what ended the thread."""
        with self._changed:
            found: list[T] = []

            def look() -> bool:
                got = what()
                if got:
                    found.append(got)
                return bool(got) or self.thread.death is not None

            self._changed.wait_for(look, seconds)
        self.thread.check()
        return found[0] if found else None

    def head(self) -> Head | None:
        """The member that may begin something now: of stage 0, active, not suspended."""
        stage = self.stage
        member = stage.worker if stage is not None and self.averages else None
        return member if isinstance(member, Head) and member.usable else None

    def leads(self) -> bytes | None:
        """The lineage whose first stage we hold, or are about to; None otherwise."""
        session = self._session
        return (
            session.assigned.lineage
            if session is not None and session.assigned.stage == 0
            else None
        )

    def members(self) -> tuple[str, ...]:
        """Peer ids in the present crew, by stage; empty where there is none."""
        session = self._session
        return session.assigned.members if session is not None else ()

    def leads_no_more(self, lineage: bytes) -> bool:
        """Whether there is a crew in which we do not hold the first stage of `lineage`; between two
        crews there is none."""
        return self._session is not None and self.leads() != lineage

    def finished(self, limit: int) -> bool:
        """Whether `limit` steps are taken (0 is none to take), and nobody needs our stage for what
        comes after the last one, such as the head's evaluation: the crew is over, or has gone on to
        a step that is none of ours."""
        stage = self.stage
        more = stage.step - limit if stage is not None and limit else -1
        return more > 0 or (more == 0 and self._session is None)

    @property
    def active(self) -> bool:
        session = self._session
        return session is not None and session.phase == "active"

    @property
    def averages(self) -> bool:
        """Whether this stage may be averaged with others': not while it has yet to show what it is,
        nor while it is suspended."""
        session = self._session
        return session is not None and session.phase == "active" and session.resumed

    def status(self) -> StageStatus | None:
        session, stage = self._session, self.stage
        if session is None:
            return None
        a = session.assigned
        if stage is None or not stage.is_of(a) or session.phase in ("loading", "probation"):
            return StageStatus(
                a.crew,
                a.stage,
                session.phase,
                step=a.step,
                progress=self._recovery.progress(),
                rung=session.source,
                reason=session.reason,
                load=1,
                state_refused=self._recovery.refused(),
            )
        return StageStatus(
            a.crew,
            a.stage,
            session.phase,
            step=stage.step,
            progress=stage.progress(),
            rung=session.source,
            rung_seconds=session.restore_seconds,
            probe_kl=session.probe_kl,
            bubble_share=stage.meter.waited_share,
            tokens_per_second=stage.meter.tokens_per_second,
            reason=session.reason,
            load=stage.load(),
            dropped=stage.dropped(),
            state_refused=self._recovery.refused(),
            **self._recovery.facts(stage.step),
        )

    # ---- the thread ------------------------------------------------------------------------------

    def _notify_all(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            while not self.thread.ending:
                while self._waiting:
                    await self._handle(self._waiting.popleft(), nursery)
                await self.thread.woken()
            self._send_status()  # where it stopped
            await self._leave("stopping")
            nursery.cancel_scope.cancel()

    async def _handle(self, message: wire.ToTrainer, nursery: trio.Nursery) -> None:
        session = self._session
        match message:
            case Assigned():
                await self._leave("another crew")
                with self._changed:
                    self._session = StageSession(message)
                log.info(
                    "assigned", crew=message.crew.hex()[:16], step=message.step, stage=message.stage
                )
                nursery.start_soon(self._hold, self._session)
            case wire.Suspended() if session is not None:
                log.info("suspended", reason=message.reason)
                session.gate.shut()
                session.resumed = False
            case wire.Resumed() if session is not None and message.crew == session.assigned.crew:
                log.info("resumed")
                session.gate.let()
                session.resumed = True
            case wire.Released():
                log.info("released", reason=message.reason)
                await self._leave("released")
                with self._changed:
                    self._session = None
                await trio.to_thread.run_sync(self._offer, self.stage)
        self._send_status()

    async def _leave(self, why: str) -> None:
        """Everything of the present crew ends; weights and optimizer stay, and what was
        promised."""
        session = self._session
        if session is None:
            return
        session.scope.cancel()
        await session.over.wait()
        if self.stage is not None and isinstance(self.stage.worker, Head):
            self.stage.worker.gone(0, why)  # whoever waits for it

    async def _hold(self, session: StageSession) -> None:
        assigned, broken, short = session.assigned, "", False
        try:
            with session.scope:
                try:
                    await self._run_session(session)
                except* DeviceError as group:
                    error = _first(group)
                    broken, short = (
                        str(error),
                        error.__cause__ is not None and is_oom(error.__cause__),
                    )
                except* SwarmNodeError as group:
                    # also layers that are not the model's, whoever assigned them
                    self._failed(session, str(_first(group)))
                if broken:
                    self._give_up(assigned, broken, short)
                    self._failed(session, broken)
        finally:
            session.over.set()
            log.info(
                "stage session ended",
                stage=assigned.stage,
                crew=assigned.crew.hex()[:16],
                phase=session.phase,
            )

    async def _run_session(self, session: StageSession) -> None:
        assigned, stage = session.assigned, self.stage
        held = stage is not None and stage.is_of(assigned) and await stage.follow(assigned)
        if stage is None or not held:
            stage = None  # there may be no room for two
            with self._fitting(assigned):
                stage = await self._load(session)
        assert stage is not None
        async with self._recovery.open(assigned, stage):
            if not held:
                with self._fitting(assigned):
                    await self._restore(session, stage)
            streams = await connect_all(assigned, "frames", session.gate)
            try:
                worker = stage.begin(assigned, streams)
                self._recovery.attach(assigned, worker)
                self._enter(session, "active")
                await worker.run()
            finally:
                with trio.CancelScope(shield=True):
                    await close_all(streams)

    @contextlib.contextmanager
    def _fitting(self, assigned: Assigned) -> Iterator[None]:
        """What the device cannot do is a stage that cannot be had here. Another process would not
        do better, and would try for ever.

        Raises DeviceError.
        """
        try:
            yield
            return
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            short, why = is_oom(error), str(error).strip().split("\n")[0]
        reason = "out of memory" if short else f"the device: {why}"
        self._give_up(assigned, reason, short)
        raise DeviceError(reason)

    def _give_up(self, assigned: Assigned, reason: str, short: bool) -> None:
        """What is in memory is no stage: not offered, not gone on with, not written down. short:
        for lack of memory."""
        stage = self.stage
        with self._changed:
            self.stage = None
        if stage is not None and isinstance(stage.worker, Head):
            stage.worker.gone(0, reason)  # whoever waits for it
        self._recovery.forget()
        del stage
        free_memory()
        if short:
            self._lacked(assigned)

    async def _load(self, session: StageSession) -> Stage:
        """A stage that is not in memory, with the base's weights."""
        assigned = session.assigned
        with self._changed:
            self.stage = None
        self._send_status()
        await trio.to_thread.run_sync(self._recovery.prepare, assigned)
        stage = await trio.to_thread.run_sync(self._build, assigned)
        self._recovery.built(stage)
        with self._changed:
            self.stage = stage
        return stage

    async def _restore(self, session: StageSession, stage: Stage) -> None:
        assigned = session.assigned

        def notify(phase: wire.StagePhase, source: str) -> None:
            session.source = source
            self._enter(session, phase)

        if assigned.step:
            try:
                session.source, session.probe_kl = await self._recovery.restore(
                    stage, assigned, notify
                )
            except PeerError as error:
                log.warning("restoring needs somebody who is gone", error=str(error))
                await trio.sleep_forever()  # the next crew says with whom to try again
            stage.source = session.source
        self._built(stage)
        session.restore_seconds = time.monotonic() - session.since
        log.info(
            "stage restored",
            stage=stage.index,
            rung=session.source or "base",
            seconds=round(session.restore_seconds, 2),
        )

    def _enter(self, session: StageSession, phase: wire.StagePhase) -> None:
        with self._changed:
            session.phase = phase
        self._send_status()

    def _failed(self, session: StageSession, reason: str) -> None:
        log.error("the stage is lost", reason=reason)
        session.reason = reason[:128]
        self._enter(session, "failed")

    # ---- for whoever watches ---------------------------------------------------------------------

    def _send_status(self) -> None:
        status = self.status()
        if status is not None:
            self._send(status)
        self._notify_all()

    async def _beat(self) -> None:
        """A status a second; and a sign of progress for the supervisor while there is progress, or
        nothing to do."""
        while True:
            await trio.sleep(STATUS_SECONDS)
            self._send_status()
            status = self.status()
            if status is None:
                self._progress("waiting for a crew")
                continue
            self._blame()
            if status.phase in ("loading", "probation"):
                self._progress("loading a stage")
            elif status.load == 0 or status.progress != self._shown:
                self._progress(f"stage {status.stage}")
            self._shown = status.progress

    def _blame(self) -> None:
        """The head's verdict, if it has come to one, that no step comes of a stage."""
        session, stage = self._session, self.stage
        if (
            session is not None
            and stage is not None
            and isinstance(stage.worker, Head)
            and stage.worker.blamed is not None
        ):
            self._send(wire.Blames(session.assigned.crew, *stage.worker.blamed))


# The engine of a crew's head: the loop's calls go through the stages, and are repeated after a
# loss. An update is either found taken when the crew is together again, or repeated with the same
# rows.

WAIT_SECONDS = 1.0
"""Between two looks whether we should stop."""
FIRST_TOKENS = 1024
"""Padded tokens of a new head's first micro-batches. What 16,384 take in a stage that a CPU holds
is many times the head's deadline, and a crew that has never worked is given up after two of
these."""
PIECES = 8
"""Micro-batches for each stage, where there are tokens enough: stages wait less for each other, and
for lines, the finer a step is cut."""
LEAST_TOKENS = 1024
"""A step is not cut finer for that: a device would have little to do at a time."""
SLOW_TOKEN = 0.1
"""Seconds of a token through all stages from which it is said what would be faster: of homes, not
of machines in a room."""
CREWS = 8
"""Crews of which it is remembered what their members can compute at a time, the last ones."""
REFUSALS = 3
"""One step is refused so often before its rows are given up."""


class CrewPolicy:
    """lineage: whose head this node is. stop: ends all waiting. wait_seconds: for the crew to be
    together again. averaging: our own stage's, if it is averaged now. copy: what training samples
    from, where it is new enough."""

    def __init__(
        self,
        training: TrainingConfig,
        model: CrewModel,
        runner: StageRunner,
        lineage: bytes,
        stop: threading.Event,
        wait_seconds: float,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        copy: WholeCopy | None = None,
    ) -> None:
        self._training = training
        self._batchers: OrderedDict[tuple[str, ...], MicroBatcher] = OrderedDict()
        """How much all stages can compute at a time, and in time, as far as is known: by the
        members, in the order of their stages."""
        self._wait_seconds = wait_seconds
        self._model = model
        self._runner = runner
        self.lineage = lineage
        self._stop = stop
        self._averaging = averaging
        self._copy = copy
        self._advised = False
        self._owner = f"{model.text.fingerprint.hex()}/lora{model.policy.lora.r}/head"

    @property
    def _memory(self) -> MicroBatcher:
        """The present crew's. One with another member begins anew: nobody has seen what that one
        can."""
        members = self._runner.members()
        known = self._batchers.pop(members, None) or MicroBatcher(
            self._training.per_device_train_tokens, first=FIRST_TOKENS
        )
        self._batchers[members] = known
        if len(self._batchers) > CREWS:
            self._batchers.popitem(last=False)
        return known

    @property
    def text(self) -> PolicyText:
        return self._model.text

    def statistics(self) -> EngineStatistics:
        device = self._model.placement.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        dtype = str(self._model.placement.dtype).removeprefix("torch.")
        retries = sum(memory.statistics().oom_retries for memory in list(self._batchers.values()))
        return EngineStatistics(str(device), dtype, peak, *2 * (self._memory.tokens,), retries)

    def random_generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    # ---- a step ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        """From this node's copy, where it has one that is new enough; else token by token through
        the stages."""
        copy, stage = self._copy, self._runner.stage
        if not prompts or copy is None or stage is None:
            return self._through_stages(prompts, sampling, rng)
        taken = self._participant()
        at = taken.step, taken.hash
        self._runner.thread.call(lambda: copy.follow(stage.layers, at))
        samples = copy.sample(at[0], prompts, sampling, rng)
        return samples if samples is not None else self._through_stages(prompts, sampling, rng)

    def generation(self, sampling: Sampling, rng: torch.Generator) -> Generation:
        return Lockstep(lambda prompts: self.generate(prompts, sampling, rng))

    def _through_stages(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        if not prompts:
            return []
        heads = [self.text.encode_prompt(prompt) for prompt in prompts]
        longest = max(map(len, heads))
        room = self._model.limits().tokens
        room = min(room, self.text.context or room)
        if longest + sampling.max_tokens > room:
            raise DeviceError(
                f"an answer of {sampling.max_tokens} tokens to a question of {longest} tokens, and"
                f" a crew computes {room} at a time: set training.max_completion_length lower, or"
                " leave the question out of the dataset"
            )
        seed = int(torch.randint(2**62, (1,), generator=rng))
        ends, s = self.text.eos_ids, sampling
        began = time.monotonic()
        waves = self._ask(
            lambda head: head.generate(
                heads,
                s.num_generations,
                s.max_tokens,
                s.temperature,
                s.top_p,
                ends,
                random.Random(seed),
            )
        )
        self._say_how_slow(
            (time.monotonic() - began) / max(len(ids) for wave in waves for ids in wave.ids)
        )
        groups: list[GroupSample] = []
        for group in (group for wave in waves for group in self._groups(wave)):
            if groups and len(groups[-1].completions) < s.num_generations:
                groups[-1].completions.extend(group.completions)
            else:
                groups.append(group)
        return groups

    def _say_how_slow(self, seconds: float) -> None:
        """Once, where a copy would help. seconds: of a token."""
        if self._copy is None and seconds > SLOW_TOKEN and not self._advised:
            self._advised = True
            log.warning(
                "answers go through all stages, token by token: a node with room samples from a"
                " whole copy of the policy instead",
                seconds_of_a_token=round(seconds, 2),
                set='stages.keep_policy = "memory"',
            )

    def _groups(self, wave: Wave) -> list[GroupSample]:
        def sampled(i: int) -> Sampled:
            ids = wave.ids[i]
            return Sampled(
                ids,
                wave.logprobs[i],
                self.text.decode(ids),
                "eos" if ids[-1] in wave.ends else "length",
            )

        size = wave.num_generations
        return [
            GroupSample(prompt, [sampled(q * size + k) for k in range(size)])
            for q, prompt in enumerate(wave.prompts)
        ]

    def score(self, rows: Sequence[Row], temperature: float) -> list[Scored]:
        lengths = [len(p) + len(c) for p, c in rows]

        async def work(head: Head) -> list[Scored]:
            memory = self._memory
            tokens = _piece(memory, lengths, head.stages)
            try:
                return await head.score(rows, temperature, tokens)
            except CannotScore as error:
                if error.too_much:
                    memory.ran_out(memory.cut(lengths, tokens=tokens))
                raise
            except PeerTimeout:
                memory.shrink(memory.cut(lengths, tokens=tokens))
                raise

        return self._ask(work) if rows else []

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """As `Updater.update`; how far own and external gradients agree is not measured, since no
        node has them all."""
        cfg = self._training
        own, external = trained(rows, cfg)
        if not own and not external:
            return UpdateStatistics(stepped=False, skipped="no_signal")
        done = self._learn(rows, own + external, frozenset(), rate)
        if done.stepped or not own or not external:
            # nobody says of whose tokens it is
            return replace(done, effective_own=None) if external else done
        # a peer's rows may be why no step was taken; stages do not say whose
        refused: dict[int, Outcome] = dict.fromkeys(
            (rows.groups[i] for i in external), "no_gradient"
        )
        return replace(self._learn(rows, own, frozenset(refused), rate), refused=refused)

    def _learn(
        self, rows: Rows, indices: list[int], without: frozenset[int], rate: float | None
    ) -> UpdateStatistics:
        """Learn from some rows. without: groups that do not count in the normaliser."""
        cfg = self._training
        learn = [
            LearnRow(
                *rows.rows[i],
                rows.recorded(i),
                advantage,
                weight,
                rows.groups[i],
                sampled=rows.is_sampled(i),
            )
            for i in indices
            for advantage, weight in [(float(rows.advantages[i]), float(rows.weights[i]))]
        ]
        divisor = normalizer(rows, cfg, without)
        return self._one(learn, divisor, cfg.learning_rate if rate is None else rate)

    def _one(self, learn: list[LearnRow], divisor: float, rate: float) -> UpdateStatistics:
        cfg, memory = self._training, self._memory
        lengths, groups = (
            [len(row.prompt_ids) + len(row.completion_ids) for row in learn],
            [row.group for row in learn],
        )
        before, refusals, tokens = self._participant().step, 0, memory.tokens
        pieces = lambda tokens: len(micro_batches(lengths, tokens, groups))

        async def work(head: Head) -> StepResult | None:
            nonlocal memory, tokens
            if head.participant.step > before:
                return None  # it was decided when the crew came apart, and has been taken since
            memory = self._memory
            tokens = _piece(memory, lengths, head.stages)
            while tokens < TOKENS and pieces(tokens) > MICRO_BATCHES:
                tokens *= 2
            memory.tokens = max(memory.tokens, tokens)
            return await head.update(
                learn, cfg.model_copy(update={"per_device_train_tokens": tokens}), divisor, rate
            )

        while refusals < REFUSALS:
            result = self._ask(work)
            if result is None:
                return UpdateStatistics(stepped=True)
            largest = memory.cut(lengths, groups, tokens)
            if result.refused is None:
                memory.passed(largest)
                return UpdateStatistics(
                    True,
                    result.loss,
                    result.clip_fraction,
                    None,
                    result.entropy,
                    result.grad_norm,
                    effective_own=result.effective,
                    rate_factor=result.rate_factor,
                )
            log.warning("no step", reason=result.refused, tokens=largest)
            # a slow stage answers sooner of less
            if result.refused in (TOO_MUCH, "timeout") and result.divisible:
                (memory.ran_out if result.refused == TOO_MUCH else memory.shrink)(largest)
                continue
            refusals += 1
            if result.refused == "not_finite":  # these rows will not become finite
                return UpdateStatistics(stepped=False, skipped="not_finite")
        return UpdateStatistics(stepped=False, skipped="refused")

    # ---- asking ----------------------------------------------------------------------------------

    def _ask(self, work: Callable[[Head], Awaitable[T]]) -> T:
        """What `work` gives, from the first head under which it succeeds. Raises EngineGone;
        PeerError after many failures."""
        before, failed = None, 0
        while True:
            head = self._head()
            before, failed = head, (failed if head is before else 0)
            try:
                return self._runner.thread.call(lambda head=head: work(head))  # type: ignore[misc]
            except PeerError as error:
                # less at a time is another call
                failed += not (isinstance(error, CannotScore) and error.divisible)
                log.warning(
                    "the crew stopped", error=str(error), timeout=isinstance(error, PeerTimeout)
                )
                # whoever spoils them has been left out before, however many take turns; and who is
                # blamed ends the crew: there is another
                if failed >= PATIENCE * head.stages and head.blamed is None:
                    raise
                if self._stop.is_set():
                    raise EngineGone("stopping") from None

    def _participant(self) -> Participant:
        return self._head().participant

    def _head(self) -> Head:
        """Waits for the crew to be together, for as long as there is one: a stage of 7 B takes half
        an hour to come back over a home's line, and the network process says when that is too long.
        Raises EngineGone when we are not its head any more or should stop, PeerTimeout when there
        was none for too long."""
        late = time.monotonic() + self._wait_seconds + 60.0
        while True:
            head = self._runner.wait(self._runner.head, WAIT_SECONDS)
            if self._runner.leads_no_more(self.lineage):
                raise EngineGone("another node is the head now")
            if head is not None:
                return head
            if self._stop.is_set():
                raise EngineGone("stopping")
            if self._runner.leads() == self.lineage:
                late = time.monotonic() + self._wait_seconds + 60.0
            if time.monotonic() > late:
                raise PeerTimeout("the crew is not together, and nobody says why")

    # ---- between steps ---------------------------------------------------------------------------

    def average(self, connected: bool, step_seconds: float, stepped: bool) -> bool:
        """Each stage does so by itself, when it has taken a step."""
        return False

    def remember(self, rewarded: Sequence[Row], own: Sequence[Row]) -> None:
        pass

    def observe(self, reward: float) -> None:
        pass

    def facts(self, fresh: bool) -> local.ReplicaFacts | None:
        averaging = self._averaging()
        return averaging.facts() if averaging is not None else None

    def averaging(self) -> WeightsReport | None:
        averaging = self._averaging()
        return averaging.report() if averaging is not None else None

    def wait_for_state(self, seconds: float, late: float) -> bool:
        return True

    # ---- across restarts -------------------------------------------------------------------------

    def restore(self, directory: Path, rng: torch.Generator) -> Counters:
        """What this node was as a head: all of it for the same crew, else only which group numbers
        are used. The crew says the step."""
        step = self._participant().step

        def use(counters: Counters, tensors: state.Tensors) -> None:
            if counters.crew == self.lineage.hex():
                state.set_generator(rng, tensors[state.RNG])

        counters = state.recover(directory, self._owner, use) or Counters()
        if counters.crew != self.lineage.hex():
            counters = Counters(
                sequence=counters.sequence, peer=counters.peer, swarm=counters.swarm
            )
        counters.crew = self.lineage.hex()
        counters.step, counters.policy_version = (
            max(counters.step, step),
            max(counters.policy_version, step),
        )
        return counters

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot:
        return state.take_counters(rng, counters, self._owner)


def _piece(memory: MicroBatcher, lengths: Sequence[int], stages: int) -> int:
    """Padded tokens of a micro-batch of rows of these lengths."""
    return min(memory.tokens, max(LEAST_TOKENS, sum(lengths) // (PIECES * stages)))


# Restoration and checkpoints of this node's stage, wired to the runner:
#
#     <data>/trainer/stage/       the own stage's journal, one per lineage
#     <data>/trainer/shadows/     ring neighbours' stages and the own; all with `stages.keep_policy`

JOURNALS = "stage"
"""Below the trainer's directory: a directory for each lineage."""


class StageRecovery:
    """It keeps its files below the trainer's `directory`. averaging: that of the stage that is
    being restored; asked: called when it seeks a replica, for the network process to be notified;
    more: what else `facts` says of a crew at a step."""

    def __init__(
        self,
        directory: Path,
        settings: RecoverySettings,
        model: CrewModel,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        asked: Callable[[], None] = lambda: None,
        more: Callable[[int], dict[str, int]] = lambda step: {},
    ) -> None:
        self._averaging = averaging
        self._asked = asked
        self.outer: Mapping[str, torch.Tensor] = {}
        """What averaging kept with the weights that were found (R0, R1); empty where nothing came
        with them."""
        self._model = model
        self._directory = directory
        self._settings = settings
        self._more = more
        self._journal: Journal | None = None
        self._store: SnapshotStore | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._arriving: dict[int, tuple[bytes, Begun]] = {}
        """As `LocalStage.arriving`: the next crew goes on with it."""
        self._recorder: SnapshotRecorder | None = None
        self.peer: StatePeer | None = None
        """Our end of the state streams, while there is a crew."""
        self._holders: tuple[str, ...] = ()
        """Our ring neighbours, when they were last given our state."""

    def copies(self) -> tuple[Copy, ...]:
        """What is on this node's disk: its own stages, and its neighbours'. In a thread."""
        # before the files, since it may be there meanwhile
        coming = self._journal.coming if self._journal is not None else []
        own, kept = (
            find_journals(self._directory / JOURNALS),
            find_snapshots(self._directory / SNAPSHOTS),
        )
        written = {one.lineage for one in coming}
        own = [*coming, *(one for one in own if one.lineage not in written)]
        found = [*(_copy("disk", one) for one in own), *(_copy("neighbour", one) for one in kept)]
        newest = sorted((copy for copy in found if copy.step > 0), key=lambda copy: -copy.step)
        return tuple(newest[: COPIES - 1])  # and one in memory

    def prepare(self, assigned: Assigned) -> None:
        """Opens what this node has on disk of the stage. In a thread. Steps of the stage before
        that were not written are not written now: a slow disk would keep a crew waiting."""
        before = self._journal
        self._recorder = None  # it knows the stage before, and there may be no room for two
        specs = stage_specs(self._model.config, assigned.layers)
        spec = specs[assigned.stage]
        terms = self._model.terms
        lora = lora_settings(self._model.policy) if terms.lora.r else None
        self._layouts = stage_layouts(self._model.config, specs, lora)
        if terms.frozen_a:  # frozen, and everybody derives the same
            self._layouts = tuple(
                tuple(spec for spec in layout if A_MARK not in spec.name)
                for layout in self._layouts
            )
        if before is not None:
            before.leave()
            # as it will be, it is our best source
            if before.writes(journal_file(self._directory / JOURNALS, assigned.lineage)):
                before.ended()
        self._journal = Journal(
            self._directory / JOURNALS,
            assigned.lineage,
            spec,
            journal_every(self._layouts),
            after=before,
        )
        kept = (
            range(spec.stages)
            if self._settings.keep_policy
            else (spec.index, *ring(spec.index, spec.stages))
        )
        self._arriving = {i: begun for i, begun in self._arriving.items() if i in kept}
        whose = state.owner(self._model.text.fingerprint, terms.lora.r, terms.frozen_a)
        about = {"layers": assigned.layers, "owner": whose}
        self._store = SnapshotStore(
            self._directory / SNAPSHOTS,
            assigned.lineage,
            {i: self._layouts[i] for i in kept},
            about,
        )

    def built(self, stage: Stage) -> None:
        """A stage with the base model's weights is there."""
        self.outer = {}
        averaging = self._averaging()
        outer = averaging.tensors if averaging is not None else dict
        self._recorder = SnapshotRecorder(
            stage.runtime.spec, self._settings, self._journal, self._store, outer
        )
        stage.observers.append(self._recorder)

    @contextlib.asynccontextmanager
    async def open(self, assigned: Assigned, stage: Stage) -> AsyncIterator[None]:
        """While it is open, others' stages can be asked and are answered. Raises PeerError."""
        assert self._recorder is not None
        place = Place(assigned.crew[:CREW_BYTES], assigned.stage, assigned.step)
        averaging = self._averaging()
        # what lies here is as good while the crew is suspended
        streams = await connect_all(assigned, "state", Gate())
        again = partial(connect, assigned, kind="state")
        try:
            local = LocalStage(
                stage.runtime,
                stage.runtime.spec,
                self._model.limits(),
                self._layouts,
                self._settings,
                self._model.terms.codec,
                self._recorder,
                self._store,
                base=None if self._model.terms.lora.r else tensors_of(self._model.directory),
                arriving=self._arriving,
            )
            self.peer = peer = StatePeer(
                local, Fence(place, len(assigned.layers)), streams, stage.meter, again
            )
            self._recorder.sharing = peer.sharing
            async with trio.open_nursery() as nursery:
                await nursery.start(peer.run)
                if averaging is not None:
                    averaging.probe.open(peer)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.peer = self._recorder.sharing = None
            if averaging is not None:
                averaging.probe.close()
            with trio.CancelScope(shield=True):
                await close_all(streams)

    async def restore(
        self, stage: Stage, assigned: Assigned, notify: Notify
    ) -> tuple[str, float | None]:
        """Fill `stage`: (source, KL of the probe). Raises Refused where no source is left,
        PeerError where somebody is lost meanwhile."""
        assert self.peer is not None
        averaging = self._averaging()
        met = averaging is not None and averaging.met()
        restored = await restore(
            self.peer,
            step=assigned.step,
            hash=assigned.hash,
            run=self._model.run,
            journal=self._journal,
            base=self._base(stage),
            replica=partial(self._replica, stage, averaging)
            if averaging is not None and met
            else None,
            notify=lambda phase, kind: notify(phase, f"R{int(kind)}"),
        )
        self._arriving.pop(assigned.stage, None)
        restored.install(stage.worker)
        self.outer = restored.kept.outer
        for kind, why in restored.tried:
            log.info("source not taken", rung=f"R{int(kind)}", reason=why)
        log.info(
            "weights are back",
            rung=f"R{int(restored.kind)}",
            step=assigned.step,
            source_step=restored.step,
        )
        return (
            f"R{int(restored.kind)}",
            restored.verdict.kl if restored.verdict is not None else None,
        )

    def _base(self, stage: Stage) -> Base | None:
        """R3. To be called before anything is restored."""
        if self._model.terms.lora.r > 0:
            return base_adapter(stage.runtime)
        if self._model.pretrained:  # of a run from scratch it is worth nothing
            return base_stage(
                self._model.directory, stage.runtime.spec, self._model.text.fingerprint
            )
        return None

    async def _replica(self, stage: Stage, averaging: StageAveraging) -> StageReplica:
        """R1. Raises PeerError."""
        averaging.seek()
        self._asked()
        phi, outer = await averaging.fetch()
        # what is not averaged stays
        spec, weights = (
            stage.runtime.spec,
            {n: host_copy(t) for n, t in trained_tensors(stage.runtime).items()},
        )
        weights |= {
            name: tensor for whole, tensor in phi.items() if (name := spec.local(whole)) is not None
        }
        return StageReplica(weights, outer=outer)

    def attach(self, assigned: Assigned, worker: StageWorker) -> None:
        """The stage is in order; `worker` has not begun."""
        assert self.peer is not None
        self.peer.attach(worker)
        holders = tuple(assigned.members[i] for i in ring(assigned.stage, len(assigned.layers)))
        lacking = holders != self._holders or (
            self._store is not None and self._store.get(assigned.stage) is None
        )
        # the base is on every disk
        if lacking and assigned.step > 0 and self._settings.keeps_copies(worker.runtime.spec):
            # a neighbour that is new has none of ours, and the next comes in many steps
            self.peer.sharing.snapshot_of(worker)
        self._holders = holders

    def progress(self) -> int:
        """Grows while weights arrive: a stage that is being restored over a slow link, or from a
        slow disk, is no stage that is stuck."""
        averaging = self._averaging()
        waits = int(time.monotonic()) if self._journal is not None and self._journal.leaving else 0
        return (
            waits
            + (self.peer.channel.progress if self.peer is not None else 0)
            + (averaging.arrived if averaging is not None else 0)
        )

    def facts(self, step: int) -> dict[str, int]:
        """Fields of StageStatus about copies: shadow_step, shadow_age_steps, and `more`."""
        kept = dict(self.peer.sharing.stored) if self.peer is not None else {}
        # its loss would cost all steps; in a crew of one nobody is there to keep a copy
        if not kept:
            return (
                {"shadow_age_steps": step, **self._more(step)}
                if self._holders
                else self._more(step)
            )
        newest = max(kept.values())
        return {
            "shadow_step": newest,
            "shadow_age_steps": max(0, step - newest),
            **self._more(step),
        }

    def refused(self) -> dict[str, int]:
        """What others sent on state streams that is not what it has to be, and what they asked for
        and did not get, by reason."""
        return dict(self.peer.channel.refused) if self.peer is not None else {}

    def forget(self) -> None:
        """The stage in memory is none any more."""
        if self._journal is not None:
            self._journal.forget()

    def close(self) -> None:
        """Writes the last step of our stage: the trainer ends."""
        if self._journal is not None:
            self._journal.finish()
            self._journal = None


def _copy(where: Where, found: OnDisk) -> Copy:
    return Copy(
        found.lineage, found.first, found.last, found.step, found.hash, where, found.taken, b""
    )


def recovery_settings(cfg: StagesConfig, run: Run) -> RecoverySettings:
    """Where no stage is ever made of its neighbours' layers, nobody is given any."""
    settings = RecoverySettings(
        cfg.shadow_every, cfg.keep_policy in ("disk", "both"), mode=cfg.paper_mode
    )
    return replace(settings, synthesis="none") if run.pretrained or run.adapter else settings


# A member with a whole copy samples its share of each step's questions and publishes groups as any
# node does. The crew scores and corrects them as every peer's.


class MemberPolicy(CrewPolicy):
    """The policy of a crew that another leads: it is sampled from this node's copy, or not at
    all."""

    def _participant(self) -> Participant:
        stage = self._runner.stage
        if stage is None or not self._runner.averages:
            raise EngineGone("no crew works here")
        return stage.worker.participant

    def _through_stages(
        self, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
    ) -> list[GroupSample]:
        raise EngineGone("no copy that is new enough")


class MemberSampler:
    """lineage: the engine's. questions: with these counters, which go on where this node's last
    ones ended, as a head's or here.

    Raises StateError where these are another model's.
    """

    def __init__(
        self,
        lineage: bytes,
        engine: MemberPolicy,
        training: TrainingConfig,
        questions: Callable[[Counters], Questions],
        identity: Callable[[Counters], Identity],
        link: Link,
        scorer: Scorer,
        trainer: Path,
    ) -> None:
        self.lineage = lineage
        self._engine = engine
        self._rng = engine.random_generator(training.seed)
        self._directory = trainer / HEAD
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._counters = engine.restore(self._directory, self._rng)
        skip_used_numbers(self._counters, trainer)
        self._identity = identity(self._counters)
        self._sampler = Sampler(
            training, questions(self._counters), engine, scorer, self._rng, self._counters
        )
        self._link = link
        self._groups = training.groups_per_step
        self._done = -1
        """The step at which it sampled last."""

    def sample(self, stage: Stage) -> None:
        """A share of a step's groups, unless that is done for this step. Raises EngineGone,
        DeviceError; OSError: a full disk."""
        counters, step = self._counters, stage.step
        if step == self._done or not (self._identity.adopt() or counters.peer):
            return
        self._done, counters.policy_version = step, max(counters.policy_version, step)
        experience = self._sampler(math.ceil(self._groups / len(stage.layers)))
        # no number is said before it is known to be used
        state.write(self._directory, self._engine.snapshot(self._rng, counters))
        for message in experience.messages:
            self._link.send(message)


# The trainer: offers itself to a crew, holds the assigned stage, trains while it holds the first.

POLL_INTERVAL = 1.0
LESS = 0.8
"""This share of what a stage that did not fit should have needed is offered from then on."""


def make_trainer(config: Config, progress: Progress) -> Trainer | CrewTrainer:
    """Whole where the policy fits, or is to be; else in a crew. Reads no weights. Raises
    LocalError, ConfigError."""
    if config.stages.mode == "off":
        return Trainer(config, progress)
    with config_directory(config.policy) as directory:
        whole = fits_whole(
            config.policy,
            config.stages,
            config.training,
            config.weights,
            directory,
            probe(config.policy),
        )
    return Trainer(config, progress) if whole else CrewTrainer(config, progress)


class CrewTrainer:
    """`run` returns when `stop` was called, or `max_steps` are done in the crew and its head has
    ended, or goes on."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._stop = threading.Event()
        self._loop: Loop | None = None
        self._averaging: StageAveraging | None = None
        self.copy: WholeCopy | None = None
        """What this node samples from; None where it is to go through the stages."""
        self._beside: MemberSampler | None = None
        self._engine: CrewPolicy | None = None
        """The last crew's that this node led: of the same lineage it goes on with what it knows of
        its members."""

    def stop(self) -> None:
        """Finish what is under way, save and leave."""
        self._stop.set()

    def run(self) -> None:
        """Raises LocalError: the model does not exist or cannot be held in stages; DeviceError: a
        stage does not fit."""
        with contextlib.ExitStack() as stack:
            c = self._config
            terms = crew_terms(c.stages, c.policy.lora, c.weights, c.training)
            self._model = stack.enter_context(
                open_model(
                    c.policy, c.stages, c.training, c.weights, terms, c.node.data_dir, self._loading
                )
            )
            settings = recovery_settings(c.stages, self._model.run)
            directory = c.node.data_dir / "trainer"
            more: Callable[[int], dict[str, int]] = lambda step: (
                self.copy.facts(step) if self.copy is not None else {}
            )
            self._recovery = StageRecovery(
                directory, settings, self._model, lambda: self._averaging, self._seek, more
            )
            if c.stages.keep_policy in ("memory", "both"):
                self.copy = WholeCopy(
                    self._model, lambda: self._recovery.peer, cached_tokens(c.training)
                )
            self._link = Link(
                self._config.node.data_dir, self._hello, self._about_weights, self._about_crew
            )
            self._offering = self._model.offering
            self._runner = StageRunner(
                self._build,
                self._recovery,
                self._link.send,
                self._progress,
                self._built,
                self._lacked,
                self._offer,
            )
            stack.callback(self._recovery.close)
            stack.enter_context(self._link)
            self._runner.thread.start()
            stack.callback(self._runner.thread.stop)
            self._wait_and_lead()
            self._link.flush(2.0)

    def _loading(self, line: str) -> None:
        log.info("policy", detail=line)
        self._progress("loading policy")

    def _wait_and_lead(self) -> None:
        scorer: Scorer | None = None
        rests = Pauses(
            self._config.node.quiet_hours, Told(self._config.node.data_dir), 0.0, self._stop
        ).reasons
        with contextlib.ExitStack() as stack:
            averages = False
            while not self._stop.is_set() and not self._runner.finished(
                self._config.training.max_steps
            ):
                crew = self._runner.wait(self._leads, POLL_INTERVAL)
                if (self._averages() is not None) != averages:
                    averages = not averages
                    self._link.send(self._hello_now())
                if crew is None and (not self._may_sample() or rests()):
                    continue
                try:
                    if scorer is None:
                        self._progress("loading tasks")
                        scorer = stack.enter_context(Scorer())
                    if crew is None:
                        self._sample(scorer)
                        continue
                    self._lead(crew, scorer)
                    # it was to stop, or has taken all its steps: steps in which there was nothing
                    # to learn are none of the crew's
                    return
                except EngineGone as gone:
                    log.info(
                        "not the head any more" if crew is not None else "nothing is sampled",
                        reason=str(gone),
                    )
                except (LocalError, OSError) as error:
                    if crew is not None or self.copy is None:
                        raise
                    log.warning("the copy is given up, the stage is not", error=str(error))
                    self.copy.release()
                    self.copy = self._beside = self._engine = None

    def _leads(self) -> bytes | None:
        """The crew that waits for us to begin."""
        return self._runner.leads() if self._runner.head() is not None else None

    def _lead(self, crew: bytes, scorer: Scorer) -> None:
        """The loop, as long as this node is the head of `crew`."""
        engine = self._engine
        if engine is None or engine.lineage != crew:
            engine = self._engine = CrewPolicy(
                self._config.training,
                self._model,
                self._runner,
                crew,
                self._stop,
                self._config.stages.wait_seconds,
                self._averages,
                self.copy,
            )
        directory = self._config.node.data_dir / "trainer" / HEAD
        self._loop = Loop(
            self._config,
            engine,
            self._link,
            scorer,
            Counters(),
            directory,
            self._progress,
            self._stop,
        )
        self._link.send(self._hello_now())
        try:
            self._loop.run(self._config.weights.join_seconds)
        finally:
            self._loop = self._beside = None
            if self.copy is not None:
                self.copy.release()

    def _may_sample(self) -> bool:
        """Whether another leads a crew that works, and samples of ours can get to it."""
        return (
            self.copy is not None
            and self._config.sharing.enabled
            and self._runner.averages
            and self._runner.leads() is None
        )

    def _sample(self, scorer: Scorer) -> None:
        """Once in each step of the crew, from our copy. Raises EngineGone, LocalError, OSError."""
        c, stage = self._config, self._runner.stage
        if stage is None or self.copy is None:
            return
        if self._beside is None or self._beside.lineage != stage.lineage:
            if self._beside is not None:
                self.copy.release()  # it may be of as many steps of the other one
            engine = MemberPolicy(
                c.training,
                self._model,
                self._runner,
                stage.lineage,
                self._stop,
                0.0,
                copy=self.copy,
            )
            choose = members_choose(stored(c.node.data_dir), c.task.names, c.training.options)
            self._beside = MemberSampler(
                stage.lineage,
                engine,
                c.training,
                lambda counters: Questions(
                    c.task.names, counters, choose, "curriculum" in c.training.options
                ),
                lambda counters: Identity(self._link, counters, c.swarm.id),
                self._link,
                scorer,
                c.node.data_dir / "trainer",
            )
        self._beside.sample(stage)

    # ---- the stage -------------------------------------------------------------------------------

    def _build(self, assigned: Assigned) -> Stage:
        # and with it, the stage before: there may be no room for two
        if self._averaging is not None:
            self._averaging.close()
            self._averaging = None
        runtime = self._model.build(assigned.layers, assigned.stage)
        stage = Stage(assigned, runtime, self._model.settings(), self._model.limits())
        weights, terms = self._config.weights, self._model.terms
        if weights.rule != "off" and averaged(stage):
            self._averaging = StageAveraging(
                weights,
                adapter_shape(terms.lora, terms.frozen_a),
                self._config.node.data_dir,
                stage,
                self._link.send,
                lambda: self._link.statistics().connected,
                lambda: self._runner.averages,
            )
        return stage

    def _built(self, stage: Stage) -> None:
        """It has its weights: from here on it averages."""
        if self._averaging is not None:
            self._averaging.begin(self._recovery.outer)
            # before whoever keeps copies of what it makes
            stage.observers.insert(1, self._averaging)
        self._recovery.outer = {}  # averaging has its own copies

    def _lacked(self, assigned: Assigned) -> None:
        """It was planned for this node, and does not fit. From now on less is offered, or the same
        would be planned again."""
        offering = self._offering
        if sum(assigned.layers) == len(offering.cost.layers):
            memory = min(
                offering.capacity.memory,
                LESS * stage_memory(offering.cost, assigned.layers, assigned.stage),
            )
            self._offering = msgspec.structs.replace(
                offering, capacity=replace(offering.capacity, memory=memory)
            )
            log.warning("less is offered", gib=round(memory / 2**30, 2))

    # ---- the link --------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        """What a new connection begins with."""
        status = self._runner.status()
        if status is not None:
            self._link.send(status)
        else:
            self._offer(self._runner.stage)
        return self._hello_now()

    def _offer(self, stage: Stage | None) -> None:
        """This node works in no crew, and this much is here."""
        copy = stage.copy() if stage is not None else None
        copies = (*([copy] if copy is not None else []), *self._recovery.copies())
        self._link.send(msgspec.structs.replace(self._offering, copies=copies))

    def _hello_now(self) -> Hello:
        loop = self._loop
        if loop is not None:
            return loop.hello()
        text, stage, averaging = self._model.text, self._runner.stage, self._averages()
        return Hello(
            model=text.fingerprint,
            tokenizer=text.tokenizer_hash,
            policy_version=stage.step if stage is not None else 0,
            tokens_per_text_byte=text.tokens_per_text_byte,
            pid=os.getpid(),
            replica=averaging.facts() if averaging is not None else None,
        )

    def _seek(self) -> None:
        """The stage looks for its state in other crews: it averages with nobody, but has to be
        known to whoever could give it."""
        if self._averaging is not None:
            self._link.send(
                msgspec.structs.replace(self._hello_now(), replica=self._averaging.facts())
            )

    def _averages(self) -> StageAveraging | None:
        """Nobody else's weights are mixed with those of a stage that has not shown what it is."""
        return self._averaging if self._runner.active else None

    def _about_weights(self, message: local.ToTrainer) -> None:
        averaging = self._averaging
        gives = isinstance(message, local.TakeSnapshot | local.WriteState)
        if averaging is None:
            return
        if isinstance(message, local.AdoptState) or (
            self._runner.active and (self._runner.averages or not gives)
        ):
            averaging.receive(message)
        else:  # nothing is given away; what is under way may end
            averaging.refuse(message)

    def _about_crew(self, message: wire.ToTrainer) -> None:
        self._runner.receive(message)
