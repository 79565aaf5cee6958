"""Log-probabilities of given completions, with gradient for training and without for the judgement
of peers' groups.

The prompt of a group is run through the model **once**, with gradient, and shared by its G
completions, as when sampling. Up to rounding, the result equals that of a run of prompt +
completion for every row, with far fewer tokens. Forward and backward were 2.4 times faster at 64
prompt and 32 completion tokens, and 1.3 times faster with the embedded policy's 8 and 5. There are
three methods, and the cheapest one is chosen:

    one pass     A packed row is a prompt followed by all of its completions, and a mask lets each
                 completion attend only to the prompt and itself. This launches half as many
                 kernels, which dominates on a GPU, and pads little. Attention computes scores that
                 the mask then drops.
    two passes   The prompts run first, and their keys and values are repeated for the completions.
                 For longer rows, and for models that need their own masks.
    row by row   Each row is one prompt and one completion in its own pass. For completions so long
                 that their prompts matter little. There is no padding and no mask, so attention
                 needs no memory for one. Nothing is shared, so activation checkpointing can be used
                 where the activations would not fit into memory.

At most `footprint.logits_tokens` tokens have logits in memory at once: the output head runs piece
by piece, and again in the backward pass. The logits of 4,000 tokens with a vocabulary of 152,000
would take 2.4 GB in float32, several times over.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from swarmnode.policy.decode import reorder
from swarmnode.policy.device import model_shape, spare_bytes
from swarmnode.policy.footprint import Method, logits_tokens, token_bytes
from swarmnode.policy.layers import find_layers
from swarmnode.policy.model import Policy
from swarmnode.policy.ways import (
    Row,
    mean_gap,
    obstacle,
    plain_logprobs,
    sees_everything,
    trial_rows,
)

ONE_PASS = {"cuda": 1024}
"""Largest number of columns of a row, P + K · T, for which one pass is faster than two. On an H200
with 0.5 B parameters: 89 instead of 176 ms at 271 columns, 335 instead of 297 ms at 2233. On a CPU
with the embedded policy: 9.5 instead of 12.4 ms at 52, 49 instead of 39 ms at 268."""
ONE_PASS_ELSEWHERE = 96
LONG_ROW = {"cuda": 1024}
"""Least tokens of a row that uses the whole device, so that rows can be run one by one without a
loss."""
LONG_ROW_ELSEWHERE = 256
PACKED_GAIN = {"cuda": 1.75}
"""Rows are packed if the padded batch has at least this many tokens per real token
(benchmarks/RESULTS.md). On an H200 with 0.5 B parameters, packed rows took 0.38 s instead of 0.67 s
at a ratio of 2.7, and 0.10 s instead of 0.21 s at 5.8. Attention computes scores that the mask
drops, so the gain at a ratio of 1.5 would be small."""
PACKED_GAIN_ELSEWHERE = 1.25
PACKED_COLUMNS = 1024
"""Largest number of tokens in a packed row, except for a prompt with one completion. Attention
computes the scores of all pairs, also of masked ones."""
PACKED_TOGETHER = frozenset({"cuda"})
"""Device types that run packed rows as one batch. A CPU runs them one by one, without padding,
because a single row already keeps it busy."""
WHOLE_SHARE = 1.25
"""Rows are run one by one if they have at most this many times the tokens of two passes, which
share prompts but pad."""
CACHED_BYTES = {"cpu": 24 * 2**20}
"""Size of the logits of a frozen head that are computed at a time, so that they stay in the cache.
With 49,152 tokens of vocabulary, 128 rows are computed at 210 and 640 rows at 170 GFLOP/s."""
FAR = PACKED_COLUMNS // 2
"""Number of columns of the packed row in which a sliding window is searched."""
SLOPE_BOUND = {torch.float32: 0.01}
"""Relative difference of gradients from the reference method above which a method is wrong."""
SLOPE_BOUND_ELSEWHERE = 0.3
"""The same bound in 16 bits."""
SPARE_SHARE = 0.8
"""Share of the free memory that activations may use. The estimate is accurate within 15 %."""

Way = Literal["one pass", "packed", "two passes", "row by row", "recomputed"]
"""Method of computing log-probabilities. `recomputed` is `row by row` with activation
checkpointing."""
WAYS: tuple[Way, ...] = get_args(Way)


Pack = tuple[int, list[int]]
"""(index of the prompt, indices of its completions) in a packed row."""


@dataclass(frozen=True)
class Layout:
    """Columns of packed rows: a prompt followed by its completions, each without its last token."""

    start: torch.Tensor
    """(N,), the column of each completion's first token."""
    columns: int
    """Number of columns of the longest row."""
    shortest: int
    """Number of tokens of the shortest prompt."""


