"""Verdicts from facts: pure functions. Each verdict states the problem, its cause and the remedy.

ok     no problem
warn   the node runs, but the operator should look at it
fail   the node does not run, or not as configured
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swarmnode.config import Config, PolicyConfig, TrainingConfig
from swarmnode.gguf import is_gguf
from swarmnode.install import install_command, torch_remedy
from swarmnode.model_defaults import EMBEDDED
from swarmnode.policy.convert import cached_copy
from swarmnode.settings import CUDA_TORCH, unsuitable_values
from swarmnode.wire.limits import CLOCK_SKEW_SECONDS

UNAVAILABLE, RETRY, REFUSED, CONFIGURATION = 69, 75, 77, 78
SEVERITY = (CONFIGURATION, REFUSED, UNAVAILABLE, RETRY)
"""Exit codes by severity. Problems that the operator must fix come before those that may end by
themselves."""

NOT_LOCAL = "not an address of this machine"
IN_USE = "another process listens there"
LEAST_FREE_BYTES = 256 * 2**20
COMFORTABLE_FREE_BYTES = 5 * 2**30
FUTURE_SECONDS = 60.0
SPARE_FILES = 512
"""File descriptors in addition to connections: files, scorers, HTTP."""


@dataclass(frozen=True)
class Check:
    """One verdict."""

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    """The result, in one line."""
    remedy: str = ""
    """The remedy; empty if none is needed."""
    exit_code: int = 0
    """Exit code of `doctor` if this check fails."""


def ok(name: str, what: str) -> Check:
    return Check(name, "ok", what)


def warn(name: str, what: str, remedy: str) -> Check:
    return Check(name, "warn", what, remedy)


def fail(name: str, what: str, remedy: str, exit_code: int) -> Check:
    return Check(name, "fail", what, remedy, exit_code)


def exit_code(checks: Sequence[Check]) -> int:
    """Return the most severe exit code of the failures; 0 without failures."""
    codes = {check.exit_code for check in checks if check.level == "fail"}
    return next((code for code in SEVERITY if code in codes), min(codes, default=0))


# ---- data directory and key ----------------------------------------------------------------------


@dataclass(frozen=True)
class DirectoryFacts:
    path: str
    problem: str = ""
    """Reason why no file can be written there; empty if one can."""
    mode: int = 0o700
    free_bytes: int = 0
    state_bytes: int = 0
    """Size of the trainer's state. A new state is written before the old one is deleted."""
    running_pid: int | None = None
    """Process id of the node that uses the directory."""


