"""A lost stage comes from all who keep it at once: each gives what its line carries, and whoever
fails or lies costs little."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.stages import transfer, wire
from swarmnode.stages.model import StageRuntime
from swarmnode.stages.pipeline import inline
from swarmnode.stages.transfer import (
    Gathering,
    LocalStage,
    Recorder,
    RecoverySettings,
    SnapshotStore,
    StageState,
    StatePeer,
    encode_state,
    host_copy,
    nothing_of,
    stage_layouts,
    trained,
)
from swarmnode.stages.wire import Fence, FrameLimits, Place
from tests.support.split_models import split_model

CREW, HASH = b"c" * 16, b"h" * 32
CHUNK, PIECE = 1024, 8192
SILENT = 120.0


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Everything a thousandth of its size; times are as they are."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "STREAM_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(transfer, "LEAST", CHUNK)


def have_of(body):
    return wire.Have(Place(CREW, 0, 9), 1, "shadow", 9, len(body), wire.root_of(body), HASH)


@dataclass
class Holder:
    """Sends chunks of what it was asked for in turn, over one line; from `until` bytes on, what
    `then` does."""

    body: bytes
    rate: float
    delay: float = 0.0
    until: float = float("inf")
    then: str = "fails"
    gave: int = 0
    asked: list = field(default_factory=list)
    line: trio.Lock = field(default_factory=trio.Lock)

    async def fill(self, part):
        self.asked.append((part.at, part.until))
        await trio.sleep(2 * self.delay)
        while part.at < part.until:
            end = min(part.at + CHUNK, part.until)
            async with self.line:
                if self.gave >= self.until:
                    if self.then == "fails":
                        raise PeerError("it is gone")
                    await trio.sleep(SILENT - 1.0 if self.then == "trickles" else SILENT)
                    if self.then == "is silent":
                        raise PeerTimeout("nothing came")
                await trio.sleep((end - part.at) / self.rate)
            self.gave += end - part.at
            part.body[part.at : end] = self.body[part.at : end]
            part.at = end
        return have_of(self.body)


async def gather(holders, begun=None, size=400 * CHUNK):
    body = holders[0].body
    begun = nothing_of(size) if begun is None else begun
    before = trio.current_time()
    await Gathering(
        begun, range(len(holders)), lambda holder, part: holders[holder].fill(part)
    ).run()
    assert bytes(begun.body) == body
    assert not begun.gaps
    return trio.current_time() - before


def noise(size=400 * CHUNK):
    return (
        torch.randint(256, (size,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
        .numpy()
        .tobytes()
    )


@pytest.mark.parametrize("rates", [(1000.0, 1000.0), (3000.0, 1000.0), (500.0, 4000.0, 100.0)])
async def test_each_gives_what_its_line_carries(autojump_clock, rates):
    body = noise()
    holders = [Holder(body, rate) for rate in rates]
    took = await gather(holders)
    assert took == pytest.approx(len(body) / sum(rates), rel=0.12)
    for holder, rate in zip(holders, rates, strict=True):
        assert holder.gave / len(body) == pytest.approx(rate / sum(rates), abs=0.06)


async def test_a_line_is_not_idle_while_the_next_piece_is_asked_for(autojump_clock):
    """100 ms there and back, in which a line carries three quarters of what is asked of it
    beside."""
    body = noise()
    assert await gather([Holder(body, 3e4, delay=0.05)]) == pytest.approx(len(body) / 3e4, rel=0.05)
    assert await gather([Holder(body, 3e4, delay=0.05) for _ in range(2)]) == pytest.approx(
        len(body) / 6e4, rel=0.07
    )


@pytest.mark.parametrize(
    ("then", "costs"), [("fails", 0.0), ("is silent", SILENT), ("trickles", SILENT)]
)
async def test_who_fails_costs_what_it_was_asked_for(autojump_clock, then, costs):
    body = noise()
    holders = [Holder(body, 1000.0), Holder(body, 1000.0, until=100 * CHUNK, then=then)]
    took = await gather(holders)
    left = (len(body) - 200 * CHUNK) / 1000.0
    assert took <= 100 * CHUNK / 1000.0 + left + min(costs, 8 * PIECE / 1000.0) + 15.0
    assert holders[0].gave >= 298 * CHUNK
    again = sum(until - at for holder in holders for at, until in holder.asked) - len(body)
    assert again <= 2 * PIECE, "what had come of its pieces is not asked for again"


async def test_where_all_fail_what_has_come_stays(autojump_clock):
    body, begun = noise(), nothing_of(400 * CHUNK)
    with pytest.raises(PeerError):
        await gather([Holder(body, 1000.0, until=at * CHUNK) for at in (50, 80)], begun)
    missing = sum(until - at for at, until in begun.gaps)
    assert missing == (400 - 50 - 80) * CHUNK
    assert len(begun.gaps) > 1, "in the middle, too"
    holders = [Holder(body, 1000.0) for _ in range(2)]
    await gather(holders, begun)
    assert sum(holder.gave for holder in holders) == missing


async def test_a_crew_that_ends_leaves_what_has_come(autojump_clock):
    body, begun = noise(), nothing_of(400 * CHUNK)
    holders = [Holder(body, 1000.0), Holder(body, 2000.0)]
    with trio.move_on_after(60.0):
        await gather(holders, begun)
    came = sum(holder.gave for holder in holders)
    assert came == pytest.approx(180_000, rel=0.1)
    assert sum(until - at for at, until in begun.gaps) == len(body) - came
    again = Holder(body, 1000.0)
    await gather([again], begun)
    assert again.gave == len(body) - came


async def test_all_of_it_may_have_come_when_the_crew_ended(autojump_clock):
    body, begun = noise(), nothing_of(400 * CHUNK)
    await gather([Holder(body, 1e6)], begun)
    again = Holder(body, 1e6)
    await gather([again], begun)
    assert again.gave == CHUNK


async def test_a_small_one_comes_from_both(autojump_clock):
    holders = [Holder(noise(7 * CHUNK), 1000.0) for _ in range(2)]
    await gather(holders, size=7 * CHUNK)
    assert {holder.gave // CHUNK for holder in holders} == {3, 4}


class End(trio.abc.Stream):
    """One end of a line that carries `rate` bytes per second each way, each `delay` late."""

    def __init__(self, rate, delay):
        self.rate, self.delay = rate, delay
        self.sent = 0
        self.into, self.comes = trio.open_memory_channel(1000)
        self.left, self.closed = b"", trio.Event()

    async def send_all(self, data):
        if self.closed.is_set() or self.other.closed.is_set():
            raise trio.BrokenResourceError
        await trio.sleep(len(data) / self.rate)
        self.sent += len(data)
        self.other.into.send_nowait((trio.current_time() + self.delay, bytes(data)))

    async def receive_some(self, most=None):
        if not self.left:
            try:
                due, self.left = await self.comes.receive()
            except trio.EndOfChannel:
                return b""
            await trio.sleep_until(due)
        some, self.left = self.left[:most], self.left[most:]
        return some

    async def wait_send_all_might_not_block(self):
        pass

    async def aclose(self):
        self.closed.set()
        self.into.close()
        self.other.into.close()
        await trio.lowlevel.checkpoint()


def line(rate, delay):
    one, two = End(rate, delay), End(rate, delay)
    one.other, two.other = two, one
    return one, two


class Crew:
    """Stage 1 of four is lost; stages 0, 2 and 3 are real peers that keep its snapshot. lies:
    holder → what it makes of its copy; joined: a line that was cut is there again."""

    def __init__(self, model, directory, lines, lies=None, arriving=None, joined=False):
        pieces = split_model(model, [1, 1, 1, 1])
        specs = [spec for spec, _ in pieces]
        layouts = stage_layouts(model.config, specs)
        runtimes = [StageRuntime(spec, stage) for spec, stage in pieces]
        settings = RecoverySettings(seconds=SILENT)
        self.weights = {name: host_copy(tensor) for name, tensor in trained(runtimes[1]).items()}
        self.body = bytearray(encode_state(StageState(9, self.weights), layouts[1], "exact"))
        self.root, self.ends, self.peers = wire.root_of(self.body), {}, {}
        have = wire.Have(Place(CREW, 1, 9), 1, "shadow", 9, len(self.body), self.root, HASH)
        mine, self.lines, self.new = {}, lines, {}
        for stage, (rate, delay) in lines.items():
            self.ends[stage], mine[stage] = line(rate, delay)
        for stage in (1, *lines):
            store = SnapshotStore(directory / str(stage), CREW, {1: layouts[1]})
            if stage != 1:
                store.put(1, have, self.body)
                if stage in (lies or {}):
                    self.lie(store, lies[stage])
            spec, kept = specs[stage], arriving if arriving is not None and stage == 1 else {}
            recorder, limits = Recorder(spec, settings), FrameLimits(32, 61, 64)
            local = LocalStage(
                runtimes[stage],
                spec,
                limits,
                layouts,
                settings,
                "float32",
                recorder,
                store,
                arriving=kept,
            )
            streams = mine if stage == 1 else {1: self.ends[stage]}
            again = (lambda other, stage=stage: self.again(stage, other)) if joined else None
            self.peers[stage] = StatePeer(
                local, Fence(Place(CREW, stage, 9), 4), streams, inline, again
            )

    async def again(self, stage, other):
        """A new line between two of whom the first has asked before the second, as their network
        processes make it."""
        if stage not in self.new:
            self.new[stage], self.new[other] = line(*self.lines[other if stage == 1 else stage])
        return self.new.pop(stage)

    async def cut(self, holder, after):
        await trio.sleep(after)
        end = self.ends[holder]
        await end.aclose()
        await end.other.aclose()

    def lie(self, store, what):
        read = store.read

        def lying(stage):
            kept, body = read(stage)
            return kept, memoryview(what(bytearray(body)))

        store.read = lying

    async def fetch(self, *holders):
        state = error = None
        async with trio.open_nursery() as nursery:
            for peer in self.peers.values():
                nursery.start_soon(peer.run)
            await trio.sleep(1.0)
            before = trio.current_time()
            try:
                state = await self.peers[1].fetch.snapshot(holders, 9, self.root)
            except PeerError as caught:
                error = caught
            self.took = trio.current_time() - before
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        assert all(
            torch.equal(state.weights[name], tensor) for name, tensor in self.weights.items()
        )

    def gave(self):
        """Holder → the share of the snapshot that came from it."""
        return {stage: end.sent / len(self.body) for stage, end in self.ends.items()}

    @property
    def refused(self):
        return self.peers[1].channel.refused


@pytest.fixture
def crew(models, tmp_path):
    """Every call is another crew; the disks are those of before."""
    return lambda lines, **more: Crew(copy.deepcopy(models["llama"]), tmp_path, lines, **more)


async def test_two_who_name_one_snapshot_give_it_together(crew, autojump_clock):
    """50 ms away, in half the time that one of them needs."""
    alone = crew({0: (2e4, 0.05)})
    await alone.fetch(0)
    both = crew({0: (2e4, 0.05), 2: (2e4, 0.05)})
    await both.fetch(0, 2)
    assert 1.8 < alone.took / both.took <= 2.0
    assert all(0.4 < share < 0.7 for share in both.gave().values())
    assert both.peers[1].channel.progress > len(both.body) / CHUNK, (
        "and the crew is shown that something comes"
    )
    assert not both.refused


async def test_of_three_unlike_lines_each_gives_its_part(crew, autojump_clock):
    three = crew({0: (500.0, 0.05), 2: (2000.0, 0.05), 3: (1000.0, 0.05)})
    await three.fetch(0, 2, 3)
    # a header goes with each chunk
    assert three.took == pytest.approx(1.1 * len(three.body) / 3500.0, rel=0.2)
    gave = three.gave()
    assert gave[0] < gave[3] < gave[2]


async def test_a_holder_that_dies_midway_is_made_up_for(crew, autojump_clock):
    one = crew({0: (2e3, 0.0), 2: (2e3, 0.0)})
    async with trio.open_nursery() as nursery:

        async def die():
            await trio.sleep(15.0)
            await one.ends[2].aclose()

        nursery.start_soon(die)
        await one.fetch(0, 2)
    assert 0.1 < one.gave()[2] < 0.4
    assert sum(one.gave().values()) < 1.2


def wrong(body):
    for at in range(5, len(body), PIECE // 2):  # whichever pieces it is asked for
        body[at] ^= 1
    return body


@pytest.mark.parametrize("liar", [0, 2])
async def test_who_lies_costs_one_fetch_and_is_blamed_once_it_alone_gave_all(
    crew, autojump_clock, liar
):
    one = crew({0: (2e4, 0.0), 2: (2e4, 0.0)}, lies={liar: wrong})
    await one.fetch(0, 2)
    assert sum(one.gave().values()) < (3.4 if liar == 0 else 2.3)
    assert one.refused == ({"hash": 1} if liar == 0 else {})


async def test_where_everybody_lies_nothing_is_taken(crew, autojump_clock):
    one = crew({0: (2e4, 0.0), 2: (2e4, 0.0)}, lies={0: wrong, 2: wrong})
    with pytest.raises(BadMessage) as caught:
        await one.fetch(0, 2)
    assert caught.value.reason == "hash"
    assert one.refused == {"hash": 2}


async def test_who_answers_with_another_size_gives_none_of_it(crew, autojump_clock):
    one = crew({0: (2e4, 0.0), 2: (2e4, 0.0)}, lies={2: lambda body: body + body})
    await one.fetch(0, 2)
    assert one.refused == {"size": 2}


async def test_what_came_from_two_is_completed_by_a_third_in_the_next_crew(crew, autojump_clock):
    arriving = {}
    first = crew({0: (2e3, 0.0), 2: (2e3, 0.0)}, arriving=arriving)
    with trio.move_on_after(12.0):
        await first.fetch(0, 2)
    (root, begun), size = arriving[1], len(first.body)
    assert root == first.root
    gaps = begun.gaps
    missing = sum(until - at for at, until in gaps)
    assert 0.4 * size < missing < 0.9 * size
    assert len(gaps) > 1
    second = crew({3: (1e4, 0.0)}, arriving=arriving)
    await second.fetch(3)
    assert second.gave()[3] == pytest.approx(missing / size, rel=0.12)
    # that crew ended before it was judged: the next has it as it is
    judged = crew({0: (2e3, 0.0)}, arriving=arriving)
    await judged.fetch(0)
    assert judged.gave()[0] < 0.1


@pytest.mark.parametrize("liar", [None, 3])
async def test_what_was_given_before_may_be_the_lie(crew, autojump_clock, liar):
    arriving = {}
    first = crew({2: (2e3, 0.0)}, lies={2: lambda body: bytearray(len(body))}, arriving=arriving)
    with trio.move_on_after(20.0):
        await first.fetch(2)
    assert arriving
    second = crew({3: (1e4, 0.0)}, lies={3: wrong} if liar else {}, arriving=arriving)
    if liar is None:
        await second.fetch(3)
        assert not second.refused
    else:
        with pytest.raises(BadMessage):
            await second.fetch(3)
        assert second.refused == {"hash": 1}


async def test_a_line_that_is_cut_and_there_again_goes_on_where_it_was(crew, autojump_clock):
    """With a single holder: nobody else has the snapshot, and none of it is sent twice but what was
    on its way."""
    one = crew({0: (2e3, 0.05)}, joined=True)
    whole = len(one.body) / 2e3
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.cut, 0, whole / 2)
        await one.fetch(0)
    assert 0.3 < one.gave()[0] < 0.7
    assert one.took < 1.5 * whole


async def test_a_line_that_does_not_come_back_is_not_waited_for_ever(crew, autojump_clock):
    one = crew({0: (2e3, 0.05)}, joined=True)

    async def never(stage, other):
        await trio.sleep_forever()

    one.again = never
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.cut, 0, 15.0)
        with pytest.raises(PeerError):
            await one.fetch(0)
    assert one.peers[1].channel.gone == {0: "closed"}
    assert 60.0 < one.took < 90.0, "it was waited for, and not for ever"
