"""A member without a majority waits for `wait_seconds`, because those it waits for bring back what the crew has learnt."""

import pytest

from tests.support.crew_story import Story, reset


def of_two(stage):
    """(world, who stays, who is about to be lost: the holder of `stage`, the crew, its steps)."""
    world = Story(2).running()
    gone = next(node for node in world.nodes.values() if node.control.stage == stage)
    stays = next(node for node in world.nodes.values() if node is not gone)
    assert not stays.control.roster.witnesses
    return world, stays, gone, stays.control.acceptor.crew, world.step()


@pytest.mark.parametrize("stage", [0, 1])
def test_of_two_members_the_one_that_is_left_waits_and_nothing_is_lost_when_the_other_comes_back(stage):
    world, stays, gone, crew, step = of_two(stage)
    assert world.settings.wait_seconds > 35.0
    reset(world, gone.name, back=30.0)
    world.wait(29.0)
    assert (stays.control.acceptor.crew, stays.control.running) == (crew, False)  # no majority: it waits, and takes no step
    assert world.until(world.everybody_runs) < 5.0
    assert stays.control.acceptor.crew == gone.control.acceptor.crew == crew
    assert world.step() >= step
    assert world.until(lambda: world.step() > step + 1) < 30.0


@pytest.mark.parametrize("stage", [0, 1])
def test_one_who_has_forgotten_the_crew_is_not_waited_for(stage):
    world, stays, gone, crew, _ = of_two(stage)
    reset(world, gone.name, back=5.0, remembers=False)
    assert world.until(lambda: stays.control.acceptor.crew != crew) < world.settings.wait_seconds / 2
    world.until(world.everybody_runs)
    assert stays.control.acceptor.crew == gone.control.acceptor.crew != crew
