"""The scorer child: `python -m swarmnode.tasks.scorer`. It regenerates questions and judges
answers, for groups of peers and of this node alike.

It loads its tasks, enters its sandbox (`sandbox`), sends `Ready`, and answers requests on stdin
with responses on stdout until stdin ends. It has no key, weight, socket or file, and it keeps no
request. It exits at a request that it cannot parse; its client then starts another child.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NoReturn

import msgspec

from swarmnode.errors import ConfigError
from swarmnode.tasks import (
    builtin,
    chat,
    dataset,
    formulas,
    frames,
    games,
    own,
    owner_code,
    sandbox,
    statement,
    verifiers,
)
from swarmnode.tasks.builtin import Item
from swarmnode.tasks.episodes import Player, check_episode, score_values
from swarmnode.tasks.games import GameTask
from swarmnode.tasks.registry import TASKS, TaskSpec, changed_settings, install

_STDIN, _STDOUT = 0, 1
SLOW_FORMULAS = 16
"""Maximum number of answers to one question that may take all of `formulas.CPU_SECONDS`. More of
them cost the whole question."""
Settings = Mapping[str, object]


class Judge:
    """Scores questions of all loaded tasks.

    Args:
        tasks: The owner's tasks, datasets and games.
    """

    def __init__(self, tasks: Mapping[str, LoadedTask] | None = None) -> None:
        self._own = tasks or {}
        self._player = Player()
        gym = [spec for spec in TASKS.values() if spec.kind == "reasoning_gym"]
        self._gym = {spec.id: GymTask(spec) for spec in gym}

    def item(self, task_id: str, seed: int, index: int) -> builtin.Item:
        """Return the question at an address. Raises KeyError for a task that is not on the
        allow-list.
        """
        if task_id in self._gym:
            return self._gym[task_id].item(seed, index)
        brought = self._own.get(task_id)
        if isinstance(brought, dataset.DatasetTask | own.OwnTask):
            return brought.item(seed, index)
        spec = TASKS[task_id]
        if spec.kind == "chat":
            return chat.GENERATORS[spec.generator](seed + index)
        return builtin.GENERATORS[spec.generator](seed + index, **spec.settings)

    def score(self, question: frames.Question) -> frames.Scored:
        task = self._own.get(question.task)
        if task is not None and task.turns > 1:
            return self._player.play(task, question)
        return judge(question, self.item, task.weights if task is not None else {})


def _formula_seconds(question: frames.Question) -> int:
    """Return the CPU time in seconds that the formulas of a question may take, in addition to the
    limit of other questions.
    """
    answers = min(len(question.answers), SLOW_FORMULAS) if question.formulas else 0
    return math.ceil(formulas.CPU_SECONDS * answers)


def _check_formulas(task: str, layers: list[str]) -> None:
    """Check that math-verify works inside this sandbox. Raises ConfigError."""
    if "seccomp" not in layers:
        raise ConfigError(
            f"task.datasets.{task}: verifier 'math' runs large libraries on strangers' text, and"
            " this machine has no seccomp filter to confine them: use Linux on x86-64 or arm64, or"
            " the verifier boxed"
        )
    if not verifiers.math("(x+1)^2", "x^2+2x+1") or verifiers.math("x+1", "x+2"):
        raise ConfigError(f"task.datasets.{task}: math-verify does not work here")


LoadedTask = own.OwnTask | dataset.DatasetTask | GameTask


def _check_settings(judge: Judge) -> None:
    """Make questions of the built-in tasks whose settings the owner changed. Raises ConfigError."""
    for task in changed_settings():
        for index in range(3):
            try:
                judge.item(task, 0, index)
            except Exception as error:  # reasoning-gym does not check all settings
                raise ConfigError(
                    f"task.settings.{task}: no question with these settings:"
                    f" {owner_code.one_line(error)}"
                ) from error


def judge(
    question: frames.Question,
    item_at: Callable[[str, int, int], builtin.Item],
    weights: Mapping[str, float] = MappingProxyType({}),
) -> frames.Scored:
    """Judge the answers of a question. An answer whose reward function raises or returns no valid
    number has the reward 0.
    """
    try:
        item = item_at(question.task, question.seed, question.index)
    except (Exception, SystemExit) as error:  # only the owner's code raises  # noqa: BLE001
        return frames.Scored("", [0.0] * len(question.answers), 0, owner_code.one_line(error))
    values = [
        lambda answer=answer: 0.0 if answer is None else item.reward(answer)
        for answer in question.answers
    ]
    scored = score_values(item.prompt, values, weights)
    if question.reveal:
        return msgspec.structs.replace(
            scored, answer=item.answer, arguments=[*item.arguments], row=item.row
        )
    return scored


class GymTask:
    """One reasoning-gym dataset. Item i with seed s depends only on
    Random(s + i), so one object serves every seed.

    The reward is 1 for a text that is or states the dataset's answer in the dataset's spelling
    (`statement.states`), otherwise 0. The datasets' `score_answer` is not used. Some execute the
    answer. Some give partial credit to any text that contains it, or to any text, which a policy
    learns to exploit (docs/own-task.md).

    Raises:
        ConfigError: reasoning-gym refuses the settings.
    """

    def __init__(self, spec: TaskSpec) -> None:
        group, name = spec.generator.split(".")
        # `import reasoning_gym` would load more than a hundred generators, sympy and matplotlib
        # (1 s instead of 60 ms), and scorers that execute answers.
        with _bare_package("reasoning_gym"), _bare_package(f"reasoning_gym.{group}"):
            importlib.import_module(f"reasoning_gym.{group}.{name}")
            factory = importlib.import_module("reasoning_gym.factory")
            try:
                self._dataset = factory.create_dataset(name, seed=0, size=1, **spec.settings)
            except (AssertionError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"task.settings.{spec.id}: reasoning-gym does not take these settings: {error}"
                ) from None

    def item(self, seed: int, index: int) -> Item:
        """Return the question at (seed, index). It generates one item, not a whole dataset."""
        self._dataset.seed = seed
        entry: dict[str, object] = self._dataset[index]
        answer = str(entry["answer"])
        return Item(
            str(entry["question"]), answer, lambda text: float(statement.states(text, answer))
        )


@contextlib.contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Make submodules of the package `name` importable without executing the package. It does
    nothing if the package is loaded already.

    A package in `sys.modules` tells the import system where its submodules are. It is removed
    afterwards, so that `import reasoning_gym` elsewhere in the process loads the whole package.
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


class NullOutput(io.TextIOBase):
    """Standard output that discards the output of the owner's code and of libraries; the descriptor
    carries responses only.
    """

    def write(self, text: str, /) -> int:
        return len(text)


def main(parent: int, cpu_seconds: int, setups: str = "[]") -> None:
    """Serve until stdin ends.

    Args:
        parent: Pid of the client.
        cpu_seconds: CPU time limit of one question, in seconds, besides that of its formulas.
        setups: The owner's tasks, datasets and games, as JSON of `registry.encode_tasks`.
    """
    sys.stdout = NullOutput()
    signal.alarm = sandbox.refuse_alarm
    try:
        tasks = _load(frames.decode_setups(setups))
        judge = Judge(tasks)
        layers = sandbox.enter(parent)
        refusals = dict[str, dict[str, int]]()
        for name, task in tasks.items():
            if task.turns > 1:
                check_episode(name, task)
            elif not isinstance(task, GameTask):
                task.check()
            if isinstance(task, dataset.DatasetTask) and task.has_formulas:
                _check_formulas(name, layers)
            refusals[name] = sandbox.take_refusals()
        _check_settings(judge)
    except ConfigError as error:
        _exit_with(" ".join(str(error).split()))
    _write(frames.encode_scored(frames.Ready(os.getpid(), layers)))
    while (request := _read_frame()) is not None:
        scored = []
        for question in frames.decode_questions(request):
            sandbox.allow_cpu(cpu_seconds + _formula_seconds(question))
            result = judge.score(question)
            # Refusals of a task's check are reported with its first question.
            refused = refusals.pop(question.task, {}) | sandbox.take_refusals()
            scored.append(msgspec.structs.replace(result, refusals=refused) if refused else result)
        _write(frames.encode_scored(scored))


def _load(brought: list[frames.TaskSetup]) -> dict[str, LoadedTask]:
    """Load the owner's tasks, datasets and games. Runs the owner's code. Raises ConfigError."""
    ours, named = dict[str, Settings](), dict[str, Settings]()
    modules = dict[str, tuple[owner_code.Source, Settings]]()
    datasets = dict[str, tuple[dataset.Source, Settings, owner_code.Source | None]]()
    for each in brought:
        if each.rows is not None:
            datasets[each.task] = (each.rows, each.settings, each.code)
        elif each.code is not None:
            modules[each.task] = (each.code, each.settings)
        elif each.task in games.GAMES:
            named[each.task] = each.settings
        else:
            ours[each.task] = each.settings
    install([], ours)
    if any(settings["verifier"] == "math" for _, settings, _ in datasets.values()):
        with owner_code.guard_imports("math-verify"), owner_code.cached_bytecode():
            try:
                formulas.load()
            except ImportError as error:
                raise ConfigError(f"the verifier math needs {error.name}") from None
    return {**games.load(named), **own.load(modules), **dataset.load(datasets, check_episode)}


def _read_frame() -> bytes | None:
    header = _read(frames.HEADER.size)
    if header is None:
        return None
    (length,) = frames.HEADER.unpack(header)
    if length > frames.FRAME_BYTES:
        _exit_with("a request is too long")
    return _read(length)


def _read(length: int) -> bytes | None:
    """Read exactly `length` bytes; None if stdin ends before."""
    data = bytearray()
    while len(data) < length:
        chunk = os.read(_STDIN, min(length - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _write(body: bytes) -> None:
    view = memoryview(frames.HEADER.pack(len(body)) + body)
    while view:
        view = view[os.write(_STDOUT, view) :]


def _exit_with(reason: str) -> NoReturn:
    os.write(2, f"scorer: {reason}\n".encode())
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
