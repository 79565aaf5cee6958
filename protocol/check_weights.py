"""03-weights: messages of a swap, states and their manifests, payloads, blocks and fragments."""

import hashlib
import itertools
import math
import re
import struct

import msgpack
from check_frames import BYTES, COUNTS, ENVELOPE, EXACT, REGISTRY, counter, decode, require, verify
from check_join import peer_id

WEIGHTS = (
    {"type": ("here",), "fingerprint": bytes, "outer_step": int, "blocks": bytes},
    {
        "type": ("swap",),
        "id": bytes,
        "fingerprint": bytes,
        "fragment": int,
        "outer_step": int,
        "blocks": bytes,
    },
    {"type": ("accepted",), "id": bytes, "outer_step": int, "blocks": bytes},
    {"type": ("busy",), "id": bytes, "retry_seconds": int},
    {"type": ("refused",), "id": bytes, "reason": ("other_policy", "over")},
    {"type": ("payload",), "id": bytes},
    {
        "type": ("ready",),
        "id": bytes,
        "transfer": bytes,
        "root": bytes,
        "size": int,
        "outer_step": int,
    },
)
WEIGHTS_STATE = (
    {"type": ("state_request",), "fingerprint": bytes},
    {"type": ("state_response",), "manifest": bytes, "transfer": bytes, "root": bytes, "size": int},
)
STATE_MANIFEST = {
    "type": ("state",),
    "fingerprint": bytes,
    "outer_step": int,
    "created_at": int,
    "tensors": [{"name": str, "phi": bytes}],
}


def read_weights(frame, cap, shapes):
    """Read a message of 03, sections 2 and 7."""
    message = decode(frame, BYTES[cap], *shapes)
    for field, length in (
        ("id", "swap"),
        ("fingerprint", "fingerprint"),
        ("transfer", "transfer"),
    ):
        require(len(message.get(field, bytes(EXACT[length]))) == EXACT[length])
    require(len(message.get("root", bytes(EXACT["chunk_hash"]))) == EXACT["chunk_hash"])
    counter(message.get("outer_step", 0), message.get("size", 1) - 1, message.get("size", 1))
    require(0 <= message.get("fragment", 0) < COUNTS["fragments"])
    blocks = message.get("blocks", b"\1")
    require(1 <= len(blocks) <= COUNTS["blocks"] // 8 and blocks[-1] != 0)
    require(0 <= message.get("retry_seconds", 0) <= COUNTS["retry_seconds"])
    return message


def read_state_manifest(frame, swarm):
    envelope = decode(frame, BYTES["weights_state_response"], ENVELOPE)
    require(
        len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"]
    )
    require(envelope["codec"] == "raw", "compression")
    verify(envelope, REGISTRY["domains"]["state"].encode(), swarm)
    manifest = decode(envelope["payload"], BYTES["weights_state_response"], STATE_MANIFEST)
    require(len(manifest["fingerprint"]) == EXACT["fingerprint"])
    counter(manifest["outer_step"], manifest["created_at"])
    require(all(a["name"] < b["name"] for a, b in itertools.pairwise(manifest["tensors"])))
    require(all(len(tensor["phi"]) == 32 for tensor in manifest["tensors"]))
    return {"peer": peer_id(envelope["key"]), "manifest": manifest}


def edge_rank(epoch, one, other, swarm):
    low, high = sorted((one.encode(), other.encode()))
    content = (
        b"swarmnode/pairing/1"
        + struct.pack(">QH", epoch, len(low))
        + low
        + high
        + bytes.fromhex(swarm)
    )
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def weights_fingerprint(swarm, base, tokenizer, layout, fragments, adapter):
    hashes = [bytes.fromhex(value) for value in (swarm, base, tokenizer)]
    dtypes = sorted({dtype for _, _, dtype in layout})
    packed = (
        [*what, fragments, adapter]
        for what in (
            ("swarmnode/weights", 1, *hashes, dtypes),
            ("swarmnode/weights-state", 1, *hashes, sorted(layout)),
        )
    )
    return [hashlib.sha256(msgpack.packb(content)).hexdigest() for content in packed]


def weights_fragments(layout, fragments):
    """Return tensor names by fragment, and all blocks as bytes (03, section 1)."""
    block = {}
    for name, _, _ in layout:
        layer = re.search(r"(?:^|\.)([0-9]+)(?:\.|$)", name)
        block[name] = (
            min(2 + int(layer[1]), COUNTS["blocks"] - 1) if layer else 0 if "embed" in name else 1
        )
    fragment = {
        name: {0: 0, 1: fragments - 1}.get(number, (number - 2) % fragments)
        for name, number in block.items()
    }
    bits = bytearray(max(block.values()) // 8 + 1)
    for number in block.values():
        bits[number // 8] |= 1 << number % 8
    return [
        [sorted(name for name in block if fragment[name] == part) for part in range(fragments)],
        bits.hex(),
    ]


def weights_int4(elements, body):
    """Return the decoded differences, or the reason to refuse them (03, section 5)."""
    body, blocks = bytes.fromhex(body), -(-elements // 64)
    scales = [struct.unpack("<f", b"\0\0" + body[2 * i : 2 * i + 2])[0] for i in range(blocks)]
    if not all(math.isfinite(scale) for scale in scales):
        return "not_finite"
    values = [half for byte in body[2 * blocks :] for half in (byte & 15, byte >> 4)]
    if min(scales) < 0 or min(values) < 1 or any(value != 8 for value in values[elements:]):
        return "bounds"
    return [scales[i // 64] * (value - 8) for i, value in enumerate(values[:elements])]


READERS = {
    "weights": lambda frame, domain, swarm: read_weights(frame, "weights_message", WEIGHTS),
    "weights_state": lambda frame, domain, swarm: read_weights(
        frame, "weights_state_response", WEIGHTS_STATE
    ),
    "state_manifest": lambda frame, domain, swarm: read_state_manifest(frame, swarm),
}
DERIVATIONS = {
    "edge_rank": edge_rank,
    "weights_fingerprint": weights_fingerprint,
    "weights_fragments": weights_fragments,
    "weights_int4": weights_int4,
}
