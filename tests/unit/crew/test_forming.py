"""Offers and one founding at a time: what is remembered of others, for how long, and who is left out."""

import random

import msgspec
import pytest

from swarmnode.crew.events import Settings
from swarmnode.crew.forming import Forming, founding_record
from swarmnode.crew.local import Offering
from swarmnode.crew.messages import Offer, Voter
from swarmnode.crew.plan import Capacity, ModelCost, Part

SETTINGS = Settings(most_peers=4)
PART = Part(4.0, 1.0)
OFFERING = Offering(bytes(32), Capacity(9.0, 1.0), ModelCost(PART, (PART,) * 4, PART))
OFFER = Offer(bytes(32), b"s" * 8, 9.0, 1.0, 0.0)
replace = msgspec.structs.replace


def node(others=""):
    forming = Forming("a", SETTINGS, random.Random(1))
    forming.begin(0.0)
    for peer in others:
        forming.heard(peer, OFFER, 0.0)
    return forming


def proposed(forming, now, until):
    """(when, record) of the next proposal, looking ten times a second."""
    while now < until:
        if (record := forming.propose(OFFER, OFFERING, now)) is not None:
            return now, record
        now += 0.1
    raise AssertionError("nothing was proposed")


def test_offers_of_so_many_peers_are_remembered_and_the_dead_make_room():
    forming = node("bcdefgh")
    assert list(forming.offers(0.0)) == list("bcde")
    forming.heard("c", replace(OFFER, speed=2.0), 20.0)
    assert forming.offers(20.0)["c"].speed == 2.0
    assert list(forming.offers(3 * SETTINGS.offer_seconds)) == list("bcde")
    assert list(forming.offers(3 * SETTINGS.offer_seconds + 0.1)) == ["c"]
    forming.heard("h", OFFER, 40.0)
    assert list(forming.offers(40.0)) == ["c", "h"]


def test_who_left_is_forgotten_as_what_it_was():
    forming = node("bc")
    forming.left(Voter("b", b"another!"))
    forming.left(Voter("stranger", b"s" * 8))
    assert list(forming.offers(1.0)) == ["b", "c"]
    forming.left(Voter("b", b"s" * 8))
    assert list(forming.offers(1.0)) == ["c"]


def test_who_will_not_sign_is_left_out_though_it_offers_and_the_others_are_free_at_once():
    forming = node("bcd")
    began, record = proposed(forming, 0.0, 9.0)
    assert {seat.peer for seat in record.seats} == {"a", "b", "c"}
    assert not forming.may_sign("z", began)  # ours lives
    forming.refused("b", replace(record, nonce=b"another!"), "record", began)  # of an earlier try
    assert forming.propose(OFFER, OFFERING, began) is None
    forming.refused("b", record, "record", began)
    assert "b" not in forming.offers(began)
    forming.heard("b", OFFER, began + 0.1)
    again, second = proposed(forming, began, began + 9.0)
    assert {seat.peer for seat in second.seats} == {"a", "c", "d"}
    assert again >= began + SETTINGS.request_seconds
    forming.refused("c", second, "busy", again)
    assert "c" in forming.offers(again)  # it may be free the next time
    assert forming.may_sign("z", again)
    assert not forming.may_sign("y", again)
    forming.joined()
    assert forming.may_sign("y", again)


def test_who_refused_is_remembered_no_longer_than_it_is_left_out():
    forming = node("bcd")
    _, record = proposed(forming, 0.0, 9.0)
    for number in range(100):
        forming.refused(f"x{number}", record, "record", 10.0 * number)
    assert list(forming._refused) == ["x99"]


@pytest.mark.parametrize("changes", [{"memory": 0.0}, {"speed": 0.0}, {"model": b"x" * 32}])
def test_who_cannot_hold_a_stage_is_given_none(changes):
    offers = {peer: OFFER for peer in "bcd"}
    assert founding_record(offers, OFFERING, 0, 30.0) is not None
    assert founding_record({**offers, "d": replace(OFFER, **changes)}, OFFERING, 0, 30.0) is None


def test_one_node_that_can_hold_the_model_founds_a_crew_of_one():
    record = founding_record({"b": replace(OFFER, memory=1e3)}, OFFERING, 0, 30.0)
    assert [seat.peer for seat in record.seats] == ["b"]
    assert founding_record({}, OFFERING, 0, 30.0) is None


@pytest.mark.parametrize("does", ["offers", "proposes"])
def test_a_stranger_that_never_stops_keeps_nobody_from_founding(does):
    forming = node("bc")
    for second in range(60):
        if does == "offers":
            forming.heard("z", replace(OFFER, memory=0.1, incarnation=second.to_bytes(8, "big")), second)
        else:
            forming.may_sign("z", second)
        if forming.propose(OFFER, OFFERING, second + 0.5) is not None:
            return
    raise AssertionError("nothing was founded")


def test_a_founder_is_signed_for_again_when_its_minute_is_over():
    forming = node()
    signs = [forming.may_sign("z", second) for second in range(61)]
    assert signs == [True] * 5 + [False] * 55 + [True]
    assert forming.may_sign("b", 61 + 2 * SETTINGS.request_seconds)
