"""A hostile holder of groups: lists groups as useful, and serves hostile groups instead.

Each listing names some hostile groups of `frames`, with the highest possible spread. A peer that
pulls them receives one of these:

    a hostile group with the listed content id    admission rejects it, with its reason
    bytes of another group                        outcome `mismatch`
    more bytes than listed                        the response is oversized
    no group: `unknown`                           the listing was false

Every `GARBAGE_EVERY`th listing is garbage. The demo's liar and tests use this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from swarmnode.demo.liar.author import Author
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.latest import Latest
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
MAX_SERVED = 1024
"""Number of hostile groups that are kept for pulls, newest first."""
SEQUENCES = 2
"""Number of sequence numbers that one call of `hostile_frames` uses."""


class ListingLiar:
    """Serves the listing protocols with hostile groups of `author`.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, author: Author, clock: Callable[[], float], rng: random.Random) -> None:
        self._author = author
        self._clock = clock
        self._rng = rng
        self._life = rng.randbytes(limits.LIFE_BYTES)
        self._served = Latest[bytes, bytes | None](MAX_SERVED)
        """Listed content id → bytes to send; None for the response `unknown`."""
        self._listings = self._sequence = 0

    def serve(self, requests: Requests) -> None:
        """Serve listings and pulls until the network closes."""
        requests.serve(
            ids.LISTING_PROTOCOL,
            self._list,
            max_request_bytes=limits.LISTING_REQUEST_BYTES,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        requests.serve(
            ids.GROUPS_PROTOCOL,
            self._send_groups,
            max_request_bytes=limits.GROUPS_REQUEST_BYTES,
            max_response_bytes=2 * limits.GROUPS_RESPONSE_BYTES,
        )

    async def _list(self, peer: str, request: bytes) -> bytes:
        self._listings += 1
        if self._listings % GARBAGE_EVERY == 0:
            return self._rng.randbytes(200)
        listed = [self._list_group(*group) for group in self._draw_groups()]
        position = self._listings * limits.LISTED
        return codec.encode(ListingResponse("ok", self._life, position, listed))

    async def _send_groups(self, peer: str, request: bytes) -> bytes:
        wanted = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        bodies = [self._served.get(content) for content in wanted.contents]
        return codec.encode(
            GroupsResponse(
                [
                    GroupResponse("unknown") if not body else GroupResponse("ok", body)
                    for body in bodies
                ]
            )
        )

    def _draw_groups(self) -> list[tuple[bytes, int, bytes | None]]:
        """Return (content id, listed size, bytes to send) of each group of one listing."""
        frames = hostile_frames(self._author, self._clock(), self._sequence)
        self._sequence += SEQUENCES
        drawn = self._rng.sample([frame for frame, _ in frames.values()], limits.LISTED - 2)
        groups: list[tuple[bytes, int, bytes | None]] = [
            (envelope.content_id(frame), min(max(1, len(frame)), limits.GROUP_BYTES), frame)
            for frame in drawn
        ]
        absent, other = self._rng.randbytes(32), self._rng.randbytes(32)
        return [*groups, (absent, 2048, None), (other, len(drawn[0]) or 1, drawn[0])]

    def _list_group(self, content: bytes, size: int, body: bytes | None) -> ListedGroup:
        self._served[content] = body
        return ListedGroup(
            content,
            self._author.key.public_key().public_bytes_raw(),
            self._author.tasks[0],
            int(self._clock() * 1000),
            size,
            limits.SPREAD,
        )
