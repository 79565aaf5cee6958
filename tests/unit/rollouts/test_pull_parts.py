"""Shelf and puller: the decisions of pull gossip, without a network."""

import itertools
import random

import msgspec
import pytest

from swarmnode.rollouts.network import puller, shelf
from swarmnode.rollouts.network.puller import Holder, Puller, PullTimer
from swarmnode.rollouts.network.shelf import Allowances, Shelf, ShelfStatistics
from swarmnode.wire import limits
from swarmnode.wire.listings import GroupsRequest, ListedGroup, ListingRequest, ListingResponse

SWARM, LIFE, NOW = b"s" * 32, b"l" * 8, 1_800_000_000.0


def listed(number, author="a", *, size=100, age=0.0, spread=0.5):
    return ListedGroup(
        number.to_bytes(32, "big"),
        author.encode() * 32,
        "builtin/copy",
        int((NOW - age) * 1000),
        size,
        spread,
    )


def listing(*groups, life=LIFE, position=None):
    return ListingResponse("ok", life, len(groups) if position is None else position, list(groups))


OWN_KEY = b"o" * 32


def filled(count, size=100, **bounds):
    kept = Shelf(OWN_KEY, SWARM, LIFE, **bounds)
    for number in range(count):
        kept.put(bytes(size), listed(number, size=size))
    return kept


def ask(position=0, life=LIFE, swarm=SWARM):
    return ListingRequest(swarm, life if position else b"", position, limits.PATIENCE_SECONDS)


# -- shelf


def test_only_own_groups_are_news_to_held_polls():
    kept = filled(3)
    assert not kept.has_news(ask(), b"")
    kept.put(bytes(100), listed(9, "o"))
    assert kept.has_news(ask(), b"")


def test_old_group_is_neither_listed_nor_served():
    kept = Shelf(OWN_KEY, SWARM, LIFE)
    kept.put(bytes(100), listed(0))
    kept.put(bytes(100), listed(1, age=shelf.LISTED_SECONDS + 1))
    assert [group.content for group in kept.listing(ask(), NOW).groups] == [listed(0).content]
    answers = kept.give(GroupsRequest([listed(1).content]), NOW).groups
    assert [group.status for group in answers] == ["unknown"]


def test_a_shelf_is_bounded_by_groups_bytes_and_age():
    kept = filled(300, groups=256)
    assert kept.statistics().groups == 256
    assert filled(300, size=2**20).statistics().bytes <= shelf.MOST_BYTES
    later = NOW + shelf.LISTED_SECONDS + 1
    assert kept.listing(ask(), later).groups == []
    assert kept.statistics() == ShelfStatistics(0, 0)


@pytest.mark.parametrize("names", [1, 10**6], ids=["one name", "a name for each group"])
@pytest.mark.parametrize("others", [14, 256, 1000])
def test_no_author_displaces_the_groups_of_others(others, names):
    kept, own, other = (
        Shelf(OWN_KEY, SWARM, LIFE),
        [listed(n, author="o") for n in range(8)],
        listed(100, author="b"),
    )
    for group in [
        *own,
        other,
        *(
            msgspec.structs.replace(listed(1000 + n), author=(n % names).to_bytes(32))
            for n in range(others)
        ),
    ]:
        kept.put(bytes(100), group)
    answer = kept.listing(ask(), NOW)
    assert [group for group in answer.groups if group.author == OWN_KEY] == own[-shelf.OWN_LISTED :]
    assert (len(answer.groups), answer.position) == (limits.LISTED, 9 + others)
    assert {
        group.status
        for group in kept.give(GroupsRequest([group.content for group in own]), NOW).groups
    } == {"ok"}
    assert other in answer.groups or names > 1


def test_groups_are_given_until_a_mebibyte_is_full():
    kept = filled(4, size=2**19)
    contents = [listed(n).content for n in (0, 9, 1, 2)]
    assert [group.status for group in kept.give(GroupsRequest(contents), NOW).groups] == [
        "ok",
        "unknown",
        "ok",
        "busy",
    ]


