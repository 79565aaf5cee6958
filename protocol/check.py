"""A second decoder, written from the documents in this folder, that judges every vector: `python protocol/check.py`.

It shares no line with swarmnode and needs only msgpack, cryptography and, for compressed vectors, zstandard. Exit code 0 when every
vector is judged as recorded, else 1. Where 00-conventions.md and this file disagree, the document is right.
"""

import hashlib
import itertools
import json
import math
import re
import struct
import sys
import tomllib
from pathlib import Path

import msgpack
import zstandard
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HERE = Path(__file__).parent
REGISTRY = tomllib.loads((HERE / "registry.toml").read_text())
BYTES, EXACT, COUNTS, FLOATS = REGISTRY["bytes"], REGISTRY["exact_bytes"], REGISTRY["counts"], REGISTRY["floats"]

# A message is a dict of field → type in wire order; a type is str, bytes, int, float, a tuple of allowed strings, [element] or a message.
TASK = {"id": str, "version": str, "seed": int, "index": int, "difficulty": int}
SAMPLING = {"temperature": float, "top_p": float, "max_tokens": int}
COMPLETION = {"text": str, "tokens": int, "logprob": float, "finish": ("eos", "length"), "token_ids": bytes, "logprobs": bytes}
GROUP = {
    "type": ("rollout",), "task": TASK, "model": bytes, "tokenizer": bytes, "policy_version": int, "created_at": int, "sequence": int,
    "sampling": SAMPLING, "completions": [COMPLETION],
}  # fmt: skip
ANNOUNCE = {"type": ("announce",), "content": bytes, "size": int, "created_at": int, "sequence": int}
ENVELOPE = {"key": bytes, "payload": bytes, "signature": bytes, "codec": ("raw", "zstd")}
FETCH_REQUEST = {"content": bytes}
FETCH_RESPONSE = {"status": ("ok", "unknown", "busy"), "body": bytes}
PEERS_REQUEST = {"swarm": bytes, "addresses": [str]}
PEERS_RESPONSE = {"swarm": bytes, "peers": [{"peer": str, "addresses": [str]}]}
RULES = {
    "min_completions": int, "max_completions": int, "max_tokens": int, "temperature": float, "top_p": float, "groups_per_second": float,
}  # fmt: skip
MANIFEST = {
    "name": str, "founder": bytes, "created_at": int, "predecessor": bytes, "minimum_version": str, "protocols": [str],
    "models": [{"name": str, "revision": str, "fingerprint": bytes, "tokenizer": bytes}],
    "tasks": [{"id": str, "version": str, "settings": str}],
    "rollouts": RULES, "settings": [{"key": str, "value": str}], "bootstrap": [str], "access": {"members": [str], "secret": bytes},
}  # fmt: skip
MANIFEST_REQUEST = {"swarm": bytes}
MANIFEST_RESPONSE = {"manifest": bytes, "successor": bytes}
SESSION = {"session": bytes, "started_at": int, "issued_at": int}
SESSION_RESPONSE = {"sessions": [bytes]}
SUMMARY = {
    "name": str, "version": str, "created_at": int, "uptime": int, "step": int, "policy_version": int, "reward": float, "published": int,
    "peers": int,
}  # fmt: skip
SUMMARY_REQUEST = {"summary": bytes}
SUMMARY_RESPONSE = {"summaries": [bytes]}
STATUS = ("ok", "unknown", "busy")
BULK_MANIFEST = {"transfer": bytes, "size": int, "chunk_bytes": int, "hashes": bytes}
BULK_MANIFEST_REQUEST = {"transfer": bytes}
BULK_MANIFEST_RESPONSE = {"status": STATUS, "manifest": bytes}
BULK_REQUEST = {"transfer": bytes, "root": bytes, "wanted": bytes}
BULK_RESPONSE = {"status": STATUS, "size": int}
BULK_SOCKET_REQUEST = {"transfer": bytes, "root": bytes}
BULK_SOCKET_RESPONSE = {"status": STATUS, "port": int, "token": bytes}
WEIGHTS = (
    {"type": ("here",), "fingerprint": bytes, "outer_step": int},
    {"type": ("propose",), "nonce": bytes, "fingerprint": bytes, "fragment": int, "outer_step": int},
    {"type": ("accept",), "nonce": bytes, "session": bytes, "fragment": int, "outer_step": int},
    {"type": ("busy",), "nonce": bytes, "reason": ("busy", "other_policy"), "retry_seconds": int},
    {"type": ("release",), "session": bytes},
    {"type": ("ready",), "session": bytes, "transfer": bytes, "root": bytes, "size": int, "outer_step": int},
    {"type": ("latest",), "fingerprint": bytes, "fragment": int},
)
WEIGHTS_STATE = (
    {"type": ("state_request",), "fingerprint": bytes},
    {"type": ("state_response",), "manifest": bytes, "transfer": bytes, "root": bytes, "size": int},
)
STATE_MANIFEST = {
    "type": ("state",), "fingerprint": bytes, "outer_step": int, "created_at": int,
    "tensors": [{"name": str, "phi": bytes, "delta": bytes}],
}  # fmt: skip


