"""Sampling: prefill once per question, then all completions of a group from that one cache.

A question's prompt is the same for its G completions, so its keys and values are computed once and
repeated. Against `model.generate` on G copies this halves the
time with the embedded policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import DynamicCache

from swarmnode.policy.decode import Growing, decoder, left_padded, pads
from swarmnode.policy.model import Policy


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    num_generations: int
    """Completions of each prompt, G."""
    max_tokens: int
    """Sampled tokens of a completion, at most."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    episodes: bool = False
    """Whether completions are gone on with: turns of episodes."""

    def with_generations(self, count: int | None) -> Sampling:
        """Return the same with `count` completions; None changes nothing."""
        return self if count is None else replace(self, num_generations=count)


@dataclass(frozen=True)
class Sampled:
    """One completion."""

    ids: list[int]
    """Sampled tokens, the EOS token included where there is one."""
    logprobs: list[float]
    """Log-probability of each token when it was sampled, nats, <= 0; see `sample`."""
    text: str
    """Decoded, without special tokens."""
    finish: Literal["eos", "length"]
    versions: list[int] = field(default_factory=list)
    """The policy version that sampled each token; empty: all are of the present one."""
    sampled: list[bool] = field(default_factory=list)
    """Of an episode, whose `ids` hold more than that, which of them the policy sampled; empty:
    all."""


@dataclass(frozen=True)
class GroupSample:
    """All completions of one question."""

    prompt_ids: list[int]
    completions: list[Sampled]


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    alive: Callable[[], None] = lambda: None,
) -> list[GroupSample]:
    """G completions for each of Q prompts, texts or ids, in order. `alive` is called after every
    decoding step.

    An answer ends where prompt and answer fill the model's context. When half of the rows have
    ended, the model is run on the others only, where the decoder can (on a CPU it can). What is
    drawn for a row does not depend on it.

    Raises:
        torch.OutOfMemoryError: give `MicroBatcher.generate` the call to have it retried in smaller
            pieces.
        PromptTooLong: a prompt leaves no room for an answer.
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
    """As `generate`, of prompts' ids that can be run in one pass."""
    if not heads:
        return []
    # Left padding, so that every row's next position is the last column; positions count real
    # tokens only. Both (Q, P)
    ids, mask = left_padded(heads, policy.pad_id, policy.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    num_generations = sampling.num_generations
    most = [policy.room(head, sampling.max_tokens) for head in heads]
    max_tokens = max(most)
    rows = len(heads) * num_generations  # N
    ends = torch.tensor(sorted(policy.eos_ids), device=policy.device)
    stopped = torch.zeros(rows, dtype=torch.bool, device=policy.device)
    # (N,) until a row stops by itself, the tokens that it may have
    lengths = torch.tensor(most, device=policy.device).repeat_interleave(num_generations)
    tokens, logprobs = [], []
    under_way = torch.arange(rows, device=policy.device)  # (n,) those that the model is run on
    # around all steps, so that weights are cast to the compute dtype once and not at each of them
    with policy.accelerator.autocast():
        cache = DynamicCache(config=policy.base.config)
        # (N, V)
        logits = policy.logits(ids, mask, positions, 1, cache)[:, -1].repeat_interleave(
            num_generations, 0
        )
        advance = decoder(policy, cache, mask, positions[:, -1:], num_generations, max_tokens - 1)
        for step in range(max_tokens):
            token, logprob = sample(logits, sampling.temperature, sampling.top_p, generator)
            tokens.append(token)
            logprobs.append(logprob)
            ended = torch.isin(token, ends) & (lengths > step) & ~stopped
            lengths[ended] = step + 1
            stopped |= ended
            done = lengths <= step + 1
            left = rows - int(done.sum())
            if step + 1 == max_tokens or not left:
                break
            if 2 * left <= len(under_way) and isinstance(advance, Growing):
                going_on = (~done[under_way]).nonzero()[:, 0]
                under_way = under_way[going_on]
                advance.keep(going_on)
            made = advance(token[under_way])
            # of an ended row: as they were
            logits = made if len(made) == rows else logits.index_copy(0, under_way, made)
            alive()

    drawn = torch.stack(tokens, 1).tolist()  # N lists of up to T, with junk after EOS
    chances = torch.stack(logprobs, 1).tolist()
    finished, sizes = stopped.tolist(), lengths.tolist()
    completions = [
        Sampled(ids[:n], chance[:n], policy.decode(ids[:n]), "eos" if end else "length")
        for ids, chance, n, end in zip(drawn, chances, sizes, finished, strict=True)
    ]
    groups = range(0, rows, num_generations)
    return [
        GroupSample(head, completions[i : i + num_generations])
        for head, i in zip(heads, groups, strict=True)
    ]


def sample(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of logits (N, V), and its log-probability, both (N,).

    The log-probability is that of the policy at `temperature`, in float32, **before** `top_p` cuts
    the tail. So the importance ratio of a fresh group is 1 whatever top_p is, and a peer can
    recompute the value without knowing top_p. The price: below top_p = 1 the ratio does not correct
    for the cut tail (at most a factor top_p per token). At temperature 0, that of temperature 1.
    """
    scores = torch.log_softmax(logits.float() / (temperature or 1.0), -1)  # (N, V)
    if temperature == 0:
        token = scores.argmax(-1)
    else:
        chances = scores.exp()
        if top_p < 1:
            ordered, order = chances.sort(-1, descending=True)
            # the token that crosses top_p is kept, and so always the first
            beyond = ordered.cumsum(-1) - ordered >= top_p
            chances = chances.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        # argmax of p / Exp(1) is a draw from p (normalised or not) and cannot return a token of
        # probability 0.
        noise = (
            torch.empty(chances.shape, device=generator.device)
            .exponential_(generator=generator)
            .to(chances.device)
        )
        token = (chances / noise.clamp_min(torch.finfo(torch.float32).tiny)).argmax(-1)
    return token, scores.gather(-1, token[:, None])[:, 0]
