"""State streams: what honest peers give each other, and what hostile ones get: refused, counted,
and in the end a closed stream."""

import contextlib
import copy
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from trio.testing import memory_stream_pair

from swarmnode.config import Config
from swarmnode.errors import (
    BadMessage,
    Incompatible,
    PeerError,
    PeerTimeout,
    StateError,
    Unavailable,
)
from swarmnode.stages import transfer
from swarmnode.stages import wire as stage_wire
from swarmnode.stages.model import StageRuntime
from swarmnode.stages.pipeline import CrewSettings, Links, StageWorker, inline
from swarmnode.stages.trainer import recovery_settings
from swarmnode.stages.transfer import (
    Copied,
    LocalStage,
    Outbox,
    Recorder,
    RecoverySettings,
    Run,
    SnapshotStore,
    StageState,
    StatePeer,
    copied,
    copy_bytes,
    decode_copy,
    decode_state,
    encode_copy,
    encode_state,
    find_snapshots,
    host_copy,
    layers_layout,
    layout_of,
    pack_floats,
    ring,
    stage_layouts,
    trained,
)
from swarmnode.stages.wire import Fence, FrameLimits, Loss, MicroBatch, Place, activation_bytes
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_ids, pack_logprobs
from tests.support.split_models import split_model

CREW = b"c" * 16
HASH = b"h" * 32
LIMITS = FrameLimits(hidden=32, vocab=61, tokens=64)
SETTINGS = RecoverySettings(seconds=5.0, neighbour_seconds=5.0)


class Wire:
    """Stage 1 of three with a real `StatePeer`; the test is stages 0 and 2."""

    def __init__(self, model, tmp_path, settings=SETTINGS, **more):
        pieces = split_model(model, [1, 2, 1])
        self.layouts = stage_layouts(model.config, [spec for spec, _ in pieces])
        self.runtimes = [StageRuntime(spec, stage) for spec, stage in pieces]
        self.store = SnapshotStore(tmp_path, CREW, {i: self.layouts[i] for i in range(3)})
        self.directory = tmp_path / CREW.hex()
        self.ends, far = {}, {}
        for stage in (0, 2):
            self.ends[stage], far[stage] = memory_stream_pair()
        self.fence = Fence(Place(CREW, 1, 9), 3)
        recorder = Recorder(self.runtimes[1].spec, settings)
        spec = self.runtimes[1].spec
        stage = LocalStage(
            self.runtimes[1],
            spec,
            LIMITS,
            self.layouts,
            settings,
            "float32",
            recorder,
            self.store,
            **more,
        )
        self.peer = StatePeer(stage, self.fence, far, inline)
        self.model = model

    def work(self):
        """The stage is in order, after step 9."""
        links = Links(1, {}, LIMITS)
        self.worker = StageWorker(
            self.runtimes[1], links, Fence(Place(CREW, 1, 9), 3), CrewSettings(bytes(32)), inline
        )
        self.worker.participant.hash = HASH
        self.peer.attach(self.worker)

    def step(self):
        self.worker.participant.step += 1

    def place(self, sender, **other):
        fields = {"crew": CREW, "stage": sender, "step": 9}
        return Place(**{**fields, **other})

    def state(self, stage, step=9):
        weights = {name: host_copy(t) for name, t in trained(self.runtimes[stage]).items()}
        return StageState(
            step,
            weights,
            weights,
            {n: t.square() for n, t in weights.items()},
            dict.fromkeys(weights, 9.0),
            2.5,
        )

    async def send(self, stage, *messages):
        for message in messages:
            await self.ends[stage].send_all(
                stage_wire.pack_state(*message)
                if isinstance(message, tuple)
                else stage_wire.pack_state(message)
            )
        await quiet()

    async def give(self, stage, what, body, answered=None, size=None, root=None, **more):
        """Says that there is a new one, and answers whoever wants it."""
        await self.send(stage, stage_wire.Made(self.place(stage), 0, what))
        want = await self.answer(stage)
        assert (want.what, want.of) == (what, stage)
        await self.body(stage, want.request, answered or what, body, size, root, **more)

    async def body(self, stage, request, what, body, size=None, root=None, **more):
        more = {"step": 9, "hash": HASH if what == "shadow" else b"", **more}
        await self.send(
            stage,
            stage_wire.Have(
                self.place(stage),
                request,
                what,
                size=len(body) if size is None else size,
                root=root or stage_wire.root_of(body),
                **more,
            ),
        )
        for at in range(0, len(body), 2**20):
            part = body[at : at + 2**20]
            await self.send(
                stage, (stage_wire.Chunk(self.place(stage), request, at, len(part)), part)
            )
        await quiet()

    async def answer(self, stage):
        """The next message to `stage`."""
        with trio.fail_after(1):
            return (await stage_wire.read_state(self.ends[stage], LIMITS))[0]

    def refused(self):
        return self.peer.channel.refused


async def quiet():
    for _ in range(50):
        await trio.lowlevel.checkpoint()


@pytest.fixture
async def wire(models, tmp_path):
    made = Wire(copy.deepcopy(models["llama-tied"]), tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.peer.run)
        await quiet()
        yield made
        nursery.cancel_scope.cancel()


