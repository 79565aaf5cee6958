"""Looks at this machine and gathers the facts that `checks` judges. Changes nothing but a file that
is written and removed at once.

What needs torch or libp2p is asked of children, which have a deadline and may die of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import psutil

from swarmnode.config import Config, HttpConfig, NetworkConfig, ServerSettings
from swarmnode.doctor.checks import (
    NOT_OURS,
    TAKEN,
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
from swarmnode.errors import SwarmNodeError, Unavailable
from swarmnode.observe import address, client
from swarmnode.p2p.gateway import Gateway, kind_of
from swarmnode.policy.engine.client import ServerFailed
from swarmnode.policy.engine.servers import make_server

DRIVER_SECONDS = 10.0
EXAMINE_SECONDS = 180.0
"""torch may come from a cold disk, config.json from the Hub."""
TRIAL_SECONDS = 900.0
"""Tens of gigabytes of weights, from a slow disk."""
REACH_SECONDS = 60.0
ROUTER_SECONDS = 15.0
STATUS_SECONDS = 3.0
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
Answer = TypeVar("Answer")
PEM = re.compile(rb"-----BEGIN PRIVATE KEY-----\s")


# ---- data directory, key -------------------------------------------------------------------------


def directory(data_dir: Path) -> DirectoryFacts:
    """Looks at the directory, or at its nearest parent where it does not exist yet."""
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
    """The process id of the node that holds the directory's lock; None when nobody does."""
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
    """Looks for the frame of a PEM key and lets cryptography judge the rest; libp2p is not needed
    for that."""
    try:
        mode, data = stat.S_IMODE(path.stat().st_mode), path.read_bytes()[:4097]
    except FileNotFoundError:
        return KeyFacts(str(path))
    except OSError as error:
        return KeyFacts(str(path), "unreadable", detail=error.strerror or str(error))
    if not PEM.match(data):
        return KeyFacts(str(path), "damaged", mode, "no PEM private key")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.p2p import passphrase

    try:
        if locked(path) and passphrase.given() is None:
            return KeyFacts(str(path), "good", mode)  # asked for when the node starts
        loaded = serialization.load_pem_private_key(
            data, password=passphrase.given() if locked(path) else None
        )
    except (ValueError, TypeError, SwarmNodeError) as error:
        return KeyFacts(str(path), "damaged", mode, str(error).split("\n")[0][:120])
    good = isinstance(loaded, Ed25519PrivateKey)
    return KeyFacts(str(path), "good" if good else "damaged", mode, "" if good else "not Ed25519")


