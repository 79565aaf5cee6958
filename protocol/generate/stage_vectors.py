"""Vectors of frames between members of a crew, for `vectors.py`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import Vector, accepted, changed, derived, pack, rejected, without
from swarmnode.errors import BadMessage
from swarmnode.stages.specs import Routes
from swarmnode.stages.stage_frames import Fence, Participant, Place

CREW = bytes(range(16))
WAVE = 10
PLACE = [CREW, 1, 40]
HIDDEN, VOCAB, TOKENS = 4, 50, 64
GIVEN: dict[str, Any] = {"hidden": HIDDEN, "vocab": VOCAB, "tokens": TOKENS, "codec": "float32"}
"""Crew in which the frames of these vectors are read."""

ids = lambda *values: struct.pack(f"<{len(values)}I", *values)
floats = lambda *values: struct.pack(f"<{len(values)}f", *values)
NAN, INF = float("nan"), float("inf")

LOSS: dict[str, Any] = {
    "sampler_logprobs": floats(-0.5, -1.0, -0.25),
    "advantages": floats(1.0, -1.0),
    "weights": floats(1.0, 0.5),
    "normalizer": 12.0,
    "loss_type": "dapo",
}
BATCH: dict[str, Any] = {
    "prompt_lengths": [2],
    "prompt_ids": ids(7, 49),
    "prompt_of": [0, 0],
    "completion_lengths": [1, 2],
    "completion_ids": ids(3, 4, 5),
    "temperature": 1.0,
    "loss": LOSS,
}
ROWS = 3
"""Rows of BATCH: two tokens of the prompt, and the completion token that has a successor."""
WAVE_ABOUT: dict[str, Any] = {
    "lengths": [2, 1],
    "ids": ids(7, 8, 9),
    "num_generations": 2,
    "max_tokens": 8,
    "temperature": 1.0,
    "top_p": 0.95,
    "seed": 2**63 - 1,
}
VALUES = tuple(0.25 * n - 1 for n in range(ROWS * HIDDEN))


def header(tag: str, place: Any = PLACE, **fields: Any) -> dict[str, Any]:
    return {"type": tag, "place": place, **fields}


def framed(head: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    data = head if isinstance(head, bytes) else pack(head)
    return struct.pack(">I", len(data)) + data + body


def learn(about: dict[str, Any] = BATCH, values: bytes = floats(*VALUES), **fields: Any) -> bytes:
    """Return a `forward` with `about`, otherwise valid."""
    return framed(header("forward", **{**forward_fields(about), **fields}), pack(about) + values)


def forward_fields(about: dict[str, Any]) -> dict[str, Any]:
    return {
        "micro_batch": 9,
        "purpose": "learn",
        "codec": "float32",
        "rows": ROWS,
        "about": len(pack(about)),
    }


def prefill_fields(about: dict[str, Any]) -> dict[str, Any]:
    return {"wave": WAVE, "codec": "float32", "rows": ROWS, "about": len(pack(about))}


def good(
    name: str, head: dict[str, Any], body: bytes = b"", codec: str = "", /, **value: Any
) -> Vector:
    """Return the vector of a frame. codec: the crew's, if the header's is another or has none."""
    crew = {**GIVEN, "codec": codec or head.get("codec", "float32")}
    frame = accepted(name, "stage_frame", framed(head, body), {"header": head, **value})
    return {**frame, "given": crew}


def bad(reason: str, name: str, frame: bytes, **given: Any) -> Vector:
    return {**rejected(reason, name, frame, "stage_frame"), "given": {**GIVEN, **given}}


def bads(*rows: tuple[str, str, bytes]) -> Iterator[Vector]:
    for row in rows:
        yield bad(*row)


SMALL: list[dict[str, Any]] = [
    header("learnt", micro_batch=9, loss=-0.5, entropy=2.5, tokens=3.0, weights=2.5, squares=2.25),
    header("drop", wave=WAVE),
    header("failed", number=2**63 - 1, reason="not_finite"),
    header("acknowledge", attempt=2, refused=None, squared_norm=0.125),
    header("acknowledge", attempt=2, refused="not_finite", squared_norm=0.0),
    header("commit", attempt=2, clip=1.0, learning_rate=1e-6),
    header("abort", attempt=2),
    header("done", attempt=0),
    header("failed", number=0, reason="device"),
    header("propose", attempt=2, micro_batches=[0, 9, 2**63 - 1]),
    header("propose", attempt=1, micro_batches=list(range(1024))),
]
"""Headers of frames without a body."""
PROPOSE = SMALL[9]


def frames() -> Iterator[Vector]:
    for number, message in enumerate(SMALL):
        yield good(f"{message['type']} {number}", message)
    largest = [CREW, 7, 2**63 - 1]
    yield good("largest place", header("done", largest, attempt=2**63 - 1))

    values, few = {"values": floats(*VALUES)}, {"values": floats(*VALUES[:8])}
    for name, about, fields in (
        ("forward", BATCH, {}),
        ("forward to score", {**BATCH, "loss": None}, {"purpose": "score"}),
        (
            "forward with another loss",
            {**BATCH, "loss": {**LOSS, "loss_type": "grpo"}},
            {},
        ),
    ):
        head = header("forward", **{**forward_fields(about), **fields})
        yield good(name, head, pack(about) + floats(*VALUES), about=about, **values)
    bits = struct.pack(
        "<12H", *(struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in VALUES)
    )
    head = header("forward", **{**forward_fields(BATCH), "codec": "bfloat16"})
    yield good("forward in bfloat16", head, pack(BATCH) + bits, "bfloat16", about=BATCH, **values)
    scales, codes = (0.1, 0.0, 3.0), (127, -127, 1, 0, 5, -5, 0, 0, 1, 2, 3, 4)
    head = header("forward", **{**forward_fields(BATCH), "codec": "int8"})
    single = [struct.unpack("<f", floats(s))[0] for s in scales]
    scaled = floats(*(single[n // 4] * q + 0.0 for n, q in enumerate(codes)))
    body = pack(BATCH) + floats(*scales) + struct.pack("<12b", *codes)
    yield good("forward in int8", head, body, "int8", about=BATCH, values=scaled)
    head = header("backward", micro_batch=9, codec="int8", rows=1)
    body = floats(0.5, 0.5) + struct.pack("<96b", *([1] * 96))
    wide = good("blocks of 48, where 64 does not divide 96", head, body, values=floats(*[0.5] * 96))
    yield {**wide, "given": {**GIVEN, "hidden": 96}}
    head = header("backward", micro_batch=9, codec="float32", rows=ROWS)
    yield good("backward", head, floats(*VALUES), "int8", **values)

    head = header("prefill", **prefill_fields(WAVE_ABOUT))
    yield good("prefill", head, pack(WAVE_ABOUT) + floats(*VALUES), about=WAVE_ABOUT, **values)
    head = header("decode", wave=WAVE, codec="float32", rows=2)
    yield good("decode", head, ids(1, 3) + floats(*VALUES[:8]), names=[1, 3], **few)
    head = header("tokens", wave=WAVE, rows=2)
    told: dict[str, Any] = {"ids": [49, 0], "logprobs": [-0.5, 0.0]}
    yield good("tokens", head, ids(49, 0) + floats(-0.5, 0.0), **told)
    head = header("scores", micro_batch=9, rows=2)
    told = {"logprobs": [-0.5, -1.5], "entropies": [2.0, 0.0]}
    yield good("scores", head, floats(-0.5, -1.5, 2.0, 0.0), **told)
    head = header("embedding", attempt=2, first=48, rows=2)
    yield good("embedding", head, floats(*VALUES[:8]), "int8", **few)


def hostile_headers() -> Iterator[Vector]:
    done, commit, propose = header("done", attempt=1), SMALL[5], PROPOSE
    acknowledge, learnt = SMALL[3], SMALL[0]
    backward = header("backward", micro_batch=9, codec="float32", rows=1)
    forward = header("forward", **forward_fields(BATCH))
    embedding = header("embedding", attempt=2, first=49, rows=2)
    frame, packed = framed(done), pack(done)
    deep = b"\x82" + pack("type") + pack("done") + pack("place") + b"\x91" * 16_000
    yield from bads(
        ("oversize", "an empty header", bytes(4)),
        ("oversize", "a header of 16,385 bytes", struct.pack(">I", 16_385) + bytes(16_385)),
        ("oversize", "a header of 4 GiB", b"\xff\xff\xff\xff"),
        ("truncated", "three bytes", bytes(3)),
        ("truncated", "half a header", frame[:-3]),
        ("truncated", "a missing body", learn()[: -4 * ROWS * HIDDEN]),
        ("truncated", "a body without its last byte", learn()[:-1]),
        ("size", "a proposal with a body", framed(propose, bytes(16))),
        ("schema", "an unknown purpose", learn(purpose="poison")),
    )
    for reason, name, head in (
        ("malformed", "reserved byte c1", b"\xc1"),
        ("malformed", "attempt in two bytes", packed[:-1] + b"\xcc\x01"),
        ("malformed", "place in another form", packed.replace(b"place\x93", b"place\xdc\x00\x03")),
        ("schema", "no type", without(done, "type")),
        ("schema", "an unknown type", header("average", attempt=1)),
        ("schema", "a place of two", header("done", PLACE[:2], attempt=1)),
        ("schema", "a place of four", header("done", [*PLACE, 0], attempt=1)),
        ("schema", "an unknown codec", {**backward, "codec": "int4"}),
        ("schema", "16,000 nested arrays for a place", deep),
        ("bounds", "a crew of 15 bytes", header("done", [CREW[1:], *PLACE[1:]], attempt=1)),
        ("bounds", "a crew of 32 bytes", header("done", [CREW * 2, *PLACE[1:]], attempt=1)),
        ("bounds", "stage 8", header("done", [CREW, 8, 40], attempt=1)),
        ("bounds", "no rows", header("tokens", wave=WAVE, rows=0)),
        ("bounds", "more rows than tokens", {**backward, "rows": TOKENS + 1}),
        ("bounds", "2**62 rows", {**backward, "rows": 2**62}),
        ("bounds", "no description", {**forward, "about": 0}),
        ("bounds", "a description of 3,841 bytes", {**forward, "about": 3841}),
        ("bounds", "rows of an embedding beyond its last", embedding),
        ("bounds", "a step of nothing", {**propose, "micro_batches": []}),
        ("bounds", "a micro-batch twice", {**propose, "micro_batches": [1, 2, 2]}),
        ("bounds", "micro-batches that fall", {**propose, "micro_batches": [2, 1]}),
        ("bounds", "micro-batch -1 in a step", {**propose, "micro_batches": [-1, 1]}),
        ("bounds", "1025 micro-batches", {**propose, "micro_batches": list(range(1025))}),
        ("bounds", "a squared norm below 0", {**acknowledge, "squared_norm": -1.0}),
        ("bounds", "a learning rate that climbs", {**commit, "learning_rate": -1e-6}),
        ("bounds", "a clip factor that makes gradients larger", {**commit, "clip": 1.5}),
        ("bounds", "fewer than no tokens", {**learnt, "tokens": -1.0}),
        ("bounds", "squares below 0", {**learnt, "squares": -1.0}),
    ):
        yield bad(reason, name, framed(head))


def hostile_bodies() -> Iterator[Vector]:
    short, two = floats(*VALUES[:8]), {"prompt_lengths": [1, 1], "prompt_ids": ids(7, 8)}
    yield from bads(
        ("size", "a byte behind the body", learn() + b"\0"),
        ("schema", "a description that is a number", learn_raw(b"\0")),
        ("malformed", "a description and a byte", learn_raw(pack(BATCH) + b"\0")),
        ("malformed", "a description cut short", learn_raw(pack(BATCH)[:-1])),
        ("schema", "a description of a wave", learn(WAVE_ABOUT)),
        ("schema", "a description with a reward", learn({**BATCH, "reward": 1.0})),
        ("shape", "rows beyond the description", learn(values=short, rows=2)),
        ("bounds", "a prompt that nothing answers", learn({**BATCH, **two})),
        ("bounds", "prompts out of order", learn({**BATCH, **two, "prompt_of": [1, 0]})),
        (
            "bounds",
            "a prompt twice",
            learn({**BATCH, **two, "prompt_ids": ids(7, 7), "prompt_of": [0, 1]}),
        ),
        ("bounds", "a loss to score", learn(purpose="score")),
    )
    yield bad("schema", "activations in a codec that is not the crew's", learn(), codec="int8")
    for reason, name, path, value in (
        ("schema", "an unknown loss", "loss.loss_type", "mse"),
        ("schema", "no normalizer", "loss.normalizer", None),
        ("shape", "ids for another length", "prompt_ids", ids(7, 48, 9)),
        ("shape", "one id short", "completion_ids", ids(3, 4)),
        ("shape", "one log-probability short", "loss.sampler_logprobs", floats(-0.5, -1.0)),
        (
            "shape",
            "three advantages for two completions",
            "loss.advantages",
            floats(1.0, -1.0, 0.0),
        ),
        ("shape", "no weights", "loss.weights", b""),
        ("bounds", "ids of seven bytes", "prompt_ids", ids(7, 49)[:-1]),
        ("bounds", "a token id of vocab", "completion_ids", ids(3, 4, VOCAB)),
        ("bounds", "token id 2**32 - 1", "prompt_ids", ids(7, 2**32 - 1)),
        ("bounds", "no prompts", "prompt_lengths", []),
        ("bounds", "a prompt of no tokens", "prompt_lengths", [0, 2]),
        ("bounds", "a completion of -1 tokens", "completion_lengths", [-1, 4]),
        ("bounds", "a completion of 2**40 tokens", "completion_lengths", [1, 2**40]),
        ("bounds", "an answer to a missing prompt", "prompt_of", [0, 1]),
        ("bounds", "an answer to prompt -1", "prompt_of", [0, -1]),
        ("bounds", "three owners of two completions", "prompt_of", [0, 0, 0]),
        ("bounds", "no loss to learn from", "loss", None),
        ("bounds", "temperature 0", "temperature", 0.0),
        ("bounds", "a normalizer of 0", "loss.normalizer", 0.0),
        ("not_finite", "a temperature of nan", "temperature", NAN),
        ("not_finite", "a normalizer of infinity", "loss.normalizer", INF),
        ("not_finite", "an advantage of infinity", "loss.advantages", floats(INF, 0.0)),
        ("not_finite", "a weight of nan", "loss.weights", floats(1.0, NAN)),
        (
            "not_finite",
            "a log-probability of nan",
            "loss.sampler_logprobs",
            floats(-0.5, NAN, -0.25),
        ),
    ):
        yield bad(reason, name, learn(changed(BATCH, path, value)))
    many = {"prompt_lengths": [1], "prompt_ids": ids(7), "prompt_of": [0] * 12, "loss": None}
    many |= {"completion_lengths": [1] * 11 + [30], "completion_ids": ids(*[3] * 41)}
    frame = learn({**BATCH, **many}, values=bytes(30 * 4 * HIDDEN), rows=30, purpose="score")
    yield bad("bounds", "373 padded tokens of at most 192", frame)
    learnt = header("backward", micro_batch=9, codec="float32", rows=ROWS)
    rough, small = ({**learnt, "codec": codec, "rows": 1} for codec in ("bfloat16", "int8"))
    tied = header("embedding", attempt=2, first=0, rows=1)
    scores, tokens = header("scores", micro_batch=9, rows=1), header("tokens", wave=WAVE, rows=1)
    for value in (NAN, INF):
        wrong = learn(values=floats(*VALUES[:-1], value))
        yield bad("not_finite", f"an activation of {value}", wrong)
        gradient = framed(learnt, floats(value, *VALUES[1:]))
        yield bad("not_finite", f"a gradient of {value}", gradient)
    for reason, name, head, body in (
        ("not_finite", "a bfloat16 of nan", rough, struct.pack("<4H", 0x3F80, 0x7FC0, 0, 0)),
        ("not_finite", "a scale of nan", small, floats(NAN) + bytes(4)),
        ("not_finite", "a scale that overflows", small, floats(3e38) + bytes((2, 0, 0, 0))),
        ("bounds", "a scale below 0", small, floats(-1.0) + bytes(4)),
        ("bounds", "a code of -128", small, floats(1.0) + bytes((0x80, 0, 0, 0))),
        ("not_finite", "an embedding's gradient of nan", tied, floats(0.0, NAN, 0.0, 0.0)),
        ("not_finite", "an entropy of nan", scores, floats(-1.0, NAN)),
        ("not_finite", "a drawn token of nan", tokens, ids(3) + floats(NAN)),
        ("bounds", "a drawn token above certainty", tokens, ids(3) + floats(0.5)),
        ("bounds", "a drawn token outside the vocabulary", tokens, ids(VOCAB) + floats(-0.5)),
    ):
        yield bad(reason, name, framed(head, body))

    for reason, name, fields in (
        ("shape", "a wave's ids for other lengths", {"ids": ids(7, 8)}),
        ("shape", "a wave with other rows", {"lengths": [1, 1], "ids": ids(7, 8)}),
        ("bounds", "a wave of no prompts", {"lengths": [], "ids": b""}),
        ("bounds", "a wave without completions", {"num_generations": 0}),
        ("bounds", "more tokens than the crew's", {"max_tokens": 15}),
        ("bounds", "2**40 tokens", {"max_tokens": 2**40}),
        ("bounds", "no tokens", {"max_tokens": 0}),
        ("bounds", "a seed of 2**63", {"seed": 2**63}),
        ("bounds", "a token id outside the vocabulary", {"ids": ids(7, 8, VOCAB)}),
        ("bounds", "a wave's temperature below 0", {"temperature": -1.0}),
        ("bounds", "top-p 0", {"top_p": 0.0}),
        ("bounds", "top-p above 1", {"top_p": 1.01}),
        ("not_finite", "a wave's temperature of nan", {"temperature": NAN}),
        ("not_finite", "top-p of infinity", {"top_p": INF}),
        ("schema", "a wave of an unknown kind", {"kind": "beam"}),
    ):
        about = {**WAVE_ABOUT, **fields}
        frame = framed(header("prefill", **prefill_fields(about)), pack(about) + floats(*VALUES))
        yield bad(reason, name, frame)


def learn_raw(about: bytes) -> bytes:
    return framed(
        header("forward", **{**forward_fields(BATCH), "about": len(about)}), about + floats(*VALUES)
    )


def routes() -> Iterator[Vector]:
    learn = [(3, False, 1), (4, True, 1), (4, True, 2), (5, True, 7), (8, True, 9)]
    for stages, swapped, number, purpose in [
        *((*case, "learn") for case in learn),
        (4, True, 1, "score"),
    ]:
        output = [[hop.stage, hop.part] for hop in Routes(stages, swapped).route(number, purpose)]  # type: ignore[arg-type]
        given = {"stages": stages, "swapped": swapped, "micro_batch": number, "purpose": purpose}
        name = (
            f"way of micro-batch {number} to {purpose} through {stages}"
            f" stages{', swapped' if swapped else ''}"
        )
        yield derived(name, "stage_route", given, output)


def fences() -> Iterator[Vector]:
    crew = {"crew": CREW.hex(), "stages": 3}
    cases: list[tuple[str, int, int, list[Any], bool]] = [
        ("of now", 1, 40, PLACE, False),
        ("another crew", 1, 40, [b"\x99" * 16, *PLACE[1:]], False),
        ("another stage than the stream's", 2, 40, PLACE, False),
        ("a stage beyond the crew", 3, 40, [CREW, 3, 40], False),
        ("the step before", 1, 40, [CREW, 1, 39], False),
        ("the step after", 1, 40, [CREW, 1, 41], False),
        ("a commit of the step before", 1, 40, [CREW, 1, 39], True),
        ("a commit of another crew", 1, 40, [b"\x99" * 16, 1, 40], True),
        ("of another crew and step", 1, 40, [b"\x99" * 16, 1, 9], False),
    ]
    for name, sender, step, place, control in cases:
        output = Fence(Place(CREW, 0, step), 3).check(
            Place(*place), sender, None if control else step
        )
        told = [place[0].hex(), *place[1:]]
        given = {"crew": crew, "sender": sender, "step": step, "place": told, "control": control}
        yield derived(f"a frame of {name}", "stage_fence", given, output)


COMMITS: dict[str, str] = {
    "a step": "propose 1 of 1 2, gradient 1, gradient 2, commit 1",
    "two steps": ("propose 1 of 1, gradient 1, commit 1, propose 2 of 2, gradient 2, commit 2"),
    "a gradient before its proposal": "gradient 1, propose 1 of 1",
    "gradients twice, unasked, and after the acknowledgement": (
        "propose 1 of 1 2, gradient 1, gradient 1, gradient 3, gradient 2, gradient 4"
    ),
    "a gradient that is not finite": ("propose nan 1 of 1, gradient 1, abort 1, propose 2 of 2"),
    "an abort before all gradients are here, and another attempt": (
        "propose 1 of 1 2, gradient 1, abort 1, gradient 2, propose 2 of 3, gradient 3, commit 2"
    ),
    "an abort after the acknowledgement": "propose 1 of 1, gradient 1, abort 1",
    "a commit before all gradients are here": "propose 1 of 1, commit 1",
    "a commit of another attempt": "propose 3 of 1, gradient 1, commit 2",
    "a commit twice": "propose 1 of 1, gradient 1, commit 1, commit 1",
    "a commit without a proposal": "commit 0",
    "an abort without a proposal": "abort 0",
    "an abort of another attempt": "propose 3 of 1, abort 2",
    "a proposal before the last one is decided": "propose 1 of 1, propose 2 of 2",
    "an attempt number that was used": "propose 2 of 1, abort 2, propose 2 of 1",
}
"""Name → events: `propose`, an attempt and its micro-batches (`nan`: the norm of their gradients is
not finite), `gradient` and its micro-batch, `commit` or `abort` and an attempt. Garbage ends the
crew, so it is last."""


def _event(text: str) -> list[Any]:
    kind, *words = text.split()
    if kind != "propose":
        return [kind, int(words[0])]
    finite = words[0] != "nan"
    attempt, _, *micro_batches = words[not finite :]
    norm = 2.0 ** -int(attempt) if finite else None
    return [kind, int(attempt), [int(number) for number in micro_batches], norm]


def commits() -> Iterator[Vector]:
    for name, texts in COMMITS.items():
        events = [_event(text) for text in texts.split(", ")]
        given = {"step": 5, "events": events}
        yield derived(f"taking a step: {name}", "stage_commit", given, answers(5, events))


def answers(step: int, events: list[list[Any]]) -> list[list[Any]]:
    """Return the answers of `wire.Participant` in the form of the vectors."""
    stage, norms = Participant(step), dict[int, Any]()
    return [_answer(stage, norms, *event) for event in events]


def _answer(stage: Participant, norms: dict[int, Any], event: str, *given: Any) -> list[Any]:
    try:
        match event:
            case "gradient":
                return _accumulate(stage, norms, given[0])
            case "propose":
                attempt, micro_batches, norms[given[0]] = given
                stage.propose(attempt, micro_batches)
                return []
            case "commit":
                stage.commit(given[0])
                return ["step", "done", given[0]]
        stage.abort(given[0])
    except BadMessage:
        return ["garbage"]
    return ["drop"]


def _accumulate(stage: Participant, norms: dict[int, Any], micro_batch: int) -> list[Any]:
    if not stage.may_accumulate(micro_batch):
        return ["ignored"]
    stage.record_gradient(micro_batch)
    if not stage.complete:
        return ["added"]
    if norms[stage.attempt] is None:
        return ["added", "acknowledge", stage.attempt, "not_finite", 0.0]
    stage.acknowledged = True
    return ["added", "acknowledge", stage.attempt, None, norms[stage.attempt]]
