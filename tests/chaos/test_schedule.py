"""One schedule of faults against two real nodes. `make chaos` has many, the faults that take long,
and a table of what each costs."""

import pytest

from tests.support.chaos.schedule import play

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = 1


def test_two_nodes_are_whole_again_after_every_fault_of_a_schedule(tmp_path):
    """Nothing ends that was not killed, nothing that was said to be saved is lost, no error is
    logged that the fault does not explain."""
    played = play(SEED, tmp_path)
    assert not played.problems, (
        f"python -m tests.support.chaos --seed {SEED} --short: {played.problems}"
    )
    assert len(played.outcomes) >= 12
    assert all(outcome.seconds is not None for outcome in played.outcomes)
    assert all(max(curve) > 10 for curve in played.curves), "they have learnt meanwhile"
