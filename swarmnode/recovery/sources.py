"""Which copy of a lost stage to take, best first, and which next when the crew's policy is not what
it was. Pure; no torch.

    R0  journal    this node's own disk                                                    R4
    synthesis  from the neighbours' layers
    R1  replica    the same stage of another crew                                          R5  copy
    an end from its neighbour
    R2  snapshot   a snapshot at a ring neighbour                                          R6  none
    the crew dissolves
    R3  base       the stage that training began with

Expected harm rises from first to last, but for a journal that lacks as many steps as lie between
two snapshots: then a younger one of these goes first. One that lacks fewer costs no more than a
snapshot may, and needs no line: it goes first but for what is exact. A source that is refused says
why: `RecoveryOrder.tried` is what to show a person.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Literal

from swarmnode.errors import Refused
from swarmnode.pipeline.spec import StageSpec

Method = Literal["checkfree", "uniform", "identity", "copy"]
PaperMode = Literal["off", "checkfree", "checkfree+"]
"""As `stages.paper_mode`."""
LEARNING_RATE_FACTOR: Final = 1.1
"""Algorithm 1, line 4; once, not for each recovery."""


class SourceKind(IntEnum):
    JOURNAL = 0
    REPLICA = 1
    SNAPSHOT = 2
    BASE = 3
    SYNTHESIS = 4
    COPY = 5
    NONE = 6


@dataclass(frozen=True)
class Run:
    """What decides whether a synthesis would harm."""

    swapped: bool = False
    """Half of the micro-batches run in `swapped_order` since the start: then second and last but
    one have learnt the ends' job."""
    pretrained: bool = False
    """A base was published: its stage is a better source than any neighbour."""
    adapter: bool = False
    """Only a LoRA adapter is trained."""


@dataclass(frozen=True)
class RecoverySettings:
    """What a person may choose; all stages of a crew agree on `mode`."""

    snapshot_every: int = 20
    """Committed steps between two snapshots of a stage."""
    keep_policy: bool = False
    """A copy of every stage is kept on this node's disk, and not of its ring neighbours' alone."""
    synthesis: Literal["checkfree", "uniform", "identity", "copy", "none"] = "checkfree"
    """How an inner stage is made of its neighbours'. `copy` is for the ends, `none` for neither."""
    mode: PaperMode = "off"
    """The papers as they are written, for inner stages (CheckFree) or for all (CheckFree+): no
    snapshot, journal or base; synthesis without healing; learning rate × 1.1. CheckFree+ trains in
    swapped order. CheckFree cannot make an end: it comes back from copies."""
    probes: int = 8
    """Committed micro-batches that a recovered stage is judged by: the last ones."""
    memory: int = 24
    """Committed micro-batches that are remembered; the ones before the last `probes` are what a
    stage is healed with, so that it is judged by others."""
    gate_kl: float = 0.02
    """Nats per token of KL(before ‖ recovered)."""
    gate_nll: float = 0.05
    """Nats per token."""
    copy_factor: float = 10.0
    """A copy of the crew's own stage has so many times the room in both: it lacks some steps, and
    anything else lacks all."""
    healings: int = 2
    """Distillations before a source is given up."""
    healing_steps: int = 120
    healing_rate: float = 0.04
    """AdamW moves a weight by this share of its tensor's root mean square in a step, at first."""
    warmup_steps: int = 10
    """Steps over which the learning rate of a stage with a fresh optimizer rises to what it is
    elsewhere."""
    exact_bytes: int = 256 * 1024 * 1024
    """A snapshot up to this size is float32 with Adam's moments; a larger one bfloat16 without."""
    pair_bytes: int = 256 * 1024 * 1024
    """Activations that a stage keeps for healing its neighbours."""
    seconds: float = 120.0
    """A transfer fails when not a byte of it came for so long. Reading and hashing a stage of 7 B
    at its holder takes a part of this."""
    neighbour_seconds: float = 3600.0
    """Waiting for a neighbour that is being restored as well, and says so: half of 7 B in two bytes
    each takes 19 minutes at 50 Mbit/s."""

    def keeps_copies(self, spec: StageSpec) -> bool:
        """Whether this stage is copied to others and comes back from copies; else it is made of its
        neighbours."""
        return self.mode == "off" or (
            self.mode == "checkfree" and (spec.has_embedding or spec.has_head)
        )

    def synthesises(self, stage: int, stages: int) -> bool:
        """Whether `stage`, of so many, may ever be made of its neighbours' layers; an end needs a
        copy of what is no layer besides."""
        return self.synthesis != "none" and (0 < stage < stages - 1 or self.mode == "checkfree+")


