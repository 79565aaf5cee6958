"""The owner's own tasks: `package.module:function`, named in `task.modules`. docs/own-task.md is
the guide.

    parents   find the file ─ hash it ─▶ task version   (they import and run nothing of it)
    scorer    find the file ─ hash it again, equal? ─ import ─ enter the sandbox ─ try it ─▶ ready

A function takes a `random.Random` and its settings. It returns the prompt and the function answer →
reward, 0 to 1:

    def reverse(rng, letters=4):
        word = "".join(rng.choice("abcdefgh") for _ in range(letters))
        return f"Spell this backward: {word}", lambda answer: float(answer == word[::-1])

For an episode of several turns (`turns` in its settings), it returns the first text and a function
action → (observation, reward, done).

The code is part of the task's identity. Nodes with different code have different task versions and
therefore different swarms.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from swarmnode.errors import ConfigError
from swarmnode.tasks import owner_code, seeds, tools
from swarmnode.tasks.builtin import Item, Value
from swarmnode.wire.limits import TURNS as MOST_TURNS

PROMPT_CHARACTERS = 8192
HELD_OUT = 16
"""One prompt in HELD_OUT is held out."""
DRAWS = 8 * HELD_OUT
"""Maximum number of draws of a question of the required side (held out or training). A task with
too few questions then returns one of the other side."""

WEIGHT = "weight."
"""Prefix of the settings that are weights of a reward's components. The function does not receive
them."""
TURNS = "turns"
"""Setting that makes an episode task of a function: the maximum number of actions of an episode.
The function receives it if it has a parameter of that name."""
COMPONENTS = 8
COMPONENT_CHARACTERS = 32

Generator = Callable[..., tuple[str, Callable[[str], Any]]]
RewardFunction = Callable[..., Sequence[Value | None]]
"""TRL's interface: `f(prompts, completions, **columns)` takes lists of one length. It returns a
number per completion, or None if it does not apply. In addition to TRL, it may return components by
name instead of a number; each may be None."""
TRL_CALLBACKS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"log_extra": lambda *_, **__: None, "log_metric": lambda *_, **__: None}
)
"""Callbacks that TRL passes to a reward function. They log nothing here."""


class OwnTask:
    """One task of the owner, in the scorer child only: the constructor runs the owner's code.

    Raises:
        ConfigError: The code has changed since it was hashed, or cannot be imported.
    """

    def __init__(
        self, task: str, source: owner_code.Source, settings: Mapping[str, object]
    ) -> None:
        self._task = task
        self._generate = environment("task.modules", task, source)
        parameters = inspect.signature(self._generate).parameters
        self._settings = {
            name: value
            for name, value in settings.items()
            if not name.startswith(WEIGHT) and (name != TURNS or name in parameters)
        }
        self.weights = read_weights(settings)
        self.turns = read_turns(settings)
        self._splits, self._seeded = "split" in parameters, next(iter(parameters), "") == "seed"

    def item(self, seed: int, index: int) -> Item:
        """Return the question at (seed, index). An evaluation seed has questions that training
        never has.

        A function with a parameter `split` receives "train" or "test" and separates the questions
        itself. For any other function, the hash of a prompt decides its side (a sixteenth of all
        prompts are held out), and a draw of the wrong side is repeated.
        """
        held_out = seeds.is_evaluation(seed)
        item = self._draw(seed + index, held_out)
        for attempt in range(1, DRAWS):
            if self._splits or _is_held_out(item.prompt) == held_out:
                break
            item = self._draw(f"{seed + index} {attempt}", held_out)
        return item

    def start(self, seed: int, index: int) -> tuple[str, Callable[[str], Any]]:
        """Begin the episode of the question at an address. Only held-out questions have odd seeds,
        so training never begins an episode of the evaluation.
        """
        return self._generate_question(
            seeds.environment_seed(seed, index), seeds.is_evaluation(seed)
        )

    def _generate_question(
        self, number: int | str, held_out: bool
    ) -> tuple[str, Callable[[str], Any]]:
        """Call the owner's function with a random generator or seed derived from `number`."""
        split = {"split": "test" if held_out else "train"} if self._splits else {}
        if not self._seeded:
            return self._generate(random.Random(number), **split, **self._settings)
        seed = number if isinstance(number, int) else random.Random(number).getrandbits(63)
        return self._generate(seed, **split, **self._settings)

    def _draw(self, number: int | str, held_out: bool) -> Item:
        prompt, reward = self._generate_question(number, held_out)
        if not isinstance(prompt, str) or not 0 < len(prompt) <= PROMPT_CHARACTERS:
            raise TypeError(
                f"{self._task} made a prompt that is not a text of 1 to {PROMPT_CHARACTERS}"
                " characters"
            )
        return Item(prompt, "", lambda answer: _not_a_step(reward(answer)))

    def check(self) -> None:
        """Make a few questions and judge an empty answer inside the sandbox, so that errors appear
        at the start. Raises ConfigError.
        """
        try:
            for index in range(3):
                first, second = self.item(0, index), self.item(0, index)
                reward, _ = total_reward(first.reward(""), self.weights)
                if first.prompt != second.prompt:
                    raise ValueError(
                        "the same seed gave two questions: draw from its random.Random argument and"
                        " nothing else"
                    )
                if not 0.0 <= reward <= 1.0:
                    raise ValueError(f"its reward for an empty answer is {reward}, not in 0 to 1")
        except Exception as error:
            raise ConfigError(
                f"task.modules: {self._task!r} does not work: {owner_code.one_line(error)}"
            ) from error


