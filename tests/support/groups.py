"""Unsigned pool entries for tests. `swarmnode.demo.liar.author` makes signed groups."""

from __future__ import annotations

from swarmnode.demo.liar.author import MODEL, SAMPLING, TOKENIZER, completion
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.wire.messages import RolloutGroup, TaskRef


def external_group(
    peer: str, number: int, rewards: list[float] | None = None, text: str = "12"
) -> ExternalGroup:
    """Return an admitted group as the pool holds it. `number` determines its content id. The group
    has no signature and its task does not exist."""
    rewards = [0.0, 1.0] if rewards is None else rewards
    task = TaskRef(id="builtin/none", version="0", seed=0, index=0)
    completions = [completion(text, packed=False) for _ in rewards]
    group = RolloutGroup(task, MODEL, TOKENIZER, 0, 0, number, SAMPLING, completions)
    return ExternalGroup(
        number.to_bytes(8, "big") + peer.encode().ljust(24)[:24], peer, group, "?", rewards, 0
    )
