import re
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, TOKENIZER, Author, answer, swarm_of
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.rollouts.groups import Candidate, ExternalGroup, memory_bytes
from swarmnode.rollouts.network.admission import (
    STRIKE_PEERS,
    STRIKE_SECONDS,
    STRIKES,
    VERSION_MEMORY_SECONDS,
    WINDOW,
    Admission,
    CandidateQueue,
    Refusal,
    ScoringQueue,
    SeenEnvelopes,
    Signer,
    Signers,
    Strikes,
)
from swarmnode.rollouts.network.exchange import LEAST_SECONDS, fetch_deadline
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.tasks.frames import Scored, ScorerFailed
from swarmnode.tasks.seeds import is_evaluation
from swarmnode.wire import codec, envelope, limits
from swarmnode.wire.limits import CLOCK_SKEW_SECONDS, GROUP_AGE_SECONDS
from swarmnode.wire.messages import Envelope
from tests.support.groups import external_group

SWARM = swarm_of()
NOW = 1_800_000_000.0
AUTHOR = Author(SWARM)
HOSTILE = hostile_frames(AUTHOR, NOW)
HOSTILE["oversized"] = (HOSTILE["oversized"][0] + bytes(limits.GROUP_BYTES), "oversize")


def admission(**kwargs):
    cfg = {name: kwargs.pop(name) for name in list(kwargs) if name in SharingConfig.model_fields}
    made = Admission(
        SWARM, Author(SWARM, seed=77).peer, BUILTIN_TASKS, SharingConfig(**cfg), **kwargs
    )
    made.set_policy(b"", TOKENIZER, 1.0)
    return made


def frame(sequence=0, author=AUTHOR, created=NOW, **kwargs):
    return author.frame(author.group(sequence, created, **kwargs))


def reason(result):
    assert isinstance(result, Refusal), result
    return result.reason


def rewards_of(group):
    right = answer(group.task)
    return [float(c.text == right) for c in group.completions]


def admitted(checks, candidate):
    return checks.check_scored(candidate, Scored("?", rewards_of(candidate.group)))


def test_honest_group_becomes_an_external_group():
    checks = admission()
    candidate = checks.check(frame(), NOW)
    assert isinstance(candidate, Candidate)
    assert candidate.peer == AUTHOR.peer
    assert candidate.content == envelope.content_id(frame())
    group = admitted(checks, candidate)
    assert isinstance(group, ExternalGroup)
    assert sum(group.rewards) == 2


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_rejected_for_its_reason(name):
    bad, expected = HOSTILE[name]
    checks = admission()
    rejected = checks.check(bad, NOW)
    assert reason(rejected) == expected
    assert rejected.verdict is REASONS[expected]
    assert checks.statistics().outcomes == {expected: 1}
    assert isinstance(checks.check(frame(100), NOW), Candidate)


def test_author_is_named_only_with_a_valid_signature():
    checks = admission()
    assert checks.check(HOSTILE["wrong signature"][0], NOW).peer is None
    assert checks.check(HOSTILE["forged seed"][0], NOW).peer == AUTHOR.peer
    assert checks.check(HOSTILE["NaN"][0], NOW).peer == AUTHOR.peer


