"""Averaging in the network process: creates its parts and connects them with the trainer.

Discovery      peers that average the same policy
SwapService    swaps: requests them and answers requests
PayloadStore   files of weights, this node's and peers'
StateSeeker    fetches a neighbour's state for a new node
StateServer    serves this node's state to new neighbours
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarmnode.config import WeightsConfig
from swarmnode.p2p.api import Network
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights import local
from swarmnode.weights.local import LocalReplica, SendToTrainer
from swarmnode.weights.network.discovery import Discovery
from swarmnode.weights.network.newcomer import StateSeeker, StateServer
from swarmnode.weights.network.payload_store import PayloadStore
from swarmnode.weights.network.swaps import SwapService, WeightsStatistics

log = logging.getLogger(__name__)


class WeightService:
    """Averages this node's policy with those of peers.

    Start it with `await nursery.start(service.run)`. The process link calls `set_policy`,
    `trainer_left` and `receive`.

    Args:
        known: Peers whose state a new node takes and, unless `cfg.partners` is `anyone`, with which
            this node averages.
        budget: `Meter.allows`. No swap is proposed while it refuses "fetch".
        may_average: Returns False while no swap may begin.
    """

    def __init__(
        self,
        network: Network,
        swarm: bytes,
        cfg: WeightsConfig,
        known: KnownPeers,
        data_dir: Path,
        send_to_trainer: SendToTrainer,
        *,
        budget: Callable[[str], bool] = lambda choice: True,
        may_average: Callable[[], bool] = lambda: True,
    ) -> None:
        self._enabled = cfg.rule != "off"
        self._swarm = swarm
        self._replica = LocalReplica()
        self._store = PayloadStore(network.bulk, data_dir / local.DIRECTORY)
        self._state_server = StateServer(network, self._replica, self._store, send_to_trainer)
        self._has_trainer = False
        may_accept = lambda: (
            self._has_trainer and may_average() and not self._state_server.is_writing
        )
        partners = known if cfg.partners == "known" else KnownPeers(everyone=True)
        self._discovery = Discovery(network, self._replica, partners)
        self._swaps = SwapService(
            network,
            self._replica,
            self._discovery,
            self._store,
            send_to_trainer,
            cfg.sync_every,
            may_accept=may_accept,
            may_propose=lambda: budget("fetch") and may_accept(),
        )
        self._seeker = StateSeeker(
            network,
            self._replica,
            self._discovery,
            self._store,
            send_to_trainer,
            known,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Average until cancelled. Only wait if averaging is off."""
        if not self._enabled:
            task_status.started()
            await trio.sleep_forever()
        if not self._discovery.partners:
            log.info(
                "the weights are not averaged: this node knows no peer (stages.trust), and"
                " weights.partners admits known peers only"
            )
        await trio.to_thread.run_sync(self._store.clean)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._swaps.run)
            self._state_server.start()
            nursery.start_soon(self._store.run)
            nursery.start_soon(self._discovery.run)
            nursery.start_soon(self._seeker.run)
            task_status.started()

    def statistics(self) -> WeightsStatistics:
        enabled = self._enabled and bool(self._discovery.partners)
        return msgspec.structs.replace(self._swaps.statistics(), enabled=enabled)

    # ---- for the trainer -------------------------------------------------------------------------

    def set_policy(self, facts: local.ReplicaFacts | None, base: bytes, tokenizer: bytes) -> None:
        """Take the replica of a trainer that has (re)started, from its Hello. Ends all swaps of the
        trainer before it."""
        self._has_trainer = True
        if facts is None or not self._enabled:
            self._replica.stop()
            return
        self._replica.start(facts, self._swarm, base, tokenizer)
        self._swaps.trainer_left()
        self._discovery.forget()
        self._state_server.trainer_started()
        self._seeker.trainer_started()

    def trainer_left(self) -> None:
        """End all swaps: the trainer has disconnected. No swap begins until the next one is ready,
        which may load for minutes."""
        self._has_trainer = False
        self._swaps.trainer_left()

    def receive(self, message: local.FromTrainer) -> None:
        """Handle a message of the trainer."""
        if self._replica.facts is None:
            return
        match message:
            case local.OuterStepDue():
                self._replica.outer_steps[message.fragment] = message.outer_step
                self._swaps.outer_step_due(message)
            case local.SnapshotWritten():
                self._swaps.snapshot_written(message)
            case local.SwapEnded():
                self._replica.outer_steps[message.fragment] = message.outer_step
                self._swaps.swap_ended(message)
            case local.StateWritten():
                self._swaps.start(self._state_server.written, message)
            case local.StateAdopted():
                self._replica.outer_steps = list(message.outer_steps)
                self._seeker.adopted(message)
