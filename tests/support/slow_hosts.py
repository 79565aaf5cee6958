"""`python -m tests.support.slow_hosts` measures how many groups of peers real hosts draw per step
while thirty slow identities are connected, against the same run without them. Root only.

    0 s     four hosts start, each in a network namespace with an address in a /24 of its own
    20 s    the crowd connects to all of them, from one address or from thirty
    80 s    a newcomer starts; the count of groups and of listing bytes begins
    140 s   the count ends; the newcomer gets up to 120 s for its first group of a peer

The hosts have libp2p, the rollout service and a scorer, but no trainer: each publishes two groups
per step of ten seconds and draws up to eight. Each honest host is a process of its own, because
`guards.swarm` counts the inbound connections of an address per process. The crowd is one process.
"""

from __future__ import annotations

import argparse
import contextvars
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import structlog
import trio

from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS
from swarmnode.p2p.identity import Identity, load_or_create
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingResponse,
)
from tests.support import netns
from tests.support.authors import Author
from tests.support.fakes.scorer import InProcessScorer
from tests.support.hosts import host
from tests.support.pulling import LIFE, SWARM, policy, rewards_of

HONEST, CROWD = 4, 30
STEP_SECONDS, PUBLISHED, WANTED = 10.0, 2, 8
JOINS, COUNTS, ENDS, NEWCOMER_SECONDS = 20.0, 80.0, 140.0, 120.0
KINDS = ("hanger", "staller", "late")
"""Never answer a fetch; never answer a poll; answer `busy` to a fetch after LATE_SECONDS."""
LATE_SECONDS = 10.0
SOURCE: contextvars.ContextVar[str] = contextvars.ContextVar("SOURCE")
"""Address from which connections of a task are dialled."""


@dataclass(frozen=True)
class Place:
    """A host before it runs."""

    identity: Identity
    ip: str
    port: int
    directory: Path

    @property
    def address(self) -> str:
        return f"/ip4/{self.ip}/tcp/{self.port}"

    def settings(self, bootstrap: Sequence[Place]) -> dict[str, list[str]]:
        """Return its fields of NetworkConfig."""
        known = [f"{each.address}/p2p/{each.identity.peer_id}" for each in bootstrap]
        return {"listen_addrs": [self.address], "initial_peers": known}


