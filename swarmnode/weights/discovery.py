"""Candidates for a swap: connected peers that claim to average the same policy, and the order in
which they are asked.

A claim arrives over an authenticated connection. It decides only whether the peer is asked: every
swap compares the fingerprints again, and the gate checks the weights.
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
"""Seconds between two searches for connected peers without a recent claim."""
FRESH_SECONDS: Final = 120.0
"""Age at which a claim expires."""
ASK_SECONDS: Final = 30.0
"""Seconds between two `here` requests to one peer."""
MAX_PEERS: Final = 1024
"""Peers whose claims are stored."""
REQUEST_SECONDS: Final = 10.0
"""Deadline of a small request with a small answer."""
BUCKET_SECONDS: Final = 60.0
"""Length of an epoch, for which an edge keeps its rank. Clocks that differ reduce the number of
mutual first choices and have no other effect."""
_DOMAIN = b"swarmnode/pairing/1"


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
        encode_message(message),
        deadline=seconds,
        max_response_bytes=MESSAGE_BYTES,
    )
    return decode_message(data)


class Claim(msgspec.Struct, frozen=True):
    """The latest claim of one peer."""

    fingerprint: bytes
    """Empty if the peer has made no claim."""
    outer_step: int
    blocks: bytes
    """Blocks that the peer holds, packed."""
    at: float
    """Time of the claim."""
    asked: float
    """Time of the claim or of the latest request for one, whichever is later."""


class Claims:
    """The MAX_PEERS newest claims, by peer. Pure; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._claims: OrderedDict[str, Claim] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims)

    def asked(self, peer: str, now: float) -> None:
        """Record a request to `peer`. Its last claim stays valid until it answers."""
        self._keep(
            peer,
            msgspec.structs.replace(
                self._claims.get(peer, Claim(b"", 0, b"", now, now)), asked=now
            ),
        )

    def received(
        self, peer: str, fingerprint: bytes, outer_step: int, now: float, blocks: bytes = b""
    ) -> None:
        """Store a claim of `peer`."""
        self._keep(peer, Claim(fingerprint, outer_step, blocks, now, now))

    def _keep(self, peer: str, claim: Claim) -> None:
        self._claims.pop(peer, None)
        self._claims[peer] = claim
        if len(self._claims) > MAX_PEERS:
            self._claims.popitem(last=False)

    def clear(self) -> None:
        """Forget all claims."""
        self._claims.clear()

    def to_ask(self, connected: Iterable[str], now: float) -> list[str]:
        """Return the connected peers without a claim or request within ASK_SECONDS."""
        return [
            peer
            for peer in connected
            if (claim := self._claims.get(peer)) is None or now - claim.asked >= ASK_SECONDS
        ]

    def candidates(self, connected: Iterable[str], fingerprint: bytes, now: float) -> list[str]:
        """Return the connected peers with a claim of this fingerprint within FRESH_SECONDS."""
        return [
            peer
            for peer in connected
            if (claim := self._claims.get(peer)) is not None
            and claim.fingerprint == fingerprint
            and now - claim.at < FRESH_SECONDS
        ]

    def blocks(self, peer: str, fingerprint: bytes) -> bytes:
        """Return the blocks that `peer` last claimed, packed; empty for another fingerprint."""
        claim = self._claims.get(peer)
        return claim.blocks if claim is not None and claim.fingerprint == fingerprint else b""

    def outer_step(self, peer: str) -> int:
        """Return the outer step that `peer` last claimed, 0 without a claim."""
        claim = self._claims.get(peer)
        return claim.outer_step if claim is not None else 0


class Discovery:
    """Requests claims from connected peers, and orders the candidates.

    Args:
        network: The node's network.
        replica: This node's replica.
        swarm: Swarm id, 32 bytes.
        unix_time: Returns seconds.
    """

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
        """Request missing claims until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                for peer in (
                    self._claims.to_ask(self._network.connected(), now)
                    if self._replica.facts is not None
                    else ()
                ):
                    self._claims.asked(peer, now)
                    if self._network.is_allowed(peer):
                        nursery.start_soon(self._ask, peer)
                await trio.sleep(POLL_INTERVAL)

    def forget(self) -> None:
        """Forget all claims after a change of the own policy. All peers are asked again, and each
        request carries the new claim."""
        self._claims.clear()

    def claim(self) -> Here:
        """Return the claim of this node."""
        return Here(self._replica.fingerprint, self._replica.least_outer_step, self._replica.blocks)

    def received(self, peer: str, claim: Here | Swap | Accepted) -> None:
        """Store a claim of `peer`. An `accepted` has no fingerprint: it implies this node's."""
        fingerprint = (
            self._replica.fingerprint if isinstance(claim, Accepted) else claim.fingerprint
        )
        self._claims.received(
            peer, fingerprint, claim.outer_step, trio.current_time(), claim.blocks
        )

    def candidates(self) -> list[str]:
        """Return the connected peers with the same fingerprint, a common block, a recent claim and
        an acceptable reputation."""
        peers = self._claims.candidates(
            self._network.connected(), self._replica.fingerprint, trio.current_time()
        )
        return [peer for peer in peers if self._network.is_allowed(peer) and self.shared(peer)]

    def alike(self) -> list[str]:
        """Return the candidates that hold exactly the blocks of this node."""
        return [
            peer
            for peer in self.candidates()
            if self._claims.blocks(peer, self._replica.fingerprint) == self._replica.blocks
        ]

    def shared(self, peer: str) -> bytes:
        """Return the blocks that both `peer` (by its claim) and this node hold, packed."""
        return common(self._claims.blocks(peer, self._replica.fingerprint), self._replica.blocks)

    def partners(
        self, fragment: int, outer_step: int, blocks: bytes = b""
    ) -> tuple[tuple[str, ...], int]:
        """Order the candidates for an outer step of a fragment.

        Candidates far from `outer_step` come last, and those that lack a due block come before
        them, because a swap with either gains less. Equal candidates are ordered by edge rank.

        Args:
            fragment: The fragment that is due.
            outer_step: Outer steps that this node has taken of it.
            blocks: The due blocks of the fragment, packed; empty for all.

        Returns:
            The candidates, the first to ask first, and how many of them equal the first.
        """
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


# ---- the order in which candidates are asked: the same at both ends of an edge -------------------


def epoch_bucket(unix_seconds: float, seconds: float = BUCKET_SECONDS) -> int:
    """Return the number of the epoch, at least 0."""
    return max(0, int(unix_seconds // seconds))


def edge_rank(bucket: int, one: str, other: str, swarm: bytes) -> bytes:
    """Return the rank of an edge in an epoch: 16 bytes, symmetric in the two peer ids."""
    low, high = sorted((one.encode(), other.encode()))
    content = _DOMAIN + bucket.to_bytes(8, "big") + len(low).to_bytes(2, "big") + low + high + swarm
    return hashlib.blake2b(content, digest_size=16).digest()


def partner_order(own: str, candidates: Iterable[str], bucket: int, swarm: bytes) -> list[str]:
    """Return `candidates` without `own` and duplicates, the lowest edge rank first.

    If an edge ranks lowest at both ends, both ends propose to each other and one swap results. An
    attacker can create identities until one ranks low for a victim. That holds for one epoch and
    gains one swap, which the gate bounds.
    """
    return sorted(set(candidates) - {own}, key=lambda peer: edge_rank(bucket, own, peer, swarm))
