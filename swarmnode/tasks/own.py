"""Tasks that the owner of this node brings: `package.module:function`, named in `task.modules`.
docs/own-task.md is the guide.

    parents   find the file ─ hash what is in it ─▶ task version          nothing of it is imported,
    or run
    scorer    find the file ─ hash it again, equal? ─ import ─ lock in ─ try it ─▶ ready

A function takes a `random.Random` and its settings, and returns the prompt and the function that
gives an answer its reward, 0 to 1:

    def reverse(rng, letters=4):
        word = "".join(rng.choice("abcdefgh") for _ in range(letters))
        return f"Spell this backward: {word}", lambda answer: float(answer == word[::-1])

or, for an episode of several turns (`turns` in its settings), the first text and a function that
takes an action and returns (observation, reward, done).

Its code is part of its identity. Nodes with other code have another task version, and so are of
another swarm.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import random
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from swarmnode.errors import ConfigError
from swarmnode.tasks import seeds
from swarmnode.tasks.builtin import Item, Value
from swarmnode.wire.limits import TURNS as MOST_TURNS

NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):([A-Za-z_][A-Za-z0-9_]*)")
PROMPT_CHARACTERS = 8192
FILES, BYTES = 1024, 16 * 2**20
"""A package with more than this is more than a task."""
HELD_OUT = 16
"""One prompt in so many is held out."""
DRAWS = 8 * HELD_OUT
"""Attempts to draw a question of the right side; a task of so few questions that none is found asks
one of the other side."""
_OURS = str(Path(__file__).parents[1])
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

WEIGHT = "weight."
"""Settings that begin so are weights of a reward's components, and are not given to the
function."""
TURNS = "turns"
"""The setting that makes an episode task of a function: the most actions of an episode. The
function is given it if it has a parameter of that name."""
COMPONENTS = 8
COMPONENT_CHARACTERS = 32

T = TypeVar("T")
Generator = Callable[..., tuple[str, Callable[[str], Any]]]
RewardFunction = Callable[..., Sequence[Value | None]]
"""TRL's: `f(prompts, completions, **columns)`, lists of one length, returns one number for each
completion, or None where it does not apply. More than TRL's: in place of a number, components by
name, of which each may be None."""
TRLS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"log_extra": lambda *_, **__: None, "log_metric": lambda *_, **__: None}
)
"""What TRL also gives to a reward function. It may be called, and nothing is logged."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the code of a module is, and what it was when it was hashed."""

    top: str
    """Name of the top-level module or package."""
    path: str
    """File of the module, or folder of the package."""
    content: str
    """32 hex digits over every file of it."""


def find(task: str) -> Source:
    """The source of `package.module:function`, found as an import would find it but without
    importing anything.

    Raises ConfigError when it is not so written, not installed, or could stand for something else.
    """
    match = NAME.fullmatch(task)
    if match is None:
        raise ConfigError(
            f"task.modules: {task[:80]!r} is not <module>:<function>, such as 'words:reverse'"
        )
    module = match[1]
    top, *rest = module.split(".")
    if top in sys.stdlib_module_names or top == "swarmnode":
        whose = "swarmnode" if top == "swarmnode" else "Python"
        raise ConfigError(
            f"task.modules: {task!r}: {top!r} is a module of {whose} itself; rename yours"
        )
    spec = _spec(top)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"task.modules: {task!r}: no module {top!r} is installed for {sys.executable}: pip"
            " install it there"
        )
    origin = Path(spec.origin)
    path = origin.parent if spec.submodule_search_locations else origin
    if origin.suffix != ".py" or not origin.is_file():
        raise ConfigError(f"task.modules: {task!r}: {origin} is not a Python file")
    if rest and not _is_there(path, rest):
        raise ConfigError(f"task.modules: {task!r}: there is no {'.'.join(rest)!r} in {path}")
    return Source(top, str(path), _hash(path, task))


def _spec(top: str) -> ModuleSpec | None:
    """Where a top-level module is. Finders of such look at names and files and run none of them;
    those of submodules run the package."""
    for finder in sys.meta_path:
        find_spec: Callable[[str, None], ModuleSpec | None] | None = getattr(
            finder, "find_spec", None
        )
        if find_spec is not None and (spec := find_spec(top, None)) is not None:
            return spec
    return None


def _is_there(path: Path, rest: list[str]) -> bool:
    inner = path.joinpath(*rest)
    return path.is_dir() and (
        inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file()
    )


