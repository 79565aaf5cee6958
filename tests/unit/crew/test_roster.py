"""One record per epoch whoever proposes, votes that survive a restart or do not count, chains that hold, a lease that ends."""

import hashlib
import random

import msgspec
import pytest

from swarmnode.crew import events as ev
from swarmnode.crew import messages as m
from swarmnode.crew.roster import LEAP, Acceptor, Founding, Lease, Proposal, next_ballot, remembered_incarnation
from swarmnode.crew.succession import Proposing, Wish
from swarmnode.errors import BadMessage

NAMES = ("a", "b", "c", "d")


def sign_as(peer):
    return lambda data: hashlib.blake2b(data, key=peer.encode(), digest_size=64).digest()


def verify(peer, data, signature):
    return sign_as(peer)(data) == signature


def voter(name, life=1):
    return m.Voter(name, bytes([life]) * m.INCARNATION_BYTES)


def founding(names=NAMES, witnesses=()):
    seats = tuple(m.Seat(name, voter(name).incarnation, 1) for name in names)
    record = m.Record(m.NO_CREW, 1, m.NO_HASH, bytes(32), (1,) * len(names), seats, witnesses, (), 0, 30, bytes(8))
    return msgspec.structs.replace(record, voters=m.voters_of(record))


def crew(names=NAMES, witnesses=()):
    """Acceptors by name, all at the founding record."""
    record = founding(names, witnesses)
    acceptors = {v.peer: Acceptor(v, sign_as(v.peer), verify) for v in record.voters}
    votes = Founding(record)
    certificates = [votes.voted(name, acceptor.sign_founding(record), verify) for name, acceptor in acceptors.items()]
    assert certificates[:-1] == [None] * (len(acceptors) - 1)  # all have to sign
    for acceptor in acceptors.values():
        acceptor.learn(acceptor.check_chain((certificates[-1],)))
    return acceptors


def successor(record, **changes):
    values = {
        "crew": m.crew_id(record), "epoch": record.epoch + 1, "previous": m.record_hash(record), "voters": m.voters_of(record), **changes
    }  # fmt: skip
    return msgspec.structs.replace(record, **values)


def without(record, name):
    seats = tuple(m.Seat("", b"", s.stage_epoch) if s.peer == name else s for s in record.seats)
    return successor(record, seats=seats)


def ballot(acceptors, proposer, voters, wish, number=None):
    """Whole ballot among those who hear it; the certificate, or None."""
    record = acceptors[proposer].record
    number = number or next_ballot(acceptors[proposer].promised, m.voters_of(record).index(acceptors[proposer].me))
    proposal = Proposal(record, number, (), 1.0)
    for name in voters:
        answer = acceptors[name].prepare(proposal.prepare)
        if isinstance(answer, m.Promise) and proposal.promised(name, answer):
            break
    else:
        return None
    propose = proposal.choose(wish)
    certificate = None
    for name in voters:
        vote = acceptors[name].propose(propose)
        if isinstance(vote, m.Vote):
            certificate = proposal.voted(name, vote, verify) or certificate
    return certificate


def test_a_majority_makes_the_next_record_and_a_minority_none():
    acceptors = crew()
    wish = without(acceptors["a"].record, "d")
    assert ballot(acceptors, "a", "ab", wish) is None
    certificate = ballot(acceptors, "a", "abc", wish)
    m.check_certificate(certificate, verify)
    for name in "abcd":
        acceptors[name].learn(acceptors[name].check_chain((certificate,)))
    assert not acceptors["d"].is_voter
    assert ballot(acceptors, "a", "ab", without(acceptors["a"].record, "c")) is not None  # two of the three that are left


def test_what_may_have_been_decided_is_proposed_again_instead_of_the_wish():
    acceptors = crew()
    first, other = without(acceptors["a"].record, "d"), without(acceptors["a"].record, "a")
    assert ballot(acceptors, "a", "abc", first) is not None  # decided, and nobody hears of it
    certificate = ballot(acceptors, "b", "bcd", other)
    assert certificate.record == first


