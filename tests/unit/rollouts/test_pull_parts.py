"""Catalogue, claims, offers, asking and mode: the pure parts of listings and pulls."""

import random

import msgspec
import pytest

from swarmnode.rollouts import asking, catalogue, claims, mode, offers
from swarmnode.rollouts.asking import Asking, Moments
from swarmnode.rollouts.catalogue import Allowances, Catalogue
from swarmnode.rollouts.claims import Claims
from swarmnode.rollouts.mode import Measured, Phase, advance, begin
from swarmnode.rollouts.offers import Offers
from swarmnode.wire import limits
from swarmnode.wire.listings import GroupsRequest, Listed, ListingRequest, ListingResponse

SWARM, LIFE, NOW = b"s" * 32, b"l" * 8, 1_800_000_000.0


def listed(number, author="a", *, size=100, age=0.0, spread=0.5):
    return Listed(
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
    kept = Catalogue(OWN_KEY, SWARM, LIFE, **bounds)
    for number in range(count):
        kept.put(bytes(size), listed(number, size=size))
    return kept


def ask(position=0, life=LIFE, swarm=SWARM):
    return ListingRequest(swarm, life if position else b"", position)


# -- catalogue


def test_a_listing_is_the_newest_and_a_cursor_of_this_life_leaves_out_what_is_known():
    kept = filled(100)
    first = kept.listing(ask(), NOW)
    assert [group.content for group in first.groups] == [listed(n).content for n in range(86, 100)]
    assert kept.listing(ask(first.position), NOW).groups == []
    kept.put(b"new", listed(100))
    assert [group.content for group in kept.listing(ask(first.position), NOW).groups] == [
        listed(100).content
    ]


@pytest.mark.parametrize(("position", "life"), [(100, b"x" * 8), (101, LIFE), (2**63 - 1, LIFE)])
def test_a_cursor_of_another_life_or_of_the_future_begins_anew(position, life):
    assert len(filled(100).listing(ask(position, life), NOW).groups) == limits.NEWEST


def test_another_swarm_is_told_nothing():
    answer = filled(3).listing(ask(swarm=b"o" * 32), NOW)
    assert (answer.status, answer.groups) == ("unknown", [])


def test_a_catalogue_is_bounded_by_groups_bytes_and_age():
    kept = filled(300, groups=256)
    assert kept.statistics().groups == 256
    assert filled(300, size=2**20).statistics().bytes <= catalogue.MOST_BYTES
    later = NOW + catalogue.LISTED_SECONDS + 1
    assert kept.listing(ask(), later).groups == []
    assert kept.statistics() == catalogue.CatalogueStatistics(0, 0)


@pytest.mark.parametrize("names", [1, 10**6], ids=["one name", "a name for each group"])
@pytest.mark.parametrize("others", [14, 256, 1000])
def test_no_author_hides_what_a_node_made_itself_nor_others(others, names):
    kept, own, other = (
        Catalogue(OWN_KEY, SWARM, LIFE),
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
    assert [group for group in answer.groups if group.author == OWN_KEY] == own[
        -catalogue.OWN_LISTED :
    ]
    assert (len(answer.groups), answer.position) == (limits.NEWEST, 9 + others)
    assert {
        group.status
        for group in kept.give(GroupsRequest([group.content for group in own]), NOW).groups
    } == {"ok"}
    assert other in answer.groups or names > 1


def test_a_listing_has_one_group_of_each_author_before_any_has_two_and_the_newest_of_each():
    kept = Catalogue(OWN_KEY, SWARM, LIFE)
    for number, author in enumerate("obcd" + "o" * 10 + "a" * 20):
        kept.put(bytes(100), listed(number, author=author))
    numbers = [int.from_bytes(group.content, "big") for group in kept.listing(ask(), NOW).groups]
    assert numbers == [1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 30, 31, 32, 33]
    assert kept.listing(ask(34), NOW).groups == []


def test_a_node_that_makes_more_than_it_lists_keeps_half_for_what_others_made():
    kept = Catalogue(OWN_KEY, SWARM, LIFE)
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


def test_a_peer_that_only_takes_gets_a_quarter_of_the_allowance():
    allowances, served = Allowances(), {"taker": 0, "member": 0}
    for now in [tenth / 10 for tenth in range(6000)]:
        for peer in served:
            if allowances.has_room(peer, now):
                allowances.charge(peer, 2**17, peer == "member", now)
                served[peer] += 1
    assert 3.0 < served["member"] / served["taker"] < 5.0
    assert served["member"] * 2**17 < 1.3 * catalogue.PEER_BYTES_PER_SECOND * 600
    for number in range(2 * catalogue.MOST_PEERS):
        allowances.has_room(str(number), 0.0)
    assert len(allowances) == catalogue.MOST_PEERS


# -- claims


def test_lies_cost_belief_and_kept_claims_give_it_back():
    believed = Claims()
    assert believed.belief("new") == claims.NEWCOMER
    for _ in range(claims.PROVING_GROUPS):
        believed.keep("good")
    assert believed.belief("good") == 1.0
    believed.lie("good", "spread")
    assert believed.belief("good") == 0.5
    for _ in range(8):
        believed.keep("good")
    assert believed.belief("good") == 1.0
    for _ in range(1000):
        believed.lie("liar", "content")
    assert believed.credit("liar") == 0.5**claims.DEEPEST > 0
    assert believed.statistics().lies == {"content": 1000, "spread": 1}


def test_holders_that_are_remembered_are_bounded():
    believed = Claims()
    for number in range(2 * claims.MOST_HOLDERS):
        believed.lie(str(number), "absent")
    assert believed.statistics().holders == claims.MOST_HOLDERS


# -- offers


def heard(**listings):
    heard = Offers(b"o" * 32, lambda key: key[:1].decode())
    for holder, groups in listings.items():
        assert heard.take(holder, listing(*groups), NOW) is not None
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
    few=False,
):
    return heard.choose(
        count, NOW, random.Random(seed), trust, belief, set(known).__contains__, busy, few=few
    )


def test_the_same_group_under_many_holders_is_asked_for_once():
    same = [listed(n, author=chr(ord("a") + n)) for n in range(8)]
    heard_ = heard(**{f"h{n}": same for n in range(20)})
    pulls = choose(heard_, 100)
    contents = [group.content for pull in pulls for group in pull.groups]
    assert sorted(contents) == sorted(group.content for group in same)
    assert heard_.take("late", listing(*same), NOW) == 0  # nothing that nobody listed before


def test_a_request_has_at_most_sixteen_groups_and_a_mebibyte_and_a_holder_half_of_a_step():
    small = [listed(n, author=chr(ord("a") + n % 20)) for n in range(60)]
    (pull,) = choose(heard(h=small), 40)
    assert len(pull.groups) == limits.PULLED
    large = [listed(n, author=chr(ord("a") + n), size=400_000) for n in range(10)]
    (pull,) = choose(heard(h=large), 10)
    assert sum(group.size for group in pull.groups) <= limits.GROUP_BYTES
    pulls = choose(
        heard(one=small, other=small[:4]),
        8,
        belief=lambda peer: {"one": 1.0, "other": offers.BELIEVED}[peer],
    )
    assert max(len(pull.groups) for pull in pulls) <= 4


def test_where_nothing_is_urgent_few_holders_are_asked_and_those_the_more_that_offer_more():
    offered = {
        f"h{n}": [listed(8 * n + each, author=chr(ord("a") + n % 14)) for each in range(8)]
        for n in range(14)
    }
    belief = lambda peer: 0.25 if peer in ("h0", "h1") else 1.0
    for seed in range(20):
        assert len(choose(heard(**offered), 12, seed, belief=belief)) > offers.FEW_HOLDERS
        few = choose(heard(**offered), 12, seed, belief=belief, few=True)
        assert len(few) == offers.FEW_HOLDERS
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


def test_spread_freshness_trust_and_novelty_decide_and_what_is_known_or_late_is_left_out():
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
    """Fourteen groups of one author, and one of each of thirteen others."""
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
def test_who_lists_under_many_names_is_asked_for_as_who_lists_under_one(few):
    """Nobody knows anybody: fourteen authors of one holder, and thirteen holders each with a group
    of its own."""
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


def test_what_a_holder_made_goes_by_its_own_name_whatever_else_it_lists():
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
    """Two liars: one lists all that four honest neighbours have, the other what it has made under
    many names."""
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
def test_what_a_liar_says_of_a_group_stands_beside_what_others_say_and_not_in_its_place(lie):
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


def test_a_group_is_asked_for_once_whatever_is_said_of_it_and_its_other_places_go_to_others():
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


def test_one_holder_alone_is_asked_for_all_that_nobody_knows():
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


def test_the_best_of_an_author_is_as_welcome_whatever_else_it_lists():
    old = [listed(n, author="a", age=600.0) for n in range(1, 14)]
    both = lambda: heard(ha=[listed(0, author="a"), *old], hb=[listed(99, author="b")])
    first = [choose(both(), 1, seed)[0].groups[0].content for seed in range(400)]
    assert 150 < first.count(listed(0).content) < 250
    assert sum(content in {group.content for group in old} for content in first) < 10


def test_a_liar_is_asked_as_rarely_as_it_is_believed():
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


def test_authors_whose_groups_no_draw_would_take_have_no_place_before_others_second_group():
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
    rng, believed, positions, number = random.Random(seed), Claims(), {}, 0
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
                    Listed(
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
                    believed.lie(pull.holder, lie)
                    hostile += step >= steps // 2
                else:
                    believed.keep(pull.holder)
                    got += 1
        honest.append(min(1.0, got / 6))
    return hostile / asked, sum(honest[steps // 2 :]) / (steps - steps // 2)


@pytest.mark.parametrize(("share", "most"), [(0.25, 0.05), (0.5, 0.15)])
@pytest.mark.parametrize("lie", ["content", "absent", "spread"])
def test_among_many_liars_few_of_their_groups_are_asked_for_and_honest_ones_fill_the_batch(
    share, most, lie
):
    for seed in range(3):
        hostile, filled = pulled_among_liars(share, lie, seed)
        assert hostile < most
        assert filled > 0.95


def test_a_cursor_that_goes_back_or_does_not_move_is_a_lie_and_another_life_is_none():
    heard_ = heard(h=[listed(1), listed(2)])
    assert heard_.cursor("h") == (LIFE, 2)
    assert heard_.take("h", listing(listed(3), position=2), NOW) is None
    assert heard_.take("h", listing(position=1), NOW) is None
    assert heard_.cursor("h") == (LIFE, 2)
    assert heard_.take("h", listing(listed(4), life=b"n" * 8), NOW) == 1
    assert heard_.cursor("h") == (b"n" * 8, 1)
    assert len(heard_) == 1  # what was listed in the other life is not there any more


def test_what_a_listing_leaves_out_counts_like_what_it_names():
    heard_, shelf = Offers(b"o" * 32, lambda key: "a"), [listed(n) for n in range(36)]
    assert heard_.take("h", listing(*shelf[:24], position=40), NOW) == 40
    assert heard_.take("same", listing(*shelf[:24], position=40), NOW) == 0
    assert heard_.take("half", listing(*shelf[12:36], position=48), NOW) == 24
    assert heard_.take("boasts", listing(listed(99), position=10**6), NOW) == limits.LISTED


def test_offers_are_bounded_in_holders_and_groups_and_gone_with_the_connection():
    heard_ = Offers(b"o" * 32, lambda key: "a")
    for turn in range(10):
        heard_.take(
            "h", listing(*(listed(64 * turn + n) for n in range(64)), position=64 * turn + 64), NOW
        )
    assert len(heard_) == offers.MOST_OFFERED
    for number in range(200):
        heard_.take(str(number), listing(listed(number)), NOW)
    assert len(heard_) == offers.MOST_HOLDERS
    heard_.keep(["199"])
    assert len(heard_) == 1


# -- asking


def test_a_draw_asks_a_few_peers_each_in_its_turn():
    whom, peers, asked = Asking(), [str(n) for n in range(10)], []
    assert whom.next(peers, 0.0, random.Random(0)) == []  # nobody draws
    for second in range(5):
        whom.allow()
        now = whom.next(peers, float(second), random.Random(second))
        asked += now
        for peer in now:
            whom.done(peer, float(second))
    assert sorted(asked) == peers  # each once in PAUSE_SECONDS
    assert whom.listers(peers) == 10
    assert whom.listers(["0", "x"]) == 1


def test_a_node_asks_shortly_before_the_next_draw_and_at_once_where_it_lacks_that_step():
    moments = Moments()
    assert moments.next == float("inf")  # nobody draws
    for step in range(20):
        moments.drew(100.0 * step, urgent=False)
        assert not step or moments.next == pytest.approx(100.0 * step + 75)
    assert not moments.come(1974.0)
    assert moments.come(1975.0)
    assert moments.next == float("inf")
    moments.drew(2000.0, urgent=True)
    assert moments.come(2000.0)
    assert moments.next == pytest.approx(2075.0)


def test_a_node_asks_at_once_when_steps_are_short():
    moments = Moments()
    moments.drew(0.0, urgent=True)
    assert [moments.come(second) for second in (0.0, 9.0, 11.0, 12.0, 50.0, 1e4)] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    moments.drew(4.0, urgent=False)
    assert moments.come(4.0)
    assert moments.next == float("inf")


def test_a_trainer_that_stood_still_has_not_become_slow():
    moments = Moments()
    for draw in (0.0, 40.0, 10_000.0):
        moments.drew(draw, urgent=False)
    assert moments.next < 10_000.0 + 60.0


def test_one_peer_is_asked_where_there_is_enough():
    whom, peers = Asking(), [str(n) for n in range(10)]
    whom.allow(plenty=True)
    (one,) = whom.next(peers, 0.0, random.Random(0))
    assert whom.waits
    whom.done(one, 0.0)
    assert not whom.waits
    whom.allow(plenty=True, urgent=True)
    (another,) = whom.next(peers, 0.0, random.Random(0))
    assert another != one
    whom.done(another, 0.0)
    whom.allow()
    assert len(whom.next(peers, 1.0, random.Random(0))) == asking.AT_ONCE


def test_where_the_next_step_is_missing_and_little_is_on_offer_all_are_asked():
    whom, peers, asked = Asking(), [str(n) for n in range(40)], []
    whom.allow(urgent=True)
    while some := whom.next(peers, 0.0, random.Random(0)):
        assert len(some) <= asking.AT_ONCE
        asked += some
        for peer in some:
            whom.done(peer, 0.0)
    assert len(asked) == len(set(asked)) == asking.WHERE_SHORT


def test_a_peer_is_mute_once_it_has_said_that_it_does_not_list():
    whom = Asking()
    for peer, lists in (("lists", True), ("late", None), ("mute", False)):
        whom.done(peer, 0.0, lists=lists)
    assert whom.mutes(["lists", "late", "mute", "unknown"]) == 1
    whom.done("mute", 1.0, lists=None)
    assert whom.mutes(["mute"]) == 1  # a time-out tells nothing new
    whom.done("mute", 2.0, lists=True)
    assert whom.mutes(["mute"]) == 0


def test_a_peer_that_does_not_list_is_replaced_and_left_alone():
    whom, peers = Asking(), [str(n) for n in range(10)]
    whom.allow()
    silent = whom.next(peers, 0.0, random.Random(0))
    assert len(silent) == asking.AT_ONCE
    assert whom.next(peers, 0.0, random.Random(0)) == []
    for peer in silent:
        whom.done(peer, 0.0, lists=False)
    assert not set(whom.next(peers, 0.0, random.Random(0))) & set(silent)
    whom.allow()
    assert not set(whom.next(silent, asking.SILENT_SECONDS - 1, random.Random(0)))
    assert whom.listers(peers) == 0


# -- mode


def live(state, seconds, **per_step):
    """`state` after steps of ten seconds with these counts each."""
    phases = [state.phase]
    for _ in range(int(seconds / 10)):
        state = advance(state, Measured(state.at + 10.0, **per_step))
        phases += [state.phase] if state.phase is not phases[-1] else []
    return state, phases


STEP = {"wanted": 6.0, "listers": 8}


def test_a_flooded_node_tries_listings_and_then_leaves_the_topic_for_them():
    state, phases = live(
        begin(Phase.GOSSIP, 0.0), 1200, arrived=90.0, listed=60.0, gained=6.0, **STEP
    )
    assert phases == [Phase.GOSSIP, Phase.TRIAL, Phase.PULL]
    assert state.switches == 1


def test_between_the_two_factors_nobody_moves():
    """Nine groups for each that is used: too few to leave for, too many to come back for."""
    assert live(begin(Phase.GOSSIP, 0.0), 7200, arrived=54.0, listed=54.0, gained=6.0, **STEP)[
        1
    ] == [Phase.GOSSIP]
    assert live(begin(Phase.PULL, 0.0), 7200, arrived=54.0, listed=54.0, gained=6.0, **STEP)[1] == [
        Phase.PULL
    ]


def test_a_swarm_that_shrinks_comes_back_to_gossip():
    assert live(begin(Phase.PULL, 0.0), 1200, listed=15.0, gained=6.0, **STEP)[1] == [
        Phase.PULL,
        Phase.GOSSIP,
    ]


def test_a_swarm_that_was_just_large_enough_is_not_left_again_for_listings_that_name_the_same():
    assert live(begin(Phase.PULL, 0.0), 3600, listed=24.0, gained=6.0, **STEP)[1] == [Phase.PULL]


def test_listings_that_bring_nothing_hold_nobody():
    """Liars list without end, and little of it comes."""
    assert live(begin(Phase.PULL, 0.0), 1200, listed=600.0, gained=2.0, **STEP)[1] == [
        Phase.PULL,
        Phase.GOSSIP,
    ]


@pytest.mark.parametrize(("listed", "listers"), [(30.0, 8), (600.0, 1)])
def test_nobody_leaves_for_too_little_or_for_one_peer_and_does_not_try_again_soon(listed, listers):
    _, phases = live(
        begin(Phase.GOSSIP, 0.0),
        1500,
        arrived=600.0,
        listed=listed,
        gained=6.0,
        wanted=6.0,
        listers=listers,
    )
    assert phases == [Phase.GOSSIP, Phase.TRIAL, Phase.GOSSIP]


def test_an_idle_trainer_says_nothing_about_the_topic():
    assert live(begin(Phase.GOSSIP, 0.0), 7200, arrived=900.0)[1] == [Phase.GOSSIP]
    assert live(begin(Phase.PULL, 0.0), 7200)[1] == [Phase.PULL]


def test_at_the_threshold_a_noisy_swarm_moves_seldom():
    """Whatever arrives between nothing and twice the threshold, a phase lasts, and a trial is made
    twice an hour at most."""
    rng, state = random.Random(0), begin(Phase.GOSSIP, 0.0)
    for _ in range(24 * 360):
        noise = rng.uniform(0.0, 2.0)
        state = advance(
            state,
            Measured(state.at + 10.0, arrived=noise * 72, listed=noise * 36, gained=6.0, **STEP),
        )
    assert state.switches <= 2 * 24


def test_what_is_set_is_not_decided():
    for choice, phase in (("gossip", Phase.GOSSIP), ("pull", Phase.PULL)):
        chosen = mode.Mode(choice, 0.0)
        for second in range(0, 7200, 10):
            chosen.note("arrived", 900.0)
            chosen.note("wanted", 6.0)
            chosen.look(float(second), listers=8)
        assert chosen.phase is phase
        assert chosen.state.arrived / chosen.state.wanted == pytest.approx(150.0)


def test_a_pulling_node_bounds_what_it_takes_by_gossip():
    chosen, listened, arrived = mode.Mode("pull", 0.0), 0, 0.0
    for second in range(6000):
        chosen.note("wanted", 0.6)
        if chosen.phase is Phase.VISIT:
            listened += 1
            arrived += 20.0
            chosen.note("arrived", 20.0)
        chosen.look(float(second), listers=8, mutes=1)
    assert 0 < listened < 600
    assert 0.5 < arrived / (0.6 * 6000) < 2.5
    chosen.look(6001.0, listers=8, mutes=0)
    assert chosen.phase is Phase.PULL


def test_where_little_is_gossiped_a_visit_does_not_end_and_is_no_reason_to_return_to_gossip():
    state = advance(begin(Phase.PULL, 0.0), Measured(0.0, **STEP, mutes=1))
    state, phases = live(state, 3600, **STEP, mutes=1, listed=60.0, arrived=6.0)
    assert phases == [Phase.VISIT]
    assert live(state, 60, **STEP, listed=60.0, gained=6.0)[1] == [Phase.VISIT, Phase.PULL]
