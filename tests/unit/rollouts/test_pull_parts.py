"""Shelf, claims, offers and puller: the decisions of pull gossip, without a network."""

import random

import msgspec
import pytest

from swarmnode.rollouts import puller, shelf
from swarmnode.rollouts.puller import ListingTrust, Offers, Puller, PullTimer
from swarmnode.rollouts.shelf import Allowances, Shelf, ShelfStatistics
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


def test_listing_skips_groups_before_the_cursor():
    kept = filled(100)
    first = kept.listing(ask(), NOW)
    assert [group.content for group in first.groups] == [listed(n).content for n in range(86, 100)]
    assert kept.listing(ask(first.position), NOW).groups == []
    kept.put(b"new", listed(100))
    assert [group.content for group in kept.listing(ask(first.position), NOW).groups] == [
        listed(100).content
    ]


@pytest.mark.parametrize(("position", "life"), [(100, b"x" * 8), (101, LIFE), (2**63 - 1, LIFE)])
def test_invalid_cursor_counts_as_zero(position, life):
    assert len(filled(100).listing(ask(position, life), NOW).groups) == limits.LISTED


def test_another_swarm_is_told_nothing():
    answer = filled(3).listing(ask(swarm=b"o" * 32), NOW)
    assert (answer.status, answer.groups) == ("unknown", [])


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


def test_listing_alternates_authors_newest_first():
    kept = Shelf(OWN_KEY, SWARM, LIFE)
    for number, author in enumerate("obcd" + "o" * 10 + "a" * 20):
        kept.put(bytes(100), listed(number, author=author))
    numbers = [int.from_bytes(group.content, "big") for group in kept.listing(ask(), NOW).groups]
    assert numbers == [1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 30, 31, 32, 33]
    assert kept.listing(ask(34), NOW).groups == []


def test_listing_reserves_half_for_groups_of_peers():
    kept = Shelf(OWN_KEY, SWARM, LIFE)
    for number in range(1000):
        kept.put(bytes(100), listed(number, author="oab"[number % 3]))
    groups = kept.give(
        GroupsRequest([listed(n).content for n in range(999 - 15, 1000)]), NOW
    ).groups
    assert [group.status for group in groups] == ["ok"] * 16
    for number in range(1000, 2000):
        kept.put(bytes(100), listed(number, author="o"))
    oldest = [
        group.status
        for group in kept.give(
            GroupsRequest([listed(n).content for n in (998, 997, 1800)]), NOW
        ).groups
    ]
    assert oldest == ["ok", "ok", "unknown"]


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


# -- claims


def test_faults_cost_belief_and_true_listings_restore_it():
    believed = ListingTrust()
    assert believed.belief("new") == puller.NEW_HOLDER_BELIEF
    for _ in range(puller.PROVING_GROUPS):
        believed.confirm("good")
    assert believed.belief("good") == 1.0
    believed.fault("good", "spread")
    assert believed.belief("good") == 0.5
    for _ in range(8):
        believed.confirm("good")
    assert believed.belief("good") == 1.0
    for _ in range(1000):
        believed.fault("liar", "content")
    assert believed.credit("liar") == 0.5**puller.MAX_HALVINGS > 0
    assert believed.statistics().faults == {"content": 1000, "spread": 1}


def test_holders_that_are_remembered_are_bounded():
    believed = ListingTrust()
    for number in range(2 * puller.MOST_HOLDERS):
        believed.fault(str(number), "absent")
    assert believed.statistics().holders == puller.MOST_HOLDERS


# -- offers


def heard(**listings):
    heard = Offers(b"o" * 32, lambda key: key[:1].decode())
    for holder, groups in listings.items():
        assert heard.take(holder, listing(*groups), NOW)
    return heard


def choose(
    heard,
    count,
    seed=0,
    *,
    belief=lambda peer: 1.0,
    trust=lambda peer: 1.0,
    known=(),
    busy=(),
    asked=(),
    few=False,
):
    return heard.choose(
        count,
        NOW,
        random.Random(seed),
        trust,
        belief,
        set(known).__contains__,
        busy,
        asked,
        few=few,
    )


