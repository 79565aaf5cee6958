"""Networks with routers, made of Linux network namespaces: a "public" bridge and private networks
behind masquerading NAT. Root only.

    with Topology() as net:
        net.public("relay", "5.5.5.5")        # a namespace on the bridge
        # 192.168.1.2 in namespace a behind a router at 5.5.5.11, which blocks inbound connections
        net.behind_nat("a", "5.5.5.11")
        net.spawn("a", [sys.executable, …])   # a process in the namespace

The namespaces have no route to the internet, so public addresses can be used; without a public
address a node assumes a LAN. Namespaces have unique names. They are removed with their processes,
also after a failure.
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
"""How a router chooses the outside port: `preserving` uses the inside port if it is free, the
others use another port for each connection."""

END_SECONDS = 5.0
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
"""For setns(2), which Python has only since 3.12."""


def missing() -> str:
    """Return the reason why namespaces are unavailable, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian: apt-get install iproute2 nftables)"
    probe = f"sn{secrets.token_hex(3)}-p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container does not allow network namespaces"
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
    """Move the calling thread, and the processes it starts, into that network namespace. Raise
    OSError."""
    with open(namespace) as file:
        if LIBC.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


class Topology:
    """A bridge `5.5.5.0/24` and the hosts attached to it. Methods raise OSError when the kernel
    refuses an operation."""

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
                with contextlib.suppress(ProcessLookupError):  # a child of a spawned process
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def public(self, name: str, address: str) -> None:
        """Add a namespace with one interface on the bridge. address: IPv4, or IPv6 only."""
        self._add(name)
        self._plug(name, address)

    def move(self, name: str, outside: str) -> None:
        """Restart the router in front of `name` with another outside address.

        No packet passes for two seconds. The connection table is lost, without a notice to
        either side.
        """
        router = self._routers[name]
        self._in(router, "ip addr flush dev outside", "ip link set outside down")
        time.sleep(2.0)
        self._in(router, f"ip addr add {outside}/24 dev outside", "ip link set outside up")

    def behind_nat(self, name: str, outside: str, kind: Kind = "preserving") -> None:
        """Add a namespace `name` in a private network behind a router that masquerades as
        `outside`.

        The router drops inbound packets without an outbound connection.
        """
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
        rules = f"""
            table ip router {{
                chain outgoing {{ type nat hook postrouting priority 100;
                    oifname "outside" masquerade {flag}; }};
                chain through {{ type filter hook forward priority 0; policy drop;
                    iifname "inside" accept; ct state established,related accept; }};
                chain incoming {{ type filter hook input priority 0; policy drop;
                    ct state established,related accept;
                    meta l4proto tcp drop; }};
            }}
        """
        self._in(router, "nft -f -", data=rules)

    def spawn(self, name: str, command: list[str], **options: Any) -> subprocess.Popen:
        """Start `command` in the namespace. It is killed with the topology. options: of
        subprocess.Popen."""
        process = subprocess.Popen(["ip", "netns", "exec", self._ns(name), *command], **options)
        self._processes.append(process)
        return process

    def kill(self, process: subprocess.Popen) -> None:
        """Kill the process without a chance to drain. The kernel still closes its connections."""
        if process.poll() is None:
            process.kill()
            process.wait(END_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def kill_all(self, name: str) -> None:
        """Simulate a power cut of that machine: kill every process in the namespace at once."""
        while pids := self._pids(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()  # reaps direct children; init reaps the rest

    def run(self, name: str, command: list[str], **options: Any) -> subprocess.CompletedProcess:
        """Run `command` in the namespace to its end. options: of subprocess.run."""
        return subprocess.run(["ip", "netns", "exec", self._ns(name), *command], **options)

    def get(self, name: str, url: str, seconds: float = 30.0) -> str:
        """Return the answer of an HTTP server in the namespace, or an empty string on failure.

        A thread of this process sends the request, so frequent calls are cheap.
        """

        def ask() -> str:
            enter(self.file(name))  # affects only this short-lived thread
            try:
                with urllib.request.urlopen(url, timeout=seconds) as answer:
                    return answer.read().decode()
            except (OSError, http.client.HTTPException):
                return ""

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(ask).result()

    def file(self, name: str) -> str:
        """Return the path of the namespace for `enter`."""
        return f"/run/netns/{self._ns(name)}"

    def _pids(self, name: str) -> list[int]:
        return self._pids_of(self._ns(name))

    @staticmethod
    def _pids_of(namespace: str) -> list[int]:
        listing = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True
        ).stdout
        return [int(pid) for pid in listing.split()]

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