def check_directory(f: DirectoryFacts) -> Check:
    name = "data directory"
    if f.problem:
        return fail(
            name,
            f"{f.path}: {f.problem}",
            "change its owner to this user, or set node.data_dir to a writable directory",
            UNAVAILABLE,
        )
    running = f", used by the node with pid {f.running_pid}" if f.running_pid else ""
    if f.mode & 0o022:
        return warn(
            name,
            f"{f.path}: other users can write to it (mode {f.mode:04o})",
            f"chmod 700 {f.path}",
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
            "free some space: training would continue, but nothing would be saved",
            UNAVAILABLE,
        )
    if f.free_bytes < 2 * f.state_bytes:
        return warn(
            name,
            f"{free} free; a new trainer state of {size(f.state_bytes)} is written before the old"
            " one is deleted",
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
    state: Literal["absent", "good", "unreadable", "unusable"] = "absent"
    mode: int = 0o600
    detail: str = ""
    remedy: str = ""


def check_key(f: KeyFacts) -> Check:
    name = "key"
    if f.state == "absent":
        return ok(name, "not created yet; the first start creates it")
    if f.mode & 0o077:
        return fail(
            name,
            f"other users can read {f.path} (mode {f.mode:04o}); the node refuses it",
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
    if f.state == "unusable":
        return fail(name, f.detail, f.remedy, UNAVAILABLE)
    return ok(name, "present; only its owner can read it")


# ---- ports and reachability ----------------------------------------------------------------------


@dataclass(frozen=True)
class PortFacts:
    key: str
    """network.listen_addrs or http.port."""
    host: str
    port: int
    """0 if a port is chosen at the first start."""
    problem: str = ""
    """Reason why the node cannot listen there; empty if it can."""
    is_own: bool = False
    """True if the running node of this data directory listens there."""


def check_port(f: PortFacts) -> Check:
    name = "port" if f.key.startswith("network") else "http port"
    where = f"{f.host} port {f.port}"
    if f.is_own:
        return ok(name, f"{where} is used by this node, which is running")
    if f.problem == NOT_LOCAL and f.key == "network.listen_addrs":
        every = f"/ip6/::/tcp/{f.port}" if ":" in f.host else f"/ip4/0.0.0.0/tcp/{f.port}"
        return fail(
            name,
            f"{where}: {f.problem}",
            f"listen on {every}, and set network.announce_addrs to this address",
            UNAVAILABLE,
        )
    if f.problem == IN_USE and f.key == "http.port":
        return warn(
            name,
            f"{where}: {f.problem}; the page uses the next free port",
            "swarmnode status finds that port; set http.port to a free one to fix it",
        )
    if f.problem:
        return fail(
            name,
            f"{where}: {f.problem}",
            f"stop that process, or change {f.key}",
            UNAVAILABLE,
        )
    return ok(
        name,
        (
            f"{where} is free"
            if f.port
            else f"{f.host}: the first start chooses a free port and keeps it"
        ),
    )


@dataclass(frozen=True)
class ReachFacts:
    listen_hosts: Sequence[str]
    announced: Sequence[str]
    own_ips: Sequence[str]
    """Addresses of this machine's interfaces."""
    has_remote_peers: bool
    """True if peers on other machines are configured."""


@dataclass(frozen=True)
class RouterFacts:
    kind: Literal["none", "public", "carrier", "private"] = "none"
    """Kind of its external address, see `p2p.gateway`; without a router, of an interface of this
    machine."""
    outside: str = ""


@dataclass(frozen=True)
class DialBackFacts:
    """Result of dial-backs by peers, to the running node or to a trial at its ports."""

    verdict: Literal["unknown", "public", "private"] = "unknown"
    observed: str = ""
    """IP address of this node as peers see it; empty if unknown."""
    relays: int = 0
    """Number of peers that relay connections to this node."""


def check_reachability(
    f: ReachFacts, dial_back: DialBackFacts | None = None, router: RouterFacts | None = None
) -> Check:
    """Judge reachability: by the dial-backs of peers, or else by the listen addresses and the
    router. Firewalls cannot be seen from inside."""
    name, dial_back, router = "reachability", dial_back or DialBackFacts(), router or RouterFacts()
    if dial_back.verdict == "public":
        seen = dial_back.observed
        near = " in the local network" if seen and not ipaddress.ip_address(seen).is_global else ""
        return ok(name, f"peers{near} reach this node{f' at {seen}' if seen else ''}")
    if dial_back.relays:
        relays = "1 relay serves" if dial_back.relays == 1 else f"{dial_back.relays} relays serve"
        return ok(name, f"peers cannot dial this node; {relays} it")
    listening = [ipaddress.ip_address(host) for host in f.listen_hosts]
    if not f.announced and all(ip.is_loopback for ip in listening):
        if not f.has_remote_peers:
            return ok(name, "this machine only; no peers on other machines are configured")
        return warn(
            name,
            "outbound only: the node listens on loopback, so no peer can dial it",
            'set network.listen_addrs = ["/ip4/0.0.0.0/tcp/9512"] if the port is reachable; the'
            " node also works without",
        )
    anywhere = any(ip.is_unspecified for ip in listening)
    own_ips = [ipaddress.ip_address(ip) for ip in f.own_ips]
    public = [ip for ip in (own_ips if anywhere else listening) if ip.is_global]
    remedy = (
        "forward the port and set network.announce_addrs to the public address, or do nothing:"
        " outbound connections work"
    )
    if f.announced:
        what = f"announces {', '.join(f.announced)}"
    elif public:
        what = f"public address {public[0]}; a firewall must admit its port"
    elif router.kind == "public":
        what = f"external address {router.outside}; the node requests a port forwarding (UPnP)"
    elif router.kind == "carrier":
        what = (
            "carrier-grade NAT: the provider shares one public address among customers (external"
            f" address {router.outside})"
        )
        remedy = (
            "no port can be forwarded, so peers need a relay; ask the provider for a public address"
            " or IPv6"
        )
    elif router.kind == "private":
        what = f"double NAT: the external address {router.outside} is private"
        remedy = "forward the port on both routers, or do nothing: peers use a relay"
    else:
        what = (
            "behind NAT: no public address, so peers outside of this network need a relay to reach"
            " it"
        )
    if dial_back.verdict == "private":
        return warn(name, f"peers cannot dial this node, and no peer relays for it; {what}", remedy)
    good = f.announced or public or router.kind == "public"
    return ok(name, what) if good else warn(name, what, remedy)


@dataclass(frozen=True)
class PeerFacts:
    address: str
    outcome: Literal["ok", "unreachable", "no_handshake", "wrong_peer", "not_tried"]
    detail: str = ""


def check_peers(facts: Sequence[PeerFacts], is_bootstrap: bool = False) -> list[Check]:
    """Judge the bootstrap addresses, one line each. They fail only if none responds: the node
    starts with one, and keeps dialling the others.

    Args:
        facts: One entry per address.
        is_bootstrap: True if this node is a bootstrap peer.
    """
    name = "bootstrap"
    if not facts and is_bootstrap:
        return [ok(name, "this node is the bootstrap peer, and dials none")]
    if not facts:
        return [
            warn(
                name,
                "no bootstrap peers configured",
                "set network.initial_peers or join with an invite; a LAN needs neither (mDNS)",
            )
        ]
    alive = any(f.outcome == "ok" for f in facts)
    checks = []
    for f in facts:
        if f.outcome == "ok":
            checks.append(ok(name, f"{f.address} responds{f': {f.detail}' if f.detail else ''}"))
            continue
        code = REFUSED if f.outcome == "wrong_peer" else UNAVAILABLE
        what, remedy = {
            "wrong_peer": (
                "another peer responds there",
                "ask its operator: the address is forged, or the key has changed",
            ),
            "no_handshake": (
                "the response is not that of a peer",
                "check the port and, for a private swarm, its secret",
            ),
            "unreachable": (
                "cannot be reached",
                "check its name, the firewall, and that it is running; the node keeps trying",
            ),
            "not_tried": ("not tried", ""),
        }[f.outcome]
        what = f"{f.address}: {what}{f' ({f.detail})' if f.detail else ''}"
        checks.append(
            warn(name, what, remedy)
            if alive or f.outcome == "not_tried"
            else fail(name, what, remedy, code)
        )
    return checks


# ---- clock ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockFacts:
    synchronised: bool | None = None
    """The kernel's answer; None if it has none."""
    offset: float | None = None
    """Median offset of the peers' clocks in seconds, positive if they are ahead; None if too few
    are known."""


def check_clock(f: ClockFacts) -> Check:
    """Judge the clock, by the clocks of the running node's peers or by the kernel. Peers refuse
    groups dated two minutes ahead of their clock, or an hour old."""
    name = "clock"
    remedy = "enable time synchronisation (timedatectl set-ntp true, or chrony)"
    if f.offset is not None and abs(f.offset) > FUTURE_SECONDS:
        way = "behind" if f.offset > 0 else "ahead of"
        return fail(
            name,
            f"it is {abs(f.offset):.0f} s {way} the clocks of most peers",
            remedy,
            UNAVAILABLE,
        )
    if f.synchronised is False:
        return warn(
            name,
            "not synchronised, according to the kernel; peers ignore groups dated"
            f" {CLOCK_SKEW_SECONDS:.0f} s ahead of their clock",
            remedy,
        )
    if f.synchronised:
        return ok(name, "synchronised")
    agrees = f.offset is not None
    return ok(name, "agrees with the clocks of peers" if agrees else "not compared with others yet")


# ---- device, model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about device and model. `hardware` and `driver` are found without torch; the rest is
    the output of `policy.examine`."""

    configured: str = "auto"
    """policy.devices."""
    model: str = "embedded"
    hardware: Sequence[str] = ()
    """Vendors of display and compute devices on the PCI bus: "nvidia", "amd"."""
    driver: str = ""
    """Version of NVIDIA's kernel driver; empty without one."""
    torch: str = ""
    built_for: str = ""
    """"CUDA 12.8", "ROCm 6.4", or empty for a CPU build."""
    placement: str = ""
    """Device and dtype, with the reason, in one line."""
    on_cpu: bool = True
    parameters: int = 0
    need_bytes: int = 0
    free_bytes: int | None = None
    error: str = ""
    error_code: int = 0
    trial: str | None = None
    """Result of loading the model and a trial of training; empty if the model is not on this
    machine, None if there was no trial."""
    trial_warnings: Sequence[str] = ()
    """Settings that an operator should change, one line each."""
    gpu_error: str = ""
    """torch's error for a GPU that it cannot use."""
    cards: Sequence[str] = ()
    """One line per GPU: name, memory, and the processes that use it."""


def check_device(f: DeviceFacts) -> Check:
    """Check that hardware, driver and torch's build match. Without a GPU, or with `policy.devices =
    "cpu"`, this is not required."""
    name = "device"
    if not f.torch:
        missing = "No module named" in f.error
        remedy = install_command("train") if missing else torch_remedy()
        remedy = f"{remedy}; a bootstrap node needs no torch"
        return fail(name, f"torch cannot be loaded: {f.error}", remedy, f.error_code or UNAVAILABLE)
    alternative = 'or set policy.devices = "cpu"'
    if f.configured != "cpu" and f.on_cpu:
        if "nvidia" in f.hardware and not f.driver:
            return fail(
                name,
                "there is an NVIDIA GPU, but its driver is not loaded",
                f"install the driver and restart, {alternative}",
                UNAVAILABLE,
            )
        if "nvidia" in f.hardware and not f.built_for.startswith("CUDA"):
            return fail(
                name,
                f"there is an NVIDIA GPU, but torch {f.torch} is built for"
                f" {f.built_for or 'the CPU'}",
                f"{CUDA_TORCH}; {alternative}",
                UNAVAILABLE,
            )
        if "nvidia" in f.hardware:
            return fail(
                name,
                f"torch {f.torch} ({f.built_for}) cannot use the GPU with driver {f.driver}:"
                f" {f.gpu_error or 'none found'}",
                f"install a driver for {f.built_for} or newer, or torch for an older CUDA,"
                f" {alternative}",
                UNAVAILABLE,
            )
        if "amd" in f.hardware and f.built_for.startswith("ROCm"):
            return fail(
                name,
                f"torch {f.torch} ({f.built_for}) cannot use the AMD GPU:"
                f" {f.gpu_error or 'no device found'}",
                "add this user to the groups render and video, and check that the card is"
                f" supported; {alternative}",
                UNAVAILABLE,
            )
        if "amd" in f.hardware:
            return warn(
                name,
                f"there is an AMD GPU, but torch {f.torch} is not built for ROCm",
                f"install torch's ROCm build if it supports the card, {alternative}",
            )
    if f.error and not f.placement:
        return fail(name, f.error, "set policy.devices to available devices", f.error_code)
    return ok(name, "; ".join([f"torch {f.torch}, {f.placement}", *f.cards]))


def check_model(f: DeviceFacts) -> Check:
    """Judge whether the model fits into memory. Needs no weights."""
    name = "model"
    if not f.placement:
        return warn(name, "not examined: no device", "see above")
    if f.error:
        return fail(
            name,
            f.error,
            (
                "use a smaller model, policy.lora.r, or policy.quantization"
                if f.error_code == RETRY
                else "check policy.model"
            ),
            f.error_code,
        )
    room = f", {size(f.free_bytes)} free" if f.free_bytes is not None else ""
    fits = f"{f.model}: {f.parameters:,} parameters, about {size(f.need_bytes)} to train{room}"
    if f.on_cpu and f.parameters > 50_000_000:
        return warn(
            name, f"{fits}; a step on the CPU takes minutes", "use a GPU or a smaller model"
        )
    return ok(name, fits)


def check_trial(f: DeviceFacts) -> Check:
    """Judge the trial of sampling and training."""
    name = "trial"
    if f.trial and f.trial_warnings:
        return warn(
            name, "; ".join([*f.trial_warnings, f.trial]), "lower training.max_completion_length"
        )
    if f.trial:
        return ok(name, f.trial)
    if f.trial is None:
        return ok(name, "no trial: a node with this model is running, or a check above failed")
    return warn(
        name,
        f"no trial: {f.model} is not on this machine yet",
        "the first start downloads it; run doctor again afterwards",
    )


@dataclass(frozen=True)
class ServerFacts:
    """Properties that the server of `policy.server.url` reports."""

    url: str
    error: str = ""
    """Reason for which the server cannot be used; empty if it responds."""
    version: str = ""
    model: str = ""
    dtype: str = ""
    """Empty if the server does not report it; so is `logprobs`."""
    logprobs: str = ""
    context: int | None = None
    lora_rank: int | None = None
    """Highest rank of an adapter; 0 if it accepts none, None if it does not report it."""


START_SERVER = "start it with the line that `swarmnode vllm-command` prints"


def check_server(f: ServerFacts, policy: PolicyConfig, training: TrainingConfig) -> Check:
    """Check that the inference server responds and has the flags that this node needs. Without the
    server the node runs with its own engine."""
    name = "server"
    if f.error:
        return warn(name, f"{f.error}; the node samples with its own engine", START_SERVER)
    wrong, served = [], Path(f.model).name
    own = cached_copy(policy.model) if is_gguf(policy.model) else Path(policy.model)
    if served != own.name and policy.model != EMBEDDED:
        wrong.append(f"it serves {f.model}, not {policy.model}")
    if f.logprobs not in ("", "processed_logprobs"):
        wrong.append(f"its log-probabilities are {f.logprobs}")
    if policy.lora.r and f.lora_rank is not None and f.lora_rank < policy.lora.r:
        accepted = f"adapters up to rank {f.lora_rank}" if f.lora_rank else "no adapters"
        wrong.append(f"it accepts {accepted}, policy.lora.r is {policy.lora.r}")
    if f.context is not None and f.context <= training.max_completion_length:
        wrong.append(f"its context of {f.context} tokens is shorter than the longest answer")
    what = f"vLLM {f.version} at {f.url}"
    if wrong:
        return warn(name, f"{what}: {'; '.join(wrong)}", START_SERVER)
    return ok(name, f"{what} serves {f.model}{f' in {f.dtype}' if f.dtype else ''}")


def check_training(config: Config) -> list[Check]:
    """Judge whether the training settings suit the model; one warning per unsuitable setting."""
    name = "training"
    found = [line.rpartition(": ") for line in unsuitable_values(config)]
    if found:
        return [warn(name, what, remedy) for what, _, remedy in found]
    training, trained = config.training, config.model_defaults.trained
    return [
        ok(
            name,
            f"{trained} at a learning rate of {training.learning_rate:g}, answers of at most"
            f" {training.max_completion_length} tokens",
        )
    ]


# ---- limits, configuration -----------------------------------------------------------------------


def check_files(limit: int, connections: int) -> Check:
    """Judge the limit on open files.

    Args:
        limit: Descriptors that a process may open.
        connections: `network.max_connections`.
    """
    if limit < connections + SPARE_FILES:
        return warn(
            "files",
            f"a process may open {limit} files, but {connections} connections need"
            f" {connections + SPARE_FILES}",
            f"ulimit -n {connections + SPARE_FILES}, or lower network.max_connections",
        )
    return ok("files", f"a process may open {limit}")


@dataclass(frozen=True)
class ConfigFacts:
    problem: str = ""
    """Reason why the configuration is invalid; empty if it is valid."""
    problem_code: int = CONFIGURATION
    sources: Sequence[str] = field(default_factory=list)
    http_host: str = "127.0.0.1"


def check_config(f: ConfigFacts) -> Check:
    name = "configuration"
    if f.problem:
        remedy = (
            "swarmnode config show prints all settings and their origin"
            if f.problem_code == CONFIGURATION
            else "join again, or leave the swarm"
        )
        return fail(name, f.problem, remedy, f.problem_code)
    if not re.fullmatch(r"127\.\d+\.\d+\.\d+|::1|localhost", f.http_host):
        return warn(
            name,
            f"http.host is {f.http_host}: anyone who reaches this machine can read status and logs",
            "safe in a container or behind a firewall; otherwise set it to 127.0.0.1, and"
            " http.metrics for Prometheus",
        )
    return ok(name, f"valid, from {', '.join(f.sources) or 'defaults'}")


def size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
