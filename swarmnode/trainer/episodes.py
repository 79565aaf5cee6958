"""Plays episodes: the engine samples actions, and the scorer's environments respond to them.

    begin     A question is one request with G completions: the first actions of G episodes.
    continue  All episodes with a new action are passed to the scorer in one call. Each episode that
              has not ended becomes a request for one completion after all of its ids so far.
    end       An episode ends when the environment ends it, when an action is cut at the length
              limit, or when the model's context is full.

Sampled ids are never re-tokenized from text. The ids of the observations, with the text that the
chat template puts around them, lie between the sampled ids and are not trained on
(`policy.ways.Row`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from swarmnode.errors import Unavailable
from swarmnode.policy.engine.protocol import FinishedRequest, Generation, Request
from swarmnode.policy.generate import GroupSample, SampledCompletion
from swarmnode.policy.text import PolicyText, PromptTooLong, around_observations
from swarmnode.tasks.client import Scored, ScoreError, Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.tool_prompt import split
from swarmnode.wire.messages import TaskRef

log = structlog.get_logger("swarmnode.trainer")


@dataclass(frozen=True)
class PlayedEpisode(SampledCompletion):
    """One episode as a completion.

    `ids` and `logprobs` cover everything after the first prompt, `text` is the concatenation of the
    actions, and `finish` is that of the last action.
    """

    turns: list[SampledCompletion] = field(default_factory=list)
    """The sampled actions, in order."""
    observations: list[str] = field(default_factory=list)
    """The environment's text after each action that it received, including the last one of a
    finished episode."""
    context_full: bool = False
    """True if the episode ended because no further action fits into the model's context."""

    @property
    def actions(self) -> list[str]:
        """The actions that the environment received; it does not receive an action that was cut."""
        return [turn.text for turn in self.turns if turn.finish == "eos"]


def judged_text(completion: SampledCompletion) -> str | list[str]:
    """Return the input of the scorer: the text of an answer, or the actions of an episode."""
    return completion.actions if isinstance(completion, PlayedEpisode) else completion.text


def sampled_tokens(completion: SampledCompletion) -> int:
    """Return the number of tokens that the policy sampled."""
    return sum(completion.sampled) if completion.sampled else len(completion.ids)


