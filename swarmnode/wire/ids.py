"""Names on the wire. protocol/registry.toml holds the same table; a test compares the two."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

DOMAIN_ROLLOUT = b"swarmnode/rollout/1"
"""Domain string of a rollout envelope's signature."""

DOMAIN_SWARM = b"swarmnode/swarm/1"
"""Prefix of what is hashed into a swarm id."""

DOMAIN_SWARM_MANIFEST = b"swarmnode/swarm/2"
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

DOMAIN_BUCKET_SEED = b"swarmnode/seed/2"
"""The same where task and difficulty are the node's choice, which is hashed too."""

DOMAIN_EVALUATION = b"swarmnode/evaluation/1"
"""Prefix of what is hashed into a block of evaluation seeds."""

DOMAIN_TASK = b"swarmnode/task/1"
"""Prefix of what is hashed to choose a question's task."""

ROLLOUT_TOPIC = "/swarmnode/rollouts/1"
"""Prefix of the gossip topic; the swarm id in hex follows: `rollout_topic(swarm)`."""

BUCKET_TOPIC = "/swarmnode/rollouts/2"
"""The same in a swarm whose members choose task and difficulty of their questions: a question's
address follows from that choice too."""

FETCH_PROTOCOL = "/swarmnode/fetch/1"
"""Request/response: the body of a group that was announced by its hash."""

LISTING_PROTOCOL = "/swarmnode/listing/1"
"""Request/response: which groups the responder can give. Not in `PROTOCOLS`: whoever does without
is reached by gossip."""

GROUPS_PROTOCOL = "/swarmnode/groups/1"
"""Request/response: several groups by their content ids. Not in `PROTOCOLS`."""

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

WEIGHTS_PROTOCOL = "/swarmnode/weights/3"
"""Request/response: what partners say about averaging. Not in `PROTOCOLS`: nodes share rollouts
without it."""

WEIGHTS_STATE_PROTOCOL = "/swarmnode/weights-state/3"
"""Request/response: the signed manifest of slow weights, and where to fetch them. Not in
`PROTOCOLS`."""

CREWS_PROTOCOL = "/swarmnode/crews/9"
"""Request/response: offers, records of crews to sign, heartbeats. Not in `PROTOCOLS`: whoever holds
a whole policy does without."""

STAGE_STREAM_PROTOCOL = "/swarmnode/stage-stream/9"
"""A stream between the trainers of two stages of a crew. Not in `PROTOCOLS`."""

PRIVATE_SECURITY = "/swarmnode/noise-xxpsk0/1"
"""Security protocol of a swarm with a pre-shared secret, in place of `/noise`."""

FETCH_ORDINALS = (FETCH_PROTOCOL,)
ROLLOUT_ORDINALS = (ROLLOUT_TOPIC,)
"""What this version speaks with members, newest first: the present ordinal and, for a release at
least, the one before."""

PROTOCOLS = (FETCH_ORDINALS[0], ROLLOUT_ORDINALS[0])
"""Everything two nodes must speak alike, sorted; part of the swarm id. A swarm that is founded now
speaks the newest."""

BUCKET_PROTOCOLS = (FETCH_ORDINALS[0], BUCKET_TOPIC)
"""The same of a swarm in which there is a choice."""

SPOKEN = frozenset({*FETCH_ORDINALS, *ROLLOUT_ORDINALS, BUCKET_TOPIC})
"""Names in a manifest that this version can honour."""


class Spoken(NamedTuple):
    """Which ordinals a swarm speaks."""

    fetch: str = FETCH_ORDINALS[0]
    rollouts: str = ROLLOUT_ORDINALS[0]

    @property
    def chooses(self) -> bool:
        """Whether members choose task and difficulty of their questions."""
        return self.rollouts == BUCKET_TOPIC


def spoken_in(protocols: Collection[str]) -> Spoken:
    """What to speak in a swarm whose manifest names `protocols`: what all its members do, however
    much newer this version is."""
    fetch, rollouts = (
        next((name for name in known if name in protocols), known[0])
        for known in (FETCH_ORDINALS, ROLLOUT_ORDINALS)
    )
    return Spoken(fetch, BUCKET_TOPIC if BUCKET_TOPIC in protocols else rollouts)


def rollout_topic(swarm: bytes, prefix: str = ROLLOUT_ORDINALS[0]) -> str:
    """The gossip topic of one swarm. `swarm` is the 32-byte swarm id, `prefix` the ordinal that it
    speaks."""
    return f"{prefix}/{swarm.hex()}"
