"""What a node has to give, and how it is asked for: listings and pulls. Field order and names are
normative: protocol/02, section 6.

who pulls ─ ListingRequest: what is new since a cursor? ─▶ who has ─▶ ListingResponse: at most 64
Listed
          ─ GroupsRequest: at most 16 content ids ───────▶         ─▶ GroupsResponse: as many
          envelopes as fit 1 MiB
"""

from __future__ import annotations

import msgspec

from swarmnode.wire.messages import FetchResponse, Status


class ListingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the requester's swarm id."""
    life: bytes
    """8 bytes, as the responder gave them last; empty where the requester knows of none."""
    position: int
    """The cursor that came with them; 0 without."""


class Listed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group that the responder can give. All of it is a claim, and all of it can be checked
    once the group is here."""

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
    status: Status
    life: bytes
    """8 bytes, drawn when the responder's process started: positions of another life mean
    nothing."""
    position: int
    """The cursor for the next request."""
    groups: list[Listed]
    """The newest that came behind the requester's cursor, the newest last; none unless `status` is
    ok."""


class GroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    contents: list[bytes]
    """Content ids, none twice, the most wanted first."""


class GroupsResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: list[FetchResponse]
    """One for each content id, in the same order: `busy` also where the envelope did not fit."""
