"""04-stages, sections 10 and 11: messages on streams of state."""

import hashlib
import math
import struct

from check_frames import BYTES, COUNTS, counter, require, shapes
from check_stages import TEXT, read_parts

HEADERS = shapes(
    "state", "ask", "inventory", "want", "run", "have", "chunk", "announce", "stored", "lack"
)


def read_message(data, crew):
    """Read the message `data` in a crew with `hidden` and `tokens`."""
    header, body = read_parts(data, HEADERS, lambda header: body_bytes(header, crew))
    return {"header": header, "body": body}


def body_bytes(header, crew):
    """Check a header and return the length of its body."""
    counter(*[value for value in header.values() if type(value) is int])
    root = BYTES["record_hash"] if header["type"] == "have" or header.get("at") else 0
    if header["type"] in ("have", "want"):
        require(len(header["root"]) == root)
    if header["type"] == "have":
        require(math.isfinite(header["squared_norm"]), "not_finite")
        require(header["squared_norm"] >= 0)
    require(1 <= header.get("length", 1) <= BYTES["stage_chunk"])
    require(0 <= header.get("of", 0) < COUNTS["stages"])
    if header["type"] == "want":
        require(header["what"] == "checkpoint" or header["at"] == 0)
    if header["type"] != "run":
        return header.get("length", 0)
    require(1 <= header["rows"] <= crew["tokens"])
    require(1 <= header["about"] <= BYTES["stage_about_item"] * (crew["tokens"] + 16))
    if header["codec"] is None:
        return header["about"]
    return header["about"] + TEXT.activation_bytes(header["codec"], header["rows"], crew["hidden"])


def state_root(body):
    return hashlib.blake2b(bytes.fromhex(body), digest_size=32).hexdigest()


def copy_plain(base, now):
    """Return the part of a `copy` for one matrix before compression, in hex (section 11)."""

    def rounded(value):
        return struct.unpack("<f", struct.pack("<f", value))[0]

    def quantised(rows, scales):
        pairs = [(value, scale) for row, scale in zip(rows, scales, strict=True) for value in row]
        codes = [
            round(max(-127, min(127, value / scale))) if scale else 0 for value, scale in pairs
        ]
        return struct.pack(f"<{len(codes)}b{len(scales)}f", *codes, *scales)

    own = [[rounded(max(map(abs, row)) / 127) for row in rows] for rows in (base, now)]
    chosen = list(map(TEXT.row_scale, *own))
    return bytes(
        a ^ b for a, b in zip(quantised(base, own[0]), quantised(now, chosen), strict=True)
    ).hex()


READERS = {"state_message": read_message}
DERIVATIONS = {"state_bytes": TEXT.state_bytes, "state_root": state_root, "copy_plain": copy_plain}
