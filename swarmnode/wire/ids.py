"""Names on the wire. protocol/registry.toml holds the same table; a test compares the two."""

from __future__ import annotations

DOMAIN_ROLLOUT = b"swarmnode/rollout/1"
"""Domain string of a rollout envelope's signature."""

DOMAIN_SWARM = b"swarmnode/swarm/1"
"""Prefix of what is hashed into a swarm id."""

DOMAIN_SWARM_MANIFEST = b"swarmnode/swarm-manifest/1"
"""The same for a swarm that has a manifest."""

DOMAIN_MANIFEST = b"swarmnode/manifest/1"
"""Domain string of a manifest's signature."""

DOMAIN_SECRET = b"swarmnode/secret/1"
"""Prefix of what is hashed into a private swarm's commitment to its secret."""

DOMAIN_SESSION = b"swarmnode/session/1"
"""Domain string of a session's signature."""

DOMAIN_SUMMARY = b"swarmnode/summary/1"
"""Domain string of a summary's signature."""

DOMAIN_BULK = b"swarmnode/bulk/1"
"""Prefix of what is hashed into a transfer's root."""

DOMAIN_STATE = b"swarmnode/state/1"
"""Domain string of the signature of an outer state's manifest."""

DOMAIN_SEED = b"swarmnode/seed/1"
"""Prefix of what is hashed into a block of training seeds."""

DOMAIN_EVALUATION = b"swarmnode/evaluation/1"
"""Prefix of what is hashed into a block of evaluation seeds."""

DOMAIN_TASK = b"swarmnode/task/1"
"""Prefix of what is hashed to choose a question's task."""

LISTING_PROTOCOL = "/swarmnode/listing/1"
"""Request/response: which groups the responder can give. A poll that may be held open."""

GROUPS_PROTOCOL = "/swarmnode/groups/1"
"""Request/response: several groups by their content ids."""

CHOICE_RULE = "/swarmnode/choice/1"
"""Not a protocol but a rule, named among them in the manifest of a swarm whose members choose the
difficulty of their questions."""

PEERS_PROTOCOL = "/swarmnode/peers/1"
"""Request/response: peers of the same swarm that the responder is connected to. Not in `PROTOCOLS`:
nodes can do without it."""

MANIFEST_PROTOCOL = "/swarmnode/manifest/1"
"""Request/response: a manifest by its swarm id, and its successor. Not in `PROTOCOLS`: it is spoken
before there is a swarm."""

SESSION_PROTOCOL = "/swarmnode/session/1"
"""Request/response: this process's own session, against other sessions of the same key. Not in
`PROTOCOLS`."""

SUMMARY_PROTOCOL = "/swarmnode/summary/1"
"""Request/response: what nodes say of themselves, for people to look at. Not in `PROTOCOLS`."""

BULK_PROTOCOL = "/swarmnode/bulk/1"
"""A stream of chunks. Not in `PROTOCOLS`: a node that has nothing to offer does without."""

BULK_MANIFEST_PROTOCOL = "/swarmnode/bulk-manifest/1"
"""Request/response: what a transfer consists of. Not in `PROTOCOLS`."""

WEIGHTS_PROTOCOL = "/swarmnode/weights/1"
"""Request/response: what partners say about averaging. Not in `PROTOCOLS`: nodes share rollouts
without it."""

WEIGHTS_STATE_PROTOCOL = "/swarmnode/weights-state/1"
"""Request/response: the signed manifest of slow weights, and where to fetch them. Not in
`PROTOCOLS`."""

CREWS_PROTOCOL = "/swarmnode/crews/1"
"""Request/response: offers, proposals of crews, heartbeats. Not in `PROTOCOLS`: whoever holds
a whole policy does without."""

STAGE_STREAM_PROTOCOL = "/swarmnode/stage-stream/1"
"""A stream between the trainers of two stages of a crew. Not in `PROTOCOLS`."""

PRIVATE_SECURITY = "/swarmnode/noise-xxpsk0/1"
"""Security protocol of a swarm with a pre-shared secret, in place of `/noise`."""

PROTOCOLS = (GROUPS_PROTOCOL, LISTING_PROTOCOL)
"""Protocols that all members of a swarm speak, sorted; part of the swarm id."""

CHOICE_PROTOCOLS = (CHOICE_RULE, GROUPS_PROTOCOL, LISTING_PROTOCOL)
"""The same for a swarm whose members choose the difficulty of their questions."""

SPOKEN = frozenset({*PROTOCOLS, *CHOICE_PROTOCOLS})
"""Names in a manifest that this version supports."""