class Node:
    """An honest host with its trainer's messages.

    Args:
        place: The host.
        nodes: All honest hosts: the bootstrap peer first, the newcomer last.
        rng: Source of randomness.
        began: Start of the run, monotonic seconds.
    """

    def __init__(self, place: Place, nodes: list[Place], rng: random.Random, began: float) -> None:
        self._place = place
        self._nodes = nodes
        self._honest = {each.identity.peer_id for each in nodes}
        self._author = Author(SWARM, key=place.identity.private_key)
        self._rng = rng
        self._began = began
        self._steps = self._groups = 0
        self._drew = trio.Event()
        """Set when a peer's group was drawn."""

    async def run(self, results: Connection) -> None:
        """Run without end. Send the figures, or the newcomer's seconds until its first group."""
        is_newcomer = self._place is self._nodes[-1]
        await self._sleep_until(COUNTS if is_newcomer else 0.0)
        settings = self._place.settings(self._nodes[:1])
        async with host(self._place.directory, swarm=SWARM, **settings) as network:
            exchange = RolloutExchange(
                network,
                InProcessScorer(seconds=0.01),
                Credentials(self._author.key, SWARM),
                GroupRules(BUILTIN_TASKS),
                SharingConfig(),
                rng=random.Random(self._rng.getrandbits(64)),
            )
            exchange.set_policy(policy())
            async with trio.open_nursery() as nursery:
                await nursery.start(exchange.run)
                nursery.start_soon(self._train, exchange)
                if is_newcomer:
                    results.send(await self._wait_for_group())
                else:
                    results.send(await self._count(exchange, network))

    async def _sleep_until(self, seconds: float) -> None:
        await trio.sleep(max(0.0, self._began + seconds - time.monotonic()))

    async def _train(self, exchange: RolloutExchange) -> None:
        rng, sequence = self._rng, 0
        await trio.sleep(rng.uniform(0, STEP_SECONDS))
        while True:
            for _ in range(PUBLISHED):
                await trio.sleep(STEP_SECONDS / PUBLISHED * rng.uniform(0.8, 1.2))
                own = self._author.own_group(sequence)
                exchange.publish(msgspec.structs.replace(own, rewards=await rewards_of(own)))
                sequence += 1
            drawn = exchange.draw(Draw(1, WANTED, self._steps, most_per_peer(WANTED))).groups
            for group in drawn:
                assert group.peer in self._honest
                exchange.authors.judged(group.peer, "used")
                self._drew.set()
            self._steps += 1
            self._groups += len(drawn)

    async def _wait_for_group(self) -> float:
        waited = NEWCOMER_SECONDS
        with trio.move_on_after(NEWCOMER_SECONDS):
            await self._drew.wait()
            waited = time.monotonic() - self._began - COUNTS
        await self._sleep_until(ENDS)
        return waited

    async def _count(self, exchange: RolloutExchange, network: Libp2pNetwork) -> Counter[str]:
        """Return steps, groups and bytes of listings between COUNTS and ENDS, and the outcomes of
        polls and fetches since the start."""
        figures = Counter[str]()
        for moment, sign in ((COUNTS, -1), (ENDS, 1)):
            await self._sleep_until(moment)
            figures["steps"] += sign * self._steps
            figures["groups"] += sign * self._groups
            traffic = network.statistics().traffic
            for counts in (traffic.received, traffic.sent):
                figures["listing bytes"] += sign * counts.get(ids.LISTING_PROTOCOL, 0)
        pulling = exchange.statistics().pulling
        figures["crowd connected"] = len(set(network.connected()) - self._honest)
        figures.update({f"poll {name}": n for name, n in pulling.listings.items()})
        figures.update({f"fetch {name}": n for name, n in pulling.pulled.items()})
        return figures


class Slow:
    """One slow identity. kind: of KINDS."""

    def __init__(self, kind: str, place: Place) -> None:
        self._kind = kind
        self._place = place
        self._listed = 0

    async def run(self, victims: list[Place]) -> None:
        """Dial every victim, at once and after each disconnect."""
        SOURCE.set(self._place.ip)
        settings = self._place.settings(victims)
        async with host(self._place.directory, swarm=SWARM, **settings) as network:
            network.peers.target = 0  # no connections between identities of the crowd
            network.pin([each.identity.peer_id for each in victims])
            bounds = {"max_request_bytes": 4096, "max_response_bytes": 2**21, "concurrent": 64}
            serve = partial(network.requests.serve, deadline=float("inf"), **bounds)
            serve(ids.LISTING_PROTOCOL, self._list)
            serve(ids.GROUPS_PROTOCOL, self._give)
            await trio.sleep_forever()

    async def _list(self, peer: str, request: bytes) -> bytes:
        """List as many new groups as fit, each of the largest size, by an author of its own."""
        if self._kind == "staller":
            await trio.sleep_forever()
        now, draw, size = int(time.time() * 1000), random.randbytes, limits.GROUP_BYTES
        claims = [
            ListedGroup(draw(32), draw(32), BUILTIN_TASKS[0], now, size, limits.SPREAD)
            for _ in range(limits.LISTED)
        ]
        self._listed += len(claims)
        return codec.encode(ListingResponse("ok", LIFE, self._listed, claims))

    async def _give(self, peer: str, request: bytes) -> bytes:
        await trio.sleep(LATE_SECONDS if self._kind == "late" else float("inf"))
        asked = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES).contents
        return codec.encode(GroupsResponse([GroupResponse("busy")] * len(asked)))


def run_node(namespace: str, *options: object) -> None:
    """Run an honest host in the namespace. options: those of `Node`, and its pipe."""
    _prepare(namespace)
    *arguments, results = options
    trio.run(Node(*arguments).run, results)  # type: ignore[arg-type]


