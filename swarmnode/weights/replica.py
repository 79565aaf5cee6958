"""What this node's trainer averages, as the network process knows it. Pure."""

from __future__ import annotations

from swarmnode.weights import fragments, manifest
from swarmnode.weights.local import ReplicaFacts


class LocalReplica:
    """One object for the life of the service; `facts` is None while there is no trainer, or it
    averages nothing."""

    def __init__(self) -> None:
        self.facts: ReplicaFacts | None = None
        self.fingerprint = b""
        """32 bytes; equal on two nodes that may average what both hold."""
        self.state_fingerprint = b""
        """32 bytes; equal on two nodes that hold the same and may average it."""
        self.blocks = b""
        """What is held here, packed."""
        self.limits: list[int] = []
        """Longest payload of each fragment, bytes."""
        self.outer_steps: list[int] = []
        """Outer steps taken, by fragment."""

    def start(self, facts: ReplicaFacts, swarm: bytes, base: bytes, tokenizer: bytes) -> None:
        """A trainer has said Hello."""
        self.facts, self.blocks = facts, facts.blocks()
        self.fingerprint, self.state_fingerprint = (
            of(swarm, base, tokenizer) for of in (facts.fingerprint, facts.state_fingerprint)
        )
        self.limits, self.outer_steps = facts.limits(), list(facts.outer_steps)

    def stop(self) -> None:
        self.facts = None

    @property
    def least_outer_step(self) -> int:
        """Outer steps of the fragment that has fewest."""
        return min(self.outer_steps, default=0)

    @property
    def writing_seconds(self) -> float:
        """As `manifest.writing_seconds`, of what is averaged here; 0 while that is nothing."""
        return manifest.writing_seconds(self.facts.layout) if self.facts is not None else 0.0

    def has(self, fragment: int) -> bool:
        return 0 <= fragment < len(self.limits)

    def within(self, blocks: bytes, fragment: int) -> bytes:
        """Those of `blocks` that are in `fragment`; packed, both."""
        return fragments.within(blocks, fragment, len(self.limits)) if self.has(fragment) else b""