@dataclass
class UnfinishedEpisode:
    """An episode in progress."""

    ids: list[int] = field(default_factory=list)
    """All ids after the first prompt."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: list[SampledCompletion] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    ended: bool = False
    context_full: bool = False

    def act(self, action: SampledCompletion, version: int) -> None:
        """Append a sampled action. One that was cut ends the episode."""
        self.turns.append(action)
        self.ids += action.ids
        self.logprobs += action.logprobs
        self.versions += action.versions or [version] * len(action.ids)
        self.sampled += [True] * len(action.ids)
        self.ended = action.finish == "length"

    def append(self, between: Sequence[int]) -> None:
        """Append the ids around an observation."""
        self.ids += between
        self.logprobs += [0.0] * len(between)
        self.versions += [self.versions[-1]] * len(between)
        self.sampled += [False] * len(between)

    def completion(self) -> PlayedEpisode:
        last = self.turns[-1]
        return PlayedEpisode(
            self.ids,
            self.logprobs,
            "".join(turn.text for turn in self.turns),
            last.finish,
            self.versions,
            self.sampled,
            self.turns,
            self.observations,
            self.context_full,
        )


@dataclass
class EpisodeGroup:
    """The G episodes of one question."""

    number: int
    ref: TaskRef
    tools: bool = False
    """True if the chat template receives observations as results of tools."""
    prompt_ids: list[int] = field(default_factory=list)
    episodes: list[UnfinishedEpisode] = field(default_factory=list)

    @property
    def since(self) -> int | None:
        """Policy version of the first token; None until it is sampled."""
        return min((each.versions[0] for each in self.episodes if each.versions), default=None)


@dataclass
class EpisodeTotals:
    """Totals over all episodes since the start."""

    episodes: int = 0
    turns: int = 0
    environment_seconds: float = 0.0
    """Time that the scorer spent in environments, in seconds."""

    def __sub__(self, before: EpisodeTotals) -> EpisodeTotals:
        return EpisodeTotals(
            self.episodes - before.episodes,
            self.turns - before.turns,
            self.environment_seconds - before.environment_seconds,
        )


class Episodes:
    """All episodes in progress on one engine.

    The caller bounds their number: each `begin` adds one group, and an episode has at most 32
    turns.
    """

    def __init__(
        self,
        generation: Generation,
        text: PolicyText,
        scorer: Scorer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.totals = EpisodeTotals()
        self._generation = generation
        self._text = text
        self._scorer = scorer
        self._clock = clock
        self._of: dict[int, tuple[EpisodeGroup, int | None]] = {}
        """Group and episode index by request; the index is None for a request of all first
        actions."""
        self._later_numbers = itertools.count(-1, -1)
        """Numbers of later turns' requests, from -1 downwards; questions are numbered from 0
        upwards."""

    @property
    def oldest(self) -> int | None:
        """Policy version of the oldest token of all episodes in progress."""
        versions = [group.since for group, _ in self._of.values() if group.since is not None]
        return min(versions, default=None)

    def begin(self, number: int, ref: TaskRef, prompt: str) -> None:
        """Submit a question. Raises PromptTooLong."""
        self._generation.submit(Request(number, prompt, continues=True))
        self._of[number] = EpisodeGroup(number, ref, self._text.has_tools(prompt)), None

    def play(
        self, finished: Sequence[FinishedRequest], version: int
    ) -> tuple[list[FinishedRequest], list[tuple[int, ScoreError]]]:
        """Pass finished actions to the environments, and submit the next turns.

        Args:
            finished: Finished requests of the engine. Requests that belong to no episode are
                returned unchanged.
            version: Policy version that sampled them.

        Returns:
            Completed groups, and the numbers of failed groups with the scorer's error.
        """
        done, moved = (
            list[FinishedRequest](),
            dict[int, tuple[EpisodeGroup, list[tuple[int, int]]]](),
        )
        for one in finished:
            group, place = self._of.pop(one.number, (None, None))
            if group is None:
                done.append(one)
                continue
            if place is None:
                group.prompt_ids = one.sample.prompt_ids
                group.episodes = [UnfinishedEpisode() for _ in one.sample.completions]
            _, places = moved.setdefault(group.number, (group, []))
            for offset, action in enumerate(one.sample.completions):
                at = offset if place is None else place
                group.episodes[at].act(action, version)
                places.append((at, one.number))
        failed = self._observe(list(moved.values()))
        under_way = {group.number for group, _ in self._of.values()}
        for number, (group, _) in moved.items():
            if number not in under_way and all(number != lost for lost, _ in failed):
                done.append(FinishedRequest(number, self._complete(group)))
        return done, failed

    def _observe(
        self, moved: Sequence[tuple[EpisodeGroup, list[tuple[int, int]]]]
    ) -> list[tuple[int, ScoreError]]:
        """Pass the last action of every given episode to its environment.

        Args:
            moved: Groups with the (episode index, request) of each new action.

        Returns:
            Numbers of the groups whose environment failed, with the scorer's error.
        """
        asked = [
            (group, [(at, request) for at, request in places if not group.episodes[at].ended])
            for group, places in moved
        ]
        asked = [(group, places) for group, places in asked if places]
        started = self._clock()
        items = [
            (group.ref, [[turn.text for turn in group.episodes[at].turns] for at, _ in places])
            for group, places in asked
        ]
        scored = self._scorer.score_many(items) if items else []
        self.totals.environment_seconds += self._clock() - started
        failed = list[tuple[int, ScoreError]]()
        for (group, places), result in zip(asked, scored, strict=True):
            if not isinstance(result, Scored):
                failed.append((group.number, result))
                self._abandon(group)
                continue
            for (at, request), played in zip(places, result.episodes, strict=True):
                episode = group.episodes[at]
                episode.observations, episode.ended = played.observations, played.done
                if not episode.ended:
                    self._continue(group, at, request)
        for _, places in moved:
            for request in dict.fromkeys(request for _, request in places):
                self._generation.cancel(request)  # drops its keys and values
        return failed

    def _continue(self, group: EpisodeGroup, at: int, follows: int) -> None:
        """Submit the next turn of an episode, or end the episode if the turn exceeds the
        context."""
        episode = group.episodes[at]
        between = self._text.observation_ids(episode.observations[-1], episode.ids[-1], group.tools)
        ids = [*group.prompt_ids, *episode.ids, *between]
        number = next(self._later_numbers)
        more = len(episode.turns) + 1 < TASKS[group.ref.id].turns
        try:
            self._generation.submit(Request(number, ids, 1, follows, continues=more))
        except PromptTooLong:
            episode.ended = episode.context_full = True
            return
        episode.append(between)
        self._of[number] = group, at

    def _abandon(self, group: EpisodeGroup) -> None:
        for number in [number for number, (other, _) in self._of.items() if other is group]:
            del self._of[number]
            self._generation.cancel(number)

    def _complete(self, group: EpisodeGroup) -> GroupSample:
        self.totals.episodes += len(group.episodes)
        self.totals.turns += sum(len(each.turns) for each in group.episodes)
        return GroupSample(group.prompt_ids, [each.completion() for each in group.episodes])


def answer_all(
    engine: Generation,
    text: PolicyText,
    scorer: Scorer,
    asked: Sequence[tuple[TaskRef, str]],
) -> list[GroupSample | None]:
    """Answer all questions and play their episodes to the end, on an otherwise idle engine.

    Returns:
        A group of completions for each question, in order; None if its environment failed.
    """
    episodes = Episodes(engine, text, scorer)
    for number, (ref, prompt) in enumerate(asked):
        if TASKS[ref.id].turns > 1:
            episodes.begin(number, ref, prompt)
        else:
            engine.submit(Request(number, prompt))
    found: dict[int, GroupSample] = {}
    while engine.statistics().unfinished:
        done, _ = episodes.play(engine.finished(0), 0)
        found |= {one.number: one.sample for one in done}
    return [found.get(number) for number in range(len(asked))]


def check_template(text: PolicyText, scorer: Scorer, tasks: Sequence[str]) -> None:
    """Raise Unavailable if the chat template cannot be used for the episodes of a task.

    A template may keep earlier turns between the results of tools and change them between turns of
    the user, so the first text of each task decides.
    """
    refs = [
        TaskRef(name, task_version(name), evaluation_seed(name), 0)
        for name in tasks
        if TASKS[name].turns > 1
    ]
    questions = scorer.score_many([(ref, []) for ref in refs]) if refs else []
    for ref, question in zip(refs, questions, strict=True):
        prompt = question.prompt if isinstance(question, Scored) else ""
        with_tools, shows = bool(split(prompt).tools), text.has_tools(prompt)
        if with_tools:
            where = "chat template" if shows else "first text"
            log.info("tools of the task", task=ref.id, shown_in=where)
        try:
            around_observations(text.tokenizer, text.chat, shows)
        except Unavailable as error:
            if not with_tools:
                raise
            raise Unavailable(
                f"{error}; or let the template show the tools of {ref.id}: set the class attribute"
                " response_template to that of the tokenizer"
            ) from None
