"""A stage that is slow, silent, short of memory or sends garbage costs bounded time, and no
weight changes."""

import contextlib
import math
import random

import msgspec
import pytest
import torch
import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import PeerError, PeerTimeout
from swarmnode.stages.stage_frames import (
    AbortFrame,
    AcknowledgeFrame,
    BackwardFrame,
    CommitFrame,
    DecodeFrame,
    DropFrame,
    EmbeddingFrame,
    ForwardFrame,
    LearntFrame,
    Place,
    PrefillFrame,
    ProposeFrame,
    ScoresFrame,
    TokensFrame,
)
from swarmnode.stages.trainer import head, links
from swarmnode.stages.trainer.head import CALL_SECONDS, MAX_REFUSALS, Wave, WorkRefused
from swarmnode.stages.trainer.stage_batches import encode
from swarmnode.wire.tensors import pack_ids
from tests.support.crew_rows import ENDS, HEADS, crew_of, fails, flat, grpo
from tests.support.lost_stages import quiet

CFG = TrainingConfig()
NAN = b"\0\0\xc0\x7f"


async def learn(head, rows):
    return await head.update(rows, CFG, 10.0, 1e-3)


async def score(head, rows):
    return await head.score([(row.prompt_ids, row.completion_ids) for row in rows], 1.0)


async def sample(head, rows):
    return await head.generate(HEADS, 2, 4, 1.0, 1.0, ENDS, random.Random(0))


@contextlib.asynccontextmanager
async def four(models, policy, kind="llama"):
    """A crew of four and rows to learn from; no weight has moved in the end."""
    _, rows = grpo(policy(kind))
    async with crew_of(models[kind], [1, 1, 1, 1]) as crew:
        start = flat(crew)
        yield crew, rows
        await quiet()
        assert torch.equal(flat(crew), start)
        assert all(member.participant.step == 0 for member in crew.members)
        assert all(p.grad is None for p in crew.head.runtime.parameters())
        assert crew.head.fault is None or not crew.head.usable


def ignores(member, kind):
    """A member that takes such frames and does nothing with them."""
    original = member.handle

    async def handle(sender, frame, body):
        if not isinstance(frame, kind):
            await original(sender, frame, body)

    member.handle = handle


def withholds(member, kind):
    """A member that does its work and does not send such frames."""
    original = member.links.send
    member.links.send = lambda stage, frame, body=b"": (
        None if isinstance(frame, kind) else original(stage, frame, body)
    )


def changes(member, kind, change):
    """A member that sends such frames as `change(frame, body)` returns them."""
    original = member.links.send

    def send(stage, frame, body=b""):
        if stage != member.index and isinstance(frame, kind):
            frame, body = change(frame, body)
        original(stage, frame, body)

    member.links.send = send


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


# ---- deadlines -----------------------------------------------------------------------------------

SILENT = [
    (learn, ignores, ForwardFrame),
    (learn, ignores, ProposeFrame),
    (learn, withholds, ForwardFrame),
    (learn, withholds, AcknowledgeFrame),
    (score, ignores, ForwardFrame),
    (score, withholds, (ForwardFrame, ScoresFrame)),
    (sample, ignores, PrefillFrame),
    (sample, ignores, DecodeFrame),
    (sample, withholds, (DecodeFrame, TokensFrame)),
]


@pytest.mark.parametrize(
    ("call", "corrupt", "kind", "stage"),
    [
        (*case, stage)
        for case in SILENT
        for stage in (1, 3)
        if (stage, case[1:]) != (3, (withholds, ForwardFrame))
    ],
)
async def test_silent_stage_costs_one_deadline_without_blame(
    models, policy, autojump_clock, call, corrupt, kind, stage
):
    async with four(models, policy) as (crew, rows):
        corrupt(crew.members[stage], kind)
        with pytest.raises(PeerTimeout):
            await call(crew.head, rows)
        assert crew.head.fault == (None, "nothing arrived for 120 s")
        assert trio.current_time() <= CALL_SECONDS + 1
        with pytest.raises(PeerError, match="nothing arrived"):
            await call(crew.head, rows)
        await quiet()


