from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.rollouts.network.admission import (
    VERSION_MEMORY_SECONDS,
    WINDOW,
    SeenEnvelopes,
    Signer,
    Signers,
)
from swarmnode.wire.limits import CLOCK_SKEW_SECONDS, GROUP_AGE_SECONDS

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
    for minute in range(100):  # an author that is heard all the time never starts anew
        one.note(minute, minute * 60.0)
    assert one.sequence_reason(99, 99 * 60.0 + longest) == "sequence_reused"
    assert one.sequence_reason(99, 99 * 60.0 + longest + 1) is None


def test_versions_of_another_model_are_not_compared():
    one = signer()
    one.note_version(MODEL, 100, 0.0)
    assert one.is_outdated(MODEL, 10, 8, 1.0)
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


def test_others_push_out_no_author_of_a_candidate(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_SIGNERS", 3)
    signers = Signers()
    signers.add(b"a", one := signer())
    signers.mark_candidate(b"a", one)
    for number in range(100):
        signers.add(bytes([number]) * 32, signer())
    assert signers.find(b"a") is one
    assert len(signers) == 4


def test_a_clock_that_stepped_back_makes_nothing_too_old(monkeypatch):
    monkeypatch.setattr("swarmnode.rollouts.network.admission.MOST_CANDIDATES", 2)
    frames, tomorrow = SeenEnvelopes(100), 86_400.0
    frames.mark_candidate(b"first", tomorrow)
    for number in range(10):
        frames.mark_candidate(bytes([number]), float(number))
    assert not frames.is_forgotten(int(1000 * (10.0 + CLOCK_SKEW_SECONDS)))
