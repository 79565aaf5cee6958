"""02-rollouts: groups, questions, listings, fetches, admission."""

import math
import struct
from types import SimpleNamespace

from check_frames import (
    BYTES,
    COUNTS,
    ENVELOPE,
    FLOATS,
    REGISTRY,
    Refused,
    code,
    counter,
    decode,
    decode_as,
    decompress,
    digest,
    name,
    open_envelope,
    require,
    shape,
)
from check_join import check_sampling, peer_id

TEXT = code("02-rollouts.md")


def check_group(group):
    task, sampling, completions = group["task"], group["sampling"], group["completions"]
    name(task["id"], BYTES["task_id"])
    name(task["version"], BYTES["version"])
    counter(task["seed"], group["policy_version"], group["created_at"], group["sequence"])
    require(task["seed"] % 2 ** COUNTS["index_bits"] == 0)
    require(0 <= task["index"] < 2 ** COUNTS["index_bits"])
    require(len(group["model"]) == len(group["tokenizer"]) == BYTES["fingerprint"])
    check_sampling(**sampling)
    require(COUNTS["min_completions"] <= len(completions) <= COUNTS["completions"])
    for completion in completions:
        tokens, packed = completion["tokens"], completion["logprobs"]
        require(len(completion["text"].encode()) <= BYTES["text"])
        check_turns(completion, sampling["max_tokens"])
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


def check_turns(completion, most):
    """Check a completion's turns (02, section 2). most: tokens of an action or of a completion."""
    turns, text, tokens = completion["turns"], completion["text"].encode(), completion["tokens"]
    require(len(turns) <= COUNTS["turns"])
    if not turns:
        return require(1 <= tokens <= most)
    require(1 <= tokens <= COUNTS["tokens"])
    require(all(length >= 0 and 1 <= sampled <= most for length, sampled in turns))
    require(sum(length for length, _ in turns) == len(text))
    require(sum(sampled for _, sampled in turns) == tokens)
    for length, _ in turns:
        action, text = text[:length], text[length:]
        try:
            action.decode()
        except UnicodeDecodeError:
            raise Refused("bounds") from None
    return None


def open_group(frame, domain, swarm):
    envelope = open_envelope(frame, BYTES["group"], domain, swarm, ("raw", "zstd"))
    payload = (
        envelope["payload"]
        if envelope["codec"] == "raw"
        else decompress(envelope["payload"], BYTES["group"])
    )
    group = decode(payload, BYTES["group"], shape("rollout_group"))
    check_group(group)
    return {
        "peer": peer_id(envelope["key"]),
        "content": digest(frame),
        "codec": envelope["codec"],
        "group": group,
    }


def read_listing_request(frame):
    request = decode_as(frame, "listing_request")
    require(
        len(request["swarm"]) == BYTES["swarm_id"] and len(request["life"]) in (0, BYTES["life"])
    )
    counter(request["position"])
    require(request["life"] or request["position"] == 0)
    require(0 <= request["patience"] <= REGISTRY["seconds"]["patience"])
    return request


def read_listing_response(frame):
    response = decode_as(frame, "listing_response")
    groups = response["groups"]
    require(len(response["life"]) == BYTES["life"])
    counter(response["position"])
    require(len(groups) <= COUNTS["listed"] and (not groups or response["status"] == "ok"))
    for content, author, task, created_at, size, spread in groups:
        require(len(content) == BYTES["content_id"] and len(author) == BYTES["key"])
        name(task, BYTES["task_id"])
        counter(created_at)
        require(1 <= size <= BYTES["group"])
        require(math.isfinite(spread), "not_finite")
        require(0 <= spread <= FLOATS["spread"])
    require(len({content for content, *_ in groups}) == len(groups))
    return response


def read_groups_request(frame):
    contents = decode_as(frame, "groups_request")["contents"]
    require(1 <= len(contents) <= COUNTS["pulled"] and len(set(contents)) == len(contents))
    require(all(len(content) == BYTES["content_id"] for content in contents))
    return {"contents": contents}