async def test_stage_that_misses_the_commit_is_one_step_behind(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:
        ignores(crew.members[2], CommitFrame)
        with pytest.raises(PeerTimeout):
            await learn(crew.head, rows)
        assert crew.head.fault == (None, "nothing arrived for 120 s")
        assert [m.participant.step for m in crew.members] == [1, 1, 0]


async def test_deadline_grows_to_four_times_the_longest_silence(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:
        compute = crew.members[1].compute
        for longest in (0.9 * CALL_SECONDS, 3 * CALL_SECONDS):

            async def slow(work, longest=longest):
                await trio.sleep(longest)
                return await compute(work)

            crew.members[1].compute = slow
            assert (await learn(crew.head, rows[:1])).refused is None
        assert crew.head.usable


async def test_computing_head_expires_no_deadline(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:

        async def slow(work):
            await trio.sleep(3 * CALL_SECONDS)
            return work()

        crew.head.compute = slow
        assert (await learn(crew.head, rows[:1])).refused is None
        await sample(crew.head, rows)
        assert crew.head.fault is None


async def test_stage_that_does_not_read_costs_one_deadline(
    models, policy, autojump_clock, monkeypatch
):
    monkeypatch.setattr(links, "FULL_LINK_BYTES", 1)
    monkeypatch.setattr(trio.testing, "memory_stream_pair", trio.testing.lockstep_stream_pair)
    async with four(models, policy) as (crew, rows):
        crew.members[2].links.inbox.wait_for_room = trio.sleep_forever
        with pytest.raises(PeerTimeout):
            await learn(crew.head, rows)
        assert crew.head.fault == (None, "nothing arrived for 120 s")
        assert trio.current_time() <= CALL_SECONDS + 1


async def test_a_stage_with_too_many_unread_frames_is_named(models, policy, monkeypatch):
    monkeypatch.setattr(links, "MAX_OUTBOX_FRAMES", 4)
    async with four(models, policy) as (crew, _):
        await quiet()
        for _ in range(10):
            crew.head.links.send(2, DropFrame(crew.head.place, bytes(16)))
        await quiet()
        assert crew.head.fault == (2, "its stream was closed: unread")


# ---- refusals ------------------------------------------------------------------------------------


async def test_only_a_step_that_cannot_be_divided_is_a_fault_after_three_refusals(
    models, policy, monkeypatch
):
    async with four(models, policy) as (crew, rows):
        with fails(crew.members[1].runtime, "forward", OUT_OF_MEMORY):
            for _ in range(3 * MAX_REFUSALS):
                result = await learn(crew.head, rows)
                assert (result.refused, result.divisible) == ("device", True)
        assert crew.head.fault is None
    async with four(models, policy) as (crew, rows):
        with fails(crew.members[1].runtime, "backward", OUT_OF_MEMORY):
            with monkeypatch.context() as patch:
                patch.setattr(head, "MAX_MICRO_BATCHES", 1)
                result = await learn(crew.head, rows)
                assert (result.refused, result.divisible) == ("device", False)
            for _ in range(MAX_REFUSALS - 1):
                assert crew.head.fault is None
                result = await learn(crew.head, rows[:1])
                assert (result.refused, result.divisible) == ("device", False)
        assert crew.head.fault == (1, "refused 3 times in a row: device")


async def test_repeated_non_finite_gradients_are_a_fault(models, policy):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 2, 1]) as crew:
        with torch.no_grad():
            next(iter(crew.members[1].runtime.parameters())).fill_(math.nan)
        for _ in range(MAX_REFUSALS):
            assert (await learn(crew.head, rows)).refused == "not_finite"
        assert crew.head.fault == (1, "refused 3 times in a row: not_finite")


async def test_refused_scores_do_not_affect_later_calls(models, policy):
    async with four(models, policy) as (crew, rows):
        with (
            fails(crew.members[3].runtime, "score", OUT_OF_MEMORY),
            pytest.raises(WorkRefused, match="device") as caught,
        ):
            await score(crew.head, rows)
        assert caught.value.divisible
        assert len(await score(crew.head, rows)) == len(rows)


@pytest.mark.parametrize("call", [learn, sample])
async def test_late_abort_does_not_affect_the_next_call(models, policy, call):
    """The head's direct frames to stage 2 wait on a slow line; its frames through stage 1 do
    not."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2]) as crew:
        original, held = crew.head.links.send, []

        def slow(stage, frame, body=b""):
            late = (AbortFrame, ProposeFrame)
            if stage == 2 and isinstance(frame, late) and (held or isinstance(frame, AbortFrame)):
                held.append((stage, frame, body))
            else:
                original(stage, frame, body)

        crew.head.links.send = slow
        with fails(crew.members[1].runtime, "forward", OUT_OF_MEMORY):
            assert (await learn(crew.head, rows)).refused == "device"

        async def release():
            last = crew.members[2]
            while not (last.runtime.caches or last.micro_batches._early):
                await trio.lowlevel.checkpoint()
            for one in held:
                original(*one)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release)
            result = await call(crew.head, rows)
        assert call is sample or result.refused is None
        assert all(member.fault is None for member in crew.members)


async def test_late_embedding_of_a_dropped_attempt_is_ignored(models, policy):
    _, rows = grpo(policy("llama-tied"))
    ends = []
    for disturbed in (False, True):
        async with crew_of(models["llama-tied"], [1, 2, 1]) as crew:
            last, held = crew.members[2], []
            original = last.links.send

            def send(stage, frame, body=b"", held=held, original=original):
                if isinstance(frame, EmbeddingFrame) and frame.attempt == 1:
                    held.append((stage, frame, body))
                else:
                    original(stage, frame, body)

            if disturbed:
                last.links.send = send
                with fails(crew.members[1].runtime, "backward", OUT_OF_MEMORY):
                    assert (await learn(crew.head, rows)).refused == "device"
                await quiet()
                for one in held:
                    original(*one)
                assert held
            assert (await learn(crew.head, rows)).refused is None
            assert all(member.fault is None for member in crew.members)
            ends.append(flat(crew))
    assert torch.equal(*ends)


async def test_crew_works_after_a_cancelled_call(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2]) as crew:
        compute = crew.members[1].compute

        async def slow(work):
            await trio.sleep(10)
            return work()

        for call in (learn, score, sample):
            crew.members[1].compute = slow
            with trio.move_on_after(5) as scope:
                await call(crew.head, rows)
            assert scope.cancelled_caught
            crew.members[1].compute = compute
            await trio.sleep(60)
        assert (await learn(crew.head, rows)).refused is None
        assert all(member.fault is None for member in crew.members)


# ---- garbage -------------------------------------------------------------------------------------


def spoilt(frame, body):
    return frame, body[:-4] + NAN


def other_codec(frame, body):
    rows = torch.zeros(frame.rows, 32)
    about = body[: getattr(frame, "about", 0)]
    return msgspec.structs.replace(frame, codec="bfloat16"), about + encode(rows, "bfloat16")


def fewer_rows(frame, body):
    return msgspec.structs.replace(frame, rows=frame.rows - 1), body[: -32 * 4]


@pytest.mark.parametrize(
    ("call", "kind", "sender", "receiver", "change"),
    [
        (learn, ForwardFrame, 1, 2, spoilt),
        (learn, ForwardFrame, 1, 2, other_codec),
        (learn, ForwardFrame, 1, 2, fewer_rows),
        (learn, BackwardFrame, 3, 2, spoilt),
        (learn, BackwardFrame, 3, 2, other_codec),
        (learn, BackwardFrame, 3, 2, fewer_rows),
        (score, ForwardFrame, 2, 3, spoilt),
        (score, ScoresFrame, 3, 0, spoilt),
        (sample, PrefillFrame, 1, 2, spoilt),
        (sample, DecodeFrame, 1, 2, spoilt),
        (sample, TokensFrame, 3, 0, spoilt),
        (learn, LearntFrame, 3, 0, lambda f, b: (msgspec.structs.replace(f, micro_batch=9**9), b)),
        (learn, AcknowledgeFrame, 2, 0, lambda f, b: (CommitFrame(f.place, 1, 1.0, 1.0), b)),
    ],
)
async def test_garbage_is_a_fault_of_its_sender(
    models, policy, autojump_clock, call, kind, sender, receiver, change
):
    async with four(models, policy) as (crew, rows):
        changes(crew.members[sender], kind, change)
        with pytest.raises(PeerError):  # a deadline, where the network process does not end it
            await call(crew.head, rows)
        stage, reason = crew.members[receiver].fault
        assert stage == sender
        assert reason.startswith("garbage: ")
        assert all(member.fault is None for member in crew.members[1:] if member.index != receiver)
        if receiver == 0:
            assert trio.current_time() == 0.0, "the head knows at once"
            assert crew.head.fault[0] == sender


async def test_embedding_rows_out_of_order_are_a_fault(models, policy):
    async with four(models, policy, "llama-tied") as (crew, rows):
        changes(
            crew.members[3],
            EmbeddingFrame,
            lambda f, b: (msgspec.structs.replace(f, first=1, rows=f.rows - 1), b[: -32 * 4]),
        )
        with pytest.raises(PeerError, match="row 1 of an embedding"):
            await learn(crew.head, rows)
        assert crew.head.fault[0] == 3


async def test_frame_from_the_wrong_sender_is_a_fault(models, policy):
    place = Place(bytes(16), 0, 0)
    for sender, frame, body in [
        (0, CommitFrame(place, 1, 1.0, 1.0), b""),
        (0, AbortFrame(place, 1), b""),
        (0, PrefillFrame(place, 7, "float32", 1, 1), b"\0" + bytes(128)),
        (0, BackwardFrame(place, 1, "float32", 1), bytes(128)),
        (3, DropFrame(place, 7), b""),
        (3, TokensFrame(place, bytes(16), 1), bytes(8)),
        (0, EmbeddingFrame(place, 1, 0, 1), bytes(128)),
    ]:
        async with four(models, policy) as (crew, _):
            mine = msgspec.structs.replace(frame, place=crew.members[sender].place)
            crew.members[sender].links.send(1, mine, body)
            await quiet()
            assert crew.members[1].fault[0] == sender, frame
            crew.head.links.send(1, ProposeFrame(crew.head.place, 1, (1,)))
            await quiet()
            assert crew.members[1].participant.attempt == 0, "nothing is handled after a fault"


async def test_wrong_tokens_are_a_fault_of_the_last_stage(models, policy):
    for rows, ids in ((1, [0]), (2, [60, 61])):  # there are two completions; there is no id 61
        async with four(models, policy) as (crew, _):
            head, last = crew.head, crew.members[3]
            wave = Wave([[5, 6]], 2, 4, 1.0, 1.0, 3, ENDS)
            head.open_waves[7] = wave
            body = pack_ids(ids) + bytes(4 * rows)
            last.links.send(0, TokensFrame(last.place, 7, rows), body)
            await quiet()
            assert head.fault[0] == 3
            assert wave.ids == [[], []]


async def test_frames_of_another_crew_or_step_are_dropped(models):
    async with crew_of(models["llama"], [2, 2]) as crew:
        member, place = crew.members[1], crew.head.place
        crew.head.links.send(1, AbortFrame(Place(b"x" * 16, 0, 0), 3))
        crew.head.links.send(1, DropFrame(Place(place.crew, 0, 1), 7))
        await quiet()
        assert member.ignored_frames == {"crew": 1, "newer": 1}
        assert member.fault is None


async def test_garbage_is_a_fault_and_a_truncated_frame_is_not(models, policy):
    async with four(models, policy) as (crew, rows):
        await crew.streams[2, 1].send_all(b"\xff" * 64)
        await crew.streams[3, 0].send_all(b"\0\0\1\0half")
        await crew.streams[3, 0].aclose()
        await quiet()
        assert crew.members[1].fault == (2, "its stream was closed: oversize")
        assert crew.head.fault is None
        with pytest.raises(PeerError, match="stage 3 is gone: truncated"):
            await learn(crew.head, rows)
