"""State streams between honest members, and with a member that sends garbage."""

import copy
from dataclasses import replace

import pytest
import torch
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

from swarmnode.errors import Incompatible, PeerError, PeerTimeout
from swarmnode.stages.stage_frames import Fence, FrameLimits, Place, activation_bytes
from swarmnode.stages.state_messages import (
    AnnounceMessage,
    AskMessage,
    ChunkMessage,
    HaveMessage,
    LackMessage,
    RunMessage,
    StoredMessage,
    WantMessage,
    hash_body,
    read_state,
)
from swarmnode.stages.trainer import state_exchange
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.local_stage import LocalStage, PartialBody
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings
from swarmnode.stages.trainer.stage_checkpoints import (
    CheckpointIdentity,
    CheckpointStore,
    Recorder,
    RecoverySettings,
    StageInput,
    StageState,
    as_tensor,
    decode_state,
    encode_state,
    host_copy,
    stage_layouts,
    trained,
)
from swarmnode.stages.trainer.stage_model import StageRuntime
from swarmnode.stages.trainer.state_exchange import MAX_BAD_MESSAGES, StateExchange
from swarmnode.wire import headed
from tests.support.crew import run_inline
from tests.support.lost_stages import quiet
from tests.support.split_models import split_model

CREW = b"c" * 16
IDENTITY = CheckpointIdentity("cc" * 32, (1, 2, 1))
LIMITS = FrameLimits(hidden=32, vocab=61, tokens=64)
SETTINGS = RecoverySettings(seconds=5.0, neighbour_seconds=5.0)


class Member:
    """Stage 1 of three with a real `StateExchange`; the test is stages 0 and 2."""

    def __init__(
        self, model, tmp_path, settings=SETTINGS, partial_bodies=None, pair=memory_stream_pair
    ):
        pieces = split_model(model, [1, 2, 1])
        self.layouts = stage_layouts(model.config, [spec for spec, _ in pieces])
        self.runtimes = [StageRuntime(spec, stage) for spec, stage in pieces]
        self.store = CheckpointStore(tmp_path)
        self.store.begin(IDENTITY, (1, 0, 2))
        self.ends, far = {}, {}
        for stage in (0, 2):
            self.ends[stage], far[stage] = pair()
        spec = self.runtimes[1].spec
        self.recorder = Recorder(spec, settings, self.layouts, self.store)
        self.stage = LocalStage(
            self.runtimes[1],
            LIMITS,
            self.layouts,
            "float32",
            self.recorder,
            self.store,
            partial_bodies={} if partial_bodies is None else partial_bodies,
        )
        self.peer = StateExchange(self.stage, Fence(Place(CREW, 1, 9), 3), far, run_inline)

    def work(self, step=9):
        """The stage has its weights."""
        links, fence = Links(1, {}, LIMITS), Fence(Place(CREW, 1, step), 3)
        settings = WorkerSettings("float32")
        worker = StageWorker(self.runtimes[1], links, fence, settings, run_inline)
        self.peer.attach(worker, step)
        return worker

    def place(self, sender, **other):
        return Place(**{"crew": CREW, "stage": sender, "step": 9, **other})

    def body(self, stage, step=9, change=None):
        weights = {name: host_copy(t) for name, t in trained(self.runtimes[stage]).items()}
        if change is not None:
            weights[next(iter(weights))].view(-1)[0] = change
        state = StageState(
            step,
            weights,
            weights,
            {n: t.square() for n, t in weights.items()},
            dict.fromkeys(weights, 9.0),
        )
        return encode_state(state, self.layouts[stage], "full")

    async def send(self, stage, message, body=b""):
        await self.ends[stage].send_all(headed.pack(message, body))
        await quiet()

    async def answer(self, stage):
        """The next message that is sent to `stage`, and its body."""
        with trio.fail_after(60):
            message, body = await read_state(self.ends[stage], LIMITS)
        return message if not body else (message, body)

    async def whole(self, stage):
        """The next body that is sent to `stage`."""
        have, body = await self.answer(stage), bytearray()
        while len(body) < have.size:
            body += (await self.answer(stage))[1]
        return have, bytes(body)

    def want(self, stage, what, of, at=0, root=b"", request=7):
        return WantMessage(self.place(stage), request, what, of, at, root)

    async def give(self, stage, request, body, *, what="checkpoint", at=0, **more):
        """Send a body from `at` on, with a header that may be wrong."""
        fields = {"step": 9, "size": len(body), "root": hash_body(body), **more}
        await self.send(stage, HaveMessage(self.place(stage), request, what, **fields))
        for start in range(at, len(body), state_exchange.CHUNK_BYTES):
            part = bytes(body[start : start + state_exchange.CHUNK_BYTES])
            await self.send(stage, ChunkMessage(self.place(stage), request, start, len(part)), part)

    async def store_copy(self, stage, step=9):
        """Announce a checkpoint and send it; it is stored."""
        want = await self.offer(stage, step=step)
        await self.give(stage, want.request, self.body(stage), step=step)
        assert isinstance(await self.answer(stage), StoredMessage)
        return want

    async def offer(self, stage, what="checkpoint", step=9):
        """Announce a body and return the request for it."""
        await self.send(stage, AnnounceMessage(self.place(stage), 0, what, step))
        return await self.answer(stage)


