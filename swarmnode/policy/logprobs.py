"""Log-probabilities of given completions: for training with gradients, and for judging peers'
groups without.

The prompt of a group is run through the model **once**, with gradient, and shared by its G
completions, as when sampling. Against prompt + completion for every row this is the same function
(equal to rounding) at a fraction of the tokens: measured 2.4 times faster forward and backward at
64 prompt and 32 completion tokens, 1.3 times with the embedded policy's 8 and 5. Two ways, by what
is cheaper:

    one pass     a row is a prompt and all of its completions, and a mask lets each completion see
    the prompt and itself only. Half of
                 the kernels to launch, which is what a GPU waits for; attention computes what the
                 mask then drops
    two passes   the prompts, whose keys and values are then repeated for their completions: longer
    rows, and masks of the model's own
    row by row   each prompt and completion by itself: answers so long that their prompts matter
    little. No padding and no mask, so that
                 attention needs no memory for one; and nothing is shared, so that layers can be run
                 again in the backward pass instead of keeping what they computed (activation
                 checkpointing), which is done where that would not fit

Logits of more tokens than `footprint.logits_tokens` are never there at once: the head is run piece
by piece, and again in the backward pass. 4,000 tokens of a vocabulary of 152,000 would be 2.4 GB in
float32, several times over.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from swarmnode.policy.decode import reorder
from swarmnode.policy.device import shape_of, spare_bytes
from swarmnode.policy.footprint import Method, logits_tokens, token_bytes
from swarmnode.policy.layers import layers_of
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
"""Columns of a row, P + K · T, up to which one pass is faster. On an H200 with 0.5 B parameters 89
ms instead of 176 at 271 columns, 335 instead of 297 at 2233; on a CPU with the embedded policy 9.5
instead of 12.4 at 52, 49 instead of 39 at 268."""
ONE_PASS_ELSEWHERE = 96
LONG_ROW = {"cuda": 1024}
"""Tokens from which a row fills the device by itself, so that nothing is lost by running it
alone."""
LONG_ROW_ELSEWHERE = 256
PACKED_GAIN = 1.25
"""Tokens run with padding for each real one from which rows are packed: `benchmarks.packing`, on a
CPU. On CUDA nobody has measured it."""
PACKED_COLUMNS = 1024
"""Tokens of a packed row, at most, but for a prompt with one answer: attention looks at all pairs,
also those that it must not see."""
WHOLE_SHARE = 1.25
"""Rows are run one by one while that is at most so many times the tokens of two passes, which share
prompts and pad."""
SPARE_SHARE = 0.8
"""The part of the memory that is free which activations may take: the estimate is within 15 %."""

Way = Literal["one pass", "packed", "two passes", "row by row", "recomputed"]
"""How log-probabilities are computed; `recomputed` is row by row with activation checkpointing."""
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Batch:
    """N completions of Q distinct prompts. Prompts are padded on the left, completions on the
    right, so that they meet."""

    prompt_ids: torch.Tensor
    """(Q, P)."""
    prompt_mask: torch.Tensor
    """(Q, P) 1 on tokens, 0 on padding."""
    prompt_of: torch.Tensor
    """(N,) which prompt a completion answers."""
    completion_ids: torch.Tensor
    """(N, T)."""
    completion_mask: torch.Tensor
    """(N, T) bool, True on completion tokens."""
    sampled_mask: torch.Tensor
    """(N, T) bool, True on those of them that the policy sampled: what is scored and learnt
    from."""
    recompute: bool = False
    """Layers are run again in the backward pass, however much memory there seems to be."""

    @property
    def padded_tokens(self) -> int:
        """N × (P + T): what `MicroBatcher` counts. A bound, since a prompt is run once per
        group."""
        return len(self.completion_ids) * (self.prompt_ids.shape[1] + self.completion_ids.shape[1])

    @cached_property
    def places(self) -> tuple[torch.Tensor, int]:
        """(N,) which of its prompt's completions a row is, and K, how many the prompt with most
        has."""
        counts = [0] * len(self.prompt_ids)
        places = []
        for owner in self.prompt_of.tolist():
            places.append(counts[owner])
            counts[owner] += 1
        return torch.tensor(places, device=self.prompt_of.device), max(counts)


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> Batch:
    """Rows as one batch, in their order; equal prompts become one. Raises ValueError for an empty
    prompt or completion."""
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
    """Log-probability of each sampled token at `temperature`, with gradient, and the entropy
    there, without: both (N, T), 0 elsewhere. By the cheapest way that the model takes."""
    return logprobs_by(choose_way(policy, batch), policy, batch, temperature)


def choose_way(policy: Policy, batch: Batch) -> Way:
    """The way that suits `batch` best, of those that the model takes."""
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
    """As `completion_logprobs`, by a given way.

    The head sees one position per prompt and the completions; float32 is made of sampled tokens
    only: with a real vocabulary the logits, not the model, decide how much fits.

    Args:
        piece: tokens of which logits are there at once; None is `logits_tokens`.
    """
    ids, mask = batch.completion_ids, batch.completion_mask
    # completion tokens but the first: of which row, and after which token
    later, place = mask[:, 1:].nonzero(as_tuple=True)
    first = torch.arange(len(ids), device=ids.device)
    row, column = torch.cat([first, later]), torch.cat([torch.zeros_like(first), place + 1])
    if piece is None:
        piece = logits_tokens(policy.base.config.get_text_config().vocab_size, ids.device.type)
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
    chosen, spread = in_pieces(head, outputs, ids[row, column], temperature, piece)
    # where the head is, which may be another card than where ids are
    zeros = torch.zeros(ids.shape, device=chosen.device)
    where = row.to(chosen.device), column.to(chosen.device)
    return zeros.index_put(where, chosen), zeros.index_put(where, spread)


def takes_way(policy: Policy, way: Way) -> bool:
    """Return True if `way` gives the same values as row by row. Tried once."""
    if way in ("one pass", "packed") and not sees_everything(policy):
        return False  # its masks are its own
    return way == "row by row" or not obstacle(policy, way, lambda: way_gap(policy, way))


def way_gap(policy: Policy, way: Way, piece: int | None = None) -> float:
    """Mean difference in nats of log-probabilities computed by `way` from the plain way."""
    rows = trial_rows(policy)
    batch = collate(rows, policy.pad_id, policy.device)
    found, _ = logprobs_by(way, policy, batch, 1.0, piece)
    expected = [x for row in rows for x in plain_logprobs(policy, row)]
    return mean_gap(found[batch.completion_mask.to(found.device)].tolist(), expected)


def fits_one_pass(policy: Policy, batch: Batch) -> bool:
    """Whether one pass is possible, no more tokens than two, and not so long that attention is what
    costs."""
    prompts, width = batch.prompt_ids.shape
    columns = width + batch.places[1] * batch.completion_ids.shape[1]
    if (
        columns > ONE_PASS.get(batch.prompt_ids.device.type, ONE_PASS_ELSEWHERE)
        or prompts * columns > batch.padded_tokens
    ):
        return False
    return takes_way(policy, "one pass")


def stands_alone(batch: Batch) -> bool:
    """Whether its rows are so long that each is run by itself: little is lost by not sharing
    prompts, and no padding is run."""
    prompts, answers = batch.prompt_mask.sum(1), batch.completion_mask.sum(1)
    whole = int(prompts[batch.prompt_of].sum() + answers.sum())
    long = LONG_ROW.get(answers.device.type, LONG_ROW_ELSEWHERE)
    return whole >= long * len(answers) and whole <= WHOLE_SHARE * (
        batch.prompt_ids.numel() + batch.completion_ids.numel()
    )


def fits_packed(policy: Policy, batch: Batch) -> bool:
    """Whether lengths are so unlike that padding is worth leaving out, and the model takes a mask
    of ours as it is."""
    real = int(batch.prompt_mask.sum() + batch.completion_mask.sum())
    if (
        batch.prompt_ids.device.type == "cuda"
        or batch.prompt_ids.numel() + batch.completion_ids.numel() < PACKED_GAIN * real
    ):
        return False
    return takes_way(policy, "packed")


def packs(batch: Batch) -> list[tuple[int, list[int]]]:
    """(prompt, rows that answer it) of every packed row: together at most PACKED_COLUMNS tokens, or
    a single answer."""
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
    """Whether what the backward pass needs of all layers would not fit beside what is there
    already."""
    spare, shape = spare_bytes(batch.prompt_ids.device), shape_of(model)
    if spare is None or shape is None:
        return False
    method = Method(
        batch.prompt_ids.device.type, str(dtype).removeprefix("torch."), lora_rank=lora_rank
    )
    return token_bytes(shape, method) * batch.padded_tokens > SPARE_SHARE * spare


@contextlib.contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Layers that are run inside keep their input only, and are run once more in the backward pass,
    which may come later.

    transformers' own way needs `model.train()`, and with it dropout: sampling and training would be
    of two functions.
    """
    layers = layers_of(model)
    # accelerate has one there, where layers lie on several devices
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _Recomputed(
            layer.forward, hidden=bool(getattr(model, "is_loaded_in_8bit", False))
        )
    cached = torch.is_autocast_cache_enabled()
    # casts of all weights would stay until the end of the pass, each used once
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


