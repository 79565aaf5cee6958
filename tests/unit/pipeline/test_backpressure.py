"""A slow neighbour costs time and bounded memory, without loss or deadlock."""

import random
from dataclasses import replace

import pytest
import torch
import trio
import trio.testing

from swarmnode.config import TrainingConfig
from swarmnode.stages.stage_frames import (
    EmbeddingFrame,
    ForwardFrame,
    FrameLimits,
    Place,
    ProposeFrame,
    read_frame,
)
from swarmnode.stages.trainer import links as links_module
from swarmnode.stages.trainer.head import SCORES_PER_STAGE
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import MAX_PENDING, StageWorker
from swarmnode.stages.trainer.stage_batches import describe, describe_loss, encode
from swarmnode.wire import headed, strict
from tests.support.crew import run_inline
from tests.support.crew_rows import EXACT, crew_of, together
from tests.support.lost_stages import quiet, rows_of

CFG = TrainingConfig(per_device_train_tokens=64)
TOKENS = 24
LIMITS = FrameLimits(hidden=32, vocab=61, tokens=TOKENS)
PLACE = Place(b"c" * 16, 0, 0)
FRAME = TOKENS * 32 * 4 + 2048
"""Bytes of the largest frame here, with its header and description."""


class Narrow:
    """Crews whose streams take a byte only when the other side reads it, and whose links are full
    with the first one."""

    def __init__(self, patch):
        self.most = self.embedding = self.held = 0
        patch.setattr(trio.testing, "memory_stream_pair", trio.testing.lockstep_stream_pair)
        patch.setattr(links_module, "FULL_LINK_BYTES", 1)
        patch.setattr(links_module, "MAX_INBOX_BYTES", 1)
        send, arrived = Links.send, StageWorker._handle_arrival

        def noting(links, stage, frame, body=b""):
            send(links, stage, frame, body)
            queued = links.queued.get(stage, 0)
            self.most = max(self.most, queued)
            if isinstance(frame, EmbeddingFrame):
                self.embedding = max(self.embedding, queued)

        async def counting(member, arrival):
            before = len(member._deferred)
            await arrived(member, arrival)
            self.held += len(member._deferred) > before

        patch.setattr(Links, "send", noting)
        patch.setattr(StageWorker, "_handle_arrival", counting)


@pytest.fixture
def narrow(monkeypatch):
    return lambda: Narrow(monkeypatch)


async def everything(crew):
    """Two steps, scores and completions → (weights, scores, tokens)."""
    rows = rows_of(3, 14)
    for _ in range(2):
        assert (await crew.head.update(rows, CFG, 30.0, 1e-5)).refused is None
    scores = await crew.head.score([(row.prompt_ids, row.completion_ids) for row in rows], 1.0)
    prompts = [row.prompt_ids[:4] for row in rows[:8]]
    waves = await crew.head.generate(prompts, 2, 6, 1.0, 1.0, frozenset({1}), random.Random(0))
    weights = {name: tensor.clone() for name, tensor in together(crew).items()}
    return weights, scores, [wave.ids for wave in waves]


@pytest.mark.parametrize(
    ("layers", "kind", "swapped"),
    [
        ([2, 2], "llama", False),
        ([1, 2, 1], "llama-tied", False),
        ([1, 1, 1, 1], "llama-tied", True),
    ],
)
async def test_full_links_change_no_result_and_bound_memory(models, narrow, layers, kind, swapped):
    settings = replace(EXACT, swapped=swapped)
    async with crew_of(models[kind], layers, settings, TOKENS) as crew:
        expected = await everything(crew)
    slow = narrow()
    async with crew_of(models[kind], layers, settings, TOKENS) as crew:
        with trio.fail_after(120):
            weights, scores, tokens = await everything(crew)
        await quiet()
        assert all(not any(member.links.queued.values()) for member in crew.members)
    # gradients of swapped micro-batches are added in the order in which there is room
    apart = 1e-4 if swapped else 0.0
    assert all(
        torch.allclose(tensor, expected[0][name], rtol=0.0, atol=apart)
        for name, tensor in weights.items()
    )
    assert [len(logprobs) for logprobs, _ in scores] == [
        len(logprobs) for logprobs, _ in expected[1]
    ]
    if not swapped:
        assert (scores, tokens) == expected[1:]
    assert slow.held > 0
    assert slow.embedding <= FRAME
    # gradients of micro-batches that were sent before are always queued
    assert slow.most <= (1 + 2 * len(layers)) * FRAME


