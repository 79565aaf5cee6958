"""Known peers: those that this node trusts with more than a stranger. One notion for the stages of
a policy and for the first weights of an untrained node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.swarm.manifest import members
from swarmnode.wire.manifest import VerifiedManifest

ANYONE = "anyone"
"""Entry of `stages.trust` that makes every peer a known one."""


@dataclass(frozen=True)
class KnownPeers:
    """The members of a signed list, the members of a private swarm, and the peers that the operator
    names.

    A peer does not become known by its behaviour, because an attacker may behave well for a while.
    """

    peers: frozenset[str] = frozenset()
    everyone: bool = False
    """True if every peer that can connect is known."""

    def __contains__(self, peer: str) -> bool:
        return self.everyone or peer in self.peers

    def __bool__(self) -> bool:
        """Return True if any peer can be known."""
        return self.everyone or bool(self.peers)


def known_peers(trust: Sequence[str], opened: VerifiedManifest | None) -> KnownPeers:
    """Return the known peers of a node.

    Args:
        trust: `stages.trust`.
        opened: Manifest of the swarm; None in a swarm without one.
    """
    listed = members(opened.manifest) if opened is not None else None
    is_private = opened is not None and bool(opened.manifest.access.secret)
    return KnownPeers(frozenset(trust) | (listed or frozenset()), ANYONE in trust or is_private)
