"""Type the commands of "Train alone first". In a file of its own, because it takes as long as all
other pages."""

import pytest

from tests.support.typed_pages import World, follow

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_train_alone(tmp_path):
    done = dict(follow(World(tmp_path), "train alone"))
    measured = [
        next(row.split() for row in written.splitlines() if row.startswith("chat/json_fields"))
        for line, written in done.items()
        if line.startswith("swarmnode eval")
    ]
    before, after = (float(row[3]) for row in measured)
    assert after > before + 0.1
    assert not any("FAIL" in written or "warning" in written for written in done.values())
