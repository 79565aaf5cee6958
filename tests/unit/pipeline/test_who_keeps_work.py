"""Who keeps a crew's work to itself and answers everything else is found, or it and a neighbour
are: never its head, never two others."""

import contextlib
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import PeerError
from swarmnode.stages import wire
from swarmnode.stages.head import BELIEVED, IMPATIENCE, PATIENCE
from swarmnode.stages.wire import Located, MicroBatch, Place, plain, swapped
from swarmnode.stages.worker import (
    Passages,
    Search,
    holders,
    name_of,
    parties,
    path_of,
    path_of_wave,
    sends,
)
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_logprobs
from tests.support.crew_rows import ENDS, EXACT, HEADS, crew_of, grpo

SECONDS = 60.0
CFG = TrainingConfig()


def keeps(kind, purpose=None):
    """A member that takes such frames and does nothing with them."""

    def corrupt(member):
        original = member.handle

        async def handle(sender, frame, body):
            if not isinstance(frame, kind) or (
                purpose is not None and getattr(frame, "purpose", purpose) != purpose
            ):
                await original(sender, frame, body)

        member.handle = handle

    return corrupt


def withholds(kind):
    """A member that does everything and does not send such frames, though it counts them as
    sent."""

    def corrupt(member):
        original = member.links.send

        def send(stage, frame, body=b""):
            if isinstance(frame, kind):
                member.links.passed.sent.count(stage, frame)
            else:
                original(stage, frame, body)

        member.links.send = send

    return corrupt


def denies(kind):
    """As `keeps`, and says that they never came, or that it has sent them on: whichever is
    worse."""

    def corrupt(member, claims):
        keeps(kind)(member)
        original = member.located
        member.located = lambda piece: replace_located(original(piece), **claims)

    return corrupt


def replace_located(said, **claims):
    return msgspec.structs.replace(said, **claims)


async def learn(head, rows):
    return await head.update(rows, CFG, 10.0, 1e-3)


async def score(head, rows):
    return await head.score([(row.prompt_ids, row.completion_ids) for row in rows], 1.0)


async def sample(head, rows):
    return await head.generate(HEADS, 2, 4, 1.0, 1.0, ENDS, random.Random(0))


async def verdict(crew, call, rows, most=IMPATIENCE):
    """Whom the head blames in the end, and after how long."""
    began = trio.current_time()
    for _ in range(most):
        assert crew.head.blamed is None
        with contextlib.suppress(PeerError):
            await call(crew.head, rows)
    assert crew.head.blamed is not None, "nobody was found"
    assert not crew.head.usable
    return crew.head.blamed[:2], trio.current_time() - began


KEPT = [
    (learn, keeps(wire.Forward, "learn")),
    (learn, keeps(wire.Backward)),
    (learn, withholds(wire.Forward)),
    (learn, withholds(wire.Backward)),
    (learn, keeps(wire.ProposeStep)),
    (learn, keeps(wire.Commit)),
    (learn, withholds(wire.Done)),
    (learn, withholds(wire.Acknowledge)),
    (score, keeps(wire.Forward, "score")),
    (score, withholds((wire.Forward, wire.Scores))),
    (sample, keeps(wire.Prefill)),
    (sample, keeps(wire.Decode)),
    (sample, withholds((wire.Decode, wire.Tokens))),
]


@pytest.mark.parametrize(
    ("call", "corrupt", "stage"),
    # the tail has no gradient to wait for
    [(*kept, stage) for kept in KEPT for stage in (1, 2, 3) if stage < 3 or kept not in KEPT[1:3]],
)
async def test_who_keeps_work_is_found_or_it_and_a_neighbour_are(
    models, policy, autojump_clock, call, corrupt, stage
):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        corrupt(crew.members[stage])
        (found, _), took = await verdict(crew, call, rows)
        assert stage in found
        assert 0 not in found
        assert all(abs(one - stage) <= 1 for one in found)
        assert took <= 2 * SECONDS + 1


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "claims",
    [
        {"arrived": 0},
        {"sent": 99, "arrived": 99},
        {"sent": 99},
        {"arrived": 0, "sent": 0, "full": True},
        {"full": True},
    ],
)
@pytest.mark.parametrize(("call", "kind"), [(learn, wire.Forward), (sample, wire.Prefill)])
async def test_no_lie_about_its_own_counts_gets_somebody_else_blamed_in_its_place(
    models, policy, autojump_clock, call, kind, stage, claims
):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        denies(kind)(crew.members[stage], claims)
        (found, _), _ = await verdict(crew, call, rows)
        assert stage in found
        assert 0 not in found
        assert len(found) <= 2


