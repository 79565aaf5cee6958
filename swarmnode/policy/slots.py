"""Decoder whose keys and values are written in place: each row has a slot.

Rows may start and end at different times. transformers' own cache is copied at each step to grow by
one column; here only rows that change their slot are copied. Every row starts at column 0, and
columns beyond its end are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from swarmnode.policy.decode import decoding_gap, left_padded
from swarmnode.policy.merged import MergedWeights, merged_weights
from swarmnode.policy.model import Policy
from swarmnode.policy.recorded import RecordedSteps
from swarmnode.policy.step import obstacle_to_step, written_step
from swarmnode.policy.ways import obstacle, sees_everything

ALIGNED = 8
"""The number of columns of a mask is a multiple of this. Otherwise fused attention would copy the
mask in every layer."""
COLUMNS = 128
"""Number of columns that are allocated at first, unless the caller knows better. The number grows
by half when they are full."""


def unsuited(policy: Policy) -> str:
    """Return the reason why slots do not work with this policy; empty if they do."""
    if policy.is_spread:
        return "its layers lie on several devices"
    if not sees_everything(policy):
        return "its layers do not see everything (sliding windows, convolutions)"
    return obstacle(policy, "slots", lambda: slots_gap(policy))


def slots_gap(policy: Policy) -> float:
    """Return the mean difference in nats between log-probabilities in slots and of the reference
    method."""
    return decoding_gap(policy, lambda prompts: fill(policy, prompts, 1, COLUMNS))


def writes_out(policy: Policy) -> bool:
    """Return True if the written-out step computes the same as the model. The trial runs once."""

    def gap() -> float:
        if why := obstacle_to_step(policy):
            raise ValueError(why)
        return slots_gap(policy)

    return not obstacle(policy, "written-out step", gap)


def next_logits(
    policy: Policy,
    token: torch.Tensor,
    mask: torch.Tensor | None,
    position: torch.Tensor,
    cache: Cache,
    merged: MergedWeights | None = None,
) -> torch.Tensor:
    """Return the logits (N, V) of the next token of each row.

    Args:
        token: (N, 1), the newest token of every row.
        mask: (N, 1, 1, L), added to the attention scores. If None, rows attend to all columns.
        position: (N, 1), position of `token`.
        cache: Keys and values, which are read and extended by one column.
        merged: Result of `merged_weights`, which transformers' forward pass ignores.
    """
    if writes_out(policy):
        return written_step(policy, token, mask, position, cache, merged)
    return policy.logits(token, mask, position, 1, cache)[:, -1]


def fill(
    policy: Policy, prompts: Sequence[Sequence[int]], generations: int, columns: int
) -> tuple[Slots, torch.Tensor]:
    """Prefill Q prompts in one pass.

    Args:
        generations: G, number of rows that continue each prompt.
        columns: Number of columns to allocate at first.

    Returns:
        Slots with N = Q · G rows, and the logits (N, V) of their first tokens.
    """
    heads = prefill(policy, prompts)
    slots = Slots(policy, len(heads) * generations, columns)
    for head in heads:
        slots.add(head, generations)
    logits = torch.stack([head.logits for head in heads])
    return slots, logits.repeat_interleave(generations, 0)


@dataclass(frozen=True)
class PrefilledRow:
    """Keys and values of a row's tokens, and the logits of its next token."""

    keys: list[torch.Tensor]
    """(heads, P, D) of each layer."""
    values: list[torch.Tensor]
    logits: torch.Tensor
    """(V,) logits of the next token."""

    def __len__(self) -> int:
        return self.keys[0].shape[1]


