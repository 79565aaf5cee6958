"""Scores questions of environments by URL. The client does this itself, because a child has no
network to reach the operator's servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from swarmnode.tasks.episodes import EpisodeRun, score_runs, take_actions
from swarmnode.tasks.frames import ERROR_CHARACTERS, Question, Scored
from swarmnode.tasks.openenv import (
    SECONDS,
    ServerFailed,
    Session,
    Source,
    StepRefused,
    hash_questions,
)
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.seeds import environment_seed


def is_remote(question: Question) -> bool:
    """Return True if an environment server scores `question`, and not a child."""
    return TASKS[question.task].environment is not None


class Environments:
    """Scores questions with the environment servers.

    The first question to a server also checks that it is the environment that this node was
    configured with.

    Args:
        alive: Called after each answer.
        seconds: Deadline of a connection and of each answer.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None, seconds: float = SECONDS) -> None:
        self._alive = alive
        self._seconds = seconds
        self._known: set[str] = set()
        self._lock = threading.Lock()  # a server has few sessions

    def judge(self, questions: Sequence[Question]) -> list[Scored]:
        """Return one result per question. If a server fails, the result has an error and no prompt.
        Does not raise for the behaviour of a server.
        """
        with self._lock, contextlib.ExitStack() as stack:
            sessions: dict[str, Session | ServerFailed] = {}
            return [self._judge(question, sessions, stack) for question in questions]

    def _judge(
        self,
        question: Question,
        sessions: dict[str, Session | ServerFailed],
        stack: contextlib.ExitStack,
    ) -> Scored:
        """Score one question.

        Args:
            sessions: URL → open session, or the failure of a server, which is then not tried again.
        """
        source = TASKS[question.task].environment
        assert source is not None
        try:
            session = sessions.get(source.url)
            if isinstance(session, ServerFailed):
                raise session
            if session is None:
                session = sessions[source.url] = stack.enter_context(
                    Session(source.url, self._seconds, self._alive)
                )
                self._check(session, source)
            if (turns := TASKS[question.task].turns) > 1:
                return _play_episodes(session, source, question, turns)
            return _score_answers(session, source, question)
        except (ServerFailed, StepRefused) as error:
            if isinstance(error, ServerFailed):
                sessions[source.url] = error
            return Scored("", [0.0] * len(question.answers), 0, str(error)[:ERROR_CHARACTERS])

    def _check(self, session: Session, source: Source) -> None:
        """Check once per URL that the server asks the configured questions. Otherwise this node
        would have other questions than its swarm.
        """
        if source.url in self._known:
            return
        if hash_questions(session, source.url, source.observation) != source.content:
            raise ServerFailed(
                f"{source.url} asks other questions than before: start the former server, or"
                " name another URL"
            )
        self._known.add(source.url)


def _score_answers(session: Session, source: Source, question: Question) -> Scored:
    """Score each answer in an episode of its own. Raises ServerFailed, StepRefused."""
    seed = environment_seed(question.seed, question.index)
    prompt = text = session.reset(seed, source.observation)
    rewards, errors, last = [], 0, ""
    for number, answer in enumerate(question.answers):
        reward = 0.0
        try:
            if answer is not None:
                text = session.reset(seed, source.observation) if number else text
                if text != prompt:
                    raise StepRefused("the same seed gave two questions")
                reward = session.step(source.action, answer)
                if not 0.0 <= reward <= 1.0:
                    raise StepRefused(f"a reward of {reward:g}, not in 0 to 1")
        except StepRefused as error:
            reward, errors, last = 0.0, errors + 1, str(error)[:ERROR_CHARACTERS]
        rewards.append(reward)
    return Scored(source.template.replace("{prompt}", prompt), rewards, errors, last)


def _play_episodes(session: Session, source: Source, question: Question, turns: int) -> Scored:
    """Play the episodes of a question one after another, each from its start. Raises ServerFailed,
    StepRefused."""
    seed = environment_seed(question.seed, question.index)
    prompt = session.reset(seed, source.observation)
    failures, runs = list[ServerFailed](), list[EpisodeRun]()

    def step(action: str) -> tuple[str, float, bool]:
        try:
            return session.act(source.action, action, source.observation)
        except ServerFailed as error:
            failures.append(error)
            raise

    for number, actions in enumerate(question.actions):
        if number and session.reset(seed, source.observation) != prompt:
            raise StepRefused("the same seed gave two questions")
        run = EpisodeRun(source.template.replace("{prompt}", prompt), step)
        take_actions(turns, run, actions)
        if failures:
            raise failures[0]
        runs.append(run)
    return score_runs(runs, {}, source.template.replace("{prompt}", prompt))
