"""Taking a step together or not at all: propose, acknowledge, commit. Two pure state machines; no
torch, no I/O.

    head:    propose(set) ──▶ all stages        "take the step of exactly these micro-batches"
    stage:   acknowledge ──▶ head               "their gradients are here" (prepared: it will wait
    for the decision), or why not
    head:    commit ──▶ all, once everyone has acknowledged; abort ──▶ all at the first refusal, or
    when nothing comes any more
    stage:   optimizer step, done ──▶ head      abort: gradients are dropped, weights stay

The head takes its own step when it hears the first `done`. So "somebody else has taken it" is true
whenever the head has, and when a head dies the survivors can decide alone (`Stage.follow`): a step
that any of them took is taken by all who prepared it, one that nobody took is dropped. Attempts
number the tries of one step; messages of a lower attempt are the past. Every message may come
twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from swarmnode.pipeline.frames import RefusalReason

Phase = Literal["open", "preparing", "prepared"]
HASH_BYTES: Final = 32
NO_HASH: Final = bytes(HASH_BYTES)
"""The step hash of the base: no step was taken."""
STEP_DOMAIN: Final = b"swarmnode/crew-step/1"
DECISION_SECONDS: Final = 30.0
"""A stage that has prepared and heard nothing for so long acknowledges again."""


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the last step was taken: what a stage that has prepared for it needs to take it too."""

    attempt: int = 0
    clip: float = 1.0
    learning_rate: float = 0.0


def step_hash(
    before: bytes, crew: bytes, step: int, attempt: int, micro_batches: Iterable[int]
) -> bytes:
    """32 bytes: what the weights are after `step` steps, the last of which took these micro-batches
    in this attempt of this crew.

    `crew`: 16 bytes, as in `frames.Place`. `before`: the hash one step earlier.
    """
    numbers = b"".join(n.to_bytes(8, "big") for n in (step, attempt, *sorted(micro_batches)))
    return hashlib.blake2b(STEP_DOMAIN + before + crew + numbers, digest_size=HASH_BYTES).digest()


# What a stage does next.
Next = Literal["prepare", "take", "confirm"]
"""`prepare`: bring the gradients into their final form (sum a tied embedding's halves, measure the
norm), then call `prepared`. `take`: optimizer step, then send `done`. `confirm`: send `done` again,
this commit was taken before."""


@dataclass(frozen=True)
class Answer:
    """Send an acknowledgement."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float = 0.0


class Participant:
    """One stage's side. `hash`: the step hash of what it begins with; `crew`: as in `step_hash`."""

    def __init__(self, step: int = 0, hash: bytes = NO_HASH, crew: bytes = b"") -> None:
        self.step = step
        """Steps taken."""
        self.hash = hash
        self.crew = crew
        self.phase: Phase = "open"
        self.attempt = 0
        self._have: set[int] = set()
        self._wanted: set[int] = set()
        """What was proposed and is not all here."""
        self.lost = False
        """Gradients were here, or on their way, and will not come again in this attempt."""
        self._norm = 0.0
        self._since = 0.0

    def may_accumulate(self, micro_batch: int) -> bool:
        """Whether the gradient of `micro_batch` may be added now: never twice, and never once a
        proposal is being answered."""
        return self.phase == "open" and micro_batch not in self._have

    def accumulated(self, micro_batch: int) -> None:
        """Its gradient was added. Raises ValueError where it must not have been."""
        if not self.may_accumulate(micro_batch):
            raise ValueError(f"micro-batch {micro_batch} must not be added")
        self._have.add(micro_batch)

    def propose(
        self, step: int, attempt: int, micro_batches: Iterable[int]
    ) -> Next | Answer | None:
        if step < self.step:
            return "confirm" if step == self.step - 1 and attempt == self.attempt else None
        if step > self.step or attempt < self.attempt:
            return Answer(attempt, "attempt") if attempt >= self.attempt else None
        if attempt == self.attempt and self.phase != "open":
            return Answer(attempt, None, self._norm) if self.phase == "prepared" else None
        self.attempt, wanted = attempt, set(micro_batches)
        if self._have == wanted:
            self.phase = "preparing"
            return "prepare"
        if self.lost or self.phase != "open" or not self._have <= wanted:
            return Answer(attempt, "micro_batches")
        self._wanted = wanted
        return None

    def complete(self) -> Next | Answer | None:
        """To be asked after each gradient: whether it was the last of those that were proposed.
        What has not come is not refused: whoever let a gradient through before it had one would
        have us blamed."""
        if self.phase != "open" or not self._wanted or self._have < self._wanted:
            return None
        if self._have != self._wanted:
            self._wanted = set()
            return Answer(self.attempt, "micro_batches")
        self.phase = "preparing"
        return "prepare"

    def prepared(self, attempt: int, squared_norm: float | None, now: float) -> Answer | None:
        """Gradients are final; `squared_norm` is None where they are not finite. None where the
        attempt is over."""
        if self.phase != "preparing" or attempt != self.attempt:
            return None
        if squared_norm is None:
            self.phase, self._wanted = "open", set()
            return Answer(attempt, "not_finite")
        self.phase, self._norm, self._since = "prepared", squared_norm, now
        return Answer(attempt, None, squared_norm)

    def commit(self, step: int, attempt: int) -> Next | None:
        if step == self.step - 1 and attempt == self.attempt:
            return "confirm"
        if step != self.step or attempt != self.attempt or self.phase != "prepared":
            return None
        self.hash = self._hash_after()
        self._clear()
        self.step += 1
        return "take"

    def abort(self, step: int, attempt: int) -> bool:
        """Whether the gradients are to be zeroed."""
        if step != self.step or attempt < self.attempt:
            return False
        self.attempt = attempt
        self._clear()
        return True

    def lose(self) -> bool:
        """Whether the gradients may be dropped without a decision, e.g. because a neighbour is
        gone; then they count as dropped.

        What was prepared has to stay: others may have taken the step already.
        """
        if self.phase == "prepared":
            return False
        lost = bool(self._have or self._wanted) or self.lost
        self._clear()
        self.lost = lost
        return True

    @property
    def next_hash(self) -> bytes:
        """The step hash after the step that it has prepared for; empty where it has not."""
        return self._hash_after() if self.phase == "prepared" else b""

    def _hash_after(self) -> bytes:
        return step_hash(self.hash, self.crew, self.step + 1, self.attempt, self._have)

    def tick(self, now: float) -> Answer | None:
        """Asks again for a decision that does not come."""
        if self.phase != "prepared" or now - self._since < DECISION_SECONDS:
            return None
        self._since = now
        return Answer(self.attempt, None, self._norm)

    def _clear(self) -> None:
        self.phase = "open"
        self._have.clear()
        self._wanted, self.lost = set(), False


