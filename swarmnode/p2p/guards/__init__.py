"""Repairs of defects in py-libp2p 0.8.1 that a stranger could exploit or that lose data.

    guards.install()                                     once, before a host is built
    host = guards.guard_host(new_host(key_pair=keys, sec_opt=guards.noise_only(keys),
    muxer_opt=guards.YAMUX_ONLY, …))
    async with guards.running(host, addresses): …

The guards replace private methods, so the version is pinned and checked. Each guard's docstring has
the sections Defect, Upstream (file), Guard, Cost, Remove when and Tests. `python tools/guards.py`
makes the table of docs/py-libp2p.md from them. Each test first reproduces the defect on a stock
host.
"""

import importlib.metadata

from swarmnode.errors import Refused
from swarmnode.p2p.guards import inbox, packets, peerstore, swarm, transport, yamux
from swarmnode.p2p.guards.counting import NAMES, GuardStatistics, statistics
from swarmnode.p2p.guards.swarm import guard_host, running
from swarmnode.p2p.guards.transport import YAMUX_ONLY, noise_only

VERSION = "0.8.1"
"""The only py-libp2p version that these guards fit."""

__all__ = [
    "NAMES",
    "VERSION",
    "YAMUX_ONLY",
    "GuardStatistics",
    "guard_host",
    "install",
    "noise_only",
    "running",
    "statistics",
]

_installed = False


def install() -> None:
    """Replace the defective methods for this process. A second call does nothing. Raises Refused
    for any other version of py-libp2p."""
    global _installed
    found = importlib.metadata.version("libp2p")
    if found != VERSION:
        raise Refused(
            f"py-libp2p {found} is installed, but the guards of this node are made for {VERSION}:"
            f" pip install libp2p=={VERSION}"
        )
    if not _installed:
        yamux.install()
        inbox.install()
        packets.install()
        swarm.install()
        peerstore.install()
        transport.install()
        _installed = True