@dataclass(frozen=True)
class Source:
    """One way to get the stage back."""

    kind: SourceKind
    step: int | None = None
    """Committed steps that are in it; None where that cannot be said."""
    holder: int | None = None
    """Stage that has it; None: this machine, or a replica."""
    method: Method | None = None
    """How R4 and R5 make it."""
    exact: bool = False
    """It is this stage as it was: the crew's last step, from our own disk, or from two neighbours
    that agree."""
    disputed: bool = False
    """The other ring neighbour has other bytes of the same step. Only the gate can say which of
    them is right."""
    vouched: bool = False
    """It is this stage as it was at some step: from our own disk, or from two neighbours that
    agree."""
    last: bool = False
    """Taken as it is, since nothing else serves."""


@dataclass(frozen=True)
class Found:
    """What there is after everybody was asked."""

    journal: int | None = None
    """Steps in this node's journal of this stage of this crew."""
    replica: bool = False
    snapshots: Mapping[int, int] = field(default_factory=dict)
    """Holder's stage → steps; of ring neighbours, nobody else is given any."""
    roots: Mapping[int, bytes] = field(default_factory=dict)
    """Holder's stage → the snapshot's hash."""
    base: bool = False
    alive: frozenset[int] = frozenset()
    """Other stages that have their weights."""
    ends: frozenset[int] = frozenset()
    """Stages that keep a true copy of this end's embedding, or norm and head."""


@dataclass(frozen=True)
class Verdict:
    """What a probe says of a recovered stage, nats per token; see `gate`."""

    kl: float
    nll_rise: float
    tokens: int
    finite: bool = True


