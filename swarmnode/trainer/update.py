"""One optimizer update from assembled rows: micro-batches that add up to the whole batch's
gradient, then one atomic step."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.footprint import Optim
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, collate, completion_logprobs, score
from swarmnode.policy.micro import MicroBatcher, RowTooLarge, free_memory
from swarmnode.rl.corrections import against_sampler, effective_share, own_correction, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM, WEIGHT_DECAY, Objective, policy_loss
from swarmnode.rl.utility import AgreementProbe
from swarmnode.rollouts.groups import Outcome
from swarmnode.trainer.batch import Rows
from swarmnode.trainer.judge import GroupRefused, contained


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
    own_gap: float | None = None
    """Mean |Δ log-probability| of own tokens between the sampler and this policy, in nats."""
    rate_factor: float = 1.0
    """What the learning rate was multiplied by, for how little the weights leave of the samples."""
    skipped: str = ""
    """Why no step was taken, of the reasons of `TrainerDrops.update`; empty if one was."""
    refused: Mapping[int, Outcome] = field(default_factory=dict)
    """Why an external group was left out, by its number in the rows."""
    details: Mapping[Outcome, str] = field(default_factory=dict)
    """What is known of the last group that was refused for a reason."""
    dropped_rows: int = 0
    """Own rows that did not fit into memory, not even with layers run again, and were left out."""


@dataclass
class Passes:
    """Which rows of a step are run, and how. Shrinks with each attempt that fails."""

    own: list[int]
    external: list[int]
    recomputed: set[int] = field(default_factory=set)
    """Own rows for which layers are run again in the backward pass, since they did not fit
    otherwise."""
    apart: bool = False
    """Each external group is run by itself, since one of them fails."""
    refused: dict[int, Outcome] = field(default_factory=dict)
    details: dict[Outcome, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)

    def refuse(self, group: int, refused: GroupRefused, rows: Rows) -> None:
        """Leave an external group out."""
        self.refused[group] = refused.outcome
        self.details[refused.outcome] = refused.detail
        self.external = [i for i in self.external if rows.groups[i] != group]

    def spare(self, row: int) -> bool:
        """Run an own row with less memory, or leave it out if that was tried. Return False if none
        is left."""
        if row not in self.recomputed:
            self.recomputed.add(row)
            return True
        self.own.remove(row)
        self.dropped.add(row)
        return bool(self.own)

    def outcome(self, statistics: UpdateStatistics) -> UpdateStatistics:
        """Return `statistics` of the last attempt with what was left out."""
        return replace(
            statistics,
            refused=self.refused,
            details=self.details,
            dropped_rows=len(self.dropped),
        )

    def groups(self, rows: Rows) -> list[tuple[int, list[int]]]:
        """(group, its rows) of the external groups."""
        numbers = sorted({rows.groups[i] for i in self.external})
        return [(n, [i for i in self.external if rows.groups[i] == n]) for n in numbers]


class Ranks(Protocol):
    """The other devices of this machine, which run some micro-batches of an update (ranks.py)."""

    def accumulating(self, rows: Rows, passes: Passes) -> AbstractContextManager[Sharing]:
        """Let the other ranks accumulate gradients during the block.

        If the block raises, the other ranks have stopped when the exception leaves it.
        """
        ...

    def add_gradients(self) -> None:
        """Add the other ranks' gradients, and their probes' marked gradients, to the local ones."""
        ...


class Sharing(Protocol):
    """The micro-batches of one attempt. Every rank cuts them alike."""

    def tokens(self, lengths: Sequence[int]) -> int:
        """Return the padded tokens per micro-batch that give every rank some micro-batches."""
        ...

    def take(self, micro_batches: list[list[int]]) -> Iterator[list[int]]:
        """Yield micro-batches that no other rank has taken, until none are left."""
        ...

    def others(self) -> list[Sums]:
        """Return the sums of the other ranks. Raises the error that a rank raised."""
        ...


@dataclass(frozen=True)
class Sums:
    """Sums over own rows, and over external rows, each (SUMS,)."""

    own: torch.Tensor
    external: torch.Tensor


class StartOver(Exception):
    """Raised where memory ran out in the midst of a step: its gradients are incomplete, and the
    micro-batches are smaller now."""


class PeersFailed(Exception):
    """Raised where one of several external groups fails, and nobody knows which."""


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
        self._recomputing = MicroBatcher(batcher.tokens, batcher.alive)
        """For own rows whose layers are run again."""
        self.ranks: Ranks | None = None
        self.probe = AgreementProbe(policy.trainable_parameters())
        self.lock = threading.Lock()
        """Held while the weights move, so that another thread can copy them at any other time."""

    def update(self, rows: Rows, rate: float | None = None) -> UpdateStatistics:
        """One optimizer step: a second one on the same rows would be off-policy for everybody's,
        and peers' rows are that already.

        rate: the learning rate of this step; None is the configured one. Rows without a signal are
        not run through the model, but their tokens count in the normaliser: a batch that says
        little moves the policy little. An external group that does not fit into memory, raises an
        exception or has a gradient that is not finite is left out. An own row that does not fit is
        run with layers computed again, and left out if it does not fit then.

        Raises DeviceError when no own row fits into memory.
        """
        passes = Passes(*trained(rows, self._cfg))
        for group in self.optimizer.param_groups:
            group["lr"] = self._cfg.learning_rate if rate is None else rate
        while passes.own or passes.external:
            try:
                return passes.outcome(self._step(rows, passes))
            except StartOver:
                pass
            except PeersFailed:
                passes.apart = True
            except RowTooLarge as error:
                if rows.external[error.row]:
                    refused = GroupRefused("too_large", str(error))
                    passes.refuse(rows.groups[error.row], refused, rows)
                elif not passes.spare(error.row):
                    raise
            except _GroupFailed as error:
                passes.refuse(error.group, error.refused, rows)
            # nothing of a failed attempt is left: not its gradients, and no step was taken
            self._accelerated.zero_grad()
            free_memory()
        skipped = "not_finite" if "no_gradient" in passes.refused.values() else "no_signal"
        return passes.outcome(UpdateStatistics(stepped=False, skipped=skipped))

    def _step(self, rows: Rows, passes: Passes) -> UpdateStatistics:
        """One attempt. Raises StartOver, PeersFailed, RowTooLarge and _GroupFailed before anything
        but gradients has changed."""
        if self.ranks is None:
            sums = self.accumulate(rows, passes)
            totals, others = sums.own, sums.external
        else:
            with self.ranks.accumulating(rows, passes) as sharing:
                parts = [self.accumulate(rows, passes, sharing), *sharing.others()]
            self.ranks.add_gradients()
            totals = sum((part.own for part in parts), _no_sums())
            others = sum((part.external for part in parts), _no_sums())
        agreement, effective_own, effective_external = None, _effective(totals), None
        own_tokens, own_gap = float(totals[4]), float(totals[7])
        if passes.external:
            effective_external = _effective(others)
            totals = totals + others
            agreement = self.probe.read() if passes.own else None
        norm = self._policy.accelerator.clip_grad_norm_(
            self._policy.trainable_parameters(), MAX_GRAD_NORM
        )
        finite = norm is None or bool(torch.isfinite(norm))
        factor = rate_factor(self._cfg.options, _effective(totals))
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        stepped = self._apply(finite)
        scaled = self._policy.accelerator.scaler is not None
        loss, clipped, kl, entropy, tokens, *_ = totals.tolist()
        return UpdateStatistics(
            stepped=stepped,
            # the loss is finite but its gradient is not, so the loss scale was too large
            skipped=""
            if stepped
            else "overflow"
            if scaled and math.isfinite(loss)
            else "not_finite",
            loss=_finite(loss),
            clip_fraction=_finite(clipped / max(tokens, 1.0)),
            kl=_finite(kl / max(tokens, 1.0)) if self._cfg.beta > 0 else None,
            entropy=_finite(entropy / max(tokens, 1.0)),
            grad_norm=float(norm) if norm is not None and finite else None,
            agreement=agreement,
            effective_own=effective_own,
            effective_external=effective_external,
            own_gap=_finite(own_gap / own_tokens) if own_tokens else None,
            rate_factor=factor,
        )

    def accumulate(self, rows: Rows, passes: Passes, sharing: Sharing | None = None) -> Sums:
        """Accumulate the gradients of the rows of `passes`. Raises the errors of `_step`.

        Args:
            sharing: Yields the micro-batches for this rank, if other ranks work on the update as
                well.
        """
        without = frozenset(passes.refused)
        objective, divisor = Objective.of(self._cfg), normalizer(rows, self._cfg, without)
        external = passes.external

        def backward(indices: list[int], recompute: bool) -> torch.Tensor:
            batch = collate(
                [rows.rows[i] for i in indices], self._policy.pad_id, self._policy.device
            )
            batch = replace(batch, recompute=recompute)
            # (n, T)
            logprobs, entropy = completion_logprobs(self._policy, batch, self._cfg.temperature)
            mask = batch.sampled_mask.to(logprobs.device)
            sampled = torch.tensor([rows.is_sampled(i) for i in indices], device=logprobs.device)
            recorded = _padded([rows.recorded(i) for i in indices], logprobs)
            old, weights = against_sampler(
                logprobs,
                recorded,
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
                ref_logprobs=self._reference_logprobs([rows.rows[i] for i in indices], logprobs),
            )
            self._policy.accelerator.backward(out.loss)
            tokens = out.tokens.detach()
            weighed = (weights.sum(), weights.square().sum())
            gap = ((logprobs.detach() - recorded).abs() * mask * sampled.unsqueeze(1)).sum()
            sums = torch.stack(
                [
                    out.loss.detach(),
                    out.clip_fraction * tokens,
                    out.kl * tokens,
                    (entropy * mask).sum(),
                    tokens,
                    *weighed,
                    gap,
                ]
            )
            return sums.cpu().double()  # MPS has no float64

        def accumulate(
            batcher: MicroBatcher, indices: list[int], recompute: bool = False, alone: bool = False
        ) -> torch.Tensor:
            lengths = [len(rows.rows[i].prompt) + len(rows.rows[i].completion) for i in indices]
            groups = [rows.groups[i] for i in indices]
            work = lambda chosen: backward([indices[k] for k in chosen], recompute)
            with _rows_named(indices):
                if sharing is None or alone:
                    parts = [part for _, part in batcher.run(lengths, work, groups, _start_over)]
                else:
                    most = sharing.tokens(lengths)
                    try:
                        parts = batcher.run_shared(lengths, work, groups, most, sharing.take)
                    except MemoryError:
                        raise StartOver from None
            return sum(parts, _no_sums())

        self._accelerated.zero_grad()
        spared = sorted(passes.recomputed.intersection(passes.own))
        totals = accumulate(self._batcher, [i for i in passes.own if i not in passes.recomputed])
        totals = totals + accumulate(self._recomputing, spared, recompute=True)
        others = _no_sums()
        if external:
            self.probe.mark()
            is_finite = lambda sums: (
                bool(torch.isfinite(sums).all()) and self._has_finite_gradient()
            )
            if passes.apart:
                blames = is_finite(totals)  # else nothing that follows is finite either
                for number, indices in passes.groups(rows):
                    with _blamed(number):
                        others = others + accumulate(self._external, indices, alone=True)
                        if blames and not is_finite(others):
                            raise GroupRefused("no_gradient", "the gradient is not finite")
            else:
                with _blamed(None):
                    others = accumulate(self._external, external)
                    if not is_finite(others):
                        raise PeersFailed
        return Sums(totals, others)

    def zero_grad(self) -> None:
        self._accelerated.zero_grad()

    @property
    def batchers(self) -> tuple[MicroBatcher, MicroBatcher, MicroBatcher]:
        """Batchers of own rows, of own rows with activation checkpointing, and of external rows."""
        return self._batcher, self._recomputing, self._external

    @property
    def loss_scale(self) -> float:
        """Loss scale in float16; 0 in a dtype that needs none."""
        scaler = self._policy.accelerator.scaler
        return min(float(scaler.get_scale()), MOST_LOSS_SCALE) if scaler is not None else 0.0

    def restore_loss_scale(self, scale: float) -> None:
        """Continue with the loss scale of an earlier process; 0 means none."""
        scaler = self._policy.accelerator.scaler
        if scaler is not None and scale:
            scaler.load_state_dict(scaler.state_dict() | {"scale": scale})

    def _has_finite_gradient(self) -> bool:
        grads = [p.grad for p in self._policy.trainable_parameters() if p.grad is not None]
        return not grads or bool(torch.isfinite(torch.nn.utils.get_total_norm(grads)))

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

    def _reference_logprobs(self, rows: list[Row], like: torch.Tensor) -> torch.Tensor | None:
        """Return the reference policy's log-probabilities (n, T), without gradient; None without a
        KL penalty."""
        if self._reference is None or self._cfg.beta == 0:
            return None
        return _padded(score(self._reference, rows, self._cfg.temperature), like)


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
    fused = policy.device.type in ("cpu", "cuda") or None
    return torch.optim.AdamW(
        parameters, lr=cfg.learning_rate, weight_decay=WEIGHT_DECAY, fused=fused
    )


MOST_LOSS_SCALE = 2.0**60
"""Largest loss scale that is saved. torch does not bound the scale, and a stored counter
must be below 2^63."""
SUMS = 8
"""Number of sums that each micro-batch adds to: loss, clipped tokens, KL and entropy of its tokens,
number of tokens, weights and squared weights of its tokens, and |Δ log-probability| to their
sampler."""


def _no_sums() -> torch.Tensor:
    return torch.zeros(SUMS, dtype=torch.float64)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _effective(totals: torch.Tensor) -> float | None:
    tokens, weights, squares = totals[4:7].tolist()
    share = effective_share(weights, squares, tokens)
    return None if share is None else _finite(share)


def _start_over() -> None:
    raise StartOver


class _GroupFailed(Exception):
    def __init__(self, group: int, refused: GroupRefused) -> None:
        super().__init__(group)
        self.group = group
        self.refused = refused


@contextlib.contextmanager
def _blamed(group: int | None) -> Iterator[None]:
    """Inside, any failure is that of an external group: of `group`, or of one of several where that
    is None."""
    try:
        with contained(StartOver, PeersFailed, RowTooLarge):
            yield
    except GroupRefused as refused:
        if group is None:
            raise PeersFailed from refused
        raise _GroupFailed(group, refused) from refused


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
    external = rows.informative(external=True)
    if cfg.beta > 0:  # the penalty reaches own rows without an advantage too
        own = [i for i, theirs in enumerate(rows.external) if not theirs and i not in rows.masked]
        return own, external
    return rows.informative(external=False), external


def normalizer(rows: Rows, cfg: TrainingConfig, without: frozenset[int] = frozenset()) -> float:
    """What the loss of all rows is divided by, whichever of them are run; `without` these
    groups."""
    lengths = [
        0 if i in rows.masked else rows.length(i)  # counted as a sequence, as in TRL
        for i, group in enumerate(rows.groups)
        if group not in without
    ]
    return Objective.of(cfg).normalizer(lengths)


def _padded(values: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    """Ragged lists as (n, T), zeros on padding."""
    width = like.shape[1]
    padded = [[*row, *[0.0] * (width - len(row))] for row in values]
    return torch.tensor(padded, dtype=torch.float32, device=like.device)
