"""Decoding steps of the sampler: one new token per row, with keys and values cached.

There are three decoders, in order of preference:

    RecordedDecoder    CUDA: keys and values in memory of fixed size; a step is recorded once as a
                       CUDA graph and then replayed
    FixedDecoder       any single device: keys and values in memory of fixed size
    GrowingDecoder     any model: transformers' own cache, which is copied at every step

A step of one token consists of about a thousand small kernels, and launching them from Python takes
several times longer than running them. A CUDA graph launches all of them at once. A graph reads and
writes the same addresses at every step, so keys and values lie in memory of a fixed size, and
columns that are not filled yet are masked. When the memory is full, it grows (by `ROOM` tokens at
first, by twice as many each further time) and the step is recorded again. A graph lives for one
call of `generate`, so it needs no memory during training. Recording costs about as much as one
step. On an H200 with 0.5 B parameters and 64 rows, 32 tokens took 0.19 s instead of 0.85 s
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from swarmnode.policy.model import Policy
from swarmnode.policy.step import next_logits
from swarmnode.policy.ways import (
    Row,
    mean_gap,
    obstacle,
    plain_logprobs,
    sees_everything,
    trial_rows,
)

log = logging.getLogger(__name__)

RECORD_FROM = 6
"""Least number of tokens for which recording a step is faster."""
ROOM = 256
"""Tokens for which memory is allocated at first. Most completions are much shorter than allowed."""
ALIGNED = 8
"""The number of columns of a mask is a multiple of this. Otherwise fused attention would copy the
mask in every layer."""

_unrecordable: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models whose step could not be recorded."""
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Decoder(Protocol):
    """Function from the newest token (N,) of each row to the logits (N, V) of the next one. Rows
    are Q prompts × G completions."""

    keeps_rows: bool
    """True if `keep` can drop rows during decoding."""

    def __call__(self, token: torch.Tensor, /) -> torch.Tensor: ...

    def keep(self, rows: torch.Tensor, /) -> None:
        """Continue with the rows of these indices only, and drop the other rows."""
        ...


def decoder(
    policy: Policy,
    cache: DynamicCache,
    mask: torch.Tensor,
    position: torch.Tensor,
    generations: int,
    room: int,
) -> Decoder:
    """Return a decoder that continues Q prompts, G = `generations` times each.

    Args:
        cache: Keys and values of the prompts.
        mask: (Q, P), 1 at tokens and 0 at padding.
        position: (Q, 1), position of each prompt's last token.
        room: Maximum number of new tokens per row.
    """
    mask, position = (
        mask.repeat_interleave(generations, 0),
        position.repeat_interleave(generations, 0),
    )
    if room >= RECORD_FROM and recordable(policy):
        return RecordedDecoder(policy, cache, mask, position, generations, room)
    if not policy.is_spread and has_fixed_form(policy):
        return FixedDecoder(policy, cache, mask, position, generations, room)
    return GrowingDecoder(policy, cache, mask, position, generations, room)


def recordable(policy: Policy) -> bool:
    """Return True if a decoding step of this policy can be recorded as a CUDA graph.

    The policy must be on one CUDA device, attend to all earlier tokens, and use no kernel that
    reads tensor values on the host.
    """
    model = policy.base
    return (
        policy.device.type == "cuda"
        and torch.version.hip is None
        and not policy.is_spread
        and not getattr(model, "is_quantized", False)
        and model not in _unrecordable
        and has_fixed_form(policy)
    )


def has_fixed_form(policy: Policy) -> bool:
    """Return True if `FixedDecoder` computes the same log-probabilities as the model.

    The model must have no sliding windows and must apply the given mask unchanged. The trial runs
    once per policy.
    """
    return sees_everything(policy) and not obstacle(
        policy, "fixed memory", lambda: decoding_gap(policy, FixedDecoder)
    )


def pads(policy: Policy) -> bool:
    """Return True if left-padded prompts of different lengths can share a pass. The trial runs
    once."""
    return not obstacle(policy, "padding", lambda: decoding_gap(policy, GrowingDecoder))


