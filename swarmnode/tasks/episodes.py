"""Episodes in the scorer child: a policy's actions, replayed in an environment.

    play   a question and the actions so far of each episode  ─▶  observations, ended or not, reward

An environment is deterministic given its question and the actions. The author of an episode,
`swarmnode task try` and every receiver therefore call the same function. None of them keeps a
session, and a restarted child has lost nothing.

The child keeps the environments of recent episodes, so that the next turn of an author costs one
step instead of a replay. Callers cannot observe that.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from swarmnode.errors import ConfigError
from swarmnode.latest import Latest
from swarmnode.tasks import own, owner_code, seeds
from swarmnode.tasks.builtin import Value
from swarmnode.tasks.frames import EPISODE_BYTES, OBSERVATION_BYTES, Episode, Question, Scored

LIVE_EPISODES = 256
"""Maximum number of episodes whose environments stay in memory; the least recent is dropped."""
CUT = "\n[cut]"
"""End of an observation that exceeded its limit."""
FAILED = "[the environment failed]"
NOT_READ = "[the action was not read]"
ROUNDING = 1e-9
"""Tolerance for sums of rewards outside of 0 to 1: ten times 0.1 is not exactly 1."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Step = Callable[[str], tuple[str, Value, bool]]
"""An environment after its first text: action → (observation, reward, done)."""


class EpisodeTask(Protocol):
    """Interface of a task that `Player` can play."""

    @property
    def turns(self) -> int:
        """Maximum number of actions of an episode."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Component name → weight in the reward."""

    def start(self, seed: int, index: int) -> tuple[str, Callable[[str], Any]]:
        """Begin the episode of the question at an address. Return its first text and the
        environment.
        """


@dataclass
class EpisodeRun:
    """An episode and its environment after `len(observations)` actions."""

    first: str
    step: Step | None
    """None after the end of the episode, and in the copies that `Player` returns."""
    random_state: RandomState | None = None
    """None if the episode does not own the state of the global random generators."""
    observations: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    """Reward of each action."""
    done: bool = False
    error: str = ""
    """Exception of the environment, in one line. The reward is then 0."""


class Player:
    """Plays episodes of any task.

    Args:
        live_episodes: Number of environments that are kept for the next turn.
    """

    def __init__(self, live_episodes: int = LIVE_EPISODES) -> None:
        self._live = Latest[tuple[object, ...], EpisodeRun](live_episodes)

    def play(self, task: EpisodeTask, question: Question) -> Scored:
        """Replay every episode of a question. A question without episodes returns its first text
        only.

        An exception of an environment ends its episode with the reward 0. If the environment cannot
        start, the result has no prompt.
        """
        runs = dict[tuple[str | None, ...], EpisodeRun]()
        histories = [tuple(actions[: task.turns]) for actions in question.actions]
        try:
            for history in histories or [()]:
                if history not in runs:  # equal actions have equal results
                    runs[history] = self._run(task, question, history)
            prompts = {run.first for run in runs.values()}
            if len(prompts) > 1:
                raise ValueError("the same question began with two different texts")
        except (Exception, SystemExit) as error:  # the owner's code # noqa: BLE001
            return Scored("", [0.0] * len(histories), 0, owner_code.one_line(error))
        return score_runs([runs[history] for history in histories], task.weights, *prompts)

    def _run(
        self, task: EpisodeTask, question: Question, history: tuple[str | None, ...]
    ) -> EpisodeRun:
        """Return a copy of the episode after `history`; later turns do not change it. Raises
        the exceptions of the environment's start."""
        address = (question.task, question.seed, question.index)
        run = self._live.pop((address, history), None)
        if run is None and history:
            run = self._live.pop((address, history[:-1]), None)
        run = run or _start_run(task, question)
        take_actions(task.turns, run, history)
        if run.error.startswith("MemoryError") and self._live:
            # Memory of other episodes' environments must not decide this episode.
            self._live.clear()
            run = _start_run(task, question)
            take_actions(task.turns, run, history)
        self._live[address, history] = run
        return replace(run, step=None, observations=[*run.observations], values=[*run.values])


def check_episode(name: str, task: EpisodeTask) -> None:
    """Play some turns of empty actions in the sandbox. Raises ConfigError if the environment cannot
    be played.
    """
    actions: list[str | None] = [""] * min(task.turns, 4)
    played = Player().play(task, Question(name, 0, 0, [], actions=[actions]))
    if played.error:
        raise ConfigError(f"{name!r} does not work: {played.error}")


def _start_run(task: EpisodeTask, question: Question) -> EpisodeRun:
    seed_random(seeds.environment_seed(question.seed, question.index))
    first, step = task.start(question.seed, question.index)
    if not isinstance(first, str) or not callable(step):
        raise TypeError("an episode begins with (first text, step function)")
    text = clean(first, 4 * own.PROMPT_CHARACTERS)
    if not 0 < len(text) <= own.PROMPT_CHARACTERS:
        raise TypeError(f"its first text has not 1 to {own.PROMPT_CHARACTERS} characters")
    return EpisodeRun(text, step, random_state())