@torch.no_grad()
def prefill(
    policy: Policy, rows: Sequence[Sequence[int]], known: Sequence[PrefilledRow] = ()
) -> list[PrefilledRow]:
    """Prefill rows of ids in one pass and return their keys and values.

    Rows are padded on the left, so that all end at the last column.

    Args:
        rows: Q sequences of ids, none empty.
        known: (Q,) keys and values of the first tokens of each row, so that only the remaining
            tokens are run; empty if there are none.
    """
    lengths = [len(each) for each in known] or [0] * len(rows)
    later = [row[length:] for row, length in zip(rows, lengths, strict=True)]
    ids, mask = left_padded(later, policy.pad_id, policy.device)  # (Q, S)
    width = max(lengths)  # P
    before = torch.tensor(lengths, device=policy.device)  # (Q,)
    positions = before[:, None] + (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=policy.base.config)
    if known:
        for layer in range(len(known[0].keys)):
            keys = _left_padded_rows([each.keys[layer] for each in known], width)
            cache.update(
                keys, _left_padded_rows([each.values[layer] for each in known], width), layer
            )
        there = torch.arange(width, device=policy.device) >= width - before[:, None]  # (Q, P)
        mask = torch.cat([there.to(mask.dtype), mask], 1)
    logits = policy.logits(ids, mask, positions, 1, cache)[:, -1]  # (Q, V)
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]

    def cut(whole: torch.Tensor | None, i: int) -> torch.Tensor:
        assert whole is not None
        new = whole[i, :, -len(later[i]) :]
        return torch.cat([whole[i, :, width - lengths[i] : width], new], 1) if lengths[i] else new

    return [
        PrefilledRow(
            [cut(layer.keys, i) for layer in layers],
            [cut(layer.values, i) for layer in layers],
            logits[i],
        )
        for i in range(len(rows))
    ]


def _left_padded_rows(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Stack tensors (heads, P_i, D) into (N, heads, width, D), with zeros on the left."""
    first = rows[0]
    out = first.new_zeros(len(rows), first.shape[0], width, first.shape[2])
    for i, row in enumerate(rows):
        out[i, :, width - row.shape[1] :] = row
    return out


@dataclass
class CacheView:
    """Part of the cache that a step reads: rows 0 to n − 1, columns 0 to `width` − 1."""

    width: int = 0
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """(n,)."""
    places: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """(n,) column that each row writes."""


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, each (slots, heads, columns, D); their D may differ."""

    keys: torch.Tensor
    values: torch.Tensor

    # keys, values (heads, P, D)
    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        window: CacheView,
    ) -> None:
        super().__init__()
        # Zeros, because masked values must be finite.
        self.keys, self.values = (
            torch.zeros(
                (rows, like.shape[0], columns, like.shape[2]), dtype=dtype, device=like.device
            )
            for like in (keys, values)
        )
        self.dtype, self.device, self.is_initialized = dtype, keys.device, True
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window, count = self._window, len(key_states)
        self.keys[window.rows, :, window.places] = key_states[:, :, 0].to(self.dtype)
        self.values[window.rows, :, window.places] = value_states[:, :, 0].to(self.dtype)
        return self.keys[:count, :, : window.width], self.values[:count, :, : window.width]

    def reorder(self, order: Sequence[int], columns: int) -> None:
        """Move row order[i] to row i, for columns below `columns`."""
        for tensor in (self.keys, self.values):
            tensor[: len(order), :, :columns] = tensor[order, :, :columns]

    def resize(self, rows: int, columns: int) -> None:
        """Allocate at least `rows` slots and `columns` columns."""
        have = self.keys.shape
        if rows > have[0] or columns > have[2]:
            for name in ("keys", "values"):
                old = getattr(self, name)
                shape = (max(rows, have[0]), old.shape[1], max(columns, have[2]), old.shape[3])
                new = old.new_zeros(shape)
                new[: have[0], :, : have[2]] = old
                setattr(self, name, new)


