"""05-bulk: transfers in hashed chunks."""

from check_frames import BYTES, COUNTS, code, decode, require, shape

TEXT = code("05-bulk.md")


def read_bulk(frame, name):
    """Read a message of 05."""
    message = decode(frame, BYTES[name], shape(name))
    require(len(message.get("transfer", bytes(BYTES["transfer"]))) == BYTES["transfer"])
    require(len(message.get("root", bytes(BYTES["chunk_hash"]))) == BYTES["chunk_hash"])
    ok = message.get("status") == "ok"
    if name == "bulk_manifest":
        size, chunk = message["size"], message["chunk_bytes"]
        require(BYTES["bulk_min_chunk"] <= chunk <= BYTES["bulk_chunk"])
        chunks = (size + chunk - 1) // chunk
        require(
            1 <= chunks <= COUNTS["bulk_chunks"]
            and len(message["hashes"]) == BYTES["chunk_hash"] * chunks
        )
    elif name == "bulk_manifest_response":
        require(
            ok == bool(message["manifest"]) and len(message["manifest"]) <= BYTES["bulk_manifest"]
        )
    elif name == "bulk_request":
        require(len(message["wanted"]) <= COUNTS["bulk_chunks"] // 8 and any(message["wanted"]))
    elif name == "bulk_response":
        require(
            0 < message["size"] <= COUNTS["bulk_chunks"] * BYTES["bulk_chunk"]
            if ok
            else message["size"] == 0
        )
    return message


def bulk_root(size, chunk_bytes, hashes):
    return TEXT.root(size, chunk_bytes, bytes.fromhex(hashes)).hex()


NAMES = ("manifest", "manifest_request", "manifest_response", "request", "response")
READERS = {
    name: lambda frame, domain, swarm, name=name: read_bulk(frame, name)
    for name in map("bulk_{}".format, NAMES)
}
DERIVATIONS = {"bulk_root": bulk_root}
