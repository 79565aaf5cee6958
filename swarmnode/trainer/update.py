"""One optimizer update from assembled rows: micro-batches that add up to the whole batch's
gradient, then one atomic step."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.footprint import Optim
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import collate, completion_logprobs
from swarmnode.policy.micro import MicroBatcher, RowTooLarge, free_memory
from swarmnode.rl.corrections import against_sampler, effective_share, own_correction, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM, WEIGHT_DECAY, Objective, policy_loss
from swarmnode.rl.utility import AgreementProbe
from swarmnode.rollouts.groups import Outcome
from swarmnode.trainer.batch import Rows


@dataclass(frozen=True)
class UpdateStatistics:
    """Means per trained token; None when nothing was trained on, or the number is not finite."""

    stepped: bool
    loss: float | None = None
    clip_fraction: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    agreement: float | None = None
    """Cosine of own and external gradients."""
    effective_own: float | None = None
    """Effective sample size ÷ sample size of the own tokens' weights, in (0, 1]."""
    effective_external: float | None = None
    rate_factor: float = 1.0
    """What the learning rate was multiplied by, for how little the weights leave of the samples."""
    too_large: frozenset[int] = frozenset()
    """External groups, by their number in the rows, that did not fit into memory and were left
    out."""
    skipped: str = ""
    """Why no step was taken, of the reasons of `TrainerDrops.update`; empty if one was."""
    no_gradient: frozenset[int] = frozenset()
    """External groups that were left out because their gradient was not finite and ours was."""

    @property
    def refused(self) -> dict[int, Outcome]:
        """Why an external group was left out, by its number in the rows."""
        refused: dict[int, Outcome] = dict.fromkeys(self.too_large, "too_large")
        return refused | dict.fromkeys(self.no_gradient, "no_gradient")


