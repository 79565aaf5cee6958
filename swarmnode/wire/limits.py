"""Caps, in bytes, counts and seconds. protocol/registry.toml holds the same table; a test compares
the two.

Sizes are checked before anything is decoded, declared sizes before anything is decompressed, the
rest right after.
"""

GROUP_BYTES = 1024 * 1024
"""Longest envelope of a group, and longest payload once decompressed."""
LISTING_REQUEST_BYTES = 96
LISTING_RESPONSE_BYTES = 4 * 1024
LISTED = 14
"""Groups in a listing, at most: two peers' groups of a step. Each takes about 110 bytes, at most
170."""
PATIENCE_SECONDS = 10
"""Longest time for which a responder may hold a poll open, seconds."""
LIFE_BYTES = 8
"""Tells one process that lists from the next under the same key."""
SPREAD = 0.5
"""The highest standard deviation that rewards between 0 and 1 have."""
PULLED = 16
"""Groups that one request asks for, at most."""
GROUPS_REQUEST_BYTES = 560
GROUPS_RESPONSE_BYTES = GROUP_BYTES + 512
"""Envelopes of GROUP_BYTES together, and the maps around them."""
PEERS_REQUEST_BYTES = 4 * 1024
"""A peers request is at most this long."""
PEERS_RESPONSE_BYTES = 64 * 1024
"""A peers response is at most this long."""
PEERS = 32
"""Peers in a peers response, at most."""
PEER_ADDRESSES = 8
"""Addresses of one peer in a peers request or response, at most."""
MANIFEST_BYTES = 64 * 1024
"""A signed manifest, envelope and all, is at most this long."""
MANIFEST_REQUEST_BYTES = 64
MANIFEST_RESPONSE_BYTES = 2 * MANIFEST_BYTES + 64
"""A manifest and its successor, and the map around them."""
SESSION_REQUEST_BYTES = 512
"""A signed session is at most this long."""
SESSIONS = 4
"""Sessions in a session response, at most."""
SESSION_RESPONSE_BYTES = SESSIONS * (SESSION_REQUEST_BYTES + 4) + 32
SUMMARY_BYTES = 512
"""A signed summary is at most this long."""
SUMMARY_REQUEST_BYTES = SUMMARY_BYTES + 16
SUMMARIES = 32
"""Summaries in a summary response, at most."""
SUMMARY_RESPONSE_BYTES = SUMMARIES * (SUMMARY_BYTES + 4) + 32
SUMMARY_NAME_BYTES = 64
"""UTF-8 bytes of a node's name in its summary."""
SUMMARY_SECONDS = 30.0
"""Between two summaries of one node, at least."""
SUMMARY_AGE_SECONDS = 300.0
"""A summary older than this is neither shown nor passed on."""
BULK_CHUNK_BYTES = 1024 * 1024
"""A chunk of a transfer is at most this long."""
BULK_MIN_CHUNK_BYTES = 4 * 1024
"""And at least this, the last one of a transfer excepted."""
BULK_CHUNKS = 32 * 1024
"""Chunks of a transfer, at most: 32 GiB."""
BULK_MANIFEST_REQUEST_BYTES = 64
BULK_MANIFEST_BYTES = 32 * BULK_CHUNKS + 128
"""A transfer's manifest: a hash per chunk, and the map around them."""
BULK_MANIFEST_RESPONSE_BYTES = BULK_MANIFEST_BYTES + 64
BULK_REQUEST_BYTES = BULK_CHUNKS // 8 + 128
"""A request for chunks: one bit for each, and the map around them."""
BULK_RESPONSE_BYTES = 48
"""What precedes the chunks."""
STAGE_HEADER_BYTES = 16 * 1024
"""The header of a frame between members of a crew."""
STAGE_ABOUT_ITEM_BYTES = 48
"""The longest description of a micro-batch, per token that the crew allows."""
STAGE_ACTIVATION_BLOCK = 64
"""Values of one token that share a scale under `int8`, at most."""
CREW_PREFIX_BYTES = 16
"""A frame has the first half of its crew's id."""
WAVE_BYTES = 16
"""The name of a wave."""
STAGES = 64
"""The most that a crew has."""
MICRO_BATCHES = 1024
"""In one step, at most."""
STAGE_WAITING = 64
"""Waves that are open at one stage, micro-batches whose gradient it waits for, scores and tokens
that wait there: of each, at most."""
PEER_ID_BYTES = 64
"""A peer id in base58; that of an Ed25519 key has 52 characters."""
ADDRESS_BYTES = 256
"""A multiaddr as text."""
ZSTD_WINDOW_BYTES = 1024 * 1024
"""A zstd frame may ask its reader for at most this much history."""

MIN_COMPLETIONS = 2
"""An advantage needs at least two completions to compare."""
COMPLETIONS = 64
"""Completions in a group, at most."""
TEXT_BYTES = 64 * 1024
"""UTF-8 bytes of one completion."""
TOKENS = 16 * 1024
"""Tokens of one completion, and of `sampling.max_tokens`."""
TURNS = 32
"""Actions of one episode, at most."""
TASK_ID_BYTES = 64
VERSION_BYTES = 64
SWARM_NAME_BYTES = 256
"""UTF-8 bytes of a swarm's name."""

MANIFEST_NAME_BYTES = 64
"""UTF-8 bytes of the name in a manifest."""
MODEL_NAME_BYTES = 256
REVISION_BYTES = 64
PROTOCOL_BYTES = 64
SETTING_KEY_BYTES = 64
SETTING_VALUE_BYTES = 1024
"""The longest value of a setting, and of a task's settings together."""
MINIMUM_VERSION_BYTES = 32
MODELS = 8
PROTOCOL_IDS = 16
TASKS = 64
SETTINGS = 64
BOOTSTRAP_ADDRESSES = 16
MEMBERS = 512
"""Peer ids on a private swarm's allow-list, at most."""
GROUPS_PER_SECOND = 1000.0
"""Highest rate of groups from one peer that a manifest may ask for."""
SECRET_BYTES = 32
"""A private swarm's secret, and the commitment to it."""
SESSION_BYTES = 16
TRANSFER_BYTES = 32
"""A transfer's id."""
CHUNK_HASH_BYTES = 32
"""The hash of a chunk, and the root over all of them."""

FINGERPRINT_BYTES = 32
SWARM_ID_BYTES = 32
CONTENT_ID_BYTES = 32
KEY_BYTES = 32
SIGNATURE_BYTES = 64

INTEGER_BITS = 63
"""Counters, seeds and times are 0 to 2**63 - 1, so that every language has a type for them."""
INDEX_BITS = 20
"""A seed block holds 2**20 items."""
DIFFICULTY = 255
"""Largest difficulty of a task."""
TEMPERATURE = 100.0
"""Highest sampling temperature."""
TOKEN_LOGPROB = -10_000.0
"""Lowest log-probability of one token, nats: keeps every sum far inside f32."""
LOGPROB_SLACK = 1e-3
"""A packed log-probability may exceed 0 by this much: f32 soft-max rounding."""

CLOCK_SKEW_SECONDS = 120.0
"""A group created further than this in the future is not accepted."""
GROUP_AGE_SECONDS = 3600.0
"""A group older than this is stale."""
