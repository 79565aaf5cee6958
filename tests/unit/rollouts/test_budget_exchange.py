"""A node without budget between two that have it, in virtual time."""

import pytest
import trio

from tests.support.pulling import PullSwarm


@pytest.fixture
async def line(nursery):
    """Three nodes, 0 and 2 connected through 1 only."""
    swarm = PullSwarm(3)
    swarm.line()
    return await swarm.start(nursery)


async def share(line, number, sequence, long=False):
    await line.publish(number, sequence, long=long)
    await trio.sleep(90)


def admitted(line):
    return [line.outcomes(number).get("admitted", 0) for number in range(3)]


async def test_with_budget_everything_travels_through_it(line, autojump_clock):
    await share(line, 0, 0)
    await share(line, 0, 1, long=True)
    assert admitted(line) == [0, 2, 2]


async def test_node_without_upload_budget_fetches_groups(line, autojump_clock):
    line.budgets[1].refused = {"publish"}
    await share(line, 0, 0)
    assert admitted(line) == [0, 1, 0]
    assert line.exchanges[1].publish(line.authors[1].own_group(0)) == "budget"
    assert "busy" in line.serving(1).served
    assert "group" not in line.serving(1).served


async def test_node_without_download_budget_serves_own_groups(line, autojump_clock):
    line.budgets[1].refused = {"fetch"}
    await trio.sleep(15)  # the poll that was under way
    await share(line, 0, 0)
    await share(line, 1, 0)
    assert admitted(line) == [1, 0, 1]


async def test_paused_node_resumes_after_the_pause(line, autojump_clock):
    line.budgets[1].refused = {"publish", "fetch"}
    await trio.sleep(15)
    await share(line, 0, 0)
    assert admitted(line) == [0, 0, 0]
    line.budgets[1].refused = set()
    await trio.sleep(90)
    assert admitted(line) == [0, 1, 1], "what was made during the pause is listed still"
    await share(line, 0, 1)
    assert admitted(line) == [0, 2, 2]
