"""What a stage says of its speed."""

import pytest

from swarmnode.trainer import crew_stage
from swarmnode.trainer.crew_stage import Meter


async def test_a_meter_tells_how_much_of_a_step_was_waiting_and_what_went_through(monkeypatch):
    now = 100.0
    monkeypatch.setattr(crew_stage.time, "monotonic", lambda: now)
    meter = Meter()
    assert (meter.waited_share, meter.tokens_per_second) == (None, None)

    def work():
        nonlocal now
        assert meter.computing == 1
        now += 3.0
        return "done"

    assert await meter(work) == "done"
    now += 1.0
    meter.step(800)
    assert (meter.waited_share, meter.tokens_per_second) == (pytest.approx(0.25), pytest.approx(200.0))
    now += 2.0
    meter.step(900)  # of the second step only
    assert (meter.waited_share, meter.tokens_per_second, meter.computing) == (pytest.approx(1.0), pytest.approx(50.0), 0)
