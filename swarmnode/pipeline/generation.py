"""The head's side of generation: waves that are under way, a token at a time, begun again from
token ids where a stage lost them."""

from __future__ import annotations

from typing import Final

from swarmnode.errors import BadMessage
from swarmnode.pipeline import frames
from swarmnode.pipeline.context import StageContext
from swarmnode.pipeline.waves import Wave
from swarmnode.pipeline.whereabouts import path_of_wave
from swarmnode.pipeline.work import read_tokens
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_ids

BEGIN_AGAIN: Final = 4
"""Times that one wave is begun again before its generation fails."""


class Numbers:
    """Names of micro-batches and waves, never used twice under one head."""

    def __init__(self) -> None:
        self._last = self._turn = 0

    def next(self) -> int:
        self._last += 1
        return self._last

    def next_of_turn(self) -> int:
        """Even and odd in turn, across steps: of a swapped run's micro-batches every other one is
        swapped."""
        self._turn += 1
        while self.next() % 2 != self._turn % 2:
            pass
        return self._last

    def session(self) -> bytes:
        return self.next().to_bytes(frames.SESSION_BYTES, "big")


class Generation:
    def __init__(self, context: StageContext, numbers: Numbers) -> None:
        self.open: dict[bytes, Wave] = {}
        self._context = context
        self._numbers = numbers

    def begin(self, wave: Wave) -> None:
        at, questions = self._context, wave.questions()
        about = strict.encode(questions)
        wave.began_at = questions.position
        self.open[wave.session] = wave
        frame = frames.Prefill(
            at.place,
            wave.session,
            at.fingerprint,
            at.settings.codec,
            sum(questions.lengths),
            len(about),
        )
        at.links.send(0, frame, about)

    def take(self, frame: frames.Tokens, body: bytes) -> None:
        """The next token of each completion; then the one after it is asked for. Raises
        BadMessage."""
        at, wave = self._context, self.open.get(frame.session)
        if wave is None:
            return
        if frame.rows != len(wave.live):
            raise BadMessage("shape", "not a token for each completion that is left")
        wave.took(*read_tokens(body, frame.rows, at.links.limits))
        if not wave.live:
            self.end(frame.session)
            return
        step = frames.Decode(
            at.place, wave.session, at.fingerprint, at.settings.codec, len(wave.live)
        )
        at.links.send(0, step, pack_ids(wave.live) + pack_ids(wave.latest()))

    def lost(self, session: bytes, reason: str) -> str | None:
        """Begin again from token ids, under another name, so that nothing of the old one can be
        mistaken for it. Why not, where it was lost too often."""
        wave = self.open.get(session)
        if wave is None:
            return None
        self.end(session)
        wave.begun_again += 1
        if wave.begun_again > BEGIN_AGAIN:
            return f"a wave was lost {BEGIN_AGAIN + 1} times, last: {reason}"
        wave.session = self._numbers.session()
        self.begin(wave)
        return None

    def oldest(self) -> tuple[bytes, tuple[int, ...]] | None:
        """A wave that is under way, and the stages that it has to visit for its next token."""
        for session, wave in self.open.items():
            return session, path_of_wave(
                self._context.stages, len(wave.ids[wave.live[0]]) - wave.began_at + 1
            )
        return None

    def end(self, session: bytes) -> None:
        self.open.pop(session, None)
        at = self._context
        for stage in range(at.stages):
            at.links.send(stage, frames.Drop(at.place, session))