def _not_a_step(value: Any) -> Value:  # noqa: ANN401 # the owner's code may return anything
    if isinstance(value, tuple):
        raise TypeError(
            f"it returned a tuple, as an episode's step does: set {TURNS} in its settings to the"
            " maximum number of actions of an episode"
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


def environment(setting: str, name: str, source: owner_code.Source) -> Generator:
    """Return the owner's `module:function`, or a function that begins an episode of
    `module:Class`. Runs the owner's code. Raises ConfigError."""
    found = owner_code.import_function(setting, name, source)
    if not tools.is_environment(found):
        return found
    with owner_code.cached_bytecode():
        return tools.generator(name, found)


def reward_function(name: str, source: owner_code.Source) -> RewardFunction:
    """Return the owner's reward function `module:function` of a dataset. Runs the owner's code.
    Raises ConfigError.
    """
    function: RewardFunction = owner_code.import_function("task.datasets", name, source)
    return function


def check_weights(where: str, settings: Mapping[str, object]) -> None:
    """Raise ConfigError if a weight is not a number from 0 to 1e6."""
    for name, value in settings.items():
        if name.startswith(WEIGHT) and not (isinstance(value, int | float) and 0 <= value < 1e6):
            raise ConfigError(f"{where}: {name} is {value!r}; a weight is a number of at least 0")


def read_turns(settings: Mapping[str, object]) -> int:
    """Return the maximum number of actions of an episode of a task with these settings; 1 without
    the setting.
    """
    return int(str(settings.get(TURNS, 1)))


def check_turns(where: str, settings: Mapping[str, object]) -> None:
    """Raise ConfigError if `turns` is not a whole number from 1 to MOST_TURNS."""
    turns = settings.get(TURNS, 1)
    if type(turns) is not int or not 1 <= turns <= MOST_TURNS:
        raise ConfigError(f"{where}: {TURNS} is {turns!r}, not a whole number, 1 to {MOST_TURNS}")


def read_weights(settings: Mapping[str, object]) -> dict[str, float]:
    """Return component name → weight from a task's settings. A component that is not in the result
    has the weight 1.
    """
    return {
        name.removeprefix(WEIGHT): float(str(value))
        for name, value in settings.items()
        if name.startswith(WEIGHT)
    }


def total_reward(value: Value, weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return (reward, components by name) for a value that the owner's code returned.

    The reward is the weighted mean of the components; the default weight is 1. A component that is
    None does not apply to this completion and is excluded. If no component applies, the reward is
    0.

    Raises:
        ValueError, TypeError: A value is not a number from 0 to 1, or the names are invalid.
    """
    if not isinstance(value, Mapping):
        return _check_reward(value, ""), {}
    names = component_names(value)
    if not 0 < len(value) <= COMPONENTS:
        raise ValueError(f"a reward of {len(value)} components, not 1 to {COMPONENTS}")
    if len(names) < len(value):
        raise ValueError(
            f"names of components are the same in their first {COMPONENT_CHARACTERS} characters"
        )
    if sum(weights.get(name, 1.0) for name in names) <= 0:
        raise ValueError(f"all components ({', '.join(sorted(names))}) have the weight 0")
    components = {
        str(name)[:COMPONENT_CHARACTERS]: _check_reward(number, f" of {name}")
        for name, number in value.items()
        if number is not None
    }
    weight = sum(weights.get(name, 1.0) for name in components)
    if weight <= 0:
        return 0.0, components
    weighted = sum(weights.get(name, 1.0) * number for name, number in components.items())
    return min(1.0, weighted / weight), components


def component_names(value: Value) -> frozenset[str]:
    """Return the names of a reward's components; empty for a single number."""
    if not isinstance(value, Mapping):
        return frozenset()
    return frozenset(str(name)[:COMPONENT_CHARACTERS] for name in value)


def _check_reward(number: float, what: str) -> float:
    number = float(number)
    if not 0.0 <= number <= 1.0:  # NaN fails both comparisons
        raise ValueError(f"a reward{what} of {number}, not in 0 to 1")
    return number


class OwnReward:
    """A reward function of the owner, called as TRL calls it: by keyword, with `prompts`,
    `completions` and every column of the dataset.

    A function without `**columns` receives only the arguments that it names.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function in C has no signature
            parameters = ()  # type: ignore[assignment]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._named = {p.name for p in by_name}
        self._required = [p.name for p in by_name if p.default is p.empty]
        self._takes_all = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)

    def arguments(self, columns: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the arguments that the function receives for a row."""
        names = ("prompts", "completions", *columns)
        return names if self._takes_all else tuple(name for name in names if name in self._named)

    def reward(self, prompt: str, completion: str, columns: Mapping[str, object]) -> Value:
        """Return the reward of one completion; 0 if the function returns None (does not apply).

        Raises:
            TypeError: The function requires an argument that does not exist.
            ValueError: The function does not return exactly one reward.
            Exception: Any error of the function.
        """
        rows = {name: [value] for name, value in columns.items()}
        arguments = {**TRL_CALLBACKS, **rows, "prompts": [prompt], "completions": [completion]}
        if missing := [name for name in self._required if name not in arguments]:
            given = ", ".join(("prompts", "completions", *columns))
            raise TypeError(
                f"the function requires {', '.join(missing)}, which is not a column: there are"
                f" {given}"
            )
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._named}
        returned: Any = self._function(**arguments)
        rewards = list(
            owner_code.run_coroutine(returned) if inspect.iscoroutine(returned) else returned
        )
        if len(rewards) != 1:
            raise ValueError(f"it returned {len(rewards)} rewards for one completion")
        return 0.0 if rewards[0] is None else rewards[0]


def load(tasks: Mapping[str, tuple[owner_code.Source, Mapping[str, object]]]) -> dict[str, OwnTask]:
    """Load the owner's tasks before the process enters its sandbox. Raises ConfigError."""
    if not tasks:
        return {}
    with owner_code.guard_imports(", ".join(tasks)):
        return {task: OwnTask(task, source, settings) for task, (source, settings) in tasks.items()}
