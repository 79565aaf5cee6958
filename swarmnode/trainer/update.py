"""One optimizer update from assembled rows: accumulates the gradient of the whole batch over
micro-batches, then takes one atomic step."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from typing import Protocol

import torch

from swarmnode.config import TrainingConfig
from swarmnode.policy.footprint import Optim
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import collate, completion_logprobs
from swarmnode.policy.merged import forget_merged
from swarmnode.policy.micro import MicroBatcher, RowTooLarge, free_memory
from swarmnode.rl.corrections import effective_share, importance_weights
from swarmnode.rl.objectives import MAX_GRAD_NORM, WEIGHT_DECAY, Objective, policy_loss
from swarmnode.rollouts.groups import Outcome
from swarmnode.rollouts.trainer.batch import Rows
from swarmnode.rollouts.trainer.judge import GroupRefused, contained


@dataclass(frozen=True)
class UpdateStatistics:
    """Measurements of an update. Means are per trained token; None if no token was trained on, or
    if the number is not finite."""

    stepped: bool
    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    effective_own: float | None = None
    """Effective sample size ÷ sample size of the own tokens' weights, in (0, 1]."""
    effective_external: float | None = None
    own_gap: float | None = None
    """Mean |Δ log-probability| of own tokens between the sampler and this policy, in nats."""
    skipped: str = ""
    """Reason for which no step was taken, a key of `TrainerDrops.update`; empty after a step."""
    refused: Mapping[int, Outcome] = field(default_factory=dict)
    """Reason for each exclusion of a peer's group, by the group's index in `Rows.groups`."""
    details: Mapping[Outcome, str] = field(default_factory=dict)
    """Description of the last excluded group, by reason."""
    dropped_rows: int = 0
    """Number of own rows that were excluded because they do not fit into memory, even with
    activation checkpointing."""


@dataclass
class RowSelection:
    """Rows of an update that are run through the model. A failed attempt reduces them."""

    own: list[int]
    external: list[int]
    recomputed: set[int] = field(default_factory=set)
    """Own rows that are run with activation checkpointing, because they do not fit otherwise."""
    one_by_one: bool = False
    """True if each external group runs in its own pass, because one of them fails and it is not
    known which."""
    refused: dict[int, Outcome] = field(default_factory=dict)
    """Reason for each exclusion of an external group, by the group's index in `Rows.groups`."""
    details: dict[Outcome, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Own rows that were excluded."""

    def refuse(self, group: int, refused: GroupRefused, rows: Rows) -> None:
        """Exclude an external group."""
        self.refused[group] = refused.outcome
        self.details[refused.outcome] = refused.detail
        self.external = [i for i in self.external if rows.groups[i] != group]

    def spare(self, row: int) -> bool:
        """Run an own row with activation checkpointing, or exclude it if that was tried. Return
        False if no own row is left."""
        if row not in self.recomputed:
            self.recomputed.add(row)
            return True
        self.own.remove(row)
        self.dropped.add(row)
        return bool(self.own)

    def outcome(self, statistics: UpdateStatistics) -> UpdateStatistics:
        """Return `statistics` of the last attempt, with the excluded rows and groups."""
        return replace(
            statistics,
            refused=self.refused,
            details=self.details,
            dropped_rows=len(self.dropped),
        )

    def groups(self, rows: Rows) -> list[tuple[int, list[int]]]:
        """Return the external groups, each as (number, indices of its rows)."""
        numbers = sorted({rows.groups[i] for i in self.external})
        return [(n, [i for i in self.external if rows.groups[i] == n]) for n in numbers]


class Ranks(Protocol):
    """The other devices of this machine, which run some micro-batches of an update (ranks.py)."""

    def accumulating(self, rows: Rows, selection: RowSelection) -> AbstractContextManager[Sharing]:
        """Let the other ranks accumulate gradients during the block.

        If the block raises, the other ranks have stopped when the exception leaves it.
        """
        ...

    def add_gradients(self) -> None:
        """Add the other ranks' gradients to the local ones."""
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
class TokenSums:
    """Sums over the tokens of micro-batches, to which every rank contributes."""

    loss: float = 0.0
    entropy: float = 0.0
    tokens: float = 0.0
    weights: float = 0.0
    squares: float = 0.0
    """Sum of the squared weights."""
    gap: float = 0.0
    """Sum of |Δ log-probability| to the sampler."""

    @classmethod
    def read(cls, sums: torch.Tensor) -> TokenSums:
        """Return the numbers (6,) of one micro-batch, in the order of the fields."""
        return cls(*sums.tolist())

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, astuple(self)))

    @property
    def effective(self) -> float | None:
        """Effective sample size ÷ sample size of the weights."""
        share = effective_share(self.weights, self.squares, self.tokens)
        return None if share is None else _finite(share)


