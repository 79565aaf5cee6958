"""What listings, pulls and connections cost between real hosts on loopback: the constants of
benchmarks.scale.

Two hosts in this process, so that its CPU time is that of both ends; bytes are those that their
sockets read. What a node pays for all that it asks and answers is the same sum, as everybody asks
as often as it is asked.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import trio
from swarmnode.rollouts.catalogue import Catalogue
from swarmnode.rollouts.serving import Serving

from benchmarks.gossip import SWARM, Meter, Run, group, swarm
from swarmnode.config import NetworkConfig, SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, Author
from swarmnode.p2p import guards, identity
from swarmnode.p2p.host import open_host
from swarmnode.p2p.network import Network
from swarmnode.rollouts.admission import Admission
from swarmnode.testing.scorer import InProcessScorer
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import GroupsRequest, GroupsResponse, ListingRequest, ListingResponse

REWARDS = [1.0] + [0.0] * 7
TIMES = 24
IDLE_NODES = 6
IDLE_SECONDS = 40.0


class Cost(msgspec.Struct, frozen=True):
    """Of both ends together."""

    cpu_ms: float
    bytes: float


class Constants(msgspec.Struct, frozen=True):
    listing: Cost
    """Asking for a listing that is full, and answering."""
    empty: Cost
    """The same where nothing is new."""
    pull: Cost
    """One group of `size` bytes in a request: asked for, given, admitted, scored."""
    more: Cost
    """Each further one in the same request."""
    size: float
    """Bytes of an envelope."""
    idle: Cost
    """A connection, per second, all that is said when nothing is shared; of one end."""


@contextlib.asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[Network, Network]]:
    """Two connected hosts."""
    async with contextlib.AsyncExitStack() as stack:
        opened: list[Network] = []
        for name in ("one", "other"):
            cfg = NetworkConfig(
                mdns=False,
                relay="off",
                initial_peers=[n.listen_addrs[0] for n in opened],
            )
            key = identity.load_or_create(directory / name / "identity.key")
            opened.append(
                await stack.enter_async_context(open_host(cfg, key, directory / name, swarm=SWARM))
            )
        await opened[0].wait_connected()
        await opened[1].wait_connected()
        yield opened[0], opened[1]


async def requests(size: int) -> tuple[Cost, Cost, Cost, Cost, float]:
    """`Constants` without `idle`, for groups of about `size` bytes."""
    guards.install()
    meter, clock = Meter(), _Clock()
    meter.install()
    with tempfile.TemporaryDirectory() as directory:
        async with two(Path(directory)) as (server, client):
            serving = Serving(
                Catalogue(b"", SWARM, b"lifetime"), lambda choice: True, lambda peer: True, clock
            )
            serving.start(server.requests)
            frames = _fill(serving, size)
            admission = Admission(
                SWARM, client.peer_id, BUILTIN_TASKS, SharingConfig(groups_per_second=16)
            )
            scorer = InProcessScorer()

            async def listing(position: int) -> None:
                life = b"lifetime" if position else b""
                data = await client.requests.request(
                    server.peer_id,
                    ids.LISTING_PROTOCOL,
                    codec.encode(ListingRequest(SWARM, life, position)),
                    deadline=10.0,
                    max_response_bytes=limits.LISTING_RESPONSE_BYTES,
                )
                clock.pass_by()
                assert len(
                    codec.decode(data, ListingResponse, limits.LISTING_RESPONSE_BYTES).groups
                ) == (0 if position else limits.NEWEST)

            async def pull(contents: list[bytes]) -> None:
                data = await client.requests.request(
                    server.peer_id,
                    ids.GROUPS_PROTOCOL,
                    codec.encode(GroupsRequest(contents)),
                    deadline=10.0,
                    max_response_bytes=limits.GROUPS_RESPONSE_BYTES,
                )
                clock.pass_by()
                for answer in codec.decode(
                    data, GroupsResponse, limits.GROUPS_RESPONSE_BYTES
                ).groups:
                    candidate = admission.check_pulled(answer.body, time.time())
                    texts = [completion.text for completion in candidate.group.completions]  # type: ignore[union-attr]
                    await scorer.score_many([(candidate.group.task, texts)])  # type: ignore[union-attr]

            await listing(0)
            full = await _cost(meter, TIMES, lambda n: listing(0))
            empty = await _cost(meter, TIMES, lambda n: listing(len(frames)))
            contents = [envelope.content_id(frame) for frame in frames]
            single = await _cost(meter, TIMES, lambda n: pull([contents[n]]))
            eight = await _cost(
                meter,
                (len(contents) - TIMES) // 8,
                lambda n: pull(contents[TIMES + 8 * n : TIMES + 8 * n + 8]),
            )
    more = Cost(max(0.0, eight.cpu_ms - single.cpu_ms) / 7, (eight.bytes - single.bytes) / 7)
    return full, empty, single, more, statistics.fmean(len(frame) for frame in frames)


async def idle() -> Cost:
    """A connection's share of what a host does while nothing is shared, one end's."""
    guards.install()
    meter = Meter()
    meter.install()
    run = Run(IDLE_NODES, 2000, "after", 0)
    with tempfile.TemporaryDirectory() as directory:
        async with swarm(run, meter, Path(directory)) as nodes:
            await trio.sleep(5.0)
            links = sum(len(network.connected()) for _, _, network in nodes)
            began, read, clock = time.process_time(), meter.bytes, trio.current_time()
            await trio.sleep(IDLE_SECONDS)
            seconds = links * (trio.current_time() - clock)
            return Cost(
                1000 * (time.process_time() - began) / seconds, (meter.bytes - read) / seconds
            )


def measure(size: int) -> Constants:
    """About a minute."""
    listing, empty, pull, more, actual = trio.run(requests, size)
    return Constants(listing, empty, pull, more, actual, trio.run(idle))


class _Clock:
    """Jumps, so that nobody's allowance is used up."""

    def __init__(self) -> None:
        self._at = time.time()

    def __call__(self) -> float:
        return self._at

    def pass_by(self) -> None:
        self._at += 3.0


def _fill(serving: Serving, size: int) -> list[bytes]:
    """Groups of several authors, each as signed."""
    frames, now = [], time.time()
    for number in range(TIMES + 5 * 8):
        author = Author(SWARM, seed=number)
        made = group(author, 0, size)
        rollout = author.group(0, now, texts=[completion.text for completion in made.completions])
        frames.append(author.frame(rollout))
        serving.put(rollout, author.peer, frames[-1], REWARDS)
    return frames


async def _cost(meter: Meter, times: int, once: Callable[[int], Awaitable[None]]) -> Cost:
    began, read = time.process_time(), meter.bytes
    for number in range(times):
        await once(number)
    return Cost(1000 * (time.process_time() - began) / times, (meter.bytes - read) / times)
