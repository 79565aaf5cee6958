"""From what was seen to what it means. Pure: facts in, verdicts out, each with what is wrong, why,
and what to do.

ok     as it should be           warn   the node runs, but look at it           fail   it will not
run, or not as configured
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.install import install_command, torch_remedy
from swarmnode.model_defaults import EMBEDDED, defaults_for
from swarmnode.settings import CUDA_TORCH, unsuited
from swarmnode.wire.limits import CLOCK_SKEW_SECONDS

UNAVAILABLE, RETRY, REFUSED, CONFIGURATION = 69, 75, 77, 78
GRAVEST = (CONFIGURATION, REFUSED, UNAVAILABLE, RETRY)
"""The exit code tells the first of these that failed: what a person has to mend comes before what
may mend itself."""

NOT_OURS = "not an address of this machine"
TAKEN = "another process listens there"
LEAST_FREE_BYTES = 256 * 2**20
COMFORTABLE_FREE_BYTES = 5 * 2**30
FUTURE_SECONDS = 60.0
SPARE_FILES = 512
"""Descriptors beside connections: files, scorers, HTTP."""


@dataclass(frozen=True)
class Check:
    name: str
    level: Literal["ok", "warn", "fail"]
    what: str
    todo: str = ""
    exit_code: int = 0
    """What a failure ends `doctor` with."""


def ok(name: str, what: str) -> Check:
    return Check(name, "ok", what)


def warn(name: str, what: str, todo: str) -> Check:
    return Check(name, "warn", what, todo)


def fail(name: str, what: str, todo: str, exit_code: int) -> Check:
    return Check(name, "fail", what, todo, exit_code)


def exit_code(checks: Sequence[Check]) -> int:
    """0 without failures, else the gravest of their codes."""
    codes = {check.exit_code for check in checks if check.level == "fail"}
    return next((code for code in GRAVEST if code in codes), min(codes, default=0))


# ---- data directory and key ----------------------------------------------------------------------


@dataclass(frozen=True)
class DirectoryFacts:
    path: str
    problem: str = ""
    """Why a file cannot be written there."""
    mode: int = 0o700
    free_bytes: int = 0
    state_bytes: int = 0
    """Size of the trainer's state, which is written beside the old one."""
    running_pid: int | None = None
    """Process id of the node that runs in it."""


def check_directory(f: DirectoryFacts) -> Check:
    name = "data directory"
    if f.problem:
        return fail(
            name,
            f"{f.path}: {f.problem}",
            "give it to this user, or set node.data_dir to one that is writable",
            UNAVAILABLE,
        )
    running = f", used by the node with pid {f.running_pid}" if f.running_pid else ""
    if f.mode & 0o022:
        return warn(
            name, f"{f.path}: others may write to it (mode {f.mode:04o})", f"chmod 700 {f.path}"
        )
    return ok(name, f"{f.path} is writable{running}")


def check_disk(f: DirectoryFacts) -> Check:
    name, free = "disk", size(f.free_bytes)
    if f.problem:
        return warn(name, "not measured: the data directory cannot be used", "see above")
    if f.free_bytes < LEAST_FREE_BYTES:
        return fail(
            name,
            f"{free} free at {f.path}",
            "free some space: training goes on without, but nothing would be saved",
            UNAVAILABLE,
        )
    if f.free_bytes < 2 * f.state_bytes:
        return warn(
            name,
            f"{free} free, the trainer's state takes {size(f.state_bytes)} and is written beside"
            " the old one",
            "free some space",
        )
    if f.free_bytes < COMFORTABLE_FREE_BYTES:
        return warn(
            name,
            f"{free} free at {f.path}",
            "models and states are large; free some space or set node.data_dir elsewhere",
        )
    return ok(name, f"{free} free")


@dataclass(frozen=True)
class KeyFacts:
    path: str
    state: Literal["absent", "good", "unreadable", "damaged"] = "absent"
    mode: int = 0o600
    detail: str = ""


def check_key(f: KeyFacts) -> Check:
    name = "key"
    if f.state == "absent":
        return ok(name, "none yet; made at the first start")
    if f.mode & 0o077:
        return fail(
            name,
            f"others can read {f.path} (mode {f.mode:04o}); the node refuses it",
            f"chmod 600 {f.path}",
            REFUSED,
        )
    if f.state == "unreadable":
        return fail(
            name,
            f"{f.path} cannot be read: {f.detail}",
            "run as the user that owns it, or restore it from its backup",
            UNAVAILABLE,
        )
    if f.state == "damaged":
        todo = f"restore it (swarmnode key import), or move it away to be a new peer: {f.path}"
        return fail(name, f"{f.path} is not a key: {f.detail}", todo, UNAVAILABLE)
    return ok(name, "there, and only its owner can read it")