@pytest.fixture
def pair():
    return memory_stream_pair


@pytest.fixture
async def member(models, tmp_path, pair):
    one = Member(copy.deepcopy(models["llama"]), tmp_path, pair=pair)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.peer.run)
        await quiet()
        yield one
        nursery.cancel_scope.cancel()
    one.store.close()


async def test_neighbours_checkpoint_is_stored_confirmed_and_served(member):
    body = member.body(0)
    want = await member.offer(0)
    assert (want.what, want.of, want.at, want.root) == ("checkpoint", 0, 0, b"")
    await member.give(0, want.request, body)
    kept = await member.answer(0)
    assert (type(kept), kept.step) == (StoredMessage, 9)
    assert member.store.metadata(0).step == 9
    await member.send(0, AskMessage(member.place(0), 3))
    holds = await member.answer(0)
    assert (holds.request, holds.phase, holds.checkpoint) == (3, "starting", 9)
    await member.send(0, member.want(0, "checkpoint", 0))
    have, back = await member.whole(0)
    assert (back, have.root, have.step) == (bytes(body), hash_body(body), 9)
    # a stored checkpoint is confirmed without a transfer
    await member.send(0, AnnounceMessage(member.place(0), 0, "checkpoint", 9))
    assert isinstance(await member.answer(0), StoredMessage)


@pytest.mark.parametrize(
    ("change", "more", "reason"),
    [
        (None, {"root": bytes(32)}, "hash"),
        (float("nan"), {}, "not_finite"),
        (float("inf"), {}, "not_finite"),
        (None, {"size": 2**50}, "size"),
        (None, {"size": 0}, "size"),
        (None, {"step": 11}, "bounds"),
        (None, {"what": "layers"}, "schema"),
        (None, {"what": "copy"}, "schema"),
        (None, {"what": "output"}, "schema"),
        (None, {"at": 8}, "size"),
    ],
)
async def test_invalid_checkpoint_is_counted_and_not_stored(member, change, more, reason):
    want = await member.offer(0)
    await member.give(0, want.request, member.body(0, change=change), **more)
    assert member.peer.channel.refused == {reason: 1}
    assert member.store.metadata(0) is None
    assert not member.peer.channel.ended
    # and the next one is taken
    await quiet()
    await member.store_copy(0)


async def test_ignores_unsolicited_bodies_and_other_crews(member):
    await member.give(0, 99, member.body(0))
    await member.send(0, AnnounceMessage(member.place(0, crew=b"d" * 16), 0, "checkpoint", 9))
    await member.send(0, AnnounceMessage(member.place(2), 0, "checkpoint", 9))
    assert not member.peer.channel.refused
    assert not member.peer.channel.ended
    with trio.move_on_after(0):
        await member.ends[0].receive_some(1)
        pytest.fail("a request was sent")


async def test_cancelled_or_answered_request_blocks_no_other(member):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.peer.fetch.body, 0, "copy", 0)
        want = await member.answer(0)
        nursery.cancel_scope.cancel()
    await member.give(0, want.request, b"\x90", what="copy")
    for step in (9, 10):
        want = await member.store_copy(0, step)
        await member.give(0, want.request, member.body(0))  # again, unasked
    assert not member.peer.channel.refused
    assert member.store.metadata(0).step == 10


