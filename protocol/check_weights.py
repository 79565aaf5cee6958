"""03-weights: messages of a swap and of a state, payloads, blocks and fragments."""

from check_frames import BYTES, COUNTS, code, counter, decode, require, shapes

TEXT = code("03-weights.md")

WEIGHTS = shapes("weights", "here", "swap", "accepted", "busy", "refused", "payload", "ready")
WEIGHTS_STATE = shapes("weights", "state_request", "state_response")


def read_weights(frame, cap, shapes):
    """Read a message of 03, sections 2 and 7."""
    message = decode(frame, BYTES[cap], *shapes)
    for field, length in (("id", "swap"), ("fingerprint", "fingerprint"), ("transfer", "transfer")):
        require(len(message.get(field, bytes(BYTES[length]))) == BYTES[length])
    require(len(message.get("root", bytes(BYTES["chunk_hash"]))) == BYTES["chunk_hash"])
    counter(message.get("outer_step", 0), message.get("size", 1) - 1, message.get("size", 1))
    require(0 <= message.get("fragment", 0) < COUNTS["fragments"])
    blocks = message.get("blocks", b"\1")
    require(1 <= len(blocks) <= COUNTS["blocks"] // 8 and blocks[-1] != 0)
    return message


def weights_fingerprint(layout, fragments, adapter, **hashes):
    hashes = {name: bytes.fromhex(value) for name, value in hashes.items()}
    given = {**hashes, "layout": sorted(layout), "p": fragments, "adapter": adapter}
    return TEXT.fingerprint(**given).hex()


def weights_fragments(layout, fragments):
    """Return tensor names by fragment, and all blocks as bytes."""
    blocks = {name: TEXT.block_of(name) for name, _, _ in sorted(layout)}
    parts = [
        [name for name, block in blocks.items() if TEXT.fragment_of(block, fragments) == part]
        for part in range(fragments)
    ]
    return [parts, TEXT.pack_blocks({*blocks.values()}).hex()]


def weights_int8(elements, body):
    """Return the decoded differences, or the reason to refuse them."""
    try:
        return TEXT.decode_int8(bytes.fromhex(body), elements)
    except ValueError as refused:
        return refused.args[0]


READERS = {
    "weights": lambda frame, domain, swarm: read_weights(frame, "weights_message", WEIGHTS),
    "weights_state": lambda frame, domain, swarm: read_weights(
        frame, "weights_message", WEIGHTS_STATE
    ),
}
DERIVATIONS = {
    "weights_fingerprint": weights_fingerprint,
    "weights_fragments": weights_fragments,
    "weights_int8": weights_int8,
}