# ---- ports and reachability ----------------------------------------------------------------------


@dataclass(frozen=True)
class PortFacts:
    key: str
    """network.listen_addrs or http.port."""
    host: str
    port: int
    """0: one is chosen at the first start."""
    problem: str = ""
    """Why it cannot be listened on; empty when it can."""
    ours: bool = False
    """The node of this data directory listens there."""


def check_port(f: PortFacts) -> Check:
    name = "port" if f.key.startswith("network") else "http port"
    where = f"{f.host} port {f.port}"
    if f.ours:
        return ok(name, f"{where} is this node's, which runs")
    if f.problem == NOT_OURS and f.key == "network.listen_addrs":
        every = f"/ip6/::/tcp/{f.port}" if ":" in f.host else f"/ip4/0.0.0.0/tcp/{f.port}"
        return fail(
            name,
            f"{where}: {f.problem}",
            f"listen on {every}, and name this one in network.announce_addrs",
            UNAVAILABLE,
        )
    if f.problem == TAKEN and f.key == "http.port":
        return warn(
            name,
            f"{where}: {f.problem}; the page takes the next free port",
            "swarmnode top finds it; set http.port to a free port to know it beforehand",
        )
    if f.problem:
        return fail(
            name,
            f"{where}: {f.problem}",
            f"stop what listens there, or set {f.key} to another",
            UNAVAILABLE,
        )
    return ok(
        name,
        (
            f"{where} is free"
            if f.port
            else f"{f.host}: a free port is chosen at the first start, and kept"
        ),
    )


@dataclass(frozen=True)
class ReachFacts:
    listen_hosts: Sequence[str]
    announced: Sequence[str]
    own_ips: Sequence[str]
    """Addresses of this machine's interfaces."""
    wants_others: bool
    """Peers beyond this machine are configured."""


def check_reachability(f: ReachFacts) -> Check:
    """Which class of reachability this node has, from what it listens on. Whether a firewall is in
    between is not known from inside."""
    name = "reachability"
    if f.announced:
        return ok(name, f"peers are told {', '.join(f.announced)}")
    listening = [ipaddress.ip_address(host) for host in f.listen_hosts]
    anywhere = any(ip.is_unspecified for ip in listening)
    if all(ip.is_loopback for ip in listening):
        if not f.wants_others:
            return ok(name, "this machine only, and no peers elsewhere are configured")
        return warn(
            name,
            "outbound only: the node listens on loopback, so nobody can dial it",
            'network.listen_addrs = ["/ip4/0.0.0.0/tcp/9512"] if the port can be reached; taking'
            " part works without",
        )
    mine = [ipaddress.ip_address(ip) for ip in f.own_ips]
    public = [ip for ip in (mine if anywhere else listening) if ip.is_global]
    if public:
        return ok(name, f"public address {public[0]}; a firewall has to let its port in")
    return warn(
        name,
        "behind NAT: no public address here, so peers outside this network reach it through a relay"
        " or not at all",
        "map the port and name the outside address in network.announce_addrs, or leave it: dialling"
        " out works",
    )


@dataclass(frozen=True)
class RouterFacts:
    asked: bool = False
    """False where a router is not in the way: the node listens on this machine only, or has a
    public address."""
    kind: Literal["none", "public", "carrier", "private"] = "none"
    """What its outside address is, see `p2p.gateway`; of an interface of this machine where there
    is no router."""
    outside: str = ""


def check_router(f: RouterFacts) -> Check:
    """What stands between this machine and the internet, as far as the router tells."""
    name = "router"
    if f.kind == "carrier":
        return warn(
            name,
            "carrier-grade NAT: the provider shares one public address among customers"
            f" ({f.outside} on the outside)",
            "no port can be forwarded; relays carry calls here. A public address, or IPv6, is the"
            " provider's to give",
        )
    if f.kind == "private":
        return warn(
            name,
            f"it has another router behind it ({f.outside} on the outside)",
            "forward the port on both, or leave it: relays carry calls to this node",
        )
    if f.kind == "public":
        return ok(
            name, f"its outside address is {f.outside}; a node asks it to forward its port (UPnP)"
        )
    return ok(
        name,
        (
            "none answers to UPnP: a port would have to be forwarded by hand"
            if f.asked
            else "none in the way"
        ),
    )


