"""Datasets as tasks. A row is a question with its right answer; a verifier returns the reward of an
answer. docs/own-task.md is the guide.

    parents   source ─ read, check, sort by hash ─▶ rows file in the data directory, its hash ─▶
    task version
    scorer    rows file ─ hash it again, equal? ─ map into memory ─ enter the sandbox ─▶ row by seed

The hash of the rows file identifies a dataset: equal questions and answers have the same hash for
any source file and any order. Rows are sorted by the hash of their prompt. The
first rows are held out and never trained on, so a question that occurs twice is on one side only. A
seed addresses a row (`DatasetTask.item`), so a node cannot choose its rows.

    rows file:  header, a JSON line
                ─ rows, held-out rows: 2 × u64
                ─ offsets: (rows + 1) × u64
                ─ rows: msgpack [prompt, answer, columns]
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import json
import math
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarmnode.errors import ConfigError
from swarmnode.files import write_atomically
from swarmnode.tasks import own, owner_code, seeds, taskset, tools
from swarmnode.tasks.answers import EXTRACTS
from swarmnode.tasks.builtin import Item
from swarmnode.tasks.verifiers import VERIFIERS, Verifier, read_letter

if TYPE_CHECKING:
    from swarmnode.config import DatasetConfig

ROWS = 2**20
FILE_BYTES = 256 * 2**20
"""Maximum size of the rows file. The scorer maps it into its 768 MiB of memory."""
LINE_BYTES = 2**20
PROMPT_CHARACTERS = 65_536
ANSWER_BYTES = 4096
FETCH_SECONDS = 3600.0
FORMAT = 5

NESTING = 32
"""Maximum nesting of lists and objects in one column."""
INTEGERS = range(-(2**63), 2**64)
"""Range of integers that the rows file can store."""
DIGITS = 4300
"""Maximum number of digits of an integer that Python parses."""
ROW_CHARACTERS = 1000
"""Length of a row that is shown."""
RESERVED = ("prompts", "completions")
"""Arguments of every reward function, which therefore cannot be columns."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset that was read and checked."""

    path: str
    """The rows file."""
    content: str
    """32 hex digits: hash of all rows and of the split into held-out and training rows."""
    rows: int
    held_out: int
    """Number of held-out rows, which come first; at least 1."""
    choices: str = ""
    """Letters of all right answers, for the verifier `choice`."""
    origin: str = ""
    """Origin for display: a file's name, or a name on the Hub with its revision."""


# ---- reading, in the node's processes ------------------------------------------------------------


def prepare(task: str, config: DatasetConfig, directory: Path) -> Source:
    """Read the dataset of `task`, or find its rows file from an earlier start in `directory`.

    Raises:
        ConfigError: The dataset cannot be used. It names the row and the remedy.
    """
    where = f"task.datasets.{task}"
    check_question_settings(where, config)
    by_taskset = config.source.startswith(taskset.PREFIX)
    if (
        config.verifier not in VERIFIERS
        and not by_taskset
        and not owner_code.NAME.fullmatch(config.verifier)
    ):
        raise ConfigError(
            f"{where}: verifier is {config.verifier!r}, not one of {', '.join(VERIFIERS)} or"
            " <module>:<function>"
        )
    file = Path(config.source).expanduser()
    local = file.suffix in (".jsonl", ".parquet") or file.exists()
    if local and not file.is_file():
        raise ConfigError(f"{where}: {file.absolute()}: no such file")
    if local and file.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{where}: {file} is neither .jsonl nor .parquet: write each row as a line of JSON,"
            ' such as {"prompt": "2 + 2 =", "answer": "4"}'
        )
    if not local and not by_taskset and config.revision is None:
        raise ConfigError(
            f"{where}: {config.source} is a name on the Hub: set revision, so that all nodes have"
            " the same rows"
        )
    hub = f"{config.source}@{config.revision} {config.subset or ''} {config.split}".replace(
        "  ", " "
    )
    origin = file.name if local else config.source if by_taskset else hub
    name = task.partition("/")[2]
    code = taskset.find(config.source).content if by_taskset else ""
    rows_file = directory / f"{name}-{_cache_key(config, file if local else None, code)}.rows"
    found = _read_header(rows_file, origin)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory() as scratch:
        lines = (
            file
            if local and file.suffix == ".jsonl"
            else _convert(where, config, file if local else None, Path(scratch))
        )
        rows = list(_read_rows(where, config, lines))
    choices = ""
    if config.verifier == "choice":
        choices = "".join(sorted({read_letter(row[1]) for row in rows}))
    body, count, held_out = _arrange(where, rows, config.held_out)
    content = hashlib.blake2b(body, digest_size=16).hexdigest()
    header = {
        "format": FORMAT,
        "rows": count,
        "held_out": held_out,
        "content": content,
        "choices": choices,
    }
    try:
        write_atomically(rows_file, json.dumps(header).encode() + b"\n" + body)
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot store its rows in {directory}: {error.strerror}"
        ) from None
    for former in directory.glob(f"{name}-{'[0-9a-f]' * 16}.rows"):
        if former != rows_file:
            former.unlink(missing_ok=True)
    return Source(str(rows_file), content, count, held_out, choices, origin)


