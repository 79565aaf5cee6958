"""Messages of pull gossip: listings and groups. Field order and names are normative: protocol/02,
section 4.

    requester ─ ListingRequest: news since my cursor ───────▶ responder answers when it has news or
              ◀─ ListingResponse: at most 14 groups ────────  the patience is over
              ─ GroupsRequest: at most 16 content ids ──────▶
              ◀─ GroupsResponse: envelopes up to 1 MiB ─────
"""

from __future__ import annotations

import msgspec

from swarmnode.wire.messages import Status


class ListingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A poll for new groups."""

    swarm: bytes
    """32 bytes: the requester's swarm id."""
    life: bytes
    """8 bytes, from the responder's last answer; empty before the first."""
    position: int
    """The cursor from the same answer; 0 before the first."""
    patience: int
    """Maximum time in seconds for which the responder may hold the request."""


class ListedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group that the responder offers. Every field is a claim that can be checked once the
    group has arrived."""

    content: bytes
    """32 bytes: content id of its envelope."""
    author: bytes
    """32 bytes: the raw Ed25519 public key that signed it."""
    task: str
    created_at: int
    """Unix time, milliseconds."""
    size: int
    """Size of its envelope in bytes."""
    spread: float
    """Standard deviation of its rewards, 0 to 0.5, as computed by the responder."""


class ListingResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a poll."""

    status: Status
    life: bytes
    """8 random bytes, drawn at the start of the responder's process. Cursors of another life are
    void."""
    position: int
    """The cursor for the next request."""
    groups: list[ListedGroup]
    """The newest groups after the requester's cursor, newest last; empty unless `status` is ok."""


class GroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for groups."""

    contents: list[bytes]
    """Distinct content ids, most wanted first."""


class GroupResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One requested group."""

    status: Status
    body: bytes = b""
    """The envelope if `status` is ok, else empty."""


class GroupsResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request for groups."""

    groups: list[GroupResponse]
    """One per content id, in the same order; `busy` also if the envelope did not fit."""
