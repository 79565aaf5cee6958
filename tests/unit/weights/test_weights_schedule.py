"""The schedule of outer steps, in training steps and blocks."""

from swarmnode.weights.fragments import due
from swarmnode.weights.schedule import OuterSchedule

BLOCKS = [2, 3, 4, 5]
"""Four layers: with two fragments, 2 and 4 are of fragment 0, 3 and 5 of fragment 1."""


def test_every_fragment_is_due_once_in_an_interval():
    schedule, seen = OuterSchedule(16, 2, BLOCKS), []
    for step in range(1, 65):
        if (found := schedule.due(step)) is not None:
            fragment, blocks = found
            assert blocks == ([2, 4], [3, 5])[fragment]
            seen.append((step, fragment))
            schedule.stepped(blocks, step)
    assert seen == [(step, due(step, 16, 2)) for step in range(8, 65, 8)]


def test_a_block_that_a_partner_averaged_recently_is_not_due():
    schedule = OuterSchedule(16, 2, BLOCKS)
    schedule.stepped([2], 17)
    assert schedule.due(24) == (0, [4])
    schedule.stepped([4], 25)
    assert schedule.due(40) == (0, [2, 4]), "both are due again"
    schedule.stepped([2, 4], 36)
    assert schedule.due(40) is None


def test_a_stage_without_a_layer_of_the_fragment_has_nothing_due():
    schedule = OuterSchedule(16, 2, [2, 4])
    assert schedule.due(8) == (0, [2, 4])
    assert schedule.due(16) is None
