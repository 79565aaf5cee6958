"""A crew from offers: who offers, who founds, and one founding at a time. Pure; no torch.

Whoever has heard the same offers plans the same crew. Once no new offer has come for a while, the lowest peer id among those it names
proposes it; all of them sign, or it comes to nothing and is tried again. A signature reserves its giver for as long as the proposal
lives. Whoever hears that somebody else proposes waits its turn anew, so two founders do not get in each other's way for ever. But each
peer is waited for only a few times a minute: else one that offers or proposes for ever, and founds nothing, keeps all others from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from swarmnode.crew.events import Settings
from swarmnode.crew.local import Offering
from swarmnode.crew.messages import NO_CREW, NO_HASH, NONCE_BYTES, Certificate, Offer, Record, Seat, Vote, Voter, voters_of
from swarmnode.crew.plan import MEMBERS, Capacity, make_plan
from swarmnode.crew.roster import Founding, Verify
from swarmnode.errors import Refused

HEEDED: Final = 5
"""Times in HEED_SECONDS that what is new of one peer, or a proposal of its, holds up our own."""
HEED_SECONDS: Final = 60.0


def founding_record(offers: Mapping[str, Offer], offering: Offering, stages: int, lease_seconds: float) -> Record | None:
    """A crew of those who offer, as `plan.make_plan` places them, its nonce all zero; None where they cannot hold the model.

    The largest MEMBERS are considered. An even number of stages gets a witness where somebody is left over: then one half of a crew that
    falls apart can go on. `stages` asks for exactly so many; 0 for what is fastest.
    """
    able = [peer for peer, offer in offers.items() if offer.model == offering.model and offer.memory > 0 and offer.speed > 0]
    if len(able) < max(1, stages):
        return None
    able.sort(key=lambda peer: (-offers[peer].memory, peer))
    able = sorted(able[:MEMBERS], key=lambda peer: (offers[peer].crew, offers[peer].stage, peer))  # who had neighbours gets them again
    try:
        plan = make_plan(offering.cost, [Capacity(offers[p].memory, offers[p].speed, offers[p].hop_seconds) for p in able], stages)
    except Refused:
        return None
    holders = [able[member] for member in plan.members]
    seats = tuple(Seat(peer, offers[peer].incarnation, 1) for peer in holders)
    left = sorted(peer for peer, offer in offers.items() if offer.model == offering.model and peer not in holders)
    witnesses = tuple(Voter(peer, offers[peer].incarnation) for peer in left[:1]) if len(seats) % 2 == 0 else ()
    record = Record(NO_CREW, 1, NO_HASH, offering.model, plan.layers, seats, witnesses, (), 0, round(lease_seconds), bytes(NONCE_BYTES))
    return msgspec.structs.replace(record, voters=voters_of(record))


class Forming:
    """Offers of others, and our part in at most one founding at a time."""

    def __init__(self, me: str, settings: Settings, rng: random.Random) -> None:
        self.me, self._settings, self._rng = me, settings, rng
        self._offers: dict[str, tuple[Offer, float]] = {}
        self._refused: dict[str, float] = {}
        self._founding: Founding | None = None
        self._reserved: tuple[str, float] | None = None
        """(For whose proposal, until when.)"""
        self._retry = 0.0
        self._newest = 0.0
        """When something new was heard: an offer, or somebody else's proposal."""
        self._heeds: dict[str, tuple[float, int]] = {}
        """Peer → (since when, how often it was heeded)."""
        self._planned: tuple[object, Record | None] = (None, None)
        self._plan_from = -1e18
        """When the next plan may be made."""
        self._last: Record | None = None
        """That we proposed."""

    def begin(self, now: float) -> None:
        """Nobody is heard yet: a moment to gather."""
        self._newest = now

    def heard(self, peer: str, offer: Offer, now: float) -> None:
        if offer.speed == 0:  # taken back
            self.gone(peer)
            return
        known = self._offers.get(peer)
        if known is None and len(self._offers) >= self._settings.most_peers:
            self._forget_old(now)
            if len(self._offers) >= self._settings.most_peers:
                return
        if (known is None or known[0].incarnation != offer.incarnation) and self._heed(peer, now):
            self._newest = now
        self._offers[peer] = (offer, now)

    def gone(self, peer: str) -> None:
        self._offers.pop(peer, None)

    def offers(self, now: float) -> dict[str, Offer]:
        """Those that count."""
        oldest = now - 3 * self._settings.offer_seconds
        return {peer: offer for peer, (offer, heard) in self._offers.items() if heard >= oldest}

    def left(self, voter: Voter) -> None:
        """It wants nothing of what it offered as this incarnation."""
        if voter.peer in self._offers and self._offers[voter.peer][0].incarnation == voter.incarnation:
            self.gone(voter.peer)

    def _forget_old(self, now: float) -> None:
        alive = self.offers(now)
        self._offers = {peer: known for peer, known in self._offers.items() if peer in alive}

    def _heed(self, peer: str, now: float) -> bool:
        """Whether we wait for `peer` once more."""
        since, count = self._heeds.pop(peer, (now, 0))
        if now - since >= HEED_SECONDS:
            since, count = now, 0
        if len(self._heeds) >= self._settings.most_peers:
            del self._heeds[next(iter(self._heeds))]  # of whom nothing was heard for longest
        self._heeds[peer] = (since, min(count + 1, HEEDED))
        return count < HEEDED

    def _leave_out(self, peers: Iterable[str], now: float) -> None:
        """Of our plans, for a while."""
        self._refused = {peer: until for peer, until in self._refused.items() if until > now}
        self._refused |= dict.fromkeys(peers, now + self._settings.left_out_seconds)

    def propose(
        self, own: Offer, offering: Offering, now: float, waits: Callable[[str], bool] = lambda peer: False, *, witness: bool = False,
    ) -> Record | None:  # fmt: skip
        """The founding record to propose now, where everybody is quiet and it is our turn. Not with those for whom it `waits`. `witness`:
        we are one already, of another crew, and would be nothing more in this one."""
        settings = self._settings
        if self._reserved is not None and now < self._reserved[1]:  # by ourselves for as long as our proposal lives
            return None
        if self._founding is not None:  # who said nothing is left out for a while: else one that never signs keeps all others from founding
            self._leave_out(self._founding.missing, now)
        self._founding = self._reserved = None
        if now < self._retry or now - self._newest < settings.gather_seconds:
            return None
        free = {peer: offer for peer, offer in self.offers(now).items() if now >= self._refused.get(peer, -1e18) and not waits(peer)}
        free[self.me] = own
        record = self._plan(free, offering, now)
        if record is None:
            return None
        turn = sorted(voter.peer for voter in record.voters)
        place = turn.index(self.me) if self.me in turn else len(turn)
        if now - self._newest < settings.gather_seconds + place * 2.5 * settings.request_seconds:
            return None
        mine = (seat.peer for seat in record.seats) if witness else turn
        if self.me not in mine:  # each had its turn, and none was heard to found anything
            self._leave_out(turn, now)
            return None
        record = msgspec.structs.replace(record, nonce=self._rng.randbytes(NONCE_BYTES))
        self._last = record
        self._founding = Founding(record)
        self._retry = now + settings.request_seconds * (1 + self._rng.random())
        self._reserved = (self.me, self._retry)
        return record

    def _plan(self, offers: dict[str, Offer], offering: Offering, now: float) -> Record | None:
        """`founding_record`, computed once for the same offers, and not again at once however often somebody's offer changes."""
        key = (tuple(sorted(offers.items(), key=lambda item: item[0])), offering)
        if self._planned[0] != key:
            if now < self._plan_from:
                return None
            self._plan_from = now + self._settings.plan_seconds
            self._planned = (key, founding_record(offers, offering, self._settings.stages, self._settings.lease_seconds))
        return self._planned[1]

    def may_sign(self, founder: str, now: float) -> bool:
        """Whether we are free for a crew of `founder`'s; then we are reserved for it."""
        if not self._heed(founder, now):
            return False
        self._newest = now
        if self._reserved is not None and now < self._reserved[1] and self._reserved[0] != founder:
            return False
        self._reserved = (founder, now + 2 * self._settings.request_seconds)
        return True

    def voted(self, peer: str, vote: Vote, verify: Verify) -> Certificate | None:
        """The certificate, once all have signed."""
        return None if self._founding is None else self._founding.voted(peer, vote, verify)

    def refused(self, peer: str, record: Record, reason: str, now: float) -> None:
        """Our founding record, by `peer`: who is busy may be free the next time; who will not sign is none of our plans until it offers."""
        if reason != "busy" and record == self._last:
            self._leave_out((peer,), now)
            self._offers.pop(peer, None)
        if self._founding is not None and self._founding.record == record:
            self._founding = self._reserved = None

    def joined(self) -> None:
        """We are in a crew."""
        self._founding = self._reserved = None
