"""Real hosts on loopback that exchange groups, in one process, and the bytes that they read."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import trio
from libp2p.io.trio import TrioTCPStream

from swarmnode.config import NetworkConfig
from swarmnode.demo.liar.author import Author, answer, swarm_of
from swarmnode.p2p import guards, identity
from swarmnode.p2p.network import Libp2pNetwork, open_host
from swarmnode.rollouts.groups import OwnGroup

SWARM = swarm_of("pulls")
KNOWN_PEERS = 8
"""Nodes that a node connects to; on average as many connect to it."""
JOIN_SECONDS = 300.0
SETTLE_SECONDS = 6.0


class Meter:
    """Counts the bytes that this process reads from sockets."""

    def __init__(self) -> None:
        self.bytes = 0

    def install(self) -> None:
        """Count until the process ends."""
        read = TrioTCPStream.read

        async def counting(stream: TrioTCPStream, n: int | None = None) -> bytes:
            data = await read(stream, n)
            self.bytes += len(data)
            return data

        TrioTCPStream.read = counting  # type: ignore[assignment, method-assign]


@contextlib.asynccontextmanager
async def connected_hosts(
    nodes: int, seed: int, directory: Path
) -> AsyncIterator[list[tuple[Libp2pNetwork, Author]]]:
    """Open `nodes` hosts, connected as they would be after some minutes."""
    rng = random.Random(seed)
    guards.install()
    guards.swarm.INBOUND_PER_ADDRESS = nodes**2  # all share 127.0.0.1
    async with contextlib.AsyncExitStack() as stack:
        opened: list[tuple[Libp2pNetwork, Author]] = []
        for number in range(nodes):
            where = directory / str(number)
            key = identity.load_or_create(where / "identity.key")
            known = [
                network.listen_addrs[0]
                for network, _ in rng.sample(opened, min(len(opened), KNOWN_PEERS))
            ]
            cfg = NetworkConfig(mdns=False, relay="off", initial_peers=known)
            network = await stack.enter_async_context(open_host(cfg, key, where, swarm=SWARM))
            opened.append((network, Author(SWARM, key=key.private_key)))
        with trio.fail_after(JOIN_SECONDS):
            while any(  # noqa: ASYNC110
                len(network.connected()) < min(number, KNOWN_PEERS)
                for number, (network, _) in enumerate(opened)
            ):
                await trio.sleep(0.2)
        yield opened


def group(author: Author, sequence: int, size: int, policy_version: int = 0) -> OwnGroup:
    """Make a group whose frame has about `size` bytes: one right answer, and seven texts of random
    letters."""
    rng = random.Random(f"{author.peer} {sequence}")
    # one token per letter: its id, its log-probability and the letter, compressed
    letters = max(1, (size - 1_200) // 11)
    texts = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=letters)) for _ in range(7)
    ]
    right = answer(author.task(sequence))
    return author.own_group(sequence, texts=[right, *texts], policy_version=policy_version)
