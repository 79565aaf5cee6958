"""05-bulk: transfers in hashed chunks."""

from check_frames import BYTES, COUNTS, code, decode, require

TEXT = code("05-bulk.md")
STATUS = ("ok", "unknown", "busy")
BULK_MANIFEST = {"transfer": bytes, "size": int, "chunk_bytes": int, "hashes": bytes}
BULK_MANIFEST_REQUEST = {"transfer": bytes}
BULK_MANIFEST_RESPONSE = {"status": STATUS, "manifest": bytes}
BULK_REQUEST = {"transfer": bytes, "root": bytes, "wanted": bytes}
BULK_RESPONSE = {"status": STATUS, "size": int}


def read_bulk(frame, name, shape):
    """Read a message of 05."""
    message = decode(frame, BYTES[name], shape)
    require(len(message.get("transfer", bytes(BYTES["transfer"]))) == BYTES["transfer"])
    require(len(message.get("root", bytes(BYTES["chunk_hash"]))) == BYTES["chunk_hash"])
    ok = message.get("status") == "ok"
    if shape is BULK_MANIFEST:
        size, chunk = message["size"], message["chunk_bytes"]
        require(BYTES["bulk_min_chunk"] <= chunk <= BYTES["bulk_chunk"])
        chunks = (size + chunk - 1) // chunk
        require(
            1 <= chunks <= COUNTS["bulk_chunks"]
            and len(message["hashes"]) == BYTES["chunk_hash"] * chunks
        )
    elif shape is BULK_MANIFEST_RESPONSE:
        require(
            ok == bool(message["manifest"]) and len(message["manifest"]) <= BYTES["bulk_manifest"]
        )
    elif shape is BULK_REQUEST:
        require(len(message["wanted"]) <= COUNTS["bulk_chunks"] // 8 and any(message["wanted"]))
    elif shape is BULK_RESPONSE:
        require(
            0 < message["size"] <= COUNTS["bulk_chunks"] * BYTES["bulk_chunk"]
            if ok
            else message["size"] == 0
        )
    return message


def bulk_root(size, chunk_bytes, hashes):
    return TEXT.root(size, chunk_bytes, bytes.fromhex(hashes)).hex()


READERS = {
    "bulk_manifest": lambda frame, domain, swarm: read_bulk(frame, "bulk_manifest", BULK_MANIFEST),
    "bulk_manifest_request": lambda frame, domain, swarm: read_bulk(
        frame, "bulk_manifest_request", BULK_MANIFEST_REQUEST
    ),
    "bulk_manifest_response": lambda frame, domain, swarm: read_bulk(
        frame, "bulk_manifest_response", BULK_MANIFEST_RESPONSE
    ),
    "bulk_request": lambda frame, domain, swarm: read_bulk(frame, "bulk_request", BULK_REQUEST),
    "bulk_response": lambda frame, domain, swarm: read_bulk(frame, "bulk_response", BULK_RESPONSE),
}
DERIVATIONS = {"bulk_root": bulk_root}