def read_groups_response(frame):
    groups = decode_as(frame, "groups_response")["groups"]
    require(1 <= len(groups) <= COUNTS["pulled"])
    require(all((group["status"] == "ok") == bool(group["body"]) for group in groups))
    require(sum(len(group["body"]) for group in groups) <= BYTES["group"])
    return {"groups": groups}


def listing(life, last, held, own, reader, request):
    """Return the positions that are listed. held: [position, author, source] of each group; last:
    the latest position."""
    groups = [
        SimpleNamespace(position=position, author=author, source=source)
        for position, author, source in sorted(held, reverse=True)
    ]
    shelf = SimpleNamespace(life=life, position=last, owner=own, groups=groups)
    return [group.position for group in TEXT.listing(shelf, SimpleNamespace(**request), reader)]


def listed_falsely(listed, frame, domain, swarm):
    """Return "mismatch" if a listing contradicts the envelope of its group (02, section 4.4)."""
    content, author, task, created_at, size, _ = listed
    opened = open_group(frame, domain, swarm)
    true = [
        opened["content"].hex(),
        opened["peer"],
        opened["group"]["task"]["id"],
        opened["group"]["created_at"],
        len(frame),
    ]
    claimed = [content, peer_id(bytes.fromhex(author)), task, created_at, size]
    return None if claimed == true else "mismatch"


def admit(frames, given, domain, swarm):
    """Return the reason to reject the last of `frames`, which arrive in order, or None (02,
    sections 5.1 to 5.3)."""
    contents, sequences, reason = set(), set(), None
    for frame in frames:
        reason = admit_one(frame, given, domain, swarm, contents, sequences)
        contents.add(digest(frame))
    return reason


def admit_one(frame, given, domain, swarm, contents, sequences):
    try:
        require(len(frame) <= BYTES["group"], "oversize")
        require(digest(frame) not in contents, "duplicate")
        key = decode(frame, BYTES["group"], ENVELOPE)["key"]
        require(peer_id(key) != given["own"], "own")
        opened = open_group(frame, domain, swarm)
    except Refused as refused:
        return refused.args[0]
    peer, group = opened["peer"], opened["group"]
    age, sequence = given["now"] - group["created_at"] / 1000, group["sequence"]
    if age > REGISTRY["seconds"]["group_age"]:
        return "stale"
    if age < -REGISTRY["seconds"]["clock_skew"]:
        return "future"
    if (peer, sequence) in sequences:
        return "sequence_reused"
    reason = group_reason(group, peer, given, swarm)
    if reason is None:
        sequences.add((peer, sequence))
    return reason


def group_reason(group, peer, given, swarm):
    turns = given.get("turns", {})
    tasks = {task: (version, turns.get(task, 1)) for task, version in given["tasks"].items()}
    models = [tuple(map(bytes.fromhex, model)) for model in given.get("models", ())]
    rules = given.get("rules")
    if reason := TEXT.fault(group, peer, swarm, tasks, rules, models):
        return reason
    texts = (completion["text"] for completion in group["completions"])
    return "charset" if any(map(TEXT.UNWANTED.search, texts)) else None


READERS = {
    "group": open_group,
    "listing_request": lambda frame, domain, swarm: read_listing_request(frame),
    "listing_response": lambda frame, domain, swarm: read_listing_response(frame),
    "groups_request": lambda frame, domain, swarm: read_groups_request(frame),
    "groups_response": lambda frame, domain, swarm: read_groups_response(frame),
}
DERIVATIONS = {
    "task_seed": lambda swarm, **asked: dict(
        zip(("seed", "index"), TEXT.task_seed(bytes.fromhex(swarm), **asked), strict=True)
    ),
    "choose_task": lambda swarm, **asked: TEXT.choose_task(swarm=bytes.fromhex(swarm), **asked),
    "evaluation_seed": lambda task, block: TEXT.evaluation_seed(task, block),
    "listing": listing,
    "listed": lambda listed, frame, swarm: listed_falsely(
        listed, bytes.fromhex(frame), REGISTRY["domains"]["rollout"].encode(), bytes.fromhex(swarm)
    ),
}