def own_peer(data_dir: Path) -> str:
    """Return this node's peer id; empty where it has no key yet, or one that cannot be read and
    that no node has run with."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from swarmnode.p2p import passphrase
    from swarmnode.wire.envelope import peer_id

    file = data_dir / "identity.key"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, SwarmNodeError):
        given = passphrase.given() if locked(file) else None
        key = load_pem_private_key(file.read_bytes()[:4097], password=given)
        return peer_id(key.public_key().public_bytes_raw())  # type: ignore[union-attr]
    place = address.read_address(data_dir)
    return place.peer if place is not None else ""


def locked(path: Path) -> bool:
    """Whether the key in a file has a passphrase."""
    from swarmnode.p2p import passphrase

    return passphrase.is_locked(path.read_bytes()[:4097])


# ---- ports and reachability ----------------------------------------------------------------------

LISTEN = re.compile(r"/(ip4|ip6)/([^/]+)/tcp/(\d+)")


def listen_addresses(listen: Sequence[str], data_dir: Path) -> list[tuple[str, int]]:
    """(IP, port) of each listen address; port 0 replaced by the one that was chosen at the first
    start."""
    saved = data_dir / "port"
    text = saved.read_text(errors="replace").strip() if saved.is_file() else ""
    own = int(text) if text.isascii() and text.isdigit() else 0
    found = [LISTEN.fullmatch(text) for text in listen]
    return [(match[2], int(match[3]) or own) for match in found if match is not None]


def ports(listen: Sequence[tuple[str, int]], http: HttpConfig, running: bool) -> list[PortFacts]:
    """Every port that the node listens on. One that is taken while the node runs is taken by it."""
    wanted = [
        *(("network.listen_addrs", host, port) for host, port in listen),
        ("http.port", http.host, http.port),
    ]
    facts = []
    for name, host, port in wanted:
        problem = port_problem(host, port) if port else ""
        ours = bool(problem) and running and problem == TAKEN
        facts.append(PortFacts(name, host, port, problem, ours))
    return facts


def port_problem(host: str, port: int) -> str:
    """Why nobody can listen there now; empty when one can."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return TAKEN
        return {errno.EACCES: "not allowed for this user", errno.EADDRNOTAVAIL: NOT_OURS}.get(
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
    elsewhere = [
        text for text in network.initial_peers if not text.startswith(("/ip4/127.", "/ip6/::1/"))
    ]
    return ReachFacts(
        [host for host, _ in listen],
        network.announce_addrs,
        [address.partition("%")[0] for address in own],
        bool(elsewhere),
    )


def router(facts: ReachFacts, observed: str = "") -> RouterFacts:
    """The router, where there is one in the way. observed: the IP address at which peers see this
    machine."""
    listening = [ipaddress.ip_address(host) for host in facts.listen_hosts]
    own = [ipaddress.ip_address(ip) for ip in facts.own_ips]
    if (
        facts.announced
        or all(ip.is_loopback for ip in listening)
        or any(ip.is_global for ip in own if ip.version == 4)
    ):
        return RouterFacts()
    try:
        found = child("swarmnode.p2p.gateway", b"", ROUTER_SECONDS, Gateway)
    except ChildFailed:
        found = Gateway()
    if not found.outside and (carrier := next((ip for ip in carrier_addresses() if ip), "")):
        return RouterFacts(True, "carrier", carrier)
    return RouterFacts(True, kind_of(found.outside, observed), found.outside)


def carrier_addresses() -> list[str]:
    """Addresses of this machine that a provider's NAT gave it. A VPN that uses the same block gives
    single addresses, /32."""
    return [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
        and kind_of(address.address) == "carrier"
        and address.netmask != "255.255.255.255"
    ]


@dataclass(frozen=True)
class Trial:
    """What a child needs to try the bootstrap addresses as this node would."""

    network: NetworkConfig
    swarm: bytes
    secret: bytes | None
    identity: Path | None
    """This node's key; None while a node uses it, or before there is one."""
    listen: Sequence[str]
    """Multiaddrs that are free now: they are dialled back."""


def peers(trial: Trial) -> tuple[list[PeerFacts], DialBackFacts]:
    """Every bootstrap address, tried by a child."""
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
        told = child("swarmnode.p2p.reach", json.dumps(request).encode(), REACH_SECONDS, Reached)
    except ChildFailed as failed:
        return [
            PeerFacts(address, "not_tried", str(failed)) for address in trial.network.initial_peers
        ], DialBackFacts()
    return told.peers, told.dial_back


@dataclass(frozen=True)
class Reached:
    """What `p2p.reach` answers."""

    peers: list[PeerFacts]
    dial_back: DialBackFacts


def free_ports(listen: Sequence[tuple[str, int]]) -> list[str]:
    """Multiaddrs that a trial can listen on: free ones, not those that are only chosen at the first
    start."""
    free = [(host, port) for host, port in listen if port and not port_problem(host, port)]
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}" for host, port in free]


def dialled_back(node: RunningNode) -> DialBackFacts:
    """What the running node's peers found."""
    reach = node.network.nat.reach
    return DialBackFacts(reach.verdict, reach.observed, len(node.network.nat.client.relays))


# ---- clock ---------------------------------------------------------------------------------------


def clock(data_dir: Path, node: RunningNode) -> ClockFacts:
    """node: what the running one says; nothing where none runs."""
    newest = None
    for path in (
        data_dir / "peers.json",
        data_dir / "trainer" / "state.safetensors",
        data_dir / "run" / "supervisor.json",
    ):
        with contextlib.suppress(OSError):
            newest = max(newest or 0.0, path.stat().st_mtime)
    ignored = node.rollouts.admission.ignored
    return ClockFacts(
        time.time(),
        newest,
        kernel_synchronised(),
        node.rollouts.received,
        ignored.get("future", 0),
        ignored.get("stale", 0),
        node.swarm.clock_offset_seconds,
    )


def kernel_synchronised() -> bool | None:
    """What the kernel was told by whoever keeps its time; None where there is no adjtimex, or it
    may not be asked."""
    if not sys.platform.startswith("linux"):
        return None
    # struct timex, modes 0: only reads
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    return None if answer < 0 else answer != TIME_ERROR