def test_a_state_survives_its_bytes(models):
    layout = layout_of(models["llama"])
    weights = {name: host_copy(p) for name, p in models["llama"].named_parameters()}
    some = set(list(weights)[:5])  # the others were never stepped
    kept = lambda value: {name: t * value for name, t in weights.items() if name in some}
    state = StageState(
        4,
        weights,
        kept(2.0),
        {n: t.square() for n, t in kept(1.0).items()},
        dict.fromkeys(some, 4.0),
        1.5,
        1.1,
    )
    body = encode_state(state, layout, "exact")
    assert len(body) == stage_wire.state_bytes(layout, "exact")
    again = decode_state(body, layout, "exact", 4, 1.5, 1.1)
    for part in ("weights", "first", "second"):
        mine, theirs = getattr(state, part), getattr(again, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (again.counts, again.step, again.squared_norm, again.factor) == (
        state.counts,
        4,
        1.5,
        1.1,
    )
    small = decode_state(encode_state(state, layout, "small"), layout, "small", 4, 1.5, 1.0)
    assert not small.counts
    for name, tensor in weights.items():
        assert bool(((small.weights[name] - tensor).abs() <= 2**-8 * tensor.abs()).all())


async def test_a_shadow_is_stored_confirmed_and_given_back(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    await wire.give(0, "shadow", body, squared_norm=2.5)
    assert (await wire.answer(0)).step == 9
    await wire.send(0, stage_wire.Ask(wire.place(0), 5))
    holds = await wire.answer(0)
    assert (holds.shadow, holds.root, holds.hash, holds.loaded) == (
        9,
        stage_wire.root_of(body),
        HASH,
        False,
    )
    await wire.send(0, stage_wire.Want(wire.place(0), 6, "shadow", 0, 0, None))
    have = await wire.answer(0)
    assert (have.size, have.root, have.squared_norm) == (len(body), stage_wire.root_of(body), 2.5)
    assert wire.store.read(0)[1] == body
    for sender, of in ((0, 2), (2, 0)):  # what is kept of a third is none of theirs
        await wire.send(sender, stage_wire.Want(wire.place(sender), 7, "shadow", of, 0, None))
    assert (await wire.answer(2)).reason == "none"


async def hostile(wire, stage, what, body, reason, **more):
    await wire.give(stage, what, body, **more)
    assert wire.refused() == {reason: 1}
    assert wire.store.get(stage) is None
    await wire.send(stage, stage_wire.Ask(wire.place(stage), 5))
    assert isinstance(await wire.answer(stage), stage_wire.Holds), (
        "nothing was said to have been kept"
    )


async def test_a_wrong_hash_is_refused(wire):
    await hostile(
        wire,
        0,
        "shadow",
        encode_state(wire.state(0), wire.layouts[0], "exact"),
        "hash",
        root=b"x" * 32,
    )


async def test_numbers_that_are_none_are_refused(wire):
    state = wire.state(0)
    next(iter(state.weights.values())).view(-1)[3] = float("nan")
    await hostile(wire, 0, "shadow", encode_state(state, wire.layouts[0], "exact"), "not_finite")


async def test_a_negative_second_moment_is_refused(wire):
    state = wire.state(0)
    state = replace(state, second={name: -t.abs() - 1 for name, t in state.second.items()})
    await hostile(wire, 0, "shadow", encode_state(state, wire.layouts[0], "exact"), "bounds")


async def test_numbers_that_are_none_are_refused_in_bfloat16_too(models, tmp_path):
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path, RecoverySettings(exact_bytes=0))
    state = wire.state(0)
    next(iter(state.weights.values())).view(-1)[3] = float("inf")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.peer.run)
        await quiet()
        await hostile(
            wire,
            0,
            "shadow",
            encode_state(state, wire.layouts[0], "small"),
            "not_finite",
            form="small",
        )
        await wire.give(
            0, "shadow", encode_state(wire.state(0), wire.layouts[0], "small"), form="small"
        )
        assert wire.store.get(0).form == "small"
        nursery.cancel_scope.cancel()


async def test_another_stages_shape_is_refused_before_a_byte_of_it_is_kept(wire):
    await hostile(wire, 0, "shadow", encode_state(wire.state(1), wire.layouts[1], "exact"), "size")


async def test_a_claim_beyond_the_model_takes_no_memory(wire):
    await hostile(wire, 0, "shadow", b"", "size", size=2**50, root=b"x" * 32)
    await wire.send(
        0, (stage_wire.Chunk(wire.place(0), 1, 0, 2**20), bytes(2**20))
    )  # of what was refused
    assert wire.refused() == {"size": 1}


@pytest.mark.parametrize(
    ("what", "answered", "more", "reason"),
    [
        ("shadow", "layers", {}, "schema"),
        ("shadow", "ends", {}, "schema"),
        ("shadow", "shadow", {"form": "small"}, "bounds"),
        ("ends", "ends", {}, "size"),
    ],
)
async def test_what_was_not_asked_for_is_refused(wire, what, answered, more, reason):
    await hostile(wire, 0, what, b"x" * 64, reason, answered=answered, **more)


@pytest.mark.parametrize(("stage", "what"), [(0, "probes"), (2, "shadow")])
async def test_what_is_not_kept_here_is_not_fetched(wire, stage, what, tmp_path):
    wire.peer.stage.store = SnapshotStore(tmp_path / "other", CREW, {0: wire.layouts[0]})
    await wire.send(stage, stage_wire.Made(wire.place(stage), 0, what))
    await wire.send(stage, stage_wire.Ask(wire.place(stage), 5))
    assert isinstance(await wire.answer(stage), stage_wire.Holds)


async def test_nothing_comes_unasked(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    await wire.body(0, 1, "shadow", body)
    assert wire.store.get(0) is None
    assert wire.refused() == {}


async def test_chunks_out_of_place_end_a_transfer(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    for at, part, count in ((100, b"x" * 8, 1), (5, body[5:], 2)):
        await wire.send(0, stage_wire.Made(wire.place(0), 0, "shadow"))
        number = (await wire.answer(0)).request
        await wire.send(
            0,
            stage_wire.Have(
                wire.place(0), number, "shadow", 9, len(body), stage_wire.root_of(body), HASH
            ),
        )
        await wire.send(0, (stage_wire.Chunk(wire.place(0), number, at, len(part)), part))
        assert wire.refused() == {"size": count}
        # of nothing that is expected
        await wire.send(0, (stage_wire.Chunk(wire.place(0), number, 0, 8), b"x" * 8))
        assert wire.refused() == {"size": count}


async def test_messages_of_the_past_and_of_strangers_do_nothing(wire):
    for other in ({"crew": b"x" * 16}, {"stage": 2}, {"crew": b"y" * 16}):
        place = wire.place(0, **other)
        await wire.send(0, stage_wire.Made(place, 0, "shadow"))
    assert wire.fence.dropped == {"crew": 2, "stage": 1}
    assert wire.refused() == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff" * 64, "oversize"),
        (b"\0\0\0\x04\xc1bcd", "malformed"),
        (b"\0\0\0\x04abcd", "schema"),
        (b"\0\0\0\x08abcd", "truncated"),
        (b"\0\0", "truncated"),
    ],
)
async def test_bytes_that_are_no_message_end_that_stream_and_no_other(wire, data, reason):
    await wire.ends[0].send_all(data)
    await wire.ends[0].send_eof()
    await quiet()
    assert wire.refused() == {reason: 1}
    assert wire.peer.channel.gone == {0: reason}
    await wire.send(2, stage_wire.Ask(wire.place(2), 1))
    assert isinstance(await wire.answer(2), stage_wire.Holds)


async def test_who_does_not_stop_is_cut_off(wire):
    # the crew's activations are float32
    run = lambda number: stage_wire.Run(wire.place(0), number, "int8", 1, 1)
    for number in range(transfer.MISBEHAVED):
        assert 0 not in wire.peer.channel.gone
        await wire.send(0, (run(number), bytes(1 + activation_bytes("int8", 1, LIMITS.hidden))))
    await wire.send(0, stage_wire.Ask(wire.place(0), 1))
    assert wire.peer.channel.gone == {0: "misbehaved"}
    assert wire.refused() == {"schema": transfer.MISBEHAVED}