def test_two_proposers_never_get_two_records():
    for seed in range(300):
        rng = random.Random(seed)
        acceptors, decided = crew(), {}
        for _ in range(6):
            proposer = rng.choice("abcd")
            heard = [name for name in "abcd" if name == proposer or rng.random() < 0.7]
            rng.shuffle(heard)
            certificate = ballot(acceptors, proposer, heard, without(acceptors[proposer].record, rng.choice("abcd")))
            if certificate is not None:
                decided[m.record_hash(certificate.record)] = certificate
        assert len(decided) <= 1


def test_a_voter_remembers_its_vote_over_a_restart_or_is_another_voter():
    acceptors = crew()
    first = without(acceptors["a"].record, "d")
    assert ballot(acceptors, "a", "abc", first) is not None
    memory = acceptors["c"].memory()
    again = Acceptor(m.Voter("c", remembered_incarnation(memory)), sign_as("c"), verify)
    again.remember(memory)
    assert (again.accepted, again.promised, again.crew) == (first, acceptors["c"].promised, acceptors["c"].crew)
    acceptors["c"] = again
    assert ballot(acceptors, "b", "bcd", without(again.record, "a")).record == first

    fresh = Acceptor(voter("c", life=2), sign_as("c"), verify)
    fresh.learn(fresh.check_chain(acceptors["a"].chain))
    assert isinstance(fresh.prepare(m.Prepare(fresh.crew, 2, m.record_hash(fresh.record), 99)), m.Refuse)
    other = Acceptor(voter("c", life=2), sign_as("c"), verify)
    other.remember(memory)
    assert (other.record, other.accepted) == (None, None)
    assert remembered_incarnation(b"") is None
    assert remembered_incarnation(memory[:-5]) is None


def test_every_start_with_the_same_memory_has_a_higher_number():
    first = Acceptor(voter("a"), sign_as("a"), verify)
    again = Acceptor(voter("a"), sign_as("a"), verify)
    assert first.begin() == 1
    again.remember(first.memory())
    assert again.begin() == 2


def test_whoever_leaves_a_crew_is_another_voter_when_it_comes_back():
    acceptor = crew()["a"]
    acceptor.forget(b"another!")
    assert acceptor.me == m.Voter("a", b"another!")
    assert acceptor.record is None


def test_refusals():
    acceptors = crew()
    a = acceptors["a"]
    prepare = m.Prepare(a.crew, 2, m.record_hash(a.record), 33)
    assert isinstance(a.prepare(prepare), m.Promise)
    assert isinstance(a.prepare(prepare), m.Promise)  # heard twice
    assert a.prepare(msgspec.structs.replace(prepare, ballot=17)) == m.Refuse("ballot", 33)
    assert a.prepare(msgspec.structs.replace(prepare, crew=bytes(32))).reason == "unknown"
    assert a.prepare(msgspec.structs.replace(prepare, epoch=4)).reason == "epoch"
    assert a.prepare(msgspec.structs.replace(prepare, previous=bytes(32))).reason == "epoch"
    assert isinstance(a.prepare(msgspec.structs.replace(prepare, epoch=1)), m.Adopt)
    wrong = successor(a.record, layers=(2, 1, 1, 1))
    assert a.propose(m.Propose(wrong, 40)).reason == "record"
    right = without(a.record, "d")
    assert isinstance(a.propose(m.Propose(right, 40)), m.Vote)
    assert a.propose(m.Propose(without(a.record, "c"), 40)).reason == "ballot"  # one record per ballot


def test_promises_count_once_for_voters_of_this_ballot_and_only_until_a_majority():
    acceptors = crew()
    record, replace = acceptors["a"].record, msgspec.structs.replace
    proposal = Proposal(record, 16, (), 1.0)
    promises = {name: acceptors[name].prepare(proposal.prepare) for name in "abcd"}
    assert not any(proposal.promised(name, promises[name]) for name in "ab")
    for wrong in ({"ballot": 17}, {"epoch": 3}, {"crew": bytes(32)}):
        assert not proposal.promised("c", replace(promises["c"], **wrong))
    assert not proposal.promised("stranger", promises["c"])
    assert not proposal.promised("a", promises["a"])
    assert proposal.promised("c", promises["c"])
    assert proposal.choose(without(record, "d")) is not None
    assert not any(proposal.promised(name, promises[name]) for name in "cd")  # what was chosen stays


