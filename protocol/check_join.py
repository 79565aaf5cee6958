"""01-identity-and-join: peer ids, swarm ids, neighbours, manifests, sessions, summaries."""

import math

from check_frames import (
    BYTES,
    COUNTS,
    ENVELOPE,
    FLOATS,
    code,
    counter,
    decode,
    decode_as,
    name,
    open_signed,
    require,
    rising,
    shape,
    text,
)

TEXT = code("01-identity-and-join.md")
peer_id = TEXT.peer_id


def read_neighbours_request(frame):
    request = decode_as(frame, "neighbours_request")
    require(len(request["swarm"]) == BYTES["swarm_id"])
    check_addresses(request["addresses"])
    require(len(request["session"]) <= BYTES["signed_session"])
    require(len(request["summary"]) <= BYTES["summary"])
    counter(request["used"])
    return request


def read_neighbours_response(frame):
    response = decode_as(frame, "neighbours_response")
    require(len(response["swarm"]) == BYTES["swarm_id"])
    require(len(response["peers"]) <= COUNTS["peers"])
    for peer in response["peers"]:
        name(peer["peer"], BYTES["peer_id"])
        check_addresses(peer["addresses"])
    require(len(response["sessions"]) <= COUNTS["sessions"])
    require(all(1 <= len(each) <= BYTES["signed_session"] for each in response["sessions"]))
    require(len(response["summaries"]) <= COUNTS["summaries"])
    require(all(1 <= len(each) <= BYTES["summary"] for each in response["summaries"]))
    require(len(response["successor"]) in (0, BYTES["swarm_id"]))
    return response


def check_addresses(addresses):
    require(len(addresses) <= COUNTS["peer_addresses"])
    [name(address, BYTES["address"]) for address in addresses]


def read_manifest(frame):
    """Read a signed manifest (01, section 6)."""
    limit = BYTES["manifest"]
    swarm = TEXT.manifest_id(decode(frame, limit, ENVELOPE)["payload"])
    key, manifest = open_signed(frame, limit, "manifest", swarm, shape("manifest"))
    check_manifest(manifest)
    require(manifest["founder"] == key, "signature")
    return {"swarm": swarm, "manifest": manifest}


def check_manifest(manifest):
    rules, access = manifest["rollouts"], manifest["access"]
    text(manifest["name"], 1, BYTES["manifest_name"])
    require(
        len(manifest["founder"]) == BYTES["key"]
        and len(manifest["predecessor"]) in (0, BYTES["swarm_id"])
    )
    counter(manifest["created_at"])
    name(manifest["minimum_version"], BYTES["minimum_version"])
    rising(manifest["protocols"], 1, COUNTS["protocol_ids"])
    [name(protocol, BYTES["protocol"]) for protocol in manifest["protocols"]]
    require(len(manifest["models"]) <= COUNTS["models"])
    for model in manifest["models"]:
        name(model["name"], BYTES["model_name"])
        require(not model["revision"] or name(model["revision"], BYTES["revision"]) is None)
        require(len(model["fingerprint"]) == len(model["tokenizer"]) == BYTES["fingerprint"])
    rising([task["id"] for task in manifest["tasks"]], 1, COUNTS["tasks"])
    for task in manifest["tasks"]:
        name(task["id"], BYTES["task_id"])
        name(task["version"], BYTES["version"])
        text(task["settings"], 0, BYTES["setting_value"])
    require(
        COUNTS["min_completions"]
        <= rules["min_completions"]
        <= rules["max_completions"]
        <= COUNTS["completions"]
    )
    check_sampling(rules["temperature"], rules["top_p"], rules["max_tokens"])
    require(math.isfinite(rules["groups_per_second"]), "not_finite")
    require(0 < rules["groups_per_second"] <= FLOATS["groups_per_second"])
    rising([setting["key"] for setting in manifest["settings"]], 0, COUNTS["settings"])
    for setting in manifest["settings"]:
        name(setting["key"], BYTES["setting_key"])
        text(setting["value"], 1, BYTES["setting_value"])
    require(len(manifest["bootstrap"]) <= COUNTS["bootstrap_addresses"])
    [name(address, BYTES["address"]) for address in manifest["bootstrap"]]
    rising(access["members"], 0, COUNTS["members"])
    [name(member, BYTES["peer_id"]) for member in access["members"]]
    require(len(access["secret"]) in (0, BYTES["secret"]))


def check_sampling(temperature, top_p, max_tokens):
    require(math.isfinite(temperature) and math.isfinite(top_p), "not_finite")
    require(0 < temperature <= FLOATS["temperature"] and 0 < top_p <= 1)
    require(1 <= max_tokens <= COUNTS["tokens"])


def read_manifest_request(frame):
    request = decode_as(frame, "manifest_request")
    require(len(request["swarm"]) == BYTES["swarm_id"])
    return request


def read_manifest_response(frame):
    response = decode_as(frame, "manifest_response")
    require(len(response["manifest"]) <= BYTES["manifest"])
    require(len(response["successor"]) <= (BYTES["manifest"] if response["manifest"] else 0))
    return response


def read_session(frame, swarm):
    limit = BYTES["signed_session"]
    key, session = open_signed(frame, limit, "session", swarm, shape("session"))
    require(len(session["id"]) == BYTES["session"])
    counter(session["started_at"], session["issued_at"])
    return {"peer": peer_id(key), "session": session}


def read_summary(frame, swarm):
    """Read a signed summary (01, section 10)."""
    key, summary = open_signed(frame, BYTES["summary"], "summary", swarm, shape("summary"))
    text(summary["name"], 0, BYTES["summary_name"])
    name(summary["version"], BYTES["minimum_version"])
    counter(*[value for value in summary.values() if isinstance(value, int)])
    require(math.isfinite(summary["reward"]), "not_finite")
    require(summary["reward"] == -1 or 0 <= summary["reward"] <= 1)
    return {"peer": peer_id(key), "summary": summary}


READERS = {
    "neighbours_request": lambda frame, domain, swarm: read_neighbours_request(frame),
    "neighbours_response": lambda frame, domain, swarm: read_neighbours_response(frame),
    "manifest": lambda frame, domain, swarm: read_manifest(frame),
    "manifest_request": lambda frame, domain, swarm: read_manifest_request(frame),
    "manifest_response": lambda frame, domain, swarm: read_manifest_response(frame),
    "session": lambda frame, domain, swarm: read_session(frame, swarm),
    "summary": lambda frame, domain, swarm: read_summary(frame, swarm),
}
DERIVATIONS = {
    "peer_id": lambda key: peer_id(bytes.fromhex(key)),
    "swarm_id": lambda **given: TEXT.swarm_id(**given).hex(),
}
