"""The choice of an engine."""

import pytest

from swarmnode.errors import LocalError
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import SHORT, EngineChoice, TrainingContinuous


@pytest.mark.parametrize(
    ("options", "longest", "obstacle", "kind", "reason"),
    [
        (["lockstep"], 500, "", "lockstep", "configured"),
        (["continuous"], 8, "", "continuous", "configured"),
        (["continuous"], 500, "sliding", "lockstep", "sliding"),
        ([], SHORT, "", "lockstep", "at most 32 tokens"),
        ([], SHORT + 1, "", "continuous", "more than 32 tokens"),
    ],
)
def test_engine_follows_from_settings_and_model(options, longest, obstacle, kind, reason):
    choice = EngineChoice.of(options, longest, obstacle)
    assert choice.kind == kind
    assert reason in choice.reason


def test_a_failing_continuous_engine_names_the_remedy(monkeypatch):
    def fail(engine, version):
        raise IndexError("no such slot")

    monkeypatch.setattr(Continuous, "finished", fail)
    engine = TrainingContinuous.__new__(TrainingContinuous)
    with pytest.raises(
        LocalError, match=r'no such slot; .* training.options = \["lockstep"\]'
    ) as e:
        engine.finished(0)
    assert isinstance(e.value.__cause__, IndexError)
    assert e.value.exit_code == 70
