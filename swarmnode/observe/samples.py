"""Answers of the policy and its peers, for the operator: one line of JSON per group in
`<data_dir>/log/samples.jsonl`.

After a step, the trainer (`trainer.records`) writes an own group, a peer's group that it trained
on, and one that it refused; after an evaluation, the first question. /samples and `swarmnode
samples` show the newest.

A text may come from a stranger. It is stored as it came, but shortened, and passes through
`visible` before it is displayed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from swarmnode.observe.logfile import log_file

TEXT = 4000
"""Maximum number of stored characters of a prompt or completion."""
PAGE_TEXT = 1200
"""Maximum number of characters of a prompt or completion on the page."""
TURN_TEXT = 500
"""Maximum number of stored characters of an action or observation."""
PAGE_TURN_TEXT = 160
"""Maximum number of characters of an action or observation on the page."""
PAGE_TURNS = 12
"""Maximum number of turns of an episode on the page: the first and the last ones."""
PAGE_GROUPS = 9
"""Groups on the page: those of three steps, if peers send groups."""
READ_BYTES = 2**20
"""Bytes that are read from the end of a file."""
SHOWN_CONTROLS = "\n\t"


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of an episode."""

    action: str
    observation: str = ""
    """The environment's response; empty if it did not receive the action."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion."""

    text: str
    """Text of the completion; the actions of an episode, one per line."""
    tokens: int
    finish: str
    """Reason of its end: eos, length or tool."""
    reward: float | None = None
    components: dict[str, float] = {}
    """Components of the reward, each in [0, 1]; empty if it is a single number."""
    surprise: float | None = None
    """Mean of −log-probability per token under this node's policy, in nats. None if it was not
    measured."""
    turns: list[Turn] = []
    """Turns of an episode; empty for a single answer."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group: its question and the first of its completions."""

    at: float
    """Unix seconds."""
    step: int
    policy_version: int
    """Version of the policy that sampled it."""
    task: str
    prompt: str
    completions: list[Answer]
    peer: str = ""
    """Peer that sampled it; empty for this node."""
    outcome: str = "used"
    """Outcome of the trainer's examination, of `rollouts.groups.Outcome`."""
    held_out: bool = False
    """True for the first question of an evaluation. Its answers are not trained on."""
    detail: str = ""
    """Why a peer's group was refused, if that adds to the outcome."""


_decode = msgspec.json.Decoder(Sample).decode


def shortened(text: str, most: int = TEXT) -> str:
    """Return the beginning and end of a text, together about `most` characters.

    The end is included because the answer is there. Lone surrogates become `?`.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def visible(text: str) -> str:
    """Write out each invisible, control and direction character, for example as ⟨U+202E⟩.

    Line breaks and tabs stay. The result is safe for a terminal and a browser.
    """
    return "".join(
        c if c in SHOWN_CONTROLS or unicodedata.category(c) not in _HIDDEN else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def newest(data_dir: Path, count: int) -> list[Sample]:
    """Return the newest `count` samples on disk, newest first.

    Reads at most `READ_BYTES` of each file. Never raises; invalid lines are skipped.
    """
    found: list[Sample] = []
    path = log_file(data_dir, "samples")
    for file in (path, path.with_name(f"{path.name}.1")):  # the rotated file is older
        for sample in _backwards(file):
            if len(found) >= count:
                return found
            found.append(sample)
    return found


def _backwards(path: Path) -> Iterator[Sample]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - READ_BYTES))
            lines = file.read(READ_BYTES).split(b"\n")
    except OSError:
        return
    for line in reversed(lines if size <= READ_BYTES else lines[1:]):
        try:
            yield _decode(line)
        except msgspec.MsgspecError:  # an empty or incomplete line
            continue


def for_page(samples: Sequence[Sample]) -> bytes:
    """Return the body of /samples: shortened and displayable samples, newest first."""
    return msgspec.json.encode(
        [displayable(sample, PAGE_TEXT, PAGE_TURN_TEXT) for sample in samples]
    )


def to_turns(actions: Sequence[str], observations: Sequence[str]) -> list[Turn]:
    """Return the turns of an episode, each text shortened to TURN_TEXT characters. An action that
    was cut has no observation."""
    answered = [*observations, *[""] * len(actions)]
    return [
        Turn(shortened(action, TURN_TEXT), shortened(observation, TURN_TEXT))
        for action, observation in zip(actions, answered, strict=False)
    ]


def displayable(sample: Sample, most: int = TEXT, most_of_turn: int = TURN_TEXT) -> Sample:
    """Return a sample that is safe to display: see `shortened` and `visible`. A long episode keeps
    only its first and last turns."""
    shown = lambda text, most=most: visible(shortened(text, most))

    def shorten_turns(turns: list[Turn]) -> list[Turn]:
        half = PAGE_TURNS // 2
        if len(turns) > PAGE_TURNS:
            missing = Turn("", f"… {len(turns) - 2 * half} turns left out …")
            turns = [*turns[:half], missing, *turns[-half:]]
        return [
            Turn(shown(turn.action, most_of_turn), shown(turn.observation, most_of_turn))
            for turn in turns
        ]

    answers = [
        msgspec.structs.replace(
            answer,
            turns=shorten_turns(answer.turns),
            text=shown(answer.text),
            finish=visible(answer.finish[:16]),
            components={visible(name[:64]): value for name, value in answer.components.items()},
        )
        for answer in sample.completions
    ]
    return msgspec.structs.replace(
        sample,
        prompt=shown(sample.prompt),
        completions=answers,
        task=visible(sample.task),
        peer=visible(sample.peer),
        outcome=visible(sample.outcome),
        detail=shown(sample.detail),
    )
