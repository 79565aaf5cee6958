"""The tasks that a node may train on. The list of built-in tasks is short, because each scorer on
it has been reviewed (docs/own-task.md lists the tasks).

Every process imports this module. It therefore does not import reasoning-gym and looks up only its
version, and it does not import the owner's tasks (`install`) and only hashes their files.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from swarmnode.errors import ConfigError, Unavailable
from swarmnode.install import install_command
from swarmnode.tasks import (
    answers,
    builtin,
    chat,
    dataset,
    determinism,
    formulas,
    frames,
    games,
    own,
    owner_code,
    statement,
    taskset,
    verifiers,
)
from swarmnode.tasks.answers import EXTRACTS
from swarmnode.wire.limits import TASK_ID_BYTES, TEXT_BYTES

if TYPE_CHECKING:
    from swarmnode.config import DatasetConfig
    from swarmnode.tasks import openenv

ADAPTER_VERSION = "2"
"""Part of every task version. Change it when the adapter (`scorer.GymTask`) or the extraction of
the answer (`answers.find_answer`) changes."""


PROVIDED_KINDS = ("builtin", "chat", "reasoning_gym", "game")
"""Kinds of the tasks that ship, whose answer is in a tag unless their settings say otherwise."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One task: source of its questions and limits of its answers."""

    id: str
    kind: Literal["builtin", "chat", "reasoning_gym", "game", "own", "dataset", "environment"]
    generator: str
    """Name within its kind: a key of `builtin.GENERATORS` or `chat.GENERATORS`, a module of
    reasoning_gym such as `arithmetic.chain_sum`, `module:function`, the name of a game, a dataset's
    verifier, or `openenv`.
    """
    settings: Mapping[str, object]
    """Arguments of the generator."""
    max_answer_bytes: int = 256
    """Maximum UTF-8 bytes of an answer. A longer answer is not judged, and its reward is 0."""
    source: owner_code.Source | None = None
    """The owner's code: the task, or the reward function of a dataset."""
    rows: dataset.Source | None = None
    """Rows of a dataset."""
    extract: str = "tag"
    """Extraction method of the answer (`answers.extract`)."""
    fallback: str = "whole"
    """Extraction method if `extract` is `auto` and no answer is marked."""
    environment: openenv.Source | None = None
    """The operator's environment server."""
    turns: int = 1
    """Maximum number of actions of an episode, 1 to 32. Above 1, the task is an episode task."""
    nothing_after: bool = False
    """True if a completion with text after the answer earns 0."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Arguments of `answers.extract`: method, fallback, and the letters of choices."""
        return self.extract, self.fallback, self.rows.choices if self.rows is not None else ""

    @property
    def setup(self) -> frames.TaskSetup:
        """The task for a scorer child."""
        return frames.TaskSetup(self.id, self.source, self.rows, dict(self.settings))


OWN_ANSWER_BYTES = 4096


def _gym(group: str, name: str, **settings: object) -> TaskSpec:
    return TaskSpec(
        f"rg/{name}",
        "reasoning_gym",
        f"{group}.{name}",
        MappingProxyType(settings),
        OWN_ANSWER_BYTES,
        nothing_after=True,
    )


def _builtin(name: str, **settings: object) -> TaskSpec:
    return TaskSpec(
        f"builtin/{name}", "builtin", name, MappingProxyType(settings), nothing_after=True
    )


def _chat(name: str) -> TaskSpec:
    return TaskSpec(
        f"chat/{name}", "chat", name, MappingProxyType({}), OWN_ANSWER_BYTES, nothing_after=True
    )


