"""Copies that nobody can vouch for, and copies that do not fit: what is taken instead, and what is
said of the others."""

import copy

import pytest
import torch
from msgspec.structs import replace

from swarmnode.config import TrainingConfig
from swarmnode.stages import recovery
from swarmnode.stages.pipeline import CrewSettings
from swarmnode.stages.transfer import (
    Fetcher,
    Found,
    RecoveryOrder,
    RecoverySettings,
    Run,
    SourceKind,
    StageState,
    Verdict,
    encode_state,
    load_weights,
    run_one,
    trained,
    work_of,
)
from swarmnode.stages.wire import Have, StageSpec, root_of
from tests.support.lost_stages import Fleet, quiet, rows_of

SETTINGS = CrewSettings(b"b" * 32, "float32")
CFG = TrainingConfig(per_device_train_tokens=64)
LOST = 1
SPEC = StageSpec(LOST, 4, LOST, LOST + 1, False)
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture
def fleet(models, tmp_path):
    made = []

    def build(keepers=(), **settings):
        chosen = RecoverySettings(
            **{
                "snapshot_every": 1,
                "seconds": 30.0,
                "neighbour_seconds": 30.0,
                "healings": 0,
                **settings,
            }
        )
        made.append(
            Fleet(
                copy.deepcopy(models["llama"]),
                [1, 1, 1, 1],
                tmp_path / "crew",
                SETTINGS,
                chosen,
                Run(),
                keepers,
            )
        )
        return made[-1]

    yield build
    for one in made:
        one.close()


async def learn(crew, steps, first=0, rate=1e-4):
    for number in range(first, first + steps):
        assert (await crew.head.update(rows_of(number), CFG, 30.0, rate)).refused is None
    await quiet()


def weights_of(fleet):
    return {
        name: tensor.detach().clone()
        for name, tensor in trained(fleet.stations[LOST].runtime).items()
    }


def lie(fleet, place, holder, weights, step=3):
    """`holder` keeps, and names the hash of, other weights of the lost stage than were pushed to
    it."""
    body = bytearray(encode_state(StageState(step, weights), fleet.layouts[LOST], "exact"))
    fleet.stations[holder].store.put(
        LOST, Have(place, 1, "shadow", step, len(body), root_of(body), b"h" * 32), body
    )


def moved(weights, by):
    generator = torch.Generator().manual_seed(9)
    return {
        name: tensor + by * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


async def test_no_holder_says_how_fast_a_stage_learns_from_then_on(fleet):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 3)
        _, true = mine.stations[0].store.read(LOST)
        kept = mine.stations[0].store.get(LOST)
        have = Have(
            crew.head.place,
            1,
            "shadow",
            3,
            len(true),
            kept.root,
            kept.hash,
            squared_norm=kept.squared_norm,
            factor=1e-30,
        )
        mine.stations[0].store.put(LOST, have, bytearray(true))
    mine.kill(LOST)
    async with mine.up() as crew:
        assert (mine.restored[LOST].kind, mine.restored[LOST].holder) == (SourceKind.SNAPSHOT, 0)
        assert crew.members[LOST].optimizer.lr_scale.factor == 1.0
        before = weights_of(mine)
        await learn(crew, 1, 3)
        assert any(
            not torch.equal(tensor, before[name]) for name, tensor in weights_of(mine).items()
        )


async def chain(fleet, probe):
    """What the policy says of it now, with what is in every stage."""
    work, x = work_of(probe, fleet.limits), b""
    for station in fleet.stations:
        x = run_one(station.runtime, work, x, fleet.crew_settings.codec)
    return x


@pytest.mark.parametrize(
    ("liar", "step", "tail"), [(0, 2, True), (2, 3, True), (2, 2**50, True), (0, 3, False)]
)
async def test_no_one_member_says_by_what_a_stage_is_judged(fleet, liar, step, tail):
    """It names probes that the base's stage would pass, and a true copy would not."""
    mine = fleet(snapshot_every=100, gate_kl=0.002)
    base = weights_of(mine)
    mine.stations[LOST].base = lambda: base
    async with mine.up() as crew:
        await learn(crew, 1, rate=0.05)
        old = weights_of(mine)
        await learn(crew, 2, 1)
        for holder in (0, 2):
            lie(mine, crew.head.place, holder, old, 1)
    mine.kill(LOST).base = lambda: base
    if not tail:
        mine.stations[3].watch.probes.clear()
    load_weights(mine.stations[LOST].runtime, base)
    watch = mine.stations[liar].watch
    watch.probes[:] = [
        replace(probe, step=step, logprobs=await chain(mine, probe)) for probe in watch.probes
    ]
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        assert (mine.restored[LOST].kind, mine.restored[LOST].step) == (SourceKind.SNAPSHOT, 1), (
            mine.restored[LOST].tried
        )


@pytest.mark.parametrize(("liar", "by"), [(0, 0.02), (2, 1.0)], ids=["passes the gate", "noise"])
async def test_of_two_neighbours_copies_that_differ_the_better_one_is_taken(fleet, liar, by):
    mine = fleet(gate_kl=0.5, gate_nll=0.5)
    async with mine.up() as crew:
        await learn(crew, 3)
        true = weights_of(mine)
        lie(mine, crew.head.place, liar, moved(true, by))
    mine.kill(LOST)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        got = mine.restored[LOST]
        assert (got.kind, got.step, got.holder, got.tried) == (SourceKind.SNAPSHOT, 3, 2 - liar, ())
        assert got.verdict is not None
        assert all(torch.equal(tensor, true[name]) for name, tensor in weights_of(mine).items())
        # each of them, and then the better one
        assert [phase for stage, phase, rung in mine.told] == ["loading", "probation"] * 3
        await learn(crew, 1, 3)