@dataclass(frozen=True)
class Sums:
    """Sums over own rows, and over external rows."""

    own: TokenSums
    external: TokenSums


class StartOver(Exception):
    """Raised if memory ran out during an attempt. Its gradients are incomplete; the next attempt
    has smaller micro-batches."""


class PeersFailed(Exception):
    """Raised if an unknown one of several external groups fails."""


class Updater:
    """Takes optimizer steps; owns the optimizer.

    Args:
        batcher: Micro-batcher of own rows.
        external: Micro-batcher of peers' rows. It is separate, so that long rows of a peer do not
            reduce the micro-batches of own rows.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: TrainingConfig,
        batcher: MicroBatcher,
        external: MicroBatcher | None = None,
        optim: Optim = "adamw",
    ) -> None:
        self._policy = policy
        self._cfg = cfg
        self._batcher = batcher
        self._external = (
            external if external is not None else MicroBatcher(batcher.tokens, batcher.alive)
        )
        self.optimizer = make_optimizer(policy, cfg, optim)
        self._accelerated = policy.accelerator.prepare_optimizer(self.optimizer)
        self._recomputing = MicroBatcher(batcher.tokens, batcher.alive)
        """Micro-batcher of own rows with activation checkpointing."""
        self.ranks: Ranks | None = None
        self.lock = threading.Lock()
        """Held while weights change, so that another thread can copy them at any other time."""

    def update(self, rows: Rows) -> UpdateStatistics:
        """Take one optimizer step.

        There is one step per batch: a second step on the same rows would be off-policy, and peers'
        rows are off-policy already. Rows without an advantage are not run through the model, but
        their tokens count in the normaliser, so that a batch with little signal changes the policy
        little.

        * An external group is excluded if it does not fit into memory, raises an exception, or has
          a gradient that is not finite.
        * An own row that does not fit is run with activation checkpointing, and excluded if it does
          not fit then.

        Raises:
            DeviceError: No own row fits into memory.
        """
        forget_merged(self._policy)  # activations need the memory
        selection = RowSelection(*trained(rows))
        while selection.own or selection.external:
            try:
                return selection.outcome(self._step(rows, selection))
            except StartOver:
                pass
            except PeersFailed:
                selection.one_by_one = True
            except RowTooLarge as error:
                if rows.external[error.row]:
                    refused = GroupRefused("too_large", str(error))
                    selection.refuse(rows.groups[error.row], refused, rows)
                elif not selection.spare(error.row):
                    raise
            except _GroupFailed as error:
                selection.refuse(error.group, error.refused, rows)
            # A failed attempt took no step; discard its gradients.
            self._accelerated.zero_grad()
            free_memory()
        skipped = "not_finite" if "no_gradient" in selection.refused.values() else "no_signal"
        return selection.outcome(UpdateStatistics(stepped=False, skipped=skipped))

    def _step(self, rows: Rows, selection: RowSelection) -> UpdateStatistics:
        """Attempt the update.

        Raises:
            StartOver, PeersFailed, RowTooLarge, _GroupFailed: The attempt failed; nothing except
                gradients has changed.
        """
        if self.ranks is None:
            parts = [self.accumulate(rows, selection)]
        else:
            with self.ranks.accumulating(rows, selection) as sharing:
                parts = [self.accumulate(rows, selection, sharing), *sharing.others()]
            self.ranks.add_gradients()
        own = sum((part.own for part in parts), TokenSums())
        external = sum((part.external for part in parts), TokenSums())
        total, tokens = own + external, max(own.tokens + external.tokens, 1.0)
        norm = self._policy.accelerator.clip_grad_norm_(
            self._policy.trainable_parameters(), MAX_GRAD_NORM
        )
        finite = norm is None or bool(torch.isfinite(norm))
        stepped = self._apply(finite)
        scaled = self._policy.accelerator.scaler is not None
        # If only the gradient is not finite, the loss scale was too large.
        cause = "overflow" if scaled and math.isfinite(total.loss) else "not_finite"
        return UpdateStatistics(
            stepped=stepped,
            skipped="" if stepped else cause,
            loss=_finite(total.loss),
            entropy=_finite(total.entropy / tokens),
            grad_norm=float(norm) if norm is not None and finite else None,
            effective_own=own.effective,
            effective_external=external.effective,
            own_gap=_finite(own.gap / own.tokens) if own.tokens else None,
        )

    def accumulate(
        self, rows: Rows, selection: RowSelection, sharing: Sharing | None = None
    ) -> Sums:
        """Accumulate the gradients of the selected rows.

        Args:
            sharing: Yields the micro-batches for this rank, if other ranks work on the update as
                well.

        Raises:
            StartOver, PeersFailed, RowTooLarge, _GroupFailed: The attempt failed.
        """
        without = frozenset(selection.refused)
        objective, divisor = Objective.of(self._cfg), normalizer(rows, self._cfg, without)
        external = selection.external

        def backward(indices: list[int], recompute: bool) -> TokenSums:
            batch = collate(
                [rows.rows[i] for i in indices], self._policy.pad_id, self._policy.device
            )
            batch = replace(batch, recompute=recompute)
            # (n, T)
            logprobs, entropy = completion_logprobs(self._policy, batch, self._cfg.temperature)
            mask = batch.sampled_mask.to(logprobs.device)
            sampler = _padded([rows.sampler_logprobs[i] for i in indices], logprobs)
            weights = rows.weights[indices].to(logprobs.device).unsqueeze(1)
            weights = weights * importance_weights(logprobs, sampler, mask)
            loss = policy_loss(
                logprobs,
                rows.advantages[indices].to(logprobs.device),
                mask,
                objective,
                divisor,
                weights=weights,
            )
            self._policy.accelerator.backward(loss)
            gap = ((logprobs.detach() - sampler).abs() * mask).sum()
            sums = torch.stack(
                [
                    loss.detach(),
                    (entropy * mask).sum(),
                    mask.sum().to(loss.dtype),
                    weights.sum(),
                    weights.square().sum(),
                    gap,
                ]
            )
            return TokenSums.read(sums)

        def accumulate(
            batcher: MicroBatcher, indices: list[int], recompute: bool = False, alone: bool = False
        ) -> TokenSums:
            lengths = [len(rows.rows[i].prompt) + len(rows.rows[i].completion) for i in indices]
            groups = [rows.groups[i] for i in indices]
            work = lambda chosen: backward([indices[k] for k in chosen], recompute)
            with _rows_named(indices):
                try:
                    if sharing is None or alone:
                        parts = batcher.run_once(lengths, work, groups)
                    else:
                        most = sharing.tokens(lengths)
                        parts = batcher.run_once(lengths, work, groups, most, sharing.take)
                except MemoryError:
                    raise StartOver from None
            return sum(parts, TokenSums())

        self._accelerated.zero_grad()
        spared = sorted(selection.recomputed.intersection(selection.own))
        own = accumulate(self._batcher, [i for i in selection.own if i not in selection.recomputed])
        own += accumulate(self._recomputing, spared, recompute=True)
        others = TokenSums()
        if external:
            if selection.one_by_one:
                # If the own gradient is not finite, no group can be blamed for it.
                blames = own.is_finite and self._has_finite_gradient()
                for number, indices in selection.groups(rows):
                    with _blamed(number):
                        others += accumulate(self._external, indices, alone=True)
                        if blames and not (others.is_finite and self._has_finite_gradient()):
                            raise GroupRefused("no_gradient", "the gradient is not finite")
            else:
                with _blamed(None):
                    others = accumulate(self._external, external)
                    if not (others.is_finite and self._has_finite_gradient()):
                        raise PeersFailed
        return Sums(own, others)

    def zero_grad(self) -> None:
        self._accelerated.zero_grad()

    @property
    def batchers(self) -> tuple[MicroBatcher, MicroBatcher, MicroBatcher]:
        """Batchers of own rows, of own rows with activation checkpointing, and of external rows."""
        return self._batcher, self._recomputing, self._external

    def _has_finite_gradient(self) -> bool:
        grads = [p.grad for p in self._policy.trainable_parameters() if p.grad is not None]
        return not grads or bool(torch.isfinite(torch.nn.utils.get_total_norm(grads)))

    def _apply(self, finite: bool) -> bool:
        """Take the optimizer step if the gradient is finite; return True if it was taken.

        In float16 the loss is scaled, and the scaler's step detects an overflow, skips the update
        and lowers the scale. It must be called for a gradient that is not finite too; otherwise the
        scale would stay, and every later gradient would overflow.
        """
        scaled = self._policy.accelerator.scaler is not None
        if finite or scaled:
            with self.lock:
                self._accelerated.step()
                # A fused step does not; `merged_weights` compares the counters.
                torch.autograd.graph.increment_version(self._policy.trainable_parameters())
        self._accelerated.zero_grad()
        return finite and not (scaled and self._accelerated.step_was_skipped)


def make_optimizer(policy: Policy, cfg: TrainingConfig, optim: Optim) -> torch.optim.Optimizer:
    """Return AdamW with moments in 32 bits, or with block-wise 8-bit moments of bitsandbytes (arXiv
    2110.02861). `policy.load.check_optim` has checked that it is available."""
    parameters = policy.trainable_parameters()
    if optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        eight: torch.optim.Optimizer = AdamW8bit(
            parameters, lr=cfg.learning_rate, weight_decay=WEIGHT_DECAY
        )
        return eight
    # The fused kernel makes no temporary copies of all weights.
    fused = policy.device.type in ("cpu", "cuda") or None
    return torch.optim.AdamW(
        parameters, lr=cfg.learning_rate, weight_decay=WEIGHT_DECAY, fused=fused
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _GroupFailed(Exception):
    """Raised if an external group fails."""

    def __init__(self, group: int, refused: GroupRefused) -> None:
        super().__init__(group)
        self.group = group
        self.refused = refused


@contextlib.contextmanager
def _blamed(group: int | None) -> Iterator[None]:
    """Attribute failures inside the block to the external group `group`, or to an unknown one if it
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
    """Translate the row of RowTooLarge from a position in `indices` to an index of all rows."""
    try:
        yield
    except RowTooLarge as error:
        error.row = indices[error.row]
        raise


def trained(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the indices of own and of external rows that have to be run through the model."""
    return rows.informative(external=False), rows.informative(external=True)


def normalizer(rows: Rows, cfg: TrainingConfig, without: frozenset[int] = frozenset()) -> float:
    """Return the divisor of the loss. It counts all rows, also those that are not run.

    Args:
        without: Groups that are excluded.
    """
    lengths = [
        0 if i in rows.masked else rows.length(i)  # still counted as a sequence, as in TRL
        for i, group in enumerate(rows.groups)
        if group not in without
    ]
    return Objective.of(cfg).normalizer(lengths)


def _padded(values: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    """Return ragged lists as a tensor (n, T), 0 on padding."""
    width = like.shape[1]
    padded = [[*row, *[0.0] * (width - len(row))] for row in values]
    return torch.tensor(padded, dtype=torch.float32, device=like.device)
