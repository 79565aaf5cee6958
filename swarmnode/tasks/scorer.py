"""The scorer child: `python -m swarmnode.tasks.scorer`. Regenerates questions and judges answers,
for peers' groups and our own alike.

It loads its tasks, locks itself in (`sandbox`), says so, and then answers requests on stdin with
responses on stdout until stdin ends. It holds no key, no weight, no socket and no file, and it
forgets every request. A request it cannot parse ends it: its client starts another.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

import msgspec

from swarmnode.errors import ConfigError
from swarmnode.tasks import builtin, dataset, frames, games, own, sandbox
from swarmnode.tasks.episodes import Player, prove
from swarmnode.tasks.games import GameTask
from swarmnode.tasks.gym import GymTask
from swarmnode.tasks.registry import TASKS, TaskSpec, adjusted, install

_STDIN, _STDOUT = 0, 1
Settings = Mapping[str, object]


class Judge:
    """All tasks, ready to be asked."""

    def __init__(self, tasks: Mapping[str, Brought] | None = None) -> None:
        """`tasks`: those that the node's owner brings, datasets and games included."""
        self._own = tasks or {}
        self._player = Player()
        gym = [spec for spec in TASKS.values() if spec.kind == "reasoning_gym"]
        self._gym = {
            spec.id: [_gym_task(spec.at(difficulty)) for difficulty in range(spec.levels)]
            for spec in gym
        }

    def item(self, task_id: str, seed: int, index: int, difficulty: int = 0) -> builtin.Item:
        """The question at an address. Raises KeyError for a task that is not on the allow-list."""
        if task_id in self._gym:
            return self._gym[task_id][difficulty].item(seed, index)
        brought = self._own.get(task_id)
        if isinstance(brought, dataset.DatasetTask):
            return brought.item(seed, index, difficulty)
        if isinstance(brought, own.OwnTask):
            return brought.item(seed, index)
        spec = TASKS[task_id]
        return builtin.GENERATORS[spec.generator](seed + index, **spec.settings)

    def score(self, question: frames.Question) -> frames.Scored:
        task = self._own.get(question.task)
        if task is not None and task.turns > 1:
            return self._player.play(task, question)
        return judge(question, self.item, task.weights if task is not None else {})


Brought = own.OwnTask | dataset.DatasetTask | GameTask


def _gym_task(spec: TaskSpec) -> GymTask:
    """One of reasoning-gym's, as it is set. Raises ConfigError for settings that it does not
    take."""
    try:
        return GymTask(spec)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"task.settings.{spec.id}: reasoning-gym does not take these settings: {error}"
        ) from None


def _prove_settings(judge: Judge) -> None:
    """Make questions of the tasks whose settings are the owner's. Raises ConfigError."""
    for task in adjusted():
        for index in range(3):
            try:
                for difficulty in range(TASKS[task].levels):
                    judge.item(task, 0, index, difficulty)
            except Exception as error:  # reasoning-gym's, for settings that it does not check
                raise ConfigError(
                    f"task.settings.{task}: no question with these settings: {own.one_line(error)}"
                ) from error


def judge(
    question: frames.Question,
    item_at: Callable[[str, int, int, int], builtin.Item],
    weights: Mapping[str, float] = MappingProxyType({}),
) -> frames.Scored:
    """Rewards in [0, 1], whatever a task's code does: what raises or returns nonsense has not
    accepted the answer."""
    try:
        item = item_at(question.task, question.seed, question.index, question.difficulty)
    except (Exception, SystemExit) as error:  # an owner's code; ours does not raise  # noqa: BLE001
        return frames.Scored("", [0.0] * len(question.answers), 0, own.one_line(error))
    if item.votes is not None:
        scored = frames.Scored(item.prompt, item.votes(question.answers))
        return msgspec.structs.replace(scored, answer=item.answer) if question.reveal else scored
    rewards, components, errors, last = [], list[dict[str, float]](), 0, ""
    names = frozenset[str]()
    for answer in question.answers:
        try:
            value = 0.0 if answer is None else item.reward(answer)
            reward, made_of = own.total(value, weights)
            theirs = own.names_of(value)
            if names and theirs and names != theirs:
                raise ValueError(
                    f"components {', '.join(sorted(theirs))}, others of this question have others"
                )
            names = names or theirs
        except (Exception, SystemExit) as error:  # noqa: BLE001
            reward, made_of, errors, last = 0.0, {}, errors + 1, own.one_line(error)
        rewards.append(reward)
        components.append(made_of)
    scored = frames.Scored(
        item.prompt, rewards, errors, last, components if any(components) else []
    )
    if question.reveal:
        return msgspec.structs.replace(scored, answer=item.answer, arguments=[*item.arguments])
    return scored


class Discarded(io.TextIOBase):
    """Discards standard output of the owner's code and of libraries; the descriptor carries
    responses only."""

    def write(self, text: str, /) -> int:
        return len(text)


def main(parent: int, cpu_seconds: int, told: str = "[]") -> None:
    """Serve until stdin ends. `parent`: pid of the client; `cpu_seconds`: CPU time that one request
    may use; `told`: the owner's tasks, datasets and games as JSON, see `child.brought_tasks`."""
    sys.stdout = Discarded()
    try:
        tasks = _load(frames.decode_brought(told))
        judge = Judge(tasks)
        layers = sandbox.enter(parent)
        for name, task in tasks.items():
            if task.turns > 1:
                prove(name, task)
            elif not isinstance(task, GameTask):
                task.prove()
        _prove_settings(judge)
    except ConfigError as error:
        _give_up(" ".join(str(error).split()))
    _write(frames.encode_scored(frames.Ready(os.getpid(), layers)))
    while (request := _read_frame()) is not None:
        sandbox.allow_cpu(cpu_seconds)
        questions = frames.decode_questions(request)
        _write(frames.encode_scored([judge.score(question) for question in questions]))


def _load(brought: list[frames.Brought]) -> dict[str, Brought]:
    """The owner's tasks, datasets and games. Runs the owner's code. Raises ConfigError."""
    ours, named = dict[str, Settings](), dict[str, Settings]()
    modules = dict[str, tuple[own.Source, Settings]]()
    datasets = dict[str, tuple[dataset.Source, Settings, own.Source | None]]()
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
    return {**games.load(named), **own.load(modules), **dataset.load(datasets)}


def _read_frame() -> bytes | None:
    header = _read(frames.HEADER.size)
    if header is None:
        return None
    (length,) = frames.HEADER.unpack(header)
    if length > frames.FRAME_BYTES:
        _give_up("a request is too long")
    return _read(length)


def _read(length: int) -> bytes | None:
    """Exactly `length` bytes, or None when stdin ends before."""
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


def _give_up(reason: str) -> NoReturn:
    os.write(2, f"scorer: {reason}\n".encode())
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
