"""The state of a node as one frozen tree. Metrics, health, /status, the page and
`swarmnode status` are functions of it.

Most branches are the results of the parts' `statistics()`. So a number is defined in the module
that counts it, and read here by its path, such as `network.peers.dials`. msgspec encodes the tree
as JSON.

Counters are totals since the start of the process that counts; `None` means not measured. The keys
of a dict are chosen by this node's code (a reason, an outcome, a guard), unless a docstring says
that they are peers. Peers never become the label of a metric.
"""

from __future__ import annotations

import msgspec

from swarmnode.observe.logfile import LogLine
from swarmnode.observe.watch import (
    DiskStatistics,
    ProcessStatistics,
    SupervisorStatistics,
    TrainerStatistics,
)
from swarmnode.p2p.budget import BudgetStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.summaries import SummaryStatistics
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.swarm.successor import SuccessorStatistics
from swarmnode.tasks.child import ScorerStatistics
from swarmnode.weights.network.swaps import WeightsStatistics


class NodeInfo(msgspec.Struct, frozen=True):
    peer: str = ""
    """Peer id, base58."""
    name: str = ""
    version: str = ""
    swarm: str = ""
    """Swarm id, hex."""
    swarm_name: str = ""
    model: str = ""
    tasks: list[str] = []
    addrs: list[str] = []
    """Multiaddrs for the initial_peers of another node, with the peer id."""
    started_at: float = 0.0
    """Unix seconds."""
    sharing: bool = True
    invite: str = ""
    """Invite to the swarm, or the command that prints it if it contains a secret; empty if the
    manifest has no address."""
    quiet_hours: str = ""
    """`node.quiet_hours`."""
    trainer: bool = True
    """False for a bootstrap node, which does not train."""


class Health(msgspec.Struct, frozen=True):
    policy_loaded: bool = False
    """The trainer is connected and has loaded the policy."""
    draining: bool = False


class PeerRow(msgspec.Struct, frozen=True):
    """One row of the page's table of peers."""

    peer: str
    direction: str = ""
    """in, out, or empty if not connected."""
    admitted: int = 0
    used: int = 0
    rejected: int = 0
    reputation: float = 0.0
    last_seen_seconds: float | None = None


class Gained(msgspec.Struct, frozen=True):
    """Groups given to peers and gained from them."""

    given: int = 0
    """Groups of this node that peers have trained on, as they report."""
    given_to: int = 0
    """Number of these peers."""
    used: int = 0
    """Groups of peers that this node has trained on; restarts do not reset it."""
    tokens_saved: int = 0
    """Estimate: `used` × the mean number of tokens sampled for an own group."""


class NodeSnapshot(msgspec.Struct, frozen=True):
    at: float = 0.0
    """Time of the snapshot in Unix seconds."""
    node: NodeInfo = NodeInfo()
    health: Health = Health()
    trainer: TrainerStatistics = TrainerStatistics()
    rollouts: ExchangeStatistics = ExchangeStatistics()
    weights: WeightsStatistics = WeightsStatistics()
    """Averaging in the network process. Gate and outer steps are in the trainer's report."""
    stages: StagesStatistics = StagesStatistics()
    """This node's crew and its stage."""
    network: NetworkStatistics = NetworkStatistics()
    swarm: SummaryStatistics = SummaryStatistics()
    gained: Gained = Gained()
    budget: BudgetStatistics = BudgetStatistics()
    disk: DiskStatistics = DiskStatistics()
    """The file system that holds the data directory."""
    supervisor: SupervisorStatistics = SupervisorStatistics()
    scorer: ScorerStatistics = ScorerStatistics()
    """Scorer of the network process. That of the trainer is in its report."""
    successor: SuccessorStatistics = SuccessorStatistics()
    processes: dict[str, ProcessStatistics] = {}
    """Memory and CPU time by process: network, trainer, scorer."""
    loop_lag_seconds: float = 0.0
    """Delay of the last timer in the network process."""
    peers: list[PeerRow] = []
    logs: list[LogLine] = []
    warnings: list[LogLine] = []
    """Newest lines above level info, which fast steps do not push out."""

    @property
    def leads(self) -> bool:
        """True if this node samples, trains and evaluates. In a crew, only the head does."""
        return not self.stages.enabled or self.stages.crew.stage == 0
