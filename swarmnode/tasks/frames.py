"""What a client and its scorer child say to each other, and what they refuse to say.

A frame is a big-endian u32 length and a msgpack array. One frame carries many groups, because a
round trip costs as much as judging a few of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from swarmnode.errors import LocalError, SwarmNodeError
from swarmnode.tasks import dataset, own
from swarmnode.tasks.answers import extract, has_tail
from swarmnode.tasks.registry import TASKS, TaskSpec, task_version
from swarmnode.tasks.seeds import is_address
from swarmnode.wire.limits import COMPLETIONS, TEXT_BYTES, TURNS
from swarmnode.wire.messages import TaskRef

FRAME_GROUPS = 64
"""Groups in a request, at most."""
FRAME_BYTES = 16 * 2**20
"""A longer frame means that the other side is not what it should be."""
ERROR_CHARACTERS = 500
OBSERVATION_BYTES = 4096
"""UTF-8 bytes of an environment's text after one action; a longer one is cut."""
EPISODE_BYTES = 16 * 1024
"""UTF-8 bytes of all observations of an episode. An episode that reaches it ends."""
HEADER = struct.Struct(">I")


class ScorerFailed(LocalError):
    """Raised (or put in the place of a result) when the child died or overran its deadline on this
    question, or could not be started."""


class TaskUnknown(SwarmNodeError):
    """Raised (or put in the place of a result) when this node cannot regenerate a question.

    `reason` is task, version, address or difficulty.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"unknown {reason}: {detail}")
        self.reason = reason


class QuestionFailed(ScorerFailed):
    """Put in the place of a result when the owner's code made no question of an address. The child
    goes on."""


CompletionText = str | Sequence[str]
"""Text to judge: an answer, or for an episode task the texts of its actions so far."""


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """Observations of one episode."""

    observations: list[str]
    """The text after each action that the episode took, the last one of a finished episode
    included. There are fewer than actions where the episode ended before."""
    done: bool
    """True if the episode takes no further action."""


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """One question regenerated, and its completions judged."""

    prompt: str
    """Empty when the owner's code made no question; `error` says why."""
    rewards: list[float]
    """One per completion, in [0, 1], finite. Of an episode that has not ended: 0."""
    errors: int = 0
    """Completions whose reward raised an exception, or was no number from 0 to 1: they have the
    reward 0."""
    error: str = ""
    """The last of these in one line, with the line of the owner's file."""
    components: list[dict[str, float]] = []
    """(G,) what each reward is made of, by name and each in [0, 1]; empty where rewards are single
    numbers."""
    answer: str = ""
    """The right answer, where it was asked for and the task has one."""
    arguments: list[str] = []
    """Names of what an owner's reward function is given, where it was asked for."""
    episodes: list[Episode] = []
    """(G,) of an episode task; empty for other tasks."""


ScoreError = TaskUnknown | ScorerFailed


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Client → child: regenerate this, judge these. A `None` answer was too long or unencodable to
    be sent: its reward is 0."""

    task: str
    seed: int
    index: int
    answers: list[str | None]
    difficulty: int = 0
    reveal: bool = False
    """Return the right answer too: for `swarmnode task try`."""
    actions: list[list[str | None]] = []
    """(G,) of an episode task, whose `answers` are empty: the actions so far of each episode. A
    `None` action was too long or unencodable: it ends its episode with the reward 0."""


class Brought(msgspec.Struct, frozen=True, array_like=True):
    """Client → child, on its command line: a task that the node's owner brings; without code and
    rows one of ours or a library's game, and its settings."""

    task: str
    code: own.Source | None
    """The owner's code: a task, or a dataset's reward function."""
    rows: dataset.Source | None
    settings: dict[str, object]


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """Child → client, first frame: it has loaded its tasks and locked itself in."""

    pid: int
    layers: list[str]
    """The sandbox layers that are active (`sandbox.LAYERS`)."""