async def test_neither_of_two_copies_that_differ_is_spared_the_gate(fleet):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 3)
        for holder, by in ((0, 1.0), (2, 2.0)):
            lie(mine, crew.head.place, holder, moved(weights_of(mine), by))
    mine.kill(LOST)
    async with mine.up() as crew:
        assert crew is None
        assert str(mine.failed[LOST]).count("R2 snapshot: KL") == 2


async def test_nobody_but_ring_neighbours_is_asked_for_a_shadow(fleet):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 3)
        mine.stations[3].store._layouts[LOST] = mine.layouts[LOST]
        lie(mine, crew.head.place, 3, moved(weights_of(mine), 1.0))
    mine.kill(LOST)
    async with mine.up():
        got = mine.restored[LOST]
        assert (got.kind, got.holder, got.tried) == (SourceKind.SNAPSHOT, 0, ())
        assert len(mine.told) == 2  # two neighbours agree: nothing had to be compared


@pytest.mark.parametrize("same", [True, False])
async def test_who_keeps_the_whole_policy_gives_a_part_of_what_the_neighbours_vouch_for(
    fleet, monkeypatch, same
):
    mine = fleet(keepers=(3,))
    async with mine.up() as crew:
        await learn(crew, 3)
        true = weights_of(mine)
        if not same:
            lie(mine, crew.head.place, 3, moved(true, 1.0))
    mine.kill(LOST)
    asked, snapshot = [], Fetcher.snapshot
    monkeypatch.setattr(
        Fetcher,
        "snapshot",
        lambda peer, holders, *more: asked.append(holders) or snapshot(peer, holders, *more),
    )
    async with mine.up():
        assert asked == [[0, 2, 3] if same else [0, 2]]
        assert (mine.restored[LOST].kind, mine.restored[LOST].tried) == (SourceKind.SNAPSHOT, ())
        assert all(torch.equal(tensor, true[name]) for name, tensor in weights_of(mine).items())


def test_without_a_probe_no_disputed_copy_is_trusted():
    one = RecoveryOrder(
        Found(snapshots={0: 10, 2: 10}, roots={0: b"a", 2: b"b"}, base=True),
        SPEC,
        10,
        Run(),
        RecoverySettings(),
    )
    first, second = one.rivals()
    assert (first.disputed, first.exact, second.disputed, second.exact) == (
        True,
        False,
        True,
        False,
    )
    assert one.judge(first, None, 0) == "next"
    assert one.judge(first, Verdict(0.001, 0.0, 100), 0) == "rejoin"
    assert (
        one.damage(Verdict(0.001, 0.0, 100))
        < one.damage(Verdict(0.001, 0.04, 100))
        < one.damage(Verdict(0.1, -0.1, 100))
    )
    assert one.damage(Verdict(0.0, 0.0, 0, finite=False)) == float("inf")
    one.prefer(second)
    assert (one.next(), one.rivals()) == (second, ())
    agreed = RecoveryOrder(
        Found(snapshots={0: 10, 2: 9}, roots={0: b"a", 2: b"b"}),
        SPEC,
        10,
        Run(),
        RecoverySettings(),
    )
    assert agreed.rivals() == ()  # of different steps
    assert agreed.judge(agreed.next(), None, 0) == "rejoin"


FITS = {
    "the bytes": (Fetcher, "snapshot"),
    "the weights": (recovery, "load_weights"),
    "a past micro-batch": (recovery, "run_one"),
}


@pytest.mark.parametrize("where", FITS)
async def test_a_rung_that_does_not_fit_is_not_taken_and_the_next_one_is(fleet, monkeypatch, where):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 3)
        true = weights_of(mine)
    mine.kill(LOST)
    owner, name = FITS[where]
    real, calls = getattr(owner, name), []

    def once(*args, **keys):
        calls.append(1)
        if len(calls) == 1:
            for parameter in mine.stations[LOST].runtime.parameters():
                parameter.grad = torch.ones_like(parameter)  # what it had taken by then
            raise OUT
        return real(*args, **keys)

    monkeypatch.setattr(owner, name, once)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        got = mine.restored[LOST]
        assert (got.kind, got.holder, got.tried) == (
            SourceKind.SNAPSHOT,
            2,
            ((SourceKind.SNAPSHOT, "out of memory"),),
        )
        assert all(torch.equal(tensor, true[name]) for name, tensor in weights_of(mine).items())
        assert all(parameter.grad is None for parameter in mine.stations[LOST].runtime.parameters())
        await learn(crew, 1, 3)


async def test_a_stage_for_which_nothing_fits_fails_with_each_reason(fleet, monkeypatch):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 3)
    mine.kill(LOST)

    def never(*args):
        raise OUT

    monkeypatch.setattr(recovery, "load_weights", never)
    async with mine.up() as crew:
        assert crew is None
        assert str(mine.failed[LOST]).count("R2 snapshot: out of memory") == 2
        assert "R4 synthesis: out of memory" in str(mine.failed[LOST])


async def test_a_defect_of_our_own_is_no_lack_of_memory(fleet, monkeypatch):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 1)
    mine.kill(LOST)
    monkeypatch.setattr(recovery, "load_weights", lambda *args: 1 / 0)
    async with mine.up():
        assert isinstance(mine.failed[LOST], ZeroDivisionError)