async def test_a_run_that_is_none_is_refused_and_one_of_a_stage_without_weights_waits(wire):
    body = b"nothing" + bytes(activation_bytes("float32", 4, LIMITS.hidden))
    run = stage_wire.Run(wire.place(0), 3, "float32", 4, 7)
    await wire.send(0, (run, body))
    assert (await wire.answer(0)).reason == "loading"
    wire.peer.stage.phase = "whole"
    await wire.send(0, (run, body))
    assert (await wire.answer(0)).reason == "refused"
    assert sum(wire.refused().values()) == 1


async def test_one_snapshot_of_a_neighbour_is_fetched_at_a_time_and_then_the_newest(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    for _ in range(5):
        await wire.send(0, stage_wire.Made(wire.place(0), 0, "shadow"))
    first = await wire.answer(0)
    await wire.send(0, stage_wire.Ask(wire.place(0), 1))
    assert isinstance(await wire.answer(0), stage_wire.Holds)
    await wire.body(0, first.request, "shadow", body)
    assert isinstance(await wire.answer(0), stage_wire.Kept)
    again = await wire.answer(0)
    assert (again.what, again.request) == ("shadow", first.request + 1)
    await wire.body(0, again.request, "shadow", body)
    assert isinstance(await wire.answer(0), stage_wire.Kept)
    await wire.send(0, stage_wire.Ask(wire.place(0), 1))
    assert isinstance(await wire.answer(0), stage_wire.Holds)


async def test_who_announces_something_again_and_again_has_it_fetched_a_few_times_in_a_step(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    for _ in range(transfer.TIMES["shadow"]):
        await wire.give(0, "shadow", body)
        assert isinstance(await wire.answer(0), stage_wire.Kept)
    await wire.send(
        0, stage_wire.Made(wire.place(0), 0, "shadow"), stage_wire.Ask(wire.place(0), 1)
    )
    assert isinstance(await wire.answer(0), stage_wire.Holds), "it is not wanted"
    assert wire.refused() == {"repeated": 1}
    wire.work()
    wire.step()
    await wire.give(0, "shadow", body)
    assert isinstance(await wire.answer(0), stage_wire.Kept)


async def test_a_snapshot_of_a_step_that_nobody_has_taken_is_refused(wire):
    body = encode_state(wire.state(0), wire.layouts[0], "exact")
    await hostile(wire, 0, "shadow", body, "bounds", step=11)
    # the crew is at 9, and some stages take a step before others
    await wire.give(0, "shadow", body, step=10)
    assert (await wire.answer(0)).step == 10


async def test_kept_is_said_of_what_is_kept(wire):
    body = bytearray(encode_state(wire.state(0), wire.layouts[0], "exact"))
    # the crew has begun again at 9
    wire.store.put(
        0,
        stage_wire.Have(wire.place(0), 1, "shadow", 20, len(body), stage_wire.root_of(body), HASH),
        body,
    )
    await wire.give(0, "shadow", body)
    await wire.send(0, stage_wire.Ask(wire.place(0), 1))
    assert (await wire.answer(0)).shadow == 20


async def test_who_says_that_there_is_something_and_gives_nothing_is_not_waited_for_for_ever(
    wire, autojump_clock
):
    await wire.send(0, stage_wire.Made(wire.place(0), 0, "shadow"))
    first = await wire.answer(0)
    await trio.sleep(transfer.LATER_SECONDS)
    await wire.give(0, "shadow", encode_state(wire.state(0), wire.layouts[0], "exact"))
    assert first.what == "shadow"
    assert wire.store.get(0).step == 9
    assert wire.peer.channel.progress == 0, "a stage that is being restored does not go on by it"


async def test_edges_are_given_while_a_step_ends(wire):
    wire.peer.stage.phase, edges = "whole", wire.peer.stage.recorder.edges

    class Ending:
        """A step that ends in another thread, while this edge is looked at."""

        target = None

        @property
        def source(self):
            edges.append(stage_wire.Edge(2, 9, 0, 1, 1, b"a", b"b"))

    edges += [stage_wire.Edge(1, 9, 0, 1, 1, b"a", b"b"), Ending()]
    await wire.send(0, stage_wire.Want(wire.place(0), 5, "edges", 1, 0, None))
    have, (_, body) = await wire.answer(0), await stage_wire.read_state(wire.ends[0], LIMITS)
    assert have.what == "edges"
    assert [edge.micro_batch for edge in strict.decode(body, list[stage_wire.Edge])] == [1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("The size of tensor a must match"),
        MemoryError(),
    ],
)
async def test_what_the_device_cannot_do_is_answered_and_the_member_goes_on(
    wire, error, monkeypatch
):
    def fails(*_):
        raise error

    wire.peer.stage.phase = "whole"
    monkeypatch.setattr(wire.peer.server, "find", lambda *_: (9, fails))
    await wire.send(0, stage_wire.Want(wire.place(0), 5, "layers", 1, 0, None))
    assert (await wire.answer(0)).reason == "failed"
    assert wire.refused() == {"failed": 1}
    await wire.send(2, stage_wire.Ask(wire.place(2), 1))
    assert isinstance(await wire.answer(2), stage_wire.Holds)


@pytest.mark.parametrize(
    "error",
    [AttributeError("no such thing"), KeyError("x"), NotImplementedError(), RecursionError()],
)
async def test_our_own_defects_are_not_swallowed(models, tmp_path, error, monkeypatch):
    wire = Wire(models["llama"], tmp_path)

    def fails(*_):
        raise error

    wire.peer.stage.phase = "whole"
    monkeypatch.setattr(wire.peer.server, "find", lambda *_: (9, fails))
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.peer.run)
            await quiet()
            await wire.send(0, stage_wire.Want(wire.place(0), 5, "layers", 1, 0, None))


