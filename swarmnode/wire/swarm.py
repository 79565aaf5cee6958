"""What makes two nodes members of one swarm, today: its name, its tasks at their versions, and the
protocols they speak."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from swarmnode.wire import ids, limits


def swarm_id(
    name: str, tasks: Mapping[str, str], protocols: tuple[str, ...] = ids.PROTOCOLS
) -> bytes:
    """The 32-byte id of the swarm `name` that trains on `tasks` (task id to task version).

    blake2b-256 over the domain string and the msgpack of `[name, [[task id, version], …] by task
    id, [protocol id, …]]`, so that nodes which could not use each other's rollouts never meet on a
    topic. Raises ValueError when there is no name or no task.
    """
    if not 1 <= len(name.encode()) <= limits.SWARM_NAME_BYTES:
        raise ValueError(f"a swarm's name is 1 to {limits.SWARM_NAME_BYTES} bytes")
    if not tasks:
        raise ValueError("a swarm has at least one task")
    # UTF-8 order, which is also code point order, so that every language sorts alike.
    description = [
        name,
        sorted([task, version] for task, version in tasks.items()),
        sorted(protocols),
    ]
    return hashlib.blake2b(
        ids.DOMAIN_SWARM + msgspec.msgpack.encode(description), digest_size=limits.SWARM_ID_BYTES
    ).digest()
