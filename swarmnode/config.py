"""What a person sets for one node. What a swarm must agree on is not here but in its manifest.

Frozen, and unknown keys are errors. Every field's description is what `swarmnode run --help` and
docs/configuration.md show. Training keys carry TRL's names.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from swarmnode.model_defaults import EMBEDDED, EMBEDDED_POLICY, defaults_for

QUIET_HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


DEVICES = re.compile(
    r"auto|[1-9]\d{0,2}|(cpu|mps|cuda|xpu)(:\d{1,3})?|cuda:\d{1,3}(,\s*cuda:\d{1,3})+"
)
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
LARGEST = 2**63 - 1
"""Bound of whole numbers: torch's seeds and the messages between processes have 64 bits."""
YEAR_SECONDS = 366 * 86_400
"""Longest wait that can be set: timers overflow at some number."""
NAME_BYTES = 64
"""UTF-8 bytes of a node's or a swarm's name, in its summary and in the manifest."""
TOKENS = 16 * 1024
"""Tokens of a completion that can be shared. `wire.limits` has the same number."""
TEMPERATURE = 100.0
SERVER_TEMPERATURE = 2.0
GROUPS_PER_SECOND = 1000.0
"""Highest values that a manifest may have, as in `wire.limits`, and an inference server."""


def _check_name(text: str) -> str:
    if len(text.encode()) > NAME_BYTES:
        raise ValueError(f"has {len(text.encode())} bytes in UTF-8, at most {NAME_BYTES}")
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _check_hours(text: str) -> str:
    if text and not QUIET_HOURS.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not of the form 22:00-07:00")
    return text


def _check_revision(text: str | None) -> str | None:
    if text is not None and not REVISION.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a commit, tag or branch of at most 64 characters")
    return text


def _count_as_text(value: object) -> object:
    """Take a count of devices as a number, too: `devices = 2`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_devices(text: str) -> str:
    if not DEVICES.fullmatch(text):
        raise ValueError(
            f"{text[:40]!r} names no devices: set auto, cpu, cuda, cuda:1, cuda:0,cuda:2, mps, xpu"
            " or a count such as 2 (an NVIDIA or AMD GPU is cuda)"
        )
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names):
        raise ValueError(f"{text[:40]!r} names a device twice")
    return ",".join(names)


def _check_host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        digits = re.fullmatch(r"[\d.]+", text)  # such as 127.0.0.256
        if digits or not HOST_NAME.fullmatch(text):
            raise ValueError(
                f"{text[:120]!r} is neither an IP address nor a host name: set 127.0.0.1, 0.0.0.0"
                " or ::1, without brackets and port"
            ) from None
    return text


PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Loopback, RFC 1918, unique local (RFC 4193) and link-local addresses."""


def is_private_address(text: str) -> bool:
    """Return True if an IP address is of this machine or of a local network."""
    ip = ipaddress.ip_address(text)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return any(ip.version == each.version and ip in each for each in PRIVATE_NETWORKS)


