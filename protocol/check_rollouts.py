"""02-rollouts: groups, announcements, fetching, and which seeds are whose."""

import hashlib
import math
import re
import struct

from check_frames import (
    BYTES,
    COUNTS,
    ENVELOPE,
    EXACT,
    FLOATS,
    REGISTRY,
    Refused,
    Row,
    counter,
    decode,
    decompress,
    digest,
    name,
    require,
    verify,
)
from check_join import check_sampling, peer_id

TASK = {"id": str, "version": str, "seed": int, "index": int, "difficulty": int}
SAMPLING = {"temperature": float, "top_p": float, "max_tokens": int}
COMPLETION = {
    "text": str,
    "tokens": int,
    "logprob": float,
    "finish": ("eos", "length"),
    "token_ids": bytes,
    "logprobs": bytes,
}
GROUP = {
    "type": ("rollout",),
    "task": TASK,
    "model": bytes,
    "tokenizer": bytes,
    "policy_version": int,
    "created_at": int,
    "sequence": int,
    "sampling": SAMPLING,
    "completions": [COMPLETION],
}
ANNOUNCE = {
    "type": ("announce",),
    "content": bytes,
    "size": int,
    "created_at": int,
    "sequence": int,
}
FETCH_REQUEST = {"content": bytes}
FETCH_RESPONSE = {"status": ("ok", "unknown", "busy"), "body": bytes}
LISTING_REQUEST = {"swarm": bytes, "life": bytes, "position": int}
LISTED = Row(content=bytes, author=bytes, task=str, created_at=int, size=int, spread=float)
LISTING_RESPONSE = {
    "status": ("ok", "unknown", "busy"),
    "life": bytes,
    "position": int,
    "groups": [LISTED],
}
GROUPS_REQUEST = {"contents": [bytes]}
GROUPS_RESPONSE = {"groups": [FETCH_RESPONSE]}

UNWANTED = re.compile(
    "[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ufdd0-\\ufdef\\ufffe\\uffff]"
)
"""Control characters, bidirectional overrides, non-characters."""


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
        require(
            all(
                FLOATS["token_logprob"] <= logprob <= FLOATS["logprob_slack"]
                for logprob in logprobs
            )
        )


def check_announce(announce):
    require(
        len(announce["content"]) == EXACT["content_id"] and 1 <= announce["size"] <= BYTES["group"]
    )
    counter(announce["created_at"], announce["sequence"])


def open_envelope(frame, limit, domain, swarm):
    envelope = decode(frame, limit, ENVELOPE)
    require(
        len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"]
    )
    verify(envelope, domain, swarm)
    payload = (
        envelope["payload"]
        if envelope["codec"] == "raw"
        else decompress(envelope["payload"], BYTES["group"])
    )
    message = decode(payload, BYTES["group"], GROUP, ANNOUNCE)
    check_group(message) if message["type"] == "rollout" else check_announce(message)
    return {
        "peer": peer_id(envelope["key"]),
        "content": digest(frame),
        "codec": envelope["codec"],
        "message": message,
    }


def read_fetch_request(frame):
    request = decode(frame, BYTES["fetch_request"], FETCH_REQUEST)
    require(len(request["content"]) == EXACT["content_id"])
    return request


def read_fetch_response(frame):
    response = decode(frame, BYTES["fetch_response"], FETCH_RESPONSE)
    require(
        (response["status"] == "ok") == bool(response["body"])
        and len(response["body"]) <= BYTES["group"]
    )
    return response


def read_listing_request(frame):
    request = decode(frame, BYTES["listing_request"], LISTING_REQUEST)
    require(
        len(request["swarm"]) == EXACT["swarm_id"] and len(request["life"]) in (0, EXACT["life"])
    )
    counter(request["position"])
    require(request["life"] or request["position"] == 0)
    return request


def read_listing_response(frame):
    response = decode(frame, BYTES["listing_response"], LISTING_RESPONSE)
    groups = response["groups"]
    require(len(response["life"]) == EXACT["life"])
    counter(response["position"])
    require(len(groups) <= COUNTS["listed"] and (not groups or response["status"] == "ok"))
    for content, author, task, created_at, size, spread in groups:
        require(len(content) == EXACT["content_id"] and len(author) == EXACT["key"])
        name(task, BYTES["task_id"])
        counter(created_at)
        require(1 <= size <= BYTES["group"])
        require(math.isfinite(spread), "not_finite")
        require(0 <= spread <= FLOATS["spread"])
    require(len({content for content, *_ in groups}) == len(groups))
    return response


def read_groups_request(frame):
    contents = decode(frame, BYTES["groups_request"], GROUPS_REQUEST)["contents"]
    require(1 <= len(contents) <= COUNTS["pulled"] and len(set(contents)) == len(contents))
    require(all(len(content) == EXACT["content_id"] for content in contents))
    return {"contents": contents}