def test_group_of_many_holders_is_requested_once():
    same = [listed(n, author=chr(ord("a") + n)) for n in range(8)]
    heard_ = heard(**{f"h{n}": same for n in range(20)})
    pulls = choose(heard_, 100)
    contents = [group.content for pull in pulls for group in pull.groups]
    assert sorted(contents) == sorted(group.content for group in same)


def test_requests_are_bounded_in_groups_bytes_and_share():
    small = [listed(n, author=chr(ord("a") + n % 20)) for n in range(60)]
    (pull,) = choose(heard(h=small), 40)
    assert len(pull.groups) == limits.PULLED
    large = [listed(n, author=chr(ord("a") + n), size=400_000) for n in range(10)]
    (pull,) = choose(heard(h=large), 10)
    assert sum(group.size for group in pull.groups) <= limits.GROUP_BYTES
    pulls = choose(
        heard(one=small, other=small[:4]),
        8,
        belief=lambda peer: {"one": 1.0, "other": puller.NEW_HOLDER_BELIEF}[peer],
    )
    assert max(len(pull.groups) for pull in pulls) <= 4


def test_relaxed_fetches_use_few_holders():
    offered = {
        f"h{n}": [listed(8 * n + each, author=chr(ord("a") + n % 14)) for each in range(8)]
        for n in range(14)
    }
    belief = lambda peer: 0.25 if peer in ("h0", "h1") else 1.0
    for seed in range(20):
        assert len(choose(heard(**offered), 12, seed, belief=belief)) > puller.FEW_HOLDERS
        few = choose(heard(**offered), 12, seed, belief=belief, few=True)
        assert len(few) == puller.FEW_HOLDERS
        assert sum(len(pull.groups) for pull in few) == 12  # and as many groups
    old = {
        holder: [listed(8 * n + each, author="a", age=600.0) for each in range(8)]
        for n, holder in enumerate(offered)
    }
    fresh = old | {"h7": offered["h7"]}
    asked = [
        {pull.holder for pull in choose(heard(**fresh), 6, seed, few=True)} for seed in range(50)
    ]
    assert sum("h7" in holders for holders in asked) == 50


def test_ranks_by_spread_freshness_trust_and_novelty():
    two = lambda good, bad: [listed(1, author="a", **good), listed(2, author="b", **bad)]
    one = lambda groups, seed, **how: choose(heard(h=groups), 1, seed, **how)[0].groups[0].content
    first = lambda groups, **how: [one(groups, seed, **how) for seed in range(200)].count(
        groups[0].content
    )
    assert first(two({"spread": 0.5}, {"spread": 0.1})) > 150
    assert first(two({}, {"age": 900.0})) > 150
    assert first(two({}, {}), trust=lambda peer: {"a": 1.0, "b": 0.0}[peer]) == 200
    assert choose(heard(h=[listed(1, age=limits.GROUP_AGE_SECONDS + 1)]), 9) == []
    assert choose(heard(h=[listed(1)]), 9, known=[listed(1).content]) == []
    assert choose(heard(h=[listed(1)]), 9, busy=["h"]) == []
    assert choose(heard(h=[listed(1, author="o")]), 9) == []  # our own, come back
    met = heard(h=[listed(n, author="a") for n in range(40)])
    while choose(met, 4):
        pass
    met.take("h", listing(*two({}, {}), position=90), NOW)
    assert [choose(met, 1, 3)[0].groups[0].author[:1]] == [b"b"]


@pytest.mark.parametrize("few", [False, True])
def test_who_lists_more_is_not_asked_for_before_others(few):
    """Fourteen groups of one author, and one of each of thirteen more authors."""
    offered = {"ha": [listed(n, author="a") for n in range(14)]}
    offered |= {
        f"h{name}": [listed(100 + n, author=name)] for n, name in enumerate("bcdefghijklmn")
    }
    chosen = [
        pull.groups[0].author
        for seed in range(700)
        for pull in choose(heard(**offered), 1, seed, few=few)
    ]
    assert 20 < sum(author[:1] == b"a" for author in chosen) < 80, "fifty in the mean"