Name = Annotated[str, AfterValidator(_check_name)]
Seconds = Annotated[float, Field(ge=0, le=YEAR_SECONDS)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: object, info: ValidationInfo) -> object:
        """Refuse `true` where a number is meant, which pydantic takes for 1, and whole numbers
        above 63 bits."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float):
            raise ValueError("Input should be a number, not true or false")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"Input should be less than or equal to {LARGEST}")
        return value


def _default_data_dir() -> Path:
    """Relative for a user without a home directory, which `settings.load` refuses."""
    try:
        return Path(platformdirs.user_state_dir("swarmnode"))
    except RuntimeError:
        return Path("~/.local/state/swarmnode")


class NodeConfig(Section):
    data_dir: Path = Field(default_factory=_default_data_dir)
    """Identity, peer book, trainer state and sockets live here. One node per directory."""
    name: Name = ""
    """Shown on the status page and in logs, and, with share_summary, to other nodes' operators;
    means nothing to their programs."""
    share_summary: bool = True
    """Tell peers this node's name, version, step, held-out reward, counts and uptime, for the swarm
    panel of their status pages."""
    quiet_hours: Annotated[str, AfterValidator(_check_hours)] = ""
    """Local time in which the machine is yours, e.g. `22:00-07:00`: no training steps and no
    sharing. Empty is none."""
    rest_on_battery: bool = False
    """Take no training steps while the machine runs on its battery."""
    rest_above_load: float = Field(default=0.0, ge=0, le=1)
    """Take no training steps while other programs use more than this share of all processors, e.g.
    0.25, and five minutes on. 0 is off."""


class SwarmConfig(Section):
    name: Name = Field(default="local", min_length=1)
    """Nodes with the same name, tasks and wire version form one swarm, where there is no
    manifest."""
    invite: str = Field(default="", max_length=8192)
    """What `swarmnode join` is given; `run` then joins by itself, e.g. in a container. Empty: the
    swarm joined last, if any."""
    id: str = Field(default="", pattern="^([0-9a-f]{64})?$", json_schema_extra={"agreed": True})
    """Swarm id of the manifest that the node runs by; no setting, only the manifest says it."""
    follow: Literal["ask", "founder", "never"] = "ask"
    """When the founder signs a successor: wait for `swarmnode manifest follow`, move there by
    itself, or ignore it."""


class NetworkConfig(Section):
    listen_addrs: list[str] = ["/ip4/127.0.0.1/tcp/0"]
    """Multiaddrs to listen on. Port 0 is chosen once and then kept in the data directory."""
    announce_addrs: list[str] = []
    """Multiaddrs told to peers instead of the listen addresses, e.g. behind a port mapping."""
    initial_peers: list[str] = []
    """Multiaddrs of peers to join through, each ending in /p2p/<peer id>."""
    mdns: bool = True
    """Find peers on the local network."""
    max_connections: int = Field(default=200, ge=2, le=65535)
    """Inbound and outbound connections together."""
    relay: Literal["off", "client", "server", "auto"] = "auto"
    """Circuit relay: `client` is called through relays, `server` relays for others, `auto` does the
    one or the other by whether it can be reached, `off` neither."""
    hole_punching: bool = True
    """Try to replace relayed connections by direct ones."""
    upload_bytes_per_second: int = Field(default=0, ge=0)
    """Sustained upload of this node, all protocols together; above it groups are not published
    or served. 0 is off."""
    download_bytes_per_second: int = Field(default=0, ge=0)
    """Sustained download; above it nothing is fetched until it has caught up. 0 is off."""
    monthly_bytes: int = Field(default=0, ge=0)
    """Upload and download of a calendar month, local time; once used up, sharing pauses until the
    next. 0 is off."""


class LoraSettings(Section):
    r: int = Field(default=0, ge=0, le=1024)
    """Rank; 0 trains all weights."""
    lora_alpha: int = Field(default=16, ge=1, le=65536)
    """Scale of the adapter."""


class ServerSettings(Section):
    url: str = Field(default="", max_length=1024)
    """A vLLM or SGLang server that samples in place of this node's own engine, such as
    `http://127.0.0.1:8000`. `swarmnode serve-command` prints how to start one. Empty: none."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """What runs there."""
    directory: str = ""
    """Where the trainer writes the weights that the server loads, this node's alone: the server
    must see it by the same path. Empty is `served` in the data directory."""
    allow_public: bool = False
    """Use a server at a public address. It has no authentication: whoever reaches it can change
    what it samples from."""

    @model_validator(mode="after")
    def _is_usable(self) -> ServerSettings:
        if not self.url:
            return self
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if (
            host is None
            or self.url.rstrip("/").lower() != f"{parts.scheme}://{parts.netloc}".lower()
        ):
            host = None
        if not host or parts.scheme not in ("http", "https") or "@" in parts.netloc:
            raise ValueError(
                f"policy.server.url: {self.url[:120]!r} is not of the form http://127.0.0.1:8000"
            )
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return self  # the addresses of a name are judged when the trainer connects
        if not self.allow_public and not is_private_address(host):
            raise ValueError(
                f"policy.server.url: {host} is a public address, and such a server has no"
                " authentication: use one on this machine or network, or set"
                " policy.server.allow_public = true"
            )
        return self


class PolicyConfig(Section):
    model: str = Field(default=EMBEDDED, min_length=1)
    """`embedded`, a directory, or a Hugging Face Hub name."""
    revision: Annotated[str | None, AfterValidator(_check_revision)] = None
    """Revision of a Hub model."""
    devices: Annotated[str, BeforeValidator(_count_as_text), AfterValidator(_check_devices)] = (
        "auto"
    )
    """Devices that train, one process each: `auto` (all GPUs that hold the model, else the CPU),
    `cpu`, `cuda` (all GPUs), `cuda:0,cuda:2`, `mps`, `xpu`, or a count, e.g. `2`: the first two
    GPUs, without a GPU two processes on the CPU. An AMD GPU is `cuda`, too."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the model computes in, trained weights being float32; `auto` is bfloat16 where a
    GPU has it, float16 on an NVIDIA GPU of compute capability 7 (V100, T4), else float32."""
    lora: LoraSettings = LoraSettings()
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Keep the frozen base in 8 or 4 bits (bitsandbytes, extra `quant`). Needs an adapter, lora.r >
    0, and a CUDA device."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """Adam's two moments in 32 bits, or in 8 (bitsandbytes, extra `quant`; a CUDA device): 6 bytes
    less per trained parameter."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the trainer; 0 leaves it to torch."""
    chat: dict[str, bool | int | float | str] = Field(default={}, max_length=16)
    """What a chat model is told around every question: `system`, the system prompt, and arguments
    of its template, such as `enable_thinking`. A swarm agrees on it."""
    server: ServerSettings = ServerSettings()

    @property
    def device(self) -> str:
        """The first of `devices`; `auto` where they are only counted."""
        return "auto" if self.devices.isdecimal() else self.devices.partition(",")[0]

    @model_validator(mode="after")
    def _frozen_base(self) -> PolicyConfig:
        if not isinstance(self.chat.get("system", ""), str):
            raise ValueError("policy.chat: system, the system prompt, is a text")
        if self.quantization != "none" and not self.lora.r:
            raise ValueError(
                "a quantised base cannot be trained itself: policy.quantization needs an adapter,"
                " policy.lora.r above 0"
            )
        return self


