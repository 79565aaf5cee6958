"""Peers that could be partners: connected peers that claim to average the same policy, and the
order in which they are asked for a swap.

A claim comes over a connection that proves the peer's identity. It decides only whether the peer is
asked: the fingerprint is compared again in every swap, and the gate judges everything that follows.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Network
from swarmnode.weights.fragments import common
from swarmnode.weights.local import PROOF, LocalReplica
from swarmnode.weights.messages import (
    MESSAGE_BYTES,
    Accepted,
    Here,
    Message,
    Swap,
    decode_message,
    encode_message,
)
from swarmnode.weights.rule import too_far_behind
from swarmnode.wire import ids

POLL_INTERVAL: Final = 2.0
"""Seconds between two looks whether somebody is there whose claim we do not have."""
FRESH_SECONDS: Final = 120.0
"""A claim is worth this long."""
ASK_SECONDS: Final = 30.0
"""Seconds between two questions to one peer."""
MAX_PEERS: Final = 1024
REQUEST_SECONDS: Final = 10.0
"""For a small message, and a small answer."""
BUCKET_SECONDS: Final = 60.0
"""An edge keeps its rank for this long. Clocks that differ cost a few mutual first choices, nothing
else."""
_DOMAIN = b"swarmnode/pairing/1"


async def ask(
    network: Network, peer: str, message: Message, seconds: float = REQUEST_SECONDS
) -> Message:
    """Return the answer of `peer`. Raises BadMessage for one that is no message, PeerError."""
    data = await network.requests.request(
        peer,
        ids.WEIGHTS_PROTOCOL,
        encode_message(message),
        deadline=seconds,
        max_response_bytes=MESSAGE_BYTES,
    )
    return decode_message(data)


class Claim(msgspec.Struct, frozen=True):
    fingerprint: bytes
    """Empty: the peer does not average, or has not answered yet."""
    outer_step: int
    blocks: bytes
    """What the peer holds, packed."""
    at: float
    asked: float
    """When it was asked or claimed it, whichever is later."""


class Claims:
    """What peers claim to average, the newest MAX_PEERS of them. Pure; `now` is any monotonic time
    in seconds."""

    def __init__(self) -> None:
        self._claims: OrderedDict[str, Claim] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims)

    def asked(self, peer: str, now: float) -> None:
        """`peer` is asked: until it answers, what it last claimed stands."""
        self._keep(
            peer,
            msgspec.structs.replace(
                self._claims.get(peer, Claim(b"", 0, b"", now, now)), asked=now
            ),
        )

    def received(
        self, peer: str, fingerprint: bytes, outer_step: int, now: float, blocks: bytes = b""
    ) -> None:
        """`peer` averages this, and claims so many outer steps."""
        self._keep(peer, Claim(fingerprint, outer_step, blocks, now, now))

    def _keep(self, peer: str, claim: Claim) -> None:
        self._claims.pop(peer, None)
        self._claims[peer] = claim
        if len(self._claims) > MAX_PEERS:
            self._claims.popitem(last=False)

    def clear(self) -> None:
        self._claims.clear()

    def to_ask(self, connected: Iterable[str], now: float) -> list[str]:
        """Connected peers that have claimed nothing lately, and were not asked."""
        return [
            peer
            for peer in connected
            if (claim := self._claims.get(peer)) is None or now - claim.asked >= ASK_SECONDS
        ]

    def candidates(self, connected: Iterable[str], fingerprint: bytes, now: float) -> list[str]:
        """Connected peers that have claimed our fingerprint lately."""
        return [
            peer
            for peer in connected
            if (claim := self._claims.get(peer)) is not None
            and claim.fingerprint == fingerprint
            and now - claim.at < FRESH_SECONDS
        ]

    def blocks(self, peer: str, fingerprint: bytes) -> bytes:
        """What `peer` last claimed to hold, packed; of a policy of another fingerprint nothing."""
        claim = self._claims.get(peer)
        return claim.blocks if claim is not None and claim.fingerprint == fingerprint else b""

    def outer_step(self, peer: str) -> int:
        """What `peer` last claimed."""
        claim = self._claims.get(peer)
        return claim.outer_step if claim is not None else 0


class Discovery:
    """Asks connected peers what they average, and orders those that average what we do. swarm:
    32-byte id. unix_time: in seconds."""

    def __init__(
        self,
        network: Network,
        replica: LocalReplica,
        swarm: bytes,
        unix_time: Callable[[], float],
    ) -> None:
        self._network = network
        self._replica = replica
        self._swarm = swarm
        self._unix_time = unix_time
        self._claims = Claims()

    async def run(self) -> None:
        """Ask whoever has claimed nothing, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                for peer in (
                    self._claims.to_ask(self._network.connected(), now)
                    if self._replica.facts is not None
                    else ()
                ):
                    self._claims.asked(peer, now)
                    if self._network.welcome(peer):
                        nursery.start_soon(self._ask, peer)
                await trio.sleep(POLL_INTERVAL)

    def forget(self) -> None:
        """Our own policy is another one: everybody is asked again, and so learns of it."""
        self._claims.clear()

    def claim(self) -> Here:
        """Our own claim."""
        return Here(self._replica.fingerprint, self._replica.least_outer_step, self._replica.blocks)

    def received(self, peer: str, claim: Here | Swap | Accepted) -> None:
        """`peer` claims to average this, and to have taken so many outer steps. Who accepts means
        our fingerprint."""
        fingerprint = (
            self._replica.fingerprint if isinstance(claim, Accepted) else claim.fingerprint
        )
        self._claims.received(
            peer, fingerprint, claim.outer_step, trio.current_time(), claim.blocks
        )

    def candidates(self) -> list[str]:
        """Connected peers of our fingerprint that hold something that we hold, with a recent claim,
        in good standing."""
        peers = self._claims.candidates(
            self._network.connected(), self._replica.fingerprint, trio.current_time()
        )
        return [peer for peer in peers if self._network.welcome(peer) and self.shared(peer)]

    def alike(self) -> list[str]:
        """Candidates that hold exactly what we hold."""
        return [
            peer
            for peer in self.candidates()
            if self._claims.blocks(peer, self._replica.fingerprint) == self._replica.blocks
        ]

    def shared(self, peer: str) -> bytes:
        """What `peer`, as it claims, and we hold, packed."""
        return common(self._claims.blocks(peer, self._replica.fingerprint), self._replica.blocks)

    def shares(self, peer: str, fragment: int) -> bool:
        """Whether there is something in `fragment` that `peer`, as it claims, and we hold."""
        return bool(self._replica.within(self.shared(peer), fragment))

    def partners(
        self, fragment: int, outer_step: int, blocks: bytes = b""
    ) -> tuple[tuple[str, ...], int]:
        """Candidates for `fragment`, or for these `blocks` of it (packed), in the order in which
        they are asked; those far from `outer_step` last, and before them those that lack some of
        it: with these there is less to gain. And how many of the first are worth as much as the
        first."""
        due = blocks or self._replica.within(self._replica.blocks, fragment)
        has = {peer: some for peer in self.candidates() if (some := common(self.shared(peer), due))}
        order = partner_order(
            self._network.peer_id, list(has), epoch_bucket(self._unix_time()), self._swarm
        )
        far = lambda peer: too_far_behind(abs(self._claims.outer_step(peer) - outer_step))
        worth = {peer: (far(peer), has[peer] != due) for peer in order}
        return tuple(sorted(order, key=worth.__getitem__)), Counter(worth.values())[
            min(worth.values(), default=(False, False))
        ]

    async def _ask(self, peer: str) -> None:
        try:
            answer = await ask(self._network, peer, self.claim())
        except BadMessage:
            self._network.rejected(peer, "weights_malformed", PROOF)
            return
        except PeerError:
            return  # it does not average, or its trainer is not there yet: then it will ask us
        if isinstance(answer, Here):
            self.received(peer, answer)


# ---- the order in which candidates are asked: the same at both ends of an edge -------------------


def epoch_bucket(unix_seconds: float, seconds: float = BUCKET_SECONDS) -> int:
    """Number of the epoch, at least 0."""
    return max(0, int(unix_seconds // seconds))


def edge_rank(bucket: int, one: str, other: str, swarm: bytes) -> bytes:
    """16 bytes that order edges; symmetric in the two peer ids. swarm: 32-byte swarm id."""
    low, high = sorted((one.encode(), other.encode()))
    content = _DOMAIN + bucket.to_bytes(8, "big") + len(low).to_bytes(2, "big") + low + high + swarm
    return hashlib.blake2b(content, digest_size=16).digest()


def partner_order(own: str, candidates: Iterable[str], bucket: int, swarm: bytes) -> list[str]:
    """`candidates` without `own` and duplicates, lowest edge first.

    An edge that is lowest for both its ends is proposed by both at once and always pairs. A peer
    could mint identities until one ranks low for a victim, but only for one epoch at a time, and
    what it gains is one exchange, which the gate bounds.
    """
    return sorted(set(candidates) - {own}, key=lambda peer: edge_rank(bucket, own, peer, swarm))
