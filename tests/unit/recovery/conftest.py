"""Tiny random models of every architecture that can be split, and crews that lose stages."""

import pytest

from tests.support.lost_stages import Fleet
from tests.support.stage_models import embedded, models

__all__ = ["embedded", "models"]


@pytest.fixture
def make_fleet():
    """Return a function that makes a `Fleet`, which the end of the test closes."""
    made = []

    def make(*args, **keys):
        made.append(Fleet(*args, **keys))
        return made[-1]

    yield make
    for one in made:
        one.close()