def test_shadows_that_are_stored_in_two_threads_end_in_one_whole_file(
    models, tmp_path, monkeypatch
):
    wire = Wire(models["llama"], tmp_path)
    bodies = {
        step: bytearray(encode_state(wire.state(0, step), wire.layouts[0], "exact"))
        for step in (8, 9)
    }
    for step, body in bodies.items():
        body[:4] = step.to_bytes(4, "little")
    save, inside, most = transfer.save, [], []

    def watched(*args):
        inside.append(1)
        most.append(len(inside))
        save(*args)
        inside.pop()

    monkeypatch.setattr(transfer, "save", watched)
    have = lambda step: stage_wire.Have(
        wire.place(0), 1, "shadow", step, len(bodies[step]), stage_wire.root_of(bodies[step]), HASH
    )
    threads = [
        threading.Thread(target=wire.store.put, args=(0, have(step), bodies[step]))
        for step in (8, 9) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert wire.store.get(0).step == 9
    assert wire.store.read(0)[1] == bodies[9]


class Liar:
    """Stage 0 answers every request of the peer with what the test says."""

    def __init__(self, wire, nursery, reply):
        self.wire = wire
        nursery.start_soon(self.serve, reply)

    async def serve(self, reply):
        while (got := await stage_wire.read_state(self.wire.ends[0], LIMITS)) is not None:
            for message in reply(got[0]) if not isinstance(got[0], stage_wire.Chunk) else []:
                await self.wire.ends[0].send_all(
                    stage_wire.pack_state(*message)
                    if isinstance(message, tuple)
                    else stage_wire.pack_state(message)
                )


def giving(wire, what, body, root=None, size=None, **more):
    def reply(message):
        place = wire.place(0)
        named = {"hash": HASH} if what in ("shadow", "copy") else {}
        yield stage_wire.Have(
            place,
            message.request,
            what,
            9,
            size or len(body),
            root or stage_wire.root_of(body),
            **named,
            **more,
        )
        for at in range(0, len(body), 2**20):
            part = body[at : at + 2**20]
            yield stage_wire.Chunk(place, message.request, at, len(part)), part

    return reply


async def fetched(wire, reply, ask):
    result = error = None
    async with trio.open_nursery() as nursery:
        Liar(wire, nursery, reply)
        try:
            result = await ask()
        except PeerError as caught:
            error = caught
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


async def test_a_copy_is_given_to_whoever_asks_and_not_while_a_step_is_taken(wire, monkeypatch):
    base = {name: tensor.clone() for name, tensor in wire.model.state_dict().items()}
    wire.peer.stage.base = base.__getitem__
    want = stage_wire.Want(wire.place(2), 7, "copy", 1, 0, None)
    await wire.send(2, want)
    assert (await wire.answer(2)).reason == "loading"
    wire.work()
    await wire.send(2, want)
    have, body = (
        await stage_wire.read_state(wire.ends[2], LIMITS),
        await stage_wire.read_state(wire.ends[2], LIMITS),
    )
    assert (have[0].what, have[0].step, have[0].hash) == ("copy", 9, HASH)
    spec = wire.runtimes[1].spec
    layout = copied(spec, wire.layouts[1])
    parts = decode_copy(spec, body[1], layout, wire.peer.stage.base)
    assert set(parts) == {spec.whole(tensor.name) for tensor in layout}
    wire.step()
    monkeypatch.setattr(wire.peer.stage, "base", lambda name: wire.step() or base[name])
    await wire.send(2, want)
    assert (await wire.answer(2)).reason == "failed"

    def gone(name):
        raise Unavailable(f"no weights {name}")

    # a file of the base model was deleted: nobody's fault, and the end of nothing
    monkeypatch.setattr(wire.peer.stage, "base", gone)
    await wire.send(2, want)
    assert (await wire.answer(2)).reason == "failed"


async def test_a_copy_is_encoded_once_between_two_steps_however_many_ask(wire, monkeypatch):
    wire.work()
    encoded = []
    monkeypatch.setattr(
        transfer,
        "encode_copy",
        lambda *args: encoded.append(wire.worker.participant.step) or encode_copy(*args),
    )

    async def later(work):
        await quiet()
        return work()

    monkeypatch.setattr(wire.peer.channel, "compute", later)

    async def asked():
        for stage in (0, 2):
            await wire.ends[stage].send_all(
                stage_wire.pack_state(stage_wire.Want(wire.place(stage), 1, "copy", 1, 0, None))
            )
        with trio.fail_after(1):
            read = lambda stage: stage_wire.read_state(wire.ends[stage], LIMITS)
            got = [(await read(stage), await read(stage)) for stage in (0, 2)]
        assert len({body for _, (_, body) in got}) == 1
        return {have.step for (have, _), _ in got}

    assert await asked() == {9}
    assert await asked() == {9}
    assert encoded == [9]
    async with trio.open_nursery() as nursery:
        async with wire.worker.optimizer.moving:
            wire.step()  # it is counted, and the weights still move
            nursery.start_soon(asked)
            await quiet()
            assert encoded == [9]
    assert encoded == [9, 10]
    wire.peer.stage.recorder.committed(wire.worker)
    assert wire.peer.stage.recorder.copy is None, "what nobody will ask for again takes no memory"


async def test_a_copy_is_sent_twice_in_one_step_and_not_a_third_time(wire):
    wire.work()

    async def asked(stage):
        await wire.send(stage, stage_wire.Want(wire.place(stage), 7, "copy", 1, 0, None))
        answer = await wire.answer(stage)
        if isinstance(answer, stage_wire.Have):
            assert isinstance(await wire.answer(stage), stage_wire.Chunk)
        return answer

    assert [type(await asked(0)) for _ in range(2)] == [stage_wire.Have, stage_wire.Have]
    assert [(await asked(0)).reason for _ in range(2 * transfer.MISBEHAVED)] == [
        "refused"
    ] * 2 * transfer.MISBEHAVED
    assert wire.refused() == {"repeated": 2 * transfer.MISBEHAVED}
    assert wire.peer.channel.gone == {}, "it is held against nobody"
    assert isinstance(await asked(2), stage_wire.Have), "each stage has its own share"
    wire.step()
    wire.peer.stage.recorder.committed(wire.worker)
    assert (await asked(0)).step == 10


@pytest.mark.parametrize("what", ["layers", "shadow"])
async def test_what_a_lost_stage_may_want_is_not_sent_for_ever_and_layers_not_again_after_a_step(
    wire, what
):
    wire.work()
    body = bytearray(encode_state(wire.state(0), wire.layouts[0], "exact"))
    wire.store.put(
        0,
        stage_wire.Have(wire.place(0), 1, "shadow", 9, len(body), stage_wire.root_of(body), HASH),
        body,
    )
    of = 0 if what == "shadow" else 1
    wire.peer.stage.settings = replace(SETTINGS, mode="checkfree+")

    async def refused():
        await wire.send(0, stage_wire.Want(wire.place(0), 7, what, of, 0, None))
        answer = await wire.answer(0)
        return isinstance(answer, stage_wire.Lack) or not isinstance(
            await wire.answer(0), stage_wire.Chunk
        )

    times = transfer.TIMES[what]
    assert [await refused() for _ in range(times + 2)] == [False] * times + [True] * 2
    wire.step()
    wire.store.put(
        0,
        stage_wire.Have(wire.place(0), 1, "shadow", 10, len(body), stage_wire.root_of(body), HASH),
        body,
    )
    assert await refused() == (what == "layers"), (
        "nobody is restored in a crew that has taken a step; a newer snapshot is another one"
    )


def test_parts_count_for_their_bytes_and_the_whole_is_sent_eight_times():
    size, piece = 209 * 2**24 + 77, 2**24
    rations = transfer.Rations()
    pieces = [min(piece, size - at) for at in range(0, size, piece)]
    whole = lambda step: [rations.take(0, "shadow", 1, step, length, size) for length in pieces]
    assert [all(whole(9)) for _ in range(9)] == [True] * 8 + [False]
    assert not any(whole(9))
    assert rations.take(2, "shadow", 1, 9, piece, size), "each stage has its own share"
    assert all(whole(10))
    assert [rations.take(0, "shadow", 1, 11) for _ in range(9)] == [True] * 8 + [False]


@pytest.mark.parametrize("what", ["layers", "tied"])
def test_layers_are_the_neighbours_and_a_tied_embedding_the_other_ends(models, what):
    pieces = split_model(copy.deepcopy(models["llama-tied"]), [1, 1, 1, 1])
    specs, layouts = (
        [spec for spec, _ in pieces],
        stage_layouts(models["llama-tied"].config, [spec for spec, _ in pieces]),
    )
    runtime = StageRuntime(*pieces[3])
    at = LocalStage(
        runtime,
        specs[3],
        LIMITS,
        layouts,
        SETTINGS,
        "float32",
        Recorder(specs[3], SETTINGS),
        phase="whole",
    )
    server = StatePeer(at, Fence(Place(CREW, 3, 9), 4), {}, inline).server
    who = [asker for asker in range(3) if server.find(asker, what, 3) is not None]
    assert who == ([2] if what == "layers" else [0])


async def test_a_copy_that_is_fetched_is_no_longer_than_its_stage(wire):
    base = {name: tensor.clone() for name, tensor in wire.model.state_dict().items()}
    spec = wire.runtimes[0].spec
    layout = copied(spec, wire.layouts[0])
    ask = lambda: wire.peer.fetch.copy(spec)
    adapter = encode_copy(spec, trained(wire.runtimes[0]), layout, None)
    size, at, parts = await fetched(wire, giving(wire, "copy", adapter), ask)
    assert (size, at) == (len(adapter), (9, HASH))
    assert set(parts) == {spec.whole(tensor.name) for tensor in layout}
    most = copy_bytes(layout, adapter=False)
    for given, reply, reason in (
        (None, giving(wire, "copy", adapter[:-2]), "size"),
        (None, giving(wire, "layers", adapter), "schema"),
        (base.__getitem__, giving(wire, "copy", b"", size=most + 1, root=b"x" * 32), "size"),
        (base.__getitem__, giving(wire, "copy", bytes(200)), "malformed"),
    ):
        wire.peer.stage.base = given
        with pytest.raises(BadMessage) as caught:
            await fetched(wire, reply, ask)
        assert caught.value.reason == reason


async def test_what_a_lost_stage_is_given_is_looked_at_before_it_is_used(wire):
    good = encode_state(wire.state(1), wire.layouts[1], "exact")
    ask = lambda root=None: (
        lambda: wire.peer.fetch.snapshot([0], 9, root or stage_wire.root_of(good))
    )
    state = await fetched(wire, giving(wire, "shadow", good), ask())
    assert state.squared_norm == 0.0
    assert state.weights.keys() == trained(wire.runtimes[1]).keys()
    for reply, wanted, reason in (
        (giving(wire, "shadow", good, root=b"y" * 32), b"y" * 32, "hash"),
        (giving(wire, "shadow", good), b"z" * 32, "hash"),
        (giving(wire, "shadow", good[:-4], root=stage_wire.root_of(good)), None, "size"),
        (giving(wire, "shadow", good, size=2**40), None, "size"),
        (giving(wire, "layers", good), None, "schema"),
    ):
        with pytest.raises(BadMessage) as caught:
            await fetched(wire, reply, ask(wanted))
        assert caught.value.reason == reason


@pytest.mark.parametrize("lied", [False, True])
async def test_a_snapshot_that_came_in_part_is_completed_in_the_next_crew_by_another(
    models, tmp_path, monkeypatch, lied
):
    monkeypatch.setattr(transfer, "STREAM_CHUNK_BYTES", 8192)
    arriving, asked = {}, []
    wires = [
        Wire(copy.deepcopy(models["llama-tied"]), tmp_path, arriving=arriving) for _ in range(2)
    ]
    good = encode_state(wires[0].state(1), wires[0].layouts[1], "exact")
    root, came = stage_wire.root_of(good), 3 * 8192
    assert len(good) > came + 8192

    async def give(wire, stage, body, until, request=None):
        want, _ = await stage_wire.read_state(wire.ends[stage], LIMITS)
        asked.append((stage, want.at))
        await wire.send(
            stage,
            stage_wire.Have(wire.place(stage), want.request, "shadow", 9, len(body), root, HASH),
        )
        for at in range(want.at, until, 8192):
            part = body[at : min(at + 8192, until)]
            await wire.send(
                stage, (stage_wire.Chunk(wire.place(stage), want.request, at, len(part)), part)
            )

    async def first(wire):
        await give(wire, 0, bytes(len(good)) if lied else good, came)
        await wire.ends[0].aclose()

    async def second(wire):
        for _ in range(1 + lied):
            await give(wire, 2, good, len(good))

    for wire, holder, holding in zip(wires, (0, 2), (first, second), strict=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.peer.run)
            nursery.start_soon(holding, wire)
            if holder == 0:
                with pytest.raises(PeerError, match="gone"):
                    await wire.peer.fetch.snapshot([0], 9, root)
                assert arriving[1][0] == root
            else:
                state = await wire.peer.fetch.snapshot([2], 9, root)
            nursery.cancel_scope.cancel()
    assert asked == [(0, 0), (2, came), *([(2, 0)] if lied else [])]
    expected = wires[0].state(1).weights
    assert all(torch.equal(state.weights[name], tensor) for name, tensor in expected.items())


async def test_the_part_of_a_snapshot_that_is_wanted_is_sent(wire):
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    assert isinstance(await wire.answer(0), stage_wire.Made)
    body = encode_state(wire.state(1), wire.layouts[1], "exact")
    size = len(body)
    for at, until in ((size - 10, None), (100, 107), (size - 1, size)):
        await wire.send(0, stage_wire.Want(wire.place(0), 7, "shadow", 1, at, until))
        assert (await wire.answer(0)).size == size
        with trio.fail_after(1):
            chunk, part = await stage_wire.read_state(wire.ends[0], LIMITS)
        assert (chunk.at, part) == (at, body[at:until])
    for at, until in ((size, None), (0, size + 1), (size + 1, size + 2), (2**60, None)):
        await wire.send(0, stage_wire.Want(wire.place(0), 8, "shadow", 1, at, until))
        assert (await wire.answer(0)).reason == "refused"
    assert wire.refused() == {"bounds": 4}


async def test_what_is_wanted_in_parts_is_hashed_once_and_again_when_its_file_changes(
    wire, monkeypatch
):
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    hashed, size = [], stage_wire.state_bytes(wire.layouts[1], "exact")
    monkeypatch.setattr(
        transfer, "root_of", lambda body: hashed.append(len(body)) or stage_wire.root_of(body)
    )
    assert isinstance(await wire.answer(0), stage_wire.Made)

    async def part(at):
        await wire.send(0, stage_wire.Want(wire.place(0), 7, "shadow", 1, at, at + 9))
        answer = await wire.answer(0)
        return isinstance(answer, stage_wire.Have) and isinstance(
            await wire.answer(0), stage_wire.Chunk
        )

    assert [await part(at) for at in (0, 5000, 7, 9000)] == [True] * 4
    assert hashed == [size]
    file = wire.directory / "stage-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    assert not await part(0)
    assert wire.store.get(1) is None


async def test_tiny_parts_are_not_had_for_ever(wire):
    """Each has a file opened, so each counts for 64 KiB, or for the whole where that is less."""
    size = stage_wire.state_bytes(wire.layouts[1], "exact")
    times = 8 * size // min(size, 64 * 1024)
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    assert isinstance(await wire.answer(0), stage_wire.Made)

    async def given(at):
        await wire.send(0, stage_wire.Want(wire.place(0), 7, "shadow", 1, at, at + 1))
        answer = await wire.answer(0)
        return isinstance(answer, stage_wire.Have) and isinstance(
            await wire.answer(0), stage_wire.Chunk
        )

    assert [await given(at) for at in range(times + 2)] == [True] * times + [False] * 2
    assert wire.refused() == {"repeated": 2}


async def test_waiting_for_somebody_who_says_nothing_ends(wire, autojump_clock):
    before = trio.current_time()
    with pytest.raises(PeerTimeout):
        await wire.peer.fetch.layers(0)
    assert trio.current_time() - before == pytest.approx(5.0)
    assert await wire.peer.fetch.ask() == {}


@pytest.mark.parametrize("pieces", [None, 3])
async def test_a_transfer_may_take_long_while_something_comes_of_it(
    wire, autojump_clock, monkeypatch, pieces
):
    """A piece every four seconds, where five without any are too many; and none after some."""
    monkeypatch.setattr(transfer, "STREAM_CHUNK_BYTES", 8192)
    layout = layers_layout(wire.layouts[0])
    body = pack_floats(trained(wire.runtimes[0]), layout)
    every = range(0, len(body), 8192)
    assert len(every) > 3
    began = trio.current_time()

    async def slowly():
        message, _ = await stage_wire.read_state(wire.ends[0], LIMITS)
        place, number = wire.place(0), message.request
        await wire.send(
            0, stage_wire.Have(place, number, "layers", 9, len(body), stage_wire.root_of(body))
        )
        for at in every[:pieces]:
            await trio.sleep(4.0)
            part = body[at : at + 8192]
            await wire.send(0, (stage_wire.Chunk(place, number, at, len(part)), part))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slowly)
        if pieces is None:
            assert (await wire.peer.fetch.layers(0)).layers.keys() == {spec.name for spec in layout}
            assert trio.current_time() - began == pytest.approx(4.0 * len(every))
        else:
            with pytest.raises(PeerTimeout, match="nothing came"):
                await wire.peer.fetch.layers(0)
            assert trio.current_time() - began == pytest.approx(4.0 * pieces + 5.0)
    assert wire.peer.channel.progress >= (pieces or len(every))


