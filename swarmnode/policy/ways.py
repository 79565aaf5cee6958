"""Detects which methods of computing log-probabilities work with a model, by trying each once.

The flags of a model class do not show three facts: whether the model applies a given attention mask
unchanged, whether padding changes a result, and whether rows can share one cache (slots). Therefore
each method is compared with the reference: one row at a time, without padding, mask or cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, TypeVar

import structlog
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from swarmnode.policy.model import Policy

log = structlog.get_logger("swarmnode.trainer")

T = TypeVar("T")
GAP_BOUND = {torch.float32: 0.002}
"""Largest mean difference of log-probabilities from the reference method (row by row), in nats per
token, at which a method counts as correct. Rounding causes a thousandth of that."""
GAP_BOUNDS_ELSEWHERE = 0.03, 0.2
"""Lower and upper limit of the bound in 16 bits, which is ten times this model's rounding."""
TEXT = "What is 3 + 4? It is 7, because 3 + 4 = 7."


class Row(NamedTuple):
    """A prompt and the ids after it, both non-empty. Only sampled ids are scored and trained on."""

    prompt: list[int]
    completion: list[int]
    """(T,). For an episode: the ids that the policy sampled, and between them the observations with
    the text that the chat template adds."""
    sampled: Sequence[bool] = ()
    """(T,) True at ids of the completion that the policy sampled; empty if it sampled all."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.sampled) if self.sampled else len(self.completion)

    def first(self, count: int) -> Row:
        """Return the row with the first `count` ids of the completion."""
        return Row(self.prompt, self.completion[:count], self.sampled[:count])

    def at_sampled(self, values: Sequence[T]) -> list[T]:
        """Return the entries of `values` (T,), one per id of the completion, at sampled ids."""
        return list(compress(values, self.sampled) if self.sampled else values)


def obstacle(policy: Policy, way: str, gap: Callable[[], float]) -> str:
    """Return in a few words why `way` does not work with the model; empty if it works.

    Args:
        gap: Computes by `way` and returns the mean difference from the reference in nats. It is
            called once for each model and may raise anything.
    """
    known = policy.obstacles
    if way not in known:
        known[way] = ""  # the trial itself may call this function
        try:
            with torch.no_grad():
                known[way] = _failure(policy, gap)
            if known[way]:
                log.info("method not used", method=way, reason=known[way])
        except torch.OutOfMemoryError:
            del known[way]
            raise
    return known[way]


def refuse(policy: Policy, way: str, why: str) -> None:
    """Exclude `way` for this model, with the reason `why`."""
    policy.obstacles[way] = why


def refused(policy: Policy) -> dict[str, str]:
    """Return each method that does not work with the model, with the reason."""
    return {way: why for way, why in policy.obstacles.items() if why}


def _failure(policy: Policy, gap: Callable[[], float]) -> str:
    try:
        found = gap()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything
        return reason(error)
    if found <= bound(policy):
        return ""
    return f"its log-probabilities differ by {found:.2g} nats"


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type."""
    text = str(error).strip().split("\n")[0][:200]
    return text or type(error).__name__


def bound(policy: Policy) -> float:
    """Return the mean gap in nats that rounding explains for this model."""
    if policy.dtype in GAP_BOUND:
        return GAP_BOUND[policy.dtype]
    if "rounding" not in policy.measured:
        policy.measured["rounding"] = rounding(policy)
    least, most = GAP_BOUNDS_ELSEWHERE
    return min(most, max(least, 10 * policy.measured["rounding"]))


def widest_bound(policy: Policy) -> float:
    """Return the largest mean gap in nats that rounding explains for any model of this dtype."""
    return GAP_BOUND.get(policy.dtype, GAP_BOUNDS_ELSEWHERE[1])


def rounding(policy: Policy) -> float:
    """Measure the mean gap in nats between rows and the same rows with more tokens appended. The
    additional tokens change only the order of sums."""
    rows = trial_rows(policy)
    longer = [
        plain_logprobs(policy, Row(prompt, 3 * answer))[: len(answer)] for prompt, answer, _ in rows
    ]
    alone = [plain_logprobs(policy, row) for row in rows]
    return mean_gap([x for one in longer for x in one], [x for one in alone for x in one])


def mean_gap(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the mean absolute difference of two lists; infinity if a value is not finite."""
    gaps = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    mean = math.fsum(gaps) / len(gaps) if all(map(math.isfinite, gaps)) else math.inf
    return mean


def trial_rows(policy: Policy) -> list[Row]:
    """Return two answers to one prompt and one to a shorter prompt, all of different lengths."""
    ids = list(policy.tokenizer(TEXT, add_special_tokens=False)["input_ids"]) or [policy.eos_id]
    ids = (ids * 12)[:12]
    return [Row(ids[:5], ids[5:9]), Row(ids[:5], ids[9:11]), Row(ids[1:3], ids[4:7])]


def sees_everything(policy: Policy) -> bool:
    """Return True if every layer attends to the whole context. A short trial cannot detect a
    sliding window that is longer than its rows."""
    cache = DynamicCache(config=policy.base.config)
    return all(type(layer) is DynamicLayer for layer in cache.layers)


@torch.no_grad()
def plain_logprobs(policy: Policy, row: Row) -> list[float]:
    """Return the log-probability of each completion token of a row at temperature 1, by the
    reference method."""
    prompt, answer, *_ = row
    ids = torch.tensor([prompt + answer[:-1]], device=policy.device)
    positions = torch.arange(ids.shape[1], device=policy.device)[None]
    logits = policy.logits(ids, None, positions, keep=len(answer))[0]
    scores = torch.log_softmax(logits.float(), -1)
    chosen = torch.tensor(answer, device=scores.device)
    return list(scores.gather(-1, chosen[:, None])[:, 0].tolist())
