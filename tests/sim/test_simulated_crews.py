"""Crews under kills, restarts, cuts, slow members and a liar, in simulated time."""

import pytest
import trio

from tests.support.sim.crews import STEP_SECONDS, CrewWorld, run

QUICK_SECONDS = 10.0
"""Bound from a kill to the next committed step when a restarted member restores its stage."""
SPARE_SECONDS = 30.0
"""Bound when a spare takes the stage: planners wait 12 s for its holder."""


async def stepping(world: CrewWorld, steps: int = 12) -> None:
    for _ in range(steps):
        await world.next_step(40.0)


def test_crew_without_a_spare_recovers_in_seconds():
    async def story(world):
        await stepping(world)
        for node in world.nodes:
            await trio.sleep(world.rng.uniform(0.0, 2.0))
            await node.kill()
            await trio.sleep(2.0)
            await world.boot(node)
            assert await world.next_step(60.0) <= QUICK_SECONDS
            await stepping(world)

    world = run(1, 4, story)
    assert (world.inexact, world.lost) == (0, [])


@pytest.mark.parametrize("seed", range(3))
def test_kill_during_founding_costs_seconds(seed):
    async def story(world):
        await stepping(world)
        for _ in range(6):
            node = world.rng.choice(world.nodes)
            await node.kill()
            await world.boot(node)
            await trio.sleep(world.rng.uniform(0.0, 4.0))
        assert await world.next_step(60.0) <= 2 * QUICK_SECONDS

    world = run(seed, 4, story)
    assert (world.inexact, world.lost) == (0, [])


@pytest.mark.parametrize("lose_disk", [False, True])
def test_spares_take_the_stages_of_two_members(lose_disk):
    async def story(world):
        await stepping(world)
        for node in world.crew()[1:3]:
            await node.kill(lose_disk=lose_disk)
        assert await world.next_step(60.0) <= SPARE_SECONDS
        await stepping(world)

    world = run(2, 6, story)
    assert world.inexact == 2
    assert not world.lost


@pytest.mark.parametrize("disk", ["empty", "old"])
def test_lost_disk_costs_only_one_stage(disk):
    async def story(world):
        await stepping(world)
        node = world.crew()[2]
        old = dict(node.disk)
        await stepping(world)
        await node.kill(lose_disk=True)
        node.disk.update(old if disk == "old" else {})
        await world.boot(node)
        assert await world.next_step(60.0) <= SPARE_SECONDS
        await stepping(world)

    world = run(3, 4, story)
    assert world.inexact == 1
    assert not world.lost


def test_network_outage_of_150_seconds_loses_nothing():
    async def story(world):
        await stepping(world)
        alone = world.crew()[1:2]
        world.cut(alone, True)
        await trio.sleep(150.0)
        world.cut(alone, False)
        assert await world.next_step(120.0) <= 90.0  # mostly the wait for a redial
        await stepping(world)

    world = run(4, 4, story)
    assert (world.inexact, world.lost) == (0, [])


def test_partitioned_crews_continue_and_the_newest_gets_spares():
    async def story(world):
        await stepping(world)
        side = world.crew()[:2] + [node for node in world.nodes if node not in world.crew()][:2]
        world.cut(side, True)
        await trio.sleep(90.0)
        await stepping(world)
        running = [node for node in world.nodes if node.state == "running"]
        assert len(running) == 8, "each side has four"
        world.cut(side, False)
        await trio.sleep(60.0)
        assert all(node.state == "running" for node in running)
        free = next(node for node in world.nodes if node in side)
        other = [node for node in world.nodes if node not in side]
        await other[0].kill(lose_disk=True)
        await free.kill()
        await world.boot(free)
        await trio.sleep(60.0)
        assert sum(node.state == "running" for node in world.nodes) >= 4

    run(5, 8, story)


def test_silent_machine_returns_as_a_spare():
    async def story(world):
        await stepping(world)
        node = world.crew()[1]
        world.wires.still.add(str(node.address))
        assert await world.next_step(90.0) <= 13.0 + SPARE_SECONDS
        assert node not in world.crew()
        world.wires.still.discard(str(node.address))
        world.wires.changed()
        await stepping(world, 60)

    assert not run(6, 5, story).lost


def test_blamed_member_is_readmitted_without_a_spare():
    async def story(world):
        await stepping(world)
        machine = str(world.crew()[1].address)
        world.wires.still.add(machine)
        await trio.sleep(16.0)
        world.wires.still.discard(machine)
        world.wires.changed()
        assert await world.next_step(90.0) <= QUICK_SECONDS
        await stepping(world)

    world = run(8, 4, story)
    assert (world.inexact, world.lost) == (0, [])


def test_slow_member_does_not_end_the_crew():
    async def story(world):
        await stepping(world)
        world.crew()[3].slowness = 20.0
        for _ in range(5):
            assert await world.next_step(60.0) <= 25 * STEP_SECONDS

    assert not run(7, 5, story).lost


@pytest.mark.parametrize("stage", [0, 2])
def test_liar_costs_bounded_time(stage):
    """The hostile member claims the newest step of every stage, joins, and never reports finished
    work. As head it also ends one crew after another."""

    async def story(world):
        await stepping(world)
        world.crew()[stage].liar = True
        await trio.sleep(300.0)

    world = run(stage, 5, story)
    late = [at for at in world.steps_at if 100.0 < at < 300.0]
    assert len(late) > 0.85 * 200.0 / STEP_SECONDS, "the crew works without it"


@pytest.mark.parametrize("seed", range(5))
def test_crew_recovers_from_random_faults(seed):
    async def story(world):
        await stepping(world)
        for _ in range(8):
            node = world.rng.choice(world.nodes)
            match world.rng.choice(["kill", "power", "cut", "still", "slow"]):
                case "kill":
                    await node.kill()
                    await trio.sleep(world.rng.uniform(0.0, 30.0))
                    await world.boot(node)
                case "power":
                    await node.kill(silently=True)
                    await trio.sleep(world.rng.uniform(0.0, 30.0))
                    await world.boot(node)
                case "cut":
                    world.cut([node], True)
                    await trio.sleep(world.rng.uniform(0.0, 30.0))
                    world.cut([node], False)
                case "still":
                    world.wires.still.add(str(node.address))
                    await trio.sleep(world.rng.uniform(0.0, 30.0))
                    world.wires.still.discard(str(node.address))
                    world.wires.changed()
                case "slow":
                    node.slowness = world.rng.uniform(1.0, 20.0)
            await trio.sleep(world.rng.uniform(0.0, 20.0))
        for node in world.nodes:
            node.slowness = 1.0
        await world.next_step(120.0)
        await stepping(world)

    assert not run(seed, 5, story).lost
