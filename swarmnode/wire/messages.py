"""The messages, one struct each. Field order and names are normative: see
protocol/02-rollouts.md."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarmnode.wire.limits import TURNS

Codec = Literal["raw", "zstd"]
Finish = Literal["eos", "length"]
Status = Literal["ok", "unknown", "busy"]


class TaskRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of one question, which allows regenerating it; never the question itself."""

    id: str
    """Task name, e.g. `rg/chain_sum`."""
    version: str
    """Hash of the generator's version and settings."""
    seed: int
    """First seed of a block of 2**20 items (a multiple of 2**20, below 2**63)."""
    index: int
    """Item in the block, 0 to 2**20 - 1."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: float
    top_p: float
    max_tokens: int


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The length of one action of an episode in the completion's text and tokens."""

    text_bytes: int
    """UTF-8 bytes of the action in `text`."""
    tokens: int
    """Sampled tokens of the action in `token_ids` and `logprobs`, including the EOS token."""


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer, or the concatenated actions of one episode."""

    text: str
    """Decoded completion, without special tokens."""
    tokens: int
    """Number of sampled tokens, including EOS tokens."""
    logprob: float
    """Sum of the sampler's log-probabilities over `tokens`, nats, <= 0."""
    finish: Finish
    """End of the completion, or of the last action of an episode."""
    token_ids: bytes = b""
    """`tokens` little-endian u32, or empty; for peers with the same tokenizer."""
    logprobs: bytes = b""
    """`tokens` little-endian f32, or empty: the sampler's log-probability of each token."""
    turns: Annotated[list[Turn], msgspec.Meta(max_length=TURNS)] = []
    """The actions of an episode in order; empty for a task of one turn."""


class RolloutGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rollout"):
    """All completions that one node sampled for one question at one policy version."""

    task: TaskRef
    model: bytes
    """32 bytes: fingerprint of the model's architecture and base weights."""
    tokenizer: bytes
    """32 bytes: hash of the tokenizer."""
    policy_version: int
    """The sender's own counter at the time of sampling."""
    created_at: int
    """Unix time, milliseconds."""
    sequence: int
    """The sender's counter; it determines the task's seed and index (`tasks.seeds`)."""
    sampling: SamplingParams
    completions: list[Completion]


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signed bytes. The signature covers domain string, swarm id and the exact payload bytes."""

    key: bytes
    """32 bytes: the signer's raw Ed25519 public key; its peer id follows from it."""
    payload: bytes
    """msgpack of a RolloutGroup."""
    signature: bytes
    """64 bytes."""
    codec: Codec = "raw"
    """Compression of `payload`. The signature covers this field, and `payload` as sent."""


class PeerAddresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses of another peer. A claim: only a dial that ends with this peer id proves it."""

    peer: str
    """Its peer id in base58."""
    addresses: list[str]
    """Multiaddrs `/ip4|ip6/<address>/tcp/<port>`, without the peer id."""


class NeighboursRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the requester's swarm id."""
    addresses: list[str]
    """The requester's listening or announced addresses; the responder uses the ports with the IP
    address that it sees."""
    session: bytes
    """An envelope with the requester's session, signed now; empty if it sends none."""
    summary: bytes
    """An envelope with the requester's own summary; empty if it shares none."""
    used: int
    """Number of the responder's groups that the requester has trained on; 0 if it shares no
    summary."""


class NeighboursResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the responder's swarm id. If it differs from the requester's, the lists are
    empty."""
    peers: list[PeerAddresses]
    """A random choice of the responder's connected peers."""
    sessions: list[bytes]
    """Envelopes: recent other sessions of the requester's key."""
    summaries: list[bytes]
    """Envelopes as received: a random choice of those that the responder has, and its own."""
    successor: bytes
    """32 bytes: swarm id of a successor of the requester's manifest; empty if the responder knows
    none."""


class ModelRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that members may start from. The hashes identify it; name and revision are only its
    source."""

    name: str
    """`embedded`, or its name on the Hugging Face Hub."""
    revision: str
    """Commit or tag on the Hub; may be empty."""
    fingerprint: bytes
    """32-byte hash of architecture and base weights."""
    tokenizer: bytes
    """32-byte hash of the tokenizer."""


class TaskEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    version: str
    settings: str
    """JSON of the generator's settings, for display. `version` covers them."""


class RolloutRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules for every group of the swarm."""

    min_completions: int
    max_completions: int
    max_tokens: int
    """Maximum number of tokens of a completion."""
    temperature: float
    top_p: float
    groups_per_second: float
    """Maximum sustained rate of groups accepted from one peer."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that members share beyond the rules. A node that does not know the key cannot
    join."""

    key: str
    value: str
    """JSON of the value."""


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Access rules. Open to all nodes if both fields are empty."""

    members: list[str]
    """Peer ids. The founder and bootstrap peers are members without being listed."""
    secret: bytes
    """32 bytes: commitment to the pre-shared secret; empty without one."""


class SwarmManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms of a swarm. Its hash is the swarm id: see `wire.manifest`."""

    name: str
    founder: bytes
    """32 bytes: the raw Ed25519 public key that signed it."""
    created_at: int
    """Unix time, milliseconds."""
    predecessor: bytes
    """32 bytes: the swarm id that this manifest follows; empty for a first one."""
    minimum_version: str
    """Minimum version of swarmnode, e.g. `0.1.0`."""
    protocols: list[str]
    """The protocols and rules that every member must support, sorted."""
    models: list[ModelRef]
    """The allowed models; empty allows any model."""
    tasks: list[TaskEntry]
    """Sorted by id."""
    rollouts: RolloutRules
    settings: list[Setting]
    """Sorted by key."""
    bootstrap: list[str]
    """Multiaddrs ending in `/p2p/<peer id>`."""
    access: Access


class ManifestRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the swarm id that the manifest hashes to."""


class ManifestResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: bytes
    """The signed manifest; empty if the responder does not have it."""
    successor: bytes
    """A signed manifest that names it as predecessor; empty if the responder knows none."""


class BulkManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a transfer. Its root (`wire.bulk.root`) covers everything but the id."""

    transfer: bytes
    """32 bytes: the transfer id, chosen by the offering node."""
    size: int
    """Total number of bytes, at least 1."""
    chunk_bytes: int
    """Size of every chunk but the last, 4 KiB to 1 MiB."""
    hashes: bytes
    """32 bytes per chunk: its BLAKE3 hash."""


class BulkManifestRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transfer: bytes


class BulkManifestResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    status: Status
    manifest: bytes
    """A BulkManifest if `status` is ok, else empty."""


class BulkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a transfer."""

    transfer: bytes
    root: bytes
    """32 bytes: root of the requester's manifest."""
    wanted: bytes
    """One bit per chunk, chunk 0 the lowest bit of the first byte, the last byte padded with zeros;
    at least one bit is set."""


class BulkResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a BulkRequest. If ok, exactly the wanted chunks follow in order."""

    status: Status
    size: int
    """Number of bytes that follow; 0 unless `status` is ok."""


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of one process with a key; sent in an envelope, so that a forwarder can prove it."""

    id: bytes
    """16 random bytes, drawn at the start of the process."""
    started_at: int
    """Unix time, milliseconds."""
    issued_at: int
    """Unix time of the signature in milliseconds."""


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's description of itself, sent in an envelope. Every field is an unverifiable claim."""

    name: str
    """The operator's name for the node; may be empty."""
    version: str
    """Version of swarmnode."""
    created_at: int
    """Unix time of the signature in milliseconds."""
    uptime: int
    """Seconds since the start."""
    step: int
    """Number of training steps."""
    policy_version: int
    reward: float
    """Held-out reward, 0 to 1; -1 if there is none."""
    reward_step: int
    """Step after which it was measured; 0 if there is none."""
    published: int
    """Number of published groups since the start."""
    peers: int
    """Number of connected peers."""
