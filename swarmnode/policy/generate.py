"""Sampling: one prefill per question, then all completions of the group from its cache.

The G completions of a question share its prompt, so its keys and values are computed once and
repeated. With the embedded policy this takes half the time of `model.generate` on G copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from swarmnode.policy.decode import Decoder, grow, pads
from swarmnode.policy.model import Policy
from swarmnode.policy.slots import fill, unsuited

ROOM = 256
"""Number of tokens for which memory is allocated at first, because most completions are much
shorter than allowed."""
BLOCK = 512
"""Number of tokens in one block of the vocabulary; sampling first draws a block."""
CACHED_LOGITS = 2**18
"""Number of logits that a CPU samples from at a time. They are read several times and must stay in
the cache: 13 ms instead of 41 ms for 64 rows of 151,936 logits."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling."""

    num_generations: int
    """Completions per prompt, G."""
    max_tokens: int
    """Largest number of sampled tokens in a completion."""
    temperature: float = 1.0
    """0 means greedy decoding."""
    top_p: float = 1.0
    episodes: bool = False
    """True if requests may follow completions, as the turns of episodes do."""

    def with_generations(self, count: int | None) -> Sampling:
        """Return a copy with `count` completions per prompt; None keeps the number."""
        return self if count is None else replace(self, num_generations=count)


@dataclass(frozen=True)
class SampledCompletion:
    """A sampled completion."""

    ids: list[int]
    """Sampled tokens, including the EOS token if there is one."""
    logprobs: list[float]
    """Log-probability of each token at sampling, nats, ≤ 0; see `sample`."""
    text: str
    """Decoded text, without special tokens."""
    finish: Literal["eos", "length"]
    versions: list[int] = field(default_factory=list)
    """Policy version that sampled each token; empty if the present policy sampled all."""
    sampled: list[bool] = field(default_factory=list)
    """True for each of an episode's `ids` that the policy sampled, False for those of the
    environment; empty if the policy sampled all."""


@dataclass(frozen=True)
class GroupSample:
    """All completions of one question."""

    prompt_ids: list[int]
    completions: list[SampledCompletion]


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    alive: Callable[[], None] = lambda: None,
) -> list[GroupSample]:
    """Sample G completions for each of Q prompts, given as texts or ids, in order.

    Prompt and completion together are at most as long as the model's context. When half of the rows
    have ended, the model runs only on the remaining rows. This does not change the random numbers
    of any row.

    Args:
        alive: Called after every decoding step.

    Raises:
        torch.OutOfMemoryError: Memory ran out. `MicroBatcher.generate` retries in smaller pieces.
        PromptTooLong: A prompt leaves no room for a completion.
    """
    heads = [policy.prompt_ids(p) for p in prompts]
    widths = sorted(set(map(len, heads)))
    if len(widths) <= 1 or pads(policy):
        return _generate(policy, heads, sampling, generator, alive)
    made: dict[int, GroupSample] = {}
    for width in widths:
        some = [i for i, head in enumerate(heads) if len(head) == width]
        groups = _generate(policy, [heads[i] for i in some], sampling, generator, alive)
        made |= zip(some, groups, strict=True)
    return [made[i] for i in range(len(heads))]


def _generate(
    policy: Policy,
    heads: Sequence[list[int]],
    sampling: Sampling,
    generator: torch.Generator,
    alive: Callable[[], None],
) -> list[GroupSample]:
    """Implement `generate` for prompt ids that can run in one pass."""
    if not heads:
        return []
    num_generations = sampling.num_generations
    most = [policy.room(head, sampling.max_tokens) for head in heads]
    max_tokens = max(most)
    rows = len(heads) * num_generations  # N
    ends = torch.tensor(sorted(policy.eos_ids), device=policy.device)
    stopped = torch.zeros(rows, dtype=torch.bool, device=policy.device)
    # (N,) length of each row; the largest allowed one until the row has ended
    lengths = torch.tensor(most, device=policy.device).repeat_interleave(num_generations)
    drawn = torch.zeros(rows, max_tokens, dtype=torch.long, device=policy.device)  # (N, T)
    chances = torch.zeros(rows, max_tokens, device=policy.device)  # (N, T), nats
    under_way = torch.arange(rows, device=policy.device)  # (n,) rows that the model is run on
    # Autocast encloses all steps, so that weights are cast to the compute dtype only once.
    with policy.accelerator.autocast():
        decoder: Decoder
        if unsuited(policy):
            decoder, logits = grow(policy, heads, num_generations, max_tokens - 1)
        else:
            columns = max(map(len, heads)) + min(max_tokens, ROOM)
            decoder, logits = fill(policy, heads, num_generations, columns)  # logits (n, V)
        for step in range(max_tokens):
            # Numbers are drawn for all rows, so that they do not depend on which rows are active.
            uniform = uniforms(rows, generator).to(policy.device)[under_way]
            token, logprob = draw(logits, sampling.temperature, sampling.top_p, uniform)
            drawn[under_way, step], chances[under_way, step] = token, logprob
            may_stop = lengths[under_way] > step  # False for a row that has ended
            ended = under_way[(token[:, None] == ends).any(1) & may_stop]
            lengths[ended], stopped[ended] = step + 1, True
            unfinished = lengths[under_way] > step + 1
            left = int(unfinished.sum())
            if step + 1 == max_tokens or not left:
                break
            if 2 * left <= len(under_way):
                under_way, token = under_way[unfinished], token[unfinished]
                decoder.keep(unfinished.nonzero()[:, 0].tolist())
            logits = decoder.advance(token)
            alive()

    finished, sizes = stopped.tolist(), lengths.tolist()
    completions = [
        SampledCompletion(ids[:n], chance[:n], policy.decode(ids[:n]), "eos" if end else "length")
        for ids, chance, n, end in zip(
            drawn.tolist(), chances.tolist(), sizes, finished, strict=True
        )
    ]
    groups = range(0, rows, num_generations)
    return [
        GroupSample(head, completions[i : i + num_generations])
        for head, i in zip(heads, groups, strict=True)
    ]


