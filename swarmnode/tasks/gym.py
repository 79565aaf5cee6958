"""reasoning-gym datasets as tasks. Imported by the scorer child only.

Only the modules of the allow-listed datasets are loaded. `import reasoning_gym` would load all of
its hundred-odd generators, sympy and matplotlib (1 s instead of 60 ms), and with them the scorers
that execute answers. A package that is in `sys.modules` without having been executed gives its
submodules a place to be found from, and no more. It is there while they are imported only: whoever
else in a process says `import reasoning_gym` gets the whole one.

Rewards are 1 for the dataset's answer as the dataset writes it, else 0. Its `score_answer` is not
used: some give full marks for "12." or "+12" as for "12", and strangers can teach any variation
that changes no reward (docs/security.md). Partial credit is for text that merely contains the
answer, or for any text at all, and a policy learns to collect it (docs/own-task.md).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from swarmnode.tasks.builtin import Item
from swarmnode.tasks.registry import TaskSpec


class GymTask:
    """One dataset at one difficulty. Item i with seed s is drawn from Random(s + i) and nothing
    else, so one object serves every seed."""

    def __init__(self, spec: TaskSpec) -> None:
        group, name = spec.generator.split(".")
        with _bare_package("reasoning_gym"), _bare_package(f"reasoning_gym.{group}"):
            importlib.import_module(f"reasoning_gym.{group}.{name}")
            factory = importlib.import_module("reasoning_gym.factory")
            self._dataset = factory.create_dataset(name, seed=0, size=1, **spec.settings)

    def item(self, seed: int, index: int) -> Item:
        """The question at (seed, index). Costs one item, never a whole dataset."""
        self._dataset.seed = seed
        entry: dict[str, object] = self._dataset[index]
        answer = str(entry["answer"])
        return Item(str(entry["question"]), answer, lambda text: float(text == answer))


@contextlib.contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Within it `name` can be imported from without having been executed, unless it has been
    already."""
    if name in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]
