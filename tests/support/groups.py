"""Unsigned pool entries for tests. `swarmnode.demo.liar.author` makes signed groups."""

from __future__ import annotations

import math

from swarmnode.demo.liar.author import MODEL, SAMPLING, TOKENIZER, completion
from swarmnode.policy.generate import GroupSample
from swarmnode.policy.load import Policy
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs


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


def sampled_group(
    policy: Policy,
    sample: GroupSample,
    prompt: str,
    rewards: list[float],
    *,
    task: TaskRef = TaskRef("rg/gcd", "v", 0, 0),  # noqa: B008 - immutable
    sequence: int = 0,
    temperature: float = 1.0,
    model: bytes | None = None,
    tokenizer: bytes | None = None,
    packed: bool = True,
) -> ExternalGroup:
    """Return the admitted group of a peer that has sampled with `policy`. model, tokenizer: what
    the peer claims instead. packed: False for a group without token ids."""
    completions = [
        Completion(
            c.text,
            len(c.ids),
            min(0.0, math.fsum(c.logprobs)),
            c.finish,
            pack_ids(c.ids) if packed else b"",
            pack_logprobs(c.logprobs) if packed else b"",
        )
        for c in sample.completions
    ]
    made_by = model or policy.fingerprint, tokenizer or policy.tokenizer_hash
    sampling = SamplingParams(temperature, 1.0, 8)
    group = RolloutGroup(task, *made_by, 0, 0, sequence, sampling, completions)
    content = sequence.to_bytes(32, "big")
    return ExternalGroup(content, "12D3KooWpeer", group, prompt, rewards, 0)
