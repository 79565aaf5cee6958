"""What is counted of exchanges of weights."""

from swarmnode.weights.driver import PARTNERS, ExchangeTotals


def test_partners_are_remembered_up_to_a_bound_and_the_latest_stay():
    totals = ExchangeTotals()
    for number in range(PARTNERS + 5):
        totals.note_pair(f"peer {number}")
        totals.note_pair("a friend")
    assert len(totals.pairs) == PARTNERS
    assert totals.pairs["a friend"] == PARTNERS + 5
    assert "peer 0" not in totals.pairs