class Slots:
    """The active rows, in slots 0 to n − 1 without gaps, so that a step computes active rows only.

    Args:
        rows, columns: Numbers of rows and columns to allocate at first.
    """

    def __init__(self, policy: Policy, rows: int = 1, columns: int = COLUMNS) -> None:
        self._policy = policy
        self._first = rows, columns
        self._window = CacheView()
        self._layers: list[SlotLayer] = []
        self._recorded = RecordedSteps(policy)
        self.lengths: list[int] = []
        """Number of tokens in each row's cache."""

    def add(self, row: PrefilledRow, count: int = 1) -> None:
        """Add `count` copies of a row in the next slots."""
        first, length = len(self.lengths), len(row)
        self._make_room(row, first + count, length + 1)
        slots = slice(first, first + count)
        for layer, keys, values in zip(self._layers, row.keys, row.values, strict=True):
            layer.keys[slots, :, :length] = keys.to(layer.dtype)
            layer.values[slots, :, :length] = values.to(layer.dtype)
        self.lengths += [length] * count

    def copy(self, slot: int) -> PrefilledRow:
        """Return a copy of a row's keys and values, without logits of the next token."""
        length = self.lengths[slot]
        cut = lambda whole: whole[slot, :, :length].clone()
        return PrefilledRow(
            [cut(layer.keys) for layer in self._layers],
            [cut(layer.values) for layer in self._layers],
            torch.zeros(0),
        )

    def remove(self, slot: int) -> None:
        """Remove a row; the last row moves to its slot."""
        last = len(self.lengths) - 1
        if slot != last:
            length = self.lengths[last]
            for layer in self._layers:
                layer.keys[slot, :, :length] = layer.keys[last, :, :length]
                layer.values[slot, :, :length] = layer.values[last, :, :length]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows in this order, and drop the other rows."""
        self.lengths = [self.lengths[slot] for slot in rows]
        for layer in self._layers:
            layer.reorder(rows, max(self.lengths))

    @torch.no_grad()
    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append the newest token (n,) of every row; return the logits (n, V) of the next ones."""
        count, longest = len(self.lengths), max(self.lengths) + 1
        if longest > self._layers[0].keys.shape[2]:
            self._resize(count, _rounded(longest + longest // 2))
        places = torch.tensor(self.lengths, device=self._policy.device)
        shape = self._recorded.shape(count, longest)
        if shape is None:
            width = min(_rounded(longest), self._layers[0].keys.shape[2])
            logits = self._step(tokens, places, width)
        else:
            self._resize(*shape)
            logits = self._recorded.step(self._step, tokens, places, shape)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    @cached_property
    def _merged(self) -> MergedWeights | None:
        """The weights in use if they are a merged copy. They are compared with the policy's only
        once, since that takes as long as a step of a small policy."""
        return merged_weights(self._policy) if writes_out(self._policy) else None

    def forget_weights(self) -> None:
        """Drop merged weights, and recorded steps, which read the weights that autocast has cast.

        Call it before weights change and at the end of an autocast context.
        """
        self._recorded.clear()
        self.__dict__.pop("_merged", None)

    def _step(self, tokens: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
        """Compute one step with tensor operations only, so that it can be recorded.

        Args:
            tokens: (n,), newest tokens of slots 0 to n − 1.
            places: (n,), the column that each row writes.
            width: W, number of columns that are read.
        """
        window, device, dtype = self._window, self._policy.device, self._policy.dtype
        window.width, window.places = width, places
        window.rows = torch.arange(len(tokens), device=device)
        beyond = torch.arange(width, device=device) > places[:, None]  # (n, W)
        mask = beyond.to(dtype)[:, None, None] * torch.finfo(dtype).min
        cache = Cache(layers=list(self._layers))
        token, position = tokens[:, None], places[:, None]
        return next_logits(self._policy, token, mask, position, cache, self._merged)

    def _resize(self, rows: int, columns: int) -> None:
        """Allocate memory for at least this many rows and columns, and drop recordings of the old
        one."""
        have = self._layers[0].keys.shape
        if rows > have[0] or columns > have[2]:
            self._recorded.clear()
            for layer in self._layers:
                layer.resize(rows, columns)

    def _make_room(self, row: PrefilledRow, rows: int, columns: int) -> None:
        if not self._layers:
            dtype, (least_rows, least_columns) = self._policy.dtype, self._first
            most = max(rows, least_rows), _rounded(max(columns, least_columns))
            self._layers = [
                SlotLayer(keys, values, *most, dtype, self._window)
                for keys, values in zip(row.keys, row.values, strict=True)
            ]
        have = self._layers[0].keys.shape[0]
        self._resize(rows if rows <= have else max(rows, 2 * have), _rounded(columns))


def _rounded(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED
