"""Collects the facts that `checks` judges. Changes nothing, except for a temporary file that is
removed at once.

Child processes with a deadline load torch and libp2p.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import json
import math
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from swarmnode.config import Config, HttpConfig, NetworkConfig, ServerSettings
from swarmnode.doctor.checks import (
    IN_USE,
    NOT_LOCAL,
    UNAVAILABLE,
    ClockFacts,
    DeviceFacts,
    DialBackFacts,
    DirectoryFacts,
    KeyFacts,
    PeerFacts,
    PortFacts,
    ReachFacts,
    RouterFacts,
    ServerFacts,
)
from swarmnode.errors import StateError, Unavailable
from swarmnode.observe import address, client
from swarmnode.p2p.gateway import Gateway, classify_address
from swarmnode.p2p.pem import UnusableKey, read_key
from swarmnode.policy.convert import prepare
from swarmnode.policy.engine.client import ServerFailed
from swarmnode.policy.engine.vllm import VllmServer
from swarmnode.wire.envelope import peer_id

DRIVER_SECONDS = 10.0
EXAMINE_SECONDS = 180.0
"""Time limit, because torch may be read from a slow disk, and config.json from the Hub."""
TRIAL_SECONDS = 900.0
"""Time limit, because tens of gigabytes of weights may be read from a slow disk."""
REACH_SECONDS = 60.0
ROUTER_SECONDS = 15.0
STATUS_SECONDS = 3.0
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
Answer = TypeVar("Answer")


# ---- data directory, key -------------------------------------------------------------------------


def directory(data_dir: Path) -> DirectoryFacts:
    """Examine the directory, or its nearest existing parent."""
    place = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    problem, mode = "", 0o700
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor."):
            pass
        mode = stat.S_IMODE(data_dir.stat().st_mode) if data_dir.exists() else 0o700
    except OSError as error:
        problem = (error.strerror or str(error)) + ("" if place == data_dir else f" ({place})")
    usage = os.statvfs(place)
    state = data_dir / "trainer" / "state.safetensors"
    try:
        state_bytes = state.stat().st_size
    except OSError:
        state_bytes = 0
    return DirectoryFacts(
        str(data_dir),
        problem,
        mode,
        usage.f_bavail * usage.f_frsize,
        state_bytes,
        running_pid(data_dir),
    )


def running_pid(data_dir: Path) -> int | None:
    """Return the process id of the node that holds the directory's lock; None if there is none."""
    try:
        fd = os.open(data_dir / "run" / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        text = os.read(fd, 32).decode(errors="replace").strip()
        return int(text) if text.isascii() and text.isdigit() else -1
    finally:
        os.close(fd)


def key(path: Path) -> KeyFacts:
    """Examine the key file, without libp2p."""
    try:
        mode, data = stat.S_IMODE(path.stat().st_mode), path.read_bytes()[:4097]
    except FileNotFoundError:
        return KeyFacts(str(path))
    except OSError as error:
        return KeyFacts(str(path), "unreadable", detail=error.strerror or str(error))
    try:
        read_key(data, path)
    except UnusableKey as error:
        return KeyFacts(str(path), "unusable", mode, error.problem, error.remedy)
    return KeyFacts(str(path), "good", mode)


def own_peer(data_dir: Path) -> str:
    """Return this node's peer id; empty if it has no key yet, or an unreadable key and no earlier
    run."""
    file = data_dir / "identity.key"
    with contextlib.suppress(OSError, StateError):
        return peer_id(read_key(file.read_bytes()[:4097], file).public_key().public_bytes_raw())
    place = address.read_address(data_dir)
    return place.peer if place is not None else ""


# ---- ports and reachability ----------------------------------------------------------------------

LISTEN = re.compile(r"/(ip4|ip6)/([^/]+)/tcp/(\d+)")


def listen_addresses(listen: Sequence[str], data_dir: Path) -> list[tuple[str, int]]:
    """Return (IP, port) of each listen address. Port 0 is replaced by the port that the first start
    chose."""
    saved = data_dir / "port"
    text = saved.read_text(errors="replace").strip() if saved.is_file() else ""
    own = int(text) if text.isascii() and text.isdigit() else 0
    found = [LISTEN.fullmatch(text) for text in listen]
    return [(match[2], int(match[3]) or own) for match in found if match is not None]


def ports(listen: Sequence[tuple[str, int]], http: HttpConfig, running: bool) -> list[PortFacts]:
    """Examine all ports of the node. While the node runs, it is the one that uses them."""
    wanted = [
        *(("network.listen_addrs", host, port) for host, port in listen),
        ("http.port", http.host, http.port),
        *([("http.metrics", *http.metrics_address)] if http.metrics_address else []),
    ]
    facts = []
    for name, host, port in wanted:
        problem = port_problem(host, port) if port else ""
        is_own = running and problem == IN_USE
        facts.append(PortFacts(name, host, port, problem, is_own))
    return facts


def port_problem(host: str, port: int) -> str:
    """Return the reason why no process can listen there now; empty if one can."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return IN_USE
        return {errno.EACCES: "not permitted for this user", errno.EADDRNOTAVAIL: NOT_LOCAL}.get(
            error.errno or 0, error.strerror or str(error)
        )
    return ""


def reachability(listen: Sequence[tuple[str, int]], network: NetworkConfig) -> ReachFacts:
    own = [
        a.address
        for interface in psutil.net_if_addrs().values()
        for a in interface
        if a.family in (socket.AF_INET, socket.AF_INET6)
    ]
    remote = [
        text for text in network.initial_peers if not text.startswith(("/ip4/127.", "/ip6/::1/"))
    ]
    return ReachFacts(
        [host for host, _ in listen],
        network.announce_addrs,
        [address.partition("%")[0] for address in own],
        bool(remote),
    )


def router(facts: ReachFacts, dial_back: DialBackFacts) -> RouterFacts:
    """Examine the router, unless peers reach this node, or no router matters: the node listens on
    loopback only, or has a public address."""
    listening = [ipaddress.ip_address(host) for host in facts.listen_hosts]
    own = [ipaddress.ip_address(ip) for ip in facts.own_ips]
    if (
        dial_back.verdict == "public"
        or facts.announced
        or all(ip.is_loopback for ip in listening)
        or any(ip.is_global for ip in own if ip.version == 4)
    ):
        return RouterFacts()
    try:
        found = child("swarmnode.p2p.gateway", b"", ROUTER_SECONDS, Gateway)
    except ChildFailed:
        found = Gateway()
    if not found.outside and (carrier := next((ip for ip in carrier_addresses() if ip), "")):
        return RouterFacts("carrier", carrier)
    return RouterFacts(classify_address(found.outside, dial_back.observed), found.outside)


def carrier_addresses() -> list[str]:
    """Return this machine's addresses in the range of carrier-grade NAT. Addresses with netmask /32
    belong to VPNs that use the same range."""
    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
        and classify_address(address.address) == "carrier"
        and address.netmask != "255.255.255.255"
    ]


@dataclass(frozen=True)
class Trial:
    """Request to `p2p.reach`: dial the bootstrap addresses like this node would."""

    network: NetworkConfig
    swarm: bytes
    secret: bytes | None
    identity: Path | None
    """File of this node's key; None while a node uses it, or before it exists."""
    listen: Sequence[str]
    """Free multiaddrs to listen on. Peers dial them back."""


def peers(trial: Trial) -> tuple[list[PeerFacts], DialBackFacts]:
    """Dial all bootstrap addresses in a child process."""
    request = {
        "addresses": trial.network.initial_peers,
        "swarm": trial.swarm.hex(),
        "secret": (trial.secret or b"").hex(),
        "identity": str(trial.identity or ""),
        "listen": list(trial.listen),
        "relay": trial.network.relay,
    }
    if not request["addresses"]:
        return [], DialBackFacts()
    try:
        reached = child("swarmnode.p2p.reach", json.dumps(request).encode(), REACH_SECONDS, Reached)
    except ChildFailed as failed:
        return [
            PeerFacts(address, "not_tried", str(failed)) for address in trial.network.initial_peers
        ], DialBackFacts()
    return reached.peers, reached.dial_back


@dataclass(frozen=True)
class Reached:
    """Answer of `p2p.reach`."""

    peers: list[PeerFacts]
    dial_back: DialBackFacts


def free_ports(listen: Sequence[tuple[str, int]]) -> list[str]:
    """Return the multiaddrs that a trial can listen on: those whose port is known and free."""
    free = [(host, port) for host, port in listen if port and not port_problem(host, port)]
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}" for host, port in free]


