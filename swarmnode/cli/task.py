"""`swarmnode task`: try a task before a node trains on it."""

from __future__ import annotations

import contextlib
import functools
import json as json_module
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load
from swarmnode.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from swarmnode.config import TrainingConfig
    from swarmnode.tasks.trial import EpisodeTrial, QuestionTrial

task_app = App(name="task", help="Try a task before training on it.")
MAX_TEXT_CHARACTERS = 400
"""Length of a shortened text."""
ROWS = 3
"""Maximum number of rows that are shown because their own answer earns nothing."""
SAMPLING_TIMEOUT_SECONDS = 1800.0


@task_app.command(name="try")
def task_try(
    task: str,
    *,
    sample: Annotated[bool, Parameter(negative="--no-sample")] = True,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Generate ten questions of a task and score answers, as a node would: an empty one, the right
    one, and seven of the policy. Of an episode task, play one episode, one line per action.

    The exit code is 78 if the task's code fails, if the sandbox refuses what it does, or if a
    verifier scores a right answer below 1.

    Parameters
    ----------
    task
        rg/<name>, gym/<name>, a data/<name> of task.datasets, or
        <module>:<function>, which need not be in task.modules.
    sample
        Also score answers of the policy. --no-sample scores only an empty and the right answer.
        Of an episode task, --no-sample plays four episodes with scripted actions.
    """
    from swarmnode.policy.convert import prepare
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
    if sample:
        prepare(config.policy.model)
    spec = registry.TASKS[task]
    function = spec.generator if spec.source is not None else ""
    arrivals = list[float]()
    sampler = functools.partial(
        _sample_answers, config.model_dump_json(), show=not json, arrivals=arrivals
    )
    tried = list[trial.QuestionTrial]()
    for each in trial.try_task(task, sampler if sample else None):
        tried.append(each)
        if not json:
            print("\n".join(_format_trial(len(tried), each, function)), flush=True)
    # Few rows may have an answer that the reward function does not accept: judge more of them.
    rights = trial.check_right_answers(task) if spec.rows is not None and tried[0].right else tried
    lost = any(each.right_reward is not None and each.right_reward < 1.0 for each in rights)
    if json:
        print(json_module.dumps([asdict(each) for each in tried]))
    else:
        print("\n".join(_summarise(task, tried, rights, function)))
        if len(arrivals) > 1:
            seconds = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) / trial.ANSWERS
            print(_estimate_step(config.training, seconds))
    failed = any(each.error or each.refusals for each in [*tried, *rights])
    return ConfigError.exit_code if failed or (lost and spec.source is None) else 0


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
    return ConfigError.exit_code if any(each.error or each.refusals for each in played) else 0


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
    if episode.refusals:
        lines.append(f"refused by the sandbox: {', '.join(episode.refusals)}")
    ended = f"reward {episode.reward:g}" if episode.done else "stopped before the end"
    kind = "held out" if episode.held_out else "training"
    lines.append(f"{number}. {kind}: {len(episode.observations)} turns, {ended}")
    return lines


def _format_trial(number: int, each: QuestionTrial, function: str) -> list[str]:
    """Return the lines of one question.

    Args:
        function: The operator's scoring function; empty if there is none.
    """
    lines = []
    if number == 1 and each.arguments:
        lines.append(f"arguments of {function}: {', '.join(map(_shorten, each.arguments))}")
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
        if len(each.rewards) > 1:
            lines.append(
                f"   all {len(each.rewards)} sampled answers: {_distribution(each.rewards)}"
            )
    if each.right is not None and each.right_reward is not None:
        lines.append(f"   right answer {_shorten(each.right)!r}: reward {each.right_reward:g}")
    lines.append(f"   empty answer: reward {each.empty:g}")
    if each.error:
        lines.append(f"   failed: {each.error}")
    if each.refusals:
        lines.append(f"   refused by the sandbox: {', '.join(each.refusals)}")
    return lines


def _summarise(
    task: str, tried: Sequence[QuestionTrial], rights: Sequence[QuestionTrial], function: str
) -> list[str]:
    """Return the lines about all questions.

    Args:
        rights: Questions whose right answers were judged.
        function: The operator's scoring function; empty if there is none.
    """
    lines = []
    own = [each.right_reward for each in tried if each.right_reward is not None]
    if lost := sum(reward < 1.0 for reward in own):
        hint = (
            "the function may require more than the bare answer"
            if function
            else "check verifier, extract and the answers"
        )
        lines.append(f"{lost} of {len(own)} right answers score below 1: {hint}")
    useless = {each.prompt: each for each in rights if each.right_reward == 0.0}
    if useless:
        lines.append(
            f"of {len({each.prompt for each in rights})} rows, {len(useless)} have an answer that"
            " earns nothing:"
        )
        for each in [*useless.values()][:ROWS]:
            row = each.row or json_module.dumps({"prompt": each.prompt, "answer": each.right})
            lines.append(f"   {_shorten(row)}")
    if refused := sorted({what for each in [*tried, *rights] for what in each.refusals}):
        lines.append(
            f"the sandbox refused {', '.join(refused)}: the code may have caught the error, so its"
            " rewards may be wrong; do this at the top of the module, before the sandbox closes"
        )
    rewards = [reward for each in tried for reward in each.rewards]
    cuts = [cut for each in tried for cut in each.cuts]
    if cut := sum(cuts):
        lines.append(
            f"{cut} sampled answers were cut at training.max_completion_length: raise it, ask for"
            " shorter answers, or turn thinking off (policy.chat = { enable_thinking = false })"
        )
    if paid := sum(was_cut and r >= 1.0 for r, was_cut in zip(rewards, cuts, strict=True)):
        lines.append(
            f"{paid} answers that were cut earn 1, so the policy does not learn to stop: set"
            " nothing_after for the dataset, or the training option mask_truncated"
        )
    mean = ""
    if rewards:
        mean = f", mean reward of the sampled answers {sum(rewards) / len(rewards):.2f}"
        lines.append(f"{len(rewards)} sampled answers: {_distribution(rewards)}")
        if not any(rewards):
            lines.append(
                "no sampled answer earns anything, so there is nothing to learn from: choose easier"
                " questions, a template that shows the form, or a larger model"
            )
    failed = sum(bool(each.error) for each in tried)
    lines.append(
        f"{task}: {len(tried)} questions, {len({each.prompt for each in tried})} different{mean},"
        f" {failed} failed"
    )
    return lines


def _estimate_step(training: TrainingConfig, seconds: float) -> str:
    """Return the estimated duration of a training step in one line.

    Args:
        seconds: Time to sample one answer.
    """
    from swarmnode.observe.status import duration

    count = training.groups_per_step * training.num_generations
    return (
        f"a step takes at most about {duration(2 * count * seconds)} here: {count} answers of"
        f" {seconds:.2g} s each, and an update that takes as long"
    )


def _distribution(rewards: Sequence[float]) -> str:
    """Return how many rewards are 0, 1 and in each quarter between."""
    names = {
        0.0: "0",
        1.0: "above 0, up to 0.25",
        2.0: "up to 0.5",
        3.0: "up to 0.75",
        4.0: "below 1",
        5.0: "1",
    }
    classes = [r if r == 0 else 5.0 if r >= 1 else float(math.ceil(4 * r)) for r in rewards]
    counts = sorted(Counter(classes).items())
    return "reward " + ", ".join(f"{names[place]}: {count}" for place, count in counts)


def _shorten(text: str | None) -> str:
    """Return a text as one line of limited length, without control characters of the terminal."""
    from swarmnode.observe.samples import visible

    line = visible(" ".join((text or "").split()))
    return line if len(line) <= MAX_TEXT_CHARACTERS else line[:MAX_TEXT_CHARACTERS] + "…"


def _sample_answers(
    config_json: str, prompts: Sequence[str], show: bool, arrivals: list[float]
) -> Iterator[list[tuple[str, str]]]:
    """Sample answers of the policy to each prompt, in a child process. Yield (text, finish) of the
    answers to each prompt, when they are there.

    Args:
        show: Print on stderr what takes time.
        arrivals: Receives the monotonic time in seconds at which each prompt's answers are there.

    Raises:
        Unavailable: The child failed; the message ends with the last line of its stderr.
    """
    from swarmnode.tasks.trial import ANSWERS

    if show:
        count = len(prompts) * ANSWERS
        print(f"swarmnode: loading the policy for {count} answers", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        file, errors = Path(scratch) / "config.json", Path(scratch) / "errors"
        file.write_text(config_json)
        command = [sys.executable, "-m", "swarmnode.policy.answer"]
        command += ["--config", str(file), "--answers", str(ANSWERS)]
        with (
            open(errors, "wb") as stderr,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            ) as child,
        ):
            timer = threading.Timer(SAMPLING_TIMEOUT_SECONDS, child.kill)
            timer.start()
            try:
                assert child.stdin is not None
                assert child.stdout is not None
                with contextlib.suppress(BrokenPipeError), child.stdin:
                    child.stdin.write(json_module.dumps(list(prompts)).encode())
                for line in child.stdout:
                    arrivals.append(time.monotonic())
                    yield [tuple(pair) for pair in json_module.loads(line)]
                child.wait()
            finally:
                timed_out = timer.finished.is_set()
                timer.cancel()
                if child.poll() is None:
                    child.kill()
        if timed_out:
            raise Unavailable(
                f"the policy did not answer within {SAMPLING_TIMEOUT_SECONDS:g} s: use --no-sample"
            )
        if child.returncode != 0:
            said = errors.read_text(errors="replace").strip().splitlines()
            last = (said or [f"exit code {child.returncode}"])[-1]
            raise Unavailable(
                f"the policy cannot answer: {last[:500]} (--no-sample does not need it)"
            )
