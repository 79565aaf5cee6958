"""Hostile groups of an author with a valid key, each with the reason for which admission rejects
it."""

from __future__ import annotations

import functools
import random

import msgspec

from swarmnode.demo.liar.author import Author, swarm_of
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire import codec, limits, tensors
from swarmnode.wire.messages import RolloutGroup, Turn


def hostile_frames(author: Author, now: float, sequence: int = 0) -> dict[str, tuple[bytes, str]]:
    """Return name → (frame, expected reason).

    Args:
        author: The author with a valid key.
        now: Unix seconds.
        sequence: First sequence number to use.
    """
    replace = msgspec.structs.replace
    stranger = Author(author.swarm, seed=999)
    other_swarm = Author(swarm_of("another"), seed=0)
    other_swarm.key = author.key

    def group(step: int, **changes: object) -> RolloutGroup:
        return replace(author.group(sequence + step, now), **changes)

    def with_task(step: int, **changes: object) -> bytes:
        made = author.group(sequence + step, now)
        return author.frame(replace(made, task=replace(made.task, **changes)))

    def of_task(step: int, name: str) -> bytes:
        """Return a group of any task, with a valid seed."""
        seed, index = task_seed(author.swarm, author.peer, sequence + step, name)
        return with_task(step, id=name, seed=seed, index=index)

    def with_first(step: int, **changes: object) -> bytes:
        made = author.group(sequence + step, now)
        return author.sign(
            codec.encode(
                replace(
                    made,
                    completions=[replace(made.completions[0], **changes), *made.completions[1:]],
                )
            )
        )

    good = author.frame(group(0))
    payload = codec.encode(group(0))
    flipped = bytearray(good)
    flipped[good.index(b"signature") + 20] ^= 1  # inside the 64 bytes
    stolen = replace(stranger.group(sequence, now), sequence=sequence)
    return {
        "empty": (b"", "malformed"),
        "garbage": (random.Random(1).randbytes(500), "schema"),
        "truncated": (good[: len(good) // 2], "malformed"),
        "trailing bytes": (good + b"\0", "malformed"),
        "oversized": (good + b"\0" * limits.GROUP_BYTES, "oversize"),
        "deeply nested": (b"\x91" * 60_000, "schema"),
        "deeply nested payload": (author.sign(b"\x81\xa1a" + b"\x91" * 60_000), "schema"),
        "nested in a field": (
            author.sign(payload.replace(b"\xa4task\x84", b"\xa4task" + b"\x91" * 1000 + b"\x84")),
            "schema",
        ),
        "map of a million": (author.sign(b"\xdf\x00\x0f\x42\x40"), "malformed"),
        "huge text header": (author.sign(payload[:30] + b"\xdb\xff\xff\xff\xff"), "malformed"),
        "duplicated key": (author.sign(_duplicated_key(payload)), "malformed"),
        "unknown field": (author.sign(_extra_key(payload)), "schema"),
        "NaN": (author.sign(_with_float(payload, b"\x7f\xf8" + b"\0" * 6)), "not_finite"),
        "infinity": (author.sign(_with_float(payload, b"\xff\xf0" + b"\0" * 6)), "not_finite"),
        "bad UTF-8": (author.sign(payload.replace(b"builtin/", b"builtin\xff")), "malformed"),
        "one completion": (
            author.sign(codec.encode(group(0, completions=group(0).completions[:1]))),
            "bounds",
        ),
        "65 completions": (
            author.sign(codec.encode(group(0, completions=group(0).completions[:1] * 65))),
            "bounds",
        ),
        "positive logprob": (with_first(0, logprob=1.0), "bounds"),
        "short token ids": (with_first(0, token_ids=b"\0\0\0\0"), "bounds"),
        "NaN in packed logprobs": (
            with_first(
                0, text="1", tokens=1, token_ids=b"", logprobs=tensors.pack_logprobs([float("nan")])
            ),
            "not_finite",
        ),
        "33 turns": (
            with_first(
                0,
                text="",
                tokens=33,
                logprob=-1.0,
                token_ids=b"",
                logprobs=b"",
                turns=[Turn(0, 1)] * 33,
            ),
            "bounds",
        ),
        "turns longer than the text": (with_first(0, turns=[Turn(1000, 1)]), "bounds"),
        "turn within a character": (
            with_first(
                0,
                text="\N{BUTTERFLY}",
                tokens=2,
                logprob=-1.0,
                token_ids=b"",
                logprobs=b"",
                turns=[Turn(1, 1), Turn(3, 1)],
            ),
            "bounds",
        ),
        "zstd bomb": (author.sign(_bomb(), "zstd"), "oversize"),
        "zstd garbage": (author.sign(b"\x28\xb5\x2f\xfd" + b"\xff" * 50, "zstd"), "compression"),
        "wrong signature": (bytes(flipped), "signature"),
        "wrong swarm": (other_swarm.frame(group(0)), "signature"),
        "stale": (
            author.frame(author.group(sequence, now - limits.GROUP_AGE_SECONDS - 1)),
            "stale",
        ),
        "future": (
            author.frame(author.group(sequence, now + limits.CLOCK_SKEW_SECONDS + 1)),
            "future",
        ),
        "stolen": (author.frame(stolen), "seed"),
        "forged seed": (with_task(1, seed=5 << limits.INDEX_BITS), "seed"),
        "forged index": (with_task(1, index=12_345), "seed"),
        "evaluation seed": (with_task(1, seed=1 << 62), "seed"),
        "seed inside a block": (with_task(1, seed=7), "bounds"),
        "seed of another task": (with_task(1, id="builtin/nothing"), "seed"),
        "unknown task": (of_task(1, "builtin/nothing"), "unknown_task"),
        "unknown version": (with_task(1, version="0000000000000000"), "unknown_version"),
        "episode of a task of one turn": (
            with_first(
                1, text="1", tokens=1, logprob=-0.5, token_ids=b"", logprobs=b"", turns=[Turn(1, 1)]
            ),
            "turns",
        ),
        "sum that does not add up": (with_first(1, logprob=-9000.0), "tokens"),
        "more text than tokens": (
            with_first(1, text="1" * 300, tokens=1, logprob=-0.5, token_ids=b"", logprobs=b""),
            "tokens",
        ),
        "control characters": (
            author.frame(author.group(sequence + 1, now, texts=["\x1b[2J", "1"])),
            "charset",
        ),
        "bidirectional override": (
            author.frame(author.group(sequence + 1, now, texts=["1", "\u202e1"])),
            "charset",
        ),
    }


@functools.cache
def _bomb() -> bytes:
    """Return 50 MB of zeros, compressed to a few kilobytes."""
    return codec.compress(b"\0" * 50_000_000)


def _duplicated_key(payload: bytes) -> bytes:
    """Return the map with its last key twice. Some decoders use the first value, others the
    last."""
    return bytes([payload[0] + 1]) + payload[1:] + b"\xa8sequence\x01"


def _extra_key(payload: bytes) -> bytes:
    return bytes([payload[0] + 1]) + payload[1:] + b"\xa5extra\x01"


def _with_float(payload: bytes, bits: bytes) -> bytes:
    at = payload.index(b"temperature") + len(b"temperature") + 1
    return payload[:at] + bits + payload[at + 8 :]
