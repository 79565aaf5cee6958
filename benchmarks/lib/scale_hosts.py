"""Costs of listings, fetches and connections between real hosts on loopback, for benchmarks.scale.

Two hosts share this process, so its CPU time is that of both ends. A node pays the same sum for
what it requests and answers, since nodes request as often as they answer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import trio

from benchmarks.lib.pull_hosts import SETTLE_SECONDS, SWARM, Meter, connected_hosts, group
from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, Author
from swarmnode.rollouts.admission import Admission
from swarmnode.rollouts.groups import Candidate
from swarmnode.rollouts.sampling import spread
from swarmnode.rollouts.shelf import Shelf, ShelfServer
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingRequest,
    ListingResponse,
)
from tests.support.fakes.scorer import InProcessScorer

REWARDS = [1.0] + [0.0] * 7
LIFE = b"lifetime"
TIMES = 24
IDLE_NODES = 6
IDLE_SECONDS = 40.0


class Cost(msgspec.Struct, frozen=True):
    """CPU time and bytes of both ends together."""

    cpu_ms: float
    bytes: float


class Constants(msgspec.Struct, frozen=True):
    listing: Cost
    """Request and answer of a full listing."""
    empty: Cost
    """Request and answer of an empty listing."""
    pull: Cost
    """A fetch of one group of `size` bytes, with admission and scoring."""
    more: Cost
    """Each further group of the same fetch."""
    size: float
    """Bytes of an envelope."""
    idle: Cost
    """One end of an idle connection, per second."""


async def requests(size: int) -> tuple[Cost, Cost, Cost, Cost, float]:
    """Return the fields of `Constants` without `idle`, for groups of about `size` bytes."""
    meter, clock = Meter(), _Clock()
    meter.install()
    with tempfile.TemporaryDirectory() as directory:
        async with connected_hosts(2, 0, Path(directory)) as ((server, _), (client, _)):
            shelf = Shelf(b"", SWARM, LIFE)
            frames = _fill(shelf, size)
            ShelfServer(
                server.requests,
                shelf,
                allows=lambda: True,
                gives=lambda peer: True,
                clock=clock,
            ).start()
            admission = Admission(
                SWARM, client.peer_id, BUILTIN_TASKS, SharingConfig(groups_per_second=16)
            )
            scorer = InProcessScorer()

            async def listing(position: int) -> None:
                request = ListingRequest(SWARM, LIFE if position else b"", position, 0)
                data = await client.requests.request(
                    server.peer_id,
                    ids.LISTING_PROTOCOL,
                    codec.encode(request),
                    deadline=10.0,
                    max_response_bytes=limits.LISTING_RESPONSE_BYTES,
                )
                clock.pass_by()
                answer = codec.decode(data, ListingResponse, limits.LISTING_RESPONSE_BYTES)
                assert len(answer.groups) == (0 if position else limits.LISTED)

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
                    candidate = admission.check(answer.body, time.time())
                    assert isinstance(candidate, Candidate)
                    texts = [completion.text for completion in candidate.group.completions]
                    await scorer.score_many([(candidate.group.task, texts)])

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
    """Return the cost of one end of an idle connection per second."""
    meter = Meter()
    meter.install()
    with tempfile.TemporaryDirectory() as directory:
        async with connected_hosts(IDLE_NODES, 0, Path(directory)) as hosts:
            await trio.sleep(SETTLE_SECONDS)
            links = sum(len(network.connected()) for network, _ in hosts)
            began, read, clock = time.process_time(), meter.bytes, trio.current_time()
            await trio.sleep(IDLE_SECONDS)
            seconds = links * (trio.current_time() - clock)
            return Cost(
                1000 * (time.process_time() - began) / seconds, (meter.bytes - read) / seconds
            )


def measure(size: int) -> Constants:
    """Measure all constants, in about a minute."""
    listing, empty, pull, more, actual = trio.run(requests, size)
    return Constants(listing, empty, pull, more, actual, trio.run(idle))


class _Clock:
    """A clock that jumps, so that no allowance is used up."""

    def __init__(self) -> None:
        self._at = time.time()

    def __call__(self) -> float:
        return self._at

    def pass_by(self) -> None:
        self._at += 3.0


def _fill(shelf: Shelf, size: int) -> list[bytes]:
    """Put groups of several authors on the shelf; return their envelopes."""
    frames, now = [], time.time()
    for number in range(TIMES + 5 * 8):
        author = Author(SWARM, seed=number)
        texts = [completion.text for completion in group(author, 0, size).completions]
        made = author.group(0, now, texts=texts)
        frames.append(author.frame(made))
        key = envelope.peer_key(author.peer)
        assert key is not None
        content = envelope.content_id(frames[-1])
        listed = ListedGroup(
            content, key, made.task.id, made.created_at, len(frames[-1]), spread(REWARDS)
        )
        shelf.put(frames[-1], listed)
    return frames


async def _cost(meter: Meter, times: int, once: Callable[[int], Awaitable[None]]) -> Cost:
    began, read = time.process_time(), meter.bytes
    for number in range(times):
        await once(number)
    return Cost(1000 * (time.process_time() - began) / times, (meter.bytes - read) / times)