@pytest.mark.parametrize("few", [True, False])
def test_many_identities_gain_no_requests(few):
    """All are unknown: fourteen authors of one holder, and thirteen holders each with a group of
    its own."""
    liar = {"liar": [listed(n, author=chr(ord("A") + n)) for n in range(14)]}
    single = {f"h{name}": [listed(100 + n, author=name)] for n, name in enumerate("bcdefghijklmn")}
    several = {
        f"h{name}": [listed(200 + 10 * n + i, author=name) for i in range(6)]
        for n, name in enumerate("pqr")
    }
    asked = lambda offered, count: [
        pull.holder
        for seed in range(700)
        for pull in choose(heard(**offered), count, seed, few=few, trust=lambda author: 0.25)
        for _ in pull.groups
    ]
    assert 20 < asked(liar | single, 1).count("liar") < 80, "fifty in the mean"
    if not few:
        assert 0.2 < asked(liar | several, 12).count("liar") / (12 * 700) < 0.3, "three of twelve"


def test_own_groups_of_a_holder_count_as_its_own():
    others = [listed(n, author=chr(ord("A") + n)) for n in range(14)]
    offered = {"h": [listed(99, author="h"), *others], "b": [listed(100, author="b")]}
    chosen = [
        group.content
        for seed in range(300)
        for pull in choose(heard(**offered), 2, seed, trust=lambda author: 0.25)
        for group in pull.groups
    ]
    assert chosen.count(listed(99).content) > 100, (
        "one of the two names that have the holder's place"
    )


def test_who_lists_what_everybody_has_takes_nobody_elses_place():
    """Two liars: one lists the groups of four honest neighbours, the other its own under many
    names."""
    honest = {
        f"h{name}": [listed(10 * n + i, author=f"{name}") for i in range(6)]
        for n, name in enumerate("pqrs")
    }
    everything = [group for groups in honest.values() for group in groups]
    offered = {
        "lister": everything,
        "liar": [listed(900 + n, author=chr(ord("A") + n)) for n in range(20)],
        **honest,
    }
    authors = [
        group.author[:1].decode()
        for seed in range(300)
        for pull in choose(heard(**offered), 12, seed, trust=lambda author: 0.25)
        for group in pull.groups
    ]
    # the liar is one of six names
    assert sum(author in "pqrs" for author in authors) > 0.75 * len(authors)


@pytest.mark.parametrize(
    "lie",
    [{"author": "z"}, {"author": "a", "age": 3000.0}],
    ids=["by a banned author", "made long ago"],
)
def test_false_claims_do_not_replace_other_claims(lie):
    """The liar's listing came first."""
    honest = {"ha": [listed(1, author="a")], "hb": [listed(2, author="b")]}
    trust = lambda author: 0.0 if author == "z" else 1.0
    asked = lambda offered: [
        (pull.holder, group.content)
        for seed in range(300)
        for pull in choose(heard(**offered), 1, seed, trust=trust)
        for group in pull.groups
    ]
    alone = asked(honest).count(("ha", listed(1).content))
    assert alone == pytest.approx(150, abs=30)
    assert asked({"liar": [listed(1, **lie)]} | honest).count(
        ("ha", listed(1).content)
    ) == pytest.approx(alone, abs=30)


def test_requests_a_group_once():
    groups = [listed(n, author=chr(ord("a") + n)) for n in range(12)]
    said = {
        f"liar{i}": [listed(n, author=chr(ord("A") + (n + i) % 20), age=i / 10) for n in range(12)]
        for i in range(3)
    }
    for seed in range(50):
        pulls = choose(heard(**said, h=groups), 12, seed)
        assert sorted(group.content for pull in pulls for group in pull.groups) == [
            group.content for group in groups
        ]


def test_lone_holder_serves_all_unknown_groups():
    (pull,) = choose(
        heard(h=[listed(n, author=chr(ord("a") + n)) for n in range(12)]),
        12,
        trust=lambda author: 0.25,
    )
    assert len(pull.groups) == 12
    pulls = choose(
        heard(h=[listed(n, author="a") for n in range(12)]), 12, trust=lambda author: 0.25
    )
    assert sum(len(pull.groups) for pull in pulls) == 6, "one author has half of a step"