@torch.no_grad()
def stream(
    policy: Policy, prompt_ids: list[int], sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    """Yield the tokens of one completion as they are sampled, including the EOS token if there is
    one.

    Raises:
        PromptTooLong: The prompt leaves no room for a completion.
    """
    most = policy.room(prompt_ids, sampling.max_tokens)
    decoder: Decoder
    if unsuited(policy):
        decoder, logits = grow(policy, [prompt_ids], 1, most - 1)
    else:
        decoder, logits = fill(policy, [prompt_ids], 1, len(prompt_ids) + min(most, ROOM))
    for step in range(most):
        token, _ = sample(logits, sampling.temperature, sampling.top_p, generator)
        found = int(token)
        yield found
        if found in policy.eos_ids or step + 1 == most:
            return
        logits = decoder.advance(token)


def sample(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of logits (N, V). Return tokens and their log-probabilities, both
    (N,).

    The log-probability is that of the policy at `temperature`, in float32, **before** `top_p` cuts
    the tail. Therefore the importance ratio of a fresh group is 1 for every top_p, and a peer can
    recompute the value without knowing top_p. On the other hand the ratio does not correct for the
    cut tail, by at most a factor top_p per token. At temperature 0 the most likely token is
    returned, with its log-probability at temperature 1.
    """
    return draw(logits, temperature, top_p, uniforms(len(logits), generator).to(logits.device))


def uniforms(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return the random numbers (rows, 2) in [0, 1) with which `draw` draws one token per row."""
    return torch.rand(rows, 2, generator=generator, device=generator.device)


def draw(
    logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as `sample` does, with given random numbers (N, 2)."""
    rows = len(logits)
    if logits.device.type == "cpu":
        rows = max(1, CACHED_LOGITS // logits.shape[1])
    parts = [
        _draw(some, temperature, top_p, numbers)
        for some, numbers in zip(logits.split(rows), uniform.split(rows), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([token for token, _ in parts]), torch.cat([chance for _, chance in parts])


def _draw(
    logits: torch.Tensor, temperature: float, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    chances = torch.softmax(logits.float() / (temperature or 1.0), -1)  # (n, V)
    if temperature == 0:
        token = chances.argmax(-1, keepdim=True)  # (n, 1)
    elif top_p < 1:
        ordered, order = chances.sort(-1, descending=True)
        # The token that crosses top_p is kept, so there is always at least one token.
        beyond = ordered.cumsum(-1) - ordered >= top_p
        token = order.gather(-1, _drawn(ordered.masked_fill(beyond, 0.0), uniform))
    else:
        token = _drawn(chances, uniform)
    return token[:, 0], chances.gather(-1, token).log()[:, 0]


def _drawn(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one column (n, 1) per row in proportion to weights (n, V).

    Draw a block of columns by the blocks' sums first, then a column within the block.
    """
    if weights.shape[1] <= BLOCK:
        return _inverted(weights, uniform[:, :1])
    missing = -weights.shape[1] % BLOCK
    blocks = torch.nn.functional.pad(weights, (0, missing)).unflatten(-1, (-1, BLOCK))
    block = _inverted(blocks.sum(-1), uniform[:, :1])  # (n, 1)
    row = torch.arange(len(weights), device=weights.device)
    return block * BLOCK + _inverted(blocks[row, block[:, 0]], uniform[:, 1:])


def _inverted(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first column (n, 1) at which the cumulative sum of weights (n, K) exceeds
    `uniform` (n, 1) times their total, by the inverse of the cumulative distribution."""
    sums = weights.cumsum(-1)
    found = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    found = found.clamp(max=weights.shape[1] - 1)
    # rounding in a parallel sum may select a column of weight 0
    return torch.where(weights.gather(-1, found) > 0, found, weights.argmax(-1, keepdim=True))
