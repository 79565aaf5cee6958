"""Identifiers of the wire protocol. protocol/registry.toml is generated from this
file."""

from __future__ import annotations

DOMAIN_ROLLOUT = b"swarmnode/rollout/1"
"""Domain of the signature of a rollout envelope."""

DOMAIN_SWARM = b"swarmnode/swarm/1"
"""Domain of the hash of a swarm id without a manifest."""

DOMAIN_SWARM_MANIFEST = b"swarmnode/swarm-manifest/1"
"""Domain of the hash of a swarm id with a manifest."""

DOMAIN_MANIFEST = b"swarmnode/manifest/1"
"""Domain of the signature of a manifest."""

DOMAIN_SECRET = b"swarmnode/secret/1"
"""Domain of the hash that commits to a private swarm's secret."""

DOMAIN_SESSION = b"swarmnode/session/1"
"""Domain of the signature of a session."""

DOMAIN_SUMMARY = b"swarmnode/summary/1"
"""Domain of the signature of a summary."""

DOMAIN_BULK = b"swarmnode/bulk/1"
"""Domain of the hash of a transfer's root."""


DOMAIN_SEED = b"swarmnode/seed/1"
"""Domain of the hash of a block of training seeds."""

DOMAIN_EVALUATION = b"swarmnode/evaluation/1"
"""Domain of the hash of a block of evaluation seeds."""

DOMAIN_TASK = b"swarmnode/task/1"
"""Domain of the hash that chooses a question's task."""

LISTING_PROTOCOL = "/swarmnode/listing/1"
"""Request/response: the groups that the responder offers. A long poll."""

GROUPS_PROTOCOL = "/swarmnode/groups/1"
"""Request/response: several groups by their content ids."""

NEIGHBOURS_PROTOCOL = "/swarmnode/neighbours/1"
"""Request/response: addresses of peers, other sessions of the requester's key, nodes' descriptions
of themselves, a known successor. Optional, so not in `PROTOCOLS`."""

MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
"""Request/response: a manifest by its swarm id, and its successor. Used before joining, so not in
`PROTOCOLS`."""

BULK_PROTOCOL = "/swarmnode/bulk/1"
"""A stream of chunks. Optional for a node without content to offer, so not in `PROTOCOLS`."""

BULK_MANIFEST_PROTOCOL = "/swarmnode/bulk-manifest/1"
"""Request/response: the manifest of a transfer. Not in `PROTOCOLS`."""

WEIGHTS_PROTOCOL = "/swarmnode/weights/1"
"""Request/response: weight averaging between partners. Optional, so not in `PROTOCOLS`."""

WEIGHTS_STATE_PROTOCOL = "/swarmnode/weights-state/1"
"""Request/response: the signed manifest of slow weights, and where to fetch them. Not in
`PROTOCOLS`."""

CREWS_PROTOCOL = "/swarmnode/crews/1"
"""Request/response: offers, proposals of crews, heartbeats. Optional for a node with a whole
policy, so not in `PROTOCOLS`."""

STAGE_STREAM_PROTOCOL = "/swarmnode/stage-stream/1"
"""A stream between the trainers of two stages of a crew. Not in `PROTOCOLS`."""

PRIVATE_SECURITY = "/swarmnode/noise-xxpsk0/1"
"""Security protocol of a swarm with a pre-shared secret, in place of `/noise`."""

PROTOCOLS = (GROUPS_PROTOCOL, LISTING_PROTOCOL)
"""Protocols that every member of a swarm supports, sorted; part of the swarm id."""
