"""Limits in bytes, counts and seconds. protocol/registry.toml is
generated from this file.

Sizes are checked before decoding, declared sizes before decompression, everything else right after
decoding.
"""

GROUP_BYTES = 1024 * 1024
"""Maximum size of a group's envelope, and of its decompressed payload."""
LISTING_REQUEST_BYTES = 96
LISTING_RESPONSE_BYTES = 4 * 1024
LISTED = 14
"""Maximum number of groups in a listing: two peers' groups of a step. Each takes about 110 bytes,
at most 170."""
PATIENCE_SECONDS = 10
"""Maximum time in seconds for which a responder may hold a poll open."""
LIFE_BYTES = 8
"""Identifies one process that serves listings among restarts with the same key."""
SPREAD = 0.5
"""Maximum standard deviation of rewards between 0 and 1."""
PULLED = 16
"""Maximum number of groups in one request."""
GROUPS_REQUEST_BYTES = 560
GROUPS_RESPONSE_BYTES = GROUP_BYTES + 512
"""Envelopes of GROUP_BYTES in total, and the maps around them."""
NEIGHBOURS_REQUEST_BYTES = 4 * 1024
NEIGHBOURS_RESPONSE_BYTES = 72 * 1024
PEERS = 32
"""Maximum number of peers in a neighbours response."""
PEER_ADDRESSES = 8
"""Maximum number of addresses of one peer in a neighbours request or response."""
SESSIONS = 4
"""Maximum number of sessions in a neighbours response."""
SIGNED_SESSION_BYTES = 512
"""Maximum size of a signed session."""
SUMMARIES = 8
"""Maximum number of summaries in a neighbours response."""
SUMMARY_BYTES = 512
"""Maximum size of a signed summary."""
MANIFEST_BYTES = 64 * 1024
"""Maximum size of a signed manifest with its envelope."""
MANIFEST_REQUEST_BYTES = 64
MANIFEST_RESPONSE_BYTES = 2 * MANIFEST_BYTES + 64
"""A manifest and its successor, and the map around them."""
SUMMARY_NAME_BYTES = 64
"""Maximum UTF-8 bytes of a node's name in its summary."""
SUMMARY_SECONDS = 30.0
"""Minimum interval between two summaries of one node."""
SUMMARY_AGE_SECONDS = 300.0
"""Age in seconds above which a summary is neither displayed nor forwarded."""
BULK_CHUNK_BYTES = 1024 * 1024
"""Maximum size of a chunk."""
BULK_MIN_CHUNK_BYTES = 4 * 1024
"""Minimum size of a chunk, except the last of a transfer."""
BULK_CHUNKS = 32 * 1024
"""Maximum number of chunks of a transfer (32 GiB)."""
BULK_MANIFEST_REQUEST_BYTES = 64
BULK_MANIFEST_BYTES = 32 * BULK_CHUNKS + 128
"""The manifest of a transfer: a hash per chunk, and the map around them."""
BULK_MANIFEST_RESPONSE_BYTES = BULK_MANIFEST_BYTES + 64
BULK_REQUEST_BYTES = BULK_CHUNKS // 8 + 128
"""A request for chunks: one bit per chunk, and the map around them."""
BULK_RESPONSE_BYTES = 48
"""The message before the chunks."""
STAGE_HEADER_BYTES = 16 * 1024
"""Maximum size of the header of a frame between members of a crew."""
STAGE_ABOUT_ITEM_BYTES = 48
"""Maximum size of the description of a micro-batch, per token that the crew allows."""
STAGE_ACTIVATION_BLOCK = 64
"""Maximum number of values of one token that share a scale under `int8`."""
CREW_PREFIX_BYTES = 16
"""Each frame carries the first half of its crew's id."""
STAGES = 8
"""Maximum number of stages of a crew."""
MICRO_BATCHES = 1024
"""Maximum number of micro-batches in one step."""
STAGE_WAITING = 64
"""Limit at one stage for each of: open waves, micro-batches that wait for a gradient, waiting
scores, waiting tokens."""
PEER_ID_BYTES = 64
"""A peer id in base58; that of an Ed25519 key has 52 characters."""
ADDRESS_BYTES = 256
"""A multiaddr as text."""
ZSTD_WINDOW_BYTES = 1024 * 1024
"""Maximum window that a zstd frame may require of its reader."""

MIN_COMPLETIONS = 2
"""An advantage needs at least two completions to compare."""
COMPLETIONS = 64
"""Maximum number of completions in a group."""
TEXT_BYTES = 64 * 1024
"""Maximum UTF-8 bytes of one completion."""
TOKENS = 16 * 1024
"""Maximum number of tokens of one completion, and of `sampling.max_tokens`."""
TURNS = 32
"""Maximum number of actions of one episode."""
TASK_ID_BYTES = 64
VERSION_BYTES = 64
SWARM_NAME_BYTES = 256
"""Maximum UTF-8 bytes of a swarm's name."""

MANIFEST_NAME_BYTES = 64
"""Maximum UTF-8 bytes of the name in a manifest."""
MODEL_NAME_BYTES = 256
REVISION_BYTES = 64
PROTOCOL_BYTES = 64
SETTING_KEY_BYTES = 64
SETTING_VALUE_BYTES = 1024
"""Maximum size of a setting's value, and of a task's settings together."""
MINIMUM_VERSION_BYTES = 32
MODELS = 8
PROTOCOL_IDS = 16
TASKS = 64
SETTINGS = 64
BOOTSTRAP_ADDRESSES = 16
MEMBERS = 512
"""Maximum number of peer ids on a private swarm's member list."""
GROUPS_PER_SECOND = 1000.0
"""Maximum rate of groups from one peer that a manifest may allow."""
SECRET_BYTES = 32
"""Size of a private swarm's secret, and of the commitment to it."""
SESSION_BYTES = 16
TRANSFER_BYTES = 32
"""Size of a transfer id."""
CHUNK_HASH_BYTES = 32
"""Size of the hash of a chunk, and of the root over all chunks."""

FINGERPRINT_BYTES = 32
SWARM_ID_BYTES = 32
CONTENT_ID_BYTES = 32
KEY_BYTES = 32
SIGNATURE_BYTES = 64

INTEGER_BITS = 63
"""Counters, seeds and times are 0 to 2**63 - 1, a range that every language has a type for."""
INDEX_BITS = 20
"""A seed block has 2**20 items."""
TEMPERATURE = 100.0
"""Maximum sampling temperature."""
TOKEN_LOGPROB = -10_000.0
"""Minimum log-probability of one token in nats; keeps every sum within f32."""
LOGPROB_SLACK = 1e-3
"""A packed log-probability may exceed 0 by this much, because of f32 soft-max rounding."""

CLOCK_SKEW_SECONDS = 120.0
"""Maximum time in seconds by which a group's creation time may be in the future."""
GROUP_AGE_SECONDS = 3600.0
"""Age in seconds above which a group is stale."""