class DatasetConfig(Section):
    source: str
    """A .jsonl or .parquet file, a name on the Hugging Face Hub, `verifiers:<id>` for an installed
    taskset, or the URL of an OpenEnv server of yours, the task named `env/…` then."""
    prompt: str = "prompt"
    """Column of the question; of an environment, a field of its observation."""
    answer: str = "answer"
    """Column of the right answer; of an environment, the field of an action that holds the
    answer."""
    difficulty: str | None = None
    """Column of how hard a row is; its values, at most 16, are the task's difficulties."""
    verifier: str = "exact"
    """Verifier: exact, numeric, choice, set, boxed, json, json_schema, majority (which needs no
    right answers), or a reward function of your own, `module:function`."""
    extract: str = "auto"
    """Where it stands: tag, boxed, last_number, last_letter, last_line, whole; auto: where it is
    marked, else what suits the verifier."""
    nothing_after: bool = False
    """A completion in which something follows the answer earns 0. Turn it on where the answer has
    a fixed form: strangers can teach what changes no reward."""
    template: str = "{prompt}"
    """What is asked; `{prompt}` is the column's text."""
    turns: int = Field(default=1, ge=1, le=32)
    """Most actions of an episode. Above 1 `verifier` is an environment of your own, a function or a
    class whose methods are tools; of a taskset, its package's `Env` plays; of a server, most
    steps."""
    weights: dict[str, float] = {}
    """Weights of the components that a reward function of yours returns, by name; one that is not
    named weighs 1."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the rows that are never trained on and are there for evaluation."""
    revision: str | None = None
    """Commit or tag on the Hub; needed there."""
    subset: str | None = None
    """Configuration of a dataset on the Hub."""
    split: str = "train"
    """Split on the Hub."""