def test_a_vote_counts_once_and_only_of_the_voter_that_the_record_names():
    acceptors = crew("abc")
    record = acceptors["a"].record
    proposal = Proposal(record, 16, (), 1.0)
    assert [proposal.promised(name, acceptors[name].prepare(proposal.prepare)) for name in "ab"] == [False, True]
    propose = proposal.choose(without(record, "c"))
    votes = {name: acceptors[name].propose(propose) for name in "abc"}
    fresh = Acceptor(voter("b", life=2), sign_as("b"), verify)._vote(propose.record, 16)  # it has forgotten what it voted for
    assert proposal.voted("a", votes["a"], verify) is None
    assert proposal.voted("a", votes["a"], verify) is None
    assert proposal.voted("b", fresh, verify) is None
    assert proposal.voted("b", votes["b"], verify) is not None
    assert proposal.voted("c", votes["c"], verify) is None  # it was decided before

    founding_votes = Founding(record)
    signed = {name: Acceptor(voter(name), sign_as(name), verify).sign_founding(record) for name in "abc"}
    assert [founding_votes.voted(name, signed[name], verify) is None for name in "aabcc"] == [True, True, True, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 3}, {"previous": bytes(32)}, {"model": b"x" * 32}, {"layers": (1, 1, 1, 2)}, {"lease_seconds": 31}, {"nonce": b"x" * 8},
        {"voters": ()}, {"crew": bytes(32)},
        {"seats": tuple(m.Seat(n, voter(n).incarnation, 3) for n in NAMES)},  # an epoch skipped
        # a new holder, the old epoch
        {"seats": (m.Seat("x", voter("x").incarnation, 1), *(m.Seat(n, voter(n).incarnation, 1) for n in "bcd"))},
    ],
)  # fmt: skip
def test_what_is_no_lawful_successor(changes):
    record = founding()
    m.check_successor(record, successor(record))
    with pytest.raises(BadMessage):
        m.check_successor(record, successor(record, **changes))
    ended = successor(record, dissolved="over")
    m.check_successor(record, ended)
    with pytest.raises(BadMessage):
        m.check_successor(ended, successor(ended))


def test_certificates_need_enough_true_votes_of_voters():
    acceptors = crew()
    certificate = ballot(acceptors, "a", "abc", without(acceptors["a"].record, "d"))
    replace = msgspec.structs.replace
    forged = replace(certificate.votes[0], signature=bytes(64))
    for votes in (certificate.votes[:2], (forged, *certificate.votes[1:]), certificate.votes[:1] * 3):
        with pytest.raises(BadMessage):
            m.check_certificate(replace(certificate, votes=votes), verify)
    with pytest.raises(BadMessage):
        m.check_certificate(replace(certificate, ballot=certificate.ballot + 1), verify)
    other_life = replace(certificate.votes[0], incarnation=voter("a", 2).incarnation)
    with pytest.raises(BadMessage):
        m.check_certificate(replace(certificate, votes=(other_life, *certificate.votes[1:])), verify)


def test_a_chain_brings_who_was_away_up_to_date_and_a_gap_does_not():
    acceptors = crew()
    late = acceptors["d"]
    for gone in "dc":
        certificate = ballot(acceptors, "a", "abc", without(acceptors["a"].record, gone))
        for name in "abc":
            acceptors[name].learn(acceptors[name].check_chain((certificate,)))
    newer = acceptors["a"].newer_than(1)
    with pytest.raises(BadMessage):
        late.check_chain(newer.certificates[1:])
    checked = late.check_chain(newer.certificates)
    assert [c.record.epoch for c in checked] == [2, 3]
    assert acceptors["a"].prepare(m.Prepare(late.crew, 2, m.record_hash(late.record), 99)) == newer
    assert acceptors["a"].newer_than(9) == m.Adopt(newer.certificates[-1:])
    late.learn(checked)
    assert late.check_chain(newer.certificates) == ()
    with pytest.raises(BadMessage):
        late.check_chain(crew("wxyz")["w"].chain)


def test_witnesses_make_half_of_an_even_crew_able_to_go_on():
    acceptors = crew("ab", (voter("w"),))
    assert ballot(acceptors, "a", "aw", without(acceptors["a"].record, "b")) is not None
    assert ballot(crew("ab"), "a", "a", without(founding("ab"), "b")) is None


