"""120,000 mutated frames through decoder and admission, and structured nonsense by hypothesis.
Nothing but an answer may come out."""

import random

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, TOKENIZER, Author, swarm_of
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.rollouts.groups import Candidate
from swarmnode.rollouts.network.admission import MOST_CANDIDATES, SEEN_FRAMES, Admission, Refusal
from swarmnode.wire import codec

pytestmark = pytest.mark.slow

SWARM = swarm_of()
NOW = 1_800_000_000.0
UNLIMITED = SharingConfig().model_copy(update={"groups_per_second": 1e9})
AUTHOR = Author(SWARM)
INTERESTING = [b"", b"\x00", b"\xff", b"\xc0", b"\xc1", b"\x80", b"\x90"]
INTERESTING += [
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"\xed\xa0\x80",
]
INTERESTING += [
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\xc7\xff\x01",
]


def mutate(rng, data, others):
    """One to four edits: flip, cut, insert, double, overwrite, splice."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = rng.choice(INTERESTING)
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 200)]
            case 4:
                value = rng.choice(INTERESTING)
                data[at : at + len(value)] = value
            case _:
                other = rng.choice(others)
                data[at:] = other[rng.randrange(len(other)) :]
    return bytes(data)


def new_admission():
    checks = Admission(SWARM, "nobody", BUILTIN_TASKS, UNLIMITED)
    checks.set_policy(b"", TOKENIZER, 1.0)
    return checks


def assert_serves_honest_peers(checks):
    fresh = Author(SWARM, seed=321)
    for sequence in range(20):
        assert isinstance(checks.check(fresh.frame(fresh.group(sequence, NOW)), NOW), Candidate)
    assert checks.statistics().outcomes.get("internal", 0) == 0, (
        checks.statistics().last_internal_error
    )


def run(checks, frames):
    """Feed `frames`; returns how memory grew after the first tenth, bytes."""
    settled = 0
    frames = iter(frames)
    for number, frame in enumerate(frames):
        assert isinstance(checks.check(frame, NOW), Refusal | Candidate)
        if number == 5000:
            settled = psutil.Process().memory_info().rss
    stats = checks.statistics()
    assert stats.seen <= SEEN_FRAMES + MOST_CANDIDATES
    assert stats.signers <= 64
    return psutil.Process().memory_info().rss - settled


def test_mutated_frames_never_get_past_an_answer():
    rng = random.Random(20)
    seeds = [AUTHOR.frame(AUTHOR.group(n, NOW)) for n in range(20)]
    seeds += [bad[:4000] for bad, _ in hostile_frames(AUTHOR, NOW).values() if bad]
    checks = new_admission()
    assert run(checks, (mutate(rng, rng.choice(seeds), seeds) for _ in range(100_000))) < 32 * 2**20
    assert_serves_honest_peers(checks)


def test_mutated_signed_payloads_are_answered():
    rng = random.Random(21)
    seeds = [codec.encode(AUTHOR.group(n, NOW, size=2 + n % 3)) for n in range(10)]
    squeezed = [codec.compress(s) for s in seeds]
    checks = new_admission()

    def frames():
        for number in range(20_000):
            match number % 4:
                case 0:
                    yield AUTHOR.sign(mutate(rng, rng.choice(squeezed), squeezed), "zstd")
                case 1:
                    yield AUTHOR.sign(codec.compress(mutate(rng, rng.choice(seeds), seeds)), "zstd")
                case _:
                    yield AUTHOR.sign(mutate(rng, rng.choice(seeds), seeds))

    assert run(checks, frames()) < 32 * 2**20
    # the mutations reach into the checks, not just the first of them
    assert len(checks.statistics().outcomes) >= 5
    assert_serves_honest_peers(checks)


nonsense = st.recursive(
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
    key = keys[path[0] % len(keys)]
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[key] = replaced(copy[key], path[1:], value)
    return copy


CHECKS = new_admission()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.lists(st.integers(0, 63), min_size=1, max_size=4), nonsense)
def test_any_field_may_hold_anything(sequence, path, value):
    payload = replaced(
        msgspec.to_builtins(AUTHOR.group(sequence, NOW, size=3), builtin_types=(bytes,)),
        path,
        value,
    )
    CHECKS.check(AUTHOR.sign(msgspec.msgpack.encode(payload)), NOW)
    assert "internal" not in CHECKS.statistics().outcomes


@settings(max_examples=200, deadline=None)
@given(nonsense, st.binary(max_size=200))
def test_any_frame_may_hold_anything(value, tail):
    CHECKS.check(msgspec.msgpack.encode(value) + tail, NOW)
    assert "internal" not in CHECKS.statistics().outcomes