def check_question_settings(where: str, config: DatasetConfig) -> None:
    """Check the template and the extraction of a task's questions. Raises ConfigError."""
    if config.extract != "auto" and config.extract not in EXTRACTS:
        raise ConfigError(
            f"{where}: extract is {config.extract!r}, not one of auto, {', '.join(EXTRACTS)}"
        )
    if "{prompt}" not in config.template:
        raise ConfigError(
            f"{where}: template does not contain {{prompt}}, so that every question would be the"
            " same"
        )


def _cache_key(config: DatasetConfig, file: Path | None, code: str) -> str:
    """Return 16 hex digits that identify a dataset and how it is read.

    Args:
        code: Hash of the code that makes the rows; empty without code.
    """
    seen: list[object] = [FORMAT, config.source, config.revision, config.subset, config.split]
    seen += [config.prompt, config.answer, config.held_out]
    # The verifier has checked the answers, and decides whether other columns are stored.
    seen.append(config.verifier)
    if code:
        seen.append(code)
    if file is not None:
        stat = file.stat()
        seen += [str(file.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.blake2b(json.dumps(seen).encode(), digest_size=8).hexdigest()


def _read_header(path: Path, origin: str) -> Source | None:
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(4096))
        if header["format"] != FORMAT:
            return None
        return Source(
            str(path),
            header["content"],
            header["rows"],
            header["held_out"],
            header["choices"],
            origin,
        )
    except (OSError, ValueError, KeyError):
        return None


def _convert(where: str, config: DatasetConfig, file: Path | None, scratch: Path) -> Path:
    """Convert parquet, a dataset of the Hub or a taskset to JSON lines in a child process, because
    its libraries are large and start threads.
    """
    lines = scratch / "rows.jsonl"
    request = {
        "source": str(file) if file is not None else config.source,
        "local": file is not None,
        "revision": config.revision,
        "subset": config.subset,
        "split": config.split,
        "columns": [config.prompt, config.answer] if config.verifier in VERIFIERS else None,
        "out": str(lines),
        "bytes": 2 * FILE_BYTES,
    }
    command = [sys.executable, "-m", "swarmnode.tasks.fetch", json.dumps(request)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{where}: {config.source} could not be fetched within {FETCH_SECONDS:g} s"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{where}: cannot read {config.source}: {last[:500]}")
    return lines


Row = tuple[str, str, dict[str, Any]]
"""Prompt, answer as text, and the other columns that a reward function receives. An answer that is
empty or not a text is among these columns, unchanged."""


def _read_rows(where: str, config: DatasetConfig, lines: Path) -> Iterator[Row]:
    """Read and check every line. Yield each row. Raises ConfigError."""
    verifier = VERIFIERS.get(config.verifier)
    first = dict[str, str]()
    """Column of the first row → kind of its value, for a reward function."""
    total = 0
    try:
        file = open(lines, "rb")  # noqa: SIM115 - closed below; the except clause is for opening only
    except OSError as error:
        raise ConfigError(f"{where}: {lines}: {error.strerror}") from None
    with file:
        for number, line in _read_lines(where, file):
            total += len(line)
            if number > ROWS or total > 2 * FILE_BYTES:
                raise ConfigError(
                    f"{where}: {config.source} has more than {ROWS} rows or {2 * FILE_BYTES >> 20}"
                    " MiB: use a part of it"
                )
            try:
                columns = _parse_line(line)
                _check_names(config, columns)
                columns[config.prompt] = prompt = _read_prompt(config.prompt, columns)
                further: dict[str, Any] = {}
                if verifier is not None:
                    answer = _read_answer(config.answer, columns, config.verifier, verifier)
                else:
                    _check_kinds(columns, first)
                    answer = _to_text(columns.get(config.answer, ""))
                    further = {
                        name: value
                        for name, value in columns.items()
                        if name != config.prompt
                        and not (name == config.answer and isinstance(value, str) and value)
                    }
            except ValueError as error:
                raise ConfigError(f"{where}: {config.source}, row {number}{error}") from None
            yield prompt, answer, further


# The checks of one row raise ValueError with a text that follows the row's number.


def _parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line into columns."""
    try:
        columns = json.loads(line, parse_int=_parse_integer, object_pairs_hook=_parse_object)
    except _RepeatedKey:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f" is not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise ValueError(" is not a JSON object")
    return columns


class _RepeatedKey(ValueError):
    """Raised for a JSON object with two equal keys."""


class _LongInteger:
    """Placeholder of an integer with more than `DIGITS` digits."""


def _parse_integer(digits: str) -> int | _LongInteger:
    return int(digits) if len(digits) <= DIGITS else _LongInteger()


def _parse_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKey(f": column {twice!r} occurs twice: leave one out")
    return made


def _check_names(config: DatasetConfig, columns: Mapping[str, object]) -> None:
    """Check that the row has the columns that the configuration names. A reward function
    needs no answer, so the column with the default name may be missing for it.
    """
    for key, name in (("prompt", config.prompt), ("answer", config.answer)):
        if name in columns:
            continue
        if (
            key == "answer"
            and config.verifier not in VERIFIERS
            and key not in config.model_fields_set
        ):
            continue
        there = ", ".join(sorted(columns)[:12])
        raise ValueError(f" has no column {name!r}, only {there}: set {key} to one of these")


def _read_prompt(name: str, columns: Mapping[str, object]) -> str:
    """Return the question of a row. A list of chat messages is converted to text."""
    prompt = columns[name]
    _check(name, prompt)
    if isinstance(prompt, list):
        prompt = _join_messages(name, prompt)
    if not isinstance(prompt, str):
        raise ValueError(f": column {name!r} is not a text but {_describe_kind(prompt)}")
    if not prompt.strip():
        raise ValueError(f": column {name!r} is empty: leave such rows out")
    if len(prompt) > PROMPT_CHARACTERS:
        raise ValueError(
            f": its prompt has {len(prompt)} characters, more than {PROMPT_CHARACTERS}: leave such"
            " rows out"
        )
    return prompt


def _join_messages(name: str, messages: list[object]) -> str:
    """Return the text of one user message, after that of a system message if there is one."""
    turns = [
        (message.get("role"), message.get("content"))
        for message in messages
        if isinstance(message, dict)
    ]
    texts = [text for _, text in turns if isinstance(text, str) and text.strip()]
    roles = [role for role, _ in turns]
    if len(texts) < len(messages) or roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f": column {name!r} is not one user message of text, with or without a system message"
            " before it: write the conversation as one text"
        )
    return "\n\n".join(texts)


def _read_answer(
    name: str, columns: Mapping[str, object], verifier_name: str, verifier: Verifier
) -> str:
    """Return the right answer as text. Raises ValueError if no completion could match it."""
    value = columns[name]
    _check(name, value, integers=False)
    answer = _to_text(value)
    if not answer.strip():
        raise ValueError(
            f": column {name!r} is empty, so that an empty answer would be right: leave such rows"
            " out"
        )
    try:
        verifier.check(answer)
    except ValueError as error:
        raise ValueError(
            f": verifier {verifier_name!r} cannot use the answer {answer[:60]!r}: {error}"
        ) from None
    if verifier_name == "exact" and len(answer.strip().encode()) > ANSWER_BYTES:
        raise ValueError(
            f": column {name!r} has more than {ANSWER_BYTES} bytes, and longer answers are not"
            " judged: leave such rows out"
        )
    return answer


def _check_kinds(columns: Mapping[str, object], first: dict[str, str]) -> None:
    """Check every column that a reward function receives.

    Args:
        first: Column → kind of value in the first row, which fills it.
    """
    for name, value in columns.items():
        _check(name, value)
        if name in RESERVED:
            raise ValueError(
                f": column {name!r} has the name of an argument of every reward function: rename"
                " the column"
            )
    kinds = {name: _describe_kind(value) for name, value in columns.items()}
    if not first:
        first.update(kinds)
    remedy = "give all rows the same columns"
    for name in [*first, *kinds]:
        if name not in kinds:
            raise ValueError(f" has no column {name!r}, which the first row has: {remedy}")
        if name not in first:
            raise ValueError(f" has a column {name!r}, which the first row lacks: {remedy}")
        if kinds[name] != first[name]:
            raise ValueError(
                f": column {name!r} is {kinds[name]}, but {first[name]} in the first row: give all"
                " of its values the same type"
            )


def _check(name: str, value: object, *, integers: bool = True) -> None:
    """Check one column.

    Args:
        integers: Refuse integers of more than 64 bits.
    """
    if not _encodable(name):
        raise ValueError(f": the name of column {name!r} is not valid Unicode: rename the column")
    if (problem := _find_problem(value, integers)) is not None:
        raise ValueError(f": column {name!r} {problem}")


def _find_problem(value: object, integers: bool, depth: int = 0) -> str | None:
    """Return the problem of a value with the remedy; None if the value can be used. Null is allowed
    inside lists and objects only.
    """
    if value is None and not depth:
        return "is null: give it a value, or leave such rows out"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {json.dumps(value)}, which is not a number: leave such rows out"
    if isinstance(value, _LongInteger):
        return f"is an integer of more than {DIGITS} digits: write it as a text"
    if isinstance(value, int) and integers and value not in INTEGERS:
        return "is an integer of more than 64 bits: write it as a text"
    if isinstance(value, str) and not _encodable(value):
        return "is not valid Unicode: it contains half of a surrogate pair; leave such rows out"
    if depth > NESTING:
        return f"is nested more than {NESTING} deep: write it as a text of JSON"
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(inside, list):
        for each in inside:
            if (problem := _find_problem(each, integers, depth + 1)) is not None:
                return "holds a value that " + problem.removeprefix("holds a value that ")
    return None


def _describe_kind(value: object) -> str:
    """Describe the type of a value for an error."""
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]


def _read_lines(where: str, file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of every line that is not blank."""
    for number, line in enumerate(file, 1):
        if len(line) > LINE_BYTES:
            raise ConfigError(
                f"{where}: row {number} is longer than {LINE_BYTES >> 20} MiB: leave it out"
            )
        if line.strip():
            yield number, line


def _arrange(where: str, rows: Sequence[Row], share: float) -> tuple[bytes, int, int]:
    """Return (body of the rows file, rows, held-out rows). Equal rows are stored once.

    Args:
        share: Share of the rows that is held out.
    """
    packed = {msgspec.msgpack.encode(row): _hash_prompt(row[0]) for row in rows}
    blobs = sorted(packed, key=lambda blob: (packed[blob], blob))
    held_out = max(1, round(len(blobs) * share))
    while held_out < len(blobs) and packed[blobs[held_out]] == packed[blobs[held_out - 1]]:
        held_out += 1  # the same question with another answer stays on this side
    if held_out >= len(blobs):
        raise ConfigError(
            f"{where}: {len(blobs)} different rows are too few to train on some and hold others out"
        )
    offsets = list(itertools.accumulate((len(blob) for blob in blobs), initial=0))
    if offsets[-1] > FILE_BYTES:
        raise ConfigError(
            f"{where}: its rows take {offsets[-1] >> 20} MiB, more than {FILE_BYTES >> 20}: use a"
            " part of it"
        )
    numbers = array.array("Q", [len(blobs), held_out, *offsets])
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers.tobytes() + b"".join(blobs), len(blobs), held_out


def _hash_prompt(prompt: str) -> bytes:
    return hashlib.blake2b(prompt.encode(), digest_size=16).digest()


def _to_text(value: object) -> str:
    return (
        value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- questions and rewards, in the scorer child --------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Settings of a dataset's questions and rewards. All are part of the task's version."""

    verifier: str
    template: str
    weights: Mapping[str, float]
    prompt: str = "prompt"
    answer: str = "answer"
    """Names of the columns of the question and the right answer. A reward function receives them
    under these names.
    """
    turns: int = 1
    """Maximum number of actions of an episode. Above 1, `verifier` is an environment."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, object]) -> Settings:
        return cls(
            str(settings["verifier"]),
            str(settings["template"]),
            own.read_weights(settings),
            str(settings.get("prompt", "prompt")),
            str(settings.get("answer", "answer")),
            own.read_turns(settings),
        )


class DatasetTask:
    """One dataset in the scorer child.

    Args:
        reward: The owner's reward function, used instead of a built-in verifier.
        environment: The owner's environment, for episodes of several turns.

    Raises:
        ConfigError: The rows file has changed since it was hashed.
    """

    def __init__(
        self,
        task: str,
        source: Source,
        settings: Settings,
        reward: own.RewardFunction | None = None,
        environment: own.Generator | None = None,
    ) -> None:
        self._task = task
        self._template = settings.template
        self._verifier = VERIFIERS.get(settings.verifier)
        self.has_formulas = settings.verifier == "math"
        self._settings = settings
        self._reward = own.OwnReward(reward) if reward is not None else None
        self._environment = environment
        self.turns, self.weights = settings.turns, settings.weights
        try:
            with open(source.path, "rb") as file:
                self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"task.datasets.{task}: {source.path}: {error}") from None
        start = self._rows.find(b"\n") + 1
        if (
            hashlib.blake2b(memoryview(self._rows)[start:], digest_size=16).hexdigest()
            != source.content
        ):
            raise ConfigError(
                f"task.datasets.{task}: {source.path} has changed since this node started:"
                " restart it"
            )
        self._count = int.from_bytes(self._rows[start : start + 8], "little")
        held_out = int.from_bytes(self._rows[start + 8 : start + 16], "little")
        self._held_out, self._training = range(held_out), range(held_out, self._count)
        self._offsets = start + 16
        self._first = self._offsets + 8 * (self._count + 1)
        self._decode = msgspec.msgpack.Decoder(Row).decode

    def item(self, seed: int, index: int) -> Item:
        """Return the question at (seed, index): a held-out row for an evaluation seed, otherwise a
        training row.

        A block of 2**20 indices starts at a row that the seed's hash decides and continues row by
        row, so every row occurs once before a row occurs twice.
        """
        prompt, answer, columns = self._row(self._row_at(seed, index))
        question = self._template.replace("{prompt}", prompt)
        if self._reward is not None:
            function, given = self._reward, self._named_columns(prompt, answer, columns)
            return Item(
                question,
                answer,
                lambda text: function.reward(question, text, given),
                function.arguments(given),
                json.dumps(given, ensure_ascii=False, default=str)[:ROW_CHARACTERS],
            )
        assert self._verifier is not None
        verifier = self._verifier
        return Item(question, answer, lambda text: verifier.reward(text, answer))

    def start(self, seed: int, index: int) -> tuple[str, Callable[[str], Any]]:
        """Begin the episode of the question at (seed, index). The environment receives the columns
        that it has parameters for, the prompt inside the template, `seed` and `turns`.
        """
        assert self._environment is not None
        prompt, answer, columns = self._row(self._row_at(seed, index))
        given = self._named_columns(self._template.replace("{prompt}", prompt), answer, columns)
        own_seed = {"seed": seeds.environment_seed(seed, index), own.TURNS: self.turns}
        return self._environment(**tools.select_arguments(self._environment, {**given, **own_seed}))

    def _row_at(self, seed: int, index: int) -> int:
        rows = self._held_out if seeds.is_evaluation(seed) else self._training
        return rows[(seed // seeds.INDEX_SPAN + index) % len(rows)]

    def _named_columns(
        self, prompt: str, answer: str, columns: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return the columns of a row by name. `answer` is always the right answer, also if
        another column has that name.
        """
        names = self._settings
        answers = {"answer": answer, names.answer: answer} if answer else {}
        given = {**answers, names.prompt: prompt, **columns}
        if names.answer != "answer" and names.answer in given:
            given["answer"] = answer
        return given

    def _row(self, row: int) -> Row:
        at = self._offsets + 8 * row
        start, end = (
            int.from_bytes(self._rows[at : at + 8], "little"),
            int.from_bytes(self._rows[at + 8 : at + 16], "little"),
        )
        return self._decode(self._rows[self._first + start : self._first + end])

    def check(self) -> None:
        """Judge the right answers of a few rows inside the sandbox, so that errors appear at the
        start. Raises ConfigError.
        """
        for row in {0, self._training.start, self._count - 1}:
            prompt, answer, columns = self._row(row)
            try:
                if self._reward is not None:
                    given = self._named_columns(prompt, answer, columns)
                    question = self._template.replace("{prompt}", prompt)
                    own.total_reward(self._reward.reward(question, answer, given), self.weights)
                elif self._verifier is not None and answer:
                    self._verifier.check(answer)
            except Exception as error:
                raise ConfigError(
                    f"task.datasets.{self._task} does not work: {owner_code.one_line(error)}"
                ) from error


def load(
    tasks: Mapping[str, tuple[Source, Mapping[str, object], owner_code.Source | None]],
    check_episode: Callable[[str, DatasetTask], None],
) -> dict[str, DatasetTask]:
    """Load the owner's datasets before the process enters its sandbox. Raises ConfigError.

    Args:
        check_episode: Plays some turns of a task (`episodes.check_episode`).
    """
    codes = [
        str(arguments["verifier"]) for _, arguments, code in tasks.values() if code is not None
    ]
    with owner_code.guard_imports(", ".join(codes)) if codes else contextlib.nullcontext():
        loaded = {
            task: build_task(task, source, Settings.from_settings(arguments), code)
            for task, (source, arguments, code) in tasks.items()
        }
        for task, (_, arguments, _) in tasks.items():
            if str(arguments["verifier"]).startswith(taskset.PREFIX):
                # The first use of a taskset imports more modules.
                if loaded[task].turns > 1:
                    check_episode(task, loaded[task])
                else:
                    loaded[task].check()
    return loaded


def build_task(
    task: str, source: Source, settings: Settings, code: owner_code.Source | None
) -> DatasetTask:
    """Return a dataset task with its owner's reward function or environment, or with its taskset.
    Raises ConfigError.
    """
    name = settings.verifier
    if not name.startswith(taskset.PREFIX):
        if code is None:
            return DatasetTask(task, source, settings)
        if settings.turns == 1:
            return DatasetTask(task, source, settings, own.reward_function(name, code))
        environment = own.environment("task.datasets", name, code)
        return DatasetTask(task, source, settings, environment=environment)
    assert code is not None
    if settings.turns == 1:
        return DatasetTask(task, source, settings, taskset.reward_function(name, code))
    environment = taskset.environment(name, code, settings.template)
    return DatasetTask(task, source, settings, environment=environment)