def take_actions(turns: int, run: EpisodeRun, history: Sequence[str | None]) -> None:
    """Take the actions of `history` that the episode has not taken yet, until it ends."""
    for action in history[len(run.observations) :]:
        if run.done:
            return
        value: Value = 0.0
        left = EPISODE_BYTES - sum(len(text.encode()) for text in run.observations)
        try:
            if action is None:
                text, run.done = NOT_READ, True
                run.values.clear()
            else:
                text, value, run.done = _take_step(run, action)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            text, run.done, run.error = FAILED, True, owner_code.one_line(error)
        observation = clean(text, min(OBSERVATION_BYTES, left))
        run.observations.append(observation)
        run.values.append(value)
        if len(run.observations) == turns or len(observation.encode()) + len(CUT) >= left:
            run.done = True
        if run.done:
            run.step = None


def _take_step(run: EpisodeRun, action: str) -> tuple[str, Value, bool]:
    """Take one step of the environment with the episode's own random state.

    Raises the exceptions of the environment, and TypeError if it does not return a step."""
    assert run.step is not None
    if run.random_state is not None:
        restore_random(run.random_state)
    returned: Any = run.step(action)
    if run.random_state is not None:
        run.random_state = random_state()
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError("a step returns (observation, reward, done)")
    text, value, done = returned
    if not isinstance(text, str):
        raise TypeError(f"an observation is a text, not {type(text).__name__}")
    if done not in (True, False):
        raise TypeError(f"done is True or False, not {str(done)[:40]!r}")
    return text, value, bool(done)


def score_runs(runs: Sequence[EpisodeRun], weights: Mapping[str, float], prompt: str) -> Scored:
    """Return the result of a question's episodes: rewards and components of those that ended."""
    scored = score_values(
        prompt,
        [partial(sum_rewards, run.values if run.done and not run.error else []) for run in runs],
        weights,
    )
    failed = [run.error for run in runs if run.error]
    return msgspec.structs.replace(
        scored,
        errors=scored.errors + len(failed),
        error=scored.error or "".join(failed[-1:]),
        episodes=[Episode(run.observations, run.done) for run in runs],
    )


def score_values(
    prompt: str, values: Iterable[Callable[[], Value]], weights: Mapping[str, float]
) -> Scored:
    """Return rewards and components of a question's completions, each from a function that returns
    its value. A completion whose function raises or returns no valid value has the reward 0."""
    rewards, components, errors, last = list[float](), list[dict[str, float]](), 0, ""
    names = frozenset[str]()
    for value_of in values:
        try:
            value = value_of()
            reward, parts = own.total_reward(value, weights)
            found = own.component_names(value)
            if names and found and names != found:
                raise ValueError(
                    f"components {', '.join(sorted(found))} differ from those of another"
                    " completion of this question"
                )
            names = names or found
        except (Exception, SystemExit) as error:  # noqa: BLE001
            reward, parts, errors, last = 0.0, {}, errors + 1, owner_code.one_line(error)
        rewards.append(reward)
        components.append(parts)
    return Scored(prompt, rewards, errors, last, components if any(components) else [])


def sum_rewards(values: Sequence[Value]) -> Value:
    """Return the sum of the rewards of an episode's steps, or the sums of their components by name.

    Raises:
        ValueError, TypeError: The values cannot be added.
    """
    tables = [value for value in values if isinstance(value, Mapping)]
    numbers = [float(value) for value in values if not isinstance(value, Mapping)]
    if not tables:
        return _round(math.fsum(numbers))
    if any(numbers):
        raise TypeError("some steps return components, others a number that is not 0")
    found: dict[str, list[float]] = {}
    for table in tables:
        for name, number in table.items():
            given = found.setdefault(str(name), [])
            if number is not None:
                given.append(float(number))
    return {name: _round(math.fsum(given)) for name, given in found.items() if given}


def _round(total: float) -> float:
    """Return 0 or 1 for a sum that misses it by a rounding error."""
    return min(1.0, max(0.0, total)) if -ROUNDING <= total <= 1.0 + ROUNDING else total


def clean(text: str, most_bytes: int) -> str:
    """Return `text` without control characters, terminal escapes and lone surrogates, in at most
    `most_bytes` bytes of UTF-8. A longer text is cut at a character and ends with `CUT`.
    """
    text = text[: 4 * most_bytes + 1].replace("\r\n", "\n")
    data = _CONTROLS.sub("", _ESCAPES.sub("", text)).encode(errors="ignore")
    if len(data) <= most_bytes:
        return data.decode()
    room = most_bytes - len(CUT)
    return data[:room].decode(errors="ignore") + CUT if room >= 0 else ""


# Environments may draw from the process's global random generators. Each episode has its
# own state of these generators: seeded from its question at the start, saved and restored around
# each step.

RandomState = tuple[tuple[Any, ...], Any]
"""State of `random`, and of `numpy.random` if it is loaded, else None."""


def seed_random(seed: int) -> None:
    """Seed the global random generators with 32 bits."""
    random.seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(seed)


def random_state() -> RandomState:
    """Return the state of the global random generators."""
    numpy_random = sys.modules.get("numpy.random")
    return random.getstate(), numpy_random.get_state() if numpy_random is not None else None


def restore_random(state: RandomState) -> None:
    """Restore the state of the global random generators."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy.random"].set_state(state[1])
