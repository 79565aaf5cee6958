"""A crew in one process that loses stages and restores them, with real members, real state streams
over memory and real files."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import trio
from trio.testing import memory_stream_pair

from swarmnode.errors import StateError
from swarmnode.stages.specs import StageSpec
from swarmnode.stages.stage_frames import CREW_BYTES, Fence, FrameLimits, Place
from swarmnode.stages.trainer.local_stage import LocalStage
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings
from swarmnode.stages.trainer.restore import BaseWeights, RestoredStage, restore
from swarmnode.stages.trainer.stage_batches import LearnRow
from swarmnode.stages.trainer.stage_checkpoints import (
    CHECKPOINTS,
    CheckpointIdentity,
    CheckpointStore,
    Recorder,
    RecoverySettings,
    stage_layouts,
    stored_stages,
)
from swarmnode.stages.trainer.stage_model import StageRuntime
from swarmnode.stages.trainer.state_exchange import StateExchange
from tests.support.crew import Crew, open_crew, run_inline
from tests.support.split_models import split_model

CREW = b"c" * CREW_BYTES


@dataclass
class Station:
    """State of one node that survives a crew, and a restart of its trainer."""

    spec: StageSpec
    runtime: StageRuntime
    directory: Path
    store: CheckpointStore
    watch: Recorder
    member: StageWorker | None = None
    """The worker of the last crew. None: the stage must be restored."""
    base: BaseWeights = dict
    """Reader of the base model; by default it has no tensor, so that it is no source."""


@dataclass
class Fleet:
    model: Any
    layers: list[int]
    directory: Path
    crew_settings: WorkerSettings
    settings: RecoverySettings
    keepers: Collection[int] = ()
    """Stages whose nodes keep the whole policy."""
    owner: str = ""
    """Value of `trainer.state.owner`."""
    step: int = 0
    epoch: int = 0
    stations: list[Station] = field(default_factory=list)
    peers: list[StateExchange] = field(default_factory=list)
    restored: dict[int, RestoredStage] = field(default_factory=dict)
    """Stages restored under the last roster."""
    failed: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pieces = split_model(self.model, self.layers)
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        lora = self.model.peft_config["default"] if hasattr(self.model, "peft_config") else None
        self.layouts = stage_layouts(base.config, [spec for spec, _ in pieces], lora)
        self.identity = CheckpointIdentity(CREW.hex(), tuple(self.layers), self.owner)
        self.limits = FrameLimits(
            hidden=base.config.hidden_size, vocab=base.config.vocab_size, tokens=1024
        )
        for spec, stage in pieces:
            self.stations.append(
                self._station(
                    spec, StageRuntime(spec, stage), self.directory / f"node-{spec.index}"
                )
            )

    def _station(self, spec: StageSpec, runtime: StageRuntime, directory: Path) -> Station:
        settings = replace(self.settings, stores_all_stages=spec.index in self.keepers)
        store = CheckpointStore(directory / CHECKPOINTS)
        store.begin(self.identity, stored_stages(spec.index, spec.stages, settings))
        watch = Recorder(spec, settings, self.layouts, store)
        return Station(spec, runtime, directory, store, watch)

    def kill(self, stage: int, disk: bool = False) -> Station:
        """Replace the node by one with random weights, which has the old disk if `disk`."""
        old = self.stations[stage]
        old.store.close()
        runtime = StageRuntime(old.spec, copy.deepcopy(old.runtime.model))
        generator = torch.Generator().manual_seed(stage)
        with torch.no_grad():
            for parameter in runtime.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        directory = (
            old.directory if disk else old.directory.with_name(f"{old.directory.name}-again")
        )
        self.stations[stage] = self._station(old.spec, runtime, directory)
        return self.stations[stage]

    def lose_copy(self, stage: int, at: int) -> None:
        """Make the node of stage `at` find its copy of `stage` damaged on disk and drop it."""
        path = self.identity.path(stage)
        (self.stations[at].directory / CHECKPOINTS / path).write_bytes(b"")
        with suppress(StateError):
            self.stations[at].store.read(stage)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return (stage, name) → copy of every trained tensor."""
        named = (
            (s.spec.index, n, p)
            for s in self.stations
            for n, p in s.runtime.model.named_parameters()
            if p.requires_grad
        )
        return {f"{stage} {name}": p.detach().clone() for stage, name, p in named}

    @asynccontextmanager
    async def up(self, step: int | None = None) -> AsyncIterator[Crew | None]:
        """Yield a crew of all stages after restoring the lost ones. Yield None where a restore
        failed; see `failed`."""
        self.epoch += 1
        self.step = self.step if step is None else step
        count = len(self.stations)
        streams: dict[int, dict[int, trio.abc.Stream]] = {i: {} for i in range(count)}
        for i in range(count):
            for j in range(i):
                streams[i][j], streams[j][i] = memory_stream_pair()
        self.peers = []
        for i, station in enumerate(self.stations):
            fence = Fence(Place(CREW, i, self.step), count)
            local = LocalStage(
                station.runtime,
                self.limits,
                self.layouts,
                self.crew_settings.codec,
                station.watch,
                station.store,
            )
            self.peers.append(StateExchange(local, fence, streams[i], run_inline))
        self.restored, self.failed = {}, {}
        async with trio.open_nursery() as nursery:
            for peer in self.peers:
                nursery.start_soon(peer.run)
            nursery.start_soon(self._start_stages)
            fresh = self.step == 0 and self.epoch == 1
            if not fresh:
                async with trio.open_nursery() as restoring:
                    for station in self.stations:
                        if station.member is None:
                            restoring.start_soon(self._restore, station)
            if self.failed:
                yield None
            else:
                async with open_crew(
                    [s.runtime for s in self.stations],
                    self.crew_settings,
                    self.limits,
                    crew=CREW,
                    step=self.step,
                ) as crew:
                    for station, member, peer in zip(
                        self.stations, crew.members, self.peers, strict=True
                    ):
                        self._start_stage(station, member, peer)
                    yield crew
                    self.step = crew.head.participant.step
            nursery.cancel_scope.cancel()

    async def _start_stages(self) -> None:
        for station, peer in zip(self.stations, self.peers, strict=True):
            if station.member is not None:
                peer.attach(station.member, self.step)

    def _start_stage(self, station: Station, member: StageWorker, peer: StateExchange) -> None:
        old = station.member
        if old is not None:
            member.optimizer = old.optimizer
        elif station.spec.index in self.restored:
            self.restored[station.spec.index].install(member)
        member.observers = [station.watch]
        station.member = member
        peer.attach(member, self.step)

    async def _restore(self, station: Station) -> None:
        stage = station.spec.index
        try:
            self.restored[stage] = await restore(
                self.peers[stage],
                step=self.step,
                base=station.base,
                notify=lambda source: None,
            )
        except Exception as error:  # the test inspects the error
            self.failed[stage] = error

    def close(self) -> None:
        for station in self.stations:
            station.store.close()


def checkpoints_in(fleet: Fleet, at: int) -> dict[int, int]:
    """Return stage → committed steps in its checkpoint on the disk of the node of stage `at`."""
    found = {stage: fleet.stations[at].store.metadata(stage) for stage in range(len(fleet.layers))}
    return {stage: about.step for stage, about in found.items() if about is not None}


def rows_of(seed: int, count: int = 12) -> list[LearnRow]:
    """Return training rows that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, 60, (n,), generator=generator).tolist()
    return [
        LearnRow(draw(14 + i % 3), draw(1 + i % 5), [-3.0] * (1 + i % 5), 1.0 - i % 3, 1.0, i)
        for i in range(count)
    ]


async def quiet(rounds: int = 200) -> None:
    """Wait until every frame in flight has been handled."""
    for _ in range(rounds):
        await trio.lowlevel.checkpoint()
