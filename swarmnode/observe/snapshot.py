"""Everything a node tells about itself, in one frozen tree. Metrics, health, /status and the page are functions of it.

`node.py` fills it from the parts' `statistics()`, as often as somebody asks. Plain numbers, strings and dicts only: msgspec
turns it into JSON as it is, and nothing here can be held against a running part.

Counters are totals since the process that counts them started; `None` means not measured (yet), and its series is left out.
A dict's keys are a closed set chosen by this node's code (a reason, an outcome, a guard), never a string that came from a peer.
"""

from __future__ import annotations

import msgspec

from swarmnode.link.messages import Report


class Histogram(msgspec.Struct, frozen=True):
    """Observations by size. `counts[i]` holds those at most `bounds[i]`, not cumulated; the last one those above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """len(bounds) + 1."""
    sum: float = 0.0


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
    trainer: bool = True
    """False for a node that only helps others to meet."""


class Health(msgspec.Struct, frozen=True):
    network_ready: bool = False
    """The host listens and gossip has joined the topic."""
    policy_loaded: bool = False
    """The trainer has connected and is past loading."""
    joined: bool = False
    """At least one peer has been connected since the start."""
    draining: bool = False


class TrainerView(msgspec.Struct, frozen=True):
    """The trainer as seen over the link. `report` is the last one, however old."""

    connected: bool = False
    report: Report | None = None
    age_seconds: float | None = None
    """Since the last report: a finished step, an evaluation or a change of phase."""
    step_seconds: Histogram | None = None
    pid: int | None = None


class PoolView(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0
    peers: int = 0
    oldest_seconds: float | None = None
    """Age of the oldest group; None when empty."""
    max_groups: int = 0
    max_bytes: int = 0
    dropped: dict[str, int] = {}
    """Groups that left unused, or never got in: expired_age, expired_version, evicted_full, evicted_peer_share, refused."""


class RolloutsView(msgspec.Struct, frozen=True):
    """Groups on their way from and to peers. received = admitted + Σ ignored + Σ rejected + those still being scored."""

    published: int = 0
    publish_failures: int = 0
    received: int = 0
    admitted: int = 0
    ignored: dict[str, int] = {}
    """By reason of rollouts.reasons; blameless: stale, duplicate, not for us."""
    rejected: dict[str, int] = {}
    """By reason of rollouts.reasons; each cost somebody reputation."""
    drawn: int = 0
    used: int = 0
    """Groups of peers that the trainer trained on."""
    judged: dict[str, int] = {}
    """Drawn groups by the trainer's verdict: used, forged_ids, spot_check, mean_logprob, untokenizable."""
    staleness: dict[int, int] = {}
    """Groups given to the trainer, by own policy versions since they arrived."""
    fetches: dict[str, int] = {}
    """Announced groups by outcome of fetching them."""
    pool: PoolView = PoolView()


class WeightsView(msgspec.Struct, frozen=True):
    """Averaging as the network process sees it; what the gate and the outer steps did is in the trainer's report."""

    enabled: bool = False
    phase: str = ""
    """Of the exchange under way: idle, proposed, paired, transfer, verify, apply."""
    candidates: int = 0
    """Connected peers with the same policy."""
    outcomes: dict[str, int] = {}
    """Tries and exchanges by how they ended (weights.pairing)."""
    failures: dict[str, int] = {}
    """Failed exchanges by cause (weights.exchange)."""
    judged: dict[str, int] = {}
    """Partners' weights by what the gate made of them (weights.outcomes)."""
    exchange_seconds: float = 0.0
    """Of all finished exchanges together."""
    received_bytes: int = 0
    """Of their payloads."""
    adoptions: dict[str, int] = {}
    """Neighbours' states by what became of them (weights.outcomes)."""
    states_served: int = 0
    pairs: dict[str, int] = {}
    """Exchanges by peer; shown, and never a metric's label."""


