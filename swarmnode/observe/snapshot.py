"""Everything that a node tells of itself, in one frozen tree. Metrics, health, /status, the page
and `swarmnode top` are functions of it.

Most of its nodes are the `statistics()` of the parts themselves: what a part counts is defined
beside the counting, and read from here by its path (`network.peers.dials`). msgspec turns the tree
into JSON as it is, and nothing in it can be held against a running part.

Counters are totals since the process that counts them started; `None` means not measured (yet). The
keys of a dict are a closed set chosen by this node's code (a reason, an outcome, a guard) except
where a docstring says that they are peers: those never become a metric's label.
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
from swarmnode.rollouts.exchange import ExchangeStatistics
from swarmnode.stages.service import StagesStatistics
from swarmnode.swarm.successor import SuccessorStatistics
from swarmnode.tasks.tally import ScorerStatistics
from swarmnode.weights.service import WeightsStatistics


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
    """Multiaddrs that a friend can put into initial_peers, peer id included."""
    started_at: float = 0.0
    """Unix seconds."""
    sharing: bool = True
    invite: str = ""
    """To the swarm, for whoever wants to join; empty where no manifest names an address."""
    trainer: bool = True
    """False for a node that only helps others to meet."""


class Health(msgspec.Struct, frozen=True):
    network_ready: bool = False
    """The host listens and serves listings."""
    policy_loaded: bool = False
    """The trainer has connected and is past loading."""
    joined: bool = False
    """At least one peer has been connected since the start."""
    draining: bool = False


class PeerRow(msgspec.Struct, frozen=True):
    """One line of the page's table of peers."""

    peer: str
    direction: str = ""
    """in, out, or empty when not connected."""
    admitted: int = 0
    used: int = 0
    rejected: int = 0
    reputation: float = 0.0
    last_seen_seconds: float | None = None


class NodeSnapshot(msgspec.Struct, frozen=True):
    at: float = 0.0
    """Unix seconds when this was taken."""
    node: NodeInfo = NodeInfo()
    health: Health = Health()
    trainer: TrainerStatistics = TrainerStatistics()
    rollouts: ExchangeStatistics = ExchangeStatistics()
    weights: WeightsStatistics = WeightsStatistics()
    """Averaging as the network process sees it; what the gate and the outer steps did is in the
    trainer's report."""
    stages: StagesStatistics = StagesStatistics()
    """The crew of which this node holds a stage, and that stage."""
    network: NetworkStatistics = NetworkStatistics()
    swarm: SummaryStatistics = SummaryStatistics()
    budget: BudgetStatistics = BudgetStatistics()
    disk: DiskStatistics = DiskStatistics()
    """The file system that holds the data directory."""
    supervisor: SupervisorStatistics = SupervisorStatistics()
    scorer: ScorerStatistics = ScorerStatistics()
    """The network process's scorer; the trainer's own is in its report."""
    successor: SuccessorStatistics = SuccessorStatistics()
    processes: dict[str, ProcessStatistics] = {}
    """By process: network, trainer, scorer."""
    loop_lag_seconds: float = 0.0
    """How late the network process's event loop last woke a task that had asked for a moment."""
    peers: list[PeerRow] = []
    logs: list[LogLine] = []

    @property
    def leads(self) -> bool:
        """Whether it samples, learns and evaluates itself. Of a crew only the head does; the others
        have nothing of that to report."""
        return not self.stages.enabled or self.stages.crew.stage == 0