@dataclass(frozen=True)
class Batch:
    """N completions of Q distinct prompts. Prompts are padded on the left and completions on the
    right, so that they are adjacent."""

    prompt_ids: torch.Tensor
    """(Q, P)."""
    prompt_mask: torch.Tensor
    """(Q, P) 1 on tokens, 0 on padding."""
    prompt_of: torch.Tensor
    """(N,) index of each completion's prompt."""
    completion_ids: torch.Tensor
    """(N, T)."""
    completion_mask: torch.Tensor
    """(N, T) bool, True on completion tokens."""
    sampled_mask: torch.Tensor
    """(N, T) bool, True at tokens that the policy sampled; only these are scored and trained on."""
    recompute: bool = False
    """True to use activation checkpointing, even if memory seems to suffice."""

    @property
    def padded_tokens(self) -> int:
        """N × (P + T), as `MicroBatcher` counts. It is an upper bound, since a prompt is run once
        per group."""
        return len(self.completion_ids) * (self.prompt_ids.shape[1] + self.completion_ids.shape[1])

    @cached_property
    def layout(self) -> Layout:
        """Column positions of the completions in packed rows."""
        prompts = self.prompt_mask.sum(1).tolist()
        ends = list(prompts)
        starts = []
        for owner, length in zip(
            self.prompt_of.tolist(), self.completion_mask.sum(1).tolist(), strict=True
        ):
            starts.append(ends[owner])
            ends[owner] += length - 1
        return Layout(torch.tensor(starts, device=self.prompt_of.device), max(ends), min(prompts))

    def part(self, some: Sequence[Pack]) -> Batch:
        """Return a batch of some packed rows. Its prompts are one for each pack."""
        owners, rows = [owner for owner, _ in some], [row for _, packed in some for row in packed]
        width = int(self.prompt_mask[owners].sum(1).max())
        length = int(self.completion_mask[rows].sum(1).max())
        prompt_of = [number for number, (_, packed) in enumerate(some) for _ in packed]
        return Batch(
            self.prompt_ids[owners, -width:],
            self.prompt_mask[owners, -width:],
            torch.tensor(prompt_of, device=self.prompt_of.device),
            self.completion_ids[rows, :length],
            self.completion_mask[rows, :length],
            self.sampled_mask[rows, :length],
        )


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Return rows as one batch, in their order; equal prompts are merged.

    Raises:
        ValueError: A prompt or completion is empty.
    """
    rows = [Row(*row) for row in rows]  # a plain pair is a row as well
    if not rows or not all(row.prompt and row.completion for row in rows):
        raise ValueError("every row needs a prompt and a completion of at least one token")
    prompts: dict[tuple[int, ...], int] = {}
    prompt_of = [prompts.setdefault(tuple(row.prompt), len(prompts)) for row in rows]
    lengths = [len(row.completion) for row in rows]
    width, longest = max(map(len, prompts)), max(lengths)
    tokens = torch.arange(longest) < torch.tensor(lengths)[:, None]  # (N, T)
    sampled = tokens.clone()
    for row, mask in zip(rows, sampled, strict=True):
        if row.sampled:
            mask[: len(row.sampled)] = torch.tensor(row.sampled)
    return Batch(
        torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device),
        torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device),
        torch.tensor(prompt_of, device=device),
        torch.tensor(
            [row.completion + [pad_id] * (longest - len(row.completion)) for row in rows],
            device=device,
        ),
        tokens.to(device),
        sampled.to(device),
    )


def completion_logprobs(
    policy: Policy, batch: Batch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability and the entropy at each sampled token, in the cheapest way.

    Returns:
        Log-probabilities at `temperature`, with gradient, and entropies without gradient; both (N,
        T), in nats, and 0 at tokens that were not sampled.
    """
    return logprobs_by(choose_way(policy, batch), policy, batch, temperature)