# ---- device --------------------------------------------------------------------------------------


def device(config: Config, trial: bool = False) -> DeviceFacts:
    """trial: also try to train the model, which takes as long as loading it, and its memory."""
    cfg, request = config.policy, config.model_dump_json(include={"policy", "training"})
    hardware, driver = gpus(), nvidia_driver()
    try:
        found = examined(request, *(["--trial"] if trial else []))
    except ChildFailed as failed:
        found = DeviceFacts(error=str(failed))
        if trial:  # the model may have ended it, and not torch
            with contextlib.suppress(ChildFailed):
                error = f"a trial of {cfg.model} ended: {failed}"
                found = replace(examined(request), error=error, error_code=UNAVAILABLE)
    return replace(found, configured=cfg.device, model=cfg.model, hardware=hardware, driver=driver)


def examined(request: str, *arguments: str) -> DeviceFacts:
    """Return the result of a child process. Raises ChildFailed."""
    return child(
        "swarmnode.policy.examine",
        request.encode(),
        TRIAL_SECONDS if arguments else EXAMINE_SECONDS,
        DeviceFacts,
        *arguments,
    )


def gpus(root: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Vendors of display and compute devices on the PCI bus. A container sees them too, though it
    may not be given them."""
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
    """Version of the loaded kernel driver; empty without."""
    try:
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", path.read_text())
    except OSError:
        return ""
    return match[1] if match else "unknown"


def server(settings: ServerSettings, adapter: bool) -> ServerFacts:
    """Ask the configured inference server about itself."""
    asked = make_server(settings, adapter)
    facts = ServerFacts(settings.url, asked.name)
    try:
        about, flags = asked.about(), asked.settings()
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

    def asked(what: str) -> list[list[str]]:
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
    for card, pid, mebibytes in asked("compute-apps=gpu_uuid,pid,used_memory"):
        users.setdefault(card, []).append(f"process {pid} holds {mebibytes} MiB")
    return [
        ", ".join([f"card {index} {name}", f"{free} of {total} MiB free", *users.get(card, [])])
        for index, card, name, free, total in asked("gpu=index,uuid,name,memory.free,memory.total")
    ]


# ---- helpers -------------------------------------------------------------------------------------


class ChildFailed(Exception):
    """Raised when a child gave no answer; says why in one line."""


def child(
    module: str, request: bytes, seconds: float, answer: type[Answer], *arguments: str
) -> Answer:
    """What `python -m module` answers to `request`, as JSON in the last line that it prints."""
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
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ChildFailed(said[-1][:300] if said else f"ended with {done.returncode}") from None


class RunningReach(msgspec.Struct, frozen=True):
    verdict: Literal["unknown", "public", "private"] = "unknown"
    observed: str = ""


class RunningRelays(msgspec.Struct, frozen=True):
    relays: list[str] = []


class RunningNat(msgspec.Struct, frozen=True):
    reach: RunningReach = RunningReach()
    client: RunningRelays = RunningRelays()


class RunningNetwork(msgspec.Struct, frozen=True):
    nat: RunningNat = RunningNat()


class RunningAdmission(msgspec.Struct, frozen=True):
    ignored: dict[str, int] = {}


class RunningRollouts(msgspec.Struct, frozen=True):
    received: int = 0
    admission: RunningAdmission = RunningAdmission()


class RunningSwarm(msgspec.Struct, frozen=True):
    clock_offset_seconds: float | None = None


class RunningNode(msgspec.Struct, frozen=True):
    """What is read of a running node's snapshot."""

    network: RunningNetwork = RunningNetwork()
    rollouts: RunningRollouts = RunningRollouts()
    swarm: RunningSwarm = RunningSwarm()


class Status(msgspec.Struct, frozen=True):
    snapshot: RunningNode


def status(data_dir: Path) -> RunningNode:
    """What the node that runs in this data directory says at /status; nothing when there is none,
    or none that answers."""
    try:
        place = address.read_address(data_dir)
        if place is None:
            return RunningNode()
        body = client.fetch_status(place, points=1, seconds=STATUS_SECONDS)
        return msgspec.json.decode(body, type=Status).snapshot
    except (Unavailable, msgspec.MsgspecError, RecursionError):
        return RunningNode()


def open_files() -> int:
    """Most descriptors that a process of this user may have."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
