"""A member of a swarm on the network: the common part of `node.py` and `bootstrap.py`.

identity ─ stored manifest ─▶ swarm id, secret, members ─▶ host ─▶ serve the manifest, look for
                               successors, exchange sessions and summaries
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
import trio

from swarmnode.config import Config
from swarmnode.errors import LocalError, PeerError, SwarmNodeError
from swarmnode.p2p import manifests
from swarmnode.p2p.identity import Identity, load_or_create
from swarmnode.p2p.network import Libp2pNetwork, open_host
from swarmnode.p2p.passphrase import VARIABLE
from swarmnode.p2p.sessions import Sessions
from swarmnode.p2p.summaries import Summaries
from swarmnode.swarm import manifest, manifest_store
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.swarm.requirements import can_honour, refuse_if_any
from swarmnode.swarm.successor import SuccessorStatistics
from swarmnode.tasks.registry import DATASETS, install, install_datasets, task_version
from swarmnode.wire.manifest import VerifiedManifest, swarm_id
from swarmnode.wire.messages import RolloutGroup

log = structlog.get_logger("swarmnode.swarm.manifest")

POLL_INTERVAL = 2.0
"""Interval between checks of the connected peers and the chosen manifest."""
QUERY_INTERVAL_SECONDS = 600.0
"""Interval between queries to the same peer, before jitter."""
RETRY_SECONDS = 30.0
PEERS_PER_ROUND = 4
"""Peers queried in one round."""


@dataclass(frozen=True)
class Member:
    """The parts of a running member."""

    identity: Identity
    swarm: bytes
    """Swarm id, 32 bytes."""
    opened: VerifiedManifest | None
    """None in a swarm without a manifest."""
    network: Libp2pNetwork
    sessions: Sessions
    summaries: Summaries
    successors: Successors | None
    members_choose_difficulty: bool
    """True if members choose the difficulty of their questions."""
    meets_rules: Callable[[RolloutGroup], bool]
    """Returns True for a group that the swarm's manifest allows."""

    async def run(self) -> None:
        """Run the background tasks. Raises LocalError when this process must restart or stop."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sessions.run)
            nursery.start_soon(self.summaries.run)
            if self.successors is not None:
                nursery.start_soon(self.successors.run)


@contextlib.asynccontextmanager
async def open_member(config: Config, *, trains: bool = True) -> AsyncIterator[Member]:
    """Join the network until the block is left. The caller runs `member.run` in its own nursery.

    Args:
        config: configuration of the node.
        trains: True if this node trains, which requires the swarm's tasks.

    Raises:
        LocalError: an unusable key, a damaged manifest, a port in use, a missing secret; see
            errors.py.
    """
    data_dir = config.node.data_dir
    install(config.task.modules, config.task.settings, config.task.names)
    install_datasets(config.task.datasets, data_dir / DATASETS)
    identity = load_or_create(data_dir / "identity.key")
    os.environ.pop(VARIABLE, None)  # no child of this process needs it
    opened = manifest_store.load_current(data_dir)
    if config.swarm.id != (opened.swarm.hex() if opened is not None else ""):
        raise LocalError(
            "another manifest was chosen after this process was configured; restarting"
        )
    if opened is None:
        secret, members = None, None
        speaks = manifest.required_protocols(config.task.names, config.training.options)
        swarm = swarm_id(
            config.swarm.name, {name: task_version(name) for name in config.task.names}, speaks
        )
    else:
        refuse_if_any(can_honour(opened.manifest, config, identity.peer_id, trains=trains), opened)
        secret = manifest.swarm_secret(data_dir) if opened.manifest.access.secret else None
        members = manifest.members(opened.manifest)
        swarm = opened.swarm
    async with open_host(
        config.network, identity, data_dir, swarm=swarm, secret=secret, members=members
    ) as network:
        store = ManifestStore(data_dir)
        manifests.serve(network.requests, store.lookup)
        sessions = Sessions(
            network.requests,
            identity.peer_id,
            identity.private_key,
            swarm,
            network.connected,
            stamp_file=data_dir / "session-stamp",
        )
        summaries = Summaries(
            network.requests,
            identity.peer_id,
            identity.private_key,
            swarm,
            network.connected,
            is_allowed=network.is_allowed,
        )
        successors = (
            Successors(config, opened, store, network, trains=trains)
            if opened is not None
            else None
        )
        meets_rules = (
            manifest.group_check(opened.manifest) if opened is not None else lambda group: True
        )
        choose = manifest.members_choose_difficulty(
            opened, config.task.names, config.training.options
        )
        yield Member(
            identity, swarm, opened, network, sessions, summaries, successors, choose, meets_rules
        )


class Successors:
    """Asks peers for a successor of the manifest, stores it, and follows it if the operator's
    policy says so.

    A node follows by choosing the successor and restarting, because configuration, signatures and
    trainer depend on the swarm id.
    """

    def __init__(
        self,
        config: Config,
        opened: VerifiedManifest,
        store: ManifestStore,
        network: Libp2pNetwork,
        *,
        trains: bool = True,
    ) -> None:
        self._config = config
        self._trains = trains
        self._opened = opened
        self._store = store
        self._network = network
        self._rng = random.Random()
        self._waiting = SuccessorStatistics()

    def statistics(self) -> SuccessorStatistics:
        """Return the pending successor, if there is one."""
        return self._waiting

    async def run(self) -> None:
        """Query peers until cancelled. Raises LocalError when another manifest was chosen, by the
        operator or by policy."""
        due: dict[str, float] = {}  # connected peer → time of the next query
        if (waiting := self._store.successor(self._opened)) is not None:
            self._consider(waiting)
        while True:
            if self._store.current() != self._opened.swarm:
                raise LocalError("another manifest was chosen; restarting with it")
            now = trio.current_time()
            due = {peer: due.get(peer, now) for peer in self._network.connected()}
            for peer in [peer for peer, at in due.items() if at <= now][:PEERS_PER_ROUND]:
                answered = await self._ask(peer)
                due[peer] = trio.current_time() + (
                    self._rng.uniform(0.5, 1.5) * QUERY_INTERVAL_SECONDS
                    if answered
                    else RETRY_SECONDS
                )
            await trio.sleep(POLL_INTERVAL)

    async def _ask(self, peer: str) -> bool:
        """Query one peer; returns True if it answered. Never raises for a fault of the peer."""
        try:
            found = await manifests.fetch(self._network.requests, peer, self._opened.swarm)
        except PeerError as error:
            log.debug("no manifest from a peer", peer=peer, error=str(error))
            return False
        try:
            if found.successor is not None and self._store.add_successor(
                self._opened, found.successor
            ):
                self._consider(found.successor)
        except SwarmNodeError as error:  # a full disk must not end a node
            log.error("cannot store a successor", error=str(error))
        return True

    def _consider(self, successor: VerifiedManifest) -> None:
        """Follow the successor, or log how to follow it."""
        name, swarm = successor.manifest.name, successor.swarm.hex()
        policy = self._config.swarm.follow
        problems = can_honour(
            successor.manifest, self._config, self._network.peer_id, trains=self._trains
        )
        if successor.manifest.models != self._opened.manifest.models:
            problems.append("it trains another model: follow it with a data directory of its own")
        if policy == "ask" or (policy == "founder" and problems):
            self._waiting = SuccessorStatistics(swarm, name, problems, waiting=1)
        if policy == "founder" and not problems:
            log.warning("following the founder's successor", name=name, swarm=swarm)
            self._store.choose(successor.swarm)
        elif policy == "founder":
            log.error(
                "cannot follow the founder's successor, staying",
                name=name,
                swarm=swarm,
                problems="; ".join(problems),
            )
        elif policy == "ask":
            log.warning(
                "the founder has signed a successor; adopt it with `swarmnode manifest follow`",
                name=name,
                swarm=swarm,
            )
