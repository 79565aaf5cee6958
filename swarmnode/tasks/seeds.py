"""Addresses of questions: the sequence of each node's questions, and the held-out questions. A node
cannot choose its questions, and training never uses held-out questions.

A question's address is (seed, index). reasoning-gym draws item i of a dataset from `Random(seed +
i)`, so two datasets with close seeds are the same stream, shifted. A seed is therefore a multiple
of 2**20 that starts a block of 2**20 items, and two blocks share no item. A seed has 63 bits:

    bit 62        1 for evaluation, 0 for training
    bits 20..61   block: 42 bits of a hash
    bits 0..19    zero: room for the index

A training block follows from (swarm, peer, sequence >> 20, task), so a receiver can check it. The
task is chosen first: a node cannot search for a choice that leads to a question that it has seen.
Blocks are random, not assigned. Of n blocks, two coincide with probability of about n**2 / 2**43
(1e-7 for a thousand nodes with a million groups each); these two nodes then have the same
questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from swarmnode.wire.ids import DOMAIN_EVALUATION, DOMAIN_SEED, DOMAIN_TASK
from swarmnode.wire.limits import INDEX_BITS, INTEGER_BITS
from swarmnode.wire.messages import TaskRef

INDEX_SPAN = 2**INDEX_BITS
"""Number of items in a block."""
BLOCK_BITS = 42
EVALUATION_BIT = 1 << (INDEX_BITS + BLOCK_BITS)
SEED_LIMIT = EVALUATION_BIT << 1
"""Exclusive limit of seeds and of seed + index: 2**63."""
SEQUENCE_LIMIT = 2**INTEGER_BITS


def task_seed(swarm: bytes, peer: str, sequence: int, task: str) -> tuple[int, int]:
    """Return the address (seed, index) of a node's question number `sequence`.

    Args:
        swarm: 32-byte swarm id.
        peer: base58 peer id.
        sequence: the node's own counter of questions, 0 to 2**63 - 1.
        task: name of the question's task.

    Raises:
        ValueError: an argument is outside its range.
    """
    stream = _stream(swarm, peer, sequence, sequence >> INDEX_BITS)
    data = DOMAIN_SEED + stream + task.encode()
    digest = hashlib.blake2b(data, digest_size=32).digest()
    return _block(digest) << INDEX_BITS, sequence & (INDEX_SPAN - 1)


def check_seed(swarm: bytes, peer: str, sequence: int, ref: TaskRef) -> bool:
    """Return True if `ref` has the address of its task for `peer` at `sequence`.

    Never raises, because all arguments may come from a peer.
    """
    try:
        return task_seed(swarm, peer, sequence, ref.id) == (ref.seed, ref.index)
    except ValueError:  # an invalid length or range; UnicodeEncodeError is a ValueError too
        return False


def choose_task(names: Sequence[str], swarm: bytes, peer: str, sequence: int) -> str:
    """Return the task of a node's question number `sequence`, uniform over the distinct `names`.
    The order of `names` does not matter.

    Raises:
        ValueError: There is no name, or an argument is outside its range (`task_seed`).
    """
    distinct = sorted(set(names))
    if not distinct:
        raise ValueError("no task to choose from")
    data = DOMAIN_TASK + _stream(swarm, peer, sequence, sequence)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return distinct[int.from_bytes(digest, "big") % len(distinct)]


def evaluation_seed(task_id: str, block: int = 0) -> int:
    """Return the seed of a block of held-out questions. It is the same for every node and swarm, so
    that held-out rewards are comparable.

    Raises:
        ValueError: `block` is not in 0 to 2**64 - 1.
    """
    if not 0 <= block < 2**64:
        raise ValueError("block is outside 0 to 2**64 - 1")
    digest = hashlib.blake2b(
        DOMAIN_EVALUATION + task_id.encode() + b"\0" + block.to_bytes(8, "big"), digest_size=32
    ).digest()
    return EVALUATION_BIT | (_block(digest) << INDEX_BITS)


def is_evaluation(seed: int) -> bool:
    """Return True if questions of this seed are held out: never trained on, never accepted from a
    peer.
    """
    return bool(seed & EVALUATION_BIT)


def environment_seed(seed: int, index: int) -> int:
    """Return the environment's seed for an address: 32 bits, the limit of NumPy's generators; odd
    only for held-out questions.
    """
    digest = hashlib.blake2b((seed + index).to_bytes(8, "big"), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1 << 1 | is_evaluation(seed)


def is_address(seed: int, index: int) -> bool:
    """Return True if (seed, index) is a valid address: seed a multiple of 2**20 in 0 to 2**63 - 1,
    index in 0 to 2**20 - 1.
    """
    return 0 <= seed < SEED_LIMIT and seed % INDEX_SPAN == 0 and 0 <= index < INDEX_SPAN


def _stream(swarm: bytes, peer: str, sequence: int, number: int) -> bytes:
    """Return the hash input that identifies a node's questions at `number`. Raises ValueError."""
    if len(swarm) != 32:
        raise ValueError(f"a swarm id has 32 bytes, not {len(swarm)}")
    if not 0 <= sequence < SEQUENCE_LIMIT:
        raise ValueError("sequence is outside 0 to 2**63 - 1")
    return swarm + peer.encode() + number.to_bytes(8, "big")


def _block(digest: bytes) -> int:
    """Return the first 42 bits of a digest, big-endian."""
    return int.from_bytes(digest[:8], "big") >> (64 - BLOCK_BITS)