def test_more_listings_do_not_raise_an_authors_weight():
    old = [listed(n, author="a", age=600.0) for n in range(1, 14)]
    both = lambda: heard(ha=[listed(0, author="a"), *old], hb=[listed(99, author="b")])
    first = [choose(both(), 1, seed)[0].groups[0].content for seed in range(400)]
    assert 150 < first.count(listed(0).content) < 250
    assert sum(content in {group.content for group in old} for content in first) < 10


def test_holder_is_asked_in_proportion_to_belief():
    believed, groups = {"liar": 1 / 16, "honest": 1.0}, [listed(1, author="a")]
    asked = [
        choose(heard(liar=groups, honest=groups), 1, seed, belief=believed.__getitem__)[0].holder
        for seed in range(300)
    ]
    assert 0 < asked.count("liar") < 20
    alone = [
        choose(heard(liar=groups), 1, seed, belief=believed.__getitem__) for seed in range(300)
    ]
    assert 50 < sum(map(bool, alone)) < 100  # for want of others no oftener, but it can come back


def test_undrawable_authors_rank_last():
    offered = [listed(n, author="ab"[n % 2]) for n in range(8)]
    chosen = {}
    for kind, worth in (("refused", 0.25 / 16), ("new", 0.25)):
        trust = {"a": worth, "b": 1.0}.__getitem__
        pulls = [
            pull for seed in range(300) for pull in choose(heard(h=offered), 2, seed, trust=trust)
        ]
        chosen[kind] = sum(group.author[:1] == b"a" for pull in pulls for group in pull.groups)
    assert chosen["new"] == 300
    assert 0 < chosen["refused"] < 40  # it can come back