def test_peer_without_groups_has_a_quarter_allowance():
    allowances, served = Allowances(), {"taker": 0, "member": 0}
    for now in [tenth / 10 for tenth in range(6000)]:
        for peer in served:
            if allowances.has_room(peer, now):
                allowances.charge(peer, 2**17, peer == "member", now)
                served[peer] += 1
    assert 3.0 < served["member"] / served["taker"] < 5.0
    assert served["member"] * 2**17 < 1.3 * shelf.PEER_BYTES_PER_SECOND * 600
    for number in range(2 * shelf.MOST_PEERS):
        allowances.has_room(str(number), 0.0)
    assert len(allowances) == shelf.MOST_PEERS


# -- holders


def test_rests_double_and_true_groups_shorten_them():
    holder, rests = Holder(), []
    for _ in range(12):
        holder.fail(100.0, puller.BUSY_SECONDS)
        rests.append(holder.rests_until - 100.0)
    assert rests == [*(5.0 * 2**n for n in range(7)), *[puller.MOST_REST_SECONDS] * 5]
    world = World(["h"])
    world.prove("h")
    world.puller.fault("h", "spread", world.now)
    world.now += puller.FAILED_SECONDS
    world.polls()
    world.list("h", *(listed(n, chr(97 + n)) for n in range(7)))
    while pulls := world.fetches():
        world.give(*pulls)
    world.puller.fault("h", "spread", world.now)
    assert world.polls() == []
    world.now += puller.FAILED_SECONDS + 1
    assert world.polls() == ["h"], "no longer than the first time"


def test_cursor_must_advance_within_one_life():
    holder = Holder()
    assert holder.take(listing(listed(1), listed(2)), OWN_KEY, NOW)
    assert not holder.take(listing(listed(3), position=2), OWN_KEY, NOW)
    assert not holder.take(listing(position=1), OWN_KEY, NOW)
    assert (holder.life, holder.position) == (LIFE, 2)
    assert len(holder.offers) == 2, "nothing of a lie is on offer"
    assert holder.take(listing(position=2), OWN_KEY, NOW), "no news"
    assert holder.take(listing(listed(4), life=b"n" * 8), OWN_KEY, NOW)
    assert holder.position == 1
    assert list(holder.offers) == [listed(4).content], "its earlier life is over"


def test_offers_are_bounded_and_end_with_the_connection():
    world = World(["h"])
    world.polls()
    world.list("h", *(listed(n) for n in range(100)))
    assert world.puller.offered == puller.MOST_OFFERED
    world.peers = []
    world.polls()
    assert world.puller.offered == 0
    assert world.puller.cursor("h") == (b"", 0), "another connection begins with all groups"


def test_what_is_remembered_of_peers_is_bounded():
    world = World()
    for number in range(2 * puller.MOST_HOLDERS):
        world.puller.refused(str(number), 0.0)
    assert world.puller.statistics().holders == puller.MOST_HOLDERS


# -- the choice among offers of proven holders


def offering(offers, seed=0):
    """Return a World whose holders are proven and list these groups."""
    world = World(list(offers), seed)
    world.prove(*offers)
    world.now += 1.0
    for peer in world.polls():
        world.list(peer, *offers[peer])
    return world


def choose(world, count, trust=lambda author: 1.0):
    """Return the fetches for `count` groups."""
    version = int(1000 * world.now) + 1
    world.now += 0.002
    world.puller.drew(count, count, version, world.now)
    return world.fetches(trust)


def first_of(offers, seed, count=1, **how):
    """Return (holder, listed) of each chosen group."""
    pulls = choose(offering(offers, seed), count, **how)
    return [(pull.holder, group) for pull in pulls for group in pull.groups]


def test_group_of_many_holders_is_requested_once():
    same = [listed(n, author=chr(ord("a") + n)) for n in range(8)]
    pulls = choose(offering({f"h{n}": same for n in range(8)}), 100)
    contents = sorted(group.content for pull in pulls for group in pull.groups)
    assert len(contents) == len(set(contents))
    assert len(pulls) <= puller.MOST_FETCHES


