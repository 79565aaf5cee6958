"""Sampling: prefill once per question, then all completions of a group from that one cache.

A question's prompt is the same for its G completions, so its keys and values are computed once and repeated
(`cache.batch_repeat_interleave`). Against `model.generate` on G copies this halves the time with the embedded policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import DynamicCache

from swarmnode.policy.decode import decoder
from swarmnode.policy.load import Policy


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


@dataclass(frozen=True)
class GroupSample:
    """All completions of one question."""

    prompt_ids: list[int]
    completions: list[Sampled]


class Engine(Protocol):
    """What generates. `generate` below is one; a server of another process can be another."""

    def __call__(
        self, policy: Policy, prompts: Sequence[str], num_generations: int, max_tokens: int, temperature: float, top_p: float,
        generator: torch.Generator, /,
    ) -> list[GroupSample]: ...  # fmt: skip


@torch.no_grad()
def generate(
    policy: Policy, prompts: Sequence[str], num_generations: int, max_tokens: int, temperature: float, top_p: float,
    generator: torch.Generator,
) -> list[GroupSample]:  # fmt: skip
    """G = `num_generations` completions of at most `max_tokens` tokens for each of Q prompts, in order. Temperature 0 is greedy.

    Raises torch.OutOfMemoryError; give `MicroBatcher.generate` the call to have it retried in smaller pieces.
    """
    if not prompts:
        return []
    heads = [policy.encode_prompt(p) for p in prompts]
    width = max(map(len, heads))
    # Left padding, so that every row's next position is the last column; positions count real tokens only.
    ids = torch.tensor([[policy.pad_id] * (width - len(h)) + h for h in heads], device=policy.device)  # (Q, P)
    mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in heads], device=policy.device)  # (Q, P)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = len(heads) * num_generations  # N
    ends = torch.tensor(sorted(policy.eos_ids), device=policy.device)
    done = torch.zeros(rows, dtype=torch.bool, device=policy.device)
    lengths = torch.full((rows,), max_tokens, device=policy.device)
    tokens, logprobs = [], []
    with policy.accelerator.autocast():  # around all steps, so that weights are cast to the compute dtype once and not at each of them
        cache = DynamicCache(config=policy.model.config)
        output = policy.logits(keep=1, input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1].repeat_interleave(num_generations, 0)  # (N, V)
        advance = decoder(policy, cache, mask, positions[:, -1:], num_generations, max_tokens - 1)
        for step in range(max_tokens):
            token, logprob = sample(logits, temperature, top_p, generator)
            tokens.append(token)
            logprobs.append(logprob)
            ended = torch.isin(token, ends) & ~done
            lengths[ended] = step + 1
            done |= ended
            if step + 1 == max_tokens or bool(done.all()):
                break
            logits = advance(token)

    drawn = torch.stack(tokens, 1).tolist()  # N lists of up to T, with junk after EOS
    chances = torch.stack(logprobs, 1).tolist()
    finished, sizes = done.tolist(), lengths.tolist()
    completions = [
        Sampled(ids[:n], chance[:n], policy.decode(ids[:n]), "eos" if end else "length")
        for ids, chance, n, end in zip(drawn, chances, sizes, finished, strict=True)
    ]
    groups = range(0, rows, num_generations)
    return [GroupSample(head, completions[i : i + num_generations]) for head, i in zip(heads, groups, strict=True)]


def sample(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of logits (N, V), and its log-probability, both (N,).

    The log-probability is that of the policy at `temperature`, in float32, **before** `top_p` cuts the tail. So the importance
    ratio of a fresh group is 1 whatever top_p is, and a peer can recompute the value without knowing top_p. The price: below
    top_p = 1 the ratio does not correct for the cut tail (at most a factor top_p per token). At temperature 0, that of temperature 1.
    """
    scores = torch.log_softmax(logits.float() / (temperature or 1.0), -1)  # (N, V)
    if temperature == 0:
        token = scores.argmax(-1)
    else:
        chances = scores.exp()
        if top_p < 1:
            ordered, order = chances.sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p is kept, and so always the first
            chances = chances.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        # argmax of p / Exp(1) is a draw from p (normalised or not) and cannot return a token of probability 0.
        noise = torch.empty(chances.shape, device=generator.device).exponential_(generator=generator).to(chances.device)
        token = (chances / noise.clamp_min(torch.finfo(torch.float32).tiny)).argmax(-1)
    return token, scores.gather(-1, token[:, None])[:, 0]