def pulled_among_liars(share, lie, seed, steps=100):
    """(share of hostile groups among those asked for, share of batches of six that honest ones
    filled), in the second half of `steps`, with 16 neighbours. A liar lists as much as can be
    listed, of the highest spread, by authors that nobody has met."""
    rng, believed, positions, number = random.Random(seed), ListingTrust(), {}, 0
    heard_ = Offers(b"o" * 32, lambda key: key.hex())
    liars = {f"h{n}" for n in range(round(16 * share))}
    hostile, honest, asked = 0, [], 0
    for step in range(steps):
        now, got = NOW + 30.0 * step, 0
        for holder in rng.sample([f"h{n}" for n in range(16)], 4):
            groups = []
            for _ in range(64 if holder in liars else 8):
                number += 1
                author = rng.randbytes(32) if holder in liars else holder.encode().ljust(32, b"-")
                groups.append(
                    ListedGroup(
                        number.to_bytes(32, "big"),
                        author,
                        "builtin/copy",
                        int(now * 1000),
                        100,
                        0.5,
                    )
                )
            positions[holder] = positions.get(holder, 0) + len(groups)
            heard_.take(holder, ListingResponse("ok", LIFE, positions[holder], groups), now)
        for pull in heard_.choose(
            12, now, rng, lambda author: 0.5, believed.belief, set().__contains__
        ):
            for _ in pull.groups:
                asked += step >= steps // 2
                if pull.holder in liars:
                    believed.fault(pull.holder, lie)
                    hostile += step >= steps // 2
                else:
                    believed.confirm(pull.holder)
                    got += 1
        honest.append(min(1.0, got / 6))
    return hostile / asked, sum(honest[steps // 2 :]) / (steps - steps // 2)


@pytest.mark.parametrize(("share", "most"), [(0.25, 0.05), (0.5, 0.15)])
@pytest.mark.parametrize("lie", ["content", "absent", "spread"])
def test_honest_groups_fill_the_batch_among_liars(share, most, lie):
    for seed in range(3):
        hostile, filled = pulled_among_liars(share, lie, seed)
        assert hostile < most
        assert filled > 0.95


def test_fetched_group_stays_on_offer_elsewhere():
    same = [listed(1, author="a")]
    heard_ = heard(h=same, other=same)
    (pull,) = choose(heard_, 1)
    assert choose(heard_, 1, asked=[same[0].content]) == []
    (again,) = choose(heard_, 1)
    assert {pull.holder, again.holder} == {"h", "other"}
    assert choose(heard_, 1) == []
    heard_.restore("h", same[0])
    assert choose(heard_, 1, known=[same[0].content]) == []
    assert len(heard_) == 0, "forgotten once it is here"


def test_counts_offered_groups_once_without_busy_holders():
    heard_ = heard(h=[listed(1), listed(2)], other=[listed(2), listed(3)])
    assert len(heard_) == 4
    assert heard_.count(set().__contains__) == 3
    assert heard_.count({listed(3).content}.__contains__) == 2
    assert heard_.count(set().__contains__, busy=["other"]) == 2


def test_cursor_must_advance_within_one_life():
    heard_ = heard(h=[listed(1), listed(2)])
    assert heard_.cursor("h") == (LIFE, 2)
    assert not heard_.take("h", listing(listed(3), position=2), NOW)
    assert not heard_.take("h", listing(position=1), NOW)
    assert heard_.cursor("h") == (LIFE, 2)
    assert len(heard_) == 2, "nothing of a lie is on offer"
    assert heard_.take("h", listing(position=2), NOW), "no news"
    assert heard_.take("h", listing(listed(4), life=b"n" * 8), NOW)
    assert heard_.cursor("h") == (b"n" * 8, 1)
    assert len(heard_) == 1  # what was listed in the other life is not there any more


def test_offers_are_bounded_and_end_with_the_connection():
    heard_ = Offers(b"o" * 32, lambda key: "a")
    for turn in range(10):
        heard_.take(
            "h", listing(*(listed(64 * turn + n) for n in range(64)), position=64 * turn + 64), NOW
        )
    assert len(heard_) == puller.MOST_OFFERED
    for number in range(200):
        heard_.take(str(number), listing(listed(number)), NOW)
    assert len(heard_) == puller.MOST_OFFERING
    heard_.keep(["199"])
    assert len(heard_) == 1
    assert heard_.cursor("198") == (b"", 0), "another connection begins with all groups"


# -- puller


def test_the_next_draw_is_predicted_from_the_steps_before():
    timer = PullTimer()
    assert timer.opens_at == -float("inf")
    for step in range(20):
        assert timer.drew(step, 100.0 * step)
    assert timer.opens_at == pytest.approx(1900 + 75), "a quarter of a step before"
    short = PullTimer()
    for step in range(20):
        short.drew(step, 8.0 * step)
    assert short.opens_at == pytest.approx(19 * 8 + 3), "five seconds before"


def test_second_draw_of_a_step_is_no_step():
    timer = PullTimer()
    for step in range(20):
        assert timer.drew(step, 100.0 * step)
        assert not timer.drew(step, 100.0 * step + 10)
    assert timer.opens_at == pytest.approx(1900 + 75)


def test_a_trainer_that_was_paused_has_not_become_slow():
    timer = PullTimer()
    for step, at in enumerate((0.0, 40.0, 10_000.0)):
        timer.drew(step, at)
    assert timer.opens_at < 10_000.0 + 60.0


class World:
    """A puller, and a clock that is set by hand. now: seconds; Unix time is NOW + now."""

    def __init__(self, peers=(), seed=0):
        self.puller = Puller(OWN_KEY, lambda key: key[:1].decode(), random.Random(seed), now=0.0)
        self.now, self.peers, self.known = 0.0, list(peers), set()
        self.positions = {}

    def polls(self):
        return self.puller.polls_due(self.peers, self.now, self.known.__contains__)

    def fetches(self):
        return self.puller.fetches_due(
            self.now, NOW + self.now, lambda author: 1.0, self.known.__contains__
        )

    def list(self, peer, *groups):
        """Answer the poll of `peer`."""
        self.positions[peer] = self.positions.get(peer, 0) + len(groups)
        answer = listing(*groups, position=self.positions[peer])
        self.puller.polled(peer, answer, self.now, NOW + self.now)

    def give(self, pull, outcome="ok", rewards=(0.0, 1.0)):
        """Answer a fetch."""
        self.puller.fetched(pull, [outcome] * len(pull.groups), self.now)
        for group in pull.groups if outcome == "ok" else ():
            self.known.add(group.content)
            self.puller.scored(group.content, list(rewards), self.now)

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
    for useful in (False, True):
        before = world.puller.wanted(world.now)
        world.polls()
        groups = [listed(50 * useful + n, chr(97 + n), spread=useful / 2) for n in range(4)]
        world.list("filler", *groups)
        for pull in world.fetches():
            world.give(pull, rewards=(0.0, float(useful)))
        assert world.puller.wanted(world.now) == before - 4 * useful
        world.now += 2.0


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


def test_plenty_on_offer_stops_further_polls():
    world = World([str(n) for n in range(10)])
    world.puller.drew(2, 0, 0, 0.0)
    polled = world.polls()
    world.list(polled[0], *(listed(n, chr(97 + n)) for n in range(14)))
    for peer in polled[1:]:
        world.list(peer)
    world.now += puller.PLENTY_POLL_SECONDS - 0.1
    assert world.polls() == []
    world.now += 0.1
    assert len(world.polls()) == 1


def test_peers_whose_listings_were_true_are_polled_most():
    world = World([str(n) for n in range(40)])
    for _ in range(8):
        world.puller.claims.confirm("7")
    chosen = 0
    for _ in range(200):
        polled = world.polls()
        chosen += "7" in polled
        for peer in polled:
            world.puller.polled(peer, listing(position=0), world.now, NOW)
        world.now += 2.0
    assert chosen / 200 == pytest.approx(0.5, abs=0.15)  # a new peer: 0.2


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (None, puller.FAILED_SECONDS),
        ("busy", puller.BUSY_SECONDS),
        ("unknown", puller.REFUSED_SECONDS),
    ],
)
def test_a_peer_without_a_listing_is_polled_again_later(answer, seconds):
    world = World(["h"])
    assert world.polls() == ["h"]
    given = answer and ListingResponse(answer, LIFE, 0, [])
    assert world.puller.polled("h", given, world.now, NOW)
    assert world.puller.claims.statistics().faults == ({} if answer else {"slow": 1})
    world.now += seconds - 0.1
    assert world.polls() == []
    assert world.puller.next_time(world.now) == pytest.approx(world.now + 0.1)
    world.now += 0.1
    assert world.polls() == ["h"]


