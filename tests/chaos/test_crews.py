"""Schedules of faults against a crew of four real nodes."""

import pytest

from tests.support.chaos.crews import play

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(1200)]

SEED = 1


@pytest.mark.parametrize(
    "long",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_crew_recovers_from_every_scheduled_fault(tmp_path, long):
    played = play(SEED, tmp_path, long=long)
    assert not played.problems
    assert len(played.outcomes) == (3 if not long else 22)