class NetworkView(msgspec.Struct, frozen=True):
    peers_in: int = 0
    peers_out: int = 0
    peers_known: int = 0
    mesh: int = 0
    """Peers in the gossip mesh of the swarm's topic."""
    dials: int = 0
    dial_failures: int = 0
    gossip: dict[str, int] = {}
    """Messages by event: received, delivered, duplicate, published, and each reason for dropping one."""
    requests: dict[str, int] = {}
    """Requests sent, by outcome: ok, timeout, error, …"""
    requests_served: dict[str, int] = {}
    """Requests answered, by outcome."""
    bytes: dict[str, dict[str, int]] = {}
    """protocol → {"in": bytes, "out": bytes}."""
    guards: dict[str, int] = {}
    """How often each guard around libp2p stepped in, by its name."""
    greylisted: int = 0
    banned: int = 0
    reach: str = "unknown"
    """Whether strangers can dial this node: public, private (outbound only, or through a relay), unknown."""
    relayed: int = 0
    """Peers connected through a relay only."""
    relays: int = 0
    """Relays through which this node can be called."""
    relay_circuits: int = 0
    """Circuits that this node carries for others now."""
    relay_bytes: int = 0
    """Carried for others."""
    punches: dict[str, int] = {}
    """Peers by outcome of hole punching: succeeded, failed, refused."""


class SlotRow(msgspec.Struct, frozen=True):
    """One stage of this node's crew, as the crew's roster and heartbeats have it."""

    stage: int
    peer: str = ""
    """Who holds it; empty while it is vacant."""
    state: str = "vacant"
    """vacant, claimed, loading, probation, active, suspect, draining."""
    stage_epoch: int = 0
    """How many holders it has had."""
    step: int = 0
    """Steps that it has taken."""
    layers: int | None = None


class StagesView(msgspec.Struct, frozen=True):
    """The crew of which this node holds a stage, and that stage. Not `enabled` on a node that holds its policy alone."""

    enabled: bool = False
    """This node would hold a stage, or does."""
    state: str = "none"
    """Of the crew: none, forming, running, paused, recovering."""
    crew: str = ""
    """Id, hex; empty outside a crew."""
    roster_epoch: int = 0
    fenced: bool = False
    """No majority of the crew hears this node: it takes no step."""
    slots: list[SlotRow] = []
    offers: int = 0
    """Other nodes that would hold a stage."""
    events: dict[str, int] = {}
    """What happened in the crew, as often (stages.events.NOTES)."""
    standing_seconds: float | None = None
    """Since the crew last took steps; 0 while it does."""
    last_recovery_seconds: float | None = None
    recovery_seconds: Histogram | None = None
    """From the crew's standing still to its running again."""
    heartbeat_seconds: float | None = None
    """That the last heartbeat waited for its answer."""
    unanswered: dict[str, int] = {}
    """Requests to other members without an answer, by message."""
    malformed: int = 0
    """Requests of others that were none."""
    unsaved: int = 0
    """Votes that were not cast because they could not be written down."""
    trainer_restarts: int = 0
    """Times that our trainer was ended because it had work and did none."""
    stage: int | None = None
    """Ours, and what follows is of it."""
    phase: str = ""
    """loading, ready, probation, active, failed, idle; empty while there is no trainer that has it."""
    step: int = 0
    rung: str = ""
    """Where its weights came from, R0 to R6; empty for a founding member's."""
    rungs: dict[str, int] = {}
    """How often each was taken."""
    rung_seconds: float | None = None
    """That the last one took."""
    shadow_step: int | None = None
    """Of the newest copy of it that a neighbour has."""
    shadow_age_steps: int | None = None
    """Steps that its loss would cost where only shadows are left: all of them while nobody has a copy."""
    probe_kl: float | None = None
    """Nats per token, of the gate after the last recovery."""
    bubble_share: float | None = None
    tokens_per_second: float | None = None
    reason: str = ""
    """Why it failed, or the crew was left."""
    dropped: dict[str, int] = {}
    """Frames by why they counted for nothing (stages.fence, stages.frames)."""
    streams: dict[str, int] = {}
    """Open ones to other stages, by kind: frames, state."""
    streams_lost: dict[str, int] = {}
    """Ended by the other side, by kind."""
    streams_refused: dict[str, int] = {}
    """Of others, by reason (stages.pipes)."""
    bytes: dict[str, dict[str, int]] = {}
    """kind → {"in": bytes, "out": bytes}."""
    throttled_seconds: float = 0.0
    """That streams waited for the byte budget."""


