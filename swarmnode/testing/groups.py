"""Groups for tests: pool entries without a network here, signed frames (valid ones and hostile ones) further down."""

from __future__ import annotations

from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef

MODEL = b"m" * 32
TOKENIZER = b"t" * 32
EMPTY_TASK = TaskRef(id="builtin/none", version="0", seed=0, index=0)


def completions(texts: list[str], logprob_per_token: float = -0.5) -> list[Completion]:
    """One token per character, without packed ids."""
    return [
        Completion(text=text, tokens=max(1, len(text)), logprob=logprob_per_token * max(1, len(text)), finish="eos") for text in texts
    ]


def external_group(peer: str, number: int, rewards: list[float] | None = None, text: str = "12") -> ExternalGroup:
    """An admitted group as the pool holds it; `number` makes its content id."""
    rewards = [0.0, 1.0] if rewards is None else rewards
    group = RolloutGroup(
        task=EMPTY_TASK,
        model=MODEL,
        tokenizer=TOKENIZER,
        policy_version=0,
        created_at=0,
        sequence=number,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, max_tokens=8),
        completions=completions([text] * len(rewards)),
    )
    return ExternalGroup(
        content=number.to_bytes(8, "big") + peer.encode().ljust(24)[:24], peer=peer, group=group, prompt="?", rewards=rewards, staleness=0
    )