class TaskConfig(Section):
    names: list[str] = Field(
        default=[
            "rg/chain_sum",
            "rg/basic_arithmetic",
            "rg/base_conversion",
            "rg/spell_backward",
            "rg/gcd",
            "rg/lcm",
            "rg/count_bits",
            "rg/fraction_simplification",
            "rg/products",
        ],
        min_length=1,
    )
    """Tasks to train on, `gym/…` and `textarena/…` among them; other nodes' groups of other tasks
    are not taken."""
    modules: list[str] = []
    """Tasks of your own, `package.module:function`, installed beside swarmnode; name them in
    `names` too. docs/own-task.md."""
    settings: dict[str, dict[str, bool | int | float | str | list[int | float]]] = {}
    """Arguments of such a task, by its name, and `turns`, the most actions of an episode, 1 to 32
    (above 1 it is an episode task); of one of ours its generator's numbers (a list: one for each
    difficulty), and `extract`, where the answer stands."""
    datasets: dict[str, DatasetConfig] = {}
    """Datasets to train on, by a name of yours that begins with `data/`, or with `env/` for a
    server; name it in `names` too. docs/own-task.md has their keys."""
    held_out_per_task: int = Field(default=16, ge=1)
    """Evaluation questions per task."""


class TrainingConfig(Section):
    num_generations: int = Field(default=8, ge=2, le=64)
    """Completions per group, G."""
    groups_per_step: int = Field(default=8, ge=1)
    """Groups in a training batch, B = I + J."""
    target_step_seconds: Seconds = 0.0
    """Fit the groups of a step to this node's speed, between an eighth of groups_per_step and all
    of it; 0 is off."""
    max_completion_length: int = Field(default=EMBEDDED_POLICY.max_completion_length, ge=1)
    """Sampled tokens per completion, at most. The default follows the model."""
    temperature: float = Field(default=1.0, gt=0, le=TEMPERATURE)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    learning_rate: float = Field(default=EMBEDDED_POLICY.learning_rate, gt=0, le=10)
    """AdamW learning rate. The default follows the model."""
    options: list[
        Literal[
            "warmup",
            "linear",
            "cosine",
            "effective_rate",
            "dynamic_sampling",
            "mask_truncated",
            "overlong_shaping",
            "lockstep",
            "continuous",
            "tis",
            "mis",
            "icepop",
            "sequence_tis",
            "sequence_mis",
            "sequence_icepop",
            "curriculum",
            "train_once",
        ]
    ] = []
    """Any of: `warmup`, `linear` or `cosine` (the learning rate; the last two fall to 0 at
    max_steps), `effective_rate` (times the root of the effective share), `dynamic_sampling` (sample
    on until the step's own groups carry a signal), `mask_truncated` or `overlong_shaping` (what was
    cut is left out, or costs reward), `lockstep` or `continuous` (the engine that samples; neither:
    the faster one, found by measuring, or lockstep for answers of at most 32 tokens), `tis` (the
    default), `mis`, `icepop`, `sequence_tis`, `sequence_mis` or `sequence_icepop` (what corrects
    own completions for the policy that sampled them, by token or by sequence), `curriculum` (ask
    where a signal is likely, by own groups; a swarm founded with it lets members
    choose), `train_once` (no group of an earlier step is trained on again)."""
    advantage: Literal["grpo", "dr_grpo", "mc_grpo", "gdpo"] = "grpo"
    """Advantage estimator."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """Objective: clipped token ratios as token mean, sequence mean or over a constant length; one
    ratio per sequence; bounded weights."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the start policy; above 0 keeps a reference copy."""
    per_device_train_tokens: int = Field(default=16384, ge=64)
    """Micro-batch bound, prompt and completion tokens with padding; halved when memory runs out. A
    GPU samples more than that at once where it has room."""
    eval_every: int = Field(default=10, ge=1)
    """Steps between held-out evaluations, at least."""
    eval_budget: float = Field(default=0.05, gt=0, le=1)
    """Share of all sampled tokens that held-out evaluations may take; one that would come too early
    is put off. 1 is no limit."""
    save_every: Seconds = 60.0
    """Seconds of work that a crash costs at most if a step and a write of the state take below half
    of it. 0 saves after every step. Weights and counters are saved that often, whatever their size.
    The optimizer's moments are saved with them as long as whole states stay below 1 TB a day; of a
    3 B model they can be 52 minutes old after a crash."""
    max_steps: int = Field(default=0, ge=0)
    """Stop after this many steps; 0 is never. Who holds a later stage of a crew stays until its
    head has ended, or takes another step."""
    seed: int = Field(default=0, ge=0)
    """Seed of sampling and initialisation."""
    step_interval: Seconds = 0.0
    """Least seconds between the starts of two steps; paces a node that shares its machine."""

    @model_validator(mode="after")
    def _options_fit(self) -> TrainingConfig:
        for one, other in (
            ("linear", "cosine"),
            ("mask_truncated", "overlong_shaping"),
            ("lockstep", "continuous"),
        ):
            if one in self.options and other in self.options:
                raise ValueError(
                    f"training.options: {one} and {other} are two ways to do one thing: choose one"
                )
        corrections = [
            name
            for name in self.options
            if name.removeprefix("sequence_") in ("tis", "mis", "icepop")
        ]
        if len(set(corrections)) > 1:
            raise ValueError(
                f"training.options: {' and '.join(corrections)} are ways to do one thing:"
                " choose one"
            )
        if self.advantage == "mc_grpo" and self.num_generations > 63:
            raise ValueError(
                "training.advantage: mc_grpo samples one completion more than is trained on, and a"
                " group has at most 64: set training.num_generations to 63 or lower"
            )
        falls = [name for name in ("linear", "cosine") if name in self.options]
        if falls and not self.max_steps:
            raise ValueError(
                f"training.options: {falls[0]} falls to 0 at the last step, so training.max_steps"
                " must be above 0"
            )
        return self