class ClaimRow(msgspec.Struct, frozen=True):
    """What another node says of itself. Only `peer` is proved: it signed this."""

    peer: str
    name: str = ""
    version: str = ""
    step: int = 0
    policy_version: int = 0
    reward: float | None = None
    """Held-out."""
    published: int = 0
    peers: int = 0
    uptime_seconds: int = 0
    age_seconds: float = 0.0
    """Since it was signed, by our clock."""
    direct: bool = False
    """Whether it told us itself, rather than another peer."""


class SwarmView(msgspec.Struct, frozen=True):
    """The swarm as its nodes describe themselves: claimed, not verified."""

    reporting: int = 0
    """Peers with a summary that is not too old; `rows` may be fewer."""
    reward_median: float | None = None
    policy_version_median: float | None = None
    rows: list[ClaimRow] = []
    heard: dict[str, int] = {}
    """Summaries by what became of them (p2p.summaries)."""
    clock_offset_seconds: float | None = None
    """By how much our peers' clocks are ahead of ours, their median; None while fewer than two have told."""


class DiskView(msgspec.Struct, frozen=True):
    """Of the file system that holds the data directory. None where it cannot be asked."""

    free_bytes: int | None = None
    """For this user."""
    total_bytes: int | None = None


class BudgetView(msgspec.Struct, frozen=True):
    """What this node may send and receive, and whether it shares at all now."""

    paused: dict[str, bool] = {}
    """Why the node does not listen to the swarm: quiet_hours, month, download."""
    level_bytes: dict[str, float] = {}
    """What may go by at once, below zero in debt: "in" and "out", each only with a cap."""
    month_bytes: dict[str, int] = {}
    """"in" and "out" in this calendar month."""
    month_limit_bytes: int | None = None
    refused: dict[str, int] = {}
    """What was left out for want of budget: publish, forward, serve, fetch."""


class SupervisorView(msgspec.Struct, frozen=True):
    """Read from `<data_dir>/run/supervisor.json`. Empty when the node runs without a supervisor."""

    restarts: dict[str, int] = {}
    """By process: network, trainer."""
    stalls: dict[str, int] = {}
    """Restarts because a process made no progress, by process."""
    last_recovery_seconds: float | None = None
    recovery_seconds: Histogram | None = None


class ProcessUse(msgspec.Struct, frozen=True):
    memory_bytes: int = 0
    """Resident."""
    cpu_seconds: float = 0.0
    """User and system, since the process started."""


class PeerRow(msgspec.Struct, frozen=True):
    """One line of the page's table. Peer ids are shown here and never become a metric's label."""

    peer: str
    direction: str = ""
    """in, out, or empty when not connected."""
    admitted: int = 0
    used: int = 0
    rejected: int = 0
    reputation: float = 0.0
    last_seen_seconds: float | None = None


class LogLine(msgspec.Struct, frozen=True):
    at: float
    """Unix seconds."""
    level: str
    logger: str
    text: str


class NodeSnapshot(msgspec.Struct, frozen=True):
    at: float = 0.0
    """Unix seconds when this was taken."""
    node: NodeInfo = NodeInfo()
    health: Health = Health()
    trainer: TrainerView = TrainerView()
    rollouts: RolloutsView = RolloutsView()
    weights: WeightsView = WeightsView()
    stages: StagesView = StagesView()
    network: NetworkView = NetworkView()
    swarm: SwarmView = SwarmView()
    budget: BudgetView = BudgetView()
    disk: DiskView = DiskView()
    supervisor: SupervisorView = SupervisorView()
    scorer_restarts: int = 0
    """Of the network process's scorer; the trainer's own is in its report."""
    processes: dict[str, ProcessUse] = {}
    loop_lag_seconds: float = 0.0
    """How late the network process's event loop last woke a task that had asked for a moment."""
    peers: list[PeerRow] = []
    logs: list[LogLine] = []

    @property
    def leads(self) -> bool:
        """It samples, learns and evaluates itself. Of a crew only the head does; the others have nothing of that to report."""
        return not self.stages.enabled or self.stages.stage == 0
