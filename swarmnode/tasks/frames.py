"""Messages between a client and its scorer child, and their checks.

A frame is a big-endian u32 length and a msgpack array. One frame carries many groups, because a
round trip costs as much as judging a few of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from swarmnode.errors import LocalError, SwarmNodeError
from swarmnode.tasks import dataset, own, owner_code, sandbox

FRAME_GROUPS = 64
"""Maximum number of groups in a request."""
FRAME_BYTES = 16 * 2**20
"""Maximum size of a frame. A longer one is a protocol error."""
ERROR_CHARACTERS = 500
OBSERVATION_BYTES = 4096
"""Maximum UTF-8 bytes of an environment's text after one action. A longer text is cut."""
EPISODE_BYTES = 16 * 1024
"""Maximum UTF-8 bytes of all observations of an episode. An episode that reaches the limit ends."""
HEADER = struct.Struct(">I")


class ScorerFailed(LocalError):
    """Raised, or used as a result, if the child died or exceeded its deadline on this question, or
    could not be started.
    """


class TaskUnknown(SwarmNodeError):
    """Raised, or used as a result, if this node cannot regenerate a question.

    Attributes:
        reason: task, version or address.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"unknown {reason}: {detail}")
        self.reason = reason


class QuestionFailed(ScorerFailed):
    """Result of a question that the owner's code failed to make. The child continues."""


CompletionText = str | Sequence[str]
"""Text to judge: an answer, or for an episode task the texts of its actions so far."""


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """Observations of one episode."""

    observations: list[str]
    """Text after each action that the episode took, including the last one of a finished episode.
    An episode that ended early has fewer observations than actions.
    """
    done: bool
    """True if the episode takes no further action."""


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """One question regenerated, and its completions judged."""

    prompt: str
    """Empty if the owner's code failed to make a question; `error` has the reason."""
    rewards: list[float]
    """(G,) One finite reward in [0, 1] per completion. An unfinished episode has 0."""
    errors: int = 0
    """Number of completions whose reward raised an exception or was no number from 0 to 1. Their
    reward is 0.
    """
    error: str = ""
    """Last such error in one line, with the line of the owner's file."""
    components: list[dict[str, float]] = []
    """(G,) Components of each reward: name → value in [0, 1]. Empty if the rewards are single
    numbers.
    """
    answer: str = ""
    """The right answer, if it was requested and the task has one."""
    arguments: list[str] = []
    """Names of the arguments that the owner's reward function receives, if they were requested."""
    episodes: list[Episode] = []
    """(G,) Episodes of an episode task; empty for other tasks."""
    refusals: dict[str, int] = {}
    """What the sandbox refused while the question was judged, and how often. The code may have
    caught the error, so the rewards may be wrong."""
    row: str = ""
    """The dataset's row as JSON, shortened, if it was requested."""


ScoreError = TaskUnknown | ScorerFailed


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Client → child: regenerate this question and judge its completions. A `None` answer was too
    long or unencodable and has the reward 0.
    """

    task: str
    seed: int
    index: int
    answers: list[str | None]
    reveal: bool = False
    """Return the right answer too: for `swarmnode task try`."""
    actions: list[list[str | None]] = []
    """(G,) Actions so far of each episode of an episode task, whose `answers` are empty. A `None`
    action was too long or unencodable and ends its episode with the reward 0.
    """
    formulas: bool = False
    """True for the verifier `math`: each answer may take `formulas.CPU_SECONDS`, in addition to the
    limits of other questions."""


class TaskSetup(msgspec.Struct, frozen=True, array_like=True):
    """Client → child, on its command line: a task to load. It is the owner's task, a dataset, or a
    built-in task or game with the owner's settings (without code and rows).
    """

    task: str
    code: owner_code.Source | None
    """The owner's code: a task, or the reward function of a dataset."""
    rows: dataset.Source | None
    settings: dict[str, object]


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """Child → client, first frame: the tasks are loaded and the sandbox is active."""

    pid: int
    layers: list[str]
    """The sandbox layers that are active (`sandbox.LAYERS`)."""


encode_questions = msgspec.msgpack.Encoder().encode
decode_questions = msgspec.msgpack.Decoder(list[Question]).decode
encode_scored = msgspec.msgpack.Encoder().encode
decode_scored = msgspec.msgpack.Decoder(list[Scored]).decode
encode_setups = msgspec.json.Encoder().encode
decode_setups = msgspec.json.Decoder(list[TaskSetup]).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode


def valid(scored: list[Scored], questions: list[Question]) -> bool:
    """Return True if a response fits its request. The child processes peers' text, so its responses
    are not trusted.
    """
    return len(scored) == len(questions) and all(
        _fits(s, q) for s, q in zip(scored, questions, strict=True)
    )


def _fits(scored: Scored, question: Question) -> bool:
    count = len(question.answers) + len(question.actions)
    return (
        len(scored.rewards) == count
        and all(0.0 <= reward <= 1.0 for reward in scored.rewards)
        and len(scored.components) in (0, count)
        and all(0.0 <= value <= 1.0 for parts in scored.components for value in parts.values())
        and all(len(parts) <= own.COMPONENTS for parts in scored.components)
        and 0 <= scored.errors <= count
        and len(scored.error) <= ERROR_CHARACTERS
        and len(scored.refusals) <= sandbox.REFUSALS
        and all(len(what) <= ERROR_CHARACTERS for what in scored.refusals)
        and bool(scored.prompt or scored.error)
        and len(scored.episodes) == (len(question.actions) if scored.prompt else 0)
        and all(map(_is_valid_episode, scored.episodes, question.actions, scored.rewards))
    )


def _is_valid_episode(episode: Episode, actions: list[str | None], reward: float) -> bool:
    sizes = [len(text.encode(errors="replace")) for text in episode.observations]
    return (
        len(sizes) <= len(actions)
        and all(size <= OBSERVATION_BYTES for size in sizes)
        and sum(sizes) <= EPISODE_BYTES
        and (episode.done or (len(sizes) == len(actions) and reward == 0.0))
    )
