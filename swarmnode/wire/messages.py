"""The messages, one struct each. Field order and names are normative: see protocol/02-rollouts.md."""

from __future__ import annotations

from typing import Literal

import msgspec

Codec = Literal["raw", "zstd"]
Finish = Literal["eos", "length"]
Status = Literal["ok", "unknown", "busy"]


class TaskRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of one question: enough for anybody to regenerate it, never the question itself."""

    id: str
    """Task name, e.g. `rg/chain_sum`."""
    version: str
    """Hash of the generator's version and settings."""
    seed: int
    """First seed of a block of 2**20 items (a multiple of 2**20, below 2**63)."""
    index: int
    """Item in the block, 0 to 2**20 - 1."""
    difficulty: int = 0


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: float
    top_p: float
    max_tokens: int


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    """Decoded completion, without special tokens."""
    tokens: int
    """Number of sampled tokens, the EOS token included."""
    logprob: float
    """Sum of the sampler's log-probabilities over `tokens`, nats, <= 0."""
    finish: Finish
    token_ids: bytes = b""
    """`tokens` little-endian u32, or empty: for peers with the same tokenizer."""
    logprobs: bytes = b""
    """`tokens` little-endian f32, or empty: the sampler's log-probability of each token."""


class RolloutGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rollout"):
    """All completions that one node sampled for one question at one policy version."""

    task: TaskRef
    model: bytes
    """32 bytes: fingerprint of the model's architecture and base weights."""
    tokenizer: bytes
    """32 bytes: hash of the tokenizer."""
    policy_version: int
    """The sender's own counter when it sampled."""
    created_at: int
    """Unix time, milliseconds."""
    sequence: int
    """The sender's counter; the task's seed and index follow from it (`tasks.seeds`)."""
    sampling: SamplingParams
    completions: list[Completion]


class Announce(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="announce"):
    """A group too long for gossip: fetch it from the signer by its content id."""

    content: bytes
    """32 bytes: blake2b-256 of the envelope's bytes."""
    size: int
    """Length of that envelope, bytes."""
    created_at: int
    sequence: int


Payload = RolloutGroup | Announce
"""What an envelope carries."""


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signed bytes. The signature covers domain string, swarm id and the exact payload bytes."""

    key: bytes
    """32 bytes: the signer's raw Ed25519 public key; its peer id follows from it."""
    payload: bytes
    """msgpack of a RolloutGroup or an Announce."""
    signature: bytes
    """64 bytes."""
    codec: Codec = "raw"
    """How `payload` is compressed. The signature covers this field, and `payload` as sent."""


class FetchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: bytes


class FetchResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    status: Status
    body: bytes = b""


class PeerAddresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another peer may be dialled. A claim: only a dial that ends with this peer id proves it."""

    peer: str
    """Its peer id in base58."""
    addresses: list[str]
    """Multiaddrs `/ip4|ip6/<address>/tcp/<port>`, without the peer id."""


class PeersRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the requester's swarm id."""
    addresses: list[str]
    """The requester's own listen or announce addresses; the responder believes the port and uses the IP address it sees."""


class PeersResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the responder's swarm id; `peers` is empty when it is not the requester's."""
    peers: list[PeerAddresses]
    """Peers of this swarm that the responder is connected to now, a random choice."""