def _hash(path: Path, task: str) -> str:
    """Over names and contents of all files of a package, data included, since a list of words
    decides questions like code does."""
    files = [path] if path.is_file() else sorted(_files(path))
    if len(files) > FILES or sum(file.stat().st_size for file in files) > BYTES:
        limits = f"{FILES} files or {BYTES >> 20} MiB"
        raise ConfigError(
            f"task.modules: {task!r}: {path} is larger than {limits}: give the task a package of"
            " its own"
        )
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        data = file.read_bytes()
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        digest.update(f"{len(name.encode())} {len(data)} ".encode() + name.encode() + data)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(root, name) for name in names if not name.endswith((".pyc", ".pyo"))]
    return found


class OwnTask:
    """One task of its owner's. Imported by the scorer child only: making one runs the owner's
    code."""

    def __init__(self, task: str, source: Source, settings: Mapping[str, object]) -> None:
        """Raises ConfigError when the code is not what was hashed, or cannot be imported."""
        self._task = task
        self._generate = environment("task.modules", task, source)
        parameters = inspect.signature(self._generate).parameters
        self._settings = {
            name: value
            for name, value in settings.items()
            if not name.startswith(WEIGHT) and (name != TURNS or name in parameters)
        }
        self.weights = weights_of(settings)
        self.turns = turns_of(settings)
        self._splits, self._seeded = "split" in parameters, next(iter(parameters), "") == "seed"

    def item(self, seed: int, index: int) -> Item:
        """The question at (seed, index): for an evaluation seed one that training never asks.

        A function with a parameter `split` is told "train" or "test" and keeps them apart itself.
        Of one without, a draw whose prompt is of the other side, by its hash, is drawn again: a
        sixteenth of all prompts are held out.
        """
        held_out = seeds.is_evaluation(seed)
        item = self._draw(seed + index, held_out)
        for attempt in range(1, DRAWS):
            if self._splits or _is_held_out(item.prompt) == held_out:
                break
            item = self._draw(f"{seed + index} {attempt}", held_out)
        return item

    def start(self, seed: int, index: int, difficulty: int = 0) -> tuple[str, Callable[[str], Any]]:
        """Begin the episode of the question at an address. Its seed is odd for held-out questions
        alone, so training never begins an episode of the evaluation."""
        return self._generated(seeds.seed_of(seed, index), seeds.is_evaluation(seed))

    def _generated(self, number: int | str, held_out: bool) -> tuple[str, Callable[[str], Any]]:
        """Call the owner's function with a random generator or seed derived from `number`."""
        split = {"split": "test" if held_out else "train"} if self._splits else {}
        if not self._seeded:
            return self._generate(random.Random(number), **split, **self._settings)
        seed = number if isinstance(number, int) else random.Random(number).getrandbits(63)
        return self._generate(seed, **split, **self._settings)

    def _draw(self, number: int | str, held_out: bool) -> Item:
        prompt, reward = self._generated(number, held_out)
        if not isinstance(prompt, str) or not 0 < len(prompt) <= PROMPT_CHARACTERS:
            raise TypeError(
                f"{self._task} made a prompt that is not a text of 1 to {PROMPT_CHARACTERS}"
                " characters"
            )
        return Item(prompt, "", lambda answer: _not_a_step(reward(answer)))

    def prove(self) -> None:
        """Make a few questions and judge an answer, locked in as it will be. Raises ConfigError for
        what would go wrong later."""
        try:
            for index in range(3):
                first, second = self.item(0, index), self.item(0, index)
                reward, _ = total(first.reward(""), self.weights)
                if first.prompt != second.prompt:
                    raise ValueError(
                        "the same seed gave two questions: draw from the random.Random that it is"
                        " given, and nothing else"
                    )
                if not 0.0 <= reward <= 1.0:
                    raise ValueError(f"its reward for an empty answer is {reward}, not in 0 to 1")
        except Exception as error:
            raise ConfigError(
                f"task.modules: {self._task!r} does not work: {one_line(error)}"
            ) from error


def _not_a_step(value: Any) -> Value:  # noqa: ANN401 # whatever the owner's code returns
    if isinstance(value, tuple):
        raise TypeError(
            f"it returned a tuple, as an episode's step does: set {TURNS} in its settings to the"
            " most actions of an episode"
        )
    result: Value = value
    return result


