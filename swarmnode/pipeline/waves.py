"""A wave of generation as its head sees it: token ids, and nothing that could be lost with a stage.
Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.pipeline.work import Questions
from swarmnode.wire.tensors import pack_ids


@dataclass
class Wave:
    """`num_generations` completions for each prompt; completion i answers prompt i //
    num_generations."""

    session: bytes
    prompts: list[list[int]]
    num_generations: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    ends: frozenset[int]
    """Token ids that end a completion."""
    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    """Completions that go on, ascending. All have equally many tokens."""
    begun_again: int = 0
    began_at: int = 0
    """Tokens that each completion had when it was begun, or begun again."""

    def __post_init__(self) -> None:
        total = len(self.prompts) * self.num_generations
        self.ids, self.logprobs, self.live = (
            [[] for _ in range(total)],
            [[] for _ in range(total)],
            list(range(total)),
        )

    def took(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """One more token for each of `live`. Raises ValueError when there are not as many."""
        for name, token, logprob in zip(self.live, ids, logprobs, strict=True):
            self.ids[name].append(token)
            self.logprobs[name].append(logprob)
        self.live = [
            n
            for n in self.live
            if self.ids[n][-1] not in self.ends and len(self.ids[n]) < self.max_tokens
        ]

    def latest(self) -> list[int]:
        """(live,) the tokens that the next step runs."""
        return [self.ids[name][-1] for name in self.live]

    def questions(self) -> Questions:
        """How it begins, or begins again from the tokens there are: then every completion is a
        prompt of its own."""
        position = len(self.ids[self.live[0]])
        so_far = [self.prompts[name // self.num_generations] + self.ids[name] for name in self.live]
        prompts = so_far if position else self.prompts
        return Questions(
            lengths=tuple(map(len, prompts)),
            ids=pack_ids([i for prompt in prompts for i in prompt]),
            num_generations=1 if position else self.num_generations,
            names=tuple(self.live),
            total=len(self.ids),
            position=position,
            max_tokens=self.max_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            seed=self.seed,
        )


def cut(
    prompts: Sequence[list[int]], num_generations: int, max_tokens: int, waves: int, tokens: int
) -> list[tuple[list[int], int]]:
    """(indices of `prompts`, completions of each) for at least `waves` waves where there are so
    many prompts, each of at most `tokens` padded tokens. The completions of a prompt for which one
    wave is too small are in several, one behind the other.

    Raises ValueError when one completion alone is more.
    """
    size = -(-len(prompts) // waves)
    out: list[tuple[list[int], int]] = []
    longest = 0
    for index, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        fits = tokens // (len(prompt) + max_tokens)
        if not fits:
            raise ValueError(
                f"a wave holds {tokens} tokens, and one completion needs {len(prompt) + max_tokens}"
            )
        if fits < num_generations:
            out += [
                ([index], min(fits, num_generations - done))
                for done in range(0, num_generations, fits)
            ]
            longest = tokens  # nobody else's completions go there
        elif (
            out
            and len(out[-1][0]) < size
            and (len(out[-1][0]) + 1) * num_generations * (longest + max_tokens) <= tokens
        ):
            out[-1][0].append(index)
        else:
            out.append(([index], num_generations))
            longest = len(prompt)
    return out
