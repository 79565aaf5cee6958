"""Messages of pull gossip: listings and groups. Field order and names are normative: protocol/02,
section 4.

    requester ─ ListingRequest: what is new since my cursor? ─▶ responder, which answers when it has
              ◀─ ListingResponse: at most 14 Listed ───────────  news or the patience is over
              ─ GroupsRequest: at most 16 content ids ────────▶
              ◀─ GroupsResponse: as many envelopes as fit 1 MiB
"""

from __future__ import annotations

import msgspec

from swarmnode.wire.messages import Status


class ListingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A poll."""

    swarm: bytes
    """32 bytes: the requester's swarm id."""
    life: bytes
    """8 bytes, from the responder's last answer; empty before the first."""
    position: int
    """The cursor from the same answer; 0 before the first."""
    patience: int
    """Longest time for which the responder may hold the request until it has news, seconds."""


class Listed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group that the responder can give. Every field is a claim that can be checked once the
    group has arrived."""

    content: bytes
    """32 bytes: content id of its envelope."""
    author: bytes
    """32 bytes: the raw Ed25519 public key that signed it."""
    task: str
    created_at: int
    """Unix time, milliseconds."""
    size: int
    """Length of its envelope, bytes."""
    spread: float
    """Standard deviation of its rewards, 0 to 0.5, as the responder computed them."""


class ListingResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a poll."""

    status: Status
    life: bytes
    """8 random bytes, drawn when the responder's process started. Cursors of another life are
    void."""
    position: int
    """The cursor for the next request."""
    groups: list[Listed]
    """The newest groups beyond the requester's cursor, newest last; empty unless `status` is
    ok."""


class GroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fetch."""

    contents: list[bytes]
    """Distinct content ids, the most wanted first."""


class GroupResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One requested group."""

    status: Status
    body: bytes = b""
    """The envelope where `status` is ok, else empty."""


class GroupsResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a fetch."""

    groups: list[GroupResponse]
    """One for each content id, in the same order: `busy` also where the envelope did not fit."""
