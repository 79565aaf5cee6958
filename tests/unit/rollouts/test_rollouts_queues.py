import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.rollouts.groups import Candidate, memory_bytes
from swarmnode.rollouts.network.admission import (
    STRIKE_PEERS,
    STRIKE_SECONDS,
    STRIKES,
    CandidateQueue,
    ScoringQueue,
    Strikes,
)
from swarmnode.rollouts.network.exchange import LEAST_SECONDS, fetch_deadline
from swarmnode.tasks.frames import Scored, ScorerFailed
from swarmnode.tasks.seeds import is_evaluation
from tests.support.groups import external_group


def candidate(peer, number, text="12"):
    return Candidate(
        number.to_bytes(32, "big"), peer, external_group(peer, number, text=text).group
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5000), st.booleans()), max_size=60
    )
)
def test_the_queue_keeps_its_bounds_and_its_accounts(arrivals):
    queue = CandidateQueue(groups=10, size=40_000, peer_groups=4)
    inside = []
    for number, (peer, length, take) in enumerate(arrivals):
        one = candidate(peer, number, "x" * length)
        has_room = (
            len(inside) < 10
            and sum(memory_bytes(c.group) for c in [*inside, one]) <= 40_000
            and sum(c.peer == peer for c in inside) < 4
        )
        assert queue.put(one) == has_room
        inside += [one] * has_room
        if take:
            assert queue.take(2) == inside[:2]
            del inside[:2]
        assert len(queue) == len(inside)


def test_memory_of_authors_is_bounded_and_forgets_the_oldest():
    strikes = Strikes()
    for number in range(STRIKE_PEERS + 9):
        for _ in range(STRIKES):
            strikes.add(f"p{number}", 0.0)
    assert not strikes.is_out("p0", 0.0)
    assert strikes.is_out(f"p{STRIKE_PEERS + 8}", 0.0)


def test_large_fetches_have_longer_deadlines():
    assert fetch_deadline(0) == LEAST_SECONDS < fetch_deadline(2**18) < fetch_deadline(2**20)
    assert fetch_deadline(2**20) == 21.0


def test_three_strikes_exclude_an_author_for_ten_minutes():
    strikes = Strikes()
    for n in range(STRIKES):
        assert not strikes.is_out("a", n)
        strikes.add("a", n)
    assert strikes.is_out("a", STRIKES)
    assert not strikes.is_out("b", STRIKES)
    assert not strikes.is_out("a", STRIKES + STRIKE_SECONDS)


def test_strikes_expire_after_ten_minutes():
    strikes, began = Strikes(), 1_800_000_000.0
    for seconds in (0.0, 300.0, 599.0):
        strikes.add("a", began + seconds)
    assert strikes.is_out("a", began + 599 + STRIKE_SECONDS)
    assert not strikes.is_out("a", began + 600 + STRIKE_SECONDS)
    for seconds in (0.0, 500.0, 1000.0):
        strikes.add("b", began + seconds)
    assert not strikes.is_out("b", began + 1000.0)


class FailingScorer:
    """Fails for every group, and for this node's own questions as configured."""

    def __init__(self, works):
        self.works, self.probes = works, 0

    async def score_many(self, items):
        await trio.lowlevel.checkpoint()
        results = []
        for ref, completions in items:
            own = is_evaluation(ref.seed) and not completions
            self.probes += own
            works = self.works and own
            results.append(Scored("?", []) if works else ScorerFailed("it took too long"))
        return results


@pytest.mark.parametrize("works", [True, False])
async def test_lone_author_gets_strikes_only_if_the_scorer_works(works, autojump_clock):
    scorer, failed = FailingScorer(works), []
    queue = ScoringQueue(scorer, lambda *_: None, lambda *told: failed.append(told), lambda: 0.0)
    async with trio.open_nursery() as nursery:
        queue.start(nursery)
        for number in range(STRIKES):
            assert queue.put(candidate("a", number)) is None
            await trio.testing.wait_all_tasks_blocked()
        assert queue.put(candidate("a", 9)) == ("scorer" if works else None)
        assert queue.put(candidate("b", 9)) is None
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert failed[:STRIKES] == [("scorer", "a")] * STRIKES
    assert scorer.probes == STRIKES + 1
