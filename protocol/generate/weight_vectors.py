"""Vectors of averaging, for `vectors.py`."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import SWARM, Vector, derived, encoded, refusals
from swarmnode.weights.fingerprint import LoraShape, fingerprint
from swarmnode.weights.fragments import blocks_of, cut
from swarmnode.weights.layout import make_layout

FINGERPRINT, TRANSFER, ROOT = b"\x41" * 32, b"\x42" * 32, b"\x43" * 32
SWAP = b"\x44" * 16
TENSORS = [
    ["embed.weight", [100, 8], "float32"],
    ["layers.0.w", [8, 8], "float32"],
    ["layers.1.w", [8, 8], "float32"],
    ["layers.2.w", [8, 8], "float32"],
    ["norm.weight", [8], "float32"],
]


def messages() -> Iterator[Vector]:
    here: dict[str, Any] = {"type": "here", "fingerprint": FINGERPRINT, "outer_step": 12}
    here["blocks"] = b"\xff" * 128
    swap: dict[str, Any] = {"type": "swap", "id": SWAP, "fingerprint": FINGERPRINT}
    swap |= {"fragment": 1023, "outer_step": 2**63 - 1, "blocks": b"\x3d"}
    ready: dict[str, Any] = {"type": "ready", "id": SWAP, "transfer": TRANSFER, "root": ROOT}
    ready |= {"size": 62_817, "outer_step": 5}
    refusal = {"type": "refused", "id": SWAP, "reason": "other_policy"}
    for message in (
        here,
        swap,
        {"type": "accepted", "id": SWAP, "outer_step": 0, "blocks": b"\x01"},
        {"type": "busy", "id": SWAP},
        *({**refusal, "reason": reason} for reason in ("other_policy", "over", "stranger")),
        {"type": "payload", "id": SWAP},
        ready,
    ):
        name = f"{message['type']} {message.get('reason', '')}".strip()
        yield encoded(name, "weights", message)
    yield from refusals(
        "weights",
        ("bounds", "fragment 1024", {**swap, "fragment": 1024}),
        ("bounds", "1032 blocks", {**here, "blocks": b"\1" * 129}),
        ("bounds", "nothing to fetch", {**ready, "size": 0}),
        ("schema", "another reason", {**refusal, "reason": "tired"}),
        ("schema", "an unknown type", {**here, "type": "average"}),
        ("oversize", "257 bytes", bytes(257)),
    )


def states() -> Iterator[Vector]:
    response = {"type": "state_response", "outer_step": 31, "transfer": TRANSFER, "root": ROOT}
    response["size"] = 1_000_000
    request = {"type": "state_request", "fingerprint": FINGERPRINT, "blocks": b"\x3d"}
    for message in (request, response):
        yield encoded(str(message["type"]), "weights_state", message)
    yield from refusals(
        "weights_state",
        ("bounds", "a state of no bytes", {**response, "size": 0}),
        ("bounds", "no blocks", {**request, "blocks": b""}),
        ("oversize", "257 bytes of a state", bytes(257)),
    )


def derivations() -> Iterator[Vector]:
    layout = make_layout((name, shape, dtype) for name, shape, dtype in TENSORS)
    adapters = (None, LoraShape(8, 16, ("k_proj", "q_proj")), LoraShape(8, 16, ("all-linear",)))
    for number, adapter in enumerate(adapters):
        plain = adapter and [adapter.r, adapter.alpha, list(adapter.target_modules)]
        given = {"swarm": SWARM.hex(), "base": ROOT.hex(), "tokenizer": TRANSFER.hex()}
        given |= {"layout": TENSORS, "fragments": 3, "adapter": plain}
        output = fingerprint(SWARM, ROOT, TRANSFER, layout, 3, adapter).hex()
        yield derived(f"fingerprint {number}", "weights_fingerprint", given, output)
    for count, tensors in ((1, TENSORS), (2, TENSORS), (3, TENSORS), (3, TENSORS[2:3])):
        held = make_layout((name, shape, dtype) for name, shape, dtype in tensors)
        parts = [[spec.name for spec in part] for part in cut(held, count)]
        given = {"layout": tensors, "fragments": count}
        output = [parts, blocks_of(spec.name for spec in held).hex()]
        yield derived(f"{count} fragments of {len(held)}", "weights_fragments", given, output)
    scale, q = struct.Struct("<f").pack, lambda *values: struct.pack(f"{len(values)}b", *values)
    for name, count, body, output in (
        ("int8", 3, scale(0.5) + q(127, 1, -127), [63.5, 0.5, -63.5]),
        (
            "int8, two blocks",
            257,
            scale(1.0) + scale(0.0) + q(-7, 7, *[0] * 254, 9),
            [-7.0, 7.0, *[0.0] * 255],
        ),
        ("int8, a value of −128", 2, scale(0.5) + q(0, -128), "bounds"),
        ("int8, a negative scale", 2, scale(-0.5) + q(0, 0), "bounds"),
        ("int8, a scale that is not finite", 2, scale(math.inf) + q(0, 0), "not_finite"),
    ):
        given = {"elements": count, "body": body.hex()}
        yield derived(name, "weights_int8", given, output)