def forward(number, purpose="learn", place=PLACE):
    """(frame, body) of one micro-batch as stage 0 sends it."""
    rows = rows_of(3, 1)
    work = describe(
        [(rows[0].prompt_ids, rows[0].completion_ids)],
        1.0,
        describe_loss(rows, CFG, 30.0) if purpose == "learn" else None,
    )
    about = strict.encode(work)
    return ForwardFrame(place, number, purpose, "float32", work.rows, len(about)), about + encode(
        torch.zeros(work.rows, 32), "float32"
    )


async def taken(links):
    """The next arrival."""
    while (arrival := links.inbox.take()) is None:
        await links.inbox.wait()
    return arrival


async def test_unread_frames_fill_a_link_and_arrive_later(monkeypatch):
    monkeypatch.setattr(links_module, "FULL_LINK_BYTES", 3000)
    ours, theirs = trio.testing.lockstep_stream_pair()
    links = Links(0, {1: ours}, LIMITS)
    sent = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.run)
        while not links.full(1):
            links.send(1, *forward(sent, "score"))
            sent += 1
        await quiet()
        assert links.full(1)
        assert 3000 <= sum(links.queued.values()) < 3000 + FRAME
        assert not links.full(0)
        got = [(await read_frame(theirs, LIMITS))[0].micro_batch for _ in range(sent)]
        assert got == list(range(sent))
        with trio.fail_after(60):
            await links.inbox.wait()  # until there is room again
        await quiet()
        assert not links.full(1)
        assert not any(links.queued.values())
        nursery.cancel_scope.cancel()


async def test_who_sends_more_than_is_handled_is_not_read(monkeypatch):
    _, body = forward(0, "score")
    monkeypatch.setattr(links_module, "MAX_INBOX_BYTES", 2 * len(body))
    ours, theirs = trio.testing.memory_stream_pair()
    links = Links(1, {0: ours}, LIMITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.run)
        for number in range(20):
            await theirs.send_all(headed.pack(*forward(number, "score")))
        await quiet()
        assert links.frames_received == 2
        got = [(await taken(links)).frame.micro_batch for _ in range(20)]
        assert got == list(range(20))
        nursery.cancel_scope.cancel()


async def test_few_micro_batches_are_scored_at_a_time(models):
    waits, free = [], trio.Event()

    async with crew_of(models["llama"], [1, 2, 1], tokens=TOKENS) as crew:

        async def slow(work):
            waits.append(1)
            await free.wait()
            return await run_inline(work)

        crew.members[2].compute = slow
        got = []

        async def score():
            got.extend(
                await crew.head.score(
                    [(row.prompt_ids, row.completion_ids) for row in rows_of(3, 30)], 1.0
                )
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(score)
            await quiet(2000)
            assert waits == [1]
            assert crew.members[0].runtime.work_count == SCORES_PER_STAGE * 3
            free.set()
    assert [len(logprobs) for logprobs, _ in got] == [
        len(row.completion_ids) for row in rows_of(3, 30)
    ]


@pytest.mark.parametrize("proposed_first", [True, False])
async def test_too_many_micro_batches_are_a_fault_of_the_sender(
    models, monkeypatch, proposed_first
):
    async with crew_of(models["llama"], [1, 2, 1], tokens=TOKENS) as crew:
        member, head = crew.members[1], crew.head
        monkeypatch.setattr(member.micro_batches.schedule, "_max_in_flight", 0)
        numbers = tuple(range(MAX_PENDING + 1))
        propose = lambda: head.links.send(1, ProposeFrame(head.place, 1, numbers))
        propose() if proposed_first else None
        for number in numbers[:-1]:
            head.links.send(1, *forward(number, "learn", head.place))
        await quiet(2000)
        propose() if not proposed_first else None
        await quiet(2000)
        assert len(member.micro_batches.pending) == MAX_PENDING
        assert member.fault is None
        head.links.send(1, *forward(numbers[-1], "learn", head.place))
        await quiet()
        assert member.fault == (0, "garbage: bounds: more micro-batches than are ever in flight")


async def test_scores_wait_and_excess_scores_name_the_sender(models, monkeypatch):
    async with crew_of(models["llama"], [1, 2, 1], tokens=TOKENS) as crew:
        member = crew.members[1]
        monkeypatch.setattr(member.links, "full", lambda stage: stage == 2)
        for number in range(MAX_PENDING):
            crew.head.links.send(1, *forward(1000 + number, "score", crew.head.place))
        await quiet(2000)
        assert len(member._deferred) == MAX_PENDING
        assert member.fault is None
        crew.head.links.send(1, *forward(9999, "score", crew.head.place))
        await quiet()
        assert member.fault[0] == 0