def _is_held_out(prompt: str) -> bool:
    return (
        int.from_bytes(
            hashlib.blake2b(prompt.encode(errors="replace"), digest_size=8).digest(), "big"
        )
        % HELD_OUT
        == 0
    )


def environment(setting: str, name: str, source: Source) -> Generator:
    """Return the owner's `module:function`, or a function that begins an episode of
    `module:Class`. Runs the owner's code. Raises ConfigError."""
    from swarmnode.tasks import tools

    found = _imported(setting, name, source)
    if not tools.is_environment(found):
        return found
    with bytecode():
        return tools.generator(name, found)


def reward_function(name: str, source: Source) -> RewardFunction:
    """The owner's reward function `module:function` of a dataset. Runs its code. Raises
    ConfigError."""
    function: RewardFunction = _imported("task.datasets", name, source)
    return function


def check_weights(where: str, settings: Mapping[str, object]) -> None:
    """Raises ConfigError for a weight that is none."""
    for name, value in settings.items():
        if name.startswith(WEIGHT) and not (isinstance(value, int | float) and 0 <= value < 1e6):
            raise ConfigError(f"{where}: {name} is {value!r}; a weight is a number from 0 on")


def turns_of(settings: Mapping[str, object]) -> int:
    """Return the most actions of an episode of a task with these settings; 1 where it has none."""
    return int(str(settings.get(TURNS, 1)))


def check_turns(where: str, settings: Mapping[str, object]) -> None:
    """Raise ConfigError if `turns` is not a whole number from 1 to MOST_TURNS."""
    turns = settings.get(TURNS, 1)
    if type(turns) is not int or not 1 <= turns <= MOST_TURNS:
        raise ConfigError(f"{where}: {TURNS} is {turns!r}, not a whole number, 1 to {MOST_TURNS}")


def weights_of(settings: Mapping[str, object]) -> dict[str, float]:
    """Weights of a reward's components, by name, among a task's settings; one that is not there
    weighs 1."""
    return {
        name.removeprefix(WEIGHT): float(str(value))
        for name, value in settings.items()
        if name.startswith(WEIGHT)
    }