class SharingConfig(Section):
    enabled: bool = True
    """Publish groups and train on those of other nodes."""
    groups_per_second: float = Field(default=16.0, gt=0, le=GROUPS_PER_SECOND)
    """Groups accepted from one peer, sustained."""


class WeightsConfig(Section):
    rule: Literal["noloco", "gossip", "off"] = "noloco"
    """How replicas of one policy are averaged: `noloco`, `gossip` (the plain mean of a pair), or
    not at all."""
    sync_every: int = Field(default=50, ge=1)
    """Training steps between two outer steps, H."""
    fragments: int = Field(default=4, ge=1, le=1024)
    """Parts of the policy that are averaged in turn, each once in sync_every steps; never more than
    it has layers."""
    lora_a: Literal["shared", "trained"] = "shared"
    """With an adapter: freeze A at values that all nodes derive alike and average B, which is
    exact; or train and average both."""
    join_seconds: Seconds = 15.0
    """How long a node without state waits for a neighbour to offer its own before it starts from
    the base policy."""
    join_from_one: bool = False
    """Take the state of a single neighbour where there is no second one to compare it with: for two
    nodes that trust each other."""


class StagesConfig(Section):
    mode: Literal["auto", "off", "always"] = "auto"
    """Whether several nodes hold one policy together, each a block of its layers (a stage). `auto`:
    only where the policy does not fit this node. `always`: even where it fits. `off`: never."""
    capacity: int = Field(default=0, ge=0)
    """Most memory in bytes that this node's stage may take. 0 uses the free memory that is measured
    at the start."""
    stages: int = Field(default=0, ge=0, le=8)
    """Number of stages in a crew that this node proposes. 0 lets the planner choose the fastest
    split."""
    codec: Literal["float32", "bfloat16", "int8"] = "int8"
    """Number format of the activations that stages send each other. Gradients are sent in float32
    if this is float32, in bfloat16 otherwise."""
    recovery: Literal["copies", "checkfree", "checkfree+"] = "copies"
    """How a lost stage is restored. `copies`: from a checkpoint that a neighbouring stage stores.
    `checkfree` and `checkfree+` store no checkpoints at neighbours and rebuild the stage from the
    weights of the stages beside it, as in arXiv 2506.15461. `checkfree+` also trains half of the
    micro-batches in swapped order, so that the first and last stage can be rebuilt too."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Training steps between two checkpoints that a stage gives its neighbours. If a node and its
    disk are lost, at most about so many steps of its stage are lost."""
    policy_copy: Literal["off", "disk", "memory", "both"] = "off"
    """Whether this node also stores a copy of the whole policy. `disk`: every stage's checkpoint,
    so that `swarmnode export` works here. `memory`: an int8 copy to sample from, which is much
    faster than sending each token through all stages. `both`: both."""
    wait_seconds: float = Field(default=600.0, gt=0, le=YEAR_SECONDS)
    """How long a node whose stage is trained waits for a crew that can continue with it, before it
    starts again from the base model."""
    trust: Literal["known", "allowed", "anyone"] = "known"
    """Which peers may be in a crew with this node. `known`: peers whose rollouts were useful or
    that trained with us before. `allowed`: the peers in `stages.allowed`. `anyone`: all peers."""
    allowed: list[str] = []
    """Peer ids for `trust = "allowed"`."""


