"""Answers listings, pulls and fetches: what this node can give, to whoever asks and as long as
there is budget for it.

Always on while groups are shared, however this node gets its own: whoever pulls learns from those
who gossip by this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.p2p.api import Requests
from swarmnode.rollouts import sampling
from swarmnode.rollouts.catalogue import Allowances, Catalogue, CatalogueStatistics
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import GroupsRequest, GroupsResponse, Listed, ListingRequest
from swarmnode.wire.messages import FetchRequest, FetchResponse, RolloutGroup

Request = TypeVar("Request", bound=msgspec.Struct)

SERVED_AT_ONCE = 8
SERVED = ("listing", "group", "unknown", "busy", "malformed")
"""What is answered: a listing, or each group that was asked for by how it ended."""


class ServingStatistics(msgspec.Struct, frozen=True):
    served: dict[str, int] = {}
    """By outcome, of SERVED."""
    catalogue: CatalogueStatistics = CatalogueStatistics()
    askers: int = 0
    """Peers whose allowance is remembered."""


class Serving:
    """allows("serve"): whether there is budget for it; gives(peer): whether a group of it was ever
    admitted; clock: Unix seconds; fetch_protocol: the ordinal that the swarm speaks."""

    def __init__(
        self,
        catalogue: Catalogue,
        allows: Callable[[str], bool],
        gives: Callable[[str], bool],
        clock: Callable[[], float],
        fetch_protocol: str = ids.FETCH_PROTOCOL,
    ) -> None:
        self.catalogue = catalogue
        self._allows = allows
        self._gives = gives
        self._clock = clock
        self._allowances = Allowances()
        self._fetch_protocol = fetch_protocol
        self._served: Counter[str] = Counter()

    def start(self, requests: Requests) -> None:
        """Serve for as long as the network runs."""
        requests.serve(
            self._fetch_protocol,
            self._fetch,
            concurrent=SERVED_AT_ONCE,
            max_request_bytes=limits.FETCH_REQUEST_BYTES,
            max_response_bytes=limits.FETCH_RESPONSE_BYTES,
        )
        requests.serve(
            ids.LISTING_PROTOCOL,
            self._list,
            concurrent=SERVED_AT_ONCE,
            max_request_bytes=limits.LISTING_REQUEST_BYTES,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        requests.serve(
            ids.GROUPS_PROTOCOL,
            self._give,
            concurrent=SERVED_AT_ONCE,
            max_request_bytes=limits.GROUPS_REQUEST_BYTES,
            max_response_bytes=limits.GROUPS_RESPONSE_BYTES,
        )

    def put(self, group: RolloutGroup, author: str, frame: bytes, rewards: list[float]) -> None:
        """Offer a group with its rewards (G,) as this node computed them. frame: its envelope,
        signed by `author`."""
        key = envelope.peer_key(author)
        if key is not None:
            about = Listed(
                envelope.content_id(frame),
                key,
                group.task.id,
                group.created_at,
                len(frame),
                min(limits.SPREAD, sampling.spread(rewards)),
            )
            self.catalogue.put(frame, about)

    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            dict(self._served), self.catalogue.statistics(), len(self._allowances)
        )

    async def _list(self, peer: str, request: bytes) -> bytes:
        """Raises BadMessage on nonsense, which resets the stream."""
        asked = self._read(request, ListingRequest, limits.LISTING_REQUEST_BYTES)
        if not self._may_answer(peer):
            self._served["busy"] += 1
            return codec.encode(self.catalogue.busy())
        answer = codec.encode(self.catalogue.listing(asked, self._clock()))
        self._served["listing"] += 1
        self._allowances.charge(peer, len(answer), self._gives(peer), self._clock())
        return answer

    async def _give(self, peer: str, request: bytes) -> bytes:
        """Raises BadMessage on nonsense, which resets the stream."""
        return codec.encode(
            self._answer(peer, self._read(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES))
        )

    async def _fetch(self, peer: str, request: bytes) -> bytes:
        """One group that was announced. Raises BadMessage on nonsense, which resets the stream."""
        content = self._read(request, FetchRequest, limits.FETCH_REQUEST_BYTES).content
        return codec.encode(self._answer(peer, GroupsRequest([content])).groups[0])

    def _answer(self, peer: str, asked: GroupsRequest) -> GroupsResponse:
        if self._may_answer(peer):
            response = self.catalogue.give(asked, self._clock())
            size = sum(len(group.body) for group in response.groups)
            self._allowances.charge(peer, size, self._gives(peer), self._clock())
        else:
            response = GroupsResponse([FetchResponse("busy")] * len(asked.contents))
        self._served.update(
            "group" if group.status == "ok" else group.status for group in response.groups
        )
        return response

    def _read(self, request: bytes, kind: type[Request], limit: int) -> Request:
        try:
            read: Request = codec.decode(request, kind, limit)
            return read
        except BadMessage:
            self._served["malformed"] += 1
            raise

    def _may_answer(self, peer: str) -> bool:
        return self._allowances.has_room(peer, self._clock()) and self._allows("serve")