def dialled_back(status: Mapping[str, object]) -> DialBackFacts:
    """Return the dial-back facts of the running node."""
    nat: dict[str, object] = client.field(status, "snapshot.network.nat", {})
    verdict = client.field(nat, "reach.verdict", "")
    return DialBackFacts(
        "public" if verdict == "public" else "private" if verdict == "private" else "unknown",
        client.field(nat, "reach.observed", ""),
        len(client.field(nat, "client.relays", [])),
    )


# ---- clock ---------------------------------------------------------------------------------------


def clock(status: Mapping[str, object]) -> ClockFacts:
    """Collect facts about the clock. status: of the running node; empty if none is running."""
    offset = client.field(status, "snapshot.swarm.clock_offset_seconds", math.nan)
    return ClockFacts(kernel_synchronised(), None if math.isnan(offset) else offset)


def kernel_synchronised() -> bool | None:
    """Return True if the kernel's clock is synchronised; None if adjtimex is missing or
    forbidden."""
    if not sys.platform.startswith("linux"):
        return None
    # struct timex, modes 0: only reads
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    return None if answer < 0 else answer != TIME_ERROR


# ---- device --------------------------------------------------------------------------------------


def device(config: Config, trial: bool = False) -> DeviceFacts:
    """Examine device and model.

    Args:
        config: The configuration.
        trial: Also load the model and try to train it, which takes time and memory.
    """
    cfg, request = config.policy, config.model_dump_json(include={"policy", "training"})
    hardware, driver = gpus(), nvidia_driver()
    with contextlib.suppress(Unavailable):  # the child fails as well, and the result has the reason
        prepare(cfg.model)
    try:
        found = examined(request, *(["--trial"] if trial else []))
    except ChildFailed as failed:
        found = DeviceFacts(error=str(failed))
        if trial:  # the model may have crashed the child, not torch
            with contextlib.suppress(ChildFailed):
                error = f"a trial of {cfg.model} ended: {failed}"
                found = replace(examined(request), error=error, error_code=UNAVAILABLE)
    return replace(found, configured=cfg.device, model=cfg.model, hardware=hardware, driver=driver)


