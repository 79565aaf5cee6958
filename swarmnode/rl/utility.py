"""Does what comes from others help this node? Measured, and acted on.

Two parts. `AgreementProbe` measures whether own and external groups pull the weights the same way,
without a second backward pass. `UtilityGuard` is a pure state machine that takes the measurements
of a step and says how much of J is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

PROBE_PARAMETERS = 2**20
"""Parameters that the probe looks at, at most: 4 MiB and a few milliseconds, whatever the model's
size."""


class AgreementProbe:
    """Cosine between the gradient of own groups and that of external groups in one accumulated
    step.

    Gradients of a step add up, so what the external groups contributed is the difference of two
    looks at the same buffer:

        optimizer.zero_grad(); for b in own: loss(b).backward()
        probe.mark()                                            # g_own
        for b in external: loss(b).backward()
        agreement = probe.read()                                # cos(g_own, g_total − g_own)

    Only the last trainable tensors (up to `limit` numbers) are looked at: adapters or the final
    blocks, where the gradient is largest and a copy is cheap. The sign is what counts, and it needs
    no more.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], limit: int = PROBE_PARAMETERS
    ) -> None:
        chosen: list[torch.nn.Parameter] = []
        room = limit
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if parameter.numel() <= room:
                chosen.append(parameter)
                room -= parameter.numel()
        self._parameters = chosen
        self.own: torch.Tensor | None = None
        """The own gradient, flat, since `mark`; other ranks' are added to it."""

    def _flat(self) -> torch.Tensor:
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self._parameters
        ]
        # one device, also where layers lie on several
        return torch.cat([p.flatten().float().cpu() for p in parts]) if parts else torch.zeros(0)

    def mark(self) -> None:
        """Call after the own groups' backward passes, before the first external one."""
        self.own = self._flat().clone()

    def read(self) -> float | None:
        """Cosine in [−1, 1], or None when either side has no gradient (or `mark` was not
        called)."""
        if self.own is None:
            return None
        own, external = self.own, self._flat() - self.own
        self.own = None
        norms = float(own.norm()) * float(external.norm())
        if not math.isfinite(norms) or norms <= 1e-20:
            return None
        return max(-1.0, min(1.0, float(own @ external) / norms))


CUT, RECOVER = 0.6, 0.01
"""J is multiplied by the one at an alarm, and given back by the other per calm observation."""
EXTERNAL_SHARE = 0.4
"""Least share of external groups in the batch at which they can be to blame for a fall of the
reward."""
DROP = 0.03
"""Least fall of reward that counts, in units of reward (0 to 1)."""
DISAGREEMENT = -0.1
PATIENCE = 5
"""Observations for which gradients disagree before it counts, and that are waited to see what a cut
has done."""


class UtilityGuard:
    """Cuts J when training on others' groups goes together with getting worse; gives it back
    slowly.

    The paper saw nodes that take three quarters of their batch from others learn and forget in
    turns (SAPO §5.1). A node cannot know the cause of a fall, but while much of its batch is
    external it can take less and look again.

    Cut (× CUT): while the external share is at least EXTERNAL_SHARE, the fast average of the reward
    on own fresh groups lies below the slow one by more than noise explains, or a held-out reward
    lies clearly below the best so far; or, at any share, the smoothed agreement has been below
    DISAGREEMENT for PATIENCE observations. Then it waits PATIENCE observations to see the effect.
    Recovery: + RECOVER per calm observation. Cut fast, recover slowly: a wrong cut costs some
    sampling, a wrong trust costs the policy. No clock, no randomness.
    """

    def __init__(self, external_scale: float = 1.0) -> None:
        self.external_scale = external_scale
        """What is left of J, 0 to 1."""
        self._trend = RewardTrend()
        self._best_held_out: float | None = None
        self._agreement: float | None = None
        self._external_share = 0.0
        self._disagreed = 0
        self._wait = 0

    def observe(
        self,
        reward_own: float | None,
        agreement: float | None = None,
        external_share: float = 0.0,
        reward_held_out: float | None = None,
    ) -> float:
        """Take one step's measurements (None: not measured) and return the new `external_scale`.

        `reward_own`: mean reward of the groups this node just sampled. `external_share`: external
        groups in the batch that was trained on, 0 to 1. `reward_held_out`: only on steps that
        evaluated.
        """
        self._external_share += 0.2 * (external_share - self._external_share)
        fell = (reward_own is not None and self._trend.fell(reward_own)) | self._held_out_fell(
            reward_held_out
        )
        disagrees = self._disagrees(agreement)
        if self._wait > 0:
            self._wait -= 1
        elif disagrees or (fell and self._external_share >= EXTERNAL_SHARE):
            self._cut()
        elif not fell:
            self.external_scale = min(1.0, self.external_scale + RECOVER)
        return self.external_scale

    def _cut(self) -> None:
        self.external_scale *= CUT
        if self.external_scale < 0.05:
            self.external_scale = 0.0
        self._wait = PATIENCE
        self._disagreed = 0

    def _held_out_fell(self, reward: float | None) -> bool:
        if reward is None:
            return False
        best = self._best_held_out
        fell = best is not None and reward < best - 2.0 * DROP
        # after a fall the bar is the new level: one fall is one alarm, and an old record does not
        # alarm for ever
        self._best_held_out = reward if best is None or fell else max(best, reward)
        return fell

    def _disagrees(self, agreement: float | None) -> bool:
        if agreement is None:
            return False
        self._agreement = (
            agreement
            if self._agreement is None
            else self._agreement + 0.2 * (agreement - self._agreement)
        )
        self._disagreed = self._disagreed + 1 if self._agreement < DISAGREEMENT else 0
        return self._disagreed >= PATIENCE


class RewardTrend:
    """A fast and a slow average of a noisy reward, and whether the one has fallen below the
    other."""

    def __init__(self) -> None:
        self._fast = self._slow = self._variance = 0.0
        self._seen = 0

    def fell(self, reward: float) -> bool:
        """Take one reward. True when the fast average is below the slow one by more than DROP and
        than noise explains."""
        if not self._seen:
            self._fast = self._slow = reward
        # 1/n at first, so that the averages do not remember one noisy first sample for long
        self._seen += 1
        self._variance += max(0.05, 1 / self._seen) * ((reward - self._fast) ** 2 - self._variance)
        self._fast += max(0.3, 1 / self._seen) * (reward - self._fast)
        self._slow += max(0.05, 1 / self._seen) * (reward - self._slow)
        if self._seen < 4 * PATIENCE:
            return False
        # an average with weight a has a / (2 - a) of the variance of one sample; 3 deviations of
        # the difference
        noise = 3.0 * math.sqrt(self._variance * (0.3 / 1.7 + 0.05 / 1.95))
        return self._fast < self._slow - max(DROP, noise)
