"""A founding record from offers. Pure: whoever has heard the same offers makes the same record. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swarmnode.errors import Refused
from swarmnode.stages.local import Offering
from swarmnode.stages.messages import NO_CREW, NO_HASH, Offer, Record, Seat, Voter, voters_of
from swarmnode.stages.plan import MEMBERS, Capacity, make_plan


def founding_record(offers: Mapping[str, Offer], offering: Offering, stages: int, lease_seconds: float) -> Record | None:
    """A crew of those who offer, as `plan.make_plan` places them; None where they cannot hold the model.

    The largest MEMBERS are considered. An even number of stages gets a witness where somebody is left over: then one half of a crew that
    falls apart can go on. `stages` asks for exactly so many; 0 for what is fastest.
    """
    able = [peer for peer, offer in offers.items() if offer.model == offering.model and offer.memory > 0 and offer.speed > 0]
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
    record = Record(NO_CREW, 1, NO_HASH, offering.model, plan.layers, seats, witnesses, (), 0, round(lease_seconds))
    return msgspec.structs.replace(record, voters=voters_of(record))