class Updater:
    """Owns the optimizer. `reference` is the start policy, only with a KL penalty.

    external: the micro-batches of other nodes' rows, whose lengths we did not choose; what they
    teach about memory is kept from ours.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: TrainingConfig,
        batcher: MicroBatcher,
        reference: Policy | None = None,
        external: MicroBatcher | None = None,
        optim: Optim = "adamw",
    ) -> None:
        if cfg.beta > 0 and reference is None:
            raise ValueError("beta > 0 needs a reference policy")
        self._policy = policy
        self._cfg = cfg
        self._batcher = batcher
        self._external = (
            external if external is not None else MicroBatcher(batcher.tokens, batcher.alive)
        )
        self._reference = reference
        self.optimizer = make_optimizer(policy, cfg, optim)
        self._accelerated = policy.accelerator.prepare_optimizer(self.optimizer)
        self._probe = AgreementProbe(policy.trainable_parameters())
        self.lock = threading.Lock()
        """Held while the weights move, so that another thread can copy them at any other time."""

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """One optimizer step: a second one on the same rows would be off-policy for everybody's,
        and peers' rows are that already.

        rate: the learning rate of this step; None is the configured one. Rows without a signal are
        not run through the model, but their tokens count in the normaliser: a batch that says
        little moves the policy little. Raises DeviceError when an own row does not fit into memory;
        an external one costs its group, and so does an external gradient that is not finite.
        """
        own, external = trained(rows, self._cfg)
        too_large: frozenset[int] = frozenset()
        no_gradient: frozenset[int] = frozenset()
        skipped = "no_signal"
        while own or external:
            for group in self.optimizer.param_groups:
                group["lr"] = self._cfg.learning_rate if rate is None else rate
            try:
                done = self._step(rows, own, external, too_large | no_gradient)
            except RowTooLarge as error:
                if not rows.external[error.row]:
                    raise
                too_large |= {rows.groups[error.row]}
                external = [i for i in external if rows.groups[i] not in too_large]
            else:
                if done.skipped != "not_finite":
                    return replace(done, too_large=too_large, no_gradient=no_gradient)
                if not external:  # ours is not finite either: nobody's groups are to blame
                    return replace(done, too_large=too_large)
                skipped = done.skipped
                no_gradient = frozenset(rows.groups[i] for i in external)
                external = []
            self._accelerated.zero_grad()
            free_memory()
        return UpdateStatistics(
            stepped=False, skipped=skipped, too_large=too_large, no_gradient=no_gradient
        )

    def _step(
        self, rows: Rows, own: list[int], external: list[int], too_large: frozenset[int]
    ) -> UpdateStatistics:
        objective, divisor = Objective.of(self._cfg), normalizer(rows, self._cfg, too_large)
        reference = self._reference_logprobs(rows, own, external)
        totals = torch.zeros(SUMS, dtype=torch.float64)

        def backward(indices: list[int]) -> torch.Tensor:
            batch = collate(
                [rows.rows[i] for i in indices], self._policy.pad_id, self._policy.device
            )
            # (n, T)
            logprobs, entropy = completion_logprobs(self._policy, batch, self._cfg.temperature)
            mask = batch.completion_mask.to(logprobs.device)
            sampled = torch.tensor([rows.is_sampled(i) for i in indices], device=logprobs.device)
            old, weights = against_sampler(
                logprobs,
                _padded([rows.recorded(i) for i in indices], logprobs),
                sampled,
                rows.weights[indices].to(logprobs.device),
                mask,
                *own_correction(self._cfg.options),
            )
            out = policy_loss(
                logprobs,
                old,
                rows.advantages[indices].to(logprobs.device),
                mask,
                objective,
                divisor,
                weights=weights,
                ref_logprobs=_padded([reference[i] for i in indices], logprobs)
                if reference
                else None,
            )
            self._policy.accelerator.backward(out.loss)
            tokens = out.tokens.detach()
            weighed = (weights.sum(), weights.square().sum())
            return (
                torch.stack(
                    [
                        out.loss.detach(),
                        out.clip_fraction * tokens,
                        out.kl * tokens,
                        (entropy * mask).sum(),
                        tokens,
                        *weighed,
                    ]
                )
                .double()
                .cpu()
            )

        def accumulate(
            batcher: MicroBatcher, indices: list[int], restart: Callable[[], None]
        ) -> torch.Tensor:
            lengths = [len(p) + len(c) for p, c in (rows.rows[i] for i in indices)]
            groups = [rows.groups[i] for i in indices]
            with _rows_named(indices):
                parts = batcher.run(
                    lengths, lambda chosen: backward([indices[k] for k in chosen]), groups, restart
                )
            return sum((part for _, part in parts), torch.zeros(SUMS, dtype=torch.float64))

        def own_pass() -> None:
            nonlocal totals
            self._accelerated.zero_grad()
            totals = accumulate(self._batcher, own, self._accelerated.zero_grad)

        own_pass()
        agreement, effective_own, effective_external = None, _effective(totals), None
        if external:
            self._probe.mark()
            # own_pass also undoes what a pass out of memory left
            others = accumulate(self._external, external, own_pass)
            effective_own, effective_external = _effective(totals), _effective(others)
            totals = totals + others
            agreement = self._probe.read() if own else None
        norm = self._policy.accelerator.clip_grad_norm_(
            self._policy.trainable_parameters(), MAX_GRAD_NORM
        )
        finite = norm is None or bool(torch.isfinite(norm))
        factor = rate_factor(self._cfg.options, _effective(totals))
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        stepped = self._apply(finite)
        scaled = self._policy.accelerator.scaler is not None
        loss, clipped, kl, entropy, tokens, _, _ = totals.tolist()
        return UpdateStatistics(
            stepped=stepped,
            skipped="" if stepped else "overflow" if scaled else "not_finite",
            loss=_finite(loss),
            clip_fraction=_finite(clipped / max(tokens, 1.0)),
            kl=_finite(kl / max(tokens, 1.0)) if self._cfg.beta > 0 else None,
            entropy=_finite(entropy / max(tokens, 1.0)),
            grad_norm=float(norm) if norm is not None and finite else None,
            agreement=agreement,
            effective_own=effective_own,
            effective_external=effective_external,
            rate_factor=factor,
        )

    def _apply(self, finite: bool) -> bool:
        """Take the optimizer step if the gradient is finite; whether it was.

        With float16 the loss is scaled, and it is the optimizer's own step that finds an overflow,
        leaves the weights alone and lowers the scale: without it the scale would stay, and every
        later gradient overflow as well.
        """
        scaled = self._policy.accelerator.scaler is not None
        if finite or scaled:
            with self.lock:
                self._accelerated.step()
        self._accelerated.zero_grad()
        return finite and not (scaled and self._accelerated.step_was_skipped)

    def _reference_logprobs(
        self, rows: Rows, own: list[int], external: list[int]
    ) -> dict[int, list[float]]:
        """By row; empty without a penalty."""
        if self._reference is None or self._cfg.beta == 0:
            return {}
        found: dict[int, list[float]] = {}
        for batcher, indices in ((self._batcher, own), (self._external, external)):
            with _rows_named(indices):
                scores = batcher.score(
                    self._reference, [rows.rows[i] for i in indices], self._cfg.temperature
                )
            found |= dict(zip(indices, scores, strict=True))
        return found


def make_optimizer(policy: Policy, cfg: TrainingConfig, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, its moments in 32 bits or, by bitsandbytes, in blocks of 8 (arXiv 2110.02861); see
    `policy.load.check_optim`."""
    parameters = policy.trainable_parameters()
    if optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        eight: torch.optim.Optimizer = AdamW8bit(
            parameters, lr=cfg.learning_rate, weight_decay=WEIGHT_DECAY
        )
        return eight
    # one kernel, and no temporary copies of all weights
    fused = policy.device.type == "cuda" or None
    return torch.optim.AdamW(
        parameters, lr=cfg.learning_rate, weight_decay=WEIGHT_DECAY, fused=fused
    )


