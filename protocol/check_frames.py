"""00-conventions: decoding of messages of a known shape, signatures, and limits used by every
document. `code` runs the Python of a document, `shape` reads a schema.

A shape is str, bytes, int, float, a tuple of allowed strings, [element], a dict of field → shape in
wire order, a `Maybe` or a `Row`.
"""

import functools
import hashlib
import itertools
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgpack
import zstandard
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HERE = Path(__file__).parent
REGISTRY = tomllib.loads((HERE / "registry.toml").read_text())
BYTES, COUNTS, FLOATS = REGISTRY["bytes"], REGISTRY["counts"], REGISTRY["floats"]


class Maybe:
    """The type `wanted`, or nil."""

    def __init__(self, wanted):
        self.wanted = wanted


class Row:
    """A message encoded as an array: its fields in order, without names."""

    def __init__(self, fields):
        self.fields = fields


class Refused(Exception):
    """Rejection of a message; `args[0]` is the reason."""


def code(document):
    """Return the names that the Python of a document defines."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE / document).read_text(), re.DOTALL):
        exec(block, names)
    return SimpleNamespace(**names)


@functools.cache
def shape(name):
    """Return the shape of a message from its schema."""
    schema = json.loads((HERE / "schema" / f"{name}.json").read_text())
    return shape_of(schema, schema["$defs"])


def shapes(prefix, *tags):
    return [shape(f"{prefix}_{tag}") for tag in tags]


def shape_of(schema, definitions):
    if "$ref" in schema:
        return shape_of(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "anyOf" in schema:
        wanted, nil = schema["anyOf"]
        assert nil == {"type": "null"}
        return Maybe(shape_of(wanted, definitions))
    if "enum" in schema:
        return tuple(schema["enum"])
    if "prefixItems" in schema:
        return Row([shape_of(item, definitions) for item in schema["prefixItems"]])
    if "contentEncoding" in schema:
        return bytes
    match schema["type"]:
        case "object":
            fields = schema["properties"]
            return {field: shape_of(value, definitions) for field, value in fields.items()}
        case "array":
            return [shape_of(schema["items"], definitions)]
    return {"string": str, "integer": int, "number": float}[schema["type"]]


ENVELOPE = shape("envelope")


def require(condition, reason="bounds"):
    if not condition:
        raise Refused(reason)


def kind(lead):
    """Return the kind of a value, from its first byte."""
    require(lead != 0xC1, "malformed")
    if lead <= 0x7F or lead >= 0xE0 or 0xCC <= lead <= 0xD3:
        return int
    if 0xA0 <= lead <= 0xBF or 0xD9 <= lead <= 0xDB:
        return str
    if 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF):
        return dict
    if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
        return list
    return {
        0xC0: type(None),
        0xC2: bool,
        0xC3: bool,
        0xC4: bytes,
        0xC5: bytes,
        0xC6: bytes,
        0xCA: float,
        0xCB: float,
    }.get(lead)


def read(stream, data, wanted):
    """Read a value of type `wanted`. Its kind is checked first, so that no other value is built."""
    require(stream.tell() < len(data), "malformed")
    found = kind(data[stream.tell()])
    if isinstance(wanted, Maybe):
        if found is type(None):
            return stream.unpack()
        return read(stream, data, wanted.wanted)
    if isinstance(wanted, Row):
        require(found is list and stream.read_array_header() == len(wanted.fields), "schema")
        return [read(stream, data, field) for field in wanted.fields]
    if isinstance(wanted, dict):
        require(found is dict, "schema")
        return read_fields(stream, data, wanted, stream.read_map_header(), {})
    if isinstance(wanted, list):
        require(found is list, "schema")
        return [read(stream, data, wanted[0]) for _ in range(stream.read_array_header())]
    if wanted is float:
        require(found in (float, int), "schema")
        return float(stream.unpack())  # an integer here fails the byte comparison below
    require(found is (str if isinstance(wanted, tuple) else wanted), "schema")
    value = stream.unpack()
    require(not isinstance(wanted, tuple) or value in wanted, "schema")
    return value


def read_fields(stream, data, fields, count, message):
    for _ in range(count):
        field = read(stream, data, str)
        require(field in fields, "schema")
        message[field] = read(stream, data, fields[field])
    require(message.keys() == fields.keys(), "schema")
    require(list(message) == list(fields), "malformed")
    return message


def read_tagged(stream, data, shapes):
    require(data, "malformed")
    require(kind(data[0]) is dict, "schema")
    count = stream.read_map_header()
    require(count, "schema")
    require(read(stream, data, str) == "type", "schema")
    tag = read(stream, data, tuple(shapes))
    return read_fields(stream, data, shapes[tag], count - 1, {"type": tag})


def decode(data, limit, *shapes):
    """Return the message in `data`. With several shapes, its first field `type` selects one."""
    require(len(data) <= limit, "oversize")
    stream = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        max_map_len=2**32 - 1,
        max_array_len=2**32 - 1,
        max_buffer_size=limit + 1,
    )
    stream.feed(data)
    try:
        if "type" in shapes[0]:
            message = read_tagged(stream, data, {shape["type"][0]: shape for shape in shapes})
        else:
            message = read(stream, data, shapes[0])
    except (msgpack.OutOfData, ValueError):  # truncated, bad UTF-8
        raise Refused("malformed") from None
    # trailing bytes, duplicate keys, longer headers than needed
    require(msgpack.packb(message) == data, "malformed")
    return message


def decode_as(data, name):
    """Return the message `name`, with the shape of its schema and the limit of its name."""
    return decode(data, BYTES[name], shape(name))


def decompress(data, limit):
    try:
        declared = zstandard.frame_content_size(data)
        require(declared >= 0, "compression")
        require(declared <= limit, "oversize")
        require(
            zstandard.get_frame_parameters(data).window_size <= BYTES["zstd_window"], "compression"
        )
        require(
            len(zstandard.ZstdDecompressor().stream_reader(data).read(declared + 1)) == declared,
            "compression",
        )
        frame = zstandard.ZstdDecompressor().decompressobj()
        content = frame.decompress(data)
    except zstandard.ZstdError:
        raise Refused("compression") from None
    require(frame.eof and not frame.unused_data, "compression")
    return content


def open_envelope(frame, limit, domain, swarm, codecs=("raw",)):
    """Return the envelope in `frame`, after a check of its signature."""
    envelope = decode(frame, limit, ENVELOPE)
    require(len(envelope["key"]) == BYTES["key"])
    require(len(envelope["signature"]) == BYTES["signature"])
    require(envelope["codec"] in codecs, "compression")
    verify(envelope, domain, swarm)
    return envelope


def open_signed(frame, limit, domain, swarm, wanted):
    """Return the key and the message of an envelope. domain: its name in the registry."""
    envelope = open_envelope(frame, limit, REGISTRY["domains"][domain].encode(), swarm)
    return envelope["key"], decode(envelope["payload"], limit, wanted)


def verify(envelope, domain, swarm):
    codec = {"raw": b"\0", "zstd": b"\1"}[envelope["codec"]]
    signed = bytes([len(domain)]) + domain + swarm + codec + envelope["payload"]
    verify_signature(envelope["key"], envelope["signature"], signed)


def verify_signature(key, signature, signed):
    require(not is_small_order(key), "signature")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except InvalidSignature:
        raise Refused("signature") from None


def is_small_order(key):
    """Return True if 8 times the point (RFC 8032, section 5.1) is the identity (0, 1). Doubling
    needs x² only, which follows from y: y' = (y² + x²) / (1 - d·x²·y²)."""
    prime = 2**255 - 19
    d = -121665 * pow(121666, -1, prime) % prime
    y = (int.from_bytes(key, "little") & (2**255 - 1)) % prime
    for _ in range(3):
        x2 = (y * y - 1) * pow(d * y * y + 1, -1, prime) % prime
        y = (y * y + x2) * pow(1 - d * x2 * y * y, -1, prime) % prime
    return y == 1


def counter(*values):
    require(all(0 <= value < 2 ** COUNTS["integer_bits"] for value in values))


def name(value, cap):
    require(1 <= len(value) <= cap and all("!" <= character <= "~" for character in value))


def rising(values, low, cap):
    require(low <= len(values) <= cap and all(a < b for a, b in itertools.pairwise(values)))


def text(value, low, cap):
    require(low <= len(value.encode()) <= cap and not re.search("[\\x00-\\x1f\\x7f-\\x9f]", value))


def digest(data):
    return hashlib.blake2b(data, digest_size=32).digest()