@torch.no_grad()
def decoding_gap(policy: Policy, kind: type[GrowingDecoder | FixedDecoder]) -> float:
    """Return the mean difference in nats between log-probabilities of decoding by `kind` and of the
    plain way, for two rows of different lengths."""
    rows = [trial_rows(policy)[0], trial_rows(policy)[2]]
    length = min(len(row.completion) for row in rows)
    ids, mask = left_padded([row.prompt for row in rows], policy.pad_id, policy.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=policy.base.config)
    logits = policy.logits(ids, mask, positions, 1, cache)[:, -1]
    advance = kind(policy, cache, mask, positions[:, -1:], 1, length)
    found: list[list[float]] = [[] for _ in rows]
    for place in range(length):
        scores = torch.log_softmax(logits.float(), -1)
        for i, (_, answer, _) in enumerate(rows):
            found[i].append(float(scores[i, answer[place]]))
        if place + 1 < length:
            token = torch.tensor([row.completion[place] for row in rows], device=policy.device)
            logits = advance(token)
    expected = [plain_logprobs(policy, Row(row.prompt, row.completion[:length])) for row in rows]
    return mean_gap([*found[0], *found[1]], [*expected[0], *expected[1]])


def left_padded(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both (Q, P), of rows that end at the last column. The mask is 1 on
    tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


def reorder(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Replace row i of `cache` by row rows[i]. Every kind of cache layer supports this, each on its
    own device, unlike repeating and selecting."""
    cache.reorder_cache(cast("torch.LongTensor", rows))


class GrowingDecoder:
    """Decoder with transformers' own cache, which grows by one column per step. It works with any
    device and model."""

    keeps_rows = True

    def __init__(
        self,
        policy: Policy,
        cache: DynamicCache,
        mask: torch.Tensor,
        position: torch.Tensor,
        generations: int,
        room: int,
    ) -> None:  # mask (N, P), position (N, 1)
        reorder(cache, torch.arange(len(mask) // generations).repeat_interleave(generations))
        self._policy, self._cache, self._position = policy, cache, position
        # (N, P + T); the part in use is a view
        self._mask = torch.cat([mask, mask.new_ones(len(mask), room)], 1)
        self._used = mask.shape[1]

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        self._used += 1
        self._position = self._position + 1
        return self._policy.logits(
            token[:, None], self._mask[:, : self._used], self._position, 1, self._cache
        )[:, -1]

    def keep(self, rows: torch.Tensor) -> None:
        reorder(self._cache, rows)
        self._position, self._mask = self._position[rows], self._mask[rows]


class FixedLayer(DynamicLayer):
    """Keys and values of one layer, (N, heads, L, D), allocated in advance."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        generations: int,
        columns: int,
        column: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Copy the keys and values of the prompts, `generations` times each.

        Args:
            keys, values: (Q, heads, P, D).
            columns: L, the number of columns to allocate.
            column: (1,), the column that the next step writes.
        """
        super().__init__()
        self.keys, self.values = (_widened(t, generations, columns, dtype) for t in (keys, values))
        self.dtype, self.device, self.is_initialized = dtype, keys.device, True
        self._column = column
        self.seen = columns
        """Number of columns that a step attends to."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self._column, key_states.to(self.dtype))
        self.values.index_copy_(2, self._column, value_states.to(self.dtype))
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def lengthen(self, columns: int) -> None:
        self.keys, self.values = (
            _longer(self.keys, 2, columns, 0),
            _longer(self.values, 2, columns, 0),
        )
        self.seen = columns

    def keep(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]


def _widened(
    prompts: torch.Tensor, generations: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Repeat keys or values of prompts (Q, heads, P, D) to (Q · G, heads, `columns`, D). Columns
    behind the prompts are 0, since masked values must be finite."""
    count, heads, width, size = prompts.shape
    out = torch.zeros(count, generations, heads, columns, size, dtype=dtype, device=prompts.device)
    out[:, :, :, :width] = prompts[:, None]
    return out.flatten(0, 1)


def _longer(tensor: torch.Tensor, dim: int, size: int, value: float) -> torch.Tensor:
    """Return `tensor` extended to `size` entries along `dim`; new entries are `value`."""
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


class FixedDecoder:
    """Decoder that writes keys and values in place, into memory that is allocated in advance.

    The cache has the policy's compute dtype, because attention computes in that dtype.
    """

    keeps_rows = True

    def __init__(
        self,
        policy: Policy,
        cache: DynamicCache,
        mask: torch.Tensor,
        position: torch.Tensor,
        generations: int,
        room: int,
    ) -> None:  # mask (N, P), position (N, 1)
        width = mask.shape[1]
        columns = -(-(width + min(room, ROOM)) // ALIGNED) * ALIGNED  # L
        self._policy = policy
        self._column = torch.full((1,), width - 1, device=mask.device)
        self._used, self._room, self._most = width, ROOM, -(-(width + room) // ALIGNED) * ALIGNED
        self._allowed = _longer(mask.bool(), 1, columns, True)  # (N, L)
        self._position = position.clone()
        self._layers = []
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            self._layers.append(
                FixedLayer(
                    layer.keys, layer.values, generations, columns, self._column, policy.dtype
                )
            )
        self._cache = Cache(layers=list(self._layers))
        self._mask = self._hidden(self._allowed)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        if self._used == self._allowed.shape[1]:
            self._grow()
        self._used += 1
        return self._advance(token)

    def keep(self, rows: torch.Tensor) -> None:
        for layer in self._layers:
            layer.keep(rows)
        self._position, self._allowed = self._position[rows], self._allowed[rows]
        self._mask = self._hidden(self._allowed)

    def _grow(self) -> None:
        columns = min(self._used + self._room, self._most)
        self._room *= 2
        self._allowed = _longer(self._allowed, 1, columns, True)
        for layer in self._layers:
            layer.lengthen(columns)
        self._mask = self._hidden(self._allowed)

    def _advance(self, token: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) after `token` (N,). The step attends to filled columns only."""
        for layer in self._layers:
            layer.seen = self._used
        self._column.add_(1)
        self._position.add_(1)
        mask = self._mask[..., : self._used]
        return next_logits(self._policy, token[:, None], mask, self._position, self._cache)

    def _hidden(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the additive attention mask (N, 1, 1, L): 0 where `seen` (N, L) is True."""
        dtype = self._policy.dtype
        return (~seen).to(dtype)[:, None, None] * torch.finfo(dtype).min


class RecordedDecoder(FixedDecoder):
    """`FixedDecoder` whose second step is recorded as a CUDA graph and replayed afterwards.

    The first step runs without a graph, so that lazily allocated workspaces exist before recording.
    Every step attends to all columns; columns that are not filled yet are masked.

    The caller must hold `policy.accelerator.autocast()` around all steps, because the graph reads
    the weights that this context has cast.
    """

    keeps_rows = False
    _graph: torch.cuda.CUDAGraph | None = None
    _warm = False
    _launched = False
    """True if recording has failed, so that every step is launched by itself."""
    _token = torch.zeros(0)
    _logits = torch.zeros(0)

    def _advance(self, token: torch.Tensor) -> torch.Tensor:
        if len(self._token) == 0:
            self._token = torch.zeros_like(token)
        self._token.copy_(token)
        if self._graph is None and self._warm and not self._launched:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        elif self._launched:
            self._step()
        else:
            with side_stream(self._policy.device):
                self._step()
            self._warm = True
        return self._logits

    def _step(self) -> None:
        """Compute one step with tensor operations only, so that it can be recorded.

        No value is read on the host, and no operation depends on the number of earlier steps.
        """
        self._column.add_(1)
        self._position.add_(1)
        columns = torch.arange(self._allowed.shape[1], device=self._column.device)
        mask = self._hidden(self._allowed & (columns <= self._column))
        self._logits = next_logits(
            self._policy, self._token[:, None], mask, self._position, self._cache
        )

    def _grow(self) -> None:
        self._graph, self._warm = None, False
        super()._grow()

    def _record(self) -> None:
        self._graph = record(self._policy, self._step)
        self._launched = self._graph is None


def record(policy: Policy, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Record the kernels that `step` launches; log the reason and return None on failure."""
    graph = torch.cuda.CUDAGraph()
    try:
        with side_stream(policy.device):
            # Other threads copy weights to the host at the same time. A recording in the default
            # mode would forbid this; "thread_local" restricts only this thread.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                # `capture_end` raises again because the recording failed
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    except RuntimeError as error:
        # the graph cannot reuse memory that the allocator caches for other pools
        if isinstance(error, torch.OutOfMemoryError):
            log.info("out of memory while recording a decoding step")
            torch.cuda.empty_cache()
        else:
            log.warning(
                "cannot record a decoding step, launching each step by itself: %s",
                str(error).split("\n")[0],
            )
            _unrecordable.add(policy.base)
        return None
    return graph


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a side stream. Recording is not allowed on the default stream. The warm-up
    uses the same side stream, so that its workspaces are reused."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    current, side = torch.cuda.current_stream(device), _streams[device]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