@pytest.mark.parametrize("pair", [lockstep_stream_pair])  # a chunk is sent when the last is read
async def test_small_messages_overtake_a_body(member):
    member.work()
    await member.answer(0)
    recorder = member.recorder
    recorder.replica = replace(recorder.replica, body=bytearray(8 * state_exchange.CHUNK_BYTES))
    await member.send(0, member.want(0, "checkpoint", 1))
    await member.answer(0)
    member.peer.channel.post(0, StoredMessage(member.place(1), 0, 2))
    kinds = [type(await member.answer(0)) for _ in range(7)]
    assert StoredMessage in kinds, "before the last of the eight chunks"


@pytest.mark.parametrize("data", [b"\xff" * 8, bytes(4), b"\0\0\0\1\x80"])
async def test_garbage_ends_only_the_stream_of_its_sender(member, data):
    await member.ends[2].send_all(data)
    await quiet()
    assert list(member.peer.channel.ended) == [2]
    assert member.peer.channel.fault[0] == 2
    await member.store_copy(0)


async def test_repeated_garbage_ends_the_stream(member):
    for _ in range(MAX_BAD_MESSAGES):
        want = await member.offer(0)
        await member.give(0, want.request, member.body(0), root=bytes(32))
    await quiet()
    assert member.peer.channel.ended == {0: "misbehaved"}
    assert member.peer.channel.fault == (0, "misbehaved")


async def test_transfer_resumes_in_the_next_crew(models, tmp_path):
    partial_bodies = {}
    settings = RecoverySettings(seconds=5.0)
    for crew in ("first", "second", "third"):
        one = Member(copy.deepcopy(models["llama"]), tmp_path / crew, settings, partial_bodies)
        body = one.body(0)
        half = len(body) // 2
        whole_chunk, state_exchange.CHUNK_BYTES = state_exchange.CHUNK_BYTES, half
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.peer.run)
                await quiet()
                want = await one.offer(0)
                place = one.place(0)
                have = HaveMessage(place, want.request, "checkpoint", 9, len(body), hash_body(body))
                if crew == "first":
                    assert (want.at, want.root) == (0, b"")
                    await one.send(0, have)
                    chunk = ChunkMessage(place, want.request, 0, half)
                    await one.send(0, chunk, bytes(body[:half]))
                    assert partial_bodies[0].at == half
                elif crew == "second":
                    assert (want.at, want.root) == (half, hash_body(body))
                    await one.give(0, want.request, body, at=half)
                    assert isinstance(await one.answer(0), StoredMessage)
                    assert one.store.read(0).body.numpy().tobytes() == body
                    assert not partial_bodies
                    partial_bodies[0] = PartialBody(bytes(32), bytearray(len(body)), half)
                else:
                    assert (want.at, want.root) == (half, bytes(32))
                    await one.give(0, want.request, body)
                    assert isinstance(await one.answer(0), StoredMessage)
                nursery.cancel_scope.cancel()
        finally:
            state_exchange.CHUNK_BYTES = whole_chunk
            one.store.close()


async def test_sends_only_the_rest_of_an_equal_checkpoint(member):
    await member.store_copy(0)
    body = bytes(member.body(0))
    await member.send(0, member.want(0, "checkpoint", 0, 100, hash_body(body)))
    have = await member.answer(0)
    chunk, part = await member.answer(0)
    assert (have.size, chunk.at, part) == (
        len(body),
        100,
        body[100 : 100 + state_exchange.CHUNK_BYTES],
    )
    await member.send(0, member.want(0, "checkpoint", 0, 100, bytes(32)))
    assert await member.answer(0)
    assert (await member.answer(0))[0].at == 0


async def test_own_checkpoint_is_announced_when_a_crew_starts(member, autojump_clock):
    member.work()
    await quiet()
    made = await member.answer(0)
    assert (type(made), made.what, made.step) == (AnnounceMessage, "checkpoint", 9)
    await member.send(0, member.want(0, "checkpoint", 1))
    have, body = await member.whole(0)
    assert hash_body(body) == have.root
    await member.send(0, StoredMessage(member.place(0), 0, 9))
    assert member.peer.sharing.stored_steps == {0: 9}


@pytest.mark.parametrize("what", ["layers", "tied", "copy"])
async def test_stage_without_weights_answers_loading(member, what):
    await member.send(0, member.want(0, what, 1))
    assert (await member.answer(0)).reason == "loading"