UNWANTED = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ufdd0-\\ufdef\\ufffe\\uffff]")
"""Control characters, bidirectional overrides, non-characters."""


class Refused(Exception):
    """`args[0]` is the reason."""


def require(condition, reason="bounds"):
    if not condition:
        raise Refused(reason)


# ---------------------------------------------------------------------------------------------------------------------
# 00-conventions: bytes → message


def kind(lead):
    """What a value is, by its first byte."""
    require(lead != 0xC1, "malformed")
    if lead <= 0x7F or lead >= 0xE0 or 0xCC <= lead <= 0xD3:
        return int
    if 0xA0 <= lead <= 0xBF or 0xD9 <= lead <= 0xDB:
        return str
    if 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF):
        return dict
    if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
        return list
    return {0xC4: bytes, 0xC5: bytes, 0xC6: bytes, 0xCA: float, 0xCB: float}.get(lead)


def read(stream, data, wanted):
    """One value of type `wanted`, looked at before it is read, so that nothing is built that was not asked for."""
    require(stream.tell() < len(data), "malformed")
    found = kind(data[stream.tell()])
    if isinstance(wanted, dict):
        require(found is dict, "schema")
        return read_fields(stream, data, wanted, stream.read_map_header(), {})
    if isinstance(wanted, list):
        require(found is list, "schema")
        return [read(stream, data, wanted[0]) for _ in range(stream.read_array_header())]
    if wanted is float:
        require(found in (float, int), "schema")
        return float(stream.unpack())  # an integer here is found out by its bytes, below
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
    """The message in `data`: of the one shape, or of the one among several that its first field names."""
    require(len(data) <= limit, "oversize")
    stream = msgpack.Unpacker(raw=False, strict_map_key=True, max_map_len=2**32 - 1, max_array_len=2**32 - 1, max_buffer_size=limit + 1)
    stream.feed(data)
    try:
        if len(shapes) == 1:
            message = read(stream, data, shapes[0])
        else:
            message = read_tagged(stream, data, {shape["type"][0]: shape for shape in shapes})
    except (msgpack.OutOfData, ValueError):  # truncated, bad UTF-8
        raise Refused("malformed") from None
    require(msgpack.packb(message) == data, "malformed")  # trailing bytes, duplicate keys, longer headers than needed
    return message


def decompress(data, limit):
    try:
        declared = zstandard.frame_content_size(data)
        require(declared >= 0, "compression")
        require(declared <= limit, "oversize")
        require(zstandard.get_frame_parameters(data).window_size <= BYTES["zstd_window"], "compression")
        require(len(zstandard.ZstdDecompressor().stream_reader(data).read(declared + 1)) == declared, "compression")
        frame = zstandard.ZstdDecompressor().decompressobj()
        content = frame.decompress(data)
    except zstandard.ZstdError:
        raise Refused("compression") from None
    require(frame.eof and not frame.unused_data, "compression")
    return content


