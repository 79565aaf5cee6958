"""Answers what peers ask about averaging, at once; nothing is queued."""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Network
from swarmnode.weights.discovery import Discovery
from swarmnode.weights.driver import ExchangeDriver
from swarmnode.weights.messages import (
    MESSAGE_BYTES,
    NONCE_BYTES,
    Accept,
    Busy,
    Here,
    Latest,
    Message,
    Propose,
    Ready,
    Release,
    decode_message,
    encode_message,
)
from swarmnode.weights.payload_store import PayloadStore
from swarmnode.weights.replica import LocalReplica
from swarmnode.weights.requests import REQUEST_TIMEOUT, PeerRequests
from swarmnode.wire import ids


class RequestServer:
    """may_average(): False while the weights here are nobody's to have: then nothing is left to be
    pulled. may_begin(): False while no proposal is accepted."""

    def __init__(
        self,
        network: Network,
        requests: PeerRequests,
        replica: LocalReplica,
        discovery: Discovery,
        driver: ExchangeDriver,
        store: PayloadStore,
        may_average: Callable[[], bool],
        may_begin: Callable[[], bool],
    ) -> None:
        self._network = network
        self._requests = requests
        self._replica = replica
        self._discovery = discovery
        self._driver = driver
        self._store = store
        self._may_average = may_average
        self._may_begin = may_begin

    def start(self) -> None:
        self._network.requests.serve(
            ids.WEIGHTS_PROTOCOL,
            self._serve,
            max_request_bytes=MESSAGE_BYTES,
            max_response_bytes=MESSAGE_BYTES,
            concurrent=32,
            per_peer=4,
            deadline=REQUEST_TIMEOUT,
        )

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Raises PeerError to reset the stream."""
        await trio.lowlevel.checkpoint()
        try:
            message = decode_message(data)
            if isinstance(message, Accept | Busy):
                raise BadMessage("schema", "an answer to nothing")
            if (
                isinstance(message, Propose)
                and self._averages(message.fingerprint)
                and not self._replica.has(message.fragment)
            ):
                raise BadMessage("bounds", "fragment")
        except BadMessage:
            self._requests.malformed(peer)
            raise
        if self._replica.facts is None:
            raise PeerError("no replica yet")
        answer = self._answer(peer, message)
        return encode_message(answer) if answer is not None else b""

    def _answer(
        self, peer: str, message: Here | Propose | Release | Ready | Latest
    ) -> Message | None:
        match message:
            case Here():
                self._discovery.received(peer, message)
                return self._discovery.claim()
            case Propose():
                self._discovery.received(peer, message)
                return (
                    self._driver.proposed(peer, message)
                    if self._may_begin()
                    else Busy(message.nonce, "busy")
                )
            case Release():
                self._driver.released(peer, message)
            case Ready():
                self._driver.ready(peer, message)
            case Latest():
                return self._latest(message)
        return None

    def _averages(self, fingerprint: bytes) -> bool:
        return self._replica.facts is not None and fingerprint == self._replica.fingerprint

    def _latest(self, message: Latest) -> Ready:
        copy = (
            self._store.published(message.fragment) if self._averages(message.fingerprint) else None
        )
        if (
            copy is None
            or copy.blocks != self._replica.within(message.blocks, message.fragment)
            or not self._may_average()
        ):
            raise PeerError("nothing to pull")
        return Ready(
            bytes(NONCE_BYTES),
            copy.offer.transfer,
            copy.offer.root,
            copy.offer.size,
            copy.outer_step,
        )
