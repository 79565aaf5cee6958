"""01-identity-and-join: peer ids, swarm ids, the peers protocol, manifests, sessions, summaries."""

import math

from check_frames import (
    BYTES,
    COUNTS,
    ENVELOPE,
    EXACT,
    FLOATS,
    REGISTRY,
    code,
    counter,
    decode,
    name,
    require,
    rising,
    text,
    verify,
)

TEXT = code("01-identity-and-join.md")
peer_id = TEXT.peer_id
PEERS_REQUEST = {"swarm": bytes, "addresses": [str]}
PEERS_RESPONSE = {"swarm": bytes, "peers": [{"peer": str, "addresses": [str]}]}
RULES = {
    "min_completions": int,
    "max_completions": int,
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "groups_per_second": float,
}
MANIFEST = {
    "name": str,
    "founder": bytes,
    "created_at": int,
    "predecessor": bytes,
    "minimum_version": str,
    "protocols": [str],
    "models": [{"name": str, "revision": str, "fingerprint": bytes, "tokenizer": bytes}],
    "tasks": [{"id": str, "version": str, "settings": str}],
    "rollouts": RULES,
    "settings": [{"key": str, "value": str}],
    "bootstrap": [str],
    "access": {"members": [str], "secret": bytes},
}
MANIFEST_REQUEST = {"swarm": bytes}
MANIFEST_RESPONSE = {"manifest": bytes, "successor": bytes}
SESSION = {"session": bytes, "started_at": int, "issued_at": int}
SESSION_RESPONSE = {"sessions": [bytes]}
SUMMARY = {
    "name": str,
    "version": str,
    "created_at": int,
    "uptime": int,
    "step": int,
    "policy_version": int,
    "reward": float,
    "published": int,
    "peers": int,
}
SUMMARY_REQUEST = {"summary": bytes}
SUMMARY_RESPONSE = {"summaries": [bytes]}


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
    """Read a signed manifest (01, section 6)."""
    envelope = decode(frame, BYTES["manifest"], ENVELOPE)
    require(
        len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"]
    )
    require(envelope["codec"] == "raw", "compression")
    swarm = TEXT.manifest_id(envelope["payload"])
    verify(envelope, REGISTRY["domains"]["manifest"].encode(), swarm)
    manifest = decode(envelope["payload"], BYTES["manifest"], MANIFEST)
    check_manifest(manifest)
    require(manifest["founder"] == envelope["key"], "signature")
    return {"swarm": swarm, "manifest": manifest}


def check_manifest(manifest):
    rules, access = manifest["rollouts"], manifest["access"]
    text(manifest["name"], 1, BYTES["manifest_name"])
    require(
        len(manifest["founder"]) == EXACT["key"]
        and len(manifest["predecessor"]) in (0, EXACT["swarm_id"])
    )
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
    require(
        COUNTS["min_completions"]
        <= rules["min_completions"]
        <= rules["max_completions"]
        <= COUNTS["max_completions"]
    )
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


def check_sampling(temperature, top_p, max_tokens):
    require(math.isfinite(temperature) and math.isfinite(top_p), "not_finite")
    require(0 < temperature <= FLOATS["temperature"] and 0 < top_p <= 1)
    require(1 <= max_tokens <= COUNTS["tokens"])


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
    require(
        len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"]
    )
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
    """Read a signed summary (01, section 10)."""
    envelope = decode(frame, BYTES["summary"], ENVELOPE)
    require(
        len(envelope["key"]) == EXACT["key"] and len(envelope["signature"]) == EXACT["signature"]
    )
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


READERS = {
    "peers_request": lambda frame, domain, swarm: read_peers(frame, "peers_request", PEERS_REQUEST),
    "peers_response": lambda frame, domain, swarm: read_peers(
        frame, "peers_response", PEERS_RESPONSE
    ),
    "manifest": lambda frame, domain, swarm: read_manifest(frame),
    "manifest_request": lambda frame, domain, swarm: read_manifest_request(frame),
    "manifest_response": lambda frame, domain, swarm: read_manifest_response(frame),
    "session": lambda frame, domain, swarm: read_session(frame, swarm),
    "session_response": lambda frame, domain, swarm: read_session_response(frame),
    "summary": lambda frame, domain, swarm: read_summary(frame, swarm),
    "summary_request": lambda frame, domain, swarm: read_summary_request(frame),
    "summary_response": lambda frame, domain, swarm: read_summary_response(frame),
}
DERIVATIONS = {
    "peer_id": lambda key: peer_id(bytes.fromhex(key)),
    "swarm_id": lambda **given: TEXT.swarm_id(**given).hex(),
}