async def test_a_stream_that_ends_fails_what_waits_for_it_at_once(wire, autojump_clock):
    before = trio.current_time()

    async def leave():
        await quiet()
        await wire.ends[0].aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        with pytest.raises(PeerError, match="stage 0 is gone"):
            await wire.peer.fetch.layers(0)
    assert trio.current_time() == before


async def test_a_stage_that_is_being_restored_is_waited_for_and_not_for_ever(wire, autojump_clock):
    asked = 0

    def loading(message):
        nonlocal asked
        asked += 1
        yield stage_wire.Lack(wire.place(0), message.request, "loading")

    wire.peer.stage.spec = replace(wire.peer.stage.spec, tied=True)
    with pytest.raises(PeerTimeout, match="not restored within"):
        await fetched(
            wire, loading, lambda: wire.peer.fetch._patiently(0, lambda: wire.peer.fetch.layers(0))
        )
    assert asked > 10
    with pytest.raises(Incompatible):
        await fetched(wire, loading, lambda: wire.peer.fetch.layers(0))


async def test_what_somebody_waits_for_goes_before_what_is_kept_for_later(wire):
    box, body = Outbox(), bytes(3 * 2**20)
    have = lambda number: stage_wire.Have(wire.place(1), number, "shadow", 9, len(body), HASH, HASH)
    box.transfer(have(7), body, True, 0)
    box.transfer(have(8), body, True, 0)
    written = lambda: bytes(box.next(wire.place(1))[1])
    assert written().startswith(stage_wire.pack_state(have(7)))
    box.transfer(have(9), body, False, 0)
    assert written().startswith(stage_wire.pack_state(have(9)))
    assert not [
        1
        for _ in range(2)
        if written().startswith((stage_wire.pack_state(have(8)), stage_wire.pack_state(have(7))))
    ], "before all of it was gone"
    assert written().startswith(stage_wire.pack_state(have(8)))


