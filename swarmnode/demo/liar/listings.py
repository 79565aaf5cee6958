"""A hostile holder of groups: lists groups that are worth pulling, and serves lies in their place.

Each listing names a few hostile groups (`frames`) with the highest spread there is. A peer that
pulls them receives:

    a lie of `frames`, with the content id that was listed    refused by admission, with its reason
    bytes of another group                                    `mismatch`
    more bytes than were listed                               the response is oversized
    nothing: the group is `unknown`                           the listing was not true

Every `GARBAGE_EVERY`th listing is no listing at all. For the demo's liar and for tests.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

from swarmnode.demo.liar.author import Author
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.p2p.api import Requests
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingResponse,
)

GARBAGE_EVERY = 5
MOST_LISTED = 1024
"""Lies that can still be pulled, the newest."""
SEQUENCES = 2
"""Sequence numbers that one call of `hostile_frames` takes."""


class ListingLiar:
    """Serves the listing protocols with lies signed by `author`.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, author: Author, clock: Callable[[], float], rng: random.Random) -> None:
        self._author = author
        self._clock = clock
        self._rng = rng
        self._life = rng.randbytes(limits.LIFE_BYTES)
        self._served: OrderedDict[bytes, bytes | None] = OrderedDict()
        """Listed content id → bytes sent for it, None for a group that is `unknown`."""
        self._listings = self._sequence = 0

    def serve(self, requests: Requests) -> None:
        """Answer listings and pulls for as long as the network runs."""
        requests.serve(
            ids.LISTING_PROTOCOL,
            self._list,
            max_request_bytes=limits.LISTING_REQUEST_BYTES,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        requests.serve(
            ids.GROUPS_PROTOCOL,
            self._give,
            max_request_bytes=limits.GROUPS_REQUEST_BYTES,
            max_response_bytes=2 * limits.GROUPS_RESPONSE_BYTES,
        )

    async def _list(self, peer: str, request: bytes) -> bytes:
        self._listings += 1
        if self._listings % GARBAGE_EVERY == 0:
            return self._rng.randbytes(200)
        listed = [self._claim(*lie) for lie in self._lies()]
        while len(self._served) > MOST_LISTED:
            self._served.popitem(last=False)
        position = self._listings * limits.LISTED
        return codec.encode(ListingResponse("ok", self._life, position, listed))

    async def _give(self, peer: str, request: bytes) -> bytes:
        asked = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        bodies = [self._served.get(content) for content in asked.contents]
        return codec.encode(
            GroupsResponse(
                [
                    GroupResponse("unknown") if not body else GroupResponse("ok", body)
                    for body in bodies
                ]
            )
        )

    def _lies(self) -> list[tuple[bytes, int, bytes | None]]:
        """Return (content id, size as listed, bytes sent) of each lie of one listing."""
        frames = hostile_frames(self._author, self._clock(), self._sequence)
        self._sequence += SEQUENCES
        drawn = self._rng.sample([frame for frame, _ in frames.values()], limits.LISTED - 2)
        lies: list[tuple[bytes, int, bytes | None]] = [
            (envelope.content_id(frame), min(max(1, len(frame)), limits.GROUP_BYTES), frame)
            for frame in drawn
        ]
        absent, other = self._rng.randbytes(32), self._rng.randbytes(32)
        return [*lies, (absent, 2048, None), (other, len(drawn[0]) or 1, drawn[0])]

    def _claim(self, content: bytes, size: int, body: bytes | None) -> ListedGroup:
        self._served[content] = body
        return ListedGroup(
            content,
            self._author.key.public_key().public_bytes_raw(),
            self._author.tasks[0],
            int(self._clock() * 1000),
            size,
            limits.SPREAD,
        )
