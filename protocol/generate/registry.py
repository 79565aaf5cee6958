"""protocol/registry.toml: names, limits, timeouts and verdicts, read from swarmnode's own modules.

A limit needs no line here: `swarmnode.wire.limits` is copied whole. The suffix of a constant gives
its table (`GROUP_BYTES` is `group` in `[bytes]`), its docstring the comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import libp2p.security.noise.transport as noise_transport

from swarmnode.p2p import manifests, neighbours
from swarmnode.p2p.bulk import service as bulk
from swarmnode.rollouts.network import admission
from swarmnode.rollouts.network.exchange import ANSWER_SECONDS, fetch_deadline
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.stages.crew_messages import (
    HASH_BYTES,
    MAX_AMOUNT,
    MAX_HELD_BLOCKS,
    MAX_LAYERS,
    MESSAGE_BYTES,
    NONCE_BYTES,
    OPEN_BYTES,
    REASON_BYTES,
    RECORD_DOMAIN,
)
from swarmnode.stages.network.crew_service import REQUEST_TIMEOUT
from swarmnode.stages.network.stream_proxy import OPEN_SECONDS, PARK_SECONDS, STREAM_REFUSALS
from swarmnode.stages.stage_frames import CHUNK_BYTES, FENCE_REASONS, FRAME_REASONS
from swarmnode.stages.state_messages import STATE_REASONS
from swarmnode.tasks import seeds
from swarmnode.weights import messages as weights
from swarmnode.weights.network import discovery, newcomer
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import SMALL_ORDER_KEYS

HEAD = """\
# Every name, cap and time of the protocol, for implementations in other languages. Generated:
# python -m protocol.generate
#
# [bytes], [counts] and [floats] are limits, inclusive, unless the comment names something else.
# [seconds] are times of the protocol, [timeouts] the seconds that a requester waits at most. A node
# may ignore a group for further reasons of its own, but must not reject for them.
"""
ELSEWHERE: dict[str, dict[str, Any]] = {
    "bytes": {
        "weights_message": weights.MESSAGE_BYTES,
        "swap": weights.ID_BYTES,
        "crews_message": MESSAGE_BYTES,
        "crew": HASH_BYTES,
        "record_hash": HASH_BYTES,
        "crew_nonce": NONCE_BYTES,
        "crew_reason": REASON_BYTES,
        "stage_open": OPEN_BYTES,
        "stage_chunk": CHUNK_BYTES,
    },
    "counts": {
        "block_bits": seeds.BLOCK_BITS,
        "fragments": weights.FRAGMENTS,
        "blocks": weights.BLOCKS,
        "held_blocks": MAX_HELD_BLOCKS,
        "layers": MAX_LAYERS,
    },
    "floats": {"crew_amount": MAX_AMOUNT},
    "timeouts": {
        "listing": ANSWER_SECONDS,  # after the patience of the request
        "groups": fetch_deadline(limits.GROUP_BYTES),
        "neighbours": neighbours.DEADLINE,
        "manifest": manifests.DEADLINE,
        "weights": discovery.REQUEST_SECONDS,
        "weights_state": newcomer.ANSWER_SECONDS,
        "crews": REQUEST_TIMEOUT,
        "stage_open": OPEN_SECONDS,
        "stage_stream": PARK_SECONDS,
        "bulk_manifest": bulk.MANIFEST_TIMEOUT_SECONDS,
    },
}
"""Limits of one plane, which its module defines."""
NODE_REASONS = {"greylisted", "busy", "scorer", "not_pooled", "internal"}
"""Reasons that concern this implementation's node and not the group."""


def tables() -> dict[str, dict[str, Any]]:
    """Return the tables of the registry by name."""
    names = {name.lower(): value for name, value in vars(ids).items() if name.isupper()}
    domains = {
        name.removeprefix("domain_"): value.decode()
        for name, value in names.items()
        if name.startswith("domain_")
    }
    protocols = {
        name.removesuffix("_protocol"): value
        for name, value in names.items()
        if name.endswith("_protocol")
    }
    spoken = {value: name for name, value in protocols.items()}
    verdict = lambda wanted: [
        reason for reason, given in REASONS.items() if given is wanted if reason not in NODE_REASONS
    ]
    told: dict[str, dict[str, Any]] = {
        "protocols": protocols,
        "swarm": {"protocols": [spoken[value] for value in ids.PROTOCOLS]},
        "domains": {**domains, "crew_record": RECORD_DOMAIN.decode()},
        "transport": {
            "transports": ["tcp"],
            "security": [noise_transport.PROTOCOL_ID],
            "private_security": [ids.PRIVATE_SECURITY],
            "muxers": ["/yamux/1.0.0"],
        },
        **{table: {} for table in ("bytes", "counts", "floats", "seconds", "timeouts")},
        "rollouts": {
            "bytes_per_token": admission.BYTES_PER_TOKEN,
            "logprob_sum_absolute": admission.LOGPROB_SUM_NATS,
            "logprob_sum_relative": admission.LOGPROB_SUM_SHARE,
        },
        "verdicts": {"reject": verdict(Verdict.REJECT), "ignore": verdict(Verdict.IGNORE)},
        "stage_verdicts": {
            "reject": list(dict.fromkeys((*FRAME_REASONS, *STATE_REASONS))),
            "ignore": [
                reason
                for reason in dict.fromkeys((*FENCE_REASONS, *STREAM_REFUSALS))
                if reason not in FRAME_REASONS
            ],
        },
    }
    for constant, value in vars(limits).items():
        if constant.isupper():
            table, name = _place(constant, value)
            told[table][name] = value
    for table, values in ELSEWHERE.items():
        told[table].update(values)
    return told


def _place(constant: str, value: float) -> tuple[str, str]:
    """Return table and name of a constant of `limits`."""
    name = constant.lower()
    for suffix in ("_bytes", "_seconds"):
        if name.endswith(suffix):
            return suffix[1:], name.removesuffix(suffix)
    return ("floats" if isinstance(value, float) else "counts"), name


def _docstrings(module: ModuleType) -> Mapping[str, str]:
    source = Path(str(module.__file__)).read_text()
    found = re.findall(r'^([A-Z_]+) = [^\n]*\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return {constant: " ".join(text.split()) for constant, text in found}


def registry() -> str:
    """Return the content of registry.toml."""
    comments = {
        _place(constant, getattr(limits, constant)): text
        for constant, text in _docstrings(limits).items()
    }
    keys = ",\n".join(f'    "{key.hex()}"' for key in sorted(SMALL_ORDER_KEYS))
    lines = [HEAD, "# Ed25519 keys that are refused, with the sign bit cleared (00, section 4)"]
    lines += [f"small_order_keys = [\n{keys},\n]"]
    for table, values in tables().items():
        lines += ["", f"[{table}]"]
        for name, value in values.items():
            comment = comments.get((table, name))
            lines.append(f"{name} = {json.dumps(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"
