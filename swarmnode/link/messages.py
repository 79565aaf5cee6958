"""Messages between the trainer and the network process over their Unix socket.

Both ends belong to the same node, but frames are still typed and bounded. No torch here, because
the network process imports this module.
"""

from __future__ import annotations

import msgspec

from swarmnode.drops import DropCounts
from swarmnode.policy.engine.vllm import ServerStatistics
from swarmnode.rollouts.groups import Draw, Drawn, Judged, OwnGroup
from swarmnode.stages import crew_messages
from swarmnode.stages.crew_messages import FromTrainer
from swarmnode.weights import local
from swarmnode.weights.local import WeightsReport

FRAME_BYTES = 64 * 2**20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Trainer → network, first message of every connection."""

    model: bytes
    """32 bytes: fingerprint of architecture and base weights."""
    tokenizer: bytes
    """32 bytes: hash of the tokenizer."""
    policy_version: int
    tokens_per_text_byte: float = 1.0
    """Estimated number of own tokens per byte of text from another tokenizer."""
    pid: int = 0
    replica: local.ReplicaFacts | None = None
    """The averaged weights; None if averaging is off."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Network → trainer, answer to Hello."""

    peer: str
    """This node's peer id, base58."""
    swarm: bytes
    """32 bytes: swarm id."""


class CardUse(msgspec.Struct, frozen=True):
    """A GPU on which this node trains."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    held_bytes: int
    """Bytes allocated by this node. Memory that is neither free nor held belongs to other
    programs."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Trainer → network after every step, evaluation and change of phase. Counters are totals since
    the trainer's first start.

    `None` means not measured (yet); the exporter omits the series.
    """

    phase: str
    """loading, generating, training, evaluating, paused or draining."""
    activity: str = ""
    """Progress within the phase, such as `evaluating 64 of 576`; empty if nothing is known."""
    step: int = 0
    max_steps: int = 0
    """`training.max_steps`."""
    policy_version: int = 0
    step_seconds: float | None = None
    generate_seconds: float | None = None
    train_seconds: float | None = None
    reward_own: float | None = None
    reward_external: float | None = None
    held_out_questions: str = ""
    """Name of the held-out questions; other tasks have another name."""
    reward_held_out: float | None = None
    reward_held_out_error: float | None = None
    """Standard error of `reward_held_out` over its questions."""
    reward_held_out_step: int | None = None
    """Step after which `reward_held_out` was measured."""
    reward_held_out_start: float | None = None
    """First `reward_held_out` on these questions."""
    reward_held_out_start_error: float | None = None
    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    zero_advantage_share: float | None = None
    external_share: float | None = None
    effective_own: float | None = None
    """Effective sample size ÷ sample size of the own tokens' weights, in (0, 1]; None in a crew."""
    effective_external: float | None = None
    own_gap: float | None = None
    """Mean |Δ log-probability| of the own tokens between the sampling policy and the trained
    policy, in nats; None in a crew."""
    episodes_total: int = 0
    """Number of completed training episodes."""
    episode_turns: float | None = None
    """Mean number of actions of the last step's episodes; None without episodes."""
    environment_share: float | None = None
    """Share of the last step's sampling time spent waiting for environments."""
    completion_tokens: float | None = None
    """Mean length of the completions sampled in the last step."""
    completion_tokens_p95: int | None = None
    completion_cut_share: float | None = None
    """Share of these completions that ended at the length limit."""
    cut_rewarded_share: float | None = None
    """Share of these completions that ended at the length limit and earned 1; None if they are not
    trained on (`mask_truncated`)."""
    own_groups: int = 0
    """Own groups of the last step (I)."""
    external_groups: int = 0
    """External groups of the last step (J)."""
    own_groups_total: int = 0
    external_groups_total: int = 0
    tokens_total: int = 0
    """Sampled tokens, including evaluations."""
    evaluation_tokens_total: int = 0
    tokens_per_second: float | None = None
    device: str = ""
    dtype: str = ""
    device_memory_bytes: int | None = None
    cards: list[CardUse] = []
    memory_bytes: int = 0
    oom_retries_total: int = 0
    engine: str = ""
    """The sampling engine: lockstep, continuous or served; empty before the first sample."""
    server: ServerStatistics | None = None
    """None without a configured server."""
    micro_batch_tokens: int = 0
    generation_tokens: int = 0
    scorer_restarts_total: int = 0
    reward_by_task: dict[str, float] = {}
    """Mean reward of own completions by task, from the last step that used the task."""
    learning: str = ""
    """`unmoved` or `collapsed`, see `trainer.learning`; empty for a run that may be learning."""
    learning_problem: str = ""
    """The problem and its remedy in one line."""
    reward_errors: dict[str, int] = {}
    """Completions whose reward function failed, by task, since the process started."""
    last_reward_error: str = ""
    """The last of these errors in one line, starting with the task."""
    refusals: dict[str, int] = {}
    """Actions that the scorer's sandbox refused, by task, since the process started."""
    last_refusal: str = ""
    """The last of these actions, starting with the task."""
    state_saved_step: int = 0
    state_due_at: float | None = None
    """Unix time at which a save of the state became due that is not on disk; None if none is
    due."""
    state_error: str = ""
    """Error of the last save of the state; empty if it succeeded."""
    drops: dict[str, DropCounts] = {}
    """Counts of dropped items, by the fields of `TrainerDrops`."""
    peers_used: dict[str, int] = {}
    """Total number of external groups trained on, by peer id."""
    weights: WeightsReport | None = None
    """None if nothing is averaged."""


ToNetwork = Hello | OwnGroup | Draw | Judged | Report | local.FromTrainer | FromTrainer
ToTrainer = Welcome | Drawn | local.ToTrainer | crew_messages.ToTrainer
