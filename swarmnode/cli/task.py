"""`swarmnode task`: try a task before a node trains on it."""

from __future__ import annotations

import functools
import json as json_module
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load
from swarmnode.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from swarmnode.tasks.trial import EpisodeTrial, QuestionTrial

task_app = App(name="task", help="Try a task before training on it.")
MAX_TEXT_CHARACTERS = 400
"""Length of a shortened text."""
SAMPLING_TIMEOUT_SECONDS = 1800.0


@task_app.command(name="try")
def task_try(
    task: str,
    *,
    sample: Annotated[bool, Parameter(negative="--no-sample")] = True,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Generate ten questions of a task and score answers, as a node would. Of an episode task, play
    one episode, one line per action.

    The exit code is 78 if the task's code fails, or if a verifier scores a right answer below 1.

    Parameters
    ----------
    task
        rg/<name>, gym/<name>, textarena/<name>, a data/<name> of task.datasets, or
        <module>:<function>, which need not be in task.modules.
    sample
        Also score answers of the policy. --no-sample scores only an empty and the right answer.
        Of an episode task, --no-sample plays four episodes with scripted actions.
    """
    from swarmnode.tasks import owner_code, registry, trial
    from swarmnode.tasks.client import check_tasks

    config = load(node).config
    own_task = owner_code.NAME.fullmatch(task) and task not in registry.TASKS
    modules = [*config.task.modules, task] if own_task else config.task.modules
    registry.install(modules, config.task.settings, [task])
    registry.check_names([task])
    check_tasks([task])
    if registry.TASKS[task].turns > 1:
        return _play(task, sample, json)
    tried = trial.try_task(
        task,
        (lambda prompts: _sample_answers(config.model_dump_json(), prompts)) if sample else None,
    )
    spec = registry.TASKS[task]
    lost = sum(each.right_reward is not None and each.right_reward < 1.0 for each in tried)
    failed = any(each.error for each in tried) or (lost > 0 and spec.source is None)
    if json:
        print(json_module.dumps([asdict(each) for each in tried]))
    else:
        function = spec.generator if spec.source is not None else ""
        print("\n".join(_format_trials(task, tried, function)))
    return ConfigError.exit_code if failed else 0


def _play(task: str, by_hand: bool, json: bool) -> int:
    """Play one episode with actions from stdin, or several with scripted actions. Print them."""
    from swarmnode.observe.samples import visible
    from swarmnode.tasks import determinism, trial

    shown = 0

    def read_action(texts: Sequence[str]) -> str | None:
        """Print the new texts and return the next action; None at the end of stdin."""
        nonlocal shown
        if not json:
            for text in texts[shown:]:
                print(visible(text))
            print("> ", end="", flush=True)
        shown = len(texts)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    if by_hand:
        played = [trial.play_episode(task, 0, read_action)]
    else:
        played = []
        for number in range(determinism.EPISODES):
            scripted = functools.partial(determinism.scripted_action, random.Random(number))
            played.append(trial.play_episode(task, number, scripted))
    if json:
        print(json_module.dumps([asdict(each) for each in played]))
    else:
        for number, each in enumerate(played, 1):
            print("\n".join(_format_episode(number, each, shown)))
    return ConfigError.exit_code if any(each.error for each in played) else 0


def _format_episode(number: int, episode: EpisodeTrial, shown: int) -> list[str]:
    """Return the lines to print.

    Args:
        shown: Number of the episode's texts that were already printed.
    """
    from swarmnode.observe.samples import visible

    lines = []
    texts = [episode.prompt, *episode.observations]
    for place, text in enumerate(texts):
        if not shown and place:
            lines.append(f"> {_shorten(episode.actions[place - 1])}")
        if place >= shown:
            lines.append(visible(text))
    if episode.error:
        lines.append(f"failed: {episode.error}")
    ended = f"reward {episode.reward:g}" if episode.done else "stopped before the end"
    kind = "held out" if episode.held_out else "training"
    lines.append(f"{number}. {kind}: {len(episode.observations)} turns, {ended}")
    return lines


def _format_trials(task: str, tried: Sequence[QuestionTrial], function: str) -> list[str]:
    """Return the lines to print.

    Args:
        function: The operator's scoring function; empty if there is none.
    """
    lines = []
    if arguments := next((each.arguments for each in tried if each.arguments), ()):
        lines.append(f"arguments of {function}: {', '.join(map(_shorten, arguments))}")
    for number, each in enumerate(tried, 1):
        lines.append(
            f"{number}. {'held out' if each.held_out else 'training'}:"
            f" {_shorten(each.prompt) if each.prompt else '(no question)'}"
        )
        if each.sampled is not None:
            extracted = (
                f", extracted {_shorten(each.answer)!r}"
                if each.answer is not None and each.answer != each.sampled
                else ""
            )
            lines.append(
                f"   sampled {_shorten(each.sampled)!r}{' (cut)' if each.cut else ''}{extracted}:"
                f" reward {each.reward if each.reward is not None else '-'}"
            )
        if each.right is not None and each.right_reward is not None:
            lines.append(f"   right answer {_shorten(each.right)!r}: reward {each.right_reward:g}")
        lines.append(f"   empty answer: reward {each.empty:g}")
        if each.error:
            lines.append(f"   failed: {each.error}")
    rewards = [each.reward for each in tried if each.reward is not None]
    mean = (
        f", mean reward of the sampled answers {sum(rewards) / len(rewards):.2f}" if rewards else ""
    )
    rights = [each.right_reward for each in tried if each.right_reward is not None]
    if lost := sum(reward < 1.0 for reward in rights):
        hint = (
            "the function may require more than the bare answer"
            if function
            else "check verifier, extract and the answers"
        )
        lines.append(f"{lost} of {len(rights)} right answers score below 1: {hint}")
    if cut := sum(each.cut for each in tried):
        lines.append(
            f"{cut} sampled answers were cut at training.max_completion_length: raise it, ask for"
            " shorter answers, or turn thinking off (policy.chat = { enable_thinking = false })"
        )
    failed = sum(bool(each.error) for each in tried)
    lines.append(
        f"{task}: {len(tried)} questions, {len({each.prompt for each in tried})} different{mean},"
        f" {failed} failed"
    )
    return lines


def _shorten(text: str | None) -> str:
    """Return a text as one line of limited length, without control characters of the terminal."""
    from swarmnode.observe.samples import visible

    line = visible(" ".join((text or "").split()))
    return line if len(line) <= MAX_TEXT_CHARACTERS else line[:MAX_TEXT_CHARACTERS] + "…"


def _sample_answers(config_json: str, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Sample one answer of the policy to each prompt, in a child process. Return (text, finish) of
    each.

    Raises:
        Unavailable: The child failed; the message ends with the last line of its stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_text(config_json)
        command = [sys.executable, "-m", "swarmnode.policy.answer", "--config", str(file)]
        try:
            done = subprocess.run(
                command,
                input=json_module.dumps(list(prompts)),
                timeout=SAMPLING_TIMEOUT_SECONDS,
                capture_output=True,
                text=True,
                check=False,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"the policy did not answer within {SAMPLING_TIMEOUT_SECONDS:g} s: use --no-sample"
            ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(f"the policy cannot answer: {last[:500]} (--no-sample does not need it)")
    answers: list[tuple[str, str]] = json_module.loads(done.stdout.strip().splitlines()[-1])
    return answers
