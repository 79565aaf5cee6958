"""Caps, in bytes and counts, checked before anything is decoded. protocol/registry.toml holds the same table."""

GOSSIP_BYTES = 64 * 1024
"""A gossip frame (envelope) is at most this long; a longer group is announced and fetched."""
GROUP_BYTES = 1024 * 1024
"""A fetched envelope is at most this long, compressed or not."""
COMPLETIONS = 64
"""Completions in a group: 2 to this many."""
TEXT_BYTES = 64 * 1024
"""UTF-8 bytes of one completion."""
TOKENS = 16 * 1024
"""Tokens of one completion."""
TASK_ID_BYTES = 64
VERSION_BYTES = 64
FINGERPRINT_BYTES = 32
SWARM_ID_BYTES = 32
INDEX_BITS = 20
"""A seed block holds 2**20 items."""
CLOCK_SKEW_SECONDS = 120.0
"""A group created further than this in the future is not accepted."""
GROUP_AGE_SECONDS = 3600.0
"""A group older than this is stale."""
