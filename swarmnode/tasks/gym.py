"""reasoning-gym datasets as tasks. Only the scorer child imports this module.

It loads only the modules of the allow-listed datasets. `import reasoning_gym` would load more than
a hundred generators, sympy and matplotlib (1 s instead of 60 ms), and scorers that execute answers.
A package that is in `sys.modules` without having been executed only tells the import system where
its submodules are. It is there only during these imports, so that `import reasoning_gym` elsewhere
in the process loads the whole package.

The reward is 1 for the dataset's answer in the dataset's spelling, otherwise 0. The datasets'
`score_answer` is not used. Some give "12." or "+12" the same reward as "12", and peers can teach
any variation that changes no reward (docs/security.md). Some give partial credit to any text that
contains the answer, or to any text, which a policy learns to exploit (docs/own-task.md).
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
    """One dataset at one difficulty. Item i with seed s depends only on Random(s + i), so one
    object serves every seed.
    """

    def __init__(self, spec: TaskSpec) -> None:
        group, name = spec.generator.split(".")
        with _bare_package("reasoning_gym"), _bare_package(f"reasoning_gym.{group}"):
            importlib.import_module(f"reasoning_gym.{group}.{name}")
            factory = importlib.import_module("reasoning_gym.factory")
            self._dataset = factory.create_dataset(name, seed=0, size=1, **spec.settings)

    def item(self, seed: int, index: int) -> Item:
        """Return the question at (seed, index). It generates one item, not a whole dataset."""
        self._dataset.seed = seed
        entry: dict[str, object] = self._dataset[index]
        answer = str(entry["answer"])
        return Item(str(entry["question"]), answer, lambda text: float(text == answer))


@contextlib.contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Make submodules of the package `name` importable without executing the package. It does
    nothing if the package is loaded already.
    """
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