def examined(request: str, *arguments: str) -> DeviceFacts:
    """Run `policy.examine` in a child process. Raises ChildFailed."""
    return child(
        "swarmnode.policy.examine",
        request.encode(),
        TRIAL_SECONDS if arguments else EXAMINE_SECONDS,
        DeviceFacts,
        *arguments,
    )


def gpus(root: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the vendors of display and compute devices on the PCI bus. A container also lists
    devices that it cannot use."""
    found = set()
    for place in root.glob("*") if root.is_dir() else ():
        with contextlib.suppress(OSError):
            kind, vendor = (
                (place / "class").read_text().strip(),
                (place / "vendor").read_text().strip(),
            )
            if kind.startswith("0x03") and vendor in VENDORS:
                found.add(VENDORS[vendor])
    return sorted(found)


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the loaded kernel driver; empty without one."""
    try:
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", path.read_text())
    except OSError:
        return ""
    return match[1] if match else "unknown"


def server(settings: ServerSettings, adapter: bool) -> ServerFacts:
    """Query the configured inference server."""
    client, facts = VllmServer(settings.url, adapter), ServerFacts(settings.url)
    try:
        about, flags = client.about(), client.settings()
    except ServerFailed as failed:
        return replace(facts, error=str(failed))
    rank = flags.get("lora_rank")
    return replace(
        facts,
        version=about.version,
        model=about.model,
        context=about.context,
        dtype=str(flags.get("dtype") or "").removeprefix("torch."),
        logprobs=str(flags.get("logprobs_mode") or ""),
        lora_rank=rank if isinstance(rank, int) else None,
    )


def driver_cards() -> list[str]:
    """Return one line per NVIDIA card with its memory and compute processes, as the driver reports
    them; empty without a driver. Needs no torch."""

    def query(what: str) -> list[list[str]]:
        try:
            done = subprocess.run(
                ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=DRIVER_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return []
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        return [row for row in rows if len(row) == len(what.split(","))]

    users: dict[str, list[str]] = {}
    for card, pid, mebibytes in query("compute-apps=gpu_uuid,pid,used_memory"):
        users.setdefault(card, []).append(f"process {pid} holds {mebibytes} MiB")
    return [
        ", ".join([f"card {index} {name}", f"{free} of {total} MiB free", *users.get(card, [])])
        for index, card, name, free, total in query("gpu=index,uuid,name,memory.free,memory.total")
    ]


# ---- helpers -------------------------------------------------------------------------------------


class ChildFailed(Exception):
    """Raised if a child process gives no answer. The message is one line."""


def child(
    module: str, request: bytes, seconds: float, answer: type[Answer], *arguments: str
) -> Answer:
    """Run `python -m module` with `request` as input, and decode the last line of its output as
    JSON.

    Raises:
        ChildFailed: There is no valid answer within `seconds`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=request,
            capture_output=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no answer within {seconds:.0f} s") from None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=answer)
    except (IndexError, msgspec.MsgspecError):
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        reason = errors[-1][:300] if errors else f"ended with {done.returncode}"
        raise ChildFailed(reason) from None


def status(data_dir: Path) -> Mapping[str, object]:
    """Return the status of the node that runs in this data directory; empty if none responds."""
    try:
        place = address.read_address(data_dir)
        if place is None:
            return {}
        return client.decode_status(place, client.fetch_status(place, 1, STATUS_SECONDS))
    except Unavailable:
        return {}


def open_files() -> int:
    """Return the limit on file descriptors of a process."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
