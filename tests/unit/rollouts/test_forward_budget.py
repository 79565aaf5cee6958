import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.rollouts.forward_budget import (
    AUTHOR_BYTES,
    AUTHOR_SHARE,
    LEAST_BYTES,
    MOST_AUTHORS,
    ORIGIN_BYTES,
    ForwardBudget,
)
from swarmnode.rollouts.groups import Draw
from swarmnode.testing.scorer import InProcessScorer
from tests.unit.rollouts.test_rollouts_exchange import EPOCH, SWARM, Author, Swarm

SHORT = 700
MOST_BYTES = 65_536


class World:
    """A budget, and a clock that is set by hand. known: authors that were trained on."""

    def __init__(self, *known):
        self.now = 0.0
        self.known = set(known)
        self.budget = ForwardBudget(self.known.__contains__, lambda: self.now)

    def send(self, author, origin, seconds, rate, size=SHORT):
        """Groups at this rate, from now on; how many of them are passed on."""
        passed, end = 0, self.now + seconds
        while self.now < end:
            passed += self.budget.allows(author, origin, size)
            self.now += 1 / rate
        return passed


def test_a_storm_is_cut_to_a_group_a_second_and_an_honest_pace_is_not_cut():
    assert World("storm").send("storm", "there", 1000, 16) == pytest.approx(1000, rel=0.05)
    assert World("honest").send("honest", "there", 1000, 0.9) == pytest.approx(900, rel=0.01)


def test_a_storm_of_long_groups_is_bounded_by_its_bytes():
    passed = World("storm").send("storm", "there", 1000, 16, MOST_BYTES)
    assert passed * MOST_BYTES == pytest.approx(1000 * AUTHOR_BYTES, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.floats(0, 2), st.integers(1, MOST_BYTES)), max_size=200
    )
)
def test_an_origin_costs_no_more_than_its_rate_however_many_sign(sent):
    world, passed = World(*(str(n) for n in range(20))), 0
    for author, pause, size in sent:
        world.now += pause
        passed += size * world.budget.allows(str(author), "there", size)
    assert passed <= ORIGIN_BYTES * (world.now + 10)


def test_a_thousand_new_identities_at_one_place_leave_the_known_their_half():
    """The storm makes a new key for each group; the honest author is behind the same neighbour, and
    goes first."""
    world = World("honest")
    passed = {"honest": 0, "storm": 0}
    for second in range(600):
        for number in range(200):
            passed["storm"] += world.budget.allows(f"{second}.{number}", "there", SHORT)
        passed["honest"] += world.budget.allows("honest", "there", SHORT)
        world.now += 2
    assert passed["honest"] == 600
    assert passed["storm"] * LEAST_BYTES <= ORIGIN_BYTES * (1200 + 10)


def test_ten_identities_at_one_place_take_nothing_from_another():
    world = World()
    for sequence in range(2000):
        for number in range(10):
            world.budget.allows(f"sybil {number}", "45.99.9.0/24", SHORT)
        if sequence % 16 == 0:
            assert world.budget.allows("newcomer", "45.1.1.0/24", SHORT)
        world.now += 1 / 16
    passed = world.budget.outcomes()["passed"] - 2000 / 16
    assert 8 * 125 <= passed <= 8 * 125 + 80, "eight a second, and what may go by at once"


def test_of_eleven_newcomers_behind_one_neighbour_the_frugal_one_is_heard_beyond_it():
    world, passed = World(), 0
    for second in range(60):
        for number in range(10):
            for _ in range(16):
                world.budget.allows(f"sybil {number}", "there", SHORT)
        if second % 20 == 10:
            passed += world.budget.allows("newcomer", "there", SHORT)
        world.now += 1
    assert passed == 3


def test_a_neighbour_is_heard_whatever_comes_through_it():
    world = World()
    for number in range(1000):
        world.budget.allows(str(number), "there", SHORT)
    assert not world.budget.allows("newcomer", "there", SHORT)
    assert [world.budget.allows("neighbour", "there", SHORT, near=True) for _ in range(8)] == 8 * [
        True
    ]


def test_what_its_trainer_asks_for_raises_what_a_node_passes_on():
    world = World("fast")
    for _ in range(1000):
        world.budget.want(2)
        world.now += 1.0
    assert world.send("fast", "there", 100, 50) == pytest.approx(
        100 * 2 * AUTHOR_SHARE * 0.9, rel=0.15
    )


def test_it_forgets_beyond_its_bound_and_a_clock_that_is_set_back_gives_nothing():
    world = World("storm")
    assert world.send("storm", "there", 60, 16) < 60 + 20
    world.now = 0.0
    assert world.send("storm", "there", 30, 16) <= 31
    for number in range(MOST_AUTHORS + 10):
        world.budget.allows(str(number), str(number), SHORT)
    assert world.budget.allows("storm", "elsewhere", SHORT), "as a new one"


# ---- in the exchange


def group_of(author, sequence):
    return author.frame(author.group(sequence, EPOCH))


async def test_a_flood_of_ten_behind_one_neighbour_is_taken_and_not_passed_on(
    nursery, autojump_clock
):
    """Four nodes in a line, the flood at one end: it ends at the first, where it is counted; what
    the honest send goes through."""
    swarm = await Swarm(nursery, 4, scorer=InProcessScorer(seconds=0.0)).start()
    for one, other in ((0, 2), (0, 3), (1, 3)):
        swarm.medium.cut(swarm.authors[one].peer, swarm.authors[other].peer)
    sybils = [Author(SWARM, seed=100 + number) for number in range(10)]
    for sequence in range(60):
        for sybil in sybils:
            await swarm.publish_from(0, group_of(sybil, sequence))
    for sequence in range(4):
        await swarm.exchanges[0].publish(swarm.authors[0].own_group(sequence))
        await swarm.exchanges[3].publish(swarm.authors[3].own_group(sequence))
    at = [exchange.statistics() for exchange in swarm.exchanges]
    assert at[1].admission.candidates == 600 + 8, "the first takes all of it"
    assert at[1].forwarding["author"] > 500
    assert at[2].admission.candidates < 60 + 8
    assert at[3].admission.candidates < 60 + 4
    assert at[2].forwarding["passed"] > 40, "of the honest too"
    await trio.sleep(60)
    others = {group.peer for group in swarm.exchanges[3].draw(Draw(1, 200, 0, 200)).groups}
    assert swarm.authors[0].peer in others
    assert swarm.authors[3].peer in {
        group.peer for group in swarm.exchanges[0].draw(Draw(1, 1000, 0, 1000)).groups
    }