def test_what_is_ignored_pushes_no_candidate_out_of_memory(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_SIGNERS", 8)
    monkeypatch.setattr("swarmnode.rollouts.network.admission.SEEN_FRAMES", 32)
    checks = admission()
    assert isinstance(checks.check(frame(), NOW), Candidate)
    for n in range(100):
        stale = frame(0, Author(SWARM, seed=100 + n), created=NOW - limits.GROUP_AGE_SECONDS - 1)
        assert reason(checks.check(stale, NOW)) == "stale"
    assert reason(checks.check(frame(), NOW)) == "duplicate"
    assert reason(checks.check(frame(created=NOW + 1), NOW)) == "sequence_reused"
    assert checks.has_seen(envelope.content_id(frame()))
    assert checks.statistics().seen <= 32 + 1


def test_candidate_is_never_admitted_twice(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_CANDIDATES", 4)
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_SIGNERS", 1)
    checks, frames = (
        admission(),
        [frame(0, Author(SWARM, seed=n), created=NOW + 60 * n) for n in range(20)],
    )
    assert all(
        isinstance(checks.check(each, NOW + 60 * n), Candidate) for n, each in enumerate(frames)
    )
    assert [reason(checks.check(each, NOW + 1200)) for each in frames] == ["stale"] * 16 + [
        "duplicate"
    ] * 4
    assert isinstance(checks.check(frame(created=NOW + 1200), NOW + 1200), Candidate)


def test_a_replay_is_stale_after_everything_forgot_it():
    checks = admission()
    checks.check(frame(), NOW)
    assert reason(admission().check(frame(), NOW + limits.GROUP_AGE_SECONDS + 1)) == "stale"


def test_flood_is_cut_to_the_authors_rate():
    checks = admission(groups_per_second=2.0)
    taken = sum(isinstance(checks.check(frame(n), NOW), Candidate) for n in range(100))
    assert taken == 8  # a burst of four seconds
    assert checks.statistics().outcomes["rate"] == 92
    assert isinstance(checks.check(frame(author=Author(SWARM, seed=5)), NOW), Candidate)
    assert (
        sum(isinstance(checks.check(frame(200 + n), NOW + 3), Candidate) for n in range(100)) == 6
    )


def test_forged_frames_do_not_use_up_an_authors_rate():
    checks = admission(groups_per_second=2.0)
    checks.check(frame(0), NOW)
    stranger = Author(SWARM, seed=5)
    for n in range(50):
        signed = codec.decode(frame(n, stranger), Envelope, 10**6)
        forged = codec.encode(
            msgspec.structs.replace(signed, key=AUTHOR.key.public_key().public_bytes_raw())
        )
        assert reason(checks.check(forged, NOW)) == "signature"
    assert isinstance(checks.check(frame(1), NOW), Candidate)


def test_a_version_far_behind_the_senders_newest_is_outdated():
    checks = admission()
    assert isinstance(checks.check(frame(0, policy_version=20), NOW), Candidate)
    assert isinstance(checks.check(frame(1, policy_version=12), NOW), Candidate)
    assert reason(checks.check(frame(2, policy_version=11), NOW)) == "outdated"


def test_a_greylisted_author_is_not_listened_to():
    checks = admission(is_greylisted=lambda peer: peer == AUTHOR.peer)
    assert reason(checks.check(frame(), NOW)) == "greylisted"


def test_lengths_far_beyond_our_own_are_not_trained_on():
    checks = admission(max_completion_length=8)
    assert isinstance(checks.check(frame(0, texts=["1" * 32, "1"]), NOW), Candidate)
    assert reason(checks.check(frame(1, texts=["1" * 33, "1"]), NOW)) == "too_long"


def test_lengths_of_another_tokenizer_are_estimated_from_the_text():
    checks = admission(max_completion_length=8)
    checks.set_policy(b"", TOKENIZER, 0.25)
    other = b"o" * 32
    assert isinstance(
        checks.check(frame(0, texts=["1" * 128, "1"], tokenizer=other), NOW), Candidate
    )
    assert (
        reason(checks.check(frame(1, texts=["1" * 129, "1"], tokenizer=other), NOW)) == "too_long"
    )
    # of our own they are counted
    assert reason(checks.check(frame(2, texts=["1" * 33, "1"]), NOW)) == "too_long"
    # no policy yet: a token a byte
    early = Admission(SWARM, "somebody", BUILTIN_TASKS, SharingConfig(), max_completion_length=8)
    assert isinstance(early.check(frame(0, texts=["1" * 32, "1"]), NOW), Candidate)
    assert reason(early.check(frame(1, texts=["1" * 33, "1"]), NOW)) == "too_long"


def test_equal_rewards_are_filtered():
    candidate = admission().check(frame(), NOW)
    assert reason(admission().check_scored(candidate, Scored("?", [1.0] * 8))) == "zero_advantage"
    assert isinstance(
        admission().check_scored(candidate, Scored("?", [1.0] * 7 + [0.0])), ExternalGroup
    )


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [float("nan")] * 8, [2.0] + [0.0] * 7])
def test_rewards_that_no_scorer_gives_are_our_own_failure(rewards):
    checks = admission()
    rejected = checks.check_scored(checks.check(frame(), NOW), Scored("?", rewards))
    assert (rejected.reason, rejected.verdict) == ("scorer", Verdict.IGNORE)


def test_memory_is_bounded_in_authors_and_frames(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_SIGNERS", 8)
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_CANDIDATES", 16)
    monkeypatch.setattr("swarmnode.rollouts.network.admission.SEEN_FRAMES", 32)
    checks = admission()
    for n in range(64):
        made = NOW + 60 * n
        checks.check(frame(n, Author(SWARM, seed=100 + n), created=made), made)
        checks.check(
            frame(n, Author(SWARM, seed=200 + n), created=made - limits.GROUP_AGE_SECONDS - 1), made
        )
    stats = checks.statistics()
    assert (stats.signers, stats.seen) == (8 + 8, 16 + 32)


def test_internal_error_costs_one_group():
    def broken(peer):
        raise RuntimeError("our bug")

    checks = admission(is_greylisted=broken)
    rejected = checks.check(frame(), NOW)
    assert (rejected.reason, rejected.verdict, rejected.peer) == ("internal", Verdict.IGNORE, None)
    assert "our bug" in checks.statistics().last_internal_error


NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def replaced(data, path, value):
    """`data` with the thing at a random place replaced by `value`."""
    if not path or not isinstance(data, dict | list) or not data:
        return value
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    key, copy = keys[path[0] % len(keys)], data.copy()
    copy[key] = replaced(copy[key], path[1:], value)
    return copy


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.lists(st.integers(0, 63), min_size=1, max_size=4), NONSENSE)
def test_any_signed_field_may_hold_anything(sequence, path, value):
    checks, group = admission(), AUTHOR.group(sequence, NOW, size=3)
    payload = replaced(msgspec.to_builtins(group, builtin_types=(bytes,)), path, value)
    checks.check(AUTHOR.sign(msgspec.msgpack.encode(payload)), NOW)
    assert "internal" not in checks.statistics().outcomes