@dataclass(frozen=True)
class DialBackFacts:
    """What peers found when they dialled this node back; of the running node, or of a trial at its
    ports."""

    verdict: Literal["unknown", "public", "private"] = "unknown"
    observed: str = ""
    """IP address that they see this node at; empty while unknown."""
    relays: int = 0
    """Peers that relay calls to this node."""


def check_dial_back(f: DialBackFacts) -> Check:
    """The NAT and relay class, from outside."""
    name = "dial-back"
    seen = f" at {f.observed}" if f.observed else ""
    if f.verdict == "public":
        return ok(name, f"peers reach this node{seen}")
    if f.verdict == "unknown":
        return ok(name, "not known: no peer beyond this machine has tried to reach this node")
    todo = (
        "forward the port and name the outside address in network.announce_addrs, or leave it:"
        " dialling out works"
    )
    if f.relays:
        return ok(
            name,
            f"peers cannot dial this node; {f.relays} of them relay{'s' if f.relays == 1 else ''}"
            " for it",
        )
    return warn(
        name,
        "peers cannot dial this node, and none relays for it: it takes part through the connections"
        " that it makes",
        todo,
    )


@dataclass(frozen=True)
class PeerFacts:
    address: str
    outcome: Literal["ok", "unreachable", "no_handshake", "wrong_peer", "not_tried"]
    detail: str = ""


def check_peers(facts: Sequence[PeerFacts], itself: bool = False) -> list[Check]:
    """Judge the bootstrap addresses of other nodes, a line each. One that answers is enough for the
    exit code: the node starts, and keeps dialling the others. `itself`: this node is a bootstrap
    peer, as a founder is."""
    name = "bootstrap"
    if not facts and itself:
        return [ok(name, "this node is the one that newcomers dial; it dials nobody")]
    if not facts:
        return [
            warn(
                name,
                "no bootstrap peers configured",
                "set network.initial_peers or join with an invite; on a LAN mDNS is enough",
            )
        ]
    alive = any(f.outcome == "ok" for f in facts)
    checks = []
    for f in facts:
        if f.outcome == "ok":
            checks.append(ok(name, f"{f.address} answers{f': {f.detail}' if f.detail else ''}"))
            continue
        code = REFUSED if f.outcome == "wrong_peer" else UNAVAILABLE
        what, todo = {
            "wrong_peer": (
                "another peer answers there",
                "ask its operator: the address is forged, or the key was changed",
            ),
            "no_handshake": (
                "something answers, but not as a peer",
                "check the port, and for a private swarm its secret",
            ),
            "unreachable": (
                "cannot be reached",
                "check name, firewall, and whether it is up; the node keeps trying",
            ),
            "not_tried": ("not tried", ""),
        }[f.outcome]
        what = f"{f.address}: {what}{f' ({f.detail})' if f.detail else ''}"
        checks.append(
            warn(name, what, todo)
            if alive or f.outcome == "not_tried"
            else fail(name, what, todo, code)
        )
    return checks


# ---- clock ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockFacts:
    now: float
    newest_file: float | None = None
    """Unix time of the newest file of an earlier run."""
    synchronised: bool | None = None
    """What the kernel says; None where it cannot be asked."""
    received: int = 0
    future: int = 0
    stale: int = 0
    """Groups that the running node got from peers: all, dated ahead of our clock, dated behind
    it."""
    offset: float | None = None
    """Seconds by which peers' clocks are ahead, their median; None where too few have told the
    running node."""


def check_clock(f: ClockFacts) -> Check:
    """Peers take nothing dated more than two minutes ahead of them, or an hour old. Alone, only a
    clock that was set back or that nobody sets can be noticed; a running node also knows what
    peers' signed dates are like."""
    name = "clock"
    mend = "switch time synchronisation on (timedatectl set-ntp true, or chrony)"
    if f.offset is not None and abs(f.offset) > FUTURE_SECONDS:
        way = "behind" if f.offset > 0 else "ahead of"
        return fail(
            name,
            f"it is {abs(f.offset):.0f} s {way} the clocks of most peers",
            mend,
            UNAVAILABLE,
        )
    for count, way in ((f.future, "behind"), (f.stale, "ahead of")):
        if f.received >= 20 and count > f.received / 2:
            return fail(
                name,
                f"{count} of {f.received} groups say that this clock is {way} that of most peers",
                mend,
                UNAVAILABLE,
            )
    if f.newest_file is not None and f.newest_file > f.now + FUTURE_SECONDS:
        return fail(
            name,
            f"it is {f.newest_file - f.now:.0f} s behind this node's own files: it was set back",
            mend,
            UNAVAILABLE,
        )
    if f.synchronised is False:
        return warn(
            name,
            "not synchronised, says the kernel; peers ignore what is dated"
            f" {CLOCK_SKEW_SECONDS:.0f} s ahead of them",
            mend,
        )
    if f.synchronised is None and not f.received:
        return ok(
            name, "not behind this node's files; whether it is right cannot be told from here"
        )
    return ok(name, "synchronised" if f.synchronised else "as peers' clocks are")


