"""A killed member restores its stage from each source, and the crew continues."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from swarmnode.config import TrainingConfig
from swarmnode.errors import Refused
from swarmnode.stages.trainer.pipeline import WorkerSettings
from swarmnode.stages.trainer.restore import base_adapter_reader
from swarmnode.stages.trainer.stage_checkpoints import (
    CHECKPOINTS,
    RecoverySettings,
    host_copy,
    trained,
)
from swarmnode.weights.trainer.lora import freeze_a
from tests.support.lost_stages import checkpoints_in, quiet, rows_of

pytestmark = pytest.mark.slow

SETTINGS = WorkerSettings("float32")
CFG = TrainingConfig(per_device_train_tokens=64)
SPLITS = {2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}


@pytest.fixture
def fleet(models, make_fleet, tmp_path):
    def build(
        stages=4, kind="llama", settings=None, crew=SETTINGS, model=None, name="crew", **keys
    ):
        usual = {"checkpoint_every": 1, "seconds": 30.0, "neighbour_seconds": 30.0}
        chosen = RecoverySettings(**usual | (settings or {}))
        model = model or copy.deepcopy(models[kind])
        return make_fleet(model, SPLITS[stages], tmp_path / name, crew, chosen, **keys)

    return build


async def learn(crew, steps, first=0, rate=1e-4):
    for number in range(first, first + steps):
        result = await crew.head.update(rows_of(number), CFG, 30.0, rate)
        assert result.refused is None
    await quiet()


def flush(fleet):
    for station in fleet.stations:
        station.store.flush()


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


async def train(fleet, steps):
    async with fleet.up() as crew:
        for number in range(steps):
            await learn(crew, 1, number)
            flush(fleet)


async def lose_and_continue(fleet, lost, disk=False, before=3, after=2, prepare=None):
    """Train, kill `lost`, restore them, train → weights at the end."""
    await train(fleet, before)
    for stage in lost:
        station = fleet.kill(stage, disk)
        if prepare is not None:
            prepare(station)
    async with fleet.up() as crew:
        assert crew is not None, fleet.failed
        await learn(crew, after, before)
    return fleet.weights()


def source(fleet, stage):
    return fleet.restored[stage].source.name


@pytest.mark.parametrize(("stages", "lost", "kind"), [(3, 2, "llama-tied"), (4, 3, "qwen2")])
async def test_restarted_node_with_its_disk_continues_exactly(fleet, stages, lost, kind):
    expected = await unfailed(fleet, 5, stages=stages, kind=kind)
    mine = fleet(stages, kind)
    assert apart(await lose_and_continue(mine, [lost], disk=True), expected) == 0
    assert source(mine, lost) == "checkpoint"
    assert mine.restored[lost].source.step == 3


async def test_own_checkpoint_is_current_only_within_one_step(fleet):
    mine = fleet(settings={"checkpoint_every": 1000})
    await train(mine, 3)
    # at step 1 it has steps that the crew has not taken
    for step, usable in ((4, True), (9, False), (1, False)):
        mine.kill(1, disk=True)
        async with mine.up(step=step) as crew:
            assert crew is not None
            assert source(mine, 1) == "checkpoint"
            assert mine.restored[1].source.usable == usable


@pytest.mark.parametrize(("every", "found"), [(20, ("checkpoint", 1)), (1, ("neighbour", 3))])
async def test_an_own_checkpoint_comes_before_a_newer_one_of_a_member(fleet, every, found):
    mine = fleet()
    await train(mine, 1)
    station = mine.stations[1]
    path = station.directory / CHECKPOINTS / mine.identity.path(1)
    old = path.read_bytes()
    await train(mine, 2)
    path.write_bytes(old)
    mine.settings = replace(mine.settings, checkpoint_every=every)
    mine.kill(1, disk=True)
    async with mine.up(step=3):
        assert (source(mine, 1), mine.restored[1].source.step) == found


@pytest.mark.parametrize("lost", [[0, 1], [0, 3], [1, 3]])
async def test_any_two_members_of_four_come_back(fleet, lost):
    expected = await unfailed(fleet, 5)
    mine = fleet()
    assert apart(await lose_and_continue(mine, lost), expected) == 0
    assert {source(mine, stage) for stage in lost} == {"neighbour"}


@pytest.mark.parametrize("lost", [[1], [0, 2]])
async def test_tied_embeddings_stay_one_tensor(fleet, lost):
    mine = fleet(3, "llama-tied")
    weights = await lose_and_continue(mine, lost)
    head, tail = weights["0 model.embed_tokens.weight"], weights["2 lm_head.weight"]
    assert torch.equal(head, tail)


async def test_any_one_disk_may_be_lost(fleet):
    """Every node is killed, and one comes back with an empty disk."""
    expected = await unfailed(fleet, 5)
    for empty in range(4):
        mine = fleet(name=f"without-{empty}")
        await train(mine, 3)
        for stage in range(4):
            mine.kill(stage, disk=stage != empty)
        async with mine.up() as crew:
            assert crew is not None, mine.failed
            await learn(crew, 2, 3)
        assert apart(mine.weights(), expected) == 0
        assert [source(mine, stage) for stage in range(4)].count("neighbour") == 1
        mine.close()


async def test_small_checkpoint_is_rounded_and_its_rate_warms_up(fleet):
    mine = fleet(settings={"full_bytes": 0})
    await train(mine, 3)
    before = {n: t for n, t in mine.weights().items() if n.startswith("1 ")}
    mine.kill(1)
    async with mine.up():
        restored = mine.restored[1]
        assert restored.source.name == "neighbour"
        assert not restored.loaded.state.counts
        assert restored.loaded.lr_scale.warmup == 10
        for name, tensor in restored.loaded.state.weights.items():
            assert torch.equal(tensor, before[f"1 {name}"].bfloat16().float())


async def test_a_damaged_file_costs_one_source(fleet):
    expected = await unfailed(fleet, 5)
    mine = fleet()

    def damage(station):
        path = station.directory / CHECKPOINTS / mine.identity.path(station.spec.index)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    assert apart(await lose_and_continue(mine, [1], disk=True, prepare=damage), expected) == 0
    assert source(mine, 1) == "neighbour"
    assert "damaged" in dict(mine.restored[1].tried)["checkpoint"]
    again = fleet(name="again")
    await train(again, 3)
    again.lose_copy(1, at=0)
    again.kill(1)
    async with again.up():
        assert again.restored[1].source.holder == 2


async def test_source_with_non_finite_weights_is_skipped(fleet):
    mine = fleet(settings={"checkpoint_every": 1000})
    broken = {n: p * float("nan") for n, p in trained(mine.stations[2].runtime).items()}

    def prepare(station):
        station.base = lambda: broken

    await train(mine, 2)
    prepare(mine.kill(2))
    async with mine.up() as crew:
        assert crew is None
    assert isinstance(mine.failed[2], Refused)
    assert "not finite" in str(mine.failed[2])


async def test_adapter_is_restored_from_a_neighbour_or_untrained(fleet, models):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")

    def adapted():
        model = get_peft_model(copy.deepcopy(models["llama"]), lora)
        freeze_a(dict(model.named_parameters()))
        return model

    mine = fleet(model=adapted(), name="adapter")
    await train(mine, 3)
    before = mine.weights()
    # the base weights under the adapter are on every node
    whole = copy.deepcopy(mine.stations[1].runtime.model)
    mine.kill(1).runtime.model.load_state_dict(whole.state_dict())
    async with mine.up() as crew:
        assert crew is not None
        assert source(mine, 1) == "neighbour"
        assert apart(mine.weights(), before) == 0
    alone = fleet(model=adapted(), name="untrained", settings={"checkpoint_every": 1000})
    untrained = base_adapter_reader(alone.stations[1].runtime)
    kept = copy.deepcopy(alone.stations[1].runtime.model)
    await train(alone, 2)
    station = alone.kill(1)
    station.runtime.model.load_state_dict(kept.state_dict())
    station.base = untrained
    async with alone.up() as crew:
        assert crew is not None
        assert source(alone, 1) == "base"


async def test_checkfree_averages_the_neighbours(fleet):
    lost, mine = 1, fleet(settings={"mode": "checkfree"})
    await train(mine, 3)
    near = {i: mine.stations[i].member.optimizer.squared_norm for i in (lost - 1, lost + 1)}
    sides = {
        i: {n: p.detach().clone() for n, p in trained(mine.stations[i].runtime).items()}
        for i in near
    }
    mine.kill(lost)
    async with mine.up() as crew:
        assert crew is not None, mine.failed
        restored = mine.restored[lost]
        assert restored.source.name == "checkfree"
        assert restored.loaded.lr_scale.factor == 1.1
        share = near[lost - 1] / sum(near.values())
        for name, tensor in restored.loaded.state.weights.items():
            mean = share * sides[lost - 1][name] + (1 - share) * sides[lost + 1][name]
            assert torch.allclose(tensor, mean, atol=1e-6)
        await learn(crew, 1, 3)


async def test_checkfree_restores_an_end_from_a_checkpoint(fleet):
    expected = await unfailed(fleet, 5)
    mine = fleet(settings={"mode": "checkfree"})
    assert apart(await lose_and_continue(mine, [3]), expected) == 0
    assert source(mine, 3) == "neighbour"
    assert 1 not in checkpoints_in(mine, 0)


@pytest.mark.parametrize("lost", [0, 1])
async def test_checkfree_plus_copies_a_neighbour_at_the_ends(fleet, lost):
    crew = WorkerSettings("float32", swapped=True)
    mine = fleet(settings={"mode": "checkfree+"}, crew=crew)
    await train(mine, 3)
    ends = mine.weights()
    near = {0: 1, 3: 2}.get(lost)
    mine.kill(lost)
    async with mine.up() as again:
        assert again is not None, mine.failed
        restored = mine.restored[lost]
        assert restored.source.name == "checkfree+"
        for name, tensor in restored.loaded.state.weights.items():
            if near is not None:
                whole = f"{near} {name}" if ".layers." in name else f"{lost} {name}"
                assert torch.equal(tensor, ends[whole])
        await learn(again, 1, 3)


async def test_adjacent_lost_stages_are_not_averaged(fleet):
    mine = fleet(settings={"mode": "checkfree"})
    base = {
        i: {n: host_copy(p) for n, p in trained(mine.stations[i].runtime).items()} for i in (1, 2)
    }

    def prepare(station):
        station.base = lambda: base[station.spec.index]

    await lose_and_continue(mine, [1, 2], prepare=prepare)
    assert {source(mine, 1), source(mine, 2)} == {"base"}
    assert "lost too" in dict(mine.restored[1].tried)["checkfree"]
    for stage, weights in base.items():
        state = mine.restored[stage].loaded.state
        assert all(torch.equal(t, weights[n]) for n, t in state.weights.items())


async def test_a_new_neighbour_is_given_a_copy_at_once(fleet):
    mine = fleet(settings={"checkpoint_every": 1000})
    await train(mine, 2)
    assert set(checkpoints_in(mine, 2)) == {2}
    mine.kill(1, disk=True)
    async with mine.up():
        for _ in range(100):
            await quiet()
    assert set(checkpoints_in(mine, 2)) == {1, 2, 3}
    assert mine.peers[1].sharing.stored_steps == {0: 2, 2: 2}