def test_a_lease_is_as_old_as_the_last_majority():
    lease = Lease(30.0)
    lease.begin("abcd", 100.0, 30)
    assert lease.ends("a", 100.0) == 115.0
    lease.renewed("b", 110.0)
    assert lease.ends("a", 112.0) == 115.0  # two of four are none
    lease.renewed("c", 111.0)
    assert lease.ends("a", 112.0) == 125.0
    lease.renewed("c", 105.0)  # an answer that was long on its way
    lease.renewed("stranger", 200.0)
    assert lease.ends("a", 112.0) == 125.0
    assert Lease(30.0).ends("a", 5.0) == 5.0


def test_ballots_of_two_voters_differ():
    ballots = {next_ballot(at_least, place) for at_least in range(0, 64, 16) for place in range(9)}
    assert len(ballots) == 4 * 9
    assert next_ballot(35, 2) > 35


def test_no_ballot_leaps_so_far_that_the_others_cannot_follow():
    acceptors = crew()
    record, me = acceptors["a"].record, acceptors["a"]
    prepare = lambda number: m.Prepare(m.crew_id(record), 2, m.record_hash(record), number)
    assert acceptors["b"].prepare(prepare(2**62)) == m.Refuse("ballot", 0)
    assert acceptors["b"].propose(m.Propose(without(record, "d"), LEAP + 1)) == m.Refuse("ballot", 0)
    assert isinstance(acceptors["b"].prepare(prepare(LEAP)), m.Promise)
    proposing = Proposing(me, ev.Settings(), random.Random(1))
    for now in range(20):  # one member refuses with the highest ballot there is
        assert isinstance(proposing.begin(Wish(without(record, "d"), ()), float(now)), m.Promise)
        ballot = proposing.proposal.ballot
        assert isinstance(acceptors["c"].prepare(prepare(ballot)), m.Promise)
        proposing.refused(ballot, m.Refuse("ballot", 2**62), float(now))
    assert ballot < 20 * LEAP


def test_a_proposal_of_which_nothing_comes_is_tried_again_and_later_places_wait_longer():
    a, settings = crew()["a"], ev.Settings(request_seconds=2.0, heartbeat_seconds=1.0)
    wish = Wish(without(a.record, "d"), ())
    second = Proposing(a, settings, random.Random(1))
    assert [second.due(True, 1, now) for now in (0.0, 2.9)] == [False, False]
    assert not second.due(False, None, 2.95)  # what was wished for came about by itself: the wait begins anew
    assert [second.due(True, 1, now) for now in (3.0, 5.9, 6.0)] == [False, False, True]
    assert not second.due(True, None, 99.0)

    proposing = Proposing(a, settings, random.Random(1))
    assert proposing.due(True, 0, 0.0)
    ballots = []
    for now in (0.0, 3.0, 6.0):
        assert isinstance(proposing.begin(wish, now), m.Promise)
        ballots.append(proposing.proposal.ballot)
    assert ballots == sorted(set(ballots))
    for ballot, reason in ((ballots[0], "ballot"), (ballots[2], "epoch"), (ballots[2], "record")):
        proposing.refused(ballot, m.Refuse(reason, 99), 6.0)
    assert not proposing.due(True, 0, 7.9)
    assert proposing.proposal is not None
    assert not proposing.due(True, 0, 8.0)  # its deadline, and a pause of up to a quarter of the time
    assert proposing.proposal is None
    assert proposing.due(True, 0, 9.0)

    proposing.begin(wish, 10.0)
    proposing.refused(proposing.proposal.ballot, m.Refuse("alive"), 10.5)  # until it is not heard by that voter, either
    assert [proposing.due(True, 0, now) for now in (11.4, 11.5)] == [False, True]
    proposing.begin(wish, 12.0)
    proposing.restart()
    assert proposing.due(True, 0, 12.0)
    assert proposing.promised("a", m.Promise(a.crew, 2, 99)) is False


def test_a_lease_is_never_longer_than_the_record_says_or_than_its_own_node():
    for said, ends in ((10, 105.0), (300, 115.0)):
        lease = Lease(30.0)
        lease.begin("abcd", 100.0, said)
        assert lease.ends("a", 100.0) == ends