class _Recomputed:
    """A layer's forward, computed again when its gradient is wanted. There is no dropout, so that
    no random state has to be kept.

    hidden: it keeps inputs where autograd does not see them, as bitsandbytes' 8-bit product does in
    its context. Then the first pass is one without gradients, which needs an input that wants one.
    """

    def __init__(self, forward: Callable[..., object], hidden: bool = False) -> None:
        self._forward = forward
        self._hidden = hidden

    def __call__(self, *args: object, **kwargs: object) -> object:
        again = functools.partial(self._forward, **kwargs)
        if (
            self._hidden
            and args
            and isinstance(args[0], torch.Tensor)
            and not args[0].requires_grad
        ):
            args = (args[0].detach().requires_grad_(), *args[1:])
        out: object = checkpoint(again, *args, use_reentrant=self._hidden, preserve_rng_state=False)
        return out


def splits_head(policy: Policy) -> bool:
    """Whether the head can be run by itself: its outputs are the logits, not scaled or capped
    afterwards. Tried once."""
    return not obstacle(policy, "head by itself", lambda: _head_gap(policy))


def _head_gap(policy: Policy) -> float:
    if not _splits(policy):
        raise ValueError("the model changes its logits after the head")
    return way_gap(policy, "row by row", piece=2)


@torch.no_grad()
def _splits(policy: Policy) -> bool:
    head = policy.base.get_output_embeddings()
    if head is None:
        return False
    made: list[torch.Tensor] = []
    watch = head.register_forward_hook(lambda module, inputs, output: made.append(output))
    try:
        one = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
        # nothing masked, so that what is not copied is the head's output as it is
        logits = replace(policy, unused_ids=frozenset()).logits(one, torch.ones_like(one), one)
    finally:
        watch.remove()
    return (
        len(made) == 1 and logits.data_ptr() == made[0].data_ptr() and logits.dtype == made[0].dtype
    )