class Uplink:
    """Stage 0 sends parts of what it has of itself as its line takes it, to whoever keeps it."""

    def __init__(self, wire, rate):
        self.wire, self.rate = wire, rate
        self.asked, self.busy = [], 0.0
        self.half, self.kept = trio.Event(), trio.Event()
        self.offer()

    def offer(self, squared=0.0):
        state = self.wire.state(0)
        state = replace(
            state, second={name: tensor + squared for name, tensor in state.second.items()}
        )
        self.body = encode_state(state, self.wire.layouts[0], "exact")
        self.root = stage_wire.root_of(self.body)

    async def serve(self):
        await self.wire.send(0, stage_wire.Made(self.wire.place(0), 0, "shadow"))
        while True:
            want, _ = await stage_wire.read_state(self.wire.ends[0], LIMITS)
            if isinstance(want, stage_wire.Want):
                await self.give(want)
            elif isinstance(want, stage_wire.Kept):
                self.kept.set()

    async def give(self, want):
        self.asked.append((want.at, want.until))
        if want.at >= len(self.body) // 2:
            self.half.set()
        part, place = self.body[want.at : want.until], self.wire.place(0)
        await trio.sleep(len(part) / self.rate)
        self.busy += len(part) / self.rate
        await self.wire.send(
            0, stage_wire.Have(place, want.request, "shadow", 9, len(self.body), self.root, HASH)
        )
        await self.wire.send(0, (stage_wire.Chunk(place, want.request, want.at, len(part)), part))