SUMS = 7
"""What each micro-batch adds to: loss, clipped, KL and entropy of its tokens, tokens, weights and
squares of weights of its tokens."""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _effective(totals: torch.Tensor) -> float | None:
    tokens, weights, squares = totals[4:].tolist()
    share = effective_share(weights, squares, tokens)
    return None if share is None else _finite(share)


@contextlib.contextmanager
def _rows_named(indices: list[int]) -> Iterator[None]:
    """A row that is too large is named by its number among all, not among `indices`."""
    try:
        yield
    except RowTooLarge as error:
        error.row = indices[error.row]
        raise


WARMUP_STEPS = 20
"""Steps of the option `warmup`: AdamW's running mean of squares is within a fiftieth of what it
tends to after as many at β2 = 0.8, and RL's first gradients, from few useful groups, are its least
typical ones."""


def learning_rate(cfg: TrainingConfig, step: int) -> float:
    """The learning rate of the step that begins after `step` others: never 0 before the last
    one."""
    return cfg.learning_rate * _schedule(tuple(cfg.options), cfg.max_steps)(step + 1)


@functools.lru_cache(maxsize=8)
def _schedule(options: tuple[str, ...], max_steps: int) -> Callable[[int], float]:
    """Number of a step, from 1 → factor: transformers' schedules one step further on, so that the
    first step of a warm-up is not idle."""
    if not {"linear", "cosine", "warmup"} & set(options):
        return lambda number: 1.0
    # and with it transformers' trainer and peft: 0.3 s of a trainer's start
    from transformers import get_scheduler

    name = next(
        (option for option in options if option in ("linear", "cosine")), "constant_with_warmup"
    )
    warmup = WARMUP_STEPS if "warmup" in options else 0
    # schedulers want an optimizer; nothing of it is used
    idle = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(
        name, idle, num_warmup_steps=warmup + 1, num_training_steps=max_steps + 1
    )
    (factor,) = scheduler.lr_lambdas
    return lambda number: float(factor(number))


def trained(rows: Rows, cfg: TrainingConfig) -> tuple[list[int], list[int]]:
    """Indices of the own and of the external rows that have to be run through the model."""
    if cfg.beta > 0:  # the penalty reaches rows without an advantage too
        kept = [
            (i, is_external) for i, is_external in enumerate(rows.external) if i not in rows.masked
        ]
        return [i for i, is_external in kept if not is_external], [
            i for i, is_external in kept if is_external
        ]
    return rows.informative(external=False), rows.informative(external=True)


def normalizer(rows: Rows, cfg: TrainingConfig, without: frozenset[int] = frozenset()) -> float:
    """What the loss of all rows is divided by, whichever of them are run; `without` these
    groups."""
    lengths = [
        0 if i in rows.masked else len(completion)  # counted as a sequence, as in TRL
        for i, ((_, completion), group) in enumerate(zip(rows.rows, rows.groups, strict=True))
        if group not in without
    ]
    return Objective.of(cfg).normalizer(lengths)


def _padded(values: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    """Ragged lists as (n, T), zeros on padding."""
    out = torch.zeros(like.shape)
    for i, row in enumerate(values):
        out[i, : len(row)] = torch.tensor(row)
    return out.to(like.device)
