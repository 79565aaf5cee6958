"""Requests to peers about averaging: one small message each way."""

from __future__ import annotations

import logging
from typing import Final

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Network
from swarmnode.weights.messages import MESSAGE_BYTES, Message, decode_message, encode_message
from swarmnode.weights.outcomes import PROOF
from swarmnode.wire import ids

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 10.0
"""Seconds for a message that needs no thought at the other end."""


class PeerRequests:
    """Asks peers. One whose answer is no message loses standing for it."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def ask(
        self, peer: str, message: Message, seconds: float = REQUEST_TIMEOUT
    ) -> Message | None:
        """The answer; None where the peer gave an empty one. Raises PeerError."""
        data = await self._network.requests.request(
            peer,
            ids.WEIGHTS_PROTOCOL,
            encode_message(message),
            deadline=seconds,
            max_response_bytes=MESSAGE_BYTES,
        )
        if not data:
            return None
        try:
            return decode_message(data)
        except BadMessage:
            self.malformed(peer)
            raise

    async def notify(self, peer: str, message: Message) -> None:
        """Send what is not answered; that it did not arrive is not told to anybody."""
        try:
            await self.ask(peer, message)
        except PeerError as error:
            log.debug("%s was not notified: %s", peer, error)

    def malformed(self, peer: str) -> None:
        """`peer` has sent what is no message, or no answer to what it was asked."""
        self._network.rejected(peer, "weights_malformed", PROOF)