def total(value: Value, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return (reward, its components by name) of what an owner's code returned.

    The reward is the mean of the components by their weights, 1 where none is set. A component that
    is None does not apply to this completion and is left out; where none applies, the reward is 0.

    Raises ValueError, and TypeError, for what is not from 0 to 1 each.
    """
    if not isinstance(value, Mapping):
        return _checked(value, ""), {}
    names = names_of(value)
    if not 0 < len(value) <= COMPONENTS:
        raise ValueError(f"a reward of {len(value)} components, not 1 to {COMPONENTS}")
    if len(names) < len(value):
        raise ValueError(
            f"names of components are the same in their first {COMPONENT_CHARACTERS} characters"
        )
    if sum(weights.get(name, 1.0) for name in names) <= 0:
        raise ValueError(f"all components ({', '.join(sorted(names))}) have the weight 0")
    components = {
        str(name)[:COMPONENT_CHARACTERS]: _checked(number, f" of {name}")
        for name, number in value.items()
        if number is not None
    }
    weighed = sum(weights.get(name, 1.0) for name in components)
    if weighed <= 0:
        return 0.0, components
    added = sum(weights.get(name, 1.0) * number for name, number in components.items())
    return min(1.0, added / weighed), components


def names_of(value: Value) -> frozenset[str]:
    """Names of a reward's components; none of a single number."""
    if not isinstance(value, Mapping):
        return frozenset()
    return frozenset(str(name)[:COMPONENT_CHARACTERS] for name in value)


def _checked(number: float, what: str) -> float:
    number = float(number)
    if not 0.0 <= number <= 1.0:  # NaN fails both comparisons
        raise ValueError(f"a reward{what} of {number}, not in 0 to 1")
    return number


class FunctionReward:
    """A reward function of the owner's, called as TRL calls it: by keyword, with `prompts`,
    `completions` and every column of the dataset.

    A function without `**columns` is given the arguments that it names.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C
            parameters = ()  # type: ignore[assignment]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = {p.name for p in by_name}
        self._required = [p.name for p in by_name if p.default is p.empty]
        self._takes_all = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)

    def arguments(self, columns: Mapping[str, object]) -> tuple[str, ...]:
        """Names of what the function is given of a row."""
        names = ("prompts", "completions", *columns)
        return names if self._takes_all else tuple(name for name in names if name in self._named)

    def reward(self, prompt: str, completion: str, columns: Mapping[str, object]) -> Value:
        """Return the reward of one completion; None, which means that the function does not apply,
        is 0.

        Raises whatever the function raises, TypeError for an argument that does not exist here, and
        ValueError for the wrong count.
        """
        rows = {name: [value] for name, value in columns.items()}
        arguments = {**TRLS, **rows, "prompts": [prompt], "completions": [completion]}
        if missing := [name for name in self._required if name not in arguments]:
            given = ", ".join(("prompts", "completions", *columns))
            raise TypeError(
                f"the function asks for {', '.join(missing)}, which is no column: there are {given}"
            )
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._named}
        returned: Any = self._function(**arguments)
        rewards = list(finished(returned) if inspect.iscoroutine(returned) else returned)
        if len(rewards) != 1:
            raise ValueError(f"it returned {len(rewards)} rewards for one completion")
        return 0.0 if rewards[0] is None else rewards[0]


def finished(coroutine: Coroutine[object, None, T]) -> T:
    """Return the coroutine's result. The sandbox has no event loop and nothing to wait for: raises
    TypeError if the coroutine waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError("it waits for something, and there is nothing in the sandbox to wait for")


def _imported(setting: str, name: str, source: Source) -> Callable[..., Any]:
    """`module:function`, imported from exactly what was hashed. Raises ConfigError."""
    module, _, function = name.partition(":")
    try:
        imported_from(source, name)
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found
    except ConfigError:
        raise
    except Exception as error:  # whatever a module raises, it is its owner who has to hear of it
        raise ConfigError(f"{setting}: {name!r} cannot be imported: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An exception of somebody's code in one line, with the place in a file that is not ours where
    it was raised."""
    where = ""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_OURS):
            where = f" ({os.path.basename(code.co_filename)}:{frame.tb_lineno}, in {code.co_name})"
        frame = frame.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where[:150]}"


def imported_from(source: Source, name: str) -> None:
    """Import exactly the file that was hashed: not another of that name on the path, nor bytecode
    that lies beside it.

    name: of the task, for people. Raises ConfigError when the file has changed, and whatever it
    raises.
    """
    if _hash(Path(source.path), name) != source.content:
        raise ConfigError(
            f"{name!r} has changed in {source.path} since this node started: restart it, or put the"
            " file back"
        )
    if source.top in sys.modules:
        return
    folder = Path(source.path)
    file, inside = (folder / "__init__.py", [source.path]) if folder.is_dir() else (folder, None)
    spec = importlib.util.spec_from_file_location(
        source.top, file, submodule_search_locations=inside
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[source.top] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def load(tasks: Mapping[str, tuple[Source, Mapping[str, object]]]) -> dict[str, OwnTask]:
    """The owner's tasks in a process that has nothing to lose yet. Raises ConfigError.

    A library that starts threads would keep them outside the sandbox's filter, which is a thread's
    own: so there must be none.
    """
    if not tasks:
        return {}
    with importing(", ".join(tasks)):
        return {task: OwnTask(task, source, settings) for task, (source, settings) in tasks.items()}


@contextlib.contextmanager
def bytecode() -> Iterator[None]:
    """Let imports of a library use its cached bytecode; without it an import takes seconds.

    A task's version contains the version of the library, not the hash of its files."""
    prefix, sys.pycache_prefix = sys.pycache_prefix, None
    try:
        yield
    finally:
        sys.pycache_prefix = prefix


@contextlib.contextmanager
def importing(names: str) -> Iterator[None]:
    """Around imports of an owner's code in the scorer child. Raises ConfigError when they left a
    thread behind."""
    # bytecode is found by the time and size of its source; we go by content
    sys.pycache_prefix = os.devnull
    before = set(os.environ)
    os.environ.update(dict.fromkeys(THREADS, "1"))
    yield
    for name in set(os.environ) - before:  # some libraries set variables of their own
        del os.environ[name]
    if sys.platform == "linux" and (threads := len(os.listdir("/proc/self/task"))) > 1:
        remedy = (
            ": name the dataset in task.datasets instead"
            if {"datasets", "pyarrow", "pandas"} & set(sys.modules)
            else ""
        )
        raise ConfigError(
            f"task.modules: {names}: importing them started {threads - 1} threads, which a sandbox"
            f" cannot hold{remedy}"
        )