def test_requests_are_bounded_in_groups_bytes_and_share():
    small = [listed(n, author=chr(ord("a") + n % 20)) for n in range(30)]
    (pull,) = choose(offering({"h": small}), 40)
    assert len(pull.groups) == limits.PULLED
    large = [listed(n, author=chr(ord("a") + n), size=400_000) for n in range(10)]
    (pull,) = choose(offering({"h": large}), 10)
    assert sum(group.size for group in pull.groups) <= limits.GROUP_BYTES
    pulls = choose(offering({"one": small, "other": small[:6]}), 8)
    assert max(len(pull.groups) for pull in pulls) == 4


def test_ranks_by_spread_freshness_and_trust():
    two = lambda good, bad: {"h": [listed(1, "a", **good), listed(2, "b", **bad)]}
    first = lambda offers, **how: [
        group.content for seed in range(100) for _, group in first_of(offers, seed, **how)
    ].count(listed(1).content)
    assert first(two({"spread": 0.5}, {"spread": 0.1})) > 70
    assert first(two({}, {"age": 900.0})) > 70
    assert first(two({}, {}), trust=lambda peer: {"a": 1.0, "b": 0.1}[peer]) > 70
    assert first(two({}, {}), trust=lambda peer: {"a": 1.0, "b": 0.0}[peer]) == 100
    assert first_of({"h": [listed(1, age=limits.GROUP_AGE_SECONDS + 9)]}, 0) == []
    assert first_of({"h": [listed(1, author="o")]}, 0) == []  # our own, come back
    newest = first_of({"h": [listed(1, age=300.0), listed(2), listed(3, age=200.0)]}, 0)
    assert [group.content for _, group in newest] == [listed(2).content]


@pytest.mark.parametrize(
    ("authors", "trust"), [("a" * 14, 1.0), ("ABCDEFGHIJKLMN", 0.25)], ids=["one", "unknown"]
)
def test_who_lists_more_is_not_asked_for_before_others(authors, trust):
    """Fourteen groups at one holder, and seven holders each with a group of its own."""
    offers = {"many": [listed(n, author=author) for n, author in enumerate(authors)]}
    offers |= {f"h{name}": [listed(100 + n, author=name)] for n, name in enumerate("bcdefgi")}
    asked = [
        holder for seed in range(400) for holder, _ in first_of(offers, seed, trust=lambda _: trust)
    ]
    assert 25 < asked.count("many") < 75, "fifty in the mean"


def test_false_claims_do_not_replace_other_claims():
    """A proven liar lists the group of an honest author under the name of a greylisted one."""
    honest = {"ha": [listed(1, author="a")], "hb": [listed(2, author="b")]}
    trust = lambda author: 0.0 if author == "z" else 1.0
    offers = {"liar": [listed(1, author="z")]} | honest
    asked = [claim for seed in range(300) for claim in first_of(offers, seed, trust=trust)]
    assert asked.count(("ha", listed(1, author="a"))) == pytest.approx(150, abs=30)


# -- unproven holders


LARGE = limits.GROUP_BYTES


def crowd(world, count=30):
    """Let each of `count` unproven peers list fourteen groups of 1 MiB, by its own authors."""
    world.peers += [f"s{number}" for number in range(count)]
    for turn in range(count):
        for peer in world.polls():
            if peer.startswith("s"):
                first = 1000 * turn + 50 * int(peer[1:])
                world.list(peer, *(listed(first + n, chr(65 + n), size=LARGE) for n in range(14)))
            else:
                world.list(peer)
        world.now += 0.01


def test_holding_fetches_of_strangers_leave_those_of_proven_holders():
    world = World(["a", "b"])
    world.prove("a", "b")
    world.now += 1.0
    for peer in world.polls():
        world.list(peer, *(listed(ord(peer) * 100 + n, peer, size=9) for n in range(8)))
    crowd(world)
    pulls = world.fetches()
    strangers = [pull for pull in pulls if pull.holder.startswith("s")]
    assert len(strangers) == puller.UNPROVEN_FETCHES
    assert all(len(pull.groups) == 1 for pull in strangers)
    assert {pull.holder for pull in pulls} >= {"a", "b"}
    for pull in pulls:
        if pull not in strangers:
            world.give(pull)
    world.puller.drew(8, 0, 0, world.now)
    world.now += 1.0
    for peer in world.polls():
        world.list(peer, *(listed(ord(peer) * 100 + 50 + n, peer, size=9) for n in range(8)))
    assert {pull.holder for pull in world.fetches()} == {"a", "b"}, "the strangers still hold two"


