"""The list of tasks, as it was before a test."""

import contextlib
from collections.abc import Iterator

from swarmnode.tasks import registry


@contextlib.contextmanager
def tasks_restored() -> Iterator[None]:
    before = dict(registry.TASKS)
    try:
        yield
    finally:
        registry._TASKS.clear()
        registry._TASKS.update(before)
        registry.task_version.cache_clear()
