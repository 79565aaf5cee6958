"""Commands about tasks: what can be trained on."""

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
    from swarmnode.tasks.trial import Played, Tried

task_app = App(name="task", help="What this node can train on.")
SHOWN = 400
SAMPLE_SECONDS = 1800.0


@task_app.command(name="try")
def task_try(
    task: str,
    *,
    sample: Annotated[bool, Parameter(negative="--no-sample")] = True,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Ask ten questions of a task and judge answers to them, as a node would: for whoever writes a
    task or brings a dataset. An episode task: play an episode yourself, one line for each action.

    Exits with 78 when the task's own code went wrong, or when a verifier gives the right answer
    less than 1.

    Parameters
    ----------
    task
        rg/<name>, gym/<name>, textarena/<name>, a data/<name> of task.datasets, or
        <module>:<function>, which need not be in task.modules.
    sample
        Have the policy answer, too; otherwise only an empty and the right answer are judged. Of an
        episode task: play it yourself; otherwise a script plays four episodes.
    """
    from swarmnode.tasks import own, registry, trial
    from swarmnode.tasks.client import prove_own

    resolved = load(node).config
    own_task = own.NAME.fullmatch(task) and task not in registry.TASKS
    modules = [*resolved.task.modules, task] if own_task else resolved.task.modules
    registry.install(modules, resolved.task.settings, [task])
    registry.check_names([task])
    prove_own([task])
    if registry.TASKS[task].turns > 1:
        return _play(task, sample, json)
    tried = trial.try_task(
        task, (lambda prompts: _sampled(resolved.model_dump_json(), prompts)) if sample else None
    )
    spec = registry.TASKS[task]
    lost = sum(each.right_reward is not None and each.right_reward < 1.0 for each in tried)
    failed = any(each.error for each in tried) or (lost > 0 and spec.source is None)
    if json:
        print(json_module.dumps([asdict(each) for each in tried]))
    else:
        function = spec.generator if spec.source is not None else ""
        print("\n".join(_lines(task, tried, function)))
    return ConfigError.exit_code if failed else 0


def _play(task: str, by_hand: bool, json: bool) -> int:
    """Play one episode from the lines of stdin, or several by a script, and print them."""
    from swarmnode.tasks import determinism, trial

    shown = 0

    def typed(said: Sequence[str]) -> str | None:
        """Print the new texts and return the next action; None at the end of stdin."""
        nonlocal shown
        if not json:
            for text in said[shown:]:
                print(_printable(text))
            print("> ", end="", flush=True)
        shown = len(said)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    if by_hand:
        played = [trial.play_episode(task, 0, typed)]
    else:
        played = []
        for number in range(determinism.EPISODES):
            scripted = functools.partial(determinism.scripted_action, random.Random(number))
            played.append(trial.play_episode(task, number, scripted))
    if json:
        print(json_module.dumps([asdict(each) for each in played]))
    else:
        for number, each in enumerate(played, 1):
            print("\n".join(_episode_lines(number, each, shown)))
    return ConfigError.exit_code if any(each.error for each in played) else 0


def _episode_lines(number: int, episode: Played, shown: int) -> list[str]:
    """Return the lines to print.

    Args:
        shown: The number of the episode's texts that were printed already.
    """
    lines = []
    texts = [episode.prompt, *episode.observations]
    for place, text in enumerate(texts):
        if not shown and place:
            lines.append(f"> {_short(episode.actions[place - 1])}")
        if place >= shown:
            lines.append(_printable(text))
    if episode.error:
        lines.append(f"went wrong: {episode.error}")
    ended = f"reward {episode.reward:g}" if episode.done else "left before its end"
    kind = "held out" if episode.held_out else "training"
    lines.append(f"{number}. {kind}: {len(episode.observations)} turns, {ended}")
    return lines


def _printable(text: str) -> str:
    """Return a text of several lines with unprintable characters replaced."""
    return "\n".join(
        "".join(
            character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
            for character in line
        )
        for line in text.split("\n")
    )


def _lines(task: str, tried: Sequence[Tried], function: str) -> list[str]:
    """function: the owner's code that judges, "" where there is none."""
    lines = []
    if arguments := next((each.arguments for each in tried if each.arguments), ()):
        lines.append(f"{function} is given {', '.join(map(_short, arguments))}")
    for number, each in enumerate(tried, 1):
        lines.append(
            f"{number}. {'held out' if each.held_out else 'training'}:"
            f" {_short(each.prompt) if each.prompt else '(no question)'}"
        )
        if each.sampled is not None:
            judged = (
                f", of which {_short(each.answer)!r} is judged"
                if each.answer is not None and each.answer != each.sampled
                else ""
            )
            lines.append(
                f"   sampled {_short(each.sampled)!r}{judged}: reward"
                f" {each.reward if each.reward is not None else '-'}"
            )
        if each.right is not None and each.right_reward is not None:
            lines.append(f"   right answer {_short(each.right)!r}: reward {each.right_reward:g}")
        lines.append(f"   empty answer: reward {each.empty:g}")
        if each.error:
            lines.append(f"   went wrong: {each.error}")
    rewards = [each.reward for each in tried if each.reward is not None]
    mean = (
        f", mean reward of the sampled answers {sum(rewards) / len(rewards):.2f}" if rewards else ""
    )
    rights = [each.right_reward for each in tried if each.right_reward is not None]
    if lost := sum(reward < 1.0 for reward in rights):
        hint = (
            "the function may ask for more than the bare answer"
            if function
            else "check verifier, extract and the answers"
        )
        lines.append(f"{lost} of {len(rights)} right answers earn less than 1: {hint}")
    wrong = sum(bool(each.error) for each in tried)
    lines.append(
        f"{task}: {len(tried)} questions, {len({each.prompt for each in tried})} different{mean},"
        f" {wrong} went wrong"
    )
    return lines


def _short(text: str | None) -> str:
    """One line of a text that a model or somebody's file made, without what would move a terminal's
    cursor."""
    line = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in " ".join((text or "").split())
    )
    return line if len(line) <= SHOWN else line[:SHOWN] + "…"


def _sampled(config_json: str, prompts: Sequence[str]) -> list[str]:
    """One answer of the policy to each prompt. Raises Unavailable with what its process said
    last."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_text(config_json)
        command = [sys.executable, "-m", "swarmnode.policy.answer", "--config", str(file)]
        try:
            done = subprocess.run(
                command,
                input=json_module.dumps(list(prompts)),
                timeout=SAMPLE_SECONDS,
                capture_output=True,
                text=True,
                check=False,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"the policy did not answer within {SAMPLE_SECONDS:g} s: try with --no-sample"
            ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(f"the policy cannot answer: {last[:500]} (--no-sample does without)")
    answers: list[str] = json_module.loads(done.stdout.strip().splitlines()[-1])
    return answers