class HttpConfig(Section):
    host: Annotated[str, AfterValidator(_check_host)] = "127.0.0.1"
    """Address of /metrics, /healthz, /readyz, /status and the status page. They are read-only."""
    port: int = Field(default=9464, ge=0, le=65535)
    """0 chooses a free port."""


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where measurements of steps go as well; each needs its package. TensorBoard's files lie in
    the data directory, under `log`."""


class SupervisorConfig(Section):
    startup_seconds: float = Field(default=300.0, gt=0, le=YEAR_SECONDS)
    """A process that has not made its first progress by then is restarted."""
    drain_seconds: float = Field(default=20.0, gt=0, le=YEAR_SECONDS)
    """Time to finish after the first SIGTERM, beside that of the step under way. Saving is not cut
    short."""


class Config(Section):
    """A node's configuration. Precedence: command line, SWARMNODE_* environment, file, default."""

    node: NodeConfig = NodeConfig()
    swarm: SwarmConfig = SwarmConfig()
    network: NetworkConfig = NetworkConfig()
    policy: PolicyConfig = PolicyConfig()
    task: TaskConfig = TaskConfig()
    training: TrainingConfig = TrainingConfig()
    sharing: SharingConfig = SharingConfig()
    weights: WeightsConfig = WeightsConfig()
    stages: StagesConfig = StagesConfig()
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @model_validator(mode="after")
    def _answers_can_be_shared(self) -> Config:
        if self.sharing.enabled and self.training.max_completion_length > TOKENS:
            raise ValueError(
                f"training.max_completion_length: an answer that is shared has at most {TOKENS}"
                " tokens: set that or less, or sharing.enabled = false"
            )
        return self

    @model_validator(mode="after")
    def _server_samples_the_whole_policy(self) -> Config:
        if self.policy.server.url and self.training.top_p < 1:
            raise ValueError(
                "training.top_p: a server's log-probabilities are of what top_p leaves, not of the"
                " policy: set 1, or no policy.server.url"
            )
        if self.policy.server.url and self.training.temperature > SERVER_TEMPERATURE:
            raise ValueError(
                f"training.temperature: a server takes at most {SERVER_TEMPERATURE:g}: set that or"
                " less, or no policy.server.url"
            )
        return self

    @model_validator(mode="after")
    def _defaults_follow_the_model(self) -> Config:
        """Give `training` the model's defaults in place of values that nobody has set. They count
        as not set, so that they follow when a manifest names another model."""
        found = defaults_for(self.policy.model, self.policy.lora.r).values()
        unset = {k: v for k, v in found.items() if k not in self.training.model_fields_set}
        if any(getattr(self.training, key) != default for key, default in unset.items()):
            training = self.training.model_copy(update=unset)
            training.model_fields_set.difference_update(unset)
            object.__setattr__(self, "training", training)
        return self
