"""The vectors about state between members of a crew: part of what `vectors.py` writes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from protocol.generate.frames import Vector, accepted, pack, pairs, rejected, without
from protocol.generate.stage_vectors import CREW, GIVEN, PLACE
from swarmnode.stages.transfer import encode_copy
from swarmnode.stages.wire import StageSpec, activation_bytes, root_of, state_bytes
from swarmnode.weights.layout import make_layout

ROOT = b"\x46" * 32
HASH = b"\x47" * 32
NAN = float("nan")


def message(tag: str, **fields: Any) -> dict[str, Any]:
    return {"type": tag, "place": PLACE, "request": 5, **fields}


HAVE = message(
    "have",
    what="shadow",
    step=40,
    size=24_576,
    root=ROOT,
    hash=HASH,
    form="exact",
    squared_norm=0.5,
    factor=1.1,
)
RUN = message("run", codec="float32", rows=2, about=5)
HOLDS = message(
    "holds",
    loaded=True,
    rung=None,
    exhausted=False,
    shadow=40,
    root=ROOT,
    hash=HASH,
    ends=None,
    probes=38,
)
GOOD: list[dict[str, Any]] = [
    message("ask"),
    message("want", what="shadow", of=1, at=2**20, until=None),
    message("want", what="shadow", of=1, at=2**20, until=2**20 + 1),
    HOLDS,
    message(
        "holds",
        loaded=False,
        rung=2,
        exhausted=True,
        shadow=None,
        root=b"",
        hash=b"",
        ends=0,
        probes=None,
    ),
    *(
        message("want", what=what, of=2, at=0, until=None)
        for what in ("shadow", "layers", "tied", "ends", "probes", "edges", "copy")
    ),
    HAVE,
    {**HAVE, "what": "ran", "hash": b"", "form": "small", "factor": 2.0},
    {**HAVE, "what": "copy", "form": "small", "squared_norm": 0.0, "factor": 1.0},
    *(message("made", what=what) for what in ("shadow", "ends", "probes")),
    message("kept", step=40),
    *(
        message("lack", reason=reason)
        for reason in ("none", "loading", "refused", "busy", "failed")
    ),
]


COPIES = (
    (
        "a copy of what has not moved",
        [[0.5, -1.984375], [0.0, 0.0]],
        [[0.5, -1.984375], [0.0, 0.0]],
    ),
    (
        "a copy of what moved by a step and more, within its row's scale",
        [[0.5, -1.984375]],
        [[0.515625, -1.25]],
    ),
    (
        "a copy of rows that do not fit their scale any more",
        [[0.5, -1.984375], [0.0, 0.0]],
        [[3.96875, 1.0], [1.984375, -0.25]],
    ),
)


def copy_plain(base: list[list[float]], now: list[list[float]]) -> str:
    """A matrix's part of a copy before it is deflated, hex."""
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