_SPECS = (
    _builtin("copy", digits=3),
    _builtin("sum", terms=2),
    *(_chat(name) for name in chat.GENERATORS),
    _gym("arithmetic", "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    _gym(
        "arithmetic",
        "basic_arithmetic",
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
        operators=("+", "-", "*"),
        allow_parentheses=False,
        allow_negation=False,
    ),
    _gym("algorithmic", "base_conversion", min_base=2, max_base=3, min_value=0, max_value=15),
    _gym("algorithmic", "spell_backward", min_word_len=3, max_word_len=4),
    _gym("arithmetic", "gcd", min_value=1, max_value=20),
    _gym("arithmetic", "lcm", min_value=1, max_value=9),
    _gym("arithmetic", "count_bits", min_n=1, max_n=63),
    _gym(
        "arithmetic",
        "fraction_simplification",
        min_value=1,
        max_value=9,
        min_factor=2,
        max_factor=4,
        styles=("plain",),
    ),
    _gym("arithmetic", "products", min_digits=1, max_digits=1),
    # The tasks above are small enough for the embedded policy. The tasks below are for models that
    # can read.
    _gym(
        "arithmetic",
        "leg_counting",
        min_animals=3,
        max_animals=10,
        min_instances=1,
        max_instances=15,
    ),
    _gym("algorithmic", "count_primes", min_n=1, max_n=1000),
    _gym("algorithmic", "letter_counting", min_words=5, max_words=15),
    _gym("algorithmic", "caesar_cipher", min_words=3, max_words=8, min_rotation=1, max_rotation=25),
    _gym("algorithmic", "binary_alternation", min_n=10, max_n=30, p_solvable=0.8),
    _gym(
        "algorithmic",
        "string_synthesis",
        min_initial_blocks=0,
        max_initial_blocks=5,
        max_iterations=1000,
    ),
)
_PROVIDED = {spec.id: spec for spec in _SPECS} | {
    task: TaskSpec(task, "game", game.name, game.settings, OWN_ANSWER_BYTES, turns=game.turns)
    for task, game in games.GAMES.items()
}
_TASKS = dict(_PROVIDED)
TASKS: Mapping[str, TaskSpec] = MappingProxyType(_TASKS)
"""Allow-list, task id → task: the built-in tasks, and the tasks that `install` added in this
process."""
_LOADED_GAMES = set[str]()
LARGEST_SETTING = 10**6
"""Maximum of a generator's number setting, which may be the length of a loop."""
DATASETS = "datasets"
"""Folder of a data directory for rows files."""
DATASET_NAME = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9._-]*")
ENVIRONMENT_NAME = re.compile(r"env/[A-Za-z0-9][A-Za-z0-9._-]*")

_EVAL = "its scorer passes the answer to eval()"
_SYMPY = "its scorer passes the answer to sympy.parse_expr(), which is eval()"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "rg/binary_matrix": _EVAL,
        "rg/countdown": _SYMPY,
        "rg/intermediate_integration": _SYMPY,
        "rg/n_queens": _EVAL,
        "rg/polynomial_multiplication": _SYMPY,
        "rg/puzzle24": _SYMPY,
        "rg/simple_integration": _SYMPY,
        "rg/spiral_matrix": _EVAL,
        "rg/string_insertion": _EVAL,
    }
)
"""reasoning-gym datasets (0.1.25) whose scorers execute answer text, and how. Datasets that are
neither here nor in TASKS have not been reviewed and are refused too."""