def verify(envelope, domain, swarm):
    codec = {"raw": b"\0", "zstd": b"\1"}[envelope["codec"]]
    signed = bytes([len(domain)]) + domain + swarm + codec + envelope["payload"]
    try:
        Ed25519PublicKey.from_public_bytes(envelope["key"]).verify(envelope["signature"], signed)
    except InvalidSignature:
        raise Refused("signature") from None


# ---------------------------------------------------------------------------------------------------------------------
# 01-identity-and-join, 02-rollouts: bounds and derivations


def counter(*values):
    require(all(0 <= value < 2 ** COUNTS["integer_bits"] for value in values))


def name(value, cap):
    require(1 <= len(value) <= cap and all("!" <= character <= "~" for character in value))


def rising(values, low, cap):
    require(low <= len(values) <= cap and all(a < b for a, b in itertools.pairwise(values)))


def text(value, low, cap):
    require(low <= len(value.encode()) <= cap and not re.search("[\\x00-\\x1f\\x7f-\\x9f]", value))


def check_sampling(temperature, top_p, max_tokens):
    require(math.isfinite(temperature) and math.isfinite(top_p), "not_finite")
    require(0 < temperature <= FLOATS["temperature"] and 0 < top_p <= 1)
    require(1 <= max_tokens <= COUNTS["tokens"])


def check_group(group):
    task, sampling, completions = group["task"], group["sampling"], group["completions"]
    name(task["id"], BYTES["task_id"])
    name(task["version"], BYTES["task_version"])
    counter(task["seed"], group["policy_version"], group["created_at"], group["sequence"])
    require(task["seed"] % 2 ** COUNTS["index_bits"] == 0)
    require(0 <= task["index"] < 2 ** COUNTS["index_bits"])
    require(0 <= task["difficulty"] <= COUNTS["difficulty"])
    require(len(group["model"]) == len(group["tokenizer"]) == EXACT["fingerprint"])
    check_sampling(**sampling)
    require(COUNTS["min_completions"] <= len(completions) <= COUNTS["max_completions"])
    for completion in completions:
        tokens, packed = completion["tokens"], completion["logprobs"]
        require(len(completion["text"].encode()) <= BYTES["text"])
        require(1 <= tokens <= sampling["max_tokens"])
        require(math.isfinite(completion["logprob"]), "not_finite")
        require(FLOATS["token_logprob"] * tokens <= completion["logprob"] <= 0)
        require(len(completion["token_ids"]) in (0, 4 * tokens) and len(packed) in (0, 4 * tokens))
        logprobs = struct.unpack(f"<{len(packed) // 4}f", packed)
        require(all(map(math.isfinite, logprobs)), "not_finite")
        require(all(FLOATS["token_logprob"] <= logprob <= FLOATS["logprob_slack"] for logprob in logprobs))


def check_announce(announce):
    require(len(announce["content"]) == EXACT["content_id"] and 1 <= announce["size"] <= BYTES["group"])
    counter(announce["created_at"], announce["sequence"])