def choose_way(policy: Policy, batch: Batch) -> Way:
    """Return the cheapest way for `batch` among those that work with the model."""
    if (
        torch.is_grad_enabled()
        and (
            batch.recompute
            or needs_checkpointing(policy.base, policy.dtype, policy.lora_rank, batch)
        )
        and takes_way(policy, "recomputed")
    ):
        return "recomputed"
    if fits_one_pass(policy, batch):
        return "one pass"
    if stands_alone(batch):
        return "row by row"
    if fits_packed(policy, batch):
        return "packed"
    return "two passes" if takes_way(policy, "two passes") else "row by row"


def logprobs_by(
    way: Way, policy: Policy, batch: Batch, temperature: float, piece: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `completion_logprobs` in a given way.

    The output head runs at one position per prompt and at the completions, and only sampled tokens
    are converted to float32: with a large vocabulary, the logits decide how much fits into memory.

    Args:
        piece: Number of tokens whose logits are in memory at once; None is `logits_tokens`.
    """
    ids, mask = batch.completion_ids, batch.completion_mask
    # (M - N,) row and preceding column of each completion token except the first
    later, place = mask[:, 1:].nonzero(as_tuple=True)
    first = torch.arange(len(ids), device=ids.device)
    row, column = torch.cat([first, later]), torch.cat([torch.zeros_like(first), place + 1])
    frozen = has_frozen_head(policy)
    if piece is None:
        vocabulary = policy.base.config.get_text_config().vocab_size
        piece = logits_tokens(vocabulary, ids.device.type)
        if frozen and ids.device.type in CACHED_BYTES:
            piece = min(piece, CACHED_BYTES[ids.device.type] // (4 * vocabulary) + 1)
    split = len(row) > piece and splits_head(policy)
    with (
        _head_inputs(policy.base) if split else contextlib.nullcontext(),
        checkpointed(policy.base) if way == "recomputed" else contextlib.nullcontext(),
    ):
        outputs = _PASSES[way](policy, batch, later, place)
    if not torch.equal(batch.sampled_mask, mask):
        wanted = batch.sampled_mask[row, column].nonzero()[:, 0]
        outputs, row, column = outputs[wanted.to(outputs.device)], row[wanted], column[wanted]
    head = (lambda states: head_logits(policy, states)) if split else (lambda logits: logits)
    chosen, spread = in_pieces(head, outputs, ids[row, column], temperature, piece, frozen)
    # On the device of the head, which may differ from that of the ids.
    zeros = torch.zeros(ids.shape, device=chosen.device)
    where = row.to(chosen.device), column.to(chosen.device)
    return zeros.index_put(where, chosen), zeros.index_put(where, spread)


def takes_way(policy: Policy, way: Way) -> bool:
    """Return True if `way` gives the same values and gradients as row by row. The trial runs
    once."""
    if way in ("one pass", "packed") and not sees_everything(policy):
        return False  # the model needs its own masks
    if way == "recomputed" and _is_reentrant(policy.base):
        return True  # a trial would change the gradients of all weights
    return way == "row by row" or not obstacle(policy, way, lambda: way_gap(policy, way))


def way_gap(policy: Policy, way: Way) -> float:
    """Return the mean difference in nats between log-probabilities computed by `way` and by the
    reference method.

    Raises:
        ValueError: The gradients differ.
    """
    rows = trial_rows(policy)
    found, slope = _tried(policy, rows, way)
    expected, reference = _tried(policy, rows, "row by row")
    off = float((slope - reference).norm() / reference.norm().clamp(min=1e-30))
    if not off <= SLOPE_BOUND.get(policy.dtype, SLOPE_BOUND_ELSEWHERE):
        problem = "differs" if math.isfinite(off) else "is not finite"
        raise ValueError(f"its gradient {problem}")
    gap = mean_gap(found, expected)
    if way in ("one pass", "packed"):
        gap = max(gap, _distance_gap(policy, way, rows[0], expected))
    return gap


def _tried(policy: Policy, rows: Sequence[Row], way: Way) -> tuple[list[float], torch.Tensor]:
    """Return the log-probabilities of rows by `way`, and the gradient (d,) of their mean with
    respect to the embedded tokens, summed over the tokens. Gradients of weights do not change."""
    batch = collate(rows, policy.pad_id, policy.device)
    embedded: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        embedded.append(output.requires_grad_())

    hook = policy.base.get_input_embeddings().register_forward_hook(watch)
    try:
        with torch.enable_grad():
            values, _ = logprobs_by(way, policy, batch, 1.0)
            slopes = torch.autograd.grad(values.sum() / sum(row.tokens for row in rows), embedded)
    finally:
        hook.remove()
    slope = torch.stack([each.float().flatten(0, -2).sum(0) for each in slopes]).sum(0)
    return values[batch.completion_mask.to(values.device)].tolist(), slope


def _distance_gap(policy: Policy, way: Way, row: Row, expected: Sequence[float]) -> float:
    """Return the mean difference in nats of a row's log-probabilities if its tokens are far from
    their prompt in the packed row. Detects a sliding window that the model's cache does not show.

    Args:
        expected: Log-probabilities of the row by the reference method, and of others after them.
    """
    most = FAR if way == "packed" else ONE_PASS.get(policy.device.type, ONE_PASS_ELSEWHERE)
    count = max(1, min(most, policy.context or most) - len(row.prompt) - len(row.completion))
    ahead = (row.completion * count)[:count]
    batch = collate([Row(row.prompt, ahead, [False] * count), row], policy.pad_id, policy.device)
    found, _ = logprobs_by(way, policy, batch, 1.0)
    return mean_gap(found[1, : row.tokens].tolist(), expected[: row.tokens])


def fits_one_pass(policy: Policy, batch: Batch) -> bool:
    """Return True if one pass is possible and worthwhile.

    It must run no more tokens than the padded rows have, and rows must be short enough that the
    extra attention costs less than one pass saves.
    """
    prompts, columns = len(batch.prompt_ids), batch.layout.columns
    if (
        columns > ONE_PASS.get(batch.prompt_ids.device.type, ONE_PASS_ELSEWHERE)
        or prompts * columns > batch.padded_tokens
    ):
        return False
    return takes_way(policy, "one pass")


def stands_alone(batch: Batch) -> bool:
    """Return True if rows are long enough to run each row in a pass of its own.

    Such rows lose little by not sharing prompts, and they need no padding.
    """
    prompts, answers = batch.prompt_mask.sum(1), batch.completion_mask.sum(1)
    whole = int(prompts[batch.prompt_of].sum() + answers.sum())
    long = LONG_ROW.get(answers.device.type, LONG_ROW_ELSEWHERE)
    return whole >= long * len(answers) and whole <= WHOLE_SHARE * (
        batch.prompt_ids.numel() + batch.completion_ids.numel()
    )


def fits_packed(policy: Policy, batch: Batch) -> bool:
    """Return True if lengths differ so much that packing is worthwhile, and packing works with the
    model."""
    real = int(batch.prompt_mask.sum() + batch.completion_mask.sum())
    run = batch.prompt_ids.numel() + batch.completion_ids.numel()
    gain = PACKED_GAIN.get(batch.prompt_ids.device.type, PACKED_GAIN_ELSEWHERE)
    return run >= gain * real and takes_way(policy, "packed")


def packs(batch: Batch) -> list[Pack]:
    """Divide the completions of each prompt into packed rows.

    A packed row has at most PACKED_COLUMNS tokens, prompt included, or holds a single completion.
    """
    prompts, answers = batch.prompt_mask.sum(1).tolist(), batch.completion_mask.sum(1).tolist()
    found: dict[int, list[list[int]]] = {}
    room: dict[int, int] = {}
    for row, owner in enumerate(batch.prompt_of.tolist()):
        if room.get(owner, 0) < answers[row]:
            found.setdefault(owner, []).append([])
            room[owner] = PACKED_COLUMNS - prompts[owner]
        found[owner][-1].append(row)
        room[owner] -= answers[row]
    return [(owner, rows) for owner, packed in found.items() for rows in packed]


def needs_checkpointing(
    model: PreTrainedModel, dtype: torch.dtype, lora_rank: int, batch: Batch
) -> bool:
    """Return True if the activations of all layers would not fit into the free memory."""
    spare, shape = spare_bytes(batch.prompt_ids.device), model_shape(model)
    if spare is None or shape is None:
        return False
    method = Method(
        batch.prompt_ids.device.type, str(dtype).removeprefix("torch."), lora_rank=lora_rank
    )
    return token_bytes(shape, method) * batch.padded_tokens > SPARE_SHARE * spare


@contextlib.contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Use activation checkpointing for all passes inside the block. The backward pass may run after
    it.

    transformers' own checkpointing needs `model.train()`, which enables dropout, so that sampling
    and training would compute different functions.
    """
    layers = find_layers(model)
    # accelerate sets `forward` if layers are on several devices
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _CheckpointedLayer(layer.forward, hidden=_is_reentrant(model))
    cached = torch.is_autocast_cache_enabled()
    # Otherwise casts of all weights, each used once, would stay in memory until the end of the
    # pass.
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _is_reentrant(model: PreTrainedModel) -> bool:
    """Return True if activation checkpointing must be reentrant, see `_CheckpointedLayer`."""
    return bool(getattr(model, "is_loaded_in_8bit", False))


class _CheckpointedLayer:
    """A layer's forward with activation checkpointing. Without dropout, no random state is stored.

    Args:
        hidden: True if the layer stores inputs where autograd does not see them, as bitsandbytes'
            8-bit product does in its context. The first pass then runs without gradients, and needs
            an input that requires a gradient.
    """

    def __init__(self, forward: Callable[..., object], hidden: bool = False) -> None:
        self._forward = forward
        self._hidden = hidden

    def __call__(self, *args: object, **kwargs: object) -> object:
        forward = functools.partial(self._forward, **kwargs)
        if (
            self._hidden
            and args
            and isinstance(args[0], torch.Tensor)
            and not args[0].requires_grad
        ):
            args = (args[0].detach().requires_grad_(), *args[1:])
        out: object = checkpoint(
            forward, *args, use_reentrant=self._hidden, preserve_rng_state=False
        )
        return out


def splits_head(policy: Policy) -> bool:
    """Return True if the output head can run separately from the model.

    Its outputs must be the logits, with no scaling or capping afterwards. The trial runs once.
    """
    return not obstacle(policy, "head by itself", lambda: _head_gap(policy))


def _head_gap(policy: Policy) -> float:
    if not _splits(policy):
        raise ValueError("the model changes its logits after the head")
    rows = trial_rows(policy)
    batch = collate(rows, policy.pad_id, policy.device)
    found, _ = logprobs_by("row by row", policy, batch, 1.0, piece=2)
    expected = [x for row in rows for x in plain_logprobs(policy, row)]
    return mean_gap(found[batch.completion_mask.to(found.device)].tolist(), expected)


@torch.no_grad()
def _splits(policy: Policy) -> bool:
    head = policy.base.get_output_embeddings()
    if head is None:
        return False
    made: list[torch.Tensor] = []
    watch = head.register_forward_hook(lambda module, inputs, output: made.append(output))
    try:
        one = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
        # Without masked ids, so that logits that are not copied are the head's own output.
        logits = replace(policy, unused_ids=frozenset()).logits(one, torch.ones_like(one), one)
    finally:
        watch.remove()
    return (
        len(made) == 1 and logits.data_ptr() == made[0].data_ptr() and logits.dtype == made[0].dtype
    )


class _Stop(Exception):
    """Raised when a model reaches its head; carries the head's input."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


@contextlib.contextmanager
def _head_inputs(model: PreTrainedModel) -> Iterator[None]:
    """End every pass inside the block before the head, with _Stop."""
    head = model.get_output_embeddings()
    assert head is not None

    def stop(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise _Stop(inputs[0])

    hook = head.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def _outputs(
    policy: Policy,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    keep: int = 0,
    cache: DynamicCache | None = None,
) -> torch.Tensor:
    """Return the logits of `Policy.logits`, or inside `_head_inputs` the head's inputs; (N, keep,
    ·)."""
    try:
        return policy.logits(ids, mask, positions, keep, cache)
    except _Stop as stop:
        return stop.states[:, -keep:]


def head_logits(policy: Policy, states: torch.Tensor) -> torch.Tensor:
    """Return logits (M, V) of head inputs (M, d)."""
    with policy.accelerator.autocast():
        logits: torch.Tensor = policy.base.get_output_embeddings()(states)
    return policy.known_logits(logits)


def has_frozen_head(policy: Policy) -> bool:
    """Return True if the output head is not trained and its gradients need no scaling."""
    head = policy.base.get_output_embeddings()
    scales = policy.accelerator.scaler is not None
    return head is not None and not scales and not any(p.requires_grad for p in head.parameters())


def in_pieces(
    head: Callable[[torch.Tensor], torch.Tensor],
    outputs: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    piece: int,
    frozen: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_logprobs` of `head(outputs)`, computed `piece` tokens at a time.

    With more than one piece, the backward pass recomputes the logits of each piece, but not the
    entropy. Each piece has its own backward pass, so that the gradient of a trained head is
    accumulated in place. Within a single backward pass, autograd would allocate a new sum for each
    piece and hold three tensors of the size of the head at once.

    Args:
        frozen: True if the head is not trained. Then nothing is computed again.
    """
    if len(tokens) <= piece:
        return token_logprobs(head(outputs), tokens, temperature)
    if frozen and torch.is_grad_enabled():
        made: tuple[torch.Tensor, torch.Tensor] = _FrozenHead.apply(
            outputs, tokens, head, temperature, piece
        )
        return made

    def one(states: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # `checkpoint` runs this without gradient first, and with gradient when it recomputes
        return token_logprobs(head(states), chosen, temperature, not torch.is_grad_enabled())

    run: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = one
    if torch.is_grad_enabled():
        # `checkpoint` needs an input that requires a gradient, even if only the head is trained
        outputs = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
        run = functools.partial(checkpoint, one, use_reentrant=True, preserve_rng_state=False)
    parts = [
        run(states, chosen)
        for states, chosen in zip(outputs.split(piece), tokens.split(piece), strict=True)
    ]
    # `checkpoint` makes every output require a gradient
    spread = torch.cat([spread.detach() for _, spread in parts])
    return torch.cat([chosen for chosen, _ in parts]), spread


class _FrozenHead(torch.autograd.Function):
    """`token_logprobs` of a frozen head, piece by piece.

    The log-probability of a token depends on the head's input at that token only. So its gradient
    is known up to a factor in the forward pass, while the logits are in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        outputs: torch.Tensor,
        tokens: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        temperature: float,
        piece: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, spread, slopes = [], [], []
        for part, wanted in zip(outputs.split(piece), tokens.split(piece), strict=True):
            with torch.enable_grad():
                states = part.detach().requires_grad_()
                found, entropy = token_logprobs(head(states), wanted, temperature)
                slopes += torch.autograd.grad(found.sum(), states)
            chosen.append(found.detach())
            spread.append(entropy)
        ctx.save_for_backward(torch.cat(slopes))  # (M, d)
        entropies = torch.cat(spread)
        ctx.mark_non_differentiable(entropies)
        return torch.cat(chosen), entropies

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return gradients[0][:, None].to(slopes.dtype) * slopes, None, None, None, None


def _row_by_row(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Compute the result of `_one_pass` in one pass per row."""
    first, others = [], []
    for row, owner in enumerate(batch.prompt_of.tolist()):
        prompt = batch.prompt_ids[owner][batch.prompt_mask[owner].bool()]
        answer = batch.completion_ids[row][batch.completion_mask[row]]
        # (1, P + T - 1); the last token predicts nothing that is wanted
        ids = torch.cat([prompt, answer[:-1]])[None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        outputs = _outputs(policy, ids, None, positions, keep=len(answer))[0]  # (T, ·)
        first.append(outputs[:1])
        others.append(outputs[1:])  # in the order of `later`
    return torch.cat([*first, *others])


def _packed(policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Compute the result of `_one_pass` in several passes, because a prompt's completions may be in
    several packed rows."""
    lengths = batch.completion_mask.sum(1).tolist()
    first, others = [torch.empty(0)] * len(lengths), [torch.empty(0)] * len(lengths)
    for some in _passes_of(packs(batch), batch):
        part, rows = batch.part(some), [row for _, packed in some for row in packed]
        outputs = _one_pass(policy, part, *part.completion_mask[:, 1:].nonzero(as_tuple=True))
        pieces = outputs[len(rows) :].split([lengths[row] - 1 for row in rows])
        for number, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            first[row], others[row] = outputs[number : number + 1], piece
    return torch.cat([*first, *others])


def _passes_of(found: list[Pack], batch: Batch) -> list[list[Pack]]:
    """Divide packed rows into passes through the model, as `PACKED_TOGETHER` states.

    A row of more than PACKED_COLUMNS tokens runs alone, because other rows would be padded to its
    length.
    """
    if batch.prompt_ids.device.type not in PACKED_TOGETHER:
        return [[pack] for pack in found]
    prompts, answers = batch.prompt_mask.sum(1).tolist(), batch.completion_mask.sum(1).tolist()
    fits = lambda pack: prompts[pack[0]] + sum(answers[r] for r in pack[1]) <= PACKED_COLUMNS
    short = [pack for pack in found if fits(pack)]
    return [*([short] if short else []), *([pack] for pack in found if not fits(pack))]


def _one_pass(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Return logits (M, V) or head inputs (M, d) that predict the first token of each row, then
    the tokens `place` + 1 of rows `later`."""
    owner, start, columns = batch.prompt_of, batch.layout.start, batch.layout.columns
    lengths, width = batch.prompt_mask.sum(1), batch.prompt_ids.shape[1]  # (Q,), P
    column = torch.arange(columns, device=owner.device)
    # The prompt starts at column 0 and its completions follow, each without its last token, whose
    # prediction is not needed.
    in_prompt = column < lengths[:, None]  # (Q, S)
    padded = (column + width - lengths[:, None]).clamp(max=width - 1)
    answering, behind = owner[later], start[later] + place
    ids = batch.prompt_ids.gather(1, padded).masked_fill(~in_prompt, 0)  # (Q, S)
    ids[answering, behind] = batch.completion_ids[later, place]
    positions = torch.where(in_prompt, column, 0)
    positions[answering, behind] = lengths[answering] + place
    segment = torch.where(in_prompt, PROMPT, PADDING)
    segment[answering, behind] = later
    sees = (column <= column[:, None]) & (
        (segment[:, None] == PROMPT) | (segment[:, None] == segment[:, :, None])
    )  # (Q, S, S); padding sees the prompt
    keep = columns - batch.layout.shortest + 1  # from the last token of the shortest prompt
    outputs = _outputs(policy, ids, sees[:, None], positions, keep)
    kept = torch.cat([lengths[owner] - 1, behind]) - (columns - keep)
    return outputs[torch.cat([owner, answering]).to(outputs.device), kept.to(outputs.device)]


PROMPT, PADDING = -1, -2
"""Segments of prompt and padding columns; a completion's segment is its row in the batch."""


def _two_passes(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Compute the result of `_one_pass` in two passes: the prompts, then the completions."""
    ids, mask, owner = batch.completion_ids, batch.completion_mask, batch.prompt_of
    positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    cache = DynamicCache(config=policy.base.config)
    # (Q, V) predictions of the first tokens
    first = _outputs(policy, batch.prompt_ids, batch.prompt_mask, positions, 1, cache)[:, -1]
    logits = [first[owner.to(first.device)]]
    if ids.shape[1] > 1:
        reorder(cache, owner)
        before = ids[:, :-1]  # (N, T - 1) inputs that predict the other tokens
        seen = torch.cat([batch.prompt_mask[owner], mask[:, :-1].to(batch.prompt_mask.dtype)], 1)
        after = positions[owner, -1:] + 1 + torch.arange(before.shape[1], device=ids.device)
        made = _outputs(policy, before, seen, after, cache=cache)
        logits.append(made[later.to(made.device), place.to(made.device)])
    return torch.cat(logits)


_PASSES: dict[Way, Callable[[Policy, Batch, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one pass": _one_pass,
    "packed": _packed,
    "two passes": _two_passes,
    "row by row": _row_by_row,
    "recomputed": _row_by_row,
}


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability and the entropy at each of M tokens.

    Args:
        logits: (M, V).
        tokens: (M,).
        entropy: False to skip the entropies, which are then 0.

    Returns:
        Log-probabilities with gradient, and entropies without; both (M,) float32, in nats.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(
        logits, tokens.to(logits.device), temperature or 1.0, entropy
    )
    return found


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at one token per row.

    It keeps the logits in their dtype, and allocates no other tensor of their size except their
    gradient. Autograd would allocate four more in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = logits.new_empty(len(logits), dtype=torch.float32)
        spread = torch.zeros_like(total)
        for rows in _row_slices(logits):
            scores = logits[rows].float() / temperature
            most = scores.amax(-1)
            scores -= most[:, None]
            chances = scores.exp()  # not normalised
            sums = chances.sum(-1)
            total[rows] = most + sums.log()
            if entropy:
                spread[rows] = sums.log() - chances.mul_(scores).sum(-1) / sums
        chosen = logits.gather(-1, tokens[:, None])[:, 0].float() / temperature - total
        ctx.save_for_backward(logits, tokens, total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(spread)
        return chosen, spread

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, tokens, total = ctx.saved_tensors
        scale = gradients[0][:, None] / ctx.temperature  # (M, 1)
        out = torch.empty_like(logits)
        for rows in _row_slices(logits):
            chances = (logits[rows].float() / ctx.temperature - total[rows, None]).exp_()
            made = chances.mul_(-scale[rows])
            out[rows] = made.scatter_add_(-1, tokens[rows, None], scale[rows])
        return out, None, None, None


SLICE_LOGITS = {"cpu": 2**18, "cuda": 2**25}
"""Number of logits converted to float32 at a time: the CPU's cache size, or enough to fill a
GPU."""


def _row_slices(logits: torch.Tensor) -> list[slice]:
    rows = max(1, SLICE_LOGITS.get(logits.device.type, 2**22) // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


@torch.no_grad()
def score_with_entropy(
    policy: Policy, rows: Sequence[Row], temperature: float
) -> list[tuple[list[float], list[float]]]:
    """Return log-probabilities and entropies of each row, without gradient, in one pass.

    Both are (T,), in nats, and 0 at ids that were not sampled.
    """
    logprobs, entropy = completion_logprobs(
        policy, collate(rows, policy.pad_id, policy.device), temperature
    )
    values = zip(logprobs.tolist(), entropy.tolist(), rows, strict=True)
    return [
        (chosen[: len(completion)], spread[: len(completion)])
        for chosen, spread, (_, completion, *_) in values
    ]


def score(policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """Return the log-probability of each id of each row's completion, without gradient, in one
    pass.

    It is 0 at ids that were not sampled.
    """
    return [chosen for chosen, _ in score_with_entropy(policy, rows, temperature)]
