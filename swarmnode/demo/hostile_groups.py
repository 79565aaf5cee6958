"""Groups as other nodes see them: an author that signs valid ones, and the hostile variants of its frames.

    author = Author(swarm)
    frame = author.frame(author.group(sequence=7, created=now))
    for name, bad in hostile_frames(author, now).items(): ...
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.rollouts.groups import OwnGroup
from swarmnode.tasks.builtin import GENERATORS, Item
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef
from swarmnode.wire.swarm import swarm_id

MODEL = b"m" * 32
TOKENIZER = b"t" * 32
BUILTIN_TASKS = ("builtin/copy", "builtin/sum")
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=limits.TOKENS)


def swarm_of(name: str = "test", tasks: Sequence[str] = BUILTIN_TASKS) -> bytes:
    """The 32-byte id of a swarm that trains on `tasks`."""
    return swarm_id(name, {task: task_version(task) for task in tasks})



class Author:
    """A node as others see it: a key, a stream of questions, and completions whose rewards differ.

    seed: makes the key, so that tests repeat, unless a key is given.
    """

    def __init__(
        self, swarm: bytes, seed: int = 0, tasks: Sequence[str] = BUILTIN_TASKS, key: Ed25519PrivateKey | None = None
    ) -> None:
        self.swarm = swarm
        self.tasks = tasks
        self.key = key or Ed25519PrivateKey.from_private_bytes(hashlib.blake2b(f"author {seed}".encode(), digest_size=32).digest())
        self.peer = envelope.peer_id(self.key.public_key().public_bytes_raw())

    def task(self, sequence: int) -> TaskRef:
        seed, index = task_seed(self.swarm, self.peer, sequence)
        name = self.tasks[sequence % len(self.tasks)]
        return TaskRef(id=name, version=task_version(name), seed=seed, index=index)

    def group(
        self,
        sequence: int,
        created: float,
        *,
        texts: Sequence[str] | None = None,
        policy_version: int = 0,
        task: TaskRef | None = None,
        packed: bool = True,
        tokenizer: bytes = TOKENIZER,
        size: int = 8,
    ) -> RolloutGroup:
        """Question number `sequence` made at `created` Unix seconds: `size` completions, the first two right (builtin tasks)."""
        task = task or self.task(sequence)
        if texts is None:
            right = answer(task)
            texts = [right, right, *(f"{right}{i}" for i in range(size - 2))]
        return RolloutGroup(
            task=task,
            model=MODEL,
            tokenizer=tokenizer,
            policy_version=policy_version,
            created_at=int(created * 1000),
            sequence=sequence,
            sampling=SAMPLING,
            completions=[completion(text, packed=packed) for text in texts],
        )

    def own_group(self, sequence: int, **kwargs: object) -> OwnGroup:
        """The same as the trainer would hand it to the network process."""
        group = self.group(sequence, 0.0, **kwargs)  # type: ignore[arg-type]
        return OwnGroup(group.task, group.policy_version, group.sequence, group.sampling, group.completions)

    def long_group(self, sequence: int, **kwargs: object) -> OwnGroup:
        """A group of about 125 KB as sent: seven of its texts are 12,000 random characters."""
        rng = random.Random(sequence)
        texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=12_000)) for _ in range(7)]
        return self.own_group(sequence, texts=[answer(self.task(sequence)), *texts], **kwargs)

    def frame(self, message: msgspec.Struct, swarm: bytes | None = None) -> bytes:
        """`message` signed, compressed where that is shorter."""
        return envelope.seal(message, self.key, ids.DOMAIN_ROLLOUT, swarm or self.swarm)  # type: ignore[arg-type]

    def sign(self, payload: bytes, codec_name: str = "raw") -> bytes:
        """Any bytes signed: what only a hostile author sends."""
        return codec.encode(envelope.sign(payload, self.key, ids.DOMAIN_ROLLOUT, self.swarm, codec_name))  # type: ignore[arg-type]


def completion(text: str, *, packed: bool = True, logprob: float = -0.5) -> Completion:
    """One token per character, each of `logprob` nats."""
    count = max(1, len(text))
    ids_, logprobs = (tensors.pack_ids([ord(c) for c in text] or [0]), tensors.pack_logprobs([logprob] * count)) if packed else (b"", b"")
    return Completion(text=text, tokens=count, logprob=logprob * count, finish="eos", token_ids=ids_, logprobs=logprobs)


def answer(task: TaskRef) -> str:
    """The right answer of a builtin task."""
    return question(task).answer


def question(task: TaskRef) -> Item:
    """What a builtin task asks at an address."""
    spec = TASKS[task.id]
    return GENERATORS[spec.generator](task.seed + task.index, **spec.settings)


def hostile_frames(author: Author, now: float, sequence: int = 0) -> dict[str, tuple[bytes, str]]:
    """name → (frame, reason expected for it), by an author whose key is good. Takes sequence numbers from `sequence` on."""
    replace = msgspec.structs.replace
    stranger = Author(author.swarm, seed=999)
    other_swarm = Author(swarm_of("another"), seed=0)
    other_swarm.key = author.key

    def group(step: int, **changes: object) -> RolloutGroup:
        return replace(author.group(sequence + step, now), **changes)

    def with_task(step: int, **changes: object) -> bytes:
        made = author.group(sequence + step, now)
        return author.frame(replace(made, task=replace(made.task, **changes)))

    def with_first(step: int, **changes: object) -> bytes:
        made = author.group(sequence + step, now)
        return author.sign(codec.encode(replace(made, completions=[replace(made.completions[0], **changes), *made.completions[1:]])))

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
        "oversized": (good + b"\0" * limits.GOSSIP_BYTES, "oversize"),
        "deeply nested": (b"\x91" * 60_000, "schema"),
        "deeply nested payload": (author.sign(b"\x81\xa1a" + b"\x91" * 60_000), "schema"),
        "nested in a field": (author.sign(payload.replace(b"\xa4task\x85", b"\xa4task" + b"\x91" * 1000 + b"\x85")), "schema"),
        "map of a million": (author.sign(b"\xdf\x00\x0f\x42\x40"), "malformed"),
        "huge text header": (author.sign(payload[:30] + b"\xdb\xff\xff\xff\xff"), "malformed"),
        "duplicated key": (author.sign(_duplicated_key(payload)), "malformed"),
        "unknown field": (author.sign(_extra_key(payload)), "schema"),
        "NaN": (author.sign(_with_float(payload, b"\x7f\xf8" + b"\0" * 6)), "not_finite"),
        "infinity": (author.sign(_with_float(payload, b"\xff\xf0" + b"\0" * 6)), "not_finite"),
        "bad UTF-8": (author.sign(payload.replace(b"builtin/", b"builtin\xff")), "malformed"),
        "one completion": (author.sign(codec.encode(group(0, completions=group(0).completions[:1]))), "bounds"),
        "65 completions": (author.sign(codec.encode(group(0, completions=group(0).completions[:1] * 65))), "bounds"),
        "positive logprob": (with_first(0, logprob=1.0), "bounds"),
        "short token ids": (with_first(0, token_ids=b"\0\0\0\0"), "bounds"),
        "NaN in packed logprobs": (
            with_first(0, text="1", tokens=1, token_ids=b"", logprobs=tensors.pack_logprobs([float("nan")])),
            "not_finite",
        ),
        "zstd bomb": (author.sign(_bomb(), "zstd"), "oversize"),
        "zstd garbage": (author.sign(b"\x28\xb5\x2f\xfd" + b"\xff" * 50, "zstd"), "compression"),
        "wrong signature": (bytes(flipped), "signature"),
        "wrong swarm": (other_swarm.frame(group(0)), "signature"),
        "stale": (author.frame(author.group(sequence, now - limits.GROUP_AGE_SECONDS - 1)), "stale"),
        "future": (author.frame(author.group(sequence, now + limits.CLOCK_SKEW_SECONDS + 1)), "future"),
        "stolen": (author.frame(stolen), "seed"),
        "forged seed": (with_task(1, seed=5 << limits.INDEX_BITS), "seed"),
        "forged index": (with_task(1, index=12_345), "seed"),
        "evaluation seed": (with_task(1, seed=1 << 62), "seed"),
        "seed inside a block": (with_task(1, seed=7), "bounds"),
        "unknown task": (with_task(1, id="builtin/nothing"), "unknown_task"),
        "unknown version": (with_task(1, version="0000000000000000"), "unknown_version"),
        "sum that does not add up": (with_first(1, logprob=-9000.0), "tokens"),
        "more text than tokens": (with_first(1, text="1" * 300, tokens=1, logprob=-0.5, token_ids=b"", logprobs=b""), "tokens"),
        "control characters": (author.frame(author.group(sequence + 1, now, texts=["\x1b[2J", "1"])), "charset"),
        "bidirectional override": (author.frame(author.group(sequence + 1, now, texts=["1", "\u202e1"])), "charset"),
    }


@functools.cache
def _bomb() -> bytes:
    """50 MB of zeros in a few kilobytes."""
    return codec.compress(b"\0" * 50_000_000)


def _duplicated_key(payload: bytes) -> bytes:
    """The same map with its last key twice: decoders take the last one, parsers elsewhere the first."""
    return bytes([payload[0] + 1]) + payload[1:] + b"\xa8sequence\x01"


def _extra_key(payload: bytes) -> bytes:
    return bytes([payload[0] + 1]) + payload[1:] + b"\xa5extra\x01"


def _with_float(payload: bytes, bits: bytes) -> bytes:
    at = payload.index(b"temperature") + len(b"temperature") + 1
    return payload[:at] + bits + payload[at + 8 :]