def open_envelope(frame, limit, domain, swarm):
    envelope = decode(frame, limit, ENVELOPE)
    require(len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"])
    verify(envelope, domain, swarm)
    payload = envelope["payload"] if envelope["codec"] == "raw" else decompress(envelope["payload"], BYTES["group"])
    message = decode(payload, BYTES["group"], GROUP, ANNOUNCE)
    check_group(message) if message["type"] == "rollout" else check_announce(message)
    return {"peer": peer_id(envelope["key"]), "content": digest(frame), "codec": envelope["codec"], "message": message}


def read_fetch_request(frame):
    request = decode(frame, BYTES["fetch_request"], FETCH_REQUEST)
    require(len(request["content"]) == EXACT["content_id"])
    return request


def read_fetch_response(frame):
    response = decode(frame, BYTES["fetch_response"], FETCH_RESPONSE)
    require((response["status"] == "ok") == bool(response["body"]) and len(response["body"]) <= BYTES["group"])
    return response


def read_peers(frame, cap, shape):
    message = decode(frame, BYTES[cap], shape)
    require(len(message["swarm"]) == EXACT["swarm_id"])
    peers = message.get("peers", [])
    require(len(peers) <= COUNTS["peers"])
    for addresses in [message.get("addresses", []), *[peer["addresses"] for peer in peers]]:
        require(len(addresses) <= COUNTS["peer_addresses"])
        [name(address, BYTES["address"]) for address in addresses]
    [name(peer["peer"], BYTES["peer_id"]) for peer in peers]
    return message


def read_manifest(frame):
    """01, section 6."""
    envelope = decode(frame, BYTES["manifest"], ENVELOPE)
    require(len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"])
    require(envelope["codec"] == "raw", "compression")
    swarm = digest(REGISTRY["domains"]["swarm_manifest"].encode() + envelope["payload"])
    verify(envelope, REGISTRY["domains"]["manifest"].encode(), swarm)
    manifest = decode(envelope["payload"], BYTES["manifest"], MANIFEST)
    check_manifest(manifest)
    require(manifest["founder"] == envelope["key"], "signature")
    return {"swarm": swarm, "manifest": manifest}


def check_manifest(manifest):
    rules, access = manifest["rollouts"], manifest["access"]
    text(manifest["name"], 1, BYTES["manifest_name"])
    require(len(manifest["founder"]) == EXACT["key"] and len(manifest["predecessor"]) in (0, EXACT["swarm_id"]))
    counter(manifest["created_at"])
    name(manifest["minimum_version"], BYTES["minimum_version"])
    rising(manifest["protocols"], 1, COUNTS["protocols"])
    [name(protocol, BYTES["protocol"]) for protocol in manifest["protocols"]]
    require(len(manifest["models"]) <= COUNTS["models"])
    for model in manifest["models"]:
        name(model["name"], BYTES["model_name"])
        require(not model["revision"] or name(model["revision"], BYTES["revision"]) is None)
        require(len(model["fingerprint"]) == len(model["tokenizer"]) == EXACT["fingerprint"])
    rising([task["id"] for task in manifest["tasks"]], 1, COUNTS["tasks"])
    for task in manifest["tasks"]:
        name(task["id"], BYTES["task_id"])
        name(task["version"], BYTES["task_version"])
        text(task["settings"], 0, BYTES["setting_value"])
    require(COUNTS["min_completions"] <= rules["min_completions"] <= rules["max_completions"] <= COUNTS["max_completions"])
    check_sampling(rules["temperature"], rules["top_p"], rules["max_tokens"])
    require(math.isfinite(rules["groups_per_second"]), "not_finite")
    require(0 < rules["groups_per_second"] <= FLOATS["groups_per_second"])
    rising([setting["key"] for setting in manifest["settings"]], 0, COUNTS["settings"])
    for setting in manifest["settings"]:
        name(setting["key"], BYTES["setting_key"])
        text(setting["value"], 1, BYTES["setting_value"])
    require(len(manifest["bootstrap"]) <= COUNTS["bootstrap"])
    [name(address, BYTES["address"]) for address in manifest["bootstrap"]]
    rising(access["members"], 0, COUNTS["members"])
    [name(member, BYTES["peer_id"]) for member in access["members"]]
    require(len(access["secret"]) in (0, EXACT["secret"]))


def read_manifest_request(frame):
    request = decode(frame, BYTES["manifest_request"], MANIFEST_REQUEST)
    require(len(request["swarm"]) == EXACT["swarm_id"])
    return request


def read_manifest_response(frame):
    response = decode(frame, BYTES["manifest_response"], MANIFEST_RESPONSE)
    require(len(response["manifest"]) <= BYTES["manifest"])
    require(len(response["successor"]) <= (BYTES["manifest"] if response["manifest"] else 0))
    return response


def read_session(frame, swarm):
    envelope = decode(frame, BYTES["session_request"], ENVELOPE)
    require(len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"])
    require(envelope["codec"] == "raw", "compression")
    verify(envelope, REGISTRY["domains"]["session"].encode(), swarm)
    session = decode(envelope["payload"], BYTES["session_request"], SESSION)
    require(len(session["session"]) == EXACT["session"])
    counter(session["started_at"], session["issued_at"])
    return {"peer": peer_id(envelope["key"]), "session": session}


def read_session_response(frame):
    response = decode(frame, BYTES["session_response"], SESSION_RESPONSE)
    require(len(response["sessions"]) <= COUNTS["sessions"])
    require(all(1 <= len(session) <= BYTES["session_request"] for session in response["sessions"]))
    return response


def read_summary(frame, swarm):
    """01, section 10."""
    envelope = decode(frame, BYTES["summary"], ENVELOPE)
    require(len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"])
    require(envelope["codec"] == "raw", "compression")
    verify(envelope, REGISTRY["domains"]["summary"].encode(), swarm)
    summary = decode(envelope["payload"], BYTES["summary"], SUMMARY)
    text(summary["name"], 0, BYTES["summary_name"])
    name(summary["version"], BYTES["minimum_version"])
    counter(*[value for value in summary.values() if isinstance(value, int)])
    require(math.isfinite(summary["reward"]), "not_finite")
    require(summary["reward"] == -1 or 0 <= summary["reward"] <= 1)
    return {"peer": peer_id(envelope["key"]), "summary": summary}


def read_summary_request(frame):
    request = decode(frame, BYTES["summary_request"], SUMMARY_REQUEST)
    require(len(request["summary"]) <= BYTES["summary"])
    return request


def read_summary_response(frame):
    response = decode(frame, BYTES["summary_response"], SUMMARY_RESPONSE)
    require(len(response["summaries"]) <= COUNTS["summaries"])
    require(all(1 <= len(summary) <= BYTES["summary"] for summary in response["summaries"]))
    return response


def read_bulk(frame, name, shape):
    """05, sections 2 to 5."""
    message = decode(frame, BYTES[name], shape)
    require(len(message.get("transfer", bytes(EXACT["transfer"]))) == EXACT["transfer"])
    require(len(message.get("root", bytes(EXACT["chunk_hash"]))) == EXACT["chunk_hash"])
    ok = message.get("status") == "ok"
    if shape is BULK_MANIFEST:
        size, chunk = message["size"], message["chunk_bytes"]
        require(BYTES["bulk_min_chunk"] <= chunk <= BYTES["bulk_chunk"])
        chunks = (size + chunk - 1) // chunk
        require(1 <= chunks <= COUNTS["bulk_chunks"] and len(message["hashes"]) == EXACT["chunk_hash"] * chunks)
    elif shape is BULK_MANIFEST_RESPONSE:
        require(ok == bool(message["manifest"]) and len(message["manifest"]) <= BYTES["bulk_manifest"])
    elif shape is BULK_REQUEST:
        require(len(message["wanted"]) <= COUNTS["bulk_chunks"] // 8 and any(message["wanted"]))
    elif shape is BULK_RESPONSE:
        require(0 < message["size"] <= COUNTS["bulk_chunks"] * BYTES["bulk_chunk"] if ok else message["size"] == 0)
    elif shape is BULK_SOCKET_RESPONSE:
        require(0 < message["port"] < 2**16 if ok else message["port"] == 0)
        require(len(message["token"]) == (EXACT["token"] if ok else 0))
    return message


def bulk_root(size, chunk_bytes, hashes):
    return digest(REGISTRY["domains"]["bulk"].encode() + struct.pack(">QI", size, chunk_bytes) + bytes.fromhex(hashes)).hex()


def read_weights(frame, cap, shapes):
    """03, sections 2 and 7."""
    message = decode(frame, BYTES[cap], *shapes)
    for field, length in (("nonce", "nonce"), ("session", "nonce"), ("fingerprint", "fingerprint"), ("transfer", "transfer")):
        require(len(message.get(field, bytes(EXACT[length]))) == EXACT[length])
    require(len(message.get("root", bytes(EXACT["chunk_hash"]))) == EXACT["chunk_hash"])
    counter(message.get("outer_step", 0), message.get("size", 1) - 1, message.get("size", 1))
    require(0 <= message.get("fragment", 0) < COUNTS["fragments"])
    require(0 <= message.get("retry_seconds", 0) <= COUNTS["retry_seconds"])
    return message


def read_state_manifest(frame, swarm):
    envelope = decode(frame, BYTES["weights_state_response"], ENVELOPE)
    require(len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"])
    require(envelope["codec"] == "raw", "compression")
    verify(envelope, REGISTRY["domains"]["state"].encode(), swarm)
    manifest = decode(envelope["payload"], BYTES["weights_state_response"], STATE_MANIFEST)
    require(len(manifest["fingerprint"]) == EXACT["fingerprint"])
    counter(manifest["outer_step"], manifest["created_at"])
    require(all(a["name"] < b["name"] for a, b in itertools.pairwise(manifest["tensors"])))
    require(all(len(tensor["phi"]) == len(tensor["delta"]) == 32 for tensor in manifest["tensors"]))
    return {"peer": peer_id(envelope["key"]), "manifest": manifest}


def edge_rank(epoch, one, other, swarm):
    low, high = sorted((one.encode(), other.encode()))
    content = b"swarmnode/pairing/1" + struct.pack(">QH", epoch, len(low)) + low + high + bytes.fromhex(swarm)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def weights_fingerprint(swarm, base, tokenizer, layout, codec, fragments, adapter):
    hashes = [bytes.fromhex(value) for value in (swarm, base, tokenizer)]
    return hashlib.sha256(msgpack.packb(["swarmnode/weights", 1, *hashes, sorted(layout), codec, fragments, adapter])).hexdigest()


def weights_fragments(layout, fragments):
    """03, section 1."""
    layer = {name: re.search(r"(?:^|\.)([0-9]+)(?:\.|$)", name) for name, _, _ in layout}
    layers = sorted({int(found[1]) for found in layer.values() if found})
    size = {name: math.prod(shape) for name, shape, _ in layout}
    count = max(1, min(fragments, len(layers)))
    parts = [[name for name in layer if layer[name] and layers.index(int(layer[name][1])) % count == part] for part in range(count)]
    for name in sorted((name for name in layer if not layer[name]), key=lambda name: (-size[name], name)):
        min(parts, key=lambda part: sum(size[other] for other in part)).append(name)
    return [sorted(part) for part in parts]


def digest(data):
    return hashlib.blake2b(data, digest_size=32).digest()


def peer_id(key):
    data, alphabet = bytes.fromhex("002408011220") + key, "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, text = number // 58, alphabet[number % 58] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def swarm_id(name, tasks, protocols):
    description = [name, sorted([task, version] for task, version in tasks.items()), sorted(protocols)]
    return digest(REGISTRY["domains"]["swarm"].encode() + msgpack.packb(description))


def seed_block(domain, *data):
    block = int.from_bytes(digest(b"".join([REGISTRY["domains"][domain].encode(), *data])), "big") >> 256 - COUNTS["block_bits"]
    return block << COUNTS["index_bits"]


def task_seed(swarm, peer, sequence):
    number, index = divmod(sequence, 2 ** COUNTS["index_bits"])
    return {"seed": seed_block("seed", swarm, peer.encode(), struct.pack(">Q", number)), "index": index}


def evaluation_seed(task, block):
    return 2**62 + seed_block("evaluation", task.encode(), b"\0", struct.pack(">Q", block))


def choose_task(tasks, seed, index):
    drawn = hashlib.blake2b(REGISTRY["domains"]["task"].encode() + struct.pack(">QI", seed, index), digest_size=8).digest()
    return sorted(set(tasks))[int.from_bytes(drawn, "big") % len(set(tasks))]


def admit(frames, given, domain, swarm):
    """02, section 4.1 to 4.3, for the last of `frames`, which come one after the other: (verdict, reason)."""
    contents, sequences, outcome = set(), set(), None
    for frame in frames:
        outcome = admit_one(frame, given, domain, swarm, contents, sequences)
        contents.add(digest(frame))
    return outcome


def admit_one(frame, given, domain, swarm, contents, sequences):
    if digest(frame) in contents:
        return "duplicate"
    try:
        if peer_id(decode(frame, BYTES["gossip_frame"], ENVELOPE)["key"]) == given["own"]:
            return "own"
        opened = open_envelope(frame, BYTES["gossip_frame"], domain, swarm)
    except Refused as refused:
        return refused.args[0]
    peer, message = opened["peer"], opened["message"]
    age, sequence = given["now"] - message["created_at"] / 1000, message["sequence"]
    if age > REGISTRY["seconds"]["group_age"]:
        return "stale"
    if age < -REGISTRY["seconds"]["clock_skew"]:
        return "future"
    if (peer, sequence) in sequences:
        return "sequence_reused"
    reason = None if message["type"] == "announce" else group_reason(message, peer, given, swarm)
    if reason is None:
        sequences.add((peer, sequence))
    return reason


def within(group, rules, models):
    """Whether the manifest allows it. `models`: [fingerprint, tokenizer] in hex of each; none: any."""
    sampling = group["sampling"]
    return (
        rules["min_completions"] <= len(group["completions"]) <= rules["max_completions"]
        and sampling["max_tokens"] <= rules["max_tokens"]
        and (sampling["temperature"], sampling["top_p"]) == (rules["temperature"], rules["top_p"])
        and (not models or [group["model"].hex(), group["tokenizer"].hex()] in models)
    )


def group_reason(group, peer, given, swarm):
    task, tasks, rules = group["task"], given["tasks"], REGISTRY["rollouts"]
    if task_seed(swarm, peer, group["sequence"]) != {"seed": task["seed"], "index": task["index"]}:
        return "seed"
    if task["id"] not in tasks:
        return "unknown_task"
    if task["version"] != tasks[task["id"]]:
        return "unknown_version"
    if "rules" in given and not within(group, given["rules"], given["models"]):
        return "agreement"
    for completion in group["completions"]:
        total = sum(item for (item,) in struct.iter_unpack("<f", completion["logprobs"]))
        slack = rules["logprob_sum_absolute"] + rules["logprob_sum_relative"] * abs(total)
        if len(completion["text"].encode()) > rules["bytes_per_token"] * completion["tokens"]:
            return "tokens"
        if completion["logprobs"] and abs(total - completion["logprob"]) > slack:
            return "tokens"
    if any(UNWANTED.search(completion["text"]) for completion in group["completions"]):
        return "charset"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# vectors


def judge(read_as, frame, domain, swarm):
    """What is made of a frame: {"verdict": "accept", "value": …} or {"verdict": "reject", "reason": …}."""
    readers = {
        "gossip": lambda: open_envelope(frame, BYTES["gossip_frame"], domain, swarm),
        "fetched": lambda: open_envelope(frame, BYTES["group"], domain, swarm),
        "fetch_request": lambda: read_fetch_request(frame),
        "fetch_response": lambda: read_fetch_response(frame),
        "peers_request": lambda: read_peers(frame, "peers_request", PEERS_REQUEST),
        "peers_response": lambda: read_peers(frame, "peers_response", PEERS_RESPONSE),
        "manifest": lambda: read_manifest(frame),
        "manifest_request": lambda: read_manifest_request(frame),
        "manifest_response": lambda: read_manifest_response(frame),
        "session": lambda: read_session(frame, swarm),
        "session_response": lambda: read_session_response(frame),
        "summary": lambda: read_summary(frame, swarm),
        "summary_request": lambda: read_summary_request(frame),
        "summary_response": lambda: read_summary_response(frame),
        "weights": lambda: read_weights(frame, "weights_message", WEIGHTS),
        "weights_state": lambda: read_weights(frame, "weights_state_response", WEIGHTS_STATE),
        "state_manifest": lambda: read_state_manifest(frame, swarm),
        "bulk_manifest": lambda: read_bulk(frame, "bulk_manifest", BULK_MANIFEST),
        "bulk_manifest_request": lambda: read_bulk(frame, "bulk_manifest_request", BULK_MANIFEST_REQUEST),
        "bulk_manifest_response": lambda: read_bulk(frame, "bulk_manifest_response", BULK_MANIFEST_RESPONSE),
        "bulk_request": lambda: read_bulk(frame, "bulk_request", BULK_REQUEST),
        "bulk_response": lambda: read_bulk(frame, "bulk_response", BULK_RESPONSE),
        "bulk_socket_request": lambda: read_bulk(frame, "bulk_socket_request", BULK_SOCKET_REQUEST),
        "bulk_socket_response": lambda: read_bulk(frame, "bulk_socket_response", BULK_SOCKET_RESPONSE),
    }
    try:
        return {"verdict": "accept", "value": plain(readers[read_as]())}
    except Refused as refused:
        return {"verdict": "reject", "reason": refused.args[0]}


def joined(parts):
    return b"".join(bytes.fromhex(part) * times for part, times in parts)


def admitted(vector, document):
    given = vector["admit"]
    frames = [joined(parts) for parts in [*given["after"], vector["frame"]]]
    reason = admit(frames, given, document["domain"].encode(), bytes.fromhex(document["swarm"]))
    verdicts = [verdict for verdict, reasons in REGISTRY["verdicts"].items() if reason in reasons]
    return [verdicts[0] if verdicts else "accept", reason]


def derive(vector):
    """What follows from the input of a derivation vector."""
    given = vector["input"]
    if vector["derive"] == "peer_id":
        return peer_id(bytes.fromhex(given["key"]))
    if vector["derive"] == "content_id":
        return digest(bytes.fromhex(given["envelope"])).hex()
    if vector["derive"] in ("edge_rank", "weights_fingerprint", "weights_fragments"):
        return globals()[vector["derive"]](**given)
    if vector["derive"] == "swarm_id":
        return swarm_id(**given).hex()
    if vector["derive"] == "task_seed":
        return task_seed(bytes.fromhex(given["swarm"]), given["peer"], given["sequence"])
    return {"evaluation_seed": evaluation_seed, "choose_task": choose_task, "bulk_root": bulk_root}[vector["derive"]](**given)


def plain(value):
    """`value` as JSON has it: bytes in hex."""
    if isinstance(value, dict):
        return {field: plain(item) for field, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def main():
    count = failures = 0
    for path in sorted((HERE / "vectors").glob("*.json")):
        document = json.loads(path.read_text())
        for vector in document["vectors"]:
            if "derive" in vector:
                wanted, got = vector["output"], derive(vector)
            elif "admit" in vector:
                wanted, got = [vector["verdict"], vector.get("reason")], admitted(vector, document)
            else:
                frame = joined(vector["frame"])
                got = judge(vector["read_as"], frame, document["domain"].encode(), bytes.fromhex(document["swarm"]))
                wanted = {field: vector[field] for field in got if field in vector}
            count += 1
            if got != wanted:
                failures += 1
                print(f"{path.name}: {vector['name']}: expected {str(wanted)[:200]}, got {str(got)[:200]}")
    print(f"{count} vectors, {failures} judged differently")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
