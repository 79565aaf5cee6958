"""What one member knows of its crew under the present record: who said what, who left, who forgot. Pure; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarmnode.crew import local
from swarmnode.crew.detector import Detector
from swarmnode.crew.events import Settings, SlotState, SlotStatistics
from swarmnode.crew.messages import REASON_BYTES, Offer, Record, Seat, Status, Voter, crew_id, voters_of
from swarmnode.crew.plan import ModelCost
from swarmnode.crew.settling import settle
from swarmnode.crew.succession import Facts, Wish, next_record


class View:
    """A new record makes a new view; of the one before only since when somebody has had no trainer is kept."""

    def __init__(self, record: Record, me: Voter, before: View | None = None) -> None:
        self.record, self.crew, self.me = record, crew_id(record), me.peer
        self.voters = voters_of(record)
        self.members = frozenset(voter.peer for voter in self.voters)
        self.others = tuple(voter.peer for voter in self.voters if voter.peer != self.me)
        self.seated = tuple(seat.peer for seat in record.seats if seat.peer)
        self.is_voter = me in self.voters
        held = (i for i, seat in enumerate(record.seats) if (seat.peer, seat.incarnation) == (me.peer, me.incarnation))
        self.stage: int | None = next(held, None)
        """That we hold; None for a witness."""
        self.statuses: dict[str, Status] = {}
        """Under this record; our own, too."""
        self.left: set[str] = set()
        self.strangers: set[str] = set()
        """Members that have forgotten the crew: their process is new."""
        self.settled: local.Settled | None = None
        self.ran = False
        self._absent: dict[str, float] = {} if before is None else {p: t for p, t in before._absent.items() if p in self.members}

    @property
    def seat(self) -> Seat:
        assert self.stage is not None
        return self.record.seats[self.stage]

    def take(self, peer: str, status: Status, now: float) -> bool:
        """Remember what `peer` said of its stage; whether that is news, and not overtaken on its way."""
        known = self.statuses.get(peer)
        if known is not None and known.version > status.version:
            return False
        self.statuses[peer] = status
        self.strangers.discard(peer)
        if status.phase == "absent":
            self._absent.setdefault(peer, now)
        else:
            self._absent.pop(peer, None)
        return known is None or known.version != status.version

    def forgot(self, peer: str, now: float) -> None:
        """`peer` does not know of this crew: its process is new, and its trainer gone with the old one."""
        self.strangers.add(peer)
        self.statuses.pop(peer, None)
        self._absent.setdefault(peer, now)

    def settle(self) -> local.Settled | None:
        """Where the crew goes on, the first time that it is known."""
        if self.settled is not None or len(self.seated) < len(self.record.seats):
            return None
        self.settled = settle(self.record.epoch, self.record.step, [self.statuses.get(peer) for peer in self.seated])
        return self.settled

    def is_well(self, detector: Detector) -> bool:
        """Whether steps can be taken."""
        if self.settled is None or not self.left.isdisjoint(self.seated) or len(self.seated) < len(self.record.seats):
            return False
        for peer in self.seated:
            status = self.statuses.get(peer)
            if status is None or status.phase != "active" or status.step < self.settled.step or status.broken or detector.suspects(peer):
                return False
        return True

    def is_calm(self, detector: Detector) -> bool:
        """Whether every stage is held and works, as far as a witness can tell: then its vote is not needed just now."""
        lost = self.left | self.strangers
        if len(self.seated) < len(self.record.seats) or not lost.isdisjoint(self.seated):
            return False
        active = {peer for peer, status in self.statuses.items() if status.phase == "active" and not detector.suspects(peer)}
        return active.issuperset(self.seated)

    def lacks_witness(self, detector: Detector, evict_seconds: float, now: float) -> bool:
        """Whether the stages are of an even number, and nobody votes without one."""
        gone = self.left | self.strangers
        return len(self.record.seats) % 2 == 0 and all(
            voter.peer in gone or (detector.suspects(voter.peer) and detector.silent_seconds(voter.peer, now) >= evict_seconds)
            for voter in self.record.witnesses
        )

    @property
    def steps_of_all(self) -> int:
        """That every stage has taken, by what was heard."""
        if self.settled is None:
            return self.record.step
        steps = [self.statuses[peer].step for peer in self.seated if peer in self.statuses]
        return max(self.settled.step, min(steps, default=0))

    def facts(self, detector: Detector, gone: Mapping[str, float], offers: Mapping[str, Offer], now: float) -> dict[str, Facts]:
        """`gone`: since when peers have had no connection; `offers` of others, by peer."""
        return {seat.peer: self._facts(seat, detector, gone, offers, now) for seat in self.record.seats if seat.peer}

    def _facts(self, seat: Seat, detector: Detector, gone: Mapping[str, float], offers: Mapping[str, Offer], now: float) -> Facts:
        peer = seat.peer
        status, offer, claims = self.statuses.get(peer), offers.get(peer), b""
        if status is not None and status.phase == "claiming":
            claims = seat.incarnation
        elif offer is not None and offer.incarnation != seat.incarnation:
            claims = offer.incarnation
        suspected = detector.suspects(peer)
        return Facts(
            claims=claims,
            left=peer in self.left,
            failed=status is not None and status.phase == "failed",
            broken=status is not None and status.broken,
            suspected=suspected,
            silent_seconds=detector.silent_seconds(peer, now),
            gone_seconds=now - gone[peer] if suspected and peer in gone else 0.0,
            absent_seconds=now - self._absent[peer] if peer in self._absent else 0.0,
        )

    def wish(
        self,
        detector: Detector,
        gone: Mapping[str, float],
        offers: Mapping[str, Offer],
        cost: ModelCost | None,
        settings: Settings,
        now: float,
        *,
        parted: Collection[Voter],
        for_witness: bool,
        dissolve: str,
    ) -> Wish | None:
        """The record that ought to be next, if any; with a reason in `dissolve` one that ends the crew. The rest as for `next_record`."""
        lost = self.left | self.strangers | {peer for peer in self.others if detector.suspects(peer)}
        voters = {voter.peer: voter.incarnation for voter in self.voters}
        stale = {peer for peer in lost if peer in offers and offers[peer].incarnation == voters.get(peer)}  # offered before it was lost
        spares = {peer: offer for peer, offer in offers.items() if peer not in self.seated and peer not in stale}
        facts = self.facts(detector, gone, offers, now)
        return next_record(
            self.record, facts, spares, cost, self.steps_of_all, settings,
            lost=lost, parted=parted, for_witness=for_witness, dissolve=dissolve,
        )  # fmt: skip

    def place(self, detector: Detector) -> int | None:
        """Ours among the stages that are left, which propose in this order; None where we may not."""
        if not self.is_voter:
            return None
        left = [p for p in self.seated if p == self.me or not (detector.suspects(p) or p in self.left or p in self.strangers)]
        return left.index(self.me)

    def hears(self, peer: str, detector: Detector, within: float, now: float) -> bool:
        """Whether `peer` is a member and well."""
        return peer in self.members and not detector.suspects(peer) and detector.silent_seconds(peer, now) < within

    def why_standing(self, detector: Detector, stood: float) -> str:
        """For people, and short enough for a record."""
        stands = [f"stage {slot.stage} {slot.state}" for slot in self.slots(detector) if slot.state != "active"]
        return f"stood still for {stood:.0f} s: {', '.join(stands[:3]) or 'streams'}"[:REASON_BYTES]

    def slots(self, detector: Detector) -> tuple[SlotStatistics, ...]:
        return tuple(self._slot(i, seat, detector) for i, seat in enumerate(self.record.seats))

    def _slot(self, stage: int, seat: Seat, detector: Detector) -> SlotStatistics:
        status = self.statuses.get(seat.peer)
        state: SlotState = "claimed"
        if not seat.peer:
            state = "vacant"
        elif detector.suspects(seat.peer) or (status is not None and status.phase in ("absent", "failed")):
            state = "suspect"
        elif seat.peer in self.left:
            state = "draining"
        elif status is not None and status.phase in ("loading", "probation"):
            state = "loading" if status.phase == "loading" else "probation"
        elif status is not None and status.phase in ("active", "ready", "stopping"):
            state = "active"
        return SlotStatistics(stage, seat.peer, seat.stage_epoch, state, 0 if status is None else status.step)
