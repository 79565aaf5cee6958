"""The files of protocol/vectors.

Hostile frames whose fault is inside the payload are signed by the same key as honest frames.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import zstandard

from protocol.generate import (
    bulk_vectors,
    crew_vectors,
    listing_vectors,
    manifest_vectors,
    neighbour_vectors,
    stage_vectors,
    state_vectors,
    task_vectors,
    weight_vectors,
)
from protocol.generate.faults import faults
from protocol.generate.frames import (
    COMPLETION,
    EPISODE,
    FORGED_SIGNATURE,
    GROUP,
    GROUP_ORDER,
    KEY,
    OTHER_KEY,
    OTHER_PEER,
    OTHER_SWARM,
    PACKED,
    PEER,
    RULES,
    SMALL_ORDER_KEYS,
    SWARM,
    TASKS,
    Vector,
    accepted,
    changed,
    derived,
    envelope,
    is_forged,
    pack,
    pairs,
    parts,
    raw_block,
    refusals,
    rejected,
    repeat_block,
    sealed,
    without,
    zstd,
)
from swarmnode.tasks.seeds import choose_task, evaluation_seed, task_seed
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import content_id, peer_id, sign
from swarmnode.wire.manifest import swarm_id


def padded(size: int) -> tuple[dict[str, Any], bytes]:
    """Return a group and its envelope of `size` bytes, compressed with empty blocks in front."""
    for text in ("7", "77", "777"):  # an empty block has three bytes
        group = changed(GROUP, "completions.0.text", text)
        frame = padded_by(group, count := (size - len(padded_by(group, 2**15))) // 3 + 2**15)
        if len(frame) == size:
            return group, frame
    raise AssertionError(count)


def padded_by(group: dict[str, Any], blocks: int) -> bytes:
    payload = pack(group)
    frame = zstd(raw_block(b"", last=False) * blocks + raw_block(payload), len(payload))
    return sealed(frame, "zstd")


def valid() -> Iterator[Vector]:
    largest = {"policy_version": 2**63 - 1, "created_at": 2**63 - 1, "sequence": 2**63 - 1}
    last = {**GROUP["task"], "seed": 2**63 - 2**20, "index": 2**20 - 1}
    longest = {**EPISODE, "text": "a" * 32, "tokens": 256, "turns": [[1, 8]] * 32}
    long = changed(GROUP, "completions.1.text", "a" * limits.TEXT_BYTES)
    for name, group in (
        ("a group", GROUP),
        (
            "a group with packed token ids and log-probabilities",
            changed(GROUP, "completions.0", {**COMPLETION, **PACKED}),
        ),
        (
            "text beyond ASCII",
            changed(GROUP, "completions.0.text", "Größe ≤ 7 \U0001f98b\u0000"),
        ),
        ("empty text", changed(GROUP, "completions.0.text", "")),
        ("an episode of three actions", changed(GROUP, "completions.0", EPISODE)),
        (
            "episodes of one and of 32 actions with more tokens than one action may have",
            changed(GROUP, "completions", [{**COMPLETION, "turns": [[18, 3]]}, longest]),
        ),
        ("64 completions", changed(GROUP, "completions", [COMPLETION] * 64)),
        ("largest counters", {**GROUP, **largest, "task": last}),
        ("zero counters", {**GROUP, "policy_version": 0, "created_at": 0, "sequence": 0}),
        ("a text of the largest size", long),
    ):
        yield _opened(name, group, sealed(group), "raw")
    payload = pack(GROUP)
    before, after = pack(long).split(b"a" * limits.TEXT_BYTES)
    repeated = repeat_block(b"a", limits.TEXT_BYTES, last=False)
    blocks = raw_block(before, last=False) + repeated + raw_block(after)
    for name, group, compressed in (
        (
            "zstd, two raw blocks",
            GROUP,
            zstd(raw_block(payload[:40], last=False) + raw_block(payload[40:]), len(payload)),
        ),
        (
            "zstd with a checksum",
            GROUP,
            zstandard.ZstdCompressor(write_checksum=True).compress(payload),
        ),
        ("the same, zstd with a repeated byte", long, zstd(blocks, len(pack(long)))),
    ):
        yield _opened(name, group, sealed(compressed, "zstd"), "zstd")
    yield _opened("an envelope of the largest size", *padded(limits.GROUP_BYTES), "zstd")


def _opened(name: str, group: dict[str, Any], frame: bytes, codec: str) -> Vector:
    value = {"peer": PEER, "content": content_id(frame), "codec": codec, "group": group}
    return accepted(name, "group", frame, value)


def hostile_envelopes() -> Iterator[Vector]:
    good = envelope(pack(GROUP))
    frame = pack(good)
    key, payload, signature = good["key"], good["payload"], good["signature"]
    _, too_long = padded(limits.GROUP_BYTES + 1)
    yield from refusals(
        "group",
        ("oversize", "an envelope with one byte too many", too_long),
        ("malformed", "nothing", b""),
        ("malformed", "last byte missing", frame[:-1]),
        ("malformed", "half of it", frame[: len(frame) // 2]),
        ("malformed", "a map of 2**32 - 1 missing entries", b"\xdf\xff\xff\xff\xff"),
        (
            "malformed",
            "payload claims 2**32 - 1 bytes",
            b"\x84" + pack("key") + pack(key) + pack("payload") + b"\xc6\xff\xff\xff\xff",
        ),
        ("malformed", "trailing byte", frame + b"\0"),
        ("malformed", "two envelopes", frame + frame),
        ("malformed", "reserved byte c1", b"\xc1"),
        ("malformed", "duplicate key", pairs([*good.items(), ("payload", payload)])),
        ("malformed", "fields in another order", pairs(list(reversed(good.items())))),
        ("malformed", "map header longer than needed", b"\xde\x00\x04" + frame[1:]),
        (
            "malformed",
            "key with a 16-bit length",
            frame.replace(pack("key") + b"\xc4\x20", pack("key") + b"\xc5\x00\x20"),
        ),
        ("malformed", "bad UTF-8 in a field name", frame.replace(b"\xa3key", b"\xa3k\xffy")),
        ("malformed", "bad UTF-8 in codec", frame[:-3] + b"r\xffw"),
        ("schema", "random bytes", bytes.fromhex("5f1c8e0b7a93d2446e")),
        ("schema", "an HTTP request", b"GET / HTTP/1.1\r\n\r\n"),
        ("schema", "nil", b"\xc0"),
        ("schema", "an empty map", b"\x80"),
        ("schema", "fields as an array", pack(list(good.values()))),
        ("schema", "100,000 nested arrays", b"\x91" * 100_000),
        (
            "schema",
            "100,000 nested arrays in payload",
            b"\x82" + pack("key") + pack(key) + pack("payload") + b"\x91" * 100_000,
        ),
        ("schema", "60,000 nested maps", (b"\x81" + pack("")) * 30_000),
        ("schema", "unknown field", {**good, "extra": 1}),
        ("schema", "signature missing", without(good, "signature")),
        ("schema", "integer key", pairs([(1, key), *list(good.items())[1:]])),
        ("schema", "bin key", pairs([(b"key", key), *list(good.items())[1:]])),
        ("schema", "extension type", {**good, "payload": msgpack.ExtType(5, payload)}),
        ("schema", "timestamp extension", {**good, "payload": msgpack.Timestamp(0)}),
        ("schema", "payload as text", {**good, "payload": "text"}),
        ("schema", "key is nil", {**good, "key": None}),
        ("schema", "unknown codec", {**good, "codec": "lz4"}),
        ("bounds", "key of 31 bytes", {**good, "key": key[:31]}),
        ("bounds", "key of 33 bytes", {**good, "key": key + b"\0"}),
        ("bounds", "no key", {**good, "key": b""}),
        ("bounds", "signature of 63 bytes", {**good, "signature": signature[:63]}),
        ("bounds", "signature of 65 bytes", {**good, "signature": signature + b"\0"}),
    )


def hostile_signatures() -> Iterator[Vector]:
    payload = pack(GROUP)
    good = envelope(payload)
    signature = good["signature"]

    def signed_otherwise(domain: bytes, swarm: bytes) -> dict[str, Any]:
        return {**good, "signature": sign(payload, KEY, domain, swarm).signature}

    half, scalar = signature[:32], int.from_bytes(signature[32:], "little")
    lenient = half + (scalar + GROUP_ORDER).to_bytes(32, "little")
    for name, frame in (
        (
            "one bit of the signature flipped",
            {**good, "signature": bytes([signature[0] ^ 1]) + signature[1:]},
        ),
        ("a signature of zeros", {**good, "signature": bytes(64)}),
        ("payload altered", {**good, "payload": payload.replace(b"\x0c", b"\x0d")}),
        ("payload emptied", {**good, "payload": b""}),
        ("another swarm", signed_otherwise(ids.DOMAIN_ROLLOUT, OTHER_SWARM)),
        ("another domain", signed_otherwise(b"swarmnode/rollout/2", SWARM)),
        ("another key", {**good, "key": OTHER_KEY.public_key().public_bytes_raw()}),
        ("a key that is not a point", {**good, "key": b"\x02" + bytes(31)}),
        ("codec flipped by a holder", {**good, "codec": "zstd"}),
        ("only the payload signed", {**good, "signature": KEY.sign(payload)}),
        # accepted by lenient verifiers
        ("scalar beyond the group order", {**good, "signature": lenient}),
    ):
        yield rejected("signature", name, frame)
    domain = ids.DOMAIN_ROLLOUT
    for key in SMALL_ORDER_KEYS:
        payloads = (pack({**GROUP, "sequence": sequence}) for sequence in itertools.count())
        forged = next(
            payload
            for payload in payloads
            if is_forged(key, bytes([len(domain)]) + domain + SWARM + b"\0" + payload)
        )
        frame = {"key": key, "payload": forged, "signature": FORGED_SIGNATURE, "codec": "raw"}
        yield rejected("signature", f"forged under the small-order key {key.hex()}", frame)


def hostile_payloads() -> Iterator[Vector]:
    """Yield correctly signed frames with faults of their signer."""
    good, fields = pack(GROUP), list(GROUP.items())
    tail = b"\x82" + pack("type") + pack("rollout")
    nested = b"\x91" * 100_000
    count, top_p = pack("policy_version"), pack("top_p")
    completions = pack("completions")
    twice = pairs([*COMPLETION.items(), ("tokens", 3)])
    for reason, name, payload in (
        ("malformed", "duplicate key in a completion", good.replace(pack(COMPLETION), twice)),
        ("malformed", "integer longer than needed", good.replace(count, count + b"\xcc")),
        (
            "malformed",
            "float of 32 bits",
            good.replace(top_p + pack(1.0), top_p + b"\xca" + struct.pack(">f", 1.0)),
        ),
        ("malformed", "bad UTF-8 in text", good.replace(b"<answer>7", b"<answer>\xff")),
        ("malformed", "surrogate in text", good.replace(b"<answer>", b"<ans\xed\xa0\x80r>")),
        (
            "malformed",
            "completions claim 2**32 - 1 missing items",
            good.split(completions)[0] + completions + b"\xdd\xff\xff\xff\xff",
        ),
        ("schema", "nested arrays in task", b"\x89" + tail[1:] + pack("task") + nested),
        (
            "schema",
            "nested arrays before the tag",
            b"\x82" + pack("task") + nested + b"\xc0" + tail[1:],
        ),
        ("schema", "60,000 empty maps", b"\xdc\xea\x60" + b"\x80" * 60_000),
        ("schema", "no tag", pack(without(GROUP, "type"))),
        ("schema", "an envelope in an envelope", sealed(GROUP)),
        ("schema", "integer key", pairs([fields[0], (2, GROUP["task"]), *fields[2:]])),
    ):
        yield rejected(reason, name, sealed(payload))
    for name, path, value in (
        ("unknown tag", "type", "rollout2"),
        ("extension type", "model", msgpack.ExtType(1, b"\x11" * 32)),
        ("sequence is a bool", "sequence", True),
        ("sequence of 2**64 as a float", "sequence", 2.0**64),
        ("sequence of 9 bytes", "sequence", (2**64).to_bytes(9, "big")),
        ("turns as bin", "completions.0.turns", b""),
        ("a turn as a map", "completions.0.turns", [{"text_bytes": 18, "tokens": 3}]),
        ("a turn of one number", "completions.0.turns", [[18]]),
        ("a turn with a third number", "completions.0.turns", [[18, 3, 0]]),
        ("a turn whose length is a float", "completions.0.turns", [[18.0, 3]]),
        ("text is nil", "completions.0.text", None),
        ("unknown finish reason", "completions.0.finish", "stop"),
    ):
        yield rejected("schema", name, sealed(changed(GROUP, path, value)))
    for value in (float("nan"), float("inf"), float("-inf")):
        packed = changed(GROUP, "completions.0.logprobs", struct.pack("<3f", -0.5, value, -0.5))
        yield rejected("not_finite", f"a packed log-probability is {value}", sealed(packed))


OUT_OF_BOUNDS: tuple[tuple[str, Any], ...] = (
    ("task.id", ""),
    ("task.id", "a" * 65),
    ("task.id", "rg/chain sum"),
    ("task.id", "rg/chain_sum\n"),
    ("task.id", "rg/größe"),
    ("task.version", ""),
    ("task.version", "f" * 65),
    ("task.seed", -(2**20)),
    ("task.seed", 5),
    ("task.seed", 2**64 - 2**20),
    ("task.index", 2**20),
    ("model", b"\x11" * 31),
    ("model", b""),
    ("sampling.temperature", 0.0),
    ("sampling.temperature", -1.0),
    ("sampling.temperature", 100.5),
    ("sampling.top_p", 0.0),
    ("sampling.top_p", 1.5),
    ("sampling.max_tokens", 0),
    ("sampling.max_tokens", 16_385),
    ("completions", []),
    ("completions", [COMPLETION]),
    ("completions", [COMPLETION] * 65),
    ("completions.0.tokens", 0),
    ("completions.0.tokens", 9),
    ("completions.0.tokens", 2**64 - 1),
    ("completions.0.logprob", 0.5),
    ("completions.0.logprob", -30_001.0),
    ("completions.0.logprob", -1.7e308),
    ("completions.0.token_ids", PACKED["token_ids"][:8]),
    ("completions.0.token_ids", PACKED["token_ids"] + b"\0"),
    ("completions.0.token_ids", b"\0" * 16),
    ("completions.0.logprobs", PACKED["logprobs"][:8]),
    ("completions.0.logprobs", PACKED["logprobs"] + b"\0\0"),
    ("completions.0.logprobs", struct.pack("<3f", -0.5, 0.01, -0.5)),
    ("completions.0.logprobs", struct.pack("<3f", -0.5, -10_001.0, -0.5)),
)


FALSE_TURNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("33 turns", {"text": "", "tokens": 33, "turns": [[0, 1]] * 33}),
    ("turns that are longer than the text", {"turns": [[4, 2], [0, 1], [9, 3]]}),
    ("turns that are shorter than the text", {"turns": [[4, 2], [0, 1], [7, 3]]}),
    ("turns with more tokens than the completion", {"turns": [[4, 2], [0, 2], [8, 3]]}),
    ("turns with fewer tokens than the completion", {"turns": [[4, 2], [0, 1], [8, 2]]}),
    ("a turn that ends within a character", {"turns": [[5, 2], [0, 1], [7, 3]]}),
    ("a turn of no token", {"turns": [[4, 3], [0, 0], [8, 3]]}),
    ("a turn of negative length", {"turns": [[5, 2], [-1, 1], [8, 3]]}),
    ("a turn with more tokens than an action may have", {"tokens": 9, "turns": [[12, 9]]}),
    ("a turn of 2**64 - 1 bytes", {"turns": [[2**64 - 1, 2], [0, 1], [8, 3]]}),
    ("more tokens than an episode may have", {"tokens": 16_385, "turns": [[4, 8193], [8, 8192]]}),
)
"""Name → fields that differ from EPISODE."""


def out_of_bounds() -> Iterator[Vector]:
    for name, difference in FALSE_TURNS:
        group = changed(GROUP, "completions.0", {**EPISODE, **difference})
        if difference.get("tokens", 0) > limits.TOKENS:
            group = changed(group, "sampling.max_tokens", limits.TOKENS)
        yield rejected("bounds", name, sealed(group))
    for path, value in OUT_OF_BOUNDS:
        yield rejected("bounds", f"{path}: {_shown(value)}", sealed(changed(GROUP, path, value)))
    yield rejected(
        "bounds",
        "text with one byte too many",
        sealed(changed(GROUP, "completions.0.text", "a" * (limits.TEXT_BYTES + 1))),
    )
    yield rejected(
        "bounds",
        "text too long in bytes, not in characters",
        sealed(changed(GROUP, "completions.0.text", "é" * 40_000)),
    )


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes, {value.hex()[:24]}"
    shown = f"{len(value)} items" if isinstance(value, list) else repr(value)
    return shown if len(shown) < 40 else f"{len(shown) - 2} characters"


def hostile_compression() -> Iterator[Vector]:
    payload = pack(GROUP)
    size = len(payload)
    good = zstd(raw_block(payload), size)
    bomb = b"".join(repeat_block(b"\0", 2**17, last=i == 127) for i in range(128))  # 16 MiB
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"
    start = b"\x28\xb5\x2f\xfd"
    wide = start + b"\xc0" + b"\x58" + struct.pack("<Q", size) + raw_block(payload)
    keyed = start + b"\xe1" + b"\x07" + struct.pack("<Q", size) + raw_block(payload)
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(payload)
    other = checked[:-1] + bytes([checked[-1] ^ 1])
    too_large = zstd(bomb, limits.GROUP_BYTES + 1)
    for reason, name, compressed in (
        ("compression", "size not declared", zstd(raw_block(payload), None)),
        ("compression", "bomb of 16 MiB, size not declared", zstd(bomb, None)),
        ("compression", "bomb of 16 MiB that declares 1000 bytes", zstd(bomb, 1000)),
        ("oversize", "bomb of 16 MiB, declared", zstd(bomb, 2**24)),
        ("oversize", "declares one byte more than a group may have", too_large),
        ("oversize", "declares 2**63 bytes", zstd(raw_block(payload), 2**63)),
        ("compression", "declares one byte too few", zstd(raw_block(payload), size - 1)),
        ("compression", "declares one byte too many", zstd(raw_block(payload), size + 1)),
        ("compression", "truncated", good[:-1]),
        ("compression", "last block missing", zstd(raw_block(payload, last=False), size)),
        ("compression", "header only", good[:13]),
        ("compression", "trailing byte", good + b"\0"),
        ("compression", "two frames", good + good),
        ("compression", "a skippable frame behind", good + skippable),
        ("compression", "a skippable frame in front", skippable + good),
        ("compression", "a window of 2 MiB", wide),
        ("compression", "asks for a dictionary", keyed),
        ("compression", "a checksum of other content", other),
        ("compression", "reserved block type", zstd(b"\xff\xff\xff", size)),
        ("compression", "not zstd at all", payload),
        ("compression", "nothing", b""),
        (
            "malformed",
            "valid frame around a truncated group",
            zstd(raw_block(payload[:-1]), size - 1),
        ),
    ):
        yield rejected(reason, name, sealed(compressed, "zstd"))
    yield rejected("schema", "compressed, but codec says raw", sealed(good))


def asked(sequence: int = 7, task: str = "rg/chain_sum") -> dict[str, Any]:
    """Return a group with the seed and index of its question."""
    seed, index = task_seed(SWARM, PEER, sequence, task)
    address = {"id": task, "seed": seed, "index": index}
    return {**GROUP, "sequence": sequence, "task": {**GROUP["task"], **address}}


def admission() -> Iterator[Vector]:
    """Yield vectors of the rules of 02, sections 5.1 to 5.3."""
    now = GROUP["created_at"] / 1000
    honest = asked()
    other_seed, _ = task_seed(SWARM, OTHER_PEER, GROUP["sequence"], GROUP["task"]["id"])
    frame = sealed(honest)

    def text(value: str, tokens: int = 3) -> dict[str, Any]:
        return changed(honest, "completions.0", {**COMPLETION, "text": value, "tokens": tokens})

    def packed(total: float) -> dict[str, Any]:
        # PACKED sums to -1.75
        return changed(honest, "completions.0", {**COMPLETION, **PACKED, "logprob": total})

    def made(later: int) -> dict[str, Any]:
        return changed(honest, "created_at", GROUP["created_at"] + 1000 * later)

    seed, index = honest["task"]["seed"], honest["task"]["index"]
    forged = {**envelope(pack(honest)), "signature": bytes(64)}
    evaluated = evaluation_seed("rg/chain_sum", 0)
    rules = {**RULES, "max_completions": 4, "max_tokens": 8}
    agreed = {"rules": rules, "models": [[GROUP["model"].hex(), GROUP["tokenizer"].hex()]]}
    episode = changed(honest, "completions", [EPISODE, {**EPISODE, "finish": "length"}])
    mixed = changed(episode, "completions.1", COMPLETION)
    wordy = {**EPISODE, "text": "a" * 257, "tokens": 8, "turns": [[0, 7], [257, 1]]}
    turns = {"turns": {"rg/chain_sum": 3}}
    cases: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("accept", "a group", honest, {}),
        (
            "accept",
            "an older sequence after a newer one",
            honest,
            {"after": [sealed(asked(sequence=8))]},
        ),
        ("ignore duplicate", "the same frame again", honest, {"after": [frame]}),
        ("ignore own", "one's own", honest, {"own": PEER}),
        ("reject signature", "of another swarm", pack(forged), {}),
        (
            "reject bounds",
            "a single completion",
            changed(honest, "completions", [COMPLETION]),
            {},
        ),
        (
            "ignore sequence_reused",
            "another group with the same sequence",
            text("8"),
            {"after": [frame]},
        ),
        ("accept", "an hour old", made(-3600), {}),
        ("ignore stale", "an hour and a second old", made(-3601), {}),
        ("accept", "two minutes ahead", made(120), {}),
        ("ignore future", "two minutes and a second ahead", made(121), {}),
        ("ignore future", "from the end of time", {**honest, "created_at": 2**63 - 1}, {}),
        ("reject seed", "another block", changed(honest, "task.seed", seed + 2**20), {}),
        ("reject seed", "another index", changed(honest, "task.index", index + 1), {}),
        ("reject seed", "another sequence", {**honest, "sequence": 8}, {}),
        ("reject seed", "the seed of another peer", changed(honest, "task.seed", other_seed), {}),
        (
            "reject seed",
            "another task than the seed is for",
            changed(honest, "task.id", "builtin/copy"),
            {},
        ),
        ("reject seed", "an evaluation seed", changed(honest, "task.seed", evaluated), {}),
        (
            "reject unknown_task",
            "a task that the swarm does not have",
            asked(task="rg/gcd"),
            {},
        ),
        (
            "reject unknown_version",
            "a task at another version",
            changed(honest, "task.version", "0123456789abcdee"),
            {},
        ),
        ("accept", "within the manifest's rules", honest, agreed),
        (
            "accept",
            "any model where the manifest names none",
            {**honest, "model": b"\x77" * 32},
            {"rules": rules, "models": []},
        ),
        ("accept", "episodes of an episode task", episode, turns),
        ("reject turns", "episodes of a task of one turn", episode, {}),
        ("reject turns", "answers to an episode task", honest, turns),
        ("reject turns", "one answer among episodes", mixed, turns),
        (
            "reject turns",
            "an episode with more turns than the task allows",
            episode,
            {"turns": {"rg/chain_sum": 2}},
        ),
        (
            "reject tokens",
            "an action with 257 bytes of text for a token, in an episode with fewer",
            changed(episode, "completions.0", wordy),
            turns,
        ),
        ("accept", "256 bytes of text for a token", text("a" * 256, 1), {}),
        ("reject tokens", "257 bytes of text for a token", text("a" * 257, 1), {}),
        ("reject tokens", "258 bytes in 86 characters for a token", text("≤" * 86, 1), {}),
        ("accept", "log-probabilities that sum up", packed(-1.75), {}),
        ("accept", "log-probabilities with a correct sum up to rounding", packed(-1.81), {}),
        ("reject tokens", "log-probabilities that sum to less", packed(-1.6), {}),
        ("reject tokens", "log-probabilities that sum to more", packed(-2.0), {}),
        ("accept", "tab, newline and carriage return", text("a\tb\r\nc"), {}),
    ]
    for name, path, value in (
        ("more completions than the manifest allows", "completions", [COMPLETION] * 5),
        ("another temperature than the manifest's", "sampling.temperature", 0.5),
        ("another top-p than the manifest's", "sampling.top_p", 0.5),
        ("more tokens than the manifest allows", "sampling.max_tokens", 9),
        ("a model that the manifest does not name", "model", b"\x77" * 32),
        ("a tokenizer that the manifest does not name", "tokenizer", b"\x77" * 32),
    ):
        cases.append(("reject agreement", name, changed(honest, path, value), agreed))
    for name, character in (
        ("escape", "\x1b"),
        ("C1", "\x9b"),
        ("bidirectional override", "\u202e"),
        ("isolate", "\u2066"),
        ("U+FFFF", "\uffff"),
    ):
        cases.append(("ignore charset", f"text with {name}", text(f"a{character}b"), {}))
    for outcome, name, message, options in cases:
        given = {"now": now, "own": OTHER_PEER, "tasks": TASKS, **options}
        given["after"] = [parts(each) for each in options.get("after", ())]
        sent = message if isinstance(message, bytes) else sealed(message)
        judged = dict(zip(("verdict", "reason"), outcome.split(), strict=False))
        yield {"name": name, "admit": given, **judged, "frame": parts(sent)}


def derivations() -> Iterator[Vector]:
    for number, key in enumerate((KEY, OTHER_KEY), 1):
        public = key.public_key().public_bytes_raw()
        yield derived(f"peer id {number}", "peer_id", {"key": public.hex()}, peer_id(public))
    yield derived("content id of nothing", "content_id", {"envelope": ""}, content_id(b"").hex())
    yield derived(
        "content id of a group",
        "content_id",
        {"envelope": sealed(GROUP).hex()},
        content_id(sealed(GROUP)).hex(),
    )
    for name, tasks in (
        ("vectors", TASKS),
        ("vectors", dict(reversed(TASKS.items()))),
        ("Schwärm", {"rg/gcd": "00"}),
    ):
        given: dict[str, Any] = {"name": name, "tasks": tasks, "protocols": list(ids.PROTOCOLS)}
        yield derived(
            f"swarm id of {name}, {' and '.join(tasks)}",
            "swarm_id",
            given,
            swarm_id(name, tasks).hex(),
        )
    for sequence, task in (
        *((sequence, "rg/chain_sum") for sequence in (0, 7, 2**20 - 1, 2**20, 12_345_678_901)),
        (7, "rg/gcd"),
        (2**63 - 1, "builtin/copy"),
    ):
        seed, index = task_seed(SWARM, PEER, sequence, task)
        given = {"swarm": SWARM.hex(), "peer": PEER, "sequence": sequence, "task": task}
        name = f"seed and index of question {sequence}, {task}"
        yield derived(name, "task_seed", given, {"seed": seed, "index": index})
    for task, block in (("rg/chain_sum", 0), ("rg/chain_sum", 2**64 - 1), ("builtin/copy", 0)):
        name, given = f"evaluation seed of {task}, block {block}", {"task": task, "block": block}
        yield derived(name, "evaluation_seed", given, evaluation_seed(task, block))
    tasks = ["rg/gcd", "builtin/copy", "rg/chain_sum"]
    for sequence in (*range(6), 2**63 - 1):
        given = {"tasks": tasks, "swarm": SWARM.hex(), "peer": PEER, "sequence": sequence}
        name = f"task of question {sequence}"
        yield derived(name, "choose_task", given, choose_task(tasks, SWARM, PEER, sequence))


DOCUMENTS: dict[str, tuple[Callable[[], Iterator[Vector]], ...]] = {
    "valid": (valid,),
    "envelopes": (hostile_envelopes, hostile_signatures),
    "payloads": (hostile_payloads, out_of_bounds),
    "compression": (hostile_compression,),
    "listings": (listing_vectors.polls, listing_vectors.fetches, listing_vectors.derivations),
    "neighbours": (neighbour_vectors.messages,),
    "manifests": (manifest_vectors.manifests,),
    "sessions": (neighbour_vectors.sessions,),
    "summaries": (neighbour_vectors.summaries,),
    "bulk": (bulk_vectors.messages, bulk_vectors.roots),
    "weights": (weight_vectors.messages, weight_vectors.states, weight_vectors.derivations),
    "stages": (
        stage_vectors.frames,
        stage_vectors.hostile_headers,
        stage_vectors.hostile_bodies,
        stage_vectors.routes,
        stage_vectors.fences,
        stage_vectors.commits,
    ),
    "crews": (crew_vectors.messages, crew_vectors.streams, crew_vectors.derivations),
    "state": (state_vectors.messages, state_vectors.derivations),
    "admission": (admission,),
    "tasks": (task_vectors.tasks,),
    "chat": (task_vectors.chat_tasks, task_vectors.statements),
    "derivations": (derivations,),
}


def documents() -> dict[str, str]:
    """Return the content of each file of protocol/vectors by name."""
    return {f"{name}.json": _document(sources) for name, sources in DOCUMENTS.items()}


def _document(sources: Sequence[Callable[[], Iterator[Vector]]]) -> str:
    # One vector per line, so that a change is one line of a diff.
    written = [vector for source in sources for vector in source()]
    vectors = ",\n".join(json.dumps(vector) for vector in [*written, *faults(written)])
    head = {"domain": ids.DOMAIN_ROLLOUT.decode(), "swarm": SWARM.hex()}
    return json.dumps(head)[:-1] + ', "vectors": [\n' + vectors + "\n]}\n"
