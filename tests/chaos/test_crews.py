"""Schedules of faults against a crew of four real nodes."""

import pytest

from tests.support.chaos.crews import play

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(1800)]

SEED = 1


@pytest.mark.parametrize(
    "long",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_a_crew_takes_steps_again_after_every_fault_of_a_schedule(tmp_path, long):
    played = play(SEED, tmp_path, long=long)
    assert not played.problems
    assert len(played.outcomes) == (3 if not long else 22)