def test_refused_polls_back_off():
    world, waits = World(["h"]), []
    for _ in range(12):
        began = world.now
        while not world.polls():
            world.now += 1.0
        waits.append(world.now - began)
        world.puller.refused("h", world.now)
    assert waits == [0, *(2**n for n in range(10)), 600]
    assert world.puller.claims.statistics().faults == {}
    world.now += 600.0
    world.polls()
    world.list("h")
    world.now += 1.0
    assert world.polls() == ["h"], "it lists now"


def test_a_dishonest_cursor_costs_belief():
    world = World(["h"])
    world.polls()
    world.list("h", listed(1))
    world.now += 1.0
    world.polls()
    back = listing(position=0)
    assert not world.puller.polled("h", back, world.now, NOW)
    assert world.puller.claims.statistics().faults == {"cursor": 1}


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
    assert world.fetches()[0].groups == pull.groups


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


def test_few_fetches_are_under_way_at_a_time():
    world = World([str(n) for n in range(8)])
    polled = world.polls()
    for number, peer in enumerate(polled):
        world.list(peer, listed(number, chr(97 + number)))
        world.fetches()
    assert len(world.puller._fetches) == puller.MOST_FETCHES


def test_what_is_remembered_of_peers_is_bounded():
    world = World()
    for number in range(2 * puller.MOST_PEERS):
        world.puller.refused(str(number), 0.0)
    assert len(world.puller._rests) == puller.MOST_PEERS