encode_questions = msgspec.msgpack.Encoder().encode
decode_questions = msgspec.msgpack.Decoder(list[Question]).decode
encode_scored = msgspec.msgpack.Encoder().encode
decode_scored = msgspec.msgpack.Decoder(list[Scored]).decode
decode_brought = msgspec.json.Decoder(list[Brought]).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode


def prepare(
    ref: TaskRef, completions: Sequence[CompletionText], *, reveal: bool = False
) -> Question:
    """A question as the child takes it. Nothing is sent that this node could not regenerate or need
    not look at.

    Raises TaskUnknown, and ValueError for more than 64 completions, for more than 32 actions, and
    for an answer where actions belong or the other way round.
    """
    spec = TASKS.get(ref.id)
    if spec is None:
        raise TaskUnknown("task", repr(ref.id))
    if ref.version != task_version(ref.id):
        raise TaskUnknown(
            "version", f"{ref.version!r} of {ref.id}, this node has {task_version(ref.id)!r}"
        )
    if not is_address(ref.seed, ref.index):
        raise TaskUnknown("address", f"seed {ref.seed}, index {ref.index}")
    if not 0 <= ref.difficulty < spec.levels:
        known = "0" if spec.levels == 1 else f"0 to {spec.levels - 1}"
        raise TaskUnknown("difficulty", f"{ref.difficulty} of {ref.id}, which has only {known}")
    if len(completions) > COMPLETIONS:
        raise ValueError(f"{len(completions)} completions, more than {COMPLETIONS}")
    answers = list[str | None]()
    episodes = list[list[str | None]]()
    for completion in completions:
        if isinstance(completion, str) != (spec.turns == 1):
            wanted = "an answer" if spec.turns == 1 else "a list of actions"
            raise ValueError(f"a completion of {ref.id} is {wanted}")
        if isinstance(completion, str):
            answers.append(_sendable(completion, spec))
        elif len(completion) > TURNS:
            raise ValueError(f"{len(completion)} actions, more than {TURNS}")
        else:
            episodes.append([_sendable(action, spec) for action in completion])
    return Question(ref.id, ref.seed, ref.index, answers, ref.difficulty, reveal, episodes)


def valid(scored: list[Scored], questions: list[Question]) -> bool:
    """Whether a response answers the request: the child is ours, but it has been near strangers'
    text."""
    return len(scored) == len(questions) and all(
        _fits(s, q) for s, q in zip(scored, questions, strict=True)
    )


def _fits(scored: Scored, question: Question) -> bool:
    count = len(question.answers) + len(question.actions)
    return (
        len(scored.rewards) == count
        and all(0.0 <= reward <= 1.0 for reward in scored.rewards)
        and len(scored.components) in (0, count)
        and all(0.0 <= value <= 1.0 for made_of in scored.components for value in made_of.values())
        and all(len(made_of) <= own.COMPONENTS for made_of in scored.components)
        and 0 <= scored.errors <= count
        and len(scored.error) <= ERROR_CHARACTERS
        and bool(scored.prompt or scored.error)
        and len(scored.episodes) == (len(question.actions) if scored.prompt else 0)
        and all(map(_played, scored.episodes, question.actions, scored.rewards))
    )


def _played(episode: Episode, actions: list[str | None], reward: float) -> bool:
    sizes = [len(text.encode(errors="replace")) for text in episode.observations]
    return (
        len(sizes) <= len(actions)
        and all(size <= OBSERVATION_BYTES for size in sizes)
        and sum(sizes) <= EPISODE_BYTES
        and (episode.done or (len(sizes) == len(actions) and reward == 0.0))
    )


def _sendable(text: str, spec: TaskSpec) -> str | None:
    if len(text) > TEXT_BYTES:
        return None
    if spec.nothing_after and has_tail(text, spec.extract):
        return None
    answer = extract(text, spec.extract, spec.fallback)
    try:
        return answer if len(answer.encode()) <= spec.max_answer_bytes else None
    except UnicodeEncodeError:  # a lone surrogate: no UTF-8 text, so nobody's answer
        return None
