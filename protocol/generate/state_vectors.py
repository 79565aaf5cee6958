"""Vectors of state between members of a crew, for `vectors.py`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from protocol.generate.frames import Vector, accepted, derived, rejected
from protocol.generate.stage_vectors import CREW, GIVEN, PLACE, framed
from swarmnode.stages.specs import StageSpec
from swarmnode.stages.stage_frames import activation_bytes
from swarmnode.stages.state_messages import hash_body, state_bytes
from swarmnode.stages.trainer.copy_codec import encode_copy
from swarmnode.weights.layout import make_layout

ROOT = b"\x46" * 32


def message(tag: str, **fields: Any) -> dict[str, Any]:
    return {"type": tag, "place": PLACE, "request": 5, **fields}


HAVE = message("have", what="checkpoint", step=40, size=24_576, root=ROOT, squared_norm=0.5)
RUN = message("run", codec="float32", rows=2, about=5)
INVENTORY = message("inventory", phase="ready", checkpoint=40, ends=None)
WANT = message("want", what="checkpoint", of=2, at=0, root=b"")
GOOD: list[dict[str, Any]] = [
    message("ask"),
    INVENTORY,
    *({**INVENTORY, "phase": phase} for phase in ("starting", "restoring")),
    {**INVENTORY, "checkpoint": None, "ends": 0},
    *({**WANT, "what": what} for what in ("checkpoint", "layers", "tied", "ends", "copy")),
    {**WANT, "at": 2**20, "root": ROOT},
    *(
        {**HAVE, "what": what}
        for what in ("checkpoint", "layers", "tied", "ends", "copy", "output")
    ),
    *(message("announce", what=what, step=40) for what in ("checkpoint", "ends")),
    message("stored", step=40),
    *(
        message("lack", reason=reason)
        for reason in ("none", "loading", "refused", "busy", "failed")
    ),
]


COPIES = (
    ("a copy of unchanged weights", [[0.5, -1.984375], [0.0, 0.0]], [[0.5, -1.984375], [0.0, 0.0]]),
    ("a copy of weights changed within their row's scale", [[0.5, -1.984375]], [[0.515625, -1.25]]),
    (
        "a copy of rows beyond their scale",
        [[0.5, -1.984375], [0.0, 0.0]],
        [[3.96875, 1.0], [1.984375, -0.25]],
    ),
)


def copy_plain(base: list[list[float]], now: list[list[float]]) -> str:
    """Return the part of a `copy` for one matrix before compression, in hex."""
    spec, name = StageSpec(0, 2, 0, 1, False), "model.layers.0.mlp.up_proj.weight"
    layout = make_layout([(name, (len(base), len(base[0])), "float32")])
    return zlib.decompress(
        encode_copy(spec, {name: torch.tensor(now)}, layout, lambda name: torch.tensor(base))
    ).hex()


def right(name: str, header: dict[str, Any], body: bytes = b"") -> Vector:
    return {
        **accepted(name, "state_message", framed(header, body), {"header": header, "body": body}),
        "given": GIVEN,
    }


def wrong(reason: str, name: str, data: bytes) -> Vector:
    return {**rejected(reason, name, data, "state_message"), "given": GIVEN}


def messages() -> Iterator[Vector]:
    for number, good in enumerate(GOOD):
        yield right(f"{good['type']} {number}", good)
    chunk = message("chunk", at=2**20, length=3)
    yield right("a chunk", chunk, b"abc")
    for codec in ("float32", "bfloat16", "int8"):
        yield right(
            f"a run in {codec}",
            {**RUN, "codec": codec},
            b"about" + bytes(activation_bytes(codec, 2, GIVEN["hidden"])),
        )
    yield right("a run of the first stage", {**RUN, "codec": None}, b"about")

    tokens, hidden = GIVEN["tokens"], GIVEN["hidden"]
    for reason, name, data in (
        ("oversize", "no header", bytes(4)),
        ("oversize", "a header of 4 GiB", b"\xff\xff\xff\xff"),
        ("truncated", "two bytes", bytes(2)),
        ("truncated", "half a header", framed(HAVE)[:-9]),
        ("truncated", "a missing chunk", framed(chunk)),
        ("truncated", "a chunk without its last byte", framed(chunk, b"ab")),
        ("size", "a byte behind a chunk", framed(chunk, b"abcd")),
        ("truncated", "a run without its last byte", framed(RUN, bytes(5 + 8 * hidden - 1))),
    ):
        yield wrong(reason, name, data)
    for reason, name, header in (
        ("schema", "an unknown message", message("take")),
        ("schema", "an unknown phase", {**INVENTORY, "phase": "loading"}),
        ("schema", "an unknown body", {**WANT, "what": "keys"}),
        ("schema", "an output that is wanted", {**WANT, "what": "output"}),
        ("schema", "layers that are kept", message("announce", what="layers", step=40)),
        ("schema", "an unknown reason", message("lack", reason="tired")),
        ("bounds", "a run of no rows", {**RUN, "rows": 0}),
        ("bounds", "a run of more rows than the crew has tokens", {**RUN, "rows": tokens + 1}),
        ("bounds", "a run without a description", {**RUN, "about": 0}),
        (
            "bounds",
            "a run with a description that no micro-batch has",
            {**RUN, "about": 48 * (tokens + 16) + 1},
        ),
        ("bounds", "a checkpoint of stage 8", {**WANT, "of": 8}),
        ("bounds", "the rest of a checkpoint without its root", {**WANT, "at": 5}),
        ("bounds", "layers from byte 1 on", {**WANT, "what": "layers", "at": 1, "root": ROOT}),
        ("bounds", "a chunk of nothing", message("chunk", at=0, length=0)),
        ("bounds", "a chunk of 1,048,577 bytes", message("chunk", at=0, length=2**20 + 1)),
        ("bounds", "state of stage 8", {**HAVE, "place": [CREW, 8, 40]}),
        ("bounds", "a squared norm below 0", {**HAVE, "squared_norm": -1.0}),
    ):
        yield wrong(reason, name, framed(header))


def derivations() -> Iterator[Vector]:
    for shapes in ([], [[100, 8]], [[100, 8], [8, 8], [8]]):
        layout = make_layout((f"tensor{n}", shape, "float32") for n, shape in enumerate(shapes))
        for form in ("full", "small"):
            given: dict[str, Any] = {"shapes": shapes, "form": form}
            name = f"bytes of a checkpoint of {len(shapes)} tensors, {form}"
            yield derived(name, "state_bytes", given, state_bytes(layout, form))  # type: ignore[arg-type]
    for name, base, now in COPIES:
        yield derived(name, "copy_plain", {"base": base, "now": now}, copy_plain(base, now))
    for body in (b"", b"abc"):
        given = {"body": body.hex()}
        yield derived(f"root of {len(body)} bytes", "state_root", given, hash_body(body).hex())
