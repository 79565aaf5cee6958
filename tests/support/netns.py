"""Networks with routers, made of Linux network namespaces: a "public" bridge, private networks
behind masquerading NAT. Root only.

    with Topology() as net:
        net.public("relay", "5.5.5.5")             # a namespace on the bridge
        net.behind_nat("a", "5.5.5.11")            # 192.168.1.2 in namespace a, router at 5.5.5.11;
        nothing comes in unasked
        net.spawn("a", [sys.executable, …])        # a process in there

Nothing leaves: the namespaces have no way out, so that public addresses can be used, without which
a node takes itself to be on a LAN. Namespaces have names of their own and are torn down with the
processes that were spawned in them, also after a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

Kind = Literal["preserving", "random", "fully-random"]
"""How a router chooses the outside port: the inside one if it is free; or any other for each
connection."""

END_SECONDS = 5.0
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
"""For setns(2), which Python has since 3.12."""


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian: apt-get install iproute2 nftables)"
    probe = f"sn{secrets.token_hex(3)}-p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container does not let us make network namespaces"
    try:
        rules = "table ip t { chain c { type nat hook postrouting priority 100; masquerade; }; }"
        load = subprocess.run(
            ["ip", "netns", "exec", probe, "nft", "-f", "-"],
            input=rules.encode(),
            capture_output=True,
        )
        return "this kernel has no nftables masquerading" if load.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)


def enter(namespace: str) -> None:
    """Have the calling thread, and what it starts, in that network namespace. Raises OSError."""
    with open(namespace) as file:
        if LIBC.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


class Topology:
    """A bridge `5.5.5.0/24` and what hangs on it. Raises OSError when the kernel refuses
    something."""

    def __init__(self) -> None:
        self._tag = f"sn{secrets.token_hex(2)}"
        self._names: list[str] = []
        self._processes: list[subprocess.Popen] = []
        self._routers: dict[str, str] = {}

    def __enter__(self) -> Topology:
        try:
            self._add("wan")
            self._in("wan", "ip link add br0 type bridge", "ip link set br0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            self.kill(process)
        for name in self._names:
            for pid in self._pids_of(name):
                with contextlib.suppress(ProcessLookupError):  # a child of what was spawned
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def public(self, name: str, address: str) -> None:
        """A namespace with one interface on the bridge. address: IPv4, or IPv6 and nothing else."""
        self._add(name)
        self._plug(name, address)

    def move(self, name: str, outside: str, *, dark_seconds: float = 2.0) -> None:
        """The router in front of `name` starts again and has another outside address: nothing
        gets through meanwhile, and what it knew of connections is gone, without a word to either
        side."""
        router = self._routers[name]
        self._in(router, "ip addr flush dev outside", "ip link set outside down")
        time.sleep(dark_seconds)
        self._in(router, f"ip addr add {outside}/24 dev outside", "ip link set outside up")

    def behind_nat(
        self, name: str, outside: str, kind: Kind = "preserving", *, resets: bool = False
    ) -> None:
        """A namespace `name` in a private network whose router masquerades as `outside`, and drops
        what was not asked for from inside; with `resets` it answers that with a TCP reset."""
        number = len(self._routers) + 1
        router = self._routers[name] = f"{name}r"
        self._add(router)
        self._add(name)
        self._plug(router, outside)
        self._run(
            f"ip link add {self._tag}i netns {self._ns(router)} type veth peer name eth0 netns"
            f" {self._ns(name)}"
        )
        self._in(
            router,
            f"ip link set {self._tag}i name inside",
            f"ip addr add 192.168.{number}.1/24 dev inside",
            "ip link set inside up",
            "sysctl -qw net.ipv4.ip_forward=1",
        )
        self._in(
            name,
            f"ip addr add 192.168.{number}.2/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via 192.168.{number}.1",
        )
        flag = "" if kind == "preserving" else kind
        last = "reject with tcp reset;" if resets else ""
        rules = f"""
            table ip router {{
                chain outgoing {{ type nat hook postrouting priority 100;
                    oifname "outside" masquerade {flag}; }};
                chain through {{ type filter hook forward priority 0; policy drop;
                    iifname "inside" accept; ct state established,related accept; }};
                chain incoming {{ type filter hook input priority 0; policy drop;
                    ct state established,related accept;
                    meta l4proto tcp {last or "drop;"} }};
            }}
        """
        self._in(router, "nft -f -", data=rules)

    def spawn(self, name: str, command: list[str], **options: Any) -> subprocess.Popen:
        """Starts `command` in the namespace; killed when the topology goes. `options`: of
        subprocess.Popen."""
        process = subprocess.Popen(["ip", "netns", "exec", self._ns(name), *command], **options)
        self._processes.append(process)
        return process

    def kill(self, process: subprocess.Popen) -> None:
        """As a power cut would, as far as the process is concerned; its kernel still says
        goodbye."""
        if process.poll() is None:
            process.kill()
            process.wait(END_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def kill_all(self, name: str) -> None:
        """As a power cut of that machine: every process in the namespace at once, without a chance
        to drain."""
        while pids := self._pids(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()  # ours are reaped, the others by whoever they were left to

    def run(self, name: str, command: list[str], **options: Any) -> subprocess.CompletedProcess:
        """Runs `command` in the namespace to its end. `options`: of subprocess.run."""
        return subprocess.run(["ip", "netns", "exec", self._ns(name), *command], **options)

    def get(self, name: str, url: str, seconds: float = 30.0) -> str:
        """What an HTTP server in the namespace answers; empty if it does not. A thread of this
        process asks: it may be done often."""

        def ask() -> str:
            enter(self.file(name))  # this thread, which ends here
            try:
                with urllib.request.urlopen(url, timeout=seconds) as answer:
                    return answer.read().decode()
            except (OSError, http.client.HTTPException):
                return ""

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(ask).result()

    def file(self, name: str) -> str:
        """The namespace as `enter` takes it."""
        return f"/run/netns/{self._ns(name)}"

    def _pids(self, name: str) -> list[int]:
        return self._pids_of(self._ns(name))

    @staticmethod
    def _pids_of(namespace: str) -> list[int]:
        told = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True
        ).stdout
        return [int(pid) for pid in told.split()]

    def _ns(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _add(self, name: str) -> None:
        self._run(f"ip netns add {self._ns(name)}")
        self._names.append(self._ns(name))
        self._in(name, "ip link set lo up")

    def _plug(self, name: str, address: str) -> None:
        port = f"p{len(self._names)}"
        self._run(
            f"ip link add outside netns {self._ns(name)} type veth peer name {port} netns"
            f" {self._ns('wan')}"
        )
        self._in("wan", f"ip link set {port} master br0", f"ip link set {port} up")
        self._in(
            name,
            (
                f"ip addr add {address}/64 dev outside nodad"
                if ":" in address
                else f"ip addr add {address}/24 dev outside"
            ),
        )
        self._in(name, "ip link set outside up")

    def _in(self, name: str, *commands: str, data: str | None = None) -> None:
        for command in commands:
            self._run(f"ip netns exec {self._ns(name)} {command}", data)

    @staticmethod
    def _run(command: str, data: str | None = None) -> None:
        done = subprocess.run(
            command.split(), capture_output=True, input=None if data is None else data.encode()
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.decode().strip()}")
