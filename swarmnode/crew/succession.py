"""What the next record should say: who loses a stage, who claims one, who fills a vacancy. Pure; no torch.

    the holder                                        its stage
    has a trainer again, or is a new process          its own again, stage epoch + 1: at once
    said that it leaves; found no rung                a spare's, or vacant
    no connection for `gone_seconds`                  a spare's, if there is one
    silent for `evict_seconds`                        a spare's, or vacant
    no trainer for `restart_seconds`                  a spare's, if there is one
    broken streams, everybody well                    its own, same stage epoch, under a new roster epoch
    well                                              its own

A restart is preferred to a spare: its journal is exact. Vacant stages are never merged into others: layers never move within a crew.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarmnode.crew.events import Settings
from swarmnode.crew.messages import (
    Certificate,
    Offer,
    Promise,
    Propose,
    Record,
    Refuse,
    Seat,
    Vote,
    Voter,
    crew_id,
    record_hash,
    voters_of,
)
from swarmnode.crew.plan import ModelCost, stage_memory
from swarmnode.crew.roster import LEAP, Acceptor, Proposal, Verify, next_ballot


@dataclass(frozen=True)
class Facts:
    """What one member knows of the holder of a seat."""

    claims: bytes = b""
    """Incarnation under which it wants its own seat again; empty for none."""
    left: bool = False
    failed: bool = False
    broken: bool = False
    suspected: bool = False
    silent_seconds: float = 0.0
    gone_seconds: float = 0.0
    """Without a connection; 0 with one."""
    absent_seconds: float = 0.0
    """Without a trainer; 0 with one."""


@dataclass(frozen=True)
class Wish:
    record: Record
    evicting: tuple[str, ...]
    """Who loses a seat for not being heard: voters who hear it refuse."""


def next_record(
    present: Record,
    facts: Mapping[str, Facts],
    spares: Mapping[str, Offer],
    cost: ModelCost | None,
    step: int,
    settings: Settings,
    *,
    lost: Collection[str] = (),
    parted: Collection[Voter] = (),
    for_witness: bool = False,
    dissolve: str = "",
) -> Wish | None:
    """What to propose; None where the present record is the best there is.

    `facts` of every holder, `spares` by peer, not seated in this crew. `step`: how many steps all stages have taken. `lost`: voters that
    are suspected, have left or forgotten; a witness among them is replaced, but nothing is changed only for that, unless `for_witness`.
    `parted`: who was named a witness and left; it has a seat elsewhere or is a witness there, and is not asked again.
    """
    left_over = dict(spares)
    seats, evicting = [], []
    reason = dissolve
    for stage, seat in enumerate(present.seats):
        fact = facts.get(seat.peer, Facts())
        if not seat.peer or fact.left or fact.failed or _silent(fact, settings):
            spare = _take(left_over, present, stage, cost)
            if seat.peer and not fact.left and not fact.failed:
                evicting.append(seat.peer)
            if fact.failed and spare is None and not reason:
                reason = f"no source of weights is left for stage {stage}"
        elif fact.claims:
            seats.append(Seat(seat.peer, fact.claims, seat.stage_epoch + 1))
            continue
        elif fact.gone_seconds >= settings.gone_seconds or fact.absent_seconds >= settings.restart_seconds:
            spare = _take(left_over, present, stage, cost)
            if spare is None:
                seats.append(seat)
                continue
            if fact.suspected:
                evicting.append(seat.peer)
        else:
            seats.append(seat)
            continue
        seats.append(Seat("", b"", seat.stage_epoch) if spare is None else Seat(spare.peer, spare.incarnation, seat.stage_epoch + 1))
    relink = any(fact.broken for fact in facts.values()) and not any(fact.suspected for fact in facts.values())
    held = {seat.peer for seat in seats}
    witnesses = [v for v in present.witnesses if v.peer not in held and v.peer not in lost]
    if not witnesses and len(seats) % 2 == 0:
        able = (Voter(peer, offer.incarnation) for peer, offer in sorted(left_over.items()) if offer.model == present.model)
        witnesses = [voter for voter in able if voter not in parted][:1]
    seconded = for_witness and bool(witnesses) and tuple(witnesses) != present.witnesses
    if tuple(seats) == present.seats and not relink and not reason and not seconded:
        return None
    record = Record(
        crew_id(present), present.epoch + 1, record_hash(present), present.model, present.layers, tuple(seats), tuple(witnesses),
        voters_of(present), max(step, present.step), present.lease_seconds, present.nonce, reason,
    )  # fmt: skip
    return Wish(record, tuple(evicting))


def _silent(fact: Facts, settings: Settings) -> bool:
    return fact.suspected and fact.silent_seconds >= settings.evict_seconds


def _take(spares: dict[str, Offer], present: Record, stage: int, cost: ModelCost | None) -> Voter | None:
    """The best spare for `stage`, removed from `spares`: one with a copy of it on disk, else the fastest that it fits into."""
    need = 0.0 if cost is None or len(cost.layers) != sum(present.layers) else stage_memory(cost, present.layers, stage)
    able = [peer for peer, offer in spares.items() if offer.model == present.model and offer.memory >= max(need, 1.0)]
    if not able:
        return None
    crew = crew_id(present)

    def order(peer: str) -> tuple[bool, float, str]:
        offer = spares[peer]
        return (offer.crew, offer.stage) != (crew, stage), -offer.speed, peer

    best = min(able, key=order)
    return Voter(best, spares.pop(best).incarnation)


class Proposing:
    """Our own proposals for the next record: one at a time, each with its deadline, and a random pause after one that failed."""

    def __init__(self, acceptor: Acceptor, settings: Settings, rng: random.Random) -> None:
        self._acceptor, self._settings, self._rng = acceptor, settings, rng
        self.proposal: Proposal | None = None
        self._ballot = 0
        self._retry = 0.0
        self._wished: float | None = None

    def restart(self) -> None:
        """There is a new record."""
        self.proposal, self._ballot, self._wished = None, 0, None

    def due(self, wished: bool, place: int | None, now: float) -> bool:
        """Whether to `begin` now. `place`: ours among the stages that are left; None where we may not propose.

        The lowest proposes; if nothing comes of it, the next one does.
        """
        if self.proposal is not None and now >= self.proposal.deadline:
            self._fail(now, self._rng.uniform(0.0, 0.5) * self._settings.request_seconds)
        if not wished:
            self._wished = None
            return False
        if self._wished is None:
            self._wished = now
        if self.proposal is not None or place is None or now < self._retry:
            return False
        return now - self._wished >= place * 1.5 * self._settings.request_seconds

    def begin(self, wish: Wish, now: float) -> Promise | None:
        """A new ballot; returns our own promise. Its Prepare goes to everybody once that is on disk."""
        present = self._acceptor.record
        assert present is not None
        self._ballot = next_ballot(max(self._ballot, self._acceptor.promised), voters_of(present).index(self._acceptor.me))
        proposal = Proposal(present, self._ballot, wish.evicting, now + self._settings.request_seconds)
        promise = self._acceptor.prepare(proposal.prepare)
        if not isinstance(promise, Promise):
            return None
        self.proposal = proposal
        return promise

    def promised(self, peer: str, promise: Promise) -> bool:
        """Whether a majority has promised just now: then `choose`."""
        return self.proposal is not None and self.proposal.promised(peer, promise)

    def choose(self, wish: Record | None) -> tuple[Propose, Vote] | None:
        """What to propose, with our own vote for it; None where there is nothing any more."""
        assert self.proposal is not None
        propose = self.proposal.choose(wish)
        vote = None if propose is None else self._acceptor.propose(propose)
        if propose is None or not isinstance(vote, Vote):
            self.proposal = None
            return None
        return propose, vote

    def voted(self, peer: str, vote: Vote, verify: Verify) -> Certificate | None:
        return None if self.proposal is None else self.proposal.voted(peer, vote, verify)

    def refused(self, ballot: int, refusal: Refuse, now: float) -> None:
        """By a voter, what we asked in `ballot`."""
        if self.proposal is None or ballot != self.proposal.ballot:
            return
        if refusal.reason == "ballot":
            self._ballot = max(self._ballot, min(refusal.ballot, self._acceptor.promised + LEAP // 4))  # the others would follow no further
            self._fail(now, self._rng.uniform(0.05, 0.5) * self._settings.request_seconds)
        elif refusal.reason == "alive":
            self._fail(now, self._settings.heartbeat_seconds)

    def _fail(self, now: float, pause: float) -> None:
        self.proposal, self._retry = None, now + pause
