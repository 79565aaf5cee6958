"""Determinism check of an environment: a scripted policy plays some episodes twice.

    child A   PYTHONHASHSEED=0   turn by turn, as the author of an episode plays
    child B   PYTHONHASHSEED=1   from the start, in another order, as a receiver replays

The hash of the results of child A is part of the task's version. A peer whose environment or
library behaves differently therefore has another version.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from swarmnode.errors import ConfigError
from swarmnode.tasks import frames
from swarmnode.tasks.child import FrameScorer
from swarmnode.tasks.frames import Question, Scored, ScorerFailed
from swarmnode.tasks.seeds import evaluation_seed

if TYPE_CHECKING:
    from swarmnode.tasks.registry import TaskSpec

EPISODES = 4
"""Episodes that the check plays, one per question."""
SEEDS = (1 << 20, 2 << 20)
"""Training seeds. The check adds the same number of evaluation seeds."""
_WORDS = re.compile(r"\[[^\[\]\n]{1,24}\]|\w{1,24}")
_SHOWN = 60


def transcript_hash(spec: TaskSpec) -> str:
    """Return 16 hex digits over some episodes of `spec`.

    Raises:
        ConfigError: The environment cannot be loaded, or its episodes differ.
    """
    try:
        questions, played, replayed = _play_twice(spec)
    except ScorerFailed as error:
        raise ConfigError(str(error)) from None
    for number, (first, second) in enumerate(zip(played, replayed, strict=True), 1):
        if (difference := _difference(first, second)) is not None:
            raise ConfigError(
                f"{spec.id} is not deterministic, so peers cannot replay its episodes: episode"
                f" {number}, {difference}. Draw everything from the seed, and use no clock, no id()"
                " and no order of a set"
            )
    transcript = [
        [question.actions[0], scored.prompt, scored.rewards, msgspec.to_builtins(scored.episodes)]
        for question, scored in zip(questions, played, strict=True)
    ]
    return hashlib.blake2b(json.dumps(transcript).encode(), digest_size=8).hexdigest()


def _play_twice(spec: TaskSpec) -> tuple[list[Question], list[Scored], list[Scored]]:
    """Return the questions with all actions, and the results of child A and child B. Raises
    ScorerFailed.
    """
    seeds = (*SEEDS, evaluation_seed(spec.id), evaluation_seed(spec.id, 1))
    questions = [Question(spec.id, seed, 0, [], actions=[[]]) for seed in seeds]
    scripts = [random.Random(f"{spec.id} {number}") for number in range(EPISODES)]
    setups = frames.encode_setups([spec.setup]).decode()
    with FrameScorer(lambda: setups) as scorer:
        played = _ask(scorer, questions)
        while not all(scored.episodes[0].done for scored in played):
            for number, (question, scored) in enumerate(zip(questions, played, strict=True)):
                if not scored.episodes[0].done:
                    texts = [scored.prompt, *scored.episodes[0].observations]
                    actions = [*question.actions[0], scripted_action(scripts[number], texts)]
                    questions[number] = msgspec.structs.replace(question, actions=[actions])
            played = _ask(scorer, questions)
    with FrameScorer(lambda: setups, hash_seed="1") as scorer:
        replayed = _ask(scorer, questions[::-1])[::-1]
    return questions, played, replayed


def scripted_action(rng: random.Random, texts: Sequence[str]) -> str:
    """Return a word or a [bracket] from the environment's texts, or a small number."""
    if rng.random() < 0.2:
        return str(rng.randrange(21))
    words = _WORDS.findall(texts[0] if rng.random() < 0.7 else texts[-1])
    return rng.choice(words) if words else ""


def _ask(scorer: FrameScorer, questions: list[Question]) -> list[Scored]:
    """Score one frame. Raises ScorerFailed if an episode cannot be played."""
    scored = []
    for result in scorer.ask(questions):
        if not isinstance(result, Scored):
            raise result
        scored.append(result)
    return scored


def _difference(first: Scored, second: Scored) -> str | None:
    """Describe the first difference between two runs of one episode; None if they are equal."""
    if first.prompt != second.prompt:
        return (
            f"its first text: {_shorten(first.prompt)} in one run,"
            f" {_shorten(second.prompt)} in another"
        )
    (one,), (other,) = first.episodes, second.episodes
    pairs = zip(one.observations, other.observations, strict=False)
    for turn, (text, again) in enumerate(pairs, 1):
        if text != again:
            return f"turn {turn}: {_shorten(text)} in one run, {_shorten(again)} in another"
    if one != other:
        return f"it ended after {len(one.observations)} and {len(other.observations)} turns"
    if first.rewards != second.rewards:
        return f"its reward: {first.rewards[0]:g} in one run, {second.rewards[0]:g} in another"
    return None


def _shorten(text: str) -> str:
    return repr(" ".join(text.split())[:_SHOWN])
