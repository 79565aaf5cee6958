"""Two thousand peers connect to one real node and leave; memory and time per peer stay constant."""

import gc
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import trio

from swarmnode.config import NetworkConfig, SharingConfig
from swarmnode.daemon.observer import PEER_ROWS, NodeObserver, ObservedParts
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.link.messages import Hello
from swarmnode.observe.collector import MAX_SERIES, make_registry
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.snapshot import NodeInfo
from swarmnode.observe.watch import SupervisorWatch, TrainerWatch
from swarmnode.p2p import identity
from swarmnode.p2p.budget import Meter
from swarmnode.p2p.network import open_host
from swarmnode.p2p.peers import MAX_PEERS
from swarmnode.p2p.summaries import MAX_ROWS
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.rollouts.network.shelf import MOST_GROUPS
from swarmnode.wire import codec, envelope, ids
from swarmnode.wire.envelope import Credentials, seal_session, seal_summary
from swarmnode.wire.listings import GroupsRequest, ListingRequest
from swarmnode.wire.messages import NeighboursRequest, Session, Summary
from tests.support.fakes.scorer import InProcessScorer
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SWARM = swarm_of("many peers")
PEERS = 2000
STATUS_BYTES = 128 * 1024
PEER_BYTES = 24 * 1024
"""Expected memory per peer: a group in the pool and on the shelf, an author, a summary, names and
counts."""


def resident():
    """Return the memory of this process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class RecordedRequests:
    """A real host's requests; simulated peers call the handlers as streams would."""

    def __init__(self, real):
        self.real = real
        self.handlers = {}

    def serve(self, protocol, handler, **bounds):
        self.handlers[protocol] = handler
        self.real.serve(protocol, handler, **bounds)

    async def request(self, *args, **kwargs):
        return await self.real.request(*args, **kwargs)

    def statistics(self):
        return self.real.statistics()


class Node:
    """The parts of a network process around one real host, except those that wait for a trainer."""

    def __init__(self, network, key, directory):
        self.network, self.recorded = network, RecordedRequests(network.requests)
        self.recorded.handlers[ids.NEIGHBOURS_PROTOCOL] = network.neighbours._answer
        network.requests = self.recorded
        self.exchange = RolloutExchange(
            network,
            InProcessScorer(),
            Credentials(key, SWARM),
            GroupRules(BUILTIN_TASKS),
            SharingConfig(),
        )
        self.exchange.set_policy(Hello(MODEL, TOKENIZER, 0, 120))
        meter = Meter(NetworkConfig(), "", directory, lambda: network.statistics().traffic)
        parts = ObservedParts(
            network,
            meter,
            SupervisorWatch(directory / "supervisor.json"),
            TrainerWatch(),
            rollouts=self.exchange,
        )
        self.observer = NodeObserver(
            NodeInfo(peer=network.peer_id, started_at=time.time()), parts, directory
        )

    async def meet(self, number):
        """Simulate a peer: connect, send a summary and a group, send every request, fail once,
        disconnect."""
        author, now = Author(SWARM, seed=number), trio.current_time()
        peer, network = author.peer, self.network
        network.peers.add(
            peer, f"/ip4/10.{number // 250}.{number % 250}.7/tcp/9512/p2p/{peer}", "exchange", now
        )
        network.peers.record_connected(peer, inbound=True, now=now)
        frame = author.frame(author.group(0, time.time()))
        candidate = self.exchange.admission.check(frame, time.time())  # as if it had been fetched
        self.exchange._enqueue(msgspec.structs.replace(candidate, source=peer))
        at = int(time.time() * 1000)
        summary = Summary("n" * 32, "1.0", at, 1, 1, 1, 0.5, 1, 1, 1)
        request = NeighboursRequest(
            SWARM,
            [],
            seal_session(Session(bytes(16), at, at), author.key, SWARM),
            seal_summary(summary, author.key, SWARM),
            1,
        )
        await self.ask(peer, ids.NEIGHBOURS_PROTOCOL, request)
        await self.ask(peer, ids.LISTING_PROTOCOL, ListingRequest(SWARM, b"", 0, 0))
        await self.ask(
            peer,
            ids.GROUPS_PROTOCOL,
            GroupsRequest([bytes([n]) * 32 for n in range(15)] + [envelope.content_id(frame)]),
        )
        network.rejected(peer, "malformed")
        network.peers.record_disconnected(peer, now)
        if number % 32 == 0:
            self.exchange.draw(Draw(number, 8, number // 256, 4))
            await trio.lowlevel.checkpoint()

    async def meet_all(self, numbers):
        """Simulate many peers; returns the CPU time in seconds."""
        began = time.process_time()
        for number in numbers:
            await self.meet(number)
        return time.process_time() - began

    async def ask(self, peer, protocol, request):
        return await self.recorded.handlers[protocol](peer, codec.encode(request))

    def samples(self):
        """Return the (metric, labels) pairs of a scrape."""
        found = [
            sample
            for family in make_registry(self.observer.snapshot).collect()
            for sample in family.samples
        ]
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in found}

    def status(self):
        return status_json(self.observer.snapshot(), History())


async def test_cost_per_peer_is_constant(tmp_path):
    key = identity.load_or_create(tmp_path / "identity.key")
    async with open_host(
        NetworkConfig(mdns=False, relay="off"), key, tmp_path, swarm=SWARM
    ) as network:
        node = Node(network, key.private_key, tmp_path)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.exchange.run)
            await node.meet_all(range(200, 400))
            few, status_of_few = node.samples(), len(node.status())
            before = resident()
            await node.meet_all(range(400, 1200))
            # every table that has room for a thousand is full by now
            early = await node.meet_all(range(1200, 1400))
            await node.meet_all(range(1400, PEERS))
            grown = resident() - before
            late = await node.meet_all(range(PEERS, PEERS + 200))
            await until(lambda: node.observer.snapshot().rollouts.admission.admitted >= PEERS)
            snapshot, many, status_of_many = (
                node.observer.snapshot(),
                node.samples(),
                len(node.status()),
            )
            nursery.cancel_scope.cancel()
    assert snapshot.rollouts.admission.admitted == PEERS
    assert snapshot.network.peers.known <= MAX_PEERS
    assert len(snapshot.peers) == PEER_ROWS
    assert len(snapshot.swarm.rows) == MAX_ROWS
    assert snapshot.rollouts.serving.shelf.groups <= MOST_GROUPS
    assert grown < (PEERS - 400) * PEER_BYTES
    assert late < 2 * early + 0.5
    by_name = Counter(name for name, _ in many)
    assert max(by_name.values()) <= MAX_SERIES
    assert len(many) <= len(few) + 8  # reasons and outcomes that had not occurred yet
    assert not [
        labels
        for _, labels in many
        for _, value in labels
        if len(value) > 40 and value != snapshot.node.peer
    ]
    assert status_of_many < min(STATUS_BYTES, status_of_few + 8 * 1024)