@contextlib.asynccontextmanager
async def following(wire, rate):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.peer.run)
        await quiet()
        uplink = Uplink(wire, rate)
        nursery.start_soon(uplink.serve)
        yield uplink
        nursery.cancel_scope.cancel()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(transfer, "PART_BYTES", (1024, 32768))


@pytest.mark.parametrize("rate", [3e3, 3e4])
async def test_what_is_kept_for_later_takes_an_eighth_of_a_line_a_second_at_a_time(
    models, tmp_path, small_parts, rate, autojump_clock
):
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path)
    async with following(wire, rate) as uplink:
        began = trio.current_time()
        await uplink.kept.wait()
        took = trio.current_time() - began
        assert wire.store.get(0).root == uplink.root
        assert uplink.busy == pytest.approx(len(uplink.body) / rate)
        assert 0.1 * took < uplink.busy < 0.15 * took
        assert max(until - at for at, until in uplink.asked[3:]) <= 2 * rate, (
            "an activation waited for more"
        )


async def test_a_line_that_takes_everything_at_once_is_not_waited_for(
    models, tmp_path, small_parts, autojump_clock
):
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path)
    async with following(wire, 1e7) as uplink:
        await trio.sleep(2 * len(uplink.body) / 1e7)
        assert wire.store.get(0).root == uplink.root


@pytest.mark.parametrize("same", [True, False])
async def test_what_has_come_of_a_snapshot_is_not_sent_again_in_the_next_crew(
    models, tmp_path, small_parts, same, autojump_clock
):
    arriving = {}
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path, arriving=arriving)
    async with following(wire, 3e4) as uplink:
        await uplink.half.wait()
    at = arriving[0][1].gaps[0][0]
    assert wire.store.get(0) is None
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path, arriving=arriving)
    async with following(wire, 3e4) as uplink:
        if not same:
            uplink.offer(1.0)
        await uplink.kept.wait()
        assert uplink.asked[0][0] == at
        assert (uplink.asked[1][0] == 0) == (not same)
        assert wire.store.get(0).root == uplink.root
    assert arriving == {}


async def test_who_gives_parts_of_one_snapshot_after_another_gives_none(
    models, tmp_path, small_parts, autojump_clock
):
    wire = Wire(copy.deepcopy(models["llama-tied"]), tmp_path)
    async with following(wire, 1e5) as uplink:
        give = uplink.give

        async def another(want):
            uplink.offer(float(len(uplink.asked)))
            await give(want)

        uplink.give = another
        await trio.sleep(1000.0)
        assert len(uplink.asked) == 2
        assert wire.refused() == {"hash": 1}
        assert wire.store.get(0) is None
    assert wire.peer.stage.arriving == {}


