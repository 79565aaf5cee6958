"""One schedule of faults against two real nodes. `make chaos` runs many, with the long faults, and
prints the cost of each fault."""

import pytest

from tests.support.chaos.schedule import play

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 1


def test_two_nodes_recover_from_every_scheduled_fault(tmp_path):
    """No process ends that was not killed, no saved state is lost, and every logged error is
    explained by the fault."""
    played = play(SEED, tmp_path)
    assert not played.problems, (
        f"python -m tests.support.chaos --seed {SEED} --short: {played.problems}"
    )
    assert len(played.outcomes) >= 12
    assert all(outcome.seconds is not None for outcome in played.outcomes)
    assert all(max(curve) > 10 for curve in played.curves), "they learn meanwhile"
