"""A node with 10 honest and 30 hostile connections: how many of the groups it wants it gets."""

import random

import msgspec
import pytest
import trio

from swarmnode.wire import codec, limits
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingResponse,
)
from tests.support.pulling import Holder, PullSwarm, clock, never

HONEST = 10
STEPS, STEP_SECONDS = 20, 30.0
PUBLISHED, WANTED = 2, 8
"""Groups that each honest node publishes, and that the node draws, per step."""


class Liar(Holder):
    """Lists as much as fits in each answer: new groups of the highest spread, each by an author of
    its own.

    rng: source of randomness. gives: content id → body for a fetched group, None for `unknown`.
    size: bytes of each group, as listed.
    """

    def __init__(self, medium, seed, rng, gives, size=900):
        super().__init__(medium, seed)
        self._size = size
        self._rng = rng
        self._gives = gives

    async def list(self, peer, data):
        groups = [
            ListedGroup(
                self._rng.randbytes(32),
                self._rng.randbytes(32),
                self.author.tasks[0],
                int(clock() * 1000),
                self._size,
                limits.SPREAD,
            )
            for _ in range(limits.LISTED)
        ]
        self.position += len(groups)
        for listed in groups:
            self.answers[listed.content] = self._gives(listed)
        return codec.encode(ListingResponse("ok", self.life, self.position, groups))


class Turning(Liar):
    """Lists one good group in each answer, which it gives, and never gives the others."""

    sequence = 0

    async def list(self, peer, data):
        self.sequence += 1
        frame = self.author.frame(self.author.group(self.sequence, clock()))
        good = await self.line(frame)
        response = codec.decode(
            await super().list(peer, data), ListingResponse, limits.LISTING_RESPONSE_BYTES
        )
        self.answers[good.content] = frame
        groups = [good, *response.groups[1:]]
        return codec.encode(msgspec.structs.replace(response, groups=groups))

    async def give(self, peer, data):
        asked = codec.decode(data, GroupsRequest, limits.GROUPS_REQUEST_BYTES).contents
        if not all(self.answers.get(content) for content in asked):
            await trio.sleep_forever()
        return await super().give(peer, data)


class Equal(Holder):
    """Makes groups with equal rewards, which teach nothing, and lists them with the highest
    spread."""

    sequence = 0

    async def list(self, peer, data):
        for _ in range(limits.LISTED // 2):
            self.sequence += 1
            group = self.author.group(self.sequence, clock(), texts=["wrong"] * 4)
            frame = self.author.frame(group)
            await self.add_frame(frame, spread=limits.SPREAD)
        return await super().list(peer, data)


async def garbage(peer, data):
    return b"\xc1" * 100


async def busy_late(peer, data):
    await trio.sleep(10.0)
    asked = codec.decode(data, GroupsRequest, limits.GROUPS_REQUEST_BYTES).contents
    return codec.encode(GroupsResponse([GroupResponse("busy")] * len(asked)))


def holder(listing=None, patient=True):
    """A holder that answers polls with `listing`."""

    def join(medium, seed, rng):
        made = Holder(medium, seed, patient=patient)
        if listing is not None:
            made.serve_listing(listing)

    return join


def liar(gives, size=900, groups=None):
    """A Liar that answers fetches with `groups`."""

    def join(medium, seed, rng):
        made = Liar(medium, seed, rng, gives, size)
        if groups is not None:
            made.serve_groups(groups)

    return join


def useless(medium, seed, rng):
    Equal(medium, seed)


silent, malformed, hasty = holder(never), holder(garbage), holder(patient=False)
withholding = liar(lambda listed: b"", groups=never)
hanging = liar(lambda listed: b"", limits.GROUP_BYTES, never)
late = liar(lambda listed: b"", limits.GROUP_BYTES, busy_late)
empty_handed = liar(lambda listed: None)
forging = liar(lambda listed: b"\xc1" * listed.size)
MIXED = [silent] * 8 + [withholding] * 6 + [empty_handed] * 4 + [forging] * 4 + [useless] * 4
MIXED += [hasty] * 2 + [malformed] * 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kinds",
    [MIXED, [silent] * 30, [withholding] * 30, [hanging] * 30, [late] * 30, [useless] * 30],
    ids=["mixed", "silent", "withholding", "hanging", "late", "useless"],
)
async def test_node_among_thirty_hostile_peers_gets_its_groups(
    nursery, autojump_clock, seed, kinds
):
    swarm, rng = PullSwarm(1, seed=seed), random.Random(seed)
    honest = [Holder(swarm.medium, 100 + number) for number in range(HONEST)]
    for number, join in enumerate(kinds):
        join(swarm.medium, 500 + number, rng)
    await swarm.start(nursery)
    honest_peers, drawn = {holder.peer for holder in honest}, 0
    for step in range(STEPS):
        for holder in honest:
            for sequence in range(PUBLISHED):
                await holder.add(PUBLISHED * step + sequence)
            await trio.sleep(STEP_SECONDS / HONEST)
        groups = swarm.draw(0, WANTED, version=step)
        drawn += sum(group.peer in honest_peers for group in groups)
    assert drawn >= 0.95 * STEPS * WANTED


@pytest.mark.parametrize("size", [900, limits.GROUP_BYTES])
async def test_strangers_that_give_one_group_cannot_hold_all_fetches(nursery, autojump_clock, size):
    """Thirty of them among four honest holders, from the fifth step on."""
    swarm, rng, drawn = PullSwarm(1), random.Random(0), 0
    honest = [Holder(swarm.medium, 100 + number) for number in range(4)]
    await swarm.start(nursery)
    for step in range(STEPS):
        if step == 4:
            for number in range(30):
                Turning(swarm.medium, 500 + number, rng, lambda listed: None, size)
        for holder in honest:
            for sequence in range(3):
                await holder.add(3 * step + sequence)
            await trio.sleep(STEP_SECONDS / 4)
        drawn += len(swarm.draw(0, WANTED, version=step))
    assert drawn >= 0.98 * STEPS * WANTED
