import pytest

from swarmnode.tasks import registry


@pytest.fixture
def tasks_as_before():
    """The list of tasks is afterwards as it was."""
    before = dict(registry.TASKS)
    yield
    registry._TASKS.clear()
    registry._TASKS.update(before)
    registry.task_version.cache_clear()