# ---- device, model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceFacts:
    """`hardware`, `driver`: seen without torch. The rest is what `policy.examine` printed, or why
    it did not."""

    configured: str = "auto"
    """policy.devices."""
    model: str = "embedded"
    hardware: Sequence[str] = ()
    """"nvidia", "amd": display or compute devices on the PCI bus."""
    driver: str = ""
    """Version of NVIDIA's kernel driver; empty without."""
    torch: str = ""
    built_for: str = ""
    """"CUDA 12.8", "ROCm 6.4", or empty for a CPU build."""
    placement: str = ""
    """Why this device and dtype, one line."""
    on_cpu: bool = True
    parameters: int = 0
    need_bytes: int = 0
    free_bytes: int | None = None
    error: str = ""
    error_code: int = 0
    trial: str | None = None
    """The result of loading the model and trying to train it; empty where it is not here yet, None
    where that was not tried."""
    trial_warnings: Sequence[str] = ()
    """Settings that an operator should change, one line each."""
    gpu_error: str = ""
    """What torch says of a GPU that it cannot use."""
    cards: Sequence[str] = ()
    """Each GPU: name, memory, and the processes that use it."""


def check_device(f: DeviceFacts) -> Check:
    """Hardware, driver and torch have to be of one kind. Without a GPU, or with `policy.devices =
    "cpu"`, nothing has to match."""
    name = "device"
    if not f.torch:
        missing = "No module named" in f.error
        remedy = install_command("train") if missing else torch_remedy()
        todo = f"{remedy}; a bootstrap node does without torch"
        return fail(name, f"torch cannot be loaded: {f.error}", todo, f.error_code or UNAVAILABLE)
    instead = 'or set policy.devices = "cpu"'
    if f.configured != "cpu" and f.on_cpu:
        if "nvidia" in f.hardware and not f.driver:
            return fail(
                name,
                "an NVIDIA GPU is here, its driver is not loaded",
                f"install the driver and restart, {instead}",
                UNAVAILABLE,
            )
        if "nvidia" in f.hardware and not f.built_for.startswith("CUDA"):
            return fail(
                name,
                f"an NVIDIA GPU is here, but torch {f.torch} is built for"
                f" {f.built_for or 'the CPU'}",
                f"{CUDA_TORCH}; {instead}",
                UNAVAILABLE,
            )
        if "nvidia" in f.hardware:
            return fail(
                name,
                f"torch {f.torch} ({f.built_for}) cannot use the GPU with driver {f.driver}:"
                f" {f.gpu_error or 'none found'}",
                f"a driver for {f.built_for} or newer, or a torch for an older CUDA, {instead}",
                UNAVAILABLE,
            )
        if "amd" in f.hardware and f.built_for.startswith("ROCm"):
            return fail(
                name,
                f"torch {f.torch} ({f.built_for}) cannot use the AMD GPU:"
                f" {f.gpu_error or 'no device found'}",
                f"membership of the groups render and video, and a supported card; {instead}",
                UNAVAILABLE,
            )
        if "amd" in f.hardware:
            return warn(
                name,
                f"an AMD GPU is here, torch {f.torch} is not built for ROCm",
                f"install torch's ROCm build if the card has it, {instead}",
            )
    if f.error and not f.placement:
        return fail(name, f.error, "set policy.devices to what is there", f.error_code)
    return ok(name, "; ".join([f"torch {f.torch}, {f.placement}", *f.cards]))


def check_model(f: DeviceFacts) -> Check:
    """Whether model and memory fit; needs no weights."""
    name = "model"
    if not f.placement:
        return warn(name, "not examined: no device", "see above")
    if f.error:
        return fail(
            name,
            f.error,
            (
                "a smaller model, policy.lora.r, or policy.quantization"
                if f.error_code == RETRY
                else "check policy.model"
            ),
            f.error_code,
        )
    room = f", {size(f.free_bytes)} free" if f.free_bytes is not None else ""
    fits = f"{f.model}: {f.parameters:,} parameters, about {size(f.need_bytes)} to train{room}"
    if f.on_cpu and f.parameters > 50_000_000:
        return warn(name, f"{fits}; on the CPU a step takes minutes", "a GPU, or a smaller model")
    return ok(name, fits)


