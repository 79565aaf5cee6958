"""Averaging in the network process: its parts, put together; where the node and the trainer talk to
it.

Discovery       who averages what we do                 RequestServer   answers peers
ExchangeDriver  finds a partner, carries exchanges out  PayloadStore    files of weights, ours and
theirs
StateSeeker     a neighbour's state for a new node      StateServer     ours for a neighbour
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarmnode.config import WeightsConfig
from swarmnode.p2p.api import Network
from swarmnode.weights import local
from swarmnode.weights.background import Background
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.driver import ExchangeDriver, SendToTrainer
from swarmnode.weights.outcomes import OUTCOMES
from swarmnode.weights.payload_store import PayloadStore
from swarmnode.weights.replica import LocalReplica
from swarmnode.weights.requests import PeerRequests
from swarmnode.weights.server import RequestServer
from swarmnode.weights.state_seeker import CatchUpStatistics, StateSeeker
from swarmnode.weights.state_server import StateServer
from swarmnode.wire.envelope import Credentials


class WeightsStatistics(msgspec.Struct, frozen=True):
    enabled: bool = False
    phase: str = ""
    """Phase of the exchange under way: idle, proposed, paired, transfer, apply."""
    partner: str = ""
    outcomes: dict[str, int] = {}
    """Tries and exchanges by `pairing.OUTCOMES`."""
    failures: dict[str, int] = {}
    """Failed ones by `driver.FAILURES`."""
    judged: dict[str, int] = {}
    """Partners' weights by `outcomes.OUTCOMES`."""
    candidates: int = 0
    """Peers that could be partners now."""
    exchange_seconds: float = 0.0
    """Time that finished exchanges took, in all."""
    received_bytes: int = 0
    """Length of what they fetched, in all."""
    catch_up: CatchUpStatistics = CatchUpStatistics()
    pairs: dict[str, int] = {}
    """Exchanges applied by peer: for people, never a metric's label."""


class WeightService:
    """Averages this node's policy with others'. budget(choice): as `Meter.allows`. unix_time: in
    seconds. may_average(): False while the weights here are nobody's to have: then nothing is
    proposed, accepted or left to be pulled.

    Start it with `await nursery.start(service.run)`; `set_policy` and `receive` are for the process
    link.
    """

    def __init__(
        self,
        network: Network,
        credentials: Credentials,
        cfg: WeightsConfig,
        data_dir: Path,
        send_to_trainer: SendToTrainer,
        *,
        budget: Callable[[str], bool] = lambda choice: True,
        may_average: Callable[[], bool] = lambda: True,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._enabled = cfg.rule != "off"
        self._swarm = credentials.swarm
        self._replica = LocalReplica()
        self._store = PayloadStore(network.bulk, data_dir / local.DIRECTORY)
        self._state_server = StateServer(
            network, credentials, self._replica, self._store, send_to_trainer
        )
        self._has_trainer = False
        may_begin = lambda: (
            self._has_trainer and may_average() and not self._state_server.is_writing
        )
        self._may_propose = lambda: budget("fetch") and may_begin()
        requests = PeerRequests(network)
        self._discovery = Discovery(network, requests, self._replica, credentials.swarm, unix_time)
        self._background = Background()
        self._driver = ExchangeDriver(
            network,
            requests,
            self._replica,
            self._discovery,
            self._store,
            send_to_trainer,
            self._background,
            cfg.sync_every,
        )
        self._server = RequestServer(
            network,
            requests,
            self._replica,
            self._discovery,
            self._driver,
            self._store,
            may_average,
            may_begin,
        )
        self._seeker = StateSeeker(
            network,
            credentials.swarm,
            self._replica,
            self._discovery,
            self._store,
            send_to_trainer,
            cfg,
        )
        self._judged: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Average until cancelled. With averaging off it only waits."""
        if not self._enabled:
            task_status.started()
            await trio.sleep_forever()
        await trio.to_thread.run_sync(self._store.clean)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._background.run)
            nursery.start_soon(self._driver.run)
            self._server.start()
            self._state_server.start()
            nursery.start_soon(self._discovery.run)
            nursery.start_soon(self._seeker.run)
            task_status.started()

    def statistics(self) -> WeightsStatistics:
        paired, totals = self._driver.statistics(), self._driver.totals
        return WeightsStatistics(
            enabled=self._enabled,
            phase=paired.phase,
            partner=paired.peer,
            outcomes=paired.outcomes,
            failures=dict(totals.failures),
            judged=dict(self._judged),
            candidates=len(self._discovery.candidates()),
            exchange_seconds=totals.seconds,
            received_bytes=totals.received_bytes,
            catch_up=self._seeker.statistics(self._state_server.served),
            pairs=dict(totals.pairs),
        )

    # ---- for the trainer -------------------------------------------------------------------------

    def set_policy(self, facts: local.ReplicaFacts | None, base: bytes, tokenizer: bytes) -> None:
        """The trainer (re)started, with this replica: its Hello. What an earlier one was doing is
        over."""
        self._has_trainer = True
        if facts is None or not self._enabled:
            self._replica.stop()
            return
        before = self._replica.fingerprint
        self._replica.start(facts, self._swarm, base, tokenizer)
        if self._replica.fingerprint != before:
            self._store.unpublish()
        self._driver.trainer_started()
        self._discovery.forget()
        self._state_server.trainer_started()
        self._seeker.trainer_started()

    def trainer_left(self) -> None:
        """It is gone, and may load for minutes: what it was doing is over, and nothing is proposed
        or accepted until there is another."""
        self._has_trainer = False
        self._driver.trainer_left()

    def receive(self, message: local.FromTrainer) -> None:
        """Take what the trainer sends."""
        if self._replica.facts is None:
            return
        match message:
            case local.OuterStepDue():
                self._replica.outer_steps[message.fragment] = message.outer_step
                self._driver.outer_step_due(message, self._may_propose())
            case local.SnapshotWritten():
                self._driver.snapshot_written(message)
            case local.ExchangeEnded():
                self._exchange_ended(message)
            case local.ExchangeReverted(peer):
                self._count("reverted", peer)
                self._driver.reverted(peer)
            case local.StateWritten():
                self._background.start(self._state_server.written, message)
            case local.StateAdopted():
                self._replica.outer_steps = list(message.outer_steps)
                self._seeker.adopted(message)

    def _exchange_ended(self, ended: local.ExchangeEnded) -> None:
        self._replica.outer_steps[ended.fragment] = ended.outer_step
        self._count(ended.outcome if ended.outcome in OUTCOMES else "local", ended.peer)
        self._driver.exchange_ended(ended)

    def _count(self, outcome: str, peer: str) -> None:
        self._judged[outcome] += 1
        if OUTCOMES[outcome] and peer:
            self._driver.lied(peer, f"weights_{outcome}", OUTCOMES[outcome])