class RecoveryOrder:
    """The sources of one recovery, in order. `step`: committed steps of the crew."""

    def __init__(
        self, found: Found, spec: StageSpec, step: int, run: Run, settings: RecoverySettings
    ) -> None:
        self._settings = settings
        self._paper = not settings.keeps_copies(spec)
        self._step = step
        self.tried: list[tuple[SourceKind, str]] = []
        """(kind, why it did not serve), in order."""
        self.excluded: list[tuple[SourceKind, str]] = []
        """(kind, why it was not even tried)."""
        self._failed: list[tuple[float, Source]] = []
        """(damage, source), in order, of what failed the gate and is finite."""
        self._left = list(self._sources(found, spec, run))
        self._compared = False

    def next(self) -> Source:
        """The best source that was not refused. Raises Refused, with every source's reason, when
        there is none (R6)."""
        if self._left:
            return self._left[0]
        reasons = "; ".join(
            f"R{int(kind)} {kind.name.lower()}: {why}" for kind, why in self.tried + self.excluded
        )
        raise Refused(f"no source is left for this stage: {reasons or 'nobody has a copy'}")

    def refuse(self, source: Source, why: str) -> None:
        """`source` was not there, was not what it said, or failed its gate."""
        if source in self._left:
            self._left.remove(source)
        self.tried.append((source.kind, why))

    def failed(self, source: Source, verdict: Verdict | None, why: str) -> None:
        """`source` failed its gate. verdict: before it was healed."""
        if verdict is not None and verdict.finite:
            self._failed.append((self.damage(verdict), source))
        self.refuse(source, why)

    def last_resort(self) -> Source | None:
        """What is taken although it failed the gate; None where there is nothing. Without it the
        crew would lose all its steps.

        The policy may have moved further in one step than the gate allows: then nothing passes, a
        perfect copy neither. So the base, which is nobody's word, says how far off a stage is of
        which nothing is left, and what is no worse by more than the gate's width may be taken, as
        may true copies, which lack a few steps. Of these the first that is not worse than the best
        by more than that.
        """
        base = min(
            (damage for damage, source in self._failed if source.kind == SourceKind.BASE),
            default=-math.inf,
        )
        may = [
            (damage, source)
            for damage, source in self._failed
            if source.vouched or damage <= base + 1
        ]
        self._failed.clear()
        best = min((damage for damage, _ in may), default=math.inf)
        return next(
            (replace(source, last=True) for damage, source in may if damage <= best + 1), None
        )

    def rivals(self) -> tuple[Source, ...]:
        """The best source and the other one, where two neighbours have different bytes of one step
        and `prefer` was not called."""
        best = self._left[0] if self._left else None
        if best is None or not best.disputed or self._compared:
            return ()
        return tuple(
            source for source in self._left if source.disputed and source.step == best.step
        )

    def prefer(self, source: Source | None) -> None:
        """It goes before all others: of the `rivals`, it was judged better."""
        self._compared = True
        if source in self._left:
            self._left.remove(source)
            self._left.insert(0, source)

    def damage(self, verdict: Verdict) -> float:
        """How bad a verdict is, in units of the gate: the better one's is less."""
        s = self._settings
        return (
            max(verdict.kl / s.gate_kl, verdict.nll_rise / s.gate_nll)
            if verdict.finite
            else math.inf
        )

    def judge(
        self, source: Source, verdict: Verdict | None, healings: int
    ) -> Literal["rejoin", "heal", "next"]:
        """What to do with a stage that was restored from `source` and healed `healings` times.

        Without a probe a true copy that nobody disputes is trusted, and nothing else. What is
        exact, and everything in paper mode, has to be finite and no more: the probe is of before
        the last step, so that even the very same stage is as far from it as that step went. For the
        same reason an older copy of the crew's own is given room: to refuse it is to lose every
        step that was taken, not the few that it lacks.
        """
        s = self._settings
        room = s.copy_factor if source.kind in (SourceKind.JOURNAL, SourceKind.SNAPSHOT) else 1.0
        if verdict is None:
            return (
                "rejoin"
                if (source.kind <= SourceKind.BASE and not source.disputed) or self._paper
                else "next"
            )
        if not verdict.finite:
            return "next"
        as_it_is = self._paper or source.last or (source.exact and not healings)
        if as_it_is or (verdict.kl < room * s.gate_kl and verdict.nll_rise < room * s.gate_nll):
            return "rejoin"
        return "heal" if healings < s.healings else "next"

    def _sources(self, found: Found, spec: StageSpec, run: Run) -> Iterable[Source]:
        own_copy = Source(
            SourceKind.JOURNAL, found.journal, exact=found.journal == self._step, vouched=True
        )
        copies = [] if found.journal is None else [own_copy]
        for holder, step in found.snapshots.items():
            roots = [root for i, root in found.roots.items() if found.snapshots[i] == step]
            disputed = len(set(roots)) > 1
            vouched = len(roots) > 1 and not disputed
            exact = step == self._step and vouched
            copies.append(
                Source(
                    SourceKind.SNAPSHOT,
                    step,
                    holder,
                    exact=exact,
                    disputed=disputed,
                    vouched=vouched,
                )
            )
        if self._paper:
            self.excluded += [(source.kind, "paper mode") for source in copies] + (
                [(SourceKind.BASE, "paper mode")] if found.base else []
            )
            copies = []
        for source in [c for c in copies if c.step is not None and c.step > self._step]:
            copies.remove(source)
            self.excluded.append(
                (source.kind, f"it is of step {source.step}, and the crew's is {self._step}")
            )
        copies.sort(
            key=lambda c: (
                -(c.step or 0),
                c.kind,
                not c.exact,
                -1 if c.holder is None else c.holder,
            )
        )
        most = 1 if any(c.exact for c in copies) else self._settings.snapshot_every
        own = [
            c
            for c in copies
            if c.kind == SourceKind.JOURNAL and c.step is not None and self._step - c.step < most
        ]
        yield from own
        if found.replica:
            yield Source(SourceKind.REPLICA)
        yield from (c for c in copies if c not in own)
        if found.base and not self._paper:
            yield Source(SourceKind.BASE)
        yield from self._synthesis(found, spec, run)

    def _synthesis(self, found: Found, spec: StageSpec, run: Run) -> Iterable[Source]:
        at_end = spec.has_embedding or spec.has_head
        kind = SourceKind.COPY if at_end else SourceKind.SYNTHESIS
        method = self._settings.synthesis
        if method == "none":
            self.excluded.append((kind, "synthesis is switched off"))
            return
        if at_end and method != "identity":
            method = "copy"
        elif method == "copy":
            method = "checkfree"
        needed = {i for i in (spec.index - 1, spec.index + 1) if 0 <= i < spec.stages}
        try:
            check(method, spec, run)
            if found.base and run.pretrained:
                raise Refused(
                    "the base's stage is closer than anything that is made of the neighbours'"
                )
            if not needed <= found.alive:
                raise Refused("a neighbour is lost too")
            if at_end and not found.ends:
                raise Refused("nobody keeps a copy of this end's embedding or head")
        except Refused as error:
            self.excluded.append((kind, str(error)))
            return
        yield Source(kind, method=method)