def framed(head: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    data = head if isinstance(head, bytes) else pack(head)
    return struct.pack(">I", len(data)) + data + body


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

    def bad(
        reason: str, name: str, head: dict[str, Any] | bytes, body: bytes = b"", /, **fields: Any
    ) -> Vector:
        whole = head if isinstance(head, bytes) else framed({**head, **fields}, body)
        return wrong(reason, name, whole)

    yield bad("oversize", "no header", bytes(4))
    yield bad("oversize", "a header of 4 GiB", b"\xff\xff\xff\xff")
    yield bad("truncated", "two bytes", bytes(2))
    yield bad("truncated", "half a header", framed(HAVE)[:-9])
    yield bad("truncated", "a chunk that is not there", chunk)
    yield bad("truncated", "a chunk without its last byte", chunk, b"ab")
    yield bad("size", "a byte behind a chunk", chunk, b"abcd")
    yield bad("malformed", "a header and a byte", framed(pack(HAVE) + b"\0"))
    yield bad(
        "malformed",
        "a header in another order",
        framed(pairs([("type", "ask"), ("request", 5), ("place", PLACE)])),
    )
    yield bad("malformed", "a norm as integer", HAVE, squared_norm=1)
    yield bad("schema", "an unknown message", message("take"))
    yield bad(
        "schema", "something unknown to want", message("want", what="keys", of=2, at=0, until=None)
    )
    yield bad("schema", "what was run, wanted", message("want", what="ran", of=2, at=0, until=None))
    yield bad(
        "schema", "a shadow to an end that is not said", message("want", what="shadow", of=2, at=0)
    )
    yield bad("schema", "layers that are made", message("made", what="layers"))
    yield bad("schema", "an unknown form", HAVE, form="half")
    yield bad("schema", "an unknown codec", RUN, codec="int4")
    yield bad("schema", "an unknown excuse", message("lack", reason="tired"))
    yield bad("schema", "the address of a chunk", {**chunk, "address": 0}, b"abc")
    yield wrong("schema", "a have without a root", framed(without(HAVE, "root")))
    yield bad(
        "truncated", "a run without its last byte", RUN, bytes(5 + 4 * 2 * GIVEN["hidden"] - 1)
    )
    yield bad("bounds", "a run of no rows", RUN, rows=0)
    yield bad(
        "bounds", "a run of more rows than the crew has tokens", RUN, rows=GIVEN["tokens"] + 1
    )
    yield bad("bounds", "a run without a description", RUN, about=0)
    yield bad(
        "bounds",
        "a run with a description that no micro-batch has",
        RUN,
        about=48 * (GIVEN["tokens"] + 16) + 1,
    )
    yield bad(
        "bounds", "a shadow of stage 64", message("want", what="shadow", of=64, at=0, until=None)
    )
    yield bad(
        "bounds",
        "a shadow from byte -1 on",
        message("want", what="shadow", of=2, at=-1, until=None),
    )
    yield bad("bounds", "no byte of a shadow", message("want", what="shadow", of=2, at=5, until=5))
    yield bad("bounds", "a shadow to byte -1", message("want", what="shadow", of=2, at=0, until=-1))
    yield bad(
        "bounds", "a shadow to byte 2**63", message("want", what="shadow", of=2, at=0, until=2**63)
    )
    yield bad(
        "bounds", "layers from byte 1 on", message("want", what="layers", of=2, at=1, until=None)
    )
    yield bad(
        "bounds", "the first byte of a copy", message("want", what="copy", of=2, at=0, until=1)
    )
    yield bad("bounds", "a chunk of nothing", message("chunk", at=0, length=0))
    yield bad("bounds", "a chunk of 1,048,577 bytes", message("chunk", at=0, length=2**20 + 1))
    yield bad("bounds", "a chunk at -1", message("chunk", at=-1, length=3), b"abc")
    yield bad("bounds", "2**63 bytes", HAVE, size=2**63)
    yield bad("bounds", "a size of -1", HAVE, size=-1)
    yield bad("bounds", "a root of 31 bytes", HAVE, root=ROOT[1:])
    yield bad("bounds", "a shadow without a root", HOLDS, root=b"")
    yield bad("bounds", "a root without a shadow", HOLDS, shadow=None, hash=b"")
    yield bad("bounds", "a shadow without a step hash", HOLDS, hash=b"")
    yield bad("bounds", "a step hash without a shadow", {**HOLDS, "shadow": None, "root": b""})
    yield bad("bounds", "a shadow with half a step hash", HAVE, hash=HASH[:16])
    yield bad("bounds", "probes with a step hash", HAVE, what="probes")
    yield bad("bounds", "a shadow of step -1", HOLDS, shadow=-1)
    yield bad("bounds", "a request of -1", HAVE, request=-1)
    yield bad("bounds", "the whole id of a crew", HAVE, place=[CREW * 2, *PLACE[1:]])
    yield bad("bounds", "state of stage 64", HAVE, place=[CREW, 64, 40])
    yield bad("bounds", "a learning rate three times the crew's", HAVE, factor=3.0)
    yield bad("bounds", "a learning rate of 0", HAVE, factor=0.0)
    yield bad("bounds", "a squared norm below 0", HAVE, squared_norm=-1.0)
    yield bad("not_finite", "a factor of nan", HAVE, factor=NAN)
    yield bad("not_finite", "a squared norm of infinity", HAVE, squared_norm=float("inf"))


def derivations() -> Iterator[Vector]:
    for shapes in ([], [[100, 8]], [[100, 8], [8, 8], [8]]):
        layout = make_layout((f"tensor{n}", shape, "float32") for n, shape in enumerate(shapes))
        for form in ("exact", "small"):
            given: dict[str, Any] = {"shapes": shapes, "form": form}
            name = f"bytes of a shadow of {len(shapes)} tensors, {form}"
            yield {
                "name": name,
                "derive": "state_bytes",
                "input": given,
                "output": state_bytes(layout, form),
            }  # type: ignore[arg-type]
    for name, base, now in COPIES:
        yield {
            "name": name,
            "derive": "copy_plain",
            "input": {"base": base, "now": now},
            "output": copy_plain(base, now),
        }
    for body in (b"", b"abc"):
        name = f"root of {len(body)} bytes"
        yield {
            "name": name,
            "derive": "state_root",
            "input": {"body": body.hex()},
            "output": root_of(body).hex(),
        }