def test_every_reason_is_documented_with_its_verdict():
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
    table = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    documented = {
        name: row[2].strip()
        for row in table
        for name in re.findall(r"`(\w+)`", row[1])
        if row[2].strip().isupper()
    }
    assert documented == {name: verdict.name for name, verdict in REASONS.items()}


MODEL = b"m" * 32


def signer(rate=16.0):
    return Signer("peer", rate, 0.0)


def test_a_slow_signer_has_one_token_and_no_more():
    one = signer(0.1)
    assert one.has_token(0.1, 1000.0)
    one.take_token()
    assert [one.has_token(0.1, now) for now in (1000.0, 1009.0, 1010.0)] == [False, False, True]


def test_a_clock_that_steps_back_gives_no_tokens():
    one = signer(1.0)
    for _ in range(4):
        one.take_token()
    assert not one.has_token(1.0, -100.0)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3 * WINDOW), max_size=300), st.integers(0, 2**62))
def test_window_accepts_each_sequence_once(offsets, base):
    one, seen, newest = signer(), set(), -1
    for offset in offsets:
        sequence = base + offset
        reason = one.sequence_reason(sequence, 0.0)
        if newest - sequence >= WINDOW:
            assert reason == "stale"
        elif sequence in seen:
            assert reason == "sequence_reused"
        else:
            assert reason is None
            one.note(sequence, 0.0)
            seen.add(sequence)
            newest = max(newest, sequence)


def test_remembers_sequence_numbers_while_groups_are_valid():
    one, longest = signer(), GROUP_AGE_SECONDS + CLOCK_SKEW_SECONDS
    for minute in range(100):  # the memory of an active author is not reset
        one.note(minute, minute * 60.0)
    assert one.sequence_reason(99, 99 * 60.0 + longest) == "sequence_reused"
    assert one.sequence_reason(99, 99 * 60.0 + longest + 1) is None


def test_versions_of_another_model_are_not_compared():
    one = signer()
    one.note_version(MODEL, 100, 0.0)
    assert one.is_outdated(MODEL, 10, 8, 1.0)
    assert not one.is_outdated(MODEL, 10, 8, VERSION_MEMORY_SECONDS + 1.0), "a restored trainer"
    assert not one.is_outdated(b"o" * 32, 10, 8, 1.0)
    one.note_version(b"o" * 32, 30, 1.0)
    assert one.is_outdated(b"o" * 32, 10, 8, 1.0)
    assert not one.is_outdated(MODEL, 10, 8, 1.0)


def test_an_old_version_does_not_lower_the_newest():
    one = signer()
    one.note_version(MODEL, 100, 0.0)
    one.note_version(MODEL, 95, 1.0)
    assert one.is_outdated(MODEL, 91, 8, 2.0)
    one.note_version(MODEL, 101, 3.0)
    assert one.is_outdated(MODEL, 92, 8, 4.0)
    one.note_version(MODEL, 20, 4.0 + VERSION_MEMORY_SECONDS)  # gone back to an older state
    assert one.is_outdated(MODEL, 11, 8, 5.0 + VERSION_MEMORY_SECONDS)
    assert not one.is_outdated(MODEL, 12, 8, 5.0 + VERSION_MEMORY_SECONDS)


def test_signers_forget_the_one_heard_longest_ago(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_SIGNERS", 3)
    signers = Signers()
    for name in "abc":
        signers.add(name.encode(), signer())
    signers.find(b"a")
    signers.add(b"d", signer())
    assert [signers.find(k) is not None for k in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]


def test_a_clock_that_stepped_back_makes_nothing_too_old(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_CANDIDATES", 2)
    frames, tomorrow = SeenEnvelopes(100), 86_400.0
    frames.mark_candidate(b"first", tomorrow)
    for number in range(10):
        frames.mark_candidate(bytes([number]), float(number))
    assert not frames.is_forgotten(int(1000 * (10.0 + CLOCK_SKEW_SECONDS)))


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