def check(method: Method, spec: StageSpec, run: Run) -> None:
    """Raises Refused where `method` would harm this stage of this run."""
    at_end = spec.has_embedding or spec.has_head
    if run.adapter:
        raise Refused(
            "an adapter is not averaged with another layer's: the base with its last known adapter,"
            " or none, is closer"
        )
    if method in ("checkfree", "uniform") and at_end:
        raise Refused(
            f"{method} needs a neighbour on both sides, and stage {spec.index} of {spec.stages}"
            " has one"
        )
    if method == "copy":
        if not at_end:
            raise Refused(
                f"copy is for the first and the last stage, and stage {spec.index} of {spec.stages}"
                " is neither"
            )
        if run.pretrained:
            raise Refused(
                "copy needs a run trained with swapped stages, which costs a pretrained policy 2"
                " nats: restore the base's stage"
            )
        if not run.swapped:
            raise Refused(
                "copy needs a run trained with swapped stages; without that the copy costs 3 nats"
            )


def check_paper(mode: PaperMode, stages: int, run: Run) -> None:
    """Raises Refused where a crew must not restore its stages as the papers do.

    stages: as configured, 0 for any number.
    """
    if mode == "off":
        return
    if run.pretrained and mode == "checkfree+":
        raise Refused(
            "checkfree+ trains with swapped stages, which costs a pretrained policy 2 nats: set"
            " stages.paper_mode to off"
        )
    if run.pretrained:
        raise Refused(
            "checkfree averages neighbours, and of a base that was trained its own stage is closer:"
            " set stages.paper_mode to off"
        )
    if run.adapter:
        raise Refused(f"{mode} is for whole weights, and only an adapter is trained here")
    if mode == "checkfree" and stages < 3:
        raise Refused(
            f"checkfree makes inner stages of their neighbours: stages.stages is {stages}, it needs"
            " three or more"
        )
    if mode == "checkfree+" and stages < 4:
        raise Refused(
            "checkfree+ exchanges the first two and the last two stages: stages.stages is"
            f" {stages}, it needs four or more"
        )
