"""A member of a crew is killed and gets its stage back by every rung; then the crew goes on as if
nothing had been."""

import copy

import pytest
import torch
import trio
from peft import LoraConfig, get_peft_model

from swarmnode.config import TrainingConfig
from swarmnode.errors import PeerTimeout
from swarmnode.stages.pipeline import CrewSettings
from swarmnode.stages.recovery import Replica, base_adapter
from swarmnode.stages.transfer import (
    RAN,
    SNAPSHOTS,
    Fetcher,
    RecoverySettings,
    Run,
    SourceKind,
    StageState,
    encode_state,
    find_snapshots,
    host_copy,
    trained,
)
from swarmnode.stages.wire import Have, root_of
from tests.support.lost_stages import CREW, Fleet, quiet, rows_of, snapshots_in

pytestmark = pytest.mark.slow

SETTINGS = CrewSettings(b"b" * 32, "float32")
CFG = TrainingConfig(per_device_train_tokens=64)
SPLITS = {2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}


@pytest.fixture
def fleet(models, tmp_path):
    made = []

    def build(
        stages=4,
        kind="llama",
        settings=None,
        crew=SETTINGS,
        run=None,
        model=None,
        name="crew",
        **keys,
    ):
        chosen = RecoverySettings(
            **{"snapshot_every": 1, "seconds": 30.0, "neighbour_seconds": 30.0, **(settings or {})}
        )
        one = Fleet(
            model or copy.deepcopy(models[kind]),
            SPLITS[stages],
            tmp_path / name,
            crew,
            chosen,
            run or Run(),
            **keys,
        )
        made.append(one)
        return one

    yield build
    for one in made:
        one.close()


async def learn(crew, steps, first=0, rate=1e-4):
    for number in range(first, first + steps):
        result = await crew.head.update(rows_of(number), CFG, 30.0, rate)
        assert result.refused is None
    await quiet()


def flush(fleet):
    for station in fleet.stations:
        station.journal.flush()


UNFAILED = {}


async def unfailed(build, steps, **keys):
    """Weights of a crew that nothing happened to; one for each kind of crew."""
    key = (steps, keys.get("stages", 4), keys.get("kind", "llama"), "model" in keys)
    if key not in UNFAILED:
        fleet = build(name="unfailed", **keys)
        async with fleet.up() as crew:
            await learn(crew, steps)
        UNFAILED[key] = fleet.weights()
    return UNFAILED[key]