def run_crowd(namespace: str, kind: str, foes: list[Place], victims: list[Place]) -> None:
    """Run the crowd in the namespace, from JOINS on."""
    _prepare(namespace)
    dial = trio.open_tcp_stream
    trio.open_tcp_stream = lambda *where: dial(*where, local_address=SOURCE.get())  # type: ignore

    async def main() -> None:
        await trio.sleep(JOINS)
        async with trio.open_nursery() as nursery:
            for foe in foes:
                nursery.start_soon(Slow(kind, foe).run, victims)

    trio.run(main)


def _prepare(namespace: str) -> None:
    netns.enter(namespace)
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def measure(kind: str, addresses: int, seed: int) -> tuple[list[Counter[str]], float]:
    """Run one swarm. Return the figures of the four hosts, and the newcomer's seconds.

    Args:
        kind: Of KINDS; without a crowd if empty.
        addresses: Number of addresses of the crowd.
        seed: Seed of the nodes' randomness. That of libp2p and trio has no seed.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, netns.Topology() as net:

        def place(name: str, ip: str, port: int) -> Place:
            directory = Path(folder) / name
            directory.mkdir()
            return Place(load_or_create(directory / "identity.key"), ip, port, directory)

        nodes = [place(f"n{i}", f"45.1.{i}.7", 4001) for i in range(HONEST + 1)]
        foes = [place(f"h{i}", f"45.99.{i % addresses}.7", 5000 + i) for i in range(CROWD)]
        for i, node in enumerate(nodes):
            _add_namespace(net, f"n{i}", [node.ip])
        _add_namespace(net, "crowd", sorted({foe.ip for foe in foes}))
        began, processes, results = time.monotonic(), [], []
        for i, node in enumerate(nodes):
            receiver, sender = fork.Pipe(duplex=False)
            results.append(receiver)
            rng = random.Random(f"{seed} {i}")
            options = (net.file(f"n{i}"), node, nodes, rng, began, sender)
            processes.append(fork.Process(target=run_node, args=options, daemon=True))
        if kind:
            options = (net.file("crowd"), kind, foes, nodes)
            processes.append(fork.Process(target=run_crowd, args=options, daemon=True))
        for process in processes:
            process.start()
        try:
            last = began + COUNTS + NEWCOMER_SECONDS + 60.0
            if not all(each.poll(max(0.0, last - time.monotonic())) for each in results):
                raise TimeoutError("a host sent no figures")
            *counted, waited = (each.recv() for each in results)
            return counted, waited
        finally:
            for process in processes:
                process.kill()
                process.join()


def _add_namespace(net: netns.Topology, name: str, ips: list[str]) -> None:
    """Add a namespace with several addresses, from which every address is on the link."""
    net.public(name, ips[0])
    for ip in ips[1:]:
        net.run(name, ["ip", "addr", "add", f"{ip}/32", "dev", "outside"], check=True)
    net.run(name, ["ip", "route", "add", "default", "dev", "outside"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.slow_hosts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--addresses", nargs="+", type=int, default=(1, CROWD))
    args = parser.parse_args()
    if reason := netns.missing():
        sys.exit(reason)
    crowds = [(kind, count) for kind in args.kinds for count in args.addresses]
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        usual = 0.0, 0
        for kind, addresses in [("", 1), *crowds]:
            counted, waited = measure(kind, addresses, seed)
            total = sum(counted, Counter())
            groups, listing = total["groups"] / total["steps"], total["listing bytes"]
            usual = usual if kind else (groups, listing)
            lowest = min(each["groups"] / each["steps"] for each in counted)
            print(
                f"seed {seed} {kind or 'no crowd'}, {addresses} addresses: {groups:.2f} groups per"
                f" step ({groups / usual[0]:.0%}; of the worst host {lowest:.2f}), listings ×"
                f" {listing / usual[1]:.2f}, newcomer {waited:.0f} s, {dict(total)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