def test_a_stranger_that_is_busy_late_rests_twice_as_long_each_time():
    world, asked = World(["s"]), []
    world.polls()
    world.list("s", *(listed(n, chr(97 + n)) for n in range(14)))
    while len(asked) < 6:
        for pull in world.fetches():
            asked.append(world.now)
            world.now += 10.0
            world.give(pull, "busy")
        world.now += 1.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == [15, 20, 30, 50, 90]


def test_strangers_take_no_poll_of_proven_holders_and_are_not_polled_while_they_have_offers():
    proven = [str(number) for number in range(8)]
    world = World([*proven, *(f"s{number}" for number in range(30))])
    world.prove(*proven)
    world.now += 1.0
    polled = world.polls()
    assert len(polled) == 2 * puller.MOST_POLLED
    assert set(polled) >= set(proven)
    for peer in proven:
        world.list(peer)
    world.now += 1.0
    assert set(world.polls()) == set(proven), "the strangers have not answered"
    listing_ = World(["s"])
    listing_.polls()
    listing_.list("s", *(listed(n, chr(97 + n)) for n in range(14)))
    listing_.now += 100.0
    assert listing_.polls() == []


def test_fake_offers_of_strangers_are_not_plenty():
    world = World(["a"])
    world.prove("a")
    crowd(world)
    world.now += 1.0
    assert "a" in world.polls()


def test_newcomer_among_strangers_asks_for_the_smallest_group_first():
    world = World()
    crowd(world)
    first = world.fetches()
    assert [len(pull.groups) for pull in first] == [1] * puller.MOST_FETCHES
    world.peers = [pull.holder for pull in first] + ["honest"]
    world.now += 1.0
    assert world.polls() == ["honest"]
    world.list("honest", listed(1, "h", size=20_000), listed(2, "h", size=10_000))
    world.peers += [f"s{number}" for number in range(30)]
    assert world.fetches() == []
    world.puller.failed(first[0], world.now)
    (pull,) = world.fetches()
    assert (pull.holder, pull.groups) == ("honest", (listed(2, "h", size=10_000),))


# -- puller


def test_the_next_draw_is_predicted_from_the_steps_before():
    timer = PullTimer()
    assert timer.opens_at == -float("inf")
    for step in range(20):
        assert timer.drew(step, 100.0 * step)
        assert not timer.drew(step, 100.0 * step + 10), "a second draw is no step"
    assert timer.opens_at == pytest.approx(1900 + 75), "a quarter of a step before"
    short = PullTimer()
    for step in range(20):
        short.drew(step, 8.0 * step)
    assert short.opens_at == pytest.approx(19 * 8 + 3), "five seconds before"


def test_a_trainer_that_was_paused_has_not_become_slow():
    timer = PullTimer()
    for step, at in enumerate((0.0, 40.0, 10_000.0)):
        timer.drew(step, at)
    assert timer.opens_at < 10_000.0 + 60.0


