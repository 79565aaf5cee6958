"""All nodes are killed at once and one disk is lost: the next crew starts at the newest step on the
other disks."""

import shutil

import pytest

from swarmnode.policy.build_deep import write_deep_model
from swarmnode.stages.trainer.stage_checkpoints import CHECKPOINTS, find_checkpoints
from tests.support.forked_node import ForkedNode
from tests.support.whole_crew import WholeCrew, restored, start, stop, until, whole_settings

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(900)]

STAGES = 3


def newest_common(nodes):
    """Return the newest step that some disk has for every stage, give or take one step."""
    found = {}
    for directory in (node.directory / "trainer" / CHECKPOINTS for node in nodes):
        for about in find_checkpoints(directory):
            found[about.stage] = max(about.step, found.get(about.stage, 0))
    assert len(found) == STAGES
    return min(found.values())


def test_restores_after_all_nodes_and_one_disk_are_lost(tmp_path):
    model = write_deep_model(tmp_path / "model", layers=6, middle=True)
    settings = [
        whole_settings(model, i, STAGES, stages={"checkpoint_every": 2}) for i in range(STAGES)
    ]
    nodes = [ForkedNode(f"node{i}", tmp_path / f"node{i}", of) for i, of in enumerate(settings)]
    crew = WholeCrew(nodes, start(nodes), STAGES)
    try:
        before = until(lambda: crew.at(7), crew.story)
        for node in nodes:
            node.kill()
        lost = before[1][0]
        shutil.rmtree(lost.directory / "trainer")
        step = newest_common([node for node in nodes if node is not lost])
        assert step >= 4
        for node in nodes:
            (node.directory / "run" / "addresses.json").unlink(missing_ok=True)
        crew.address = start(nodes)
        after = until(lambda: crew.at(step + 1, before[0][1]["id"]), crew.story)
        assert {restored(node)["step"] >= step for node, _ in after.values()} == {True}
        assert after[1][0] is lost
        assert restored(lost)["source"] == "neighbour"
    finally:
        stop(nodes)
