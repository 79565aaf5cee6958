"""benchmarks.stalls starts whole nodes, which takes minutes; that they would start is seen at
once."""

from benchmarks import stalls
from swarmnode.config import Config


def test_its_nodes_have_settings_that_there_are():
    assert Config.model_validate(stalls.SETTINGS).weights.rule == "noloco"
