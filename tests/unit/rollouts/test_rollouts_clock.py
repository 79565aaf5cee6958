"""A node whose clock is off by more than the window: its groups are not used, it uses none, and no
peer loses reputation."""

import pytest
import trio

from swarmnode.wire import limits
from tests.support.pulling import PullSwarm


@pytest.mark.parametrize(
    ("offset", "ours_to_it", "its_to_us"),
    [
        (limits.CLOCK_SKEW_SECONDS - 5, "admitted", "admitted"),
        (limits.CLOCK_SKEW_SECONDS + 5, "admitted", "future"),
        (limits.GROUP_AGE_SECONDS + 5, "stale", "future"),
        (-limits.CLOCK_SKEW_SECONDS - 5, "future", "admitted"),
        (-limits.GROUP_AGE_SECONDS - 5, "future", "stale"),
        (86_400.0, "stale", "future"),
    ],
)
async def test_wrong_clock_costs_groups_but_no_reputation(
    nursery, autojump_clock, offset, ours_to_it, its_to_us
):
    swarm = await PullSwarm(2, skews=(0.0, offset)).start(nursery)
    for number in range(2):
        await swarm.publish(number, 0)
    await trio.sleep(10)
    assert (outcome(swarm, 1), outcome(swarm, 0)) == (ours_to_it, its_to_us)
    for number, expected in ((1, ours_to_it), (0, its_to_us)):
        assert len(swarm.draw(number, 4)) == (expected == "admitted")
        assert swarm.networks[number].score(swarm.peers[1 - number]) >= 0.0


def outcome(swarm, number):
    """Return the outcome of the one group on offer at node `number`."""
    outcomes = swarm.outcomes(number)
    (found,) = (reason for reason in ("admitted", "stale", "future") if outcomes.get(reason))
    return found
