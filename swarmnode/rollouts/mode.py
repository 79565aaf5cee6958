"""Whether a node takes part in the rollout topic, or pulls what it needs: a reducer over what it
measures of itself.

    GOSSIP ─ twelve times as much arrives as its trainer asks for ─▶ TRIAL ─ six times as much is
    listed ─▶ PULL
       ▲                                                               │ is not
       │
       ├───────────────────────── not again for RETRY_SECONDS ─────────┘
       │
       └────────────────────── less than three times as much is listed, or half of what it asks for
       arrives ─┘

    PULL ─ neighbours in the topic do not list ─▶ VISIT ─ twice as much arrived as is asked for, or
    they are gone ─▶ PULL

In TRIAL the node still listens and asks for listings as well: it leaves nothing before it knows
that there is something to go to. The two factors lie apart so that nobody goes to and fro. A VISIT
is how a node that pulls learns from those that cannot be pulled from, nodes of the version before:
in the topic while little arrives, and out of it in time where the topic is a flood. Counts are
halved every HALF_LIFE_SECONDS: their ratios are those of the present.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

Choice = Literal["auto", "gossip", "pull"]
"""The setting `sharing.exchange`."""

LEAVE = 12.0
"""Groups that arrive for each that the trainer asks for, from which on the topic is not worth its
cost: with eight useful groups of a node in a step and six asked for, those of ten nodes."""
ENOUGH, STAY = 6.0, 3.0
"""Groups that are listed for each that is asked for: from which on there is enough to choose from,
and below which there is not any more. Half as much, since whoever pulls asks for few listings where
there is plenty, and many of them name the same."""
STARVED = 0.5
"""Groups gained by pulling, and on visits, for each that is asked for, below which listings are
worth nothing."""
VISIT_BEGINS, VISIT_ENDS = 1.0, 2.0
"""Groups that arrived by gossip for each that is asked for: where visits begin and end. So what
they bring is bounded, however large the swarm is, and those that do not list have their share of
it."""
HALF_LIFE_SECONDS = 300.0
DWELL_SECONDS = 300.0
"""In a phase, at least, before another."""
RETRY_SECONDS = 1800.0
"""After a trial that found too little."""
EVIDENCE = 6.0
"""Groups that the trainer has asked for, at least, before anything is concluded: an idle trainer
says nothing about the topic."""
LISTERS = 2
"""Peers that list, at least, before a node depends on them."""


class Phase(enum.Enum):
    GOSSIP = "gossip"
    TRIAL = "trial"
    PULL = "pull"
    VISIT = "visit"


PULLING = (Phase.PULL, Phase.VISIT)


@dataclass(frozen=True)
class Measured:
    """What happened since the last one. now: any monotonic seconds."""

    now: float
    arrived: float = 0.0
    """Groups that came by gossip."""
    wanted: float = 0.0
    """Groups that the trainer asked for."""
    listed: float = 0.0
    """Groups that were listed for the first time, each by how far its holder is believed."""
    gained: float = 0.0
    """Groups that were pulled and admitted."""
    listers: int = 0
    """Connected peers that list."""
    mutes: int = 0
    """Connected peers in the topic that do not."""


@dataclass(frozen=True)
class ModeState:
    """Counts as of `at`, each halved every HALF_LIFE_SECONDS."""

    phase: Phase
    since: float
    at: float
    arrived: float = 0.0
    wanted: float = 0.0
    listed: float = 0.0
    gained: float = 0.0
    not_before: float = 0.0
    """No further trial until then."""
    switches: int = 0
    """Times that the topic was left or taken up again."""


def begin(phase: Phase, now: float) -> ModeState:
    return ModeState(phase, since=now, at=now, not_before=now)


def advance(state: ModeState, measured: Measured) -> ModeState:
    """The state after `measured`."""
    return _decide(visit(state, measured), measured)


def visit(state: ModeState, measured: Measured) -> ModeState:
    """The same counts, and no decision but whether one that pulls listens meanwhile."""
    state = count(state, measured)
    if (
        state.phase is Phase.PULL
        and measured.mutes
        and state.wanted >= EVIDENCE
        and state.arrived < VISIT_BEGINS * state.wanted
    ):
        return replace(state, phase=Phase.VISIT)
    if state.phase is Phase.VISIT and (
        not measured.mutes or state.arrived > VISIT_ENDS * state.wanted
    ):
        return replace(state, phase=Phase.PULL)
    return state


def count(state: ModeState, measured: Measured) -> ModeState:
    """The same counts, and nothing decided."""
    kept = 0.5 ** (max(0.0, measured.now - state.at) / HALF_LIFE_SECONDS)
    return replace(
        state,
        at=measured.now,
        arrived=kept * state.arrived + measured.arrived,
        wanted=kept * state.wanted + measured.wanted,
        listed=kept * state.listed + measured.listed,
        gained=kept * state.gained + measured.gained,
    )


def _decide(state: ModeState, measured: Measured) -> ModeState:
    if measured.now - state.since < DWELL_SECONDS or state.wanted < EVIDENCE:
        return state
    enough = (
        state.listed >= (ENOUGH if state.phase is Phase.TRIAL else STAY) * state.wanted
        and measured.listers >= LISTERS
    )
    if state.phase is Phase.GOSSIP:
        too_much = state.arrived > LEAVE * state.wanted and measured.now >= state.not_before
        return _enter(state, Phase.TRIAL) if too_much else state
    if state.phase is Phase.TRIAL:
        if enough:
            return _enter(replace(state, switches=state.switches + 1), Phase.PULL)
        return _enter(replace(state, not_before=measured.now + RETRY_SECONDS), Phase.GOSSIP)
    if enough and state.gained + state.arrived >= STARVED * state.wanted:
        return state
    return _enter(
        replace(state, switches=state.switches + 1, not_before=measured.now + RETRY_SECONDS),
        Phase.GOSSIP,
    )


class Mode:
    """The state of one node, and what was noted since it was looked at. choice: the setting
    `sharing.exchange`, which decides unless it is `auto`."""

    def __init__(self, choice: Choice, now: float) -> None:
        self.state = begin(Phase.PULL if choice == "pull" else Phase.GOSSIP, now)
        self._advance = {"auto": advance, "pull": visit, "gossip": count}[choice]
        self._noted: defaultdict[str, float] = defaultdict(float)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def note(
        self, what: Literal["arrived", "wanted", "listed", "gained"], number: float = 1.0
    ) -> None:
        """Count for the next look."""
        self._noted[what] += number

    def look(self, now: float, listers: int, mutes: int = 0) -> None:
        """Decide by what was noted."""
        noted, self._noted = self._noted, defaultdict(float)
        self.state = self._advance(
            self.state,
            Measured(
                now,
                noted["arrived"],
                noted["wanted"],
                noted["listed"],
                noted["gained"],
                listers,
                mutes,
            ),
        )


def _enter(state: ModeState, phase: Phase) -> ModeState:
    """Measures begin anew: those of another phase say nothing about this one."""
    return replace(
        state, phase=phase, since=state.at, arrived=0.0, wanted=0.0, listed=0.0, gained=0.0
    )
