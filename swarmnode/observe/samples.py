"""What the policy and its peers answered, for people: a line of JSON per group in
`<data_dir>/log/samples.jsonl`.

    trainer   writes one own group of a step, one of peers' that it learnt from, one that it refused
    `trainer.records`
    page      /samples, the newest of them          terminal   `swarmnode samples`

A text here may be a stranger's. On disk it stands as it came, shortened; whatever shows it to a
person goes through `visible`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from swarmnode.observe.logfile import log_file

TEXT = 4000
"""Characters of a prompt or completion that are kept."""
PAGE_TEXT = 1200
"""Characters of one that the page is given."""
TURN_TEXT = 500
"""Characters of an action or observation that are kept."""
PAGE_TURN_TEXT = 160
"""Characters of one that the page is given."""
PAGE_TURNS = 12
"""Turns of an episode that the page is given: the first and the last."""
PAGE_GROUPS = 9
"""Groups that the page is given: of three steps, where peers' groups come."""
READ_BYTES = 2**20
"""What is read of a file's end."""
SHOWN_CONTROLS = "\n\t"


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of an episode."""

    action: str
    observation: str = ""
    """The environment's response; empty if it did not receive the action."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion."""

    text: str
    """For an episode, its actions, one per line."""
    tokens: int
    finish: str
    """eos, length or tool: how it ended."""
    reward: float | None = None
    components: dict[str, float] = {}
    """What the reward is made of, each in [0, 1]; empty where it is one number."""
    surprise: float | None = None
    """Mean of −log-probability per token, nats, under the policy that judged it: ours. None: not
    measured."""
    turns: list[Exchange] = []
    """The conversation of an episode; empty for an answer."""


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
    """Who sampled it; empty: this node."""
    outcome: str = "used"
    """What the trainer made of it (`rollouts.groups.Outcome`)."""
    drift: str = ""
    """The token that peers write more often than this node, at this step; of a peer's group."""


_decode = msgspec.json.Decoder(Sample).decode


def shortened(text: str, most: int = TEXT) -> str:
    """At most about `most` characters: beginning and end, since the answer stands at the end.
    Halves of surrogate pairs become `?`."""
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def visible(text: str) -> str:
    """The same with every character that shows nothing, moves a cursor or turns text around written
    out, e.g. ⟨U+202E⟩.

    Line breaks and tabs stay. Neither a terminal nor a browser does anything with what is returned
    but show it.
    """
    return "".join(
        c if c in SHOWN_CONTROLS or unicodedata.category(c) not in _HIDDEN else f"⟨U+{ord(c):04X}⟩"
        for c in text
    )


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def newest(data_dir: Path, count: int) -> list[Sample]:
    """The newest `count` samples on disk, newest first. Reads a bounded end of the files; never
    raises for what is or is not there."""
    found: list[Sample] = []
    path = log_file(data_dir, "samples")
    for file in (path, path.with_name(f"{path.name}.1")):  # what is put aside is older
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
        except msgspec.MsgspecError:  # an empty line, or the end of one that was cut
            continue


def for_page(samples: Sequence[Sample]) -> bytes:
    """What /samples answers: the newest first, every text shortened and made visible."""
    return msgspec.json.encode([harmless(sample, PAGE_TEXT, PAGE_TURN_TEXT) for sample in samples])


def exchanges(
    actions: Sequence[str], observations: Sequence[str], most: int = TURN_TEXT
) -> list[Exchange]:
    """Return the turns of an episode, each text shortened to `most` characters. An action that was
    cut has no observation."""
    answered = [*observations, *[""] * len(actions)]
    return [
        Exchange(shortened(action, most), shortened(observation, most))
        for action, observation in zip(actions, answered, strict=False)
    ]


def harmless(sample: Sample, most: int = TEXT, most_of_turn: int = TURN_TEXT) -> Sample:
    """Return a sample that is safe to display: see `shortened` and `visible`. A long episode keeps
    only its first and last turns."""
    shown = lambda text, most=most: visible(shortened(text, most))

    def talk(turns: list[Exchange]) -> list[Exchange]:
        half = PAGE_TURNS // 2
        if len(turns) > PAGE_TURNS:
            missing = Exchange("", f"… {len(turns) - 2 * half} turns left out …")
            turns = [*turns[:half], missing, *turns[-half:]]
        return [
            Exchange(shown(turn.action, most_of_turn), shown(turn.observation, most_of_turn))
            for turn in turns
        ]

    answers = [
        msgspec.structs.replace(
            answer,
            turns=talk(answer.turns),
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
        drift=shown(sample.drift),
    )