def apart(mine, theirs):
    """Largest difference of any weight."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


async def lose_and_go_on(fleet, lost, disk=False, before=3, after=2, prepare=None):
    """Trains, kills `lost`, restores them, trains on → weights at the end."""
    async with fleet.up() as crew:
        for number in range(before):
            await learn(crew, 1, number)
            flush(fleet)
    for stage in lost:
        station = fleet.kill(stage, disk)
        if prepare is not None:
            prepare(station)
    async with fleet.up() as crew:
        assert crew is not None, fleet.failed
        await learn(crew, after, before)
    return fleet.weights()


@pytest.mark.parametrize(
    ("stages", "lost", "kind"), [(2, 0, "llama"), (3, 2, "llama-tied"), (4, 3, "qwen2")]
)
async def test_r0_a_node_that_comes_back_goes_on_exactly(fleet, stages, lost, kind):
    expected = await unfailed(fleet, 5, stages=stages, kind=kind)
    mine = fleet(stages, kind)
    assert apart(await lose_and_go_on(mine, [lost], disk=True), expected) == 0.0
    got = mine.restored[lost]
    assert (got.kind, got.step, got.tried, got.healings) == (SourceKind.JOURNAL, 3, (), ())
    assert got.verdict.kl < 5e-3
    assert mine.told == [(lost, "loading", 0), (lost, "probation", 0)]


@pytest.mark.parametrize(
    ("stages", "lost", "kind"), [(3, 0, "llama-tied"), (3, 1, "llama"), (4, 2, "qwen3")]
)
async def test_r2_a_fresh_shadow_goes_on_exactly(fleet, stages, lost, kind):
    expected = await unfailed(fleet, 5, stages=stages, kind=kind)
    mine = fleet(stages, kind)
    assert apart(await lose_and_go_on(mine, [lost]), expected) == 0.0
    got = mine.restored[lost]
    assert (got.kind, got.step) == (SourceKind.SNAPSHOT, 3)
    assert got.holder in ((lost - 1) % stages, (lost + 1) % stages)
    assert got.verdict.kl < 0.02


async def test_r2_under_an_adapter_goes_on_exactly(fleet, models):
    make = lambda: adapted(copy.deepcopy(models["llama-tied"]))
    expected = await unfailed(fleet, 5, model=make(), run=Run(adapter=True, pretrained=True))
    mine = fleet(model=make(), run=Run(adapter=True, pretrained=True))
    frozen = {
        n: p.clone()
        for n, p in mine.stations[1].runtime.model.named_parameters()
        if not p.requires_grad
    }
    assert apart(await lose_and_go_on(mine, [1]), expected) == 0.0
    assert mine.restored[1].kind == SourceKind.SNAPSHOT
    assert all(
        torch.equal(frozen[n], p)
        for n, p in mine.stations[1].runtime.model.named_parameters()
        if n in frozen
    )


@pytest.mark.parametrize("form", ["exact", "small"])
async def test_r2_an_old_shadow_is_as_far_off_as_the_steps_it_lacks(fleet, form):
    """Step 3, and shadows of step 2: what is lost is one step of one stage, 1e-4 per weight; in
    bfloat16 2⁻⁹ of a weight besides."""
    expected = await unfailed(fleet, 3)
    mine = fleet(settings={"snapshot_every": 2, "exact_bytes": 2**28 if form == "exact" else 0})
    async with mine.up() as crew:
        await learn(crew, 3)
    mine.kill(1)
    async with mine.up() as crew:
        got, weights = mine.restored[1], mine.weights()
        assert (got.kind, got.step) == (SourceKind.SNAPSHOT, 2)
        assert got.verdict.kl < 0.02
        assert bool(got.kept.state.counts) == (form == "exact")
        assert crew.members[1].optimizer.lr_scale.warmup == (0 if form == "exact" else 10)
        for name, tensor in expected.items():
            if name.startswith("1 "):
                bound = 1.2e-4 + (0.0 if form == "exact" else 2**-8 * float(tensor.abs().max()))
                assert 0 < float((weights[name] - tensor).abs().max()) <= bound, name
            else:
                assert torch.equal(weights[name], tensor)
        await learn(crew, 1, 3)


async def test_r2_is_used_when_steps_are_larger_than_the_gate_allows(
    fleet,
):
    mine = fleet(settings={"snapshot_every": 2}, run=Run(pretrained=True))
    async with mine.up() as crew:
        await learn(crew, 3, rate=2e-3)
    mine.kill(1)
    async with mine.up():
        got = mine.restored[1]
        assert (got.kind, got.step, got.tried, got.healings) == (SourceKind.SNAPSHOT, 2, (), ())
        assert got.verdict.kl > 0.02


async def test_r2_is_taken_where_nothing_passes_the_gate_but_both_neighbours_say_that_it_was_so(
    fleet,
):
    """A crew whose policy moved further in a few steps than the gate allows refused its own copies,
    and was founded again for ever."""
    mine = fleet(
        settings={"snapshot_every": 2, "gate_kl": 1e-9, "gate_nll": 1e-9, "healings": 0},
        run=Run(pretrained=True),
    )
    async with mine.up() as crew:
        await learn(crew, 3, rate=2e-3)
    mine.kill(1)
    async with mine.up() as crew:
        got = mine.restored[1]
        assert (got.kind, got.step, got.healings) == (SourceKind.SNAPSHOT, 2, ())
        assert [kind for kind, _ in got.tried][:2] == [SourceKind.SNAPSHOT] * 2
        assert got.verdict.kl > 1e-8
        await learn(crew, 1, 3)


@pytest.mark.parametrize("left", [(0,), ()])
async def test_without_vouchers_a_state_as_close_as_the_base_is_used(fleet, left):
    """One ring neighbour alone had a copy, of an older step: a crew at 100 ms refused it, and the
    base, and began anew from the base."""
    mine = fleet(
        settings={"snapshot_every": 2, "gate_kl": 1e-2, "copy_factor": 1e-7, "healings": 0},
        run=Run(pretrained=True),
    )
    read = base_adapter(mine.stations[1].runtime)
    async with mine.up() as crew:
        await learn(crew, 3, rate=5e-3)
    mine.kill(1).base = read
    for stage in {0, 2} - set(left):
        mine.lose_copy(1, at=stage)
    async with mine.up() as crew:
        got = mine.restored[1]
        assert got.kind == (SourceKind.SNAPSHOT if left else SourceKind.BASE)
        assert got.verdict.kl > 1e-2, "or it would have passed"
        await learn(crew, 1, 3)


async def test_r2_a_restarted_crew_keeps_newer_copies_until_it_catches_up(
    fleet,
):
    mine = fleet(settings={"snapshot_every": 2})
    async with mine.up() as crew:
        await learn(crew, 4)
    known = lambda: [
        (copy.first, copy.step) for copy in find_snapshots(mine.stations[0].directory / SNAPSHOTS)
    ]
    assert known() == [(0, 4), (1, 4), (3, 4)]
    async with mine.up(step=1) as crew:
        await learn(crew, 1)
    assert sorted(known()) == [(0, 2), (0, 4), (1, 2), (1, 4), (3, 2), (3, 4)]
    mine.kill(1)
    async with mine.up() as crew:
        assert (mine.restored[1].kind, mine.restored[1].step) == (SourceKind.SNAPSHOT, 2)
        await learn(crew, 2)
        assert crew.head.participant.step == 4
    assert known() == [(0, 4), (1, 4), (3, 4)]


@pytest.mark.parametrize(("lost", "kind"), [([0], "qwen3"), ([0, 3], "llama-tied")])
async def test_both_ends_of_a_tied_embedding_stay_one_tensor_whoever_was_lost(fleet, lost, kind):
    """Shadows are of step 2 of 3: an end that is restored takes the other's tensor as it is now,
    and its moments."""
    mine = fleet(kind=kind, settings={"snapshot_every": 2})
    async with mine.up() as crew:
        await learn(crew, 3)
        now = crew.members[0].runtime.embedding().detach().clone()
    for stage in lost:
        mine.kill(stage)
    async with mine.up() as crew:
        ends = [crew.members[i].runtime.embedding() for i in (0, 3)]
        assert torch.equal(*ends)
        assert torch.equal(ends[0], now) is (len(lost) == 1)
        await learn(crew, 2, 3, rate=1e-3)
        assert torch.equal(*ends)
        assert not torch.equal(ends[0], now)


async def test_r1_a_replica_is_taken_verbatim_and_what_its_outer_step_keeps_is_handed_on(fleet):
    mine = fleet(3, settings={"snapshot_every": 100})
    async with mine.up() as crew:
        await learn(crew, 2)
    theirs = {
        name: host_copy(tensor) + 1e-5 for name, tensor in trained(mine.stations[1].runtime).items()
    }
    delta = {name: torch.ones_like(tensor) for name, tensor in theirs.items()}

    async def replica():
        return Replica(theirs, delta)

    mine.kill(1).replica = replica
    async with mine.up() as crew:
        got = mine.restored[1]
        assert got.kind == SourceKind.REPLICA
        assert all(
            torch.equal(tensor, theirs[name])
            for name, tensor in trained(mine.stations[1].runtime).items()
        )
        assert got.kept.outer is delta
        await learn(crew, 1, 2)


@pytest.mark.parametrize("lost", [[1, 2], [3, 0]])
async def test_any_two_stages_of_four_may_be_lost_at_once(fleet, lost):
    expected = await unfailed(fleet, 5, kind="llama-tied")
    mine = fleet(kind="llama-tied")
    assert apart(await lose_and_go_on(mine, lost), expected) == 0.0
    assert {mine.restored[stage].kind for stage in lost} == {SourceKind.SNAPSHOT}


async def test_three_neighbours_lost_together_end_the_crew_with_every_reason(fleet, autojump_clock):
    mine = fleet(settings={"seconds": 5.0, "neighbour_seconds": 5.0})
    async with mine.up() as crew:
        await learn(crew, 1)
    for stage in (0, 1, 2):
        mine.kill(stage)
    async with mine.up() as crew:
        assert crew is None
        assert "R4 synthesis: a neighbour is lost too" in str(mine.failed[1])
        # it has its shadow, and nobody to be judged with
        assert isinstance(mine.failed[0], PeerTimeout)


def noise_for(runtime):
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in trained(runtime).items()
    }


async def test_noise_does_not_pass_the_gate_and_the_next_rung_is_taken(fleet):
    expected = await unfailed(fleet, 5)
    mine = fleet(settings={"snapshot_every": 1, "healings": 0})

    async def noise():
        return Replica(noise_for(mine.stations[2].runtime))

    async def nothing():
        tensors = trained(mine.stations[2].runtime)
        return Replica(
            {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
        )

    for source, said in ((noise, "KL"), (nothing, "not finite")):
        mine = fleet(settings={"snapshot_every": 1, "healings": 0}, name=said)
        after = await lose_and_go_on(
            mine, [2], prepare=lambda station, source=source: setattr(station, "replica", source)
        )
        assert apart(after, expected) == 0.0
        got = mine.restored[2]
        assert got.kind == SourceKind.SNAPSHOT
        assert [rung for rung, _ in got.tried] == [SourceKind.REPLICA]
        assert said in got.tried[0][1]


async def test_r3_the_base_adapter_when_nobody_has_a_shadow(fleet, models):
    model = adapted(copy.deepcopy(models["llama"]))
    mine = fleet(
        3, model=model, settings={"snapshot_every": 100}, run=Run(adapter=True, pretrained=True)
    )
    untrained = {name: t.clone() for name, t in trained(mine.stations[1].runtime).items()}
    read = base_adapter(mine.stations[1].runtime)
    async with mine.up() as crew:
        await learn(crew, 2)
    mine.kill(1).base = read
    async with mine.up() as crew:
        got = mine.restored[1]
        assert (got.kind, got.step) == (SourceKind.BASE, None)
        assert all(
            torch.equal(t, untrained[name]) for name, t in trained(mine.stations[1].runtime).items()
        )
        assert crew.members[1].optimizer.lr_scale.warmup == 10
        await learn(crew, 1, 2)


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()


async def test_r3_takes_the_newest_adapter_that_could_not_be_had_before(fleet, models, monkeypatch):
    """Both shadows cannot be fetched when it is their turn, and can a little later: not the
    untrained adapter is taken, but that one."""
    mine = fleet(
        3, model=adapted(copy.deepcopy(models["llama"])), run=Run(adapter=True, pretrained=True)
    )
    read = base_adapter(mine.stations[1].runtime)
    async with mine.up() as crew:
        await learn(crew, 2)
    before = {name: t.clone() for name, t in trained(mine.stations[1].runtime).items()}
    mine.kill(1).base = read
    fetch, asked = Fetcher.snapshot, []

    async def late(peer, holders, step, root):
        asked.append(holders)
        if len(asked) <= 2:
            raise PeerTimeout(f"stages {holders}")
        return await fetch(peer, holders, step, root)

    monkeypatch.setattr(Fetcher, "snapshot", late)
    async with mine.up() as crew:
        got = mine.restored[1]
        assert [rung for rung, _ in got.tried] == [SourceKind.SNAPSHOT, SourceKind.SNAPSHOT]
        assert got.kind == SourceKind.BASE
        assert all(
            torch.equal(t, before[name]) for name, t in trained(mine.stations[1].runtime).items()
        )
        await learn(crew, 1, 2)


async def test_r3_does_not_take_an_adapter_that_was_judged(fleet, models):
    """A neighbour's shadow is noise: the gate refuses it, and the untrained adapter comes next,
    which passes after two small steps."""
    settings = {"snapshot_every": 100, "healings": 0}
    mine = fleet(
        3,
        model=adapted(copy.deepcopy(models["llama"])),
        run=Run(adapter=True, pretrained=True),
        settings=settings,
    )
    runtime = mine.stations[1].runtime
    untrained, read = (
        {name: t.clone() for name, t in trained(runtime).items()},
        base_adapter(runtime),
    )
    async with mine.up() as crew:
        await learn(crew, 2, rate=1e-5)
        body = bytearray(encode_state(StageState(1, noise_for(runtime)), mine.layouts[1], "exact"))
        mine.stations[0].store.put(
            1, Have(crew.head.place, 1, "shadow", 1, len(body), root_of(body), b"h" * 32), body
        )
    mine.kill(1).base = read
    async with mine.up():
        got = mine.restored[1]
        assert [rung for rung, _ in got.tried] == [SourceKind.SNAPSHOT]
        assert "KL" in got.tried[0][1]
        assert got.kind == SourceKind.BASE
        assert all(
            torch.equal(t, untrained[name]) for name, t in trained(mine.stations[1].runtime).items()
        )


@pytest.mark.parametrize("lost", [0, 3])
async def test_the_probe_survives_head_and_tail(fleet, lost):
    mine = fleet()
    async with mine.up() as crew:
        await learn(crew, 2)
        probes = {s.spec.index: list(s.watch.probes) for s in mine.stations}
    assert len(probes[3]) == 2 * 4  # micro-batches of two steps
    assert probes[0] == probes[2] == probes[3]
    mine.kill(lost)
    async with mine.up() as crew:
        assert mine.restored[lost].verdict.tokens > 8


async def damaged_and_healed(fleet, models, lost, method, name, **settings):
    """Restored by R4 in a crew of a Llama of random weights."""
    mine = fleet(settings={"snapshot_every": 100, "synthesis": method, **settings}, name=name)
    async with mine.up() as crew:
        for number in range(2):
            result = await crew.head.update(rows_of(number, 40), CFG, 100.0, 1e-4)
            assert result.refused is None
        await quiet()
    mine.kill(lost)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        await learn(crew, 1, 3)
    return mine.restored[lost]


@pytest.mark.parametrize(("lost", "method"), [(1, "checkfree"), (2, "identity")])
async def test_r4_healing_takes_away_more_than_half_of_the_damage_on_what_it_was_not_healed_with(
    fleet, models, lost, method
):
    hurt = await damaged_and_healed(fleet, models, lost, method, "hurt", gate_kl=1e9, gate_nll=1e9)
    assert (hurt.kind, hurt.healings, hurt.kept.lr_scale.factor, hurt.kept.lr_scale.warmup) == (
        SourceKind.SYNTHESIS,
        (),
        1.0,
        10,
    )
    half = hurt.verdict.kl / 2
    assert half > 0.05
    healed = await damaged_and_healed(
        fleet, models, lost, method, "healed", gate_kl=half, gate_nll=1e9, healings=1
    )
    assert (healed.kind, len(healed.healings)) == (SourceKind.SYNTHESIS, 1)
    assert healed.verdict.kl < half
    assert healed.healings[0].after < healed.healings[0].before / 2
    assert not healed.kept.state.counts


async def test_r4_that_cannot_be_healed_is_not_taken(fleet):
    mine = fleet(
        settings={"snapshot_every": 100, "gate_kl": 1e-6, "healings": 1, "healing_steps": 5}
    )
    async with mine.up() as crew:
        await learn(crew, 3)
    mine.kill(2)
    async with mine.up() as crew:
        assert crew is None
        assert "R4 synthesis: KL" in str(mine.failed[2])
        assert "after 1 healings" in str(mine.failed[2])


PAPER = CrewSettings(b"b" * 32, "float32", swapped=True)


@pytest.mark.parametrize(("lost", "kind"), [(0, "llama"), (1, "llama-tied"), (3, "llama-tied")])
async def test_paper_mode_trains_swapped_and_restores_without_any_storage(fleet, lost, kind):
    mine = fleet(kind=kind, crew=PAPER, settings={"mode": "checkfree+"}, run=Run(swapped=True))
    async with mine.up() as crew:
        await learn(crew, 3)
        before = mine.weights()
        norms = [member.optimizer.squared_norm for member in crew.members]
    mine.kill(lost, disk=True).base = lambda: pytest.fail("paper mode has no base")
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        got, after = mine.restored[lost], mine.weights()
        assert (got.kind, got.healings) == (
            SourceKind.SYNTHESIS if lost == 1 else SourceKind.COPY,
            (),
        )
        assert crew.members[lost].optimizer.lr_scale.factor == 1.1
        assert crew.members[lost].optimizer.lr_scale.warmup == 0
        name = "model.layers.0.mlp.up_proj.weight"
        if lost == 1:
            left, right = before[f"0 {name}"], before[f"2 {name}"]
            mean = (norms[0] * left + norms[2] * right) / (norms[0] + norms[2])
            assert torch.allclose(after[f"1 {name}"], mean, atol=1e-6)
        else:
            assert torch.equal(after[f"{lost} {name}"], before[f"{1 if lost == 0 else 2} {name}"])
            ends = (
                ["model.embed_tokens.weight"]
                if lost == 0
                else ["model.norm.weight", "lm_head.weight"]
            )
            assert all(torch.equal(after[f"{lost} {end}"], before[f"{lost} {end}"]) for end in ends)
        await learn(crew, 2, 3)
        if kind == "llama-tied":
            assert torch.equal(*(crew.members[i].runtime.embedding() for i in (0, 3)))
        # plain ones only
        assert all(probe.micro_batch % 2 == 0 for probe in mine.stations[0].watch.probes)
        assert mine.stations[0].watch.probes
    assert apart(mine.weights(), before) > 1e-5


@pytest.mark.parametrize("lost", [1, 3])
async def test_checkfree_averages_an_inner_stage_and_copies_an_end(fleet, lost):
    mine = fleet(settings={"mode": "checkfree"})
    async with mine.up() as crew:
        await learn(crew, 3)
        await quiet()
        before = mine.weights()
        norms = [member.optimizer.squared_norm for member in crew.members]
        assert [sorted(snapshots_in(station.store)) for station in mine.stations] == [
            [0, 3],
            [0],
            [3],
            [0, 3],
        ]
    mine.kill(lost, disk=lost == 1)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        got, after = mine.restored[lost], mine.weights()
        name = "model.layers.0.mlp.up_proj.weight"
        if lost == 1:  # though its own disk has it
            assert (got.kind, got.healings, crew.members[1].optimizer.lr_scale.factor) == (
                SourceKind.SYNTHESIS,
                (),
                1.1,
            )
            mean = (norms[0] * before[f"0 {name}"] + norms[2] * before[f"2 {name}"]) / (
                norms[0] + norms[2]
            )
            assert torch.allclose(after[f"1 {name}"], mean, atol=1e-6)
        else:
            assert (got.kind, got.step) == (SourceKind.SNAPSHOT, 3)
            assert torch.equal(after[f"3 {name}"], before[f"3 {name}"])
        await learn(crew, 1, 3)


async def test_a_neighbour_that_is_just_taking_its_seat_is_waited_for(fleet, autojump_clock):
    mine = fleet(crew=PAPER, settings={"mode": "checkfree+"}, run=Run(swapped=True))
    async with mine.up() as crew:
        await learn(crew, 1)
    mine.kill(1)
    mine.seating, began = 3.0, trio.current_time()
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        assert mine.restored[1].kind == SourceKind.SYNTHESIS
        assert 3.0 <= trio.current_time() - began < 4.0


async def test_in_paper_mode_the_stage_goes_a_tenth_faster_and_a_tied_embedding_does_not(fleet):
    mine = fleet(
        kind="llama-tied", crew=PAPER, settings={"mode": "checkfree+"}, run=Run(swapped=True)
    )
    async with mine.up() as crew:
        await learn(crew, 1)
    mine.kill(3)
    async with mine.up() as crew:
        await learn(crew, 1, 1, rate=1e-3)
        groups = crew.members[3].optimizer.adam.param_groups
        assert [(group["shared"], group["lr"]) for group in groups] == [
            (False, pytest.approx(1.1e-3)),
            (True, pytest.approx(1e-3)),
        ]


async def test_of_two_stages_that_come_back_together_none_has_to_answer_for_the_other(fleet):
    """Shadows are of step 2 of 3, so both are judged. One has a replica of noise, and the other is
    judged through it at first."""
    mine = fleet(settings={"snapshot_every": 2, "healings": 0})
    async with mine.up() as crew:
        await learn(crew, 3)

    async def noise():
        return Replica(noise_for(mine.stations[2].runtime))

    mine.kill(2).replica = noise
    mine.kill(1)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        assert [mine.restored[stage].kind for stage in (1, 2)] == [
            SourceKind.SNAPSHOT,
            SourceKind.SNAPSHOT,
        ]
        assert [rung for rung, _ in mine.restored[2].tried] == [SourceKind.REPLICA]


async def test_a_step_that_is_taken_marks_the_crew_whose_copies_are_kept(fleet):
    mine = fleet(3)
    async with mine.up() as crew:
        marks = [station.directory / "shadows" / CREW.hex() / RAN for station in mine.stations]
        assert not any(mark.exists() for mark in marks)
        await learn(crew, 1)
        assert all(mark.exists() for mark in marks)
