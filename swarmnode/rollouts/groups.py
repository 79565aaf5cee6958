"""Types of a group on its way through a node, and the messages between trainer and rollout
service. Both ends of the process link import this module.

    OwnGroup       sampled by this node: trainer → network process
    Candidate      from a peer: signature and limits are checked, not scored yet
    ExternalGroup  a scored candidate: pool → trainer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

import msgspec

from swarmnode.wire import limits
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef, Turn
from swarmnode.wire.tensors import unpack_ids

TURN_BYTES = 128
"""Memory of one turn's objects: two integers of a completion, or the header of a text."""

Outcome = Literal[
    "used",
    "forged_ids",
    "no_ids",
    "special_ids",
    "spot_check",
    "surprise",
    "improbable",
    "drift",
    "temperature",
    "untokenizable",
    "too_long",
    "too_large",
    "failed",
    "no_gradient",
]
"""The trainer's verdict on a drawn group."""


class OwnGroup(msgspec.Struct, frozen=True, tag="own_group"):
    """Trainer → network: a group to sign and publish. The network process adds model, tokenizer and
    time."""

    task: TaskRef
    policy_version: int
    sequence: int
    sampling: SamplingParams
    completions: list[Completion]
    rewards: list[float]
    """(G,), from this node's scorer. A group with equal rewards is not published; the listing shows
    the spread of the rewards."""
    components: list[dict[str, float]] = []
    """(G,) components of each reward, for display; empty if the reward is a single number."""


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Trainer → network: request for up to `count` external groups for the step at
    `policy_version`."""

    request: int
    count: int
    policy_version: int
    per_peer: int
    """Maximum number of groups of one author in the step."""


class ExternalGroup(msgspec.Struct, frozen=True):
    """An admitted group of a peer, with the prompt and the rewards that this node computed
    itself."""

    content: bytes
    """blake2b-256 of its envelope, 32 bytes."""
    peer: str
    group: RolloutGroup
    prompt: str
    rewards: list[float]
    """(G,), each in [0, 1]."""
    staleness: int
    """Own policy versions since it arrived."""
    components: list[dict[str, float]] = []
    """(G,) components of each reward, in [0, 1], computed by this node; empty if the reward is a
    single number."""
    observations: list[list[str]] = []
    """(G,) texts that the environment returned in this node's replay of each episode, one for each
    action that it received. The last text of a finished episode is included; it is shown and never
    trained on. Empty for a task of one turn."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """Network → trainer: the answer to Draw."""

    request: int
    groups: list[ExternalGroup]


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """Trainer → network: verdict on a drawn group. Verdicts other than `used` are in
    `rollouts.reasons`."""

    peer: str
    outcome: Outcome


@dataclass(frozen=True)
class GroupRules:
    """Limits on the groups that this node samples and accepts."""

    tasks: Collection[str]
    """Names of the tasks that this node trains on."""
    max_completion_length: int = limits.TOKENS
    """This node's limit, tokens."""
    meets_rules: Callable[[RolloutGroup], bool] = lambda group: True
    """Returns True if the swarm's manifest allows a group."""


class PolicyFacts(Protocol):
    """Properties of the local policy that the rollout service needs. `link.messages.Hello` has
    them."""

    @property
    def model(self) -> bytes: ...
    @property
    def tokenizer(self) -> bytes: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def tokens_per_text_byte(self) -> float: ...


class Candidate(msgspec.Struct, frozen=True):
    """A group that has passed all checks before scoring."""

    content: bytes
    peer: str
    group: RolloutGroup
    envelope: bytes = b""
    """The author's signed envelope, to be served to other peers."""
    source: str = ""
    """The peer that it was fetched from."""


def memory_bytes(
    group: RolloutGroup, prompt: str = "", observations: Sequence[Sequence[str]] = ()
) -> int:
    """Estimate the memory of a decoded group: its variable parts, 1 KiB for the group, 256 B per
    completion, and TURN_BYTES per turn and observation.

    Non-ASCII text counts four bytes per character, the most that CPython uses.
    """
    total = 1024 + len(prompt) + 256 * len(group.completions)
    for completion in group.completions:
        total += (
            _text_bytes(completion.text)
            + len(completion.token_ids)
            + len(completion.logprobs)
            + TURN_BYTES * len(completion.turns)
        )
    return total + sum(_text_bytes(text) + TURN_BYTES for each in observations for text in each)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def has_turns(completion: Completion, most: int) -> bool:
    """Return True if the number of turns fits the task: between 1 and `most` for a task of several
    turns, none for a task of one turn.

    Args:
        completion: A completion of a group.
        most: Most turns of an episode of the task; 1 for a task of one turn.
    """
    return 1 <= len(completion.turns) <= most if most > 1 else not completion.turns


def actions(completion: Completion) -> list[str]:
    """Return the text of each action of an episode, in order; for an answer, its text alone."""
    if not completion.turns:
        return [completion.text]
    data, texts, start = completion.text.encode(), list[str](), 0
    for turn in completion.turns:
        texts.append(data[start : start + turn.text_bytes].decode())
        start += turn.text_bytes
    return texts


def played_actions(completion: Completion) -> list[str]:
    """Return the actions that the environment received. An action that was cut off at the length
    limit is not given to the environment and ends the episode."""
    return actions(completion)[: -1 if completion.finish == "length" else None]


def answers(group: RolloutGroup) -> list[str | list[str]]:
    """Return the (G,) inputs of the scorer: texts, or for an episode task the actions of each
    episode.
    """
    return [played_actions(c) if c.turns else c.text for c in group.completions]


def turn_ids(completion: Completion) -> list[list[int]]:
    """Return the sampled token ids of each action, in order; empty lists if the group has none."""
    tokens = [int(token) for token in unpack_ids(completion.token_ids)]
    counts = [turn.tokens for turn in completion.turns] or [completion.tokens]
    starts = [0, *accumulate(counts)]
    return [tokens[start : start + count] for start, count in zip(starts, counts, strict=False)]


def join_turns(texts: Sequence[str], token_counts: Sequence[int]) -> tuple[str, list[Turn]]:
    """Return the text and the turns of an episode's completion.

    Args:
        texts: The text of each action.
        token_counts: The number of sampled tokens of each action.
    """
    turns = [
        Turn(len(text.encode()), tokens) for text, tokens in zip(texts, token_counts, strict=True)
    ]
    return "".join(texts), turns


UNWANTED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]"
)
"""Control characters except tab, newline and carriage return; bidirectional overrides;
noncharacters."""


def has_unwanted_characters(text: str) -> bool:
    """Return True if all nodes refuse a group with this text (protocol/02-rollouts.md,
    `charset`)."""
    return UNWANTED.search(text) is not None


def is_useful(rewards: list[float]) -> bool:
    """Return True if the rewards differ, so that some advantage is not zero."""
    return max(rewards) - min(rewards) > 1e-9


def without_token_ids(group: RolloutGroup) -> RolloutGroup:
    """Return the group without token ids and log-probabilities, which are useless with another
    tokenizer."""
    if not any(c.token_ids or c.logprobs for c in group.completions):
        return group
    bare = [msgspec.structs.replace(c, token_ids=b"", logprobs=b"") for c in group.completions]
    return msgspec.structs.replace(group, completions=bare)
