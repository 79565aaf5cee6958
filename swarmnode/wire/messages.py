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
    """The address of one question: enough for anybody to regenerate it, never the question
    itself."""

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


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The length of one action of an episode: its part of the completion's text and tokens."""

    text_bytes: int
    """UTF-8 bytes of the action in `text`."""
    tokens: int
    """Sampled tokens of the action in `token_ids` and `logprobs`, the EOS token included."""


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer, or the actions of one episode one behind the other."""

    text: str
    """Decoded completion, without special tokens."""
    tokens: int
    """Number of sampled tokens, the EOS tokens included."""
    logprob: float
    """Sum of the sampler's log-probabilities over `tokens`, nats, <= 0."""
    finish: Finish
    """How the completion ended; of an episode, how its last action ended."""
    token_ids: bytes = b""
    """`tokens` little-endian u32, or empty: for peers with the same tokenizer."""
    logprobs: bytes = b""
    """`tokens` little-endian f32, or empty: the sampler's log-probability of each token."""
    turns: Annotated[list[Turn], msgspec.Meta(max_length=TURNS)] = []
    """The actions of an episode, in order; empty for the answer to a task of one turn."""


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


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signed bytes. The signature covers domain string, swarm id and the exact payload bytes."""

    key: bytes
    """32 bytes: the signer's raw Ed25519 public key; its peer id follows from it."""
    payload: bytes
    """msgpack of a RolloutGroup."""
    signature: bytes
    """64 bytes."""
    codec: Codec = "raw"
    """How `payload` is compressed. The signature covers this field, and `payload` as sent."""


class PeerAddresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another peer may be dialled. A claim: only a dial that ends with this peer id proves
    it."""

    peer: str
    """Its peer id in base58."""
    addresses: list[str]
    """Multiaddrs `/ip4|ip6/<address>/tcp/<port>`, without the peer id."""


class PeersRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the requester's swarm id."""
    addresses: list[str]
    """The requester's own listen or announce addresses; the responder believes the port and uses
    the IP address it sees."""


class PeersResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    swarm: bytes
    """32 bytes: the responder's swarm id; `peers` is empty when it is not the requester's."""
    peers: list[PeerAddresses]
    """Peers of this swarm that the responder is connected to now, a random choice."""


class ModelRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that members may start from. The hashes decide; name and revision say where to get
    it."""

    name: str
    """`embedded`, or its name on the Hugging Face Hub."""
    revision: str
    """Commit or tag on the Hub; may be empty."""
    fingerprint: bytes
    """32 bytes: architecture and base weights."""
    tokenizer: bytes
    """32 bytes: hash of the tokenizer."""


class TaskEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    version: str
    settings: str
    """For people: JSON of the generator's settings. `version` covers them."""


class RolloutRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every group in the swarm keeps to."""

    min_completions: int
    max_completions: int
    max_tokens: int
    """The most in a completion."""
    temperature: float
    top_p: float
    groups_per_second: float
    """The most that is taken from one peer, sustained."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that members share beyond the rules: whoever does not know the key does not
    join."""

    key: str
    value: str
    """JSON of the value."""


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may be a member. Both empty: everybody."""

    members: list[str]
    """Peer ids. Founder and bootstrap peers are members without being listed."""
    secret: bytes
    """32 bytes: commitment to the pre-shared secret; empty when there is none."""


class SwarmManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a swarm agrees on. Its hash is the swarm id: see `wire.manifest`."""

    name: str
    founder: bytes
    """32 bytes: the raw Ed25519 public key that signed it."""
    created_at: int
    """Unix time, milliseconds."""
    predecessor: bytes
    """32 bytes: the swarm id that this manifest follows; empty for a first one."""
    minimum_version: str
    """The oldest version of swarmnode that may take part, e.g. `0.1.0`."""
    protocols: list[str]
    """Everything that two members must speak alike, sorted."""
    models: list[ModelRef]
    """Any of these; when empty, any model at all."""
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
    """The signed manifest; empty when the responder does not have it."""
    successor: bytes
    """A signed manifest that names it as predecessor; empty when the responder knows none."""


class BulkManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a transfer consists of. Its root (`wire.bulk.root`) covers all but the name."""

    transfer: bytes
    """32 bytes: the transfer's id, chosen by whoever offers it."""
    size: int
    """Bytes in all, at least 1."""
    chunk_bytes: int
    """Length of every chunk but the last, 4 KiB to 1 MiB."""
    hashes: bytes
    """32 bytes for each chunk: its BLAKE3."""


class BulkManifestRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transfer: bytes


class BulkManifestResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    status: Status
    manifest: bytes
    """A BulkManifest when `status` is ok, else empty."""


class BulkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a transfer."""

    transfer: bytes
    root: bytes
    """32 bytes: of the manifest that the requester has."""
    wanted: bytes
    """A bit for each chunk, chunk 0 the lowest of the first byte, the last byte padded with zeros;
    at least one is set."""


class BulkResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to it; when it is ok the wanted chunks follow, in order, and nothing between or
    behind them."""

    status: Status
    size: int
    """Bytes that follow; 0 unless `status` is ok."""


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of one process under a key; sent in an envelope, so that whoever passes it on can
    prove it."""

    session: bytes
    """16 random bytes, drawn when the process started."""
    started_at: int
    """Unix time, milliseconds."""
    issued_at: int
    """Unix time, milliseconds: when it was signed."""


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node says of itself; sent in an envelope. Every field is a claim that nobody can
    check."""

    name: str
    """Its operator's name for it; may be empty."""
    version: str
    """The version of the program it runs."""
    created_at: int
    """Unix time, milliseconds: when it was signed."""
    uptime: int
    """Seconds."""
    step: int
    """Training steps."""
    policy_version: int
    reward: float
    """Held-out reward, 0 to 1; -1 when there is none."""
    published: int
    """Groups, since it started."""
    peers: int
    """Connected to it."""


class SummaryRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    summary: bytes
    """An envelope: the requester's own summary, just signed; empty when it does not share one."""


class SummaryResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    summaries: list[bytes]
    """Envelopes, as received: a random choice of those that the responder has, its own among
    them."""


class SessionResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sessions: list[bytes]
    """Envelopes: other sessions of the requester's key that the responder heard of lately."""