async def test_whoever_is_being_sent_a_snapshot_gets_the_rest_of_it_when_there_is_a_newer_one(wire):
    size = stage_wire.state_bytes(wire.layouts[1], "exact")
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    assert isinstance(await wire.answer(0), stage_wire.Made)

    async def part(at, until, stage=0):
        await wire.send(stage, stage_wire.Want(wire.place(stage), 7, "shadow", 1, at, until))
        have = await wire.answer(stage)
        while isinstance(have, stage_wire.Made):
            have = await wire.answer(stage)
        chunk, body = await stage_wire.read_state(wire.ends[stage], LIMITS)
        assert isinstance(chunk, stage_wire.Chunk)
        return have, body

    first, begin = await part(0, size // 2)
    newer = wire.state(1, step=10)
    wire.peer.sharing.snapshot(
        Copied(replace(newer, second={name: tensor + 1 for name, tensor in newer.second.items()}))
    )
    await quiet()
    other, _ = await part(size // 2, size, stage=2)  # who was sent nothing of the one before
    rest, end = await part(size // 2, size)
    assert (first.step, rest.step, other.step) == (9, 9, 10)
    assert rest.root == first.root == stage_wire.root_of(bytes(begin) + bytes(end))
    assert (await part(0, 1000))[0].step == 10


def in_a_file(data, path):
    """Whether it is that file, mapped."""
    address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    mapped = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    return any(int(start, 16) <= address < int(end, 16) for start, end in mapped)


async def test_a_snapshot_that_is_sent_takes_no_memory(wire, monkeypatch):
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    mapped = []
    monkeypatch.setattr(
        wire.peer.channel.outboxes[0], "transfer", lambda have, body, later, at: mapped.append(body)
    )
    assert isinstance(await wire.answer(0), stage_wire.Made)
    await wire.send(0, stage_wire.Want(wire.place(0), 7, "shadow", 1, 0, None))
    assert in_a_file(mapped[0], wire.directory / "stage-1.safetensors")


def test_a_store_forgets_what_is_damaged_and_remembers_what_is_not(models, tmp_path):
    wire = Wire(models["llama"], tmp_path)
    body = bytearray(encode_state(wire.state(0), wire.layouts[0], "exact"))
    have = stage_wire.Have(wire.place(0), 1, "shadow", 9, len(body), stage_wire.root_of(body), HASH)
    wire.store.put(0, have, body)
    wire.store.put(0, msgspec.structs.replace(have, step=8), body)  # older: kept out
    again = SnapshotStore(tmp_path, CREW, {0: wire.layouts[0]})
    assert again.get(0).step == 9
    assert again.read(0)[1] == body
    file = next(tmp_path.rglob("stage-0.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StateError, match="damaged"):
        again.read(0)
    assert again.get(0) is None
    file.write_bytes(b"not a file of tensors")
    assert SnapshotStore(tmp_path, CREW, {0: wire.layouts[0]}).get(0) is None
    assert not file.exists()
    with pytest.raises(BadMessage, match="size"):
        again.put(0, have, body[:-1])
    with pytest.raises(BadMessage, match="belongs"):
        again.put(1, have, body)
    SnapshotStore(tmp_path, b"d" * 16, {0: wire.layouts[0]})
    assert not list(tmp_path.rglob("stage-*"))  # another crew's


def test_a_snapshot_of_unknown_steps_is_set_aside(models, tmp_path):
    wire = Wire(models["llama"], tmp_path)
    body = bytearray(encode_state(wire.state(0), wire.layouts[0], "exact"))
    have = stage_wire.Have(wire.place(0), 1, "shadow", 9, len(body), stage_wire.root_of(body), HASH)
    at = lambda step: msgspec.structs.replace(have, step=step, hash=bytes([step]) * 32)
    assert wire.store.put(0, at(9), body)
    wire.store.begins(7)
    assert wire.store.get(0) is None
    assert wire.store.put(0, at(8), body)
    wire.store.begins(8)
    assert wire.store.get(0).step == 8
    # another process; step 9 is back
    SnapshotStore(tmp_path, CREW, {0: wire.layouts[0]}).begins(12)
    again = SnapshotStore(tmp_path, CREW, {0: wire.layouts[0]})
    assert (again.get(0).step, again.get(0).hash) == (9, at(9).hash)
    again.begins(3)
    again.put(0, at(6), body)
    again.begins(4)  # of two that are later the newest is kept
    assert again.get(0) is None
    again.put(0, at(9), body)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["stage-0.safetensors"]


def test_a_ring_of_two_has_one_neighbour():
    assert [ring(i, 2) for i in range(2)] == [(1,), (0,)]
    assert [ring(i, 4) for i in range(4)] == [(3, 1), (0, 2), (1, 3), (2, 0)]
    assert ring(0, 1) == ()


async def test_who_asks_and_does_not_read_gets_no_more_than_a_few_answers(wire):
    wire.peer.sharing.snapshot(Copied(wire.state(1)))
    await quiet()
    wire.peer.channel.streams[0].send_stream.send_all_hook = trio.sleep_forever
    for number in range(1, 4 * transfer.SERVED):
        await wire.send(0, stage_wire.Want(wire.place(0), number, "shadow", 1, 0, None))
    waiting = wire.peer.channel.outboxes[0].transfers
    assert 1 < len(waiting) <= transfer.SERVED
    assert set(wire.refused()) <= {"busy", "repeated"}


@pytest.mark.parametrize("what", ["layers", "copy", "edges"])
async def test_what_takes_memory_is_put_together_once_for_who_does_not_read(
    wire, monkeypatch, what
):
    wire.work()
    wire.peer.stage.settings = replace(SETTINGS, mode="checkfree+")
    wire.peer.stage.recorder.edges.append(stage_wire.Edge(1, 9, 0, 1, 1, b"a", b"b"))
    monkeypatch.setattr(transfer, "STREAM_CHUNK_BYTES", 4)  # as a long one: more than one chunk
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 4)

    async def later(work):
        await quiet()
        return work()

    monkeypatch.setattr(wire.peer.channel, "compute", later)
    wire.peer.channel.streams[0].send_stream.send_all_hook = trio.sleep_forever
    want = lambda number: stage_wire.Want(wire.place(0), number, what, 1, 0, None)
    for number in range(1, 5):
        # the second while the first is put together
        await wire.ends[0].send_all(stage_wire.pack_state(want(number)))
        await quiet()
        await quiet()
    assert [out.what for out in wire.peer.channel.outboxes[0].transfers] == [what]
    assert wire.refused() == {"busy": 3}
    wire.peer.channel.outboxes[0].clear()
    wire.peer.channel.streams[0].send_stream.send_all_hook = None
    await wire.send(2, stage_wire.Want(wire.place(2), 7, "shadow", 2, 0, None))
    assert (await wire.answer(2)).reason == "none", "nobody else waits"


SCRATCH, PAPER, PRETRAINED, ADAPTER = (
    Run(),
    Run(swapped=True),
    Run(pretrained=True),
    Run(adapter=True),
)


@pytest.mark.parametrize(
    ("run", "mode", "given"),
    [
        (SCRATCH, "off", False),
        (PAPER, "checkfree+", True),
        (PRETRAINED, "off", False),
        (ADAPTER, "off", False),
    ],
)
async def test_layers_are_given_to_whom_they_are_of_use(wire, run, mode, given):
    settings = recovery_settings(
        Config.model_validate({"stages": {"paper_mode": mode}}).stages, run
    )
    wire.peer.stage.phase, wire.peer.stage.settings = "whole", settings
    await wire.send(0, stage_wire.Want(wire.place(0), 7, "layers", 1, 0, None))
    answer = await wire.answer(0)
    assert isinstance(answer, stage_wire.Have) if given else answer.reason == "none", (
        "stage 0 has an embedding that no neighbour keeps"
    )
    assert settings.synthesises(1, 3) == (not run.pretrained and not run.adapter)


async def test_what_a_member_has_run_here_in_a_step_has_a_bound(wire):
    wire.work()
    ids = lambda count: pack_ids([1 + i % 60 for i in range(count)])
    loss = Loss(
        *(pack_logprobs([0.5] * count) for count in (24, 1, 1)),
        1.0,
        "dapo",
        0.2,
        0.28,
        None,
        (True,),
        "tis",
        "token",
    )
    about = strict.encode(MicroBatch((41,), ids(41), (0,), (24,), ids(24), 1.0, loss))
    rows = LIMITS.tokens
    body = about + bytes(activation_bytes("float32", rows, LIMITS.hidden))

    async def ran(stage):
        await wire.send(
            stage, (stage_wire.Run(wire.place(stage), 7, "float32", rows, len(about)), body)
        )
        answer = await wire.answer(stage)
        return isinstance(answer, stage_wire.Have) and isinstance(
            await wire.answer(stage), stage_wire.Chunk
        )

    times = transfer.TIMES["ran"]
    assert [await ran(0) for _ in range(times + 2)] == [True] * times + [False] * 2
    assert wire.refused() == {"repeated": 2}
    assert await ran(2), "each stage has its own share"
    wire.step()
    assert await ran(0)


def test_a_lineage_that_takes_no_step_or_fewer_costs_another_none_of_its_copies(models, tmp_path):
    wire = Wire(models["llama"], tmp_path)
    body = bytearray(encode_state(wire.state(0), wire.layouts[0], "exact"))
    have = stage_wire.Have(wire.place(0), 1, "shadow", 9, len(body), stage_wire.root_of(body), HASH)
    crew = lambda name: SnapshotStore(
        tmp_path, name * 16, {0: wire.layouts[0]}, {"layers": [2, 1, 1]}
    )
    crew(b"c").put(0, have, body)
    crew(b"c").ran(9)
    assert find_snapshots(tmp_path) == [transfer.OnDisk(b"c" * 16, 0, 2, 9, HASH)]
    for name in (b"d", b"e", b"f"):  # each is a stranger's, and pushes what it likes
        crew(name).put(0, have, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        (name * 16).hex() for name in (b"c", b"f")
    ]
    assert crew(b"c").get(0).step == 9
    crew(b"g").ran(8)
    assert len(list(tmp_path.iterdir())) == 2, (
        "what was learnt in nine steps is kept until as many were taken"
    )
    crew(b"g").ran(9)
    assert [path.name for path in tmp_path.iterdir()] == [(b"g" * 16).hex()]
