"""Questions of environments by URL, asked and judged for a scorer's client: no child can reach
their servers, which are the operator's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from swarmnode.tasks.episodes import Run, act, scored
from swarmnode.tasks.frames import ERROR_CHARACTERS, Question, Scored
from swarmnode.tasks.openenv import (
    SECONDS,
    Failed,
    Session,
    Source,
    StepRefused,
    content_of,
)
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.seeds import seed_of


def by_url(question: Question) -> bool:
    """Whether it is one for `Environments`, and not for a child."""
    return TASKS[question.task].environment is not None


class Environments:
    """What one client knows of the servers: whether they still ask what they asked when this node
    was configured."""

    def __init__(self, alive: Callable[[], None] = lambda: None, seconds: float = SECONDS) -> None:
        """alive: called after every answer; seconds: for one."""
        self._alive = alive
        self._seconds = seconds
        self._known: set[str] = set()
        self._turn = threading.Lock()  # a server has few sessions

    def judge(self, questions: Sequence[Question]) -> list[Scored]:
        """One result for each; where a server fails, a question that could not be made. Never
        raises for anything that a server does."""
        with self._turn, contextlib.ExitStack() as stack:
            sessions: dict[str, Session | Failed] = {}
            return [self._judged(question, sessions, stack) for question in questions]

    def _judged(
        self, question: Question, sessions: dict[str, Session | Failed], stack: contextlib.ExitStack
    ) -> Scored:
        """sessions: by URL, with what is wrong with servers that need not be waited for again."""
        source = TASKS[question.task].environment
        assert source is not None
        try:
            session = sessions.get(source.url)
            if isinstance(session, Failed):
                raise session
            if session is None:
                session = sessions[source.url] = stack.enter_context(
                    Session(source.url, self._seconds, self._alive)
                )
                self._check(session, source)
            if (turns := TASKS[question.task].turns) > 1:
                return _played(session, source, question, turns)
            return _scored(session, source, question)
        except (Failed, StepRefused) as error:
            if isinstance(error, Failed):
                sessions[source.url] = error
            return Scored("", [0.0] * len(question.answers), 0, str(error)[:ERROR_CHARACTERS])

    def _check(self, session: Session, source: Source) -> None:
        """Once: another environment than the one that was configured asks what nobody else of the
        swarm asks."""
        if source.url in self._known:
            return
        if content_of(session, source.url, source.observation) != source.content:
            raise Failed(
                f"{source.url} asks other questions than before: start the server that it had, or"
                " name another URL"
            )
        self._known.add(source.url)


def _scored(session: Session, source: Source, question: Question) -> Scored:
    """The question, and each answer in an episode of its own. Raises Failed, StepRefused."""
    seed = seed_of(question.seed, question.index)
    prompt = asked = session.reset(seed, source.observation)
    rewards, errors, last = [], 0, ""
    for number, answer in enumerate(question.answers):
        reward = 0.0
        try:
            if answer is not None:
                asked = session.reset(seed, source.observation) if number else asked
                if asked != prompt:
                    raise StepRefused("the same seed gave two questions")
                reward = session.step(source.action, answer)
                if not 0.0 <= reward <= 1.0:
                    raise StepRefused(f"a reward of {reward:g}, not in 0 to 1")
        except StepRefused as error:
            reward, errors, last = 0.0, errors + 1, str(error)[:ERROR_CHARACTERS]
        rewards.append(reward)
    return Scored(source.template.replace("{prompt}", prompt), rewards, errors, last)


def _played(session: Session, source: Source, question: Question, turns: int) -> Scored:
    """Play the episodes of a question one after another, each from its start. Raises Failed,
    StepRefused."""
    seed = seed_of(question.seed, question.index)
    prompt = session.reset(seed, source.observation)
    failures, runs = list[Failed](), list[Run]()

    def step(action: str) -> tuple[str, float, bool]:
        try:
            return session.act(source.action, action, source.observation)
        except Failed as error:
            failures.append(error)
            raise

    for number, actions in enumerate(question.actions):
        if number and session.reset(seed, source.observation) != prompt:
            raise StepRefused("the same seed gave two questions")
        run = Run(source.template.replace("{prompt}", prompt), step)
        act(turns, run, actions)
        if failures:
            raise failures[0]
        runs.append(run)
    return scored(runs, {}, source.template.replace("{prompt}", prompt))
