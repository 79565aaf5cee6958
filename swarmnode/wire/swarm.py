"""Swarm id of a swarm without a manifest: a hash of its name, its tasks with their versions, and
its protocols."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from swarmnode.wire import ids, limits


def swarm_id(
    name: str, tasks: Mapping[str, str], protocols: tuple[str, ...] = ids.PROTOCOLS
) -> bytes:
    """Return the 32-byte id of the swarm `name` that trains on `tasks` (task id → task version).

    It is blake2b-256 over the domain and the msgpack of `[name, [[task id, version], …] by task id,
    [protocol id, …]]`, so that nodes that cannot use each other's rollouts are in different swarms.
    Raises ValueError without a name or a task.
    """
    if not 1 <= len(name.encode()) <= limits.SWARM_NAME_BYTES:
        raise ValueError(f"a swarm's name is 1 to {limits.SWARM_NAME_BYTES} bytes")
    if not tasks:
        raise ValueError("a swarm has at least one task")
    # UTF-8 order equals code point order, so every language sorts alike
    description = [
        name,
        sorted([task, version] for task, version in tasks.items()),
        sorted(protocols),
    ]
    return hashlib.blake2b(
        ids.DOMAIN_SWARM + msgspec.msgpack.encode(description), digest_size=limits.SWARM_ID_BYTES
    ).digest()
