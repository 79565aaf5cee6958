"""The parent's side of nat_child.py: hosts in the namespaces of a `Topology`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.netns import Topology


class NatHost:
    """`name`: the namespace. `swarm`: its id, 32 bytes in hex. `settings`: fields of NetworkConfig.
    Its key and port stay in `directory`, so that it can be started again."""

    def __init__(self, net: Topology, name: str, directory: Path, *, swarm: str = "09" * 32, **settings: object) -> None:
        directory.mkdir(exist_ok=True)
        self._net = net
        self._log = directory / "log"
        command = [sys.executable, "-m", "tests.support.nat_child", str(directory), json.dumps({"mdns": False, **settings}), swarm]
        with open(self._log, "ab") as log:
            self.process = net.spawn(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        hello = self._read()
        self.peer: str = hello["peer"]
        self.addrs: list[str] = hello["addrs"]

    def do(self, what: str, **arguments: object) -> dict[str, Any]:
        """See nat_child.py."""
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self._net.kill(self.process)

    def log(self) -> str:
        return self._log.read_text()

    def sees(self, other: NatHost) -> str:
        """`direct`, `relayed`, or nothing."""
        known = self.do("stat")["peers"].get(other.peer)
        return "" if known is None else "direct" if known["direct"] else "relayed"

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the host ended: {self.log()[-2000:]}")
        return json.loads(line)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """The first true value of `condition()`. Raises AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")
