"""The messages that the trainer and the network process send each other over their Unix socket.

Both ends are ours and on one machine, but frames are still typed and capped. No torch here: the
network process imports this.
"""

from __future__ import annotations

import msgspec

from swarmnode.drops import DropCounts
from swarmnode.policy.engine.servers import ServerStatistics
from swarmnode.rollouts.groups import Draw, Drawn, ExternalGroup, Judged, OwnGroup
from swarmnode.stages import wire
from swarmnode.weights import local

__all__ = [
    "FRAME_BYTES",
    "Draw",
    "Drawn",
    "ExternalGroup",
    "Hello",
    "Judged",
    "OwnGroup",
    "Report",
    "ToNetwork",
    "ToTrainer",
    "WeightsReport",
    "Welcome",
]

FRAME_BYTES = 64 * 2**20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Trainer → network, first frame of every connection."""

    model: bytes
    """32 bytes: fingerprint of architecture and base weights."""
    tokenizer: bytes
    """32 bytes."""
    policy_version: int
    tokens_per_text_byte: float = 1.0
    """About how many of our tokens a byte of another tokenizer's text becomes."""
    pid: int = 0
    replica: local.ReplicaFacts | None = None
    """None where nothing is averaged."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Network → trainer, answer to Hello."""

    peer: str
    """This node's peer id, base58."""
    swarm: bytes
    """32 bytes: swarm id."""


class WeightsReport(msgspec.Struct, frozen=True):
    """What the trainer's half of averaging has done. Totals are counted as in Report."""

    rule: str = ""
    fragments: int = 1
    outer_step: int = 0
    """Number of outer steps of the fragment that is furthest behind."""
    exchanges_total: int = 0
    solo_steps_total: int = 0
    reverts_total: int = 0
    """Since the process started, as are `outcomes` and `stall_seconds_total`."""
    distance: float | None = None
    """‖θ_j − θ_i‖ / ‖θ_i‖ at the last exchange: how far replicas are apart."""
    clip_ratio: float | None = None
    """Mean share of a partner's difference that was taken; 1 when nothing is clipped."""
    lag: float | None = None
    """Outer steps that the last partner was behind us; negative when ahead."""
    momentum_norm: float = 0.0
    probation: bool = False
    outcomes: dict[str, int] = {}
    """Number of exchanges by the gate's verdict."""
    stall_seconds_total: float = 0.0
    """Seconds for which training stood still, for the probe and commits, or may have, while a copy
    kept the optimizer from the weights."""


class CardUse(msgspec.Struct, frozen=True):
    """A GPU on which this node trains."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    held_bytes: int
    """By this node, as its allocator counts; what is neither free nor held is others'."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Trainer → network after every step, evaluation and change of phase. Counters are totals since
    the trainer's first start.

    `None` means not measured (yet); the exporter leaves the series out.
    """

    phase: str
    """loading, generating, training, evaluating, paused, draining."""
    step: int = 0
    policy_version: int = 0
    step_seconds: float | None = None
    generate_seconds: float | None = None
    train_seconds: float | None = None
    reward_own: float | None = None
    reward_external: float | None = None
    reward_held_out: float | None = None
    reward_held_out_error: float | None = None
    """Standard error of `reward_held_out` over its questions."""
    reward_held_out_start: float | None = None
    loss: float | None = None
    entropy: float | None = None
    kl: float | None = None
    clip_fraction: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    zero_advantage_share: float | None = None
    external_share: float | None = None
    correction_mean: float | None = None
    """Mean weight of the external groups' completions, in [0, 1]."""
    effective_own: float | None = None
    """Effective sample size ÷ sample size of the own tokens' weights, in (0, 1]; None in a crew."""
    effective_external: float | None = None
    own_gap: float | None = None
    """Mean |Δ log-probability| of the own tokens between what sampled them and the policy that is
    trained, nats; None in a crew."""
    generation_lag: float | None = None
    """Updates between the first token of an own group and the step that learnt from it, mean over
    the step's groups."""
    generation_rows: float | None = None
    """Tokens sampled in a decoding step, mean over the last step."""
    episodes_total: int = 0
    """Episodes that were played to their ends for training."""
    episode_turns: float | None = None
    """Mean number of actions of the last step's episodes; None without episodes."""
    environment_share: float | None = None
    """Share of the last step's sampling time in which environments were waited for."""
    completion_tokens: float | None = None
    """Mean length of the completions sampled in the last step."""
    completion_tokens_p95: int | None = None
    completion_cut_share: float | None = None
    """Share of them that ended at the length limit."""
    own_groups: int = 0
    """I of the last step."""
    external_groups: int = 0
    """J of the last step."""
    replayed_groups: int = 0
    """Groups of earlier steps, own and peers', that the last step has trained on once more."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
    """Sampled, in evaluations too."""
    evaluation_tokens_total: int = 0
    tokens_per_second: float | None = None
    gradient_agreement: float | None = None
    """Cosine of own and external gradients."""
    drift: float | None = None
    """Part of strangers' rewarded answers that have a token, less the part of own ones, of the
    task and token where that is largest; None without evidence."""
    device: str = ""
    dtype: str = ""
    device_memory_bytes: int | None = None
    cards: list[CardUse] = []
    memory_bytes: int = 0
    oom_retries_total: int = 0
    engine_rebuilds: int = 0
    """Times that the engine that samples was built anew, since the process started."""
    engine: str = ""
    """Which engine samples: lockstep, continuous or served; empty before anything was sampled."""
    server: ServerStatistics | None = None
    """None where no server is configured."""
    micro_batch_tokens: int = 0
    generation_tokens: int = 0
    scorer_restarts_total: int = 0
    reward_by_task: dict[str, float] = {}
    """Mean reward of own completions by task, of the last step that asked it."""
    top_answer_share: float | None = None
    """Share of the latest majorities that chose the most frequent answer; None without a verifier
    `majority`."""
    signals: dict[str, float] = {}
    """The share of groups with a signal that is expected, by task and difficulty; empty where both
    follow from a question's number."""
    evidence: dict[str, float] = {}
    """Own groups that a curriculum's expectations rest on, by the names of `signals`."""
    reward_errors: dict[str, int] = {}
    """Completions whose reward failed, by task, since the process started."""
    last_reward_error: str = ""
    """The last of these in one line, the task first."""
    state_saved_step: int = 0
    drops: dict[str, DropCounts] = {}
    """Counts of dropped items, by the fields of `TrainerDrops`."""
    peers_used: dict[str, int] = {}
    """External groups trained on in total, by peer id."""
    weights: WeightsReport | None = None
    """None where nothing is averaged."""


ToNetwork = Hello | OwnGroup | Draw | Judged | Report | local.FromTrainer | wire.FromTrainer
ToTrainer = Welcome | Drawn | local.ToTrainer | wire.ToTrainer
