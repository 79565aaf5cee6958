"""Where a piece of work is that does not come back: every member counts what comes to it and what
goes on, and the head finds who has it. Pure; no torch.

    path       0 → 1 → … → the tail, and back to the head: stages in the order in which a piece
    visits them
    holder     the first on it that has it and has not sent it on
    contradiction    one says that it sent it on, the next that it never came: one of the two is
    bad, and which is not to be told

What a member says of itself cannot shift the blame further than to a neighbour on the path: whoever
is honest there has true counts.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from swarmnode.pipeline import frames
from swarmnode.pipeline.frames import Frame, Located
from swarmnode.pipeline.routes import Route

REMEMBERED: Final = 2 * frames.MICRO_BATCHES
"""Pieces of each neighbour that are counted, the latest: a step's, and what an aborted attempt has
left."""
GROWN: Final = 5
"""Questions for which it counts that a stage has done more."""
MOST: Final = 0.3
"""Share of the patience with a step for which a stage must have had the work to be named for it."""


class Passages:
    """How often each piece of work came from a neighbour, or went to it."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, OrderedDict[bytes, int]] = defaultdict(OrderedDict)
        """By neighbour, so that one that sends many of its own making makes us forget nobody
        else's."""

    def count(self, neighbour: int, frame: Frame) -> None:
        piece = piece_of(frame)
        if piece is None:
            return
        known = self._counts[neighbour]
        known[piece] = known.get(piece, 0) + 1
        if len(known) > REMEMBERED:
            known.popitem(last=False)

    def of(self, piece: bytes) -> int:
        return sum(known.get(piece, 0) for known in self._counts.values())


class Passed:
    """What one member counts."""

    def __init__(self) -> None:
        self.arrived, self.sent = Passages(), Passages()
        self.chunks = 0
        """Sent, whole ones: what takes a slow line long."""


def name_of(micro_batch: int) -> bytes:
    """A micro-batch's name among the pieces; a wave's is its session."""
    return micro_batch.to_bytes(frames.SESSION_BYTES, "big")


def piece_of(frame: Frame) -> bytes | None:
    """The piece of work that `frame` takes from one stage to the next; None for any other frame."""
    match frame:
        case frames.Forward() | frames.Backward() | frames.Scores():
            return name_of(frame.micro_batch)
        case frames.Prefill() | frames.Decode() | frames.Tokens():
            return frame.session
    return None


def path_of(route: Route, *, returns: bool) -> tuple[int, ...]:
    """The stages that a micro-batch visits. returns: as its gradient does, on the way that it came;
    else from the tail to the head."""
    there = tuple(hop.stage for hop in route)
    return there + (there[-2::-1] if returns else there[:1])


def path_of_wave(stages: int, tokens: int) -> tuple[int, ...]:
    """The stages that a wave visits for so many tokens."""
    return (*tokens * tuple(range(stages)), 0)


def holders(path: Sequence[int], said: Mapping[int, Located]) -> tuple[int, ...]:
    """Whose fault it may be that a piece has not come to the end of its path, which is the head:
    one stage, two that contradict each other, or nobody. said: what each stage has counted, the
    head too, which is idle; whoever said nothing has it."""
    came, went = Counter[int](), Counter[int]()
    for at, stage in enumerate(path[:-1]):
        following = path[at + 1]
        went[stage] += 1
        came[following] += 1
        mine, theirs = said.get(stage), said.get(following)
        if mine is None:
            return _without_head(stage)
        if mine.sent < went[stage]:
            if mine.full:  # whoever comes next does not read
                return _without_head(stage, following)
            return (path[at - 1],) if stage == 0 and at else _without_head(stage)
        if at + 2 == len(path) or theirs is None or theirs.arrived < came[following]:
            return _without_head(stage, following) if theirs is not None else (following,)
    return ()


def _without_head(*stages: int) -> tuple[int, ...]:
    return tuple(sorted({*stages} - {0}))


def parties(path: Sequence[int], stage: int, source: int) -> tuple[int, ...]:
    """Whose fault it may be that `stage` refuses what `source`, its neighbour on `path`, has sent
    it."""
    beside = any({a, b} == {stage, source} for a, b in pairwise(path))
    return _without_head(stage, source) or (stage,) if beside else (stage,)


class Search:
    """The head's, for the oldest piece that has not come back, asked about again and again while a
    call waits."""

    def __init__(self) -> None:
        self.piece = b""
        self.patience = math.inf
        """Seconds without a step, after which whoever had the work for most of them is named."""
        self.idle = True
        """Whether the head itself waited for others when it last asked: what it computes is with
        nobody else."""
        self._path: tuple[int, ...] = ()
        self._asked = -math.inf
        self._questions = 0
        self._said: dict[int, Located] = {}
        self._grew: dict[int, int] = {}
        """Stage → the question to which it last answered that it had done more."""
        self._stepped: float | None = None
        self._held: defaultdict[int, float] = defaultdict(float)
        """Seconds since the last step that each stage was found to have the work, or to be one of
        two."""

    def begins(self, piece: bytes, path: tuple[int, ...], now: float, seconds: float) -> bool:
        """Whether all are to be asked now, which is every so many seconds: until then the work was
        with whom it was found."""
        if now - self._asked < seconds:
            return False
        for stage in self.holders() if self._said else ():
            self._held[stage] += min(now - self._asked, 2 * seconds)
        if (piece, path) != (self.piece, self._path):
            self._said.clear()
            self._grew.clear()
        self.piece, self._path, self._asked = piece, path, now
        self._questions += 1
        return True

    def said(self, stage: int, located: Located) -> bool:
        """Takes an answer. Whether the piece is with `stage`, which computes; the head knows of
        itself whether it does."""
        if located.piece != self.piece:
            return False
        before = self._said.get(stage)
        self._said[stage] = located
        if before is None or located.worked <= before.worked:
            return False
        self._grew[stage] = self._questions
        return stage == 0 or stage in self.holders()

    def holders(self) -> tuple[int, ...]:
        return holders(self._path, self._said) if self.idle else ()

    def computes(self, stages: Sequence[int]) -> bool:
        """Whether one of them says so, at one of the last questions: a layer may take longer than
        is between two."""
        return any(self._questions - self._grew.get(stage, -GROWN) < GROWN for stage in stages)

    def stepped(self, now: float) -> None:
        self._stepped = now
        self._held.clear()

    def slowest(self, now: float) -> tuple[int, ...]:
        """The one, or the two, that had the work for most of the time, once patience is at its end:
        deadlines can be just kept."""
        self._stepped = now if self._stepped is None else self._stepped
        most = max(self._held.values(), default=0.0)
        if now - self._stepped <= self.patience or most < MOST * self.patience:
            return ()
        return tuple(stage for stage, seconds in self._held.items() if seconds == most)
