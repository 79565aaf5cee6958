"""An author with a key that signs valid groups, as other nodes receive them.

author = Author(swarm)
frame = author.frame(author.group(sequence=7, created=now))
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.tasks.builtin import GENERATORS, Item
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire import codec, envelope, ids, limits, tensors
from swarmnode.wire.manifest import swarm_id
from swarmnode.wire.messages import Codec, Completion, RolloutGroup, SamplingParams, TaskRef

MODEL = b"m" * 32
TOKENIZER = b"t" * 32
BUILTIN_TASKS = ("builtin/copy", "builtin/sum")
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=limits.TOKENS)


def swarm_of(name: str = "test", tasks: Sequence[str] = BUILTIN_TASKS) -> bytes:
    """Return the 32-byte id of a swarm that trains on `tasks`."""
    return swarm_id(name, {task: task_version(task) for task in tasks})


class Author:
    """A node as its peers see it: a key, a stream of questions, and completions with different
    rewards.

    Args:
        swarm: Id of the swarm.
        seed: Seed of the key, for reproducible tests.
        tasks: Names of its tasks.
        key: The key; by default derived from `seed`.
    """

    def __init__(
        self,
        swarm: bytes,
        seed: int = 0,
        tasks: Sequence[str] = BUILTIN_TASKS,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        self.swarm = swarm
        self.tasks = tasks
        self.key = key or Ed25519PrivateKey.from_private_bytes(
            hashlib.blake2b(f"author {seed}".encode(), digest_size=32).digest()
        )
        self.peer = envelope.peer_id(self.key.public_key().public_bytes_raw())

    def task(self, sequence: int) -> TaskRef:
        """Return the task and seed of question number `sequence`."""
        name = self.tasks[sequence % len(self.tasks)]
        seed, index = task_seed(self.swarm, self.peer, sequence, name)
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
        """Return a group with question number `sequence`. Of a builtin task, the first two
        completions are right.

        Args:
            created: Unix seconds.
            texts: Texts of the completions; by default `size` texts.
            packed: True to include token ids and log-probabilities.
        """
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

    def frame(self, message: msgspec.Struct, swarm: bytes | None = None) -> bytes:
        """Sign a message, and compress it if that makes it shorter."""
        return envelope.seal(message, self.key, ids.DOMAIN_ROLLOUT, swarm or self.swarm)  # type: ignore[arg-type]

    def sign(self, payload: bytes, codec_name: Codec = "raw") -> bytes:
        """Sign any bytes, as only a hostile author would."""
        signed = envelope.sign(payload, self.key, ids.DOMAIN_ROLLOUT, self.swarm, codec_name)
        return codec.encode(signed)


def completion(text: str, *, packed: bool = True, logprob: float = -0.5) -> Completion:
    """Return a completion with one token per character.

    Args:
        logprob: Log-probability of each token, nats.
    """
    count = max(1, len(text))
    ids_, logprobs = (
        (tensors.pack_ids([ord(c) for c in text] or [0]), tensors.pack_logprobs([logprob] * count))
        if packed
        else (b"", b"")
    )
    return Completion(
        text=text,
        tokens=count,
        logprob=logprob * count,
        finish="eos",
        token_ids=ids_,
        logprobs=logprobs,
    )


def answer(task: TaskRef) -> str:
    """Return the right answer to a question of a builtin task."""
    return question(task).answer


def question(task: TaskRef) -> Item:
    """Return a question of a builtin task."""
    spec = TASKS[task.id]
    return GENERATORS[spec.generator](task.seed + task.index, **spec.settings)
