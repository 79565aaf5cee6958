"""One optimizer update from assembled rows: micro-batches that add up to the whole batch's gradient, then one atomic step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import collate, completion_logprobs
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.rl.utility import AgreementProbe
from swarmnode.trainer.batch import Rows


@dataclass(frozen=True)
class UpdateStatistics:
    """Means per trained token; None when nothing was trained on."""

    stepped: bool
    loss: float | None = None
    clip_fraction: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    agreement: float | None = None
    """Cosine of own and external gradients."""


class Updater:
    """Owns the optimizer. `reference` is the start policy, only with a KL penalty."""

    def __init__(self, policy: Policy, cfg: TrainingConfig, batcher: MicroBatcher, reference: Policy | None = None) -> None:
        if cfg.beta > 0 and reference is None:
            raise ValueError("beta > 0 needs a reference policy")
        self._policy = policy
        self._cfg = cfg
        self._batcher = batcher
        self._reference = reference
        fused = policy.device.type == "cuda" or None  # one kernel, and no temporary copies of all weights
        self.optimizer = torch.optim.AdamW(
            policy.trainable_parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay, fused=fused
        )  # fmt: skip
        self._accelerated = policy.accelerator.prepare_optimizer(self.optimizer)
        self._probe = AgreementProbe(policy.trainable_parameters())
        self.lock = threading.Lock()
        """Held while the weights move, so that another thread can copy them at any other time."""

    def update(self, rows: Rows, step: int) -> UpdateStatistics:
        """One optimizer step: a second one on the same rows would be off-policy for everybody's, and peers' rows are that already.

        Rows without a signal are not run through the model, but their tokens count in the normaliser: a batch that says
        little moves the policy little.
        """
        own, external = trained(rows, self._cfg)
        if not own and not external:
            return UpdateStatistics(stepped=False)
        reference = self._reference_logprobs(rows)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._cfg, step)
        return self._one(rows, own, external, reference)

    def _one(self, rows: Rows, own: list[int], external: list[int], reference: list[list[float]] | None) -> UpdateStatistics:
        objective, divisor = Objective.of(self._cfg), normalizer(rows, self._cfg)
        totals = torch.zeros(5, dtype=torch.float64)  # loss, clip·tokens, kl·tokens, entropy·tokens, tokens

        def backward(indices: list[int]) -> torch.Tensor:
            batch = collate([rows.rows[i] for i in indices], self._policy.pad_id, self._policy.device)
            logprobs, entropy = completion_logprobs(self._policy, batch, self._cfg.temperature)  # (n, T)
            mask = batch.completion_mask.to(logprobs.device)
            out = policy_loss(
                logprobs,
                _padded([rows.old_logprobs[i] for i in indices], logprobs),
                rows.advantages[indices].to(logprobs.device),
                mask,
                objective,
                divisor,
                weights=rows.weights[indices].to(logprobs.device),
                ref_logprobs=None if reference is None else _padded([reference[i] for i in indices], logprobs),
            )
            self._policy.accelerator.backward(out.loss)
            tokens = out.tokens.detach()
            return torch.stack(
                [out.loss.detach(), out.clip_fraction * tokens, out.kl * tokens, (entropy * mask).sum(), tokens]
            ).double().cpu()  # fmt: skip

        def accumulate(indices: list[int], restart: Callable[[], None]) -> torch.Tensor:
            lengths = [len(p) + len(c) for p, c in (rows.rows[i] for i in indices)]
            groups = [rows.groups[i] for i in indices]
            parts = self._batcher.run(lengths, lambda chosen: backward([indices[k] for k in chosen]), groups, restart)
            return sum((part for _, part in parts), torch.zeros(5, dtype=torch.float64))

        def own_pass() -> None:
            nonlocal totals
            self._accelerated.zero_grad()
            totals = accumulate(own, self._accelerated.zero_grad)

        own_pass()
        agreement = None
        if external:
            self._probe.mark()
            totals = totals + accumulate(external, own_pass)  # own_pass also undoes what a pass out of memory left
            agreement = self._probe.read() if own else None
        norm = self._policy.accelerator.clip_grad_norm_(self._policy.trainable_parameters(), self._cfg.max_grad_norm)
        finite = norm is None or bool(torch.isfinite(norm))
        if finite:
            with self.lock:
                self._accelerated.step()
        self._accelerated.zero_grad()
        loss, clipped, kl, entropy, tokens = totals.tolist()
        return UpdateStatistics(
            stepped=finite,
            loss=loss,
            clip_fraction=clipped / max(tokens, 1.0),
            kl=kl / max(tokens, 1.0) if self._cfg.beta > 0 else None,
            entropy=entropy / max(tokens, 1.0),
            grad_norm=float(norm) if norm is not None and finite else None,
            agreement=agreement,
        )

    def learning_rate(self, step: int) -> float:
        return learning_rate(self._cfg, step)

    def _reference_logprobs(self, rows: Rows) -> list[list[float]] | None:
        if self._reference is None or self._cfg.beta == 0:
            return None
        return self._batcher.score(self._reference, rows.rows, self._cfg.temperature)


def learning_rate(cfg: TrainingConfig, step: int) -> float:
    """Linear warm-up, then constant."""
    return cfg.learning_rate * min(1.0, (step + 1) / (cfg.warmup_steps + 1))


def trained(rows: Rows, cfg: TrainingConfig) -> tuple[list[int], list[int]]:
    """Indices of the own and of the external rows that have to be run through the model."""
    if cfg.beta > 0:  # the penalty reaches rows without an advantage too
        own = [i for i, is_external in enumerate(rows.external) if not is_external]
        return own, [i for i, is_external in enumerate(rows.external) if is_external]
    return rows.informative(external=False), rows.informative(external=True)


def normalizer(rows: Rows, cfg: TrainingConfig) -> float:
    """What the loss of all rows is divided by, whichever of them are run."""
    return Objective.of(cfg).normalizer([len(completion) for _, completion in rows.rows])


def _padded(values: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    """Ragged lists as (n, T), zeros on padding."""
    out = torch.zeros(like.shape)
    for i, row in enumerate(values):
        out[i, : len(row)] = torch.tensor(row)
    return out.to(like.device)