async def test_who_says_nothing_of_it_at_all_is_found(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        keeps(wire.Forward)(crew.members[2])
        crew.members[2].links.at_once = lambda sender, frame: isinstance(frame, wire.Locate)
        assert (await verdict(crew, learn, rows))[0] == ((2,), "no answer again and again")


async def test_the_tail_that_keeps_only_what_the_loss_was_is_found(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        withholds(wire.Learnt)(crew.members[2])
        assert (await verdict(crew, learn, rows))[0][0] == (2,)


async def test_the_tail_that_keeps_its_part_of_a_tied_embedding_is_found(
    models, policy, autojump_clock
):
    _, rows = grpo(policy("llama-tied"))
    async with crew_of(models["llama-tied"], [1, 2, 1], seconds=SECONDS) as crew:
        withholds(wire.Embedding)(crew.members[2])
        assert (await verdict(crew, learn, rows))[0][0] == (2,)


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_in_swapped_order_too(models, policy, autojump_clock, stage):
    _, rows = grpo(policy("llama"))
    settings = replace(EXACT, swapped=True)
    async with crew_of(models["llama"], [1, 1, 1, 1], settings, seconds=SECONDS) as crew:
        keeps(wire.Forward)(crew.members[stage])
        (found, _), _ = await verdict(crew, learn, rows)
        assert stage in found
        assert 0 not in found


@pytest.mark.parametrize("spoilt", ["forward", "backward", "prefill"])
async def test_whoever_sends_what_cannot_be_used_is_found_and_not_only_who_says_so(
    models, policy, autojump_clock, spoilt
):
    """Who refuses what it cannot read looks like one that refuses for no reason: both are in
    doubt."""
    _, rows = grpo(policy("llama"))
    sender, call = {"forward": (1, learn), "backward": (2, learn), "prefill": (1, sample)}[spoilt]
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        original = crew.members[sender].links.send

        def send(stage, frame, body=b""):
            nan = b"\0\0\xc0\x7f"
            original(
                stage,
                frame,
                (
                    body[:-4] + nan
                    if isinstance(frame, (wire.Forward, wire.Backward, wire.Prefill))
                    else body
                ),
            )

        crew.members[sender].links.send = send
        (found, _), _ = await verdict(crew, call, rows, PATIENCE if call is learn else 1)
        assert sender in found
        assert 0 not in found
        assert len(found) <= 2


async def test_a_stage_is_not_blamed_for_a_neighbours_earlier_gradient(
    models, policy, autojump_clock
):
    """Stage 1 gives the head a gradient of its own making as soon as it has sent a forward on;
    stage 2 gets its own a second later."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        first, last = crew.members[1].links.send, crew.members[3].links.send
        delayed = []

        def hasty(stage, frame, body=b""):
            first(stage, frame, body) if not isinstance(frame, wire.Backward) else None
            if isinstance(frame, wire.Forward):
                made_up = wire.Backward(frame.place, frame.micro_batch, "float32", frame.rows)
                first(0, made_up, bytes(4 * frame.rows * models["llama"].config.hidden_size))

        def late(stage, frame, body=b""):
            (
                delayed.append((stage, frame, body))
                if isinstance(frame, wire.Backward)
                else last(stage, frame, body)
            )

        crew.members[1].links.send, crew.members[3].links.send = hasty, late
        async with trio.open_nursery() as nursery:

            async def let_go():
                await trio.sleep(1.0)
                for one in delayed:
                    last(*one)

            nursery.start_soon(let_go)
            assert (await learn(crew.head, rows)).refused is None
        assert crew.head.blamed is None


def one_of_each(place, piece, session, limits):
    """A frame of each type, as the member at `place` would send it."""
    learnt = (0.0,) * 6
    made = [
        wire.Forward(place, piece, "learn", "float32", 1, 1),
        wire.Forward(place, piece, "score", "float32", 1, 1),
        wire.Backward(place, piece, "float32", 1),
        wire.Learnt(place, piece, *learnt),
        wire.Scores(place, piece, 1),
        wire.Prefill(place, session, bytes(32), "float32", 1, 1),
        wire.Decode(place, session, bytes(32), "float32", 1),
        wire.Tokens(place, session, 1),
        wire.Drop(place, session),
        wire.Embedding(place, 1, 0, 1),
        wire.ProposeStep(place, 1, (piece,)),
        wire.Commit(place, 1, 1.0, 1.0, 1.0),
        wire.Abort(place, 1, "frame"),
    ]
    return [(frame, bytes(wire.body_bytes(frame, limits))) for frame in made]


@pytest.mark.parametrize("call", [learn, sample])
async def test_what_a_stage_never_sends_to_another_gets_nobody_blamed_and_stops_nothing(
    models, policy, autojump_clock, call
):
    """Whoever is sent such a frame and answers it with a refusal would be alone with it."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        sent = 0
        for member in crew.members[1:]:
            original, done = member.handle, set()

            async def handle(sender, frame, body, member=member, original=original, done=done):
                nonlocal sent
                await original(sender, frame, body)
                named = getattr(frame, "micro_batch", 1), getattr(frame, "session", bytes(16))
                if named in done:
                    return
                done.add(named)
                for stage in {0, 1, 2, 3} - {member.index}:
                    for made_up, of in one_of_each(member.place, *named, member.links.limits):
                        if not sends(made_up, member.index, stage, 4, member.micro_batches.routes):
                            member.links.send(stage, made_up, of)
                            sent += 1

            member.handle = handle
        for _ in range(PATIENCE + 1):
            result = await call(crew.head, rows)
            assert call is sample or result.refused is None
        assert sent > 100
        assert crew.head.blamed is None


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
async def test_who_keeps_work_and_sends_something_else_by_its_name_is_found(
    models, policy, autojump_clock, stage, old
):
    """Scores, or a forward of a step before: what comes counts where it is of the present step and
    from whom it has to be."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        await learn(crew.head, rows)
        member, original = crew.members[stage], crew.members[stage].links.send

        def send(other, frame, body=b""):
            if not isinstance(frame, wire.Forward):
                return original(other, frame, body)
            member.links.passed.sent.count(other, frame)
            if old:
                past = msgspec.structs.replace(frame.place, step=frame.place.step - 1)
                original(other, msgspec.structs.replace(frame, place=past), body)
            else:
                original(other, wire.Scores(frame.place, frame.micro_batch, 1), bytes(8))

        member.links.send = send
        (found, _), _ = await verdict(crew, learn, rows, PATIENCE)
        assert stage in found
        assert 0 not in found


@pytest.mark.parametrize("stage", [1, 2])
async def test_a_micro_batch_that_the_head_never_made_is_nobody_s(
    models, policy, autojump_clock, stage
):
    """Whoever learnt it would have gradients that are not proposed, and be alone with that."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        original = crew.members[stage].links.send

        def send(other, frame, body=b""):
            original(other, frame, body)
            if isinstance(frame, wire.Forward):
                original(
                    other,
                    msgspec.structs.replace(frame, micro_batch=frame.micro_batch + 10**6),
                    body,
                )

        crew.members[stage].links.send = send
        for _ in range(PATIENCE + 1):
            assert (await learn(crew.head, rows)).refused is None
        assert crew.head.blamed is None


async def test_what_an_aborted_attempt_has_left_on_the_way_is_no_part_of_the_next(
    models, policy, autojump_clock
):
    """An abort goes from the head to each stage; a forward that was sent before takes the way
    through the stages, and comes after it."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        sender, kept = crew.members[1], []
        original = sender.links.send

        def slow(other, frame, body=b""):
            (
                kept.append((other, frame, body))
                if isinstance(frame, wire.Forward) and not kept
                else original(other, frame, body)
            )

        sender.links.send = slow
        assert (await learn(crew.head, rows)).refused == "timeout"
        original(*kept[0])
        assert (await learn(crew.head, rows)).refused is None


@pytest.mark.parametrize(
    "changes", [{"temperature": 1e-6}, {"completion_lengths": None}, {"weights": 1e20}]
)
@pytest.mark.parametrize("stage", [1, 2])
async def test_who_changes_what_the_head_says_of_a_micro_batch_is_found(
    models, policy, autojump_clock, stage, changes
):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        original = crew.members[stage].links.send

        def send(other, frame, body=b""):
            if isinstance(frame, wire.Forward):
                work = changed(strict.decode(body[: frame.about], MicroBatch), changes)
                about = strict.encode(work)
                body, frame = (
                    about + body[frame.about :],
                    msgspec.structs.replace(frame, about=len(about)),
                )
            original(other, frame, body)

        crew.members[stage].links.send = send
        (found, _), _ = await verdict(crew, learn, rows, PATIENCE)
        assert stage in found
        assert 0 not in found
        assert len(found) <= 2


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_who_poisons_a_gradient_is_in_doubt_and_not_only_who_cannot_use_it(
    models, policy, autojump_clock, stage
):
    """What is finite and as large as it can be makes whoever goes on with it infinite."""
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        original = crew.members[stage].links.send

        def send(other, frame, body=b""):
            if isinstance(frame, wire.Backward):
                body = np.full(len(body) // 4, 3e38, "<f4").tobytes()
            original(other, frame, body)

        crew.members[stage].links.send = send
        (found, _), _ = await verdict(crew, learn, rows, PATIENCE)
        assert stage in found
        assert 0 not in found


@pytest.mark.parametrize("stage", [1, 2])
async def test_who_sends_the_head_what_is_no_frame_is_left_out_at_once(models, stage):
    async with crew_of(models["llama"], [1, 1, 2]) as crew:
        await crew.streams[stage, 0].send_all(b"\xff" * 64)
        await trio.testing.wait_all_tasks_blocked()
        assert crew.head.blamed[:2] == ((stage,), "what it sent is no frame: oversize")


def changed(work, changes):
    if "weights" in changes:
        weights = pack_logprobs(
            np.full(len(work.completion_lengths), changes["weights"], np.float32)
        )
        return msgspec.structs.replace(
            work, loss=msgspec.structs.replace(work.loss, weights=weights)
        )
    if "temperature" in changes:
        return msgspec.structs.replace(work, **changes)
    lengths = list(work.completion_lengths)
    lengths[0], lengths[-1] = lengths[-1], lengths[0]
    return msgspec.structs.replace(
        work, completion_lengths=tuple(lengths), completion_ids=work.completion_ids
    )


class Slow:
    """Computes as the others do; the first time it takes `seconds` longer, in which it does one
    layer after the other."""

    def __init__(self, seconds, runtime):
        self.seconds = seconds
        self.runtime = runtime

    async def __call__(self, work):
        done, seconds = work(), self.seconds
        self.seconds = 0.0
        for _ in range(100):
            await trio.sleep(seconds / 100)
            self.runtime.works()
        return done


async def slow_crew(models, policy, seconds, cfg, stage):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        crew.members[stage].context.compute = Slow(seconds, crew.members[stage].runtime)
        result = await crew.head.update(rows[:1], cfg, 10.0, 1e-3)
        return result, crew.head.blamed, trio.current_time()


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_row_for_which_a_stage_needs_longer_than_the_deadline_is_waited_for(
    models, policy, autojump_clock, stage
):
    result, blamed, took = await slow_crew(models, policy, 2.5 * SECONDS, CFG, stage)
    assert result.refused is None
    assert blamed is None
    assert took > 2 * SECONDS


async def test_and_not_for_ever_whatever_it_says(models, policy, autojump_clock):
    result, blamed, took = await slow_crew(models, policy, 20 * SECONDS, CFG, 1)
    assert result.refused == "timeout"
    assert blamed[:2] == ((1,), "too slow again and again")
    assert took <= (BELIEVED + 0.1) * SECONDS


async def test_who_hangs_in_the_middle_of_a_row_is_not_waited_for(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:

        async def hangs(work):
            await trio.sleep_forever()

        crew.members[1].context.compute = hangs
        assert (await verdict(crew, lambda head, rows: learn(head, rows[:1]), rows))[0] == (
            (1,),
            "no answer again and again",
        )
        assert trio.current_time() <= 2 * SECONDS + 1


async def test_what_can_be_cut_is_cut_and_not_waited_for(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        crew.members[1].context.compute = Slow(3 * SECONDS, crew.members[1].runtime)
        result = await learn(crew.head, rows)
        assert (result.refused, result.divisible, crew.head.blamed) == ("timeout", True, None)
        assert trio.current_time() <= SECONDS + 1


@pytest.mark.parametrize(
    "noise", ["refusal", "loss", "token", "acknowledgement", "embedding", "question"]
)
async def test_what_belongs_to_no_call_moves_no_deadline(models, policy, autojump_clock, noise):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        tail = crew.members[2]
        keeps(wire.Forward)(tail)

        async def babble():
            while True:
                await trio.sleep(SECONDS / 6)
                place = tail.place
                frame = {
                    "refusal": wire.Failed(place, 10**6, "frame", 1),
                    "loss": wire.Lost(place, bytes(16), "session", 1),
                    "token": wire.Tokens(place, bytes(16), 1),
                    "acknowledgement": wire.Acknowledge(place, 10**6, None, 1.0),
                    "embedding": wire.Embedding(place, 10**6, 0, 1),
                    "question": wire.Locate(place, bytes(16)),
                }[noise]
                tail.links.send(0, frame, bytes(wire.body_bytes(frame, tail.links.limits)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(babble)
            (found, _), took = await verdict(crew, learn, rows)
            nursery.cancel_scope.cancel()
        assert found == (2,)
        assert took <= 2 * SECONDS + 1


@pytest.mark.parametrize("call", [learn, sample])
async def test_who_answers_just_before_each_deadline_is_found_before_the_others_give_the_head_up(
    models, policy, autojump_clock, call
):
    _, rows = grpo(policy("llama"))
    patience = 6 * SECONDS
    async with crew_of(models["llama"], [1, 1, 1, 1], seconds=SECONDS) as crew:
        crew.head.search.patience = patience
        original = crew.members[2].handle

        async def drips(sender, frame, body):
            if isinstance(frame, (wire.Forward, wire.Backward, wire.Prefill, wire.Decode)):
                await trio.sleep(0.9 * SECONDS)
            await original(sender, frame, body)

        crew.members[2].handle = drips
        while crew.head.blamed is None and trio.current_time() < 2 * patience:
            with contextlib.suppress(PeerError):
                if call is learn:
                    await crew.head.update(
                        rows, CFG.model_copy(update={"per_device_train_tokens": 16}), 10.0, 1e-3
                    )
                else:
                    await crew.head.generate(HEADS, 2, 20, 1.0, 1.0, frozenset(), random.Random(0))
        assert crew.head.blamed is not None
        assert 2 in crew.head.blamed[0]
        assert 0 not in crew.head.blamed[0]


async def test_a_head_that_is_slow_itself_blames_nobody_else(models, policy, autojump_clock):
    _, rows = grpo(policy("llama"))
    async with crew_of(models["llama"], [1, 1, 2], seconds=SECONDS) as crew:
        crew.head.search.patience = patience = 4 * SECONDS

        async def slow(work):
            await trio.sleep(0.5 * SECONDS)
            return work()

        crew.head.context.compute = slow
        while trio.current_time() < 3 * patience:
            with contextlib.suppress(PeerError):
                await sample(crew.head, rows)
        assert crew.head.blamed is None


async def test_only_the_head_may_ask(models):
    async with crew_of(models["llama"], [1, 1, 2]) as crew:
        member = crew.members[1]
        crew.members[2].links.send(1, wire.Locate(crew.members[2].place, bytes(16)))
        await trio.testing.wait_all_tasks_blocked()
        assert member.context.refused == {"bounds": 1}
        assert member.links.passed.sent.of(bytes(16)) == 0


# ---- the search alone

PLACE, PIECE = Place(b"c" * 16, 0, 3), name_of(7)


def at(stage, arrived, sent, full=False, worked=0):
    return Located(Place(b"c" * 16, stage, 3), PIECE, arrived, sent, full, worked)


@pytest.mark.parametrize(
    ("counts", "whose"),
    [
        ([(0, 0), (0, 0), (0, 0)], ()),  # it has not left the head
        ([(0, 1), (0, 0), (0, 0)], (1,)),
        ([(0, 1), (1, 0), (0, 0)], (1,)),
        ([(0, 1), (1, 1), (0, 0)], (1, 2)),
        ([(0, 1), (1, 1), (1, 0)], (2,)),
        ([(0, 1), (1, 1), (1, 1)], (1, 2)),
        ([(0, 1), (2, 1), (1, 1)], (1,)),
        ([(0, 1), (2, 2), (1, 1)], (1,)),
        ([(0, 1), None, (1, 1)], (1,)),
        ([(0, 1), (1, 1), None], (2,)),
        ([(9, 1), (2, 2), (1, 1)], (1,)),
    ],
)
def test_the_first_on_the_path_that_has_it_holds_it(counts, whose):
    said = {stage: at(stage, *count) for stage, count in enumerate(counts) if count is not None}
    assert holders(path_of(plain(3), returns=True), said) == whose


def test_who_waits_for_one_that_does_not_read_is_in_doubt_with_it():
    said = {0: at(0, 0, 1), 1: at(1, 1, 0, full=True), 2: at(2, 0, 0)}
    assert holders((0, 1, 2, 1, 0), said) == (1, 2)
    assert holders((0, 1, 2, 1, 0), {**said, 0: at(0, 0, 0, full=True)}) == (1,)


def test_paths():
    assert path_of(plain(3), returns=True) == (0, 1, 2, 1, 0)
    assert path_of(plain(3), returns=False) == (0, 1, 2, 0)
    assert path_of(swapped(4), returns=True) == (0, 1, 0, 3, 2, 3, 2, 3, 0, 1, 0)
    assert path_of_wave(3, 2) == (0, 1, 2, 0, 1, 2, 0)


def test_only_neighbours_can_be_blamed_for_what_came():
    assert parties((0, 1, 2, 3, 0), 2, 1) == (1, 2)
    assert parties((0, 1, 2, 3, 0), 2, 2) == (2,)
    assert parties((0, 1, 2, 3, 0), 1, 0) == (1,)
    assert parties((0, 1, 2, 3, 0), 2, 0) == (2,)
    assert parties((0, 1, 2, 3, 0), 1, 3) == (1,)
    assert parties((0, 1, 0), 0, 0) == (0,)


def test_counts_of_one_neighbour_are_not_forgotten_because_of_another():
    passages = Passages()
    passages.count(0, wire.Forward(PLACE, 7, "learn", "float32", 1, 1))
    for number in range(10_000):
        passages.count(2, wire.Backward(PLACE, number, "float32", 1))
    assert passages.of(name_of(7)) == 1
    assert passages.of(name_of(9_999)) == 1
    assert passages.of(name_of(8)) == 0


def test_an_answer_about_another_piece_counts_for_nothing():
    search = Search()
    assert search.begins(PIECE, (0, 1, 2, 0), 0.0, 15.0)
    assert not search.begins(PIECE, (0, 1, 2, 0), 14.0, 15.0)
    search.said(0, at(0, 0, 1))
    assert not search.said(1, at(1, 1, 0, worked=1))
    assert search.said(1, at(1, 1, 0, worked=2))
    assert search.computes((1,))
    assert search.begins(name_of(8), (0, 1, 2, 0), 15.0, 15.0)
    assert not search.said(1, at(1, 1, 0, worked=3))
    assert not search.computes((1,))
    assert search.holders() == ()


def test_who_has_the_work_for_most_of_a_step_that_takes_too_long_is_named():
    search = Search()
    search.patience = 100.0
    for second in range(0, 200, 10):
        assert search.slowest(second) == ((1,) if second > 100 else ())
        search.begins(PIECE, (0, 1, 2, 0), second, 10.0)
        search.said(0, at(0, 0, 1))
        search.said(1, at(1, 1, int(second % 40 == 0)))
        search.said(2, at(2, int(second % 40 == 0), 0))
    search.stepped(200.0)
    assert search.slowest(290.0) == ()
    assert search.slowest(301.0) == (), "nobody was asked"
