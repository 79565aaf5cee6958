"""Questions of the registered tasks, and the list of tasks as it was before a test."""

import contextlib
from collections.abc import Iterator

from swarmnode.tasks import registry
from swarmnode.wire.messages import TaskRef


@contextlib.contextmanager
def tasks_restored() -> Iterator[None]:
    before = dict(registry.TASKS)
    try:
        yield
    finally:
        registry._TASKS.clear()
        registry._TASKS.update(before)
        registry.task_version.cache_clear()


def ref(
    task: str = "builtin/sum", index: int = 0, seed: int = 4 << 20, version: str = ""
) -> TaskRef:
    """Return the address of a question, by default of one that is trained on."""
    return TaskRef(task, version or registry.task_version(task), seed, index)