# What the head does next.
@dataclass(frozen=True)
class Decided:
    """Send commit, or abort with the reason, to `stages`: all, or the one that asks again."""

    attempt: int
    refused: RefusalReason | None
    squared_norm: float
    """The whole policy's; 0 for an abort."""
    stages: tuple[int, ...]


@dataclass
class Coordinator:
    """The head's side: one proposal at a time."""

    stages: int
    attempt: int = 0
    norms: dict[int, float] = field(default_factory=dict)
    """Squared norms of the present attempt, by stage."""
    decision: Decided | None = None
    """For all stages, of the present attempt or of the last one: they may ask again for it whatever
    is done since."""
    _done: set[int] = field(default_factory=set)
    _open: bool = False

    def begin(self) -> int:
        """Number of a new attempt. Raises ValueError while one is undecided."""
        if self._open:
            raise ValueError("a proposal is undecided")
        self.attempt += 1
        self.norms.clear()
        self._done.clear()
        self.decision, self._open = None, True
        return self.attempt

    def acknowledged(
        self, stage: int, attempt: int, refused: RefusalReason | None, squared_norm: float
    ) -> Decided | None:
        """A decision for all where this one makes it; the old decision for a stage that asks
        again."""
        if attempt != self.attempt or not 0 <= stage < self.stages:
            return None
        if self.decision is not None:
            return Decided(attempt, self.decision.refused, self.decision.squared_norm, (stage,))
        if not self._open:
            return None
        if refused is not None:
            return self._decide(refused)
        self.norms[stage] = squared_norm
        return self._decide(None) if len(self.norms) == self.stages else None

    @property
    def silent(self) -> frozenset[int]:
        """Stages that have not acknowledged the present attempt."""
        return frozenset(range(self.stages)) - self.norms.keys()

    @property
    def unfinished(self) -> frozenset[int]:
        """Stages that have not said that they took the step of the present attempt."""
        return frozenset(range(self.stages)) - self._done

    @property
    def over(self) -> bool:
        """Whether the present attempt is aborted, or all stages have said that they took the
        step."""
        return self.decision is not None and (
            self.decision.refused is not None or not self.unfinished
        )

    def give_up(self, reason: RefusalReason) -> Decided | None:
        """Abort, where nothing is decided yet."""
        return self._decide(reason) if self._open else None

    def done(self, stage: int, attempt: int) -> bool:
        """Whether the head may now take its own step: the first other stage has. A head without
        others commits alone."""
        if attempt != self.attempt or self.decision is None or self.decision.refused is not None:
            return False
        first = not self._done - {0} and stage != 0
        self._done.add(stage)
        return first

    def _decide(self, refused: RefusalReason | None) -> Decided:
        self._open = False
        norm = sum(self.norms.values()) if refused is None else 0.0
        self.decision = Decided(self.attempt, refused, norm, tuple(range(self.stages)))
        return self.decision