class World:
    """A puller, and a clock that is set by hand. now: seconds; Unix time is NOW + now."""

    def __init__(self, peers=(), seed=0):
        self.puller = Puller(OWN_KEY, lambda key: key[:1].decode(), random.Random(seed))
        self.now, self.peers, self.known = 0.0, list(peers), set()
        self.positions = {}

    def polls(self):
        return self.puller.polls_due(self.peers, self.now, self.known.__contains__)

    def fetches(self, trust=lambda author: 1.0):
        return self.puller.fetches_due(self.now, NOW + self.now, trust, self.known.__contains__)

    def list(self, peer, *groups):
        """Answer the poll of `peer`."""
        self.positions[peer] = self.positions.get(peer, 0) + len(groups)
        answer = listing(*groups, position=self.positions[peer])
        self.puller.polled(peer, answer, self.now, NOW + self.now)

    def give(self, pull, outcome="ok", rewards=(0.0, 1.0)):
        """Answer a fetch."""
        self.puller.fetched(pull, [outcome] * len(pull.groups), self.now, slow=False)
        for group in pull.groups if outcome == "ok" else ():
            self.known.add(group.content)
            self.puller.scored(group.content, list(rewards), self.now)

    def prove(self, *peers):
        """Fetch small groups of each of at most eight peers."""
        connected, self.peers = self.peers, list(peers)
        if len(peers) > 3:
            self.puller.drew(32, 0, -1, self.now)
        for number, peer in enumerate(self.polls()):
            first, author = 10**6 + 100 * number, chr(97 + number)
            self.list(peer, *(listed(first + n, author, size=1) for n in range(4)))
        while pulls := self.fetches():
            for pull in pulls:
                self.give(pull)
        assert self.puller.statistics().confirmed == 4 * len(peers)
        self.peers = connected

    def faults(self):
        return self.puller.statistics().faults

    def fill(self, first=0, count=100):
        """Fetch from one holder until nothing is wanted."""
        for number in range(first, first + count, limits.LISTED):
            if "filler" in self.polls():
                groups = [listed(number + n, chr(97 + n)) for n in range(limits.LISTED)]
                self.list("filler", *groups)
            while pulls := self.fetches():
                for pull in pulls:
                    self.give(pull)
            self.now += puller.POLL_INTERVAL_SECONDS


def test_node_fetches_two_steps_before_the_first_draw():
    world = World(["filler"])
    assert world.puller.urgent
    assert world.puller.wanted(0.0) == 2 * puller.FIRST_STEP
    world.fill()
    assert world.puller.wanted(world.now) == 0
    assert len(world.known) == 2 * puller.FIRST_STEP


def test_a_group_without_advantages_does_not_meet_the_demand():
    world = World(["filler"])
    world.prove("filler")
    for useful in (False, True):
        world.now += 2.0
        before = world.puller.wanted(world.now)
        world.polls()
        groups = [listed(50 * useful + n, chr(97 + n), spread=useful / 2) for n in range(4)]
        world.list("filler", *groups)
        for pull in world.fetches():
            world.give(pull, rewards=(0.0, float(useful)))
        assert world.puller.wanted(world.now) == before - 4 * useful


def test_sated_node_forwards_one_group_in_ten_seconds():
    world = World(["filler"])
    world.fill()
    world.now += puller.MOST_AHEAD_SECONDS
    assert world.puller.wanted(world.now) == 1
    assert world.polls() == ["filler"]
    world.list("filler", *(listed(500 + n, chr(97 + n)) for n in range(4)))
    (pull,) = world.fetches()
    assert len(pull.groups) == 1
    world.give(pull)
    assert world.puller.wanted(world.now) == 0
    world.now += puller.FORWARD_SECONDS - 0.1
    assert world.polls() == world.fetches() == []


def test_fetches_shortly_before_the_next_draw():
    world = World()
    for step in range(20):
        world.puller.drew(6, 8, step, 100.0 * step)  # of the two steps, four are missing
    world.puller.scored(b"", [0.0, 1.0], 1960.0)
    assert world.puller.wanted(1974.0) in (0, 1)
    assert world.puller.wanted(1975.0) == 4
    assert world.puller.next_time(1971.0) == pytest.approx(1975.0)
    world.puller.drew(6, 5, 20, 2000.0)
    assert world.puller.wanted(2000.0) == 7


def test_second_draw_does_not_reduce_demand():
    world = World()
    world.puller.drew(6, 0, 1, 0.0)
    world.puller.drew(1, 0, 1, 5.0)
    assert world.puller.wanted(5.0) == 12


def test_eight_peers_are_polled_each_once_a_second():
    world = World([str(n) for n in range(40)])
    polled = world.polls()
    assert len(set(polled)) == puller.MOST_POLLED == world.puller.polling
    assert world.polls() == []
    for peer in polled:
        world.list(peer)
    again = world.polls()
    assert not set(again) & set(polled)
    for peer in again:
        world.list(peer)
    world.now += 1.0
    assert len(world.polls()) == puller.MOST_POLLED


