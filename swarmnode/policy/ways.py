"""Which ways of computing a model takes, found by trying each of them once.

A flag of a model class says what its author had in mind. Whether a mask of ours is taken as it is,
whether padding changes an answer, and whether keys and values can lie in slots shows only when it
is done: every way is compared with the plain one, a row by itself without padding, mask or cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from swarmnode.policy.model import Policy

GAP_BOUND = {torch.float32: 0.002}
"""Mean difference of a token's log-probability from that of the plain way, nats, above which a way
computes something else. Rounding is a thousandth of that."""
GAP_BOUNDS_ELSEWHERE = 0.03, 0.2
"""The same in 16 bits, at least and at most: ten times what rounding does to this model."""
TEXT = "What is 3 + 4? It is 7, because 3 + 4 = 7."

Row = tuple[list[int], list[int]]
"""(prompt ids, completion ids), both non-empty."""


def obstacle(policy: Policy, way: str, gap: Callable[[], float]) -> str:
    """Return why the model does not take `way`, in a few words; empty if it does.

    gap: computes by it, and returns the mean difference from the plain way in nats. It is called
    once for each model and may raise anything.
    """
    known = policy.obstacles
    if way not in known:
        known[way] = ""  # the trial itself may ask
        try:
            with torch.no_grad():
                known[way] = _failure(policy, gap)
        except torch.OutOfMemoryError:
            del known[way]
            raise
    return known[way]


def refuse(policy: Policy, way: str, why: str) -> None:
    """Do not take `way` with this model any more."""
    policy.obstacles[way] = why


def refused(policy: Policy) -> dict[str, str]:
    """Way → why the model does not take it, of those that were tried."""
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
    """Return what an exception says in one short line."""
    text = str(error).strip().split("\n")[0][:200]
    return text or type(error).__name__


def bound(policy: Policy) -> float:
    """Mean gap in nats that rounding explains."""
    if policy.dtype in GAP_BOUND:
        return GAP_BOUND[policy.dtype]
    if "rounding" not in policy.measured:
        policy.measured["rounding"] = rounding(policy)
    least, most = GAP_BOUNDS_ELSEWHERE
    return min(most, max(least, 10 * policy.measured["rounding"]))


def widest_bound(policy: Policy) -> float:
    """Mean gap in nats that rounding may explain in any model of this dtype."""
    return GAP_BOUND.get(policy.dtype, GAP_BOUNDS_ELSEWHERE[1])


def rounding(policy: Policy) -> float:
    """Mean gap in nats of rows by themselves from the same rows with more tokens behind them, which
    change nothing but the order of sums."""
    rows = trial_rows(policy)
    longer = [
        plain_logprobs(policy, (prompt, 3 * answer))[: len(answer)] for prompt, answer in rows
    ]
    alone = [plain_logprobs(policy, row) for row in rows]
    return mean_gap([x for one in longer for x in one], [x for one in alone for x in one])


def mean_gap(found: Sequence[float], expected: Sequence[float]) -> float:
    """Mean absolute difference of two lists of numbers; infinite where one is not a number."""
    gaps = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    mean = math.fsum(gaps) / len(gaps) if all(map(math.isfinite, gaps)) else math.inf
    return mean


def trial_rows(policy: Policy) -> list[Row]:
    """Two answers to one prompt and one answer to a shorter prompt, all of unlike lengths."""
    ids = list(policy.tokenizer(TEXT, add_special_tokens=False)["input_ids"]) or [policy.eos_id]
    ids = (ids * 12)[:12]
    return [(ids[:5], ids[5:9]), (ids[:5], ids[9:11]), (ids[1:3], ids[4:7])]


def sees_everything(policy: Policy) -> bool:
    """Return True if no layer forgets: a trial does not show a window that is longer."""
    cache = DynamicCache(config=policy.base.config)
    return all(type(layer) is DynamicLayer for layer in cache.layers)


@torch.no_grad()
def plain_logprobs(policy: Policy, row: Row) -> list[float]:
    """Log-probability of each completion token of a row at temperature 1, the plain way."""
    prompt, answer = row
    ids = torch.tensor([prompt + answer[:-1]], device=policy.device)
    positions = torch.arange(ids.shape[1], device=policy.device)[None]
    logits = policy.logits(ids, None, positions, keep=len(answer))[0]
    scores = torch.log_softmax(logits.float(), -1)
    chosen = torch.tensor(answer, device=scores.device)
    return list(scores.gather(-1, chosen[:, None])[:, 0].tolist())
