"""The swarm id: equal for nodes that can work together, different for all others."""

import pytest

from swarmnode.wire import ids
from swarmnode.wire.manifest import swarm_id

TASKS = {"a": "1", "b": "2"}


def test_order_of_tasks_does_not_matter():
    assert swarm_id("s", TASKS) == swarm_id("s", dict(reversed(TASKS.items())))


@pytest.mark.parametrize(
    "other",
    [
        swarm_id("t", TASKS),
        swarm_id("s", {"a": "1"}),
        swarm_id("s", {"a": "1", "b": "3"}),
        swarm_id("s", {"a": "12", "b": ""}),
        swarm_id("s", TASKS, ids.CHOICE_PROTOCOLS),
    ],
)
def test_any_difference_is_another_swarm(other):
    assert swarm_id("s", TASKS) != other
