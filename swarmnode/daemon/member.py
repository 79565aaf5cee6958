"""A member of a swarm on the network: the common part of `node.py` and `bootstrap.py`.

identity ─ stored manifest ─▶ swarm id, secret, members ─▶ host ─▶ serve the manifest, follow
                               successors, detect another process with this key
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
import trio

from swarmnode.config import Config
from swarmnode.errors import RestartWanted, SwarmNodeError
from swarmnode.p2p import manifests
from swarmnode.p2p.identity import Identity, load_or_create
from swarmnode.p2p.network import Libp2pNetwork, open_host
from swarmnode.swarm import manifest, manifest_store
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.swarm.requirements import can_honour, refuse_if_any
from swarmnode.swarm.successor import SuccessorStatistics
from swarmnode.tasks.registry import DATASETS, install, install_datasets, task_version
from swarmnode.wire.manifest import VerifiedManifest, swarm_id
from swarmnode.wire.messages import RolloutGroup

log = structlog.get_logger("swarmnode.swarm.manifest")

POLL_INTERVAL = 2.0
"""Interval between checks of the chosen manifest."""


@dataclass(frozen=True)
class Member:
    """The parts of a running member."""

    identity: Identity
    swarm: bytes
    """Swarm id, 32 bytes."""
    opened: VerifiedManifest | None
    """None in a swarm without a manifest."""
    network: Libp2pNetwork
    successors: Successors | None
    meets_rules: Callable[[RolloutGroup], bool]
    """Returns True for a group that the swarm's manifest allows."""


@contextlib.asynccontextmanager
async def open_member(config: Config, *, trains: bool = True) -> AsyncIterator[Member]:
    """Join the network until the block is left. The caller runs `member.successors.run` in its own
    nursery.

    Args:
        config: configuration of the node.
        trains: True if this node trains, which requires the swarm's tasks.

    Raises:
        LocalError: an unusable key, a damaged manifest, a port in use, a missing secret, another
            process with this key; see errors.py.
        RestartWanted: another manifest was chosen after this process was configured.
    """
    data_dir = config.node.data_dir
    install(config.task.modules, config.task.settings, config.task.names)
    install_datasets(config.task.datasets, data_dir / DATASETS)
    identity = load_or_create(data_dir / "identity.key")
    opened = manifest_store.load_current(data_dir)
    if config.swarm.id != (opened.swarm.hex() if opened is not None else ""):
        raise RestartWanted("another manifest was chosen after this process was configured")
    if opened is None:
        secret, members = None, None
        swarm = swarm_id(
            config.swarm.name, {name: task_version(name) for name in config.task.names}
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
        network.neighbours.detect_duplicates()
        network.neighbours.successor_of = store.successor_id
        successors = None
        if opened is not None:
            successors = Successors(config, opened, store, network, trains=trains)
            network.neighbours.on_successor = successors.fetch
        meets_rules = (
            manifest.group_check(opened.manifest) if opened is not None else lambda group: True
        )
        yield Member(identity, swarm, opened, network, successors, meets_rules)


class Successors:
    """Fetches a successor of the manifest from a peer that knows one, stores it, and follows it if
    the operator's policy allows that.

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
        self._waiting = SuccessorStatistics()

    def statistics(self) -> SuccessorStatistics:
        """Return the pending successor, if there is one."""
        return self._waiting

    async def run(self) -> None:
        """Watch the chosen manifest until cancelled. Raises RestartWanted when another one was
        chosen, by the operator or by policy."""
        if (waiting := self._store.successor(self._opened)) is not None:
            self._consider(waiting)
        while True:
            if self._store.current() != self._opened.swarm:
                raise RestartWanted("another manifest was chosen")
            await trio.sleep(POLL_INTERVAL)

    async def fetch(self, peer: str, successor: bytes) -> None:
        """Fetch the successor with this swarm id, which `peer` knows, unless it is stored. Raises
        PeerError."""
        if self._store.successor_id(self._opened.swarm) == successor:
            return
        found = await manifests.fetch(self._network.requests, peer, self._opened.swarm)
        try:
            if found.successor is not None and self._store.add_successor(
                self._opened, found.successor
            ):
                self._consider(found.successor)
        except SwarmNodeError as error:  # a full disk must not end a node
            log.error("cannot store a successor", error=str(error))

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