class _Stop(Exception):
    """Raised where a model reaches its head, to bring out what that would be given."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


@contextlib.contextmanager
def _head_inputs(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a pass ends with _Stop before the head."""
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
    """(N, keep, ·) what `Policy.logits` gives, or inside `_head_inputs` what the head would be
    given."""
    try:
        return policy.logits(ids, mask, positions, keep, cache)
    except _Stop as stop:
        return stop.states[:, -keep:]


def head_logits(policy: Policy, states: torch.Tensor) -> torch.Tensor:
    """(M, V) logits of (M, d) head inputs."""
    with policy.accelerator.autocast():
        logits: torch.Tensor = policy.base.get_output_embeddings()(states)
    return policy.known_logits(logits)


def in_pieces(
    head: Callable[[torch.Tensor], torch.Tensor],
    outputs: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    piece: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of `head(outputs)`, `piece` tokens at a time. Where there are more, each is
    computed again in the backward pass.

    That is a backward pass of its own, so that a trained head's gradient is added to in place:
    within one, its sum is made anew for each piece, and there are three of the size of the head at
    once.
    """
    if len(tokens) <= piece:
        return token_logprobs(head(outputs), tokens, temperature)

    def one(states: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(head(states), chosen, temperature)

    run = functools.partial(
        checkpoint, one, use_reentrant=outputs.requires_grad, preserve_rng_state=False
    )
    parts = [
        (run if torch.is_grad_enabled() else one)(states, chosen)
        for states, chosen in zip(outputs.split(piece), tokens.split(piece), strict=True)
    ]
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([spread for _, spread in parts])


def _row_by_row(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """As `_one_pass`."""
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
    """As `_one_pass`, with the answers to a prompt one behind the other in a row of its own: each
    sees the prompt and itself."""
    lengths, device = batch.completion_mask.sum(1).tolist(), batch.prompt_ids.device
    first, others = [torch.empty(0)] * len(lengths), [torch.empty(0)] * len(lengths)
    for owner, rows in packs(batch):
        prompt = batch.prompt_ids[owner][batch.prompt_mask[owner].bool()]
        # the last token predicts nothing that is wanted
        answers = [batch.completion_ids[row, : lengths[row] - 1] for row in rows]
        counts = [len(prompt), *map(len, answers)]
        # -1: the prompt
        segment = torch.arange(-1, len(rows), device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        )
        after = torch.cat([torch.arange(count, device=device) for count in counts])
        column = torch.arange(sum(counts), device=device)
        sees = (column <= column[:, None]) & ((segment == -1) | (segment == segment[:, None]))
        positions = torch.where(segment == -1, after, len(prompt) + after)
        keep = sum(counts[1:]) + 1  # from the last token of the prompt
        outputs = _outputs(
            policy, torch.cat([prompt, *answers])[None], sees[None, None], positions[None], keep
        )[0]
        for row, made in zip(rows, outputs[1:].split(counts[1:]), strict=True):
            first[row], others[row] = outputs[:1], made
    return torch.cat([*first, *others])


def _one_pass(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """(M, V) logits, or head inputs, that predict the first token of each row, then the tokens
    `place` + 1 of rows `later`."""
    ids, owner = batch.completion_ids, batch.prompt_of
    (prompts, width), length = batch.prompt_ids.shape, ids.shape[1]
    which, most = batch.places
    tokens = ids.new_zeros(prompts, most, length)
    tokens[owner, which] = ids
    real = torch.zeros_like(tokens, dtype=torch.bool)
    real[owner, which] = batch.completion_mask

    before = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    after = before[:, -1:, None] + 1 + torch.arange(length, device=ids.device)  # (Q, 1, T)
    column = torch.arange(width + most * length, device=ids.device)
    segment = torch.where(column < width, -1, (column - width) // length)  # -1: the prompt
    sees = (column <= column[:, None]) & ((segment == -1) | (segment == segment[:, None]))  # (S, S)
    there = torch.cat([batch.prompt_mask.bool(), real.flatten(1)], 1)  # (Q, S)
    # padding must see something: itself
    sees = (sees & there[:, None]) | torch.eye(len(column), dtype=torch.bool, device=ids.device)

    logits = _outputs(
        policy,
        torch.cat([batch.prompt_ids, tokens.flatten(1)], 1),
        sees[:, None],
        torch.cat([before, after.expand(-1, most, -1).flatten(1)], 1),
        keep=most * length + 1,  # from the last token of the prompt
    )
    after_prompt, row, column = (
        index.to(logits.device)
        for index in (owner, owner[later], 1 + which[later] * length + place)
    )
    return torch.cat([logits[:, 0][after_prompt], logits[row, column]])


def _two_passes(
    policy: Policy, batch: Batch, later: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """As `_one_pass`."""
    ids, mask, owner = batch.completion_ids, batch.completion_mask, batch.prompt_of
    positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)  # (Q, P)
    cache = DynamicCache(config=policy.base.config)
    # (Q, V), they predict the first tokens
    first = _outputs(policy, batch.prompt_ids, batch.prompt_mask, positions, 1, cache)[:, -1]
    logits = [first[owner.to(first.device)]]
    if ids.shape[1] > 1:
        reorder(cache, owner)
        before = ids[:, :-1]  # (N, T - 1), they predict the others
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
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token (M,) under logits (M, V), with gradient, and the entropy there,
    without; both (M,) float32."""
    scores, tokens = logits.float() / (temperature or 1.0), tokens.to(logits.device)
    total = scores.logsumexp(-1)
    chosen = scores.gather(-1, tokens[:, None])[:, 0] - total
    with torch.no_grad():
        spread = total.detach() - (scores.detach() - total.detach()[:, None]).exp().mul_(
            scores.detach()
        ).sum(-1)
    return chosen, spread


@torch.no_grad()
def score_with_entropy(
    policy: Policy, rows: Sequence[Row], temperature: float
) -> list[tuple[list[float], list[float]]]:
    """(log-probabilities, entropies) of each row, (T,) each and 0 at ids that were not sampled,
    without gradient, in one pass."""
    logprobs, entropy = completion_logprobs(
        policy, collate(rows, policy.pad_id, policy.device), temperature
    )
    values = zip(logprobs.tolist(), entropy.tolist(), rows, strict=True)
    return [
        (chosen[: len(completion)], spread[: len(completion)])
        for chosen, spread, (_, completion, *_) in values
    ]


def score(policy: Policy, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """Log-probability of each id of each row's completion, 0 where it was not sampled, without
    gradient, in one pass."""
    return [chosen for chosen, _ in score_with_entropy(policy, rows, temperature)]
