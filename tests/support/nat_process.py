"""The parent's side of nat_child.py: hosts in the namespaces of a `Topology`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import forked, nat_child
from tests.support.netns import Topology

END_SECONDS = 5.0


class NatHost:
    """A host process in a namespace. It ends when killed or garbage-collected.

    The key and the port stay in `directory`, so that the host can be restarted.

    Args:
        name: The namespace.
        swarm: Swarm id, 32 bytes in hex.
        settings: Fields of NetworkConfig.
    """

    def __init__(
        self,
        net: Topology,
        name: str,
        directory: Path,
        *,
        swarm: str = "09" * 32,
        **settings: object,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self._log = directory / "log"
        self._orders, orders = forked.context.Pipe()
        options = (net.file(name), directory, {"mdns": False, **settings}, bytes.fromhex(swarm))
        self.process = forked.context.Process(
            target=nat_child.run, args=(*options, orders), daemon=True
        )
        self.process.start()
        orders.close()
        hello = self._read()
        self.peer: str = hello["peer"]
        self.addrs: list[str] = hello["addrs"]

    def do(self, what: str, **arguments: object) -> dict[str, Any]:
        """Send one request; see nat_child.py."""
        self._orders.send({"do": what, **arguments})
        return self._read()

    def kill(self) -> None:
        """Kill the process without a chance to drain. The kernel still closes its connections."""
        self.process.kill()
        self.process.join(END_SECONDS)

    def log(self) -> str:
        return self._log.read_text()

    def sees(self, other: NatHost) -> str:
        """Return `direct`, `relayed` or an empty string."""
        known = self.do("stat")["peers"].get(other.peer)
        return "" if known is None else "direct" if known["direct"] else "relayed"

    def _read(self) -> dict[str, Any]:
        try:
            return self._orders.recv()
        except EOFError:
            raise RuntimeError(f"the host ended: {self.log()[-2000:]}") from None
