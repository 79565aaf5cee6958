"""Candidates for a swap: connected peers that claim to average the same policy, and the order in
which they are asked.

A claim arrives over an authenticated connection. It decides only whether the peer is asked: every
swap compares the fingerprints again, and the gate checks the weights.
"""

from __future__ import annotations

import math
import random
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.latest import Latest
from swarmnode.p2p.api import Network
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights.fragments import common
from swarmnode.weights.local import PROOF, LocalReplica
from swarmnode.weights.messages import (
    MESSAGE_BYTES,
    Accepted,
    Here,
    Message,
    Swap,
    decode_message,
)
from swarmnode.weights.rule import too_far_behind
from swarmnode.wire import ids, strict

POLL_INTERVAL: Final = 2.0
"""Seconds between two searches for connected peers without a recent claim."""
FRESH_SECONDS: Final = 120.0
"""Age at which a claim expires."""
ASK_SECONDS: Final = 30.0
"""Seconds between two `here` requests to one peer."""
MAX_PEERS: Final = 1024
"""Peers whose claims are stored."""
REQUEST_SECONDS: Final = 10.0
"""Deadline of a small request with a small answer."""


async def ask(
    network: Network, peer: str, message: Message, seconds: float = REQUEST_SECONDS
) -> Message:
    """Send `message` to `peer` and return its answer.

    Raises:
        BadMessage: The answer is malformed.
        PeerError: There is no answer within `seconds`.
    """
    data = await network.requests.request(
        peer,
        ids.WEIGHTS_PROTOCOL,
        strict.encode(message),
        deadline=seconds,
        max_response_bytes=MESSAGE_BYTES,
    )
    return decode_message(data)


class Claim(msgspec.Struct, frozen=True):
    """The latest claim of one peer."""

    fingerprint: bytes
    outer_step: int
    blocks: bytes
    """Blocks that the peer holds, as a bitmask (`fragments.pack`)."""
    at: float
    """Time of the claim, on trio's clock."""


class Discovery:
    """Requests claims from connected peers, and orders the candidates.

    Args:
        network: The node's network.
        replica: This node's replica.
        partners: Peers with which this node averages. Others are not asked for claims.
    """

    def __init__(self, network: Network, replica: LocalReplica, partners: KnownPeers) -> None:
        self.partners = partners
        self._network = network
        self._replica = replica
        self._claims = Latest[str, Claim](MAX_PEERS)
        self._asked: dict[str, float] = {}
        """Connected peer → time of the last request to it or claim of it."""

    async def run(self) -> None:
        """Request missing claims until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                if self._replica.facts is not None:
                    for peer in self._peers_to_ask():
                        if self._network.is_allowed(peer):
                            nursery.start_soon(self._ask, peer)
                await trio.sleep(POLL_INTERVAL)

    def _peers_to_ask(self) -> list[str]:
        """Return the connected peers without a request or claim within ASK_SECONDS, and record a
        request to each."""
        now = trio.current_time()
        connected = [peer for peer in self._network.connected() if peer in self.partners]
        self._asked = {peer: self._asked.get(peer, -math.inf) for peer in connected}
        due = [peer for peer, asked in self._asked.items() if now - asked >= ASK_SECONDS]
        self._asked |= dict.fromkeys(due, now)
        return due

    def forget(self) -> None:
        """Forget all claims after a change of the own policy. All peers are asked again, and each
        request carries the new claim."""
        self._claims.clear()
        self._asked.clear()

    def claim(self) -> Here:
        """Return the claim of this node."""
        return Here(self._replica.fingerprint, self._replica.least_outer_step, self._replica.blocks)

    def received(self, peer: str, claim: Here | Swap | Accepted) -> None:
        """Store a claim of `peer`. Only a `here` names all of its blocks; the other messages renew
        the last one."""
        now, last = trio.current_time(), self._claims.pop(peer, None)
        if isinstance(claim, Here):
            last = Claim(claim.fingerprint, claim.outer_step, claim.blocks, now)
        if last is None:
            return
        self._claims[peer] = msgspec.structs.replace(last, outer_step=claim.outer_step, at=now)
        self._asked[peer] = now

    def candidates(self) -> list[str]:
        """Return the connected partners with the same fingerprint, a common block, a claim within
        FRESH_SECONDS and an acceptable reputation."""
        oldest = trio.current_time() - FRESH_SECONDS
        return [
            peer
            for peer in self._network.connected()
            if peer in self.partners
            and peer in self._claims
            and self._claims[peer].at > oldest
            and self.shared(peer)
            and self._network.is_allowed(peer)
        ]

    def alike(self) -> list[str]:
        """Return the candidates that hold exactly the blocks of this node."""
        return [peer for peer in self.candidates() if self._blocks(peer) == self._replica.blocks]

    def shared(self, peer: str) -> bytes:
        """Return the blocks that both `peer` (by its claim) and this node hold, as a bitmask."""
        return common(self._blocks(peer), self._replica.blocks)

    def _blocks(self, peer: str) -> bytes:
        """Return the bitmask of the blocks that `peer` last claimed; empty for another
        fingerprint."""
        claim = self._claims.get(peer)
        if claim is None or claim.fingerprint != self._replica.fingerprint:
            return b""
        return claim.blocks

    def ordered(
        self, blocks: bytes, outer_step: int, rng: random.Random
    ) -> tuple[tuple[str, ...], int]:
        """Order the candidates for an outer step of `blocks`, a bitmask.

        Candidates far from `outer_step` come last, and those that lack a due block come before
        them, because a swap with either gains less. Equal candidates are in random order.

        Args:
            blocks: The due blocks, as a bitmask.
            outer_step: Outer steps that this node has taken of them.
            rng: Orders equal candidates.

        Returns:
            The candidates, the first to ask first, and how many of them equal the first.
        """
        has = {
            peer: some for peer in self.candidates() if (some := common(self.shared(peer), blocks))
        }
        far = lambda peer: too_far_behind(abs(self._claims[peer].outer_step - outer_step))
        drawbacks = {peer: (far(peer), has[peer] != blocks) for peer in has}
        ordered = tuple(sorted(has, key=lambda peer: (drawbacks[peer], rng.random())))
        equal = sum(drawbacks[peer] == drawbacks[ordered[0]] for peer in ordered)
        return ordered, equal

    async def _ask(self, peer: str) -> None:
        """Exchange claims with `peer`."""
        try:
            answer = await ask(self._network, peer, self.claim())
            if not isinstance(answer, Here):
                raise BadMessage("schema", "no claim")
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            return
        except PeerError:
            return  # the peer does not average, or has no trainer yet and will ask later
        self.received(peer, answer)