def read_groups_response(frame):
    groups = decode(frame, BYTES["groups_response"], GROUPS_RESPONSE)["groups"]
    require(1 <= len(groups) <= COUNTS["pulled"])
    require(all((group["status"] == "ok") == bool(group["body"]) for group in groups))
    require(sum(len(group["body"]) for group in groups) <= BYTES["group"])
    return {"groups": groups}


def listing(life, held, last, request):
    """02, section 6: the positions that are listed, of those that are `held`; `last` was the last
    one given."""
    since = request["position"] if request["life"] == life and request["position"] <= last else 0
    return [position for position in held if position > since][-COUNTS["newest"] :]


def listed_falsely(listed, frame, domain, swarm):
    """Whether whoever listed a group said what its envelope contradicts."""
    content, author, task, created_at, size, _ = listed
    opened = open_envelope(frame, BYTES["group"], domain, swarm)
    group = opened["message"]
    true = [
        opened["content"].hex(),
        opened["peer"],
        group["task"]["id"],
        group["created_at"],
        len(frame),
    ]
    return (
        None
        if [content, peer_id(bytes.fromhex(author)), task, created_at, size] == true
        else "mismatch"
    )


def seed_block(domain, *data):
    block = (
        int.from_bytes(digest(b"".join([REGISTRY["domains"][domain].encode(), *data])), "big")
        >> 256 - COUNTS["block_bits"]
    )
    return block << COUNTS["index_bits"]


def task_seed(swarm, peer, sequence):
    number, index = divmod(sequence, 2 ** COUNTS["index_bits"])
    return {
        "seed": seed_block("seed", swarm, peer.encode(), struct.pack(">Q", number)),
        "index": index,
    }


def bucket_seed(swarm, peer, sequence, task, difficulty):
    number, index = divmod(sequence, 2 ** COUNTS["index_bits"])
    chosen = bytes([difficulty]) + task.encode()
    return {
        "seed": seed_block("bucket_seed", swarm, peer.encode(), struct.pack(">Q", number), chosen),
        "index": index,
    }


def evaluation_seed(task, block):
    return 2**62 + seed_block("evaluation", task.encode(), b"\0", struct.pack(">Q", block))


def choose_task(tasks, seed, index):
    drawn = hashlib.blake2b(
        REGISTRY["domains"]["task"].encode() + struct.pack(">QI", seed, index), digest_size=8
    ).digest()
    return sorted(set(tasks))[int.from_bytes(drawn, "big") % len(set(tasks))]


def admit(frames, given, domain, swarm):
    """02, section 4.1 to 4.3, for the last of `frames`, which come one after the other: (verdict,
    reason)."""
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
    if message["type"] == "announce":
        return None
    reason = group_reason(message, peer, given, swarm)
    if reason is None:
        sequences.add((peer, sequence))
    return reason


def within(group, rules, models):
    """Whether the manifest allows it. `models`: [fingerprint, tokenizer] in hex of each; none:
    any."""
    sampling = group["sampling"]
    return (
        rules["min_completions"] <= len(group["completions"]) <= rules["max_completions"]
        and sampling["max_tokens"] <= rules["max_tokens"]
        and (sampling["temperature"], sampling["top_p"]) == (rules["temperature"], rules["top_p"])
        and (not models or [group["model"].hex(), group["tokenizer"].hex()] in models)
    )


def group_reason(group, peer, given, swarm):
    task, tasks, rules = group["task"], given["tasks"], REGISTRY["rollouts"]
    asked = (swarm, peer, group["sequence"])
    address = (
        bucket_seed(*asked, task["id"], task["difficulty"])
        if given.get("chooses")
        else task_seed(*asked)
    )
    if address != {"seed": task["seed"], "index": task["index"]}:
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


READERS = {
    "gossip": lambda frame, domain, swarm: open_envelope(
        frame, BYTES["gossip_frame"], domain, swarm
    ),
    "fetched": lambda frame, domain, swarm: open_envelope(frame, BYTES["group"], domain, swarm),
    "fetch_request": lambda frame, domain, swarm: read_fetch_request(frame),
    "fetch_response": lambda frame, domain, swarm: read_fetch_response(frame),
    "listing_request": lambda frame, domain, swarm: read_listing_request(frame),
    "listing_response": lambda frame, domain, swarm: read_listing_response(frame),
    "groups_request": lambda frame, domain, swarm: read_groups_request(frame),
    "groups_response": lambda frame, domain, swarm: read_groups_response(frame),
}
DERIVATIONS = {
    "task_seed": lambda swarm, peer, sequence: task_seed(bytes.fromhex(swarm), peer, sequence),
    "bucket_seed": lambda swarm, **asked: bucket_seed(bytes.fromhex(swarm), **asked),
    "evaluation_seed": evaluation_seed,
    "choose_task": choose_task,
    "listing": listing,
    "listed": lambda listed, frame, swarm: listed_falsely(
        listed, bytes.fromhex(frame), REGISTRY["domains"]["rollout"].encode(), bytes.fromhex(swarm)
    ),
}