def test_an_answer_at_once_is_followed_by_a_pause():
    world = World(["1"])
    for proven, seconds in ((False, limits.PATIENCE_SECONDS), (True, 1.0)):
        if proven:
            world.prove("1")
            world.now += 1.0
        assert world.polls() == ["1"]
        world.list("1")
        world.now += seconds - 0.1
        assert world.polls() == []
        world.now += 0.1


def test_plenty_on_offer_stops_further_polls():
    world = World([str(n) for n in range(8)])
    world.prove(*world.peers)
    world.now += 1.0
    world.puller.drew(2, 0, 0, world.now)
    polled = world.polls()
    world.list(polled[0], *(listed(n, chr(97 + n)) for n in range(14)))
    for peer in polled[1:]:
        world.list(peer)
    world.now += puller.PLENTY_POLL_SECONDS - 0.1
    assert world.polls() == []
    world.now += 0.1
    assert len(world.polls()) == 1


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (None, puller.FAILED_SECONDS),
        ("busy", puller.BUSY_SECONDS),
        ("unknown", puller.MOST_REST_SECONDS),
        ("not served yet", puller.REFUSED_SECONDS),
    ],
)
def test_a_peer_without_a_listing_is_polled_again_later(answer, seconds):
    world = World(["h"])
    assert world.polls() == ["h"]
    if answer == "not served yet":
        world.puller.refused("h", world.now)
    else:
        given = answer and ListingResponse(answer, LIFE, 0, [])
        assert world.puller.polled("h", given, world.now, NOW)
    assert world.faults() == ({} if answer else {"slow": 1})
    world.now += seconds - 0.1
    assert world.polls() == []
    assert world.puller.next_time(world.now) == pytest.approx(world.now + 0.1)
    world.now += 0.1
    assert world.polls() == ["h"]


def test_a_dishonest_cursor_costs_a_rest():
    world = World(["h"])
    world.prove("h")
    world.now += 1.0
    world.polls()
    back = listing(position=0)
    assert not world.puller.polled("h", back, world.now, NOW)
    assert world.faults() == {"cursor": 1}
    world.now += puller.FAILED_SECONDS - 0.1
    assert world.polls() == []


def test_a_busy_holder_keeps_its_offers_and_rests():
    world = World(["h"])
    world.polls()
    world.list("h", listed(1))
    (pull,) = world.fetches()
    assert world.fetches() == []
    world.give(pull, "busy")
    world.now += puller.BUSY_SECONDS - 0.1
    assert world.fetches() == world.polls() == []
    world.now += 0.1
    assert [group.content for (pull) in world.fetches() for group in pull.groups] == [
        listed(1).content
    ]


def test_failed_fetch_retries_other_holders_first():
    world = World(["h", "other"])
    world.polls()
    world.list("h", listed(1))
    (pull,) = world.fetches()
    world.list("other", listed(1), listed(2, "b"))
    (meanwhile,) = world.fetches()
    assert [group.content for group in meanwhile.groups] == [listed(2, "b").content]
    world.give(meanwhile)
    world.puller.failed(pull, world.now)
    (again,) = world.fetches()
    assert (again.holder, again.groups) == ("other", pull.groups)
    world.puller.failed(again, world.now)
    world.now += puller.FAILED_SECONDS - 0.1
    assert world.fetches() == []
    assert world.polls() == []
    world.now += 0.1
    (last,) = world.fetches()
    assert last.groups == pull.groups
    world.give(last)
    assert world.fetches() == []
    assert world.puller.offered == 0, "forgotten once it is here"


def test_unhurried_node_waits_for_its_polls_once():
    world = World(["filler", "silent"])
    world.puller.polled("silent", None, 0.0, NOW)
    world.fill()
    world.now += 70.0
    assert set(world.polls()) == {"filler", "silent"}
    world.list("filler", *(listed(500 + n, chr(97 + n)) for n in range(4)))
    assert world.fetches() == []
    world.now += 1.0
    assert world.polls() == ["filler"], "polled again, since it answered at once"
    world.list("filler")
    assert world.fetches() == []
    world.now += 1.0
    assert world.polls() == ["filler"]
    assert len(world.fetches()) == 1