@functools.cache
def task_version(task_id: str) -> str:
    """Return 16 hex digits over everything that decides a question and its reward. Nodes with equal
    versions regenerate equal questions.

    For an episode task this plays some episodes in two scorer children, which takes about a second.

    Raises:
        KeyError: The task is not on the list.
        Unavailable: The task's library is not installed.
        ConfigError: The environment is not deterministic.
    """
    spec = TASKS[task_id]
    if spec.rows is not None:
        judge = (
            ["own", spec.source.content]
            if spec.source is not None
            else ["swarmnode", verifiers.VERSION]
        )
        if spec.generator == "math":
            judge += [_installed_version(library, task_id) for library in formulas.LIBRARIES]
        source = ["dataset", spec.rows.content, spec.extract, answers.VERSION, *judge]
    elif spec.environment is not None:
        source = ["openenv", spec.environment.content, spec.extract, answers.VERSION]
    elif spec.source is not None:
        source = ["own/2", spec.source.content]
    elif spec.kind == "builtin":
        source = ["swarmnode", builtin.VERSION]
    elif spec.kind == "chat":
        source = ["swarmnode", chat.VERSION]
    elif spec.kind == "game":
        source = ["gymnasium", _installed_version("gymnasium", task_id), games.VERSION]
    else:
        version = _installed_version("reasoning-gym", task_id)
        source = ["reasoning-gym", version, "statement", statement.VERSION]
    if spec.kind in PROVIDED_KINDS and spec.extract != "tag":
        source = [*source, spec.extract, answers.VERSION]
    if spec.turns > 1 and spec.environment is None:  # the hash of a server's questions is known
        source = [*source, determinism.transcript_hash(spec)]
    if spec.kind in ("dataset", "environment") and spec.nothing_after:
        source = [*source, "nothing_after"]
    canonical = json.dumps(
        [
            ADAPTER_VERSION,
            spec.id,
            source,
            spec.generator,
            dict(spec.settings),
            spec.max_answer_bytes,
        ],
        sort_keys=True,
    )
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def _installed_version(package: str, task_id: str) -> str:
    """Return the installed version of a package that a task needs. Raises Unavailable."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        extra = "math" if package in formulas.LIBRARIES else package
        remedy = "" if package == "reasoning-gym" else f": {install_command(extra)}"
        raise Unavailable(
            f"task {task_id} needs {package}, which is not installed{remedy}"
        ) from None


def install(
    modules: Sequence[str],
    settings: Mapping[str, Mapping[str, object]],
    names: Iterable[str] = (),
) -> None:
    """Add the owner's tasks (`task.modules`, `task.settings`) to the list of this process. This
    runs no code of them.

    A manifest comes from another node, so its task names never become modules here.

    Args:
        names: Tasks that the node trains on. The scorers of this process load the libraries of the
            games among them.

    Raises:
        ConfigError: A module cannot be found, or a setting is invalid.
    """
    _LOADED_GAMES.update(name for name in names if name in games.GAMES)
    for task in modules:
        if len(task) > TASK_ID_BYTES:
            raise ConfigError(f"task.modules: {task!r} is longer than {TASK_ID_BYTES} characters")
        arguments = MappingProxyType(dict(settings.get(task, {})))
        own.check_weights(f"task.settings.{task}", arguments)
        own.check_turns(f"task.settings.{task}", arguments)
        source, turns = owner_code.find(task), own.read_turns(arguments)
        _TASKS[task] = TaskSpec(task, "own", task, arguments, OWN_ANSWER_BYTES, source, turns=turns)
    for task, given in settings.items():
        if task in _PROVIDED:
            _TASKS[task] = _adjust(_PROVIDED[task], given)
        elif task not in modules:
            raise ConfigError(
                f"task.settings: {task!r} is neither in task.modules nor a built-in task; a"
                " dataset has its own settings"
            )
    task_version.cache_clear()


def _adjust(spec: TaskSpec, given: Mapping[str, object]) -> TaskSpec:
    """Return a task that ships, with the owner's settings and extraction method. Raises
    ConfigError.

    Of a generator's settings, only numbers can change. The others, such as operators, were chosen
    so that no scorer executes an answer.
    """
    where, is_game = f"task.settings.{spec.id}", spec.kind == "game"
    extract, settings = spec.extract, dict(spec.settings)
    free = [
        name
        for name, value in spec.settings.items()
        if is_game or (spec.kind == "reasoning_gym" and type(value) in (int, float))
    ]
    for name, value in given.items():
        if name == "extract":
            if value not in (*EXTRACTS, "auto"):
                raise ConfigError(
                    f"{where}: extract is {value!r}, not one of auto, {', '.join(EXTRACTS)}"
                )
            extract = str(value)
        elif name not in free:
            known = ", ".join(["extract", *free])
            raise ConfigError(f"{where}: {name!r} cannot be set; there are {known}")
        elif is_game and type(value) is not type(settings[name]):
            raise ConfigError(
                f"{where}: {name} is {value!r}, not a value such as {settings[name]!r}"
            )
        elif not is_game and not _is_number(value, settings[name]):
            raise ConfigError(
                f"{where}: {name} is {value!r}, not a number from 0 to {LARGEST_SETTING} such as"
                f" {settings[name]}"
            )
        else:
            settings[name] = value
    own.check_turns(where, settings)
    return replace(
        spec,
        settings=MappingProxyType(settings),
        extract=extract,
        turns=own.read_turns(settings),
        # the other methods, and games, expect text around the answer
        nothing_after=not is_game and extract in ("tag", "boxed"),
    )


def loaded_games() -> list[TaskSpec]:
    """Return the games whose libraries the scorers of this process load."""
    return [TASKS[name] for name in sorted(_LOADED_GAMES)]


def _is_number(value: object, before: object) -> bool:
    return type(value) in (int, type(before)) and 0 <= float(str(value)) <= LARGEST_SETTING


def changed_settings() -> dict[str, dict[str, object]]:
    """Return built-in task → its settings that `install` changed in this process."""
    return {
        name: {
            key: value for key, value in TASKS[name].settings.items() if value != spec.settings[key]
        }
        for name, spec in _PROVIDED.items()
        if spec.kind != "game" and TASKS[name].settings != spec.settings
    }


def encode_tasks() -> str:
    """Return as JSON the tasks that a scorer child of this process loads: the owner's tasks and
    datasets, the loaded games, and the changed settings of built-in tasks.
    """
    own_tasks = [
        spec for spec in TASKS.values() if spec.source is not None or spec.rows is not None
    ]
    setups = [spec.setup for spec in (*own_tasks, *loaded_games())]
    setups += [
        frames.TaskSetup(task, None, None, settings)
        for task, settings in changed_settings().items()
    ]
    return frames.encode_setups(setups).decode()


def install_datasets(datasets: Mapping[str, DatasetConfig], directory: Path) -> None:
    """Add the datasets of this node's configuration (`task.datasets`) to the list of this process.
    Their rows are stored in `directory`.

    Raises:
        ConfigError: A dataset cannot be read or has an unusable row.
    """
    for task, config in datasets.items():
        if _is_environment(task, config.source):
            _TASKS[task] = _environment(task, config, directory)
            continue
        if not DATASET_NAME.fullmatch(task) or len(task) > TASK_ID_BYTES:
            allowed = f"letters, digits, '.', '_', '-', up to {TASK_ID_BYTES} characters"
            raise ConfigError(f"task.datasets: {task!r} is not data/<name>: {allowed}")
        by_taskset = config.source.startswith(taskset.PREFIX)
        if by_taskset:  # a taskset judges its own questions
            if unused := sorted(
                config.model_fields_set
                & {"verifier", "prompt", "answer", "weights", "revision", "subset", "split"}
            ):
                raise ConfigError(
                    f"task.datasets.{task}: {', '.join(unused)}: a taskset of verifiers sets that"
                    " itself"
                )
            config = config.model_copy(update={"verifier": config.source})
        known = verifiers.VERIFIERS.get(config.verifier)
        rows = dataset.prepare(task, config, directory)
        code = (
            taskset.find(config.source)
            if by_taskset
            else owner_code.find(config.verifier)
            if known is None
            else None
        )
        arguments: dict[str, object] = {"verifier": config.verifier, "template": config.template}
        if by_taskset:
            arguments["verifiers"] = taskset.installed_version()
        elif known is None:  # names of the columns for the reward function
            arguments |= {"prompt": config.prompt, "answer": config.answer}
        if config.turns > 1:
            if known is not None:
                raise ConfigError(
                    f"task.datasets.{task}: {own.TURNS} is for an own environment: name it as"
                    " verifier, module:function or module:Class"
                )
            arguments[own.TURNS] = config.turns
        arguments |= {own.WEIGHT + name: weight for name, weight in sorted(config.weights.items())}
        own.check_weights(f"task.datasets.{task}", arguments)
        if config.weights and known is not None:
            raise ConfigError(
                f"task.datasets.{task}: weights are for the components of a reward, which only an"
                " own reward function returns"
            )
        _TASKS[task] = TaskSpec(
            task,
            "dataset",
            config.verifier,
            MappingProxyType(arguments),
            dataset.ANSWER_BYTES if known is not None or config.turns > 1 else TEXT_BYTES,
            code,
            rows,
            "whole" if known is None and config.extract == "auto" else config.extract,
            known.fallback if known is not None else "whole",
            turns=config.turns,
            nothing_after=config.nothing_after,
        )
    task_version.cache_clear()


def _is_environment(task: str, source: str) -> bool:
    """Return True if the task is an environment by URL. Raises ConfigError if name and source
    disagree, because another node recognises an environment by its name only.
    """
    named, is_remote = (
        bool(ENVIRONMENT_NAME.fullmatch(task)) and len(task) <= TASK_ID_BYTES,
        bool(re.match("(ws|http)s?://", source)),
    )
    if named != is_remote:
        raise ConfigError(
            f"task.datasets: {task!r}: a task with a URL as its source, and no other task, is named"
            " env/<name>"
        )
    return named


def _environment(task: str, config: DatasetConfig, directory: Path) -> TaskSpec:
    from swarmnode.tasks import openenv

    found = openenv.prepare(task, config, directory)
    settings: dict[str, object] = {
        "observation": found.observation,
        "action": found.action,
        "template": found.template,
    }
    if config.turns > 1:
        settings[own.TURNS] = config.turns
    return TaskSpec(
        task,
        "environment",
        "openenv",
        MappingProxyType(settings),
        TEXT_BYTES if config.turns == 1 else OWN_ANSWER_BYTES,
        environment=found,
        extract="whole" if config.extract == "auto" else config.extract,
        turns=config.turns,
        nothing_after=config.nothing_after,
    )


def check_names(names: Iterable[str], *, crew: bool = False) -> None:
    """Check the names of `task.names`.

    Args:
        crew: A crew trains on the tasks, so episode tasks are refused too.

    Raises:
        ConfigError: A name is not a task of this node. It has the reason and the nearest name.
    """
    seen: set[str] = set()
    for name in names:
        if name in REFUSED:
            raise ConfigError(
                f"task.names: {name!r} is refused because {REFUSED[name]}: a peer could run code on"
                " this machine"
            )
        if name not in TASKS:
            if DATASET_NAME.fullmatch(name) or ENVIRONMENT_NAME.fullmatch(name):
                raise ConfigError(
                    f"task.names: {name!r} is not in task.datasets, which sets its source"
                )
            if owner_code.NAME.fullmatch(name):
                raise ConfigError(
                    f"task.names: {name!r} is not in task.modules, which names the modules that"
                    " this node may load"
                )
            close = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.75)
            hint = (
                f"; the nearest name on it: {close[0]!r}"
                if close
                else " (docs/own-task.md); a dataset is named in task.datasets"
            )
            raise ConfigError(f"task.names: {name!r} is not on the allow-list{hint}")
        if name in seen:
            raise ConfigError(f"task.names: {name!r} occurs twice")
        if crew and TASKS[name].turns > 1:
            raise ConfigError(
                f"task.names: {name!r} has episodes of several turns, and a crew trains on single"
                " answers: leave the task out, or set stages.mode to off"
            )
        seen.add(name)
    if not seen:
        raise ConfigError("task.names: no task")
