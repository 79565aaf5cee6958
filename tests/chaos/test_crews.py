"""A short schedule of faults against a crew of four real nodes. `make chaos` plays every fault."""

import pytest

from tests.support.chaos.crews import play

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 1


def test_crew_recovers_from_every_scheduled_fault(tmp_path):
    played = play(SEED, tmp_path)
    assert not played.problems
    assert len(played.outcomes) == 4