async def test_layers_are_served_only_in_checkfree_modes(models, tmp_path, member):
    member.work()
    await member.answer(0)
    await member.send(0, member.want(0, "layers", 1))
    assert (await member.answer(0)).reason == "none"
    settings = RecoverySettings(mode="checkfree")
    one = Member(copy.deepcopy(models["llama"]), tmp_path / "paper", settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.peer.run)
        await quiet()
        worker = one.work()
        worker.optimizer.squared_norm = 2.25
        await one.send(0, one.want(0, "layers", 1))
        have, body = await one.whole(0)
        assert have.squared_norm == 2.25
        layout, form = one.stage.expected_body("layers", 1)
        layers = decode_state(as_tensor(bytearray(body)), layout, form, 9, 2.25)
        assert layers.weights
        assert all(torch.equal(t, trained(one.runtimes[1])[n]) for n, t in layers.weights.items())
        nursery.cancel_scope.cancel()
    one.store.close()


async def test_requests_at_a_time_are_bounded(member, monkeypatch):
    member.work()
    await member.answer(0)
    monkeypatch.setattr(state_exchange, "SERVED_AT_ONCE", 0)
    await member.send(0, AskMessage(member.place(0), 8))
    assert (await member.answer(0)).reason == "busy"


async def test_silence_ends_a_request_and_a_lost_stream_at_once(member, autojump_clock):
    began = trio.current_time()
    with pytest.raises(PeerTimeout):
        await member.peer.fetch.body(0, "copy", 0)
    assert trio.current_time() - began == pytest.approx(5.0)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def ask():
            with pytest.raises(PeerError, match="gone"):
                await member.peer.fetch.body(2, "copy", 2)

        nursery.start_soon(ask)
        await quiet()
        await member.ends[2].aclose()
    assert trio.current_time() == began
    assert member.peer.channel.fault is None  # a closed stream is no fault


async def test_waits_a_bounded_time_for_a_restoring_stage(member, autojump_clock):
    async def loading():
        while True:
            got = await member.answer(0)
            message = got[0] if isinstance(got, tuple) else got
            await member.send(0, LackMessage(member.place(0), message.request, "loading"))

    edge = StageInput(2, b"about", b"")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loading)
        began = trio.current_time()
        with pytest.raises(PeerTimeout, match="not restored"):
            await member.peer.fetch.run_at(0, edge, 2, b"")
        assert 5.0 <= trio.current_time() - began < 12.0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("reason", "error"), [("failed", Incompatible), ("none", PeerError), ("busy", PeerError)]
)
async def test_missing_body_is_an_error_of_that_source(member, reason, error):
    async with trio.open_nursery() as nursery:

        async def ask():
            with pytest.raises(error):
                await member.peer.fetch.state(0, "checkpoint", 1)

        nursery.start_soon(ask)
        want = await member.answer(0)
        await member.send(0, LackMessage(member.place(0), want.request, reason))


async def test_invalid_run_is_refused_and_a_device_error_is_answered(member, monkeypatch):
    member.work()
    await member.answer(0)
    run = RunMessage(member.place(0), 4, "float32", 2, 5)
    activations = bytes(activation_bytes("float32", 2, LIMITS.hidden))
    await member.send(0, run, b"about" + activations)
    assert (await member.answer(0)).reason == "refused"
    assert sum(member.peer.channel.refused.values()) == 1
    monkeypatch.setattr(state_exchange, "read_micro_batch", lambda *args: None)

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(state_exchange, "run_one", full)
    await member.send(0, run, b"about" + activations)
    assert (await member.answer(0)).reason == "failed"
    assert not member.peer.channel.ended


async def test_full_disk_is_counted(member, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(member.store, "write", full)
    want = await member.offer(0)
    await member.give(0, want.request, member.body(0))
    await quiet()
    assert member.peer.channel.refused == {"failed": 1}
    assert not member.peer.channel.ended


async def test_announced_body_that_does_not_arrive_is_counted(member):
    want = await member.offer(0)
    await member.send(0, LackMessage(member.place(0), want.request, "none"))
    await quiet()
    assert member.peer.channel.refused == {"lacking": 1}
    await member.offer(0)
    await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(SETTINGS.seconds + 1)
    assert member.peer.channel.refused == {"lacking": 1, "timeout": 1}