def check_trial(f: DeviceFacts) -> Check:
    """Result of trying to sample from a model and to train it."""
    name = "trial"
    if f.trial and f.trial_warnings:
        return warn(
            name, "; ".join([*f.trial_warnings, f.trial]), "a lower training.max_completion_length"
        )
    if f.trial:
        return ok(name, f.trial)
    if f.trial is None:
        return ok(
            name, "not tried, because a node runs here with this model, or of what is said above"
        )
    return warn(
        name,
        f"not tried: {f.model} is not on this machine yet",
        "the first start downloads it; run doctor again after that",
    )


@dataclass(frozen=True)
class ServerFacts:
    """Properties that the server of `policy.server.url` reports."""

    url: str
    kind: str
    error: str = ""
    """Reason for which the server cannot be used; empty if it responds."""
    version: str = ""
    model: str = ""
    dtype: str = ""
    """Empty if the server does not report it; so is `logprobs`."""
    logprobs: str = ""
    context: int | None = None
    lora_rank: int | None = None
    """Highest rank of an adapter; 0 where it takes none, None where it does not tell."""


START_SERVER = "start it with the line that `swarmnode serve-command` prints"


def check_server(f: ServerFacts, policy: PolicyConfig, training: TrainingConfig) -> Check:
    """Check that the inference server responds and has the flags that this node needs. Without the
    server the node runs with its own engine."""
    name = "server"
    if f.error:
        return warn(name, f"{f.error}; the own engine samples", START_SERVER)
    wrong, served = [], Path(f.model).name
    is_ours = served.startswith("swarmnode-weights-")  # SGLang names what it has loaded last
    if served != Path(policy.model).name and policy.model != EMBEDDED and not is_ours:
        wrong.append(f"it serves {f.model}, not {policy.model}")
    if f.logprobs not in ("", "processed_logprobs"):
        wrong.append(f"its log-probabilities are {f.logprobs}")
    if policy.lora.r and f.lora_rank is not None and f.lora_rank < policy.lora.r:
        takes = f"adapters up to rank {f.lora_rank}" if f.lora_rank else "no adapters"
        wrong.append(f"it takes {takes}, policy.lora.r is {policy.lora.r}")
    if f.context is not None and f.context <= training.max_completion_length:
        wrong.append(f"its context of {f.context} tokens is shorter than an answer may be")
    what = f"{f.kind} {f.version} at {f.url}"
    if wrong:
        return warn(name, f"{what}: {'; '.join(wrong)}", START_SERVER)
    return ok(name, f"{what} serves {f.model}{f' in {f.dtype}' if f.dtype else ''}")


def check_training(policy: PolicyConfig, training: TrainingConfig) -> list[Check]:
    """Judge whether the training values suit the model: a warning for each that does not."""
    name = "training"
    found = [line.rpartition(": ") for line in unsuited(policy, training)]
    if found:
        return [warn(name, what, todo) for what, _, todo in found]
    trained = defaults_for(policy.model, policy.lora.r).trained
    return [
        ok(
            name,
            f"{trained} at a learning rate of {training.learning_rate:g}, answers of at most"
            f" {training.max_completion_length} tokens",
        )
    ]


# ---- limits, configuration -----------------------------------------------------------------------


def check_files(limit: int, connections: int) -> Check:
    """`limit`: descriptors that a process may open; `connections`: network.max_connections."""
    if limit < connections + SPARE_FILES:
        return warn(
            "files",
            f"a process may open {limit} files, {connections} connections want"
            f" {connections + SPARE_FILES}",
            f"ulimit -n {connections + SPARE_FILES}, or a smaller network.max_connections",
        )
    return ok("files", f"a process may open {limit}")


@dataclass(frozen=True)
class ConfigFacts:
    problem: str = ""
    """Why it cannot be read, or honoured."""
    problem_code: int = CONFIGURATION
    sources: Sequence[str] = field(default_factory=list)
    http_host: str = "127.0.0.1"


def check_config(f: ConfigFacts) -> Check:
    name = "configuration"
    if f.problem:
        todo = (
            "swarmnode config show tells what is set, and where"
            if f.problem_code == CONFIGURATION
            else "join again, or leave the swarm"
        )
        return fail(name, f.problem, todo, f.problem_code)
    if not re.fullmatch(r"127\.\d+\.\d+\.\d+|::1|localhost", f.http_host):
        return warn(
            name,
            f"http.host is {f.http_host}: whoever reaches this machine can read status and logs",
            "fine inside a container or behind a firewall; else 127.0.0.1",
        )
    return ok(name, f"valid, from {', '.join(f.sources) or 'defaults'}")


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
