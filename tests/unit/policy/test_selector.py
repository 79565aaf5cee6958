"""The choice of an engine."""

import pytest

from swarmnode.policy.engine.selector import SHORT, EngineChoice


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
