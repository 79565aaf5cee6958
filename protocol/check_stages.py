"""04-stages, sections 4 to 9: frames between the members of a crew, the fence, routes, and
steps."""

import itertools
import math
import struct

from check_frames import BYTES, COUNTS, FLOATS, code, counter, decode, require, shapes

TEXT = code("04-stages.md")

HEADERS = shapes(
    "stage",
    *("forward", "backward", "learnt", "scores", "prefill", "decode", "tokens", "drop", "failed"),
    *("embedding", "propose", "acknowledge", "commit", "abort", "done"),
)
MICRO_BATCH, WAVE = shapes("stage", "micro_batch", "wave")
F32_OVERFLOW = (2 - 2**-24) * 2.0**127
"""The smallest number that rounds to an infinite f32."""


def read_frame(data, crew):
    """Read the frame `data` in a crew with `hidden`, `vocab`, `tokens` and `codec`."""
    header, body = read_parts(data, HEADERS, lambda header: body_bytes(header, crew))
    return {"header": header, **read_body(header, body, crew)}


def read_parts(data, headers, body_bytes):
    """Return header and body of a frame. body_bytes: checks the header and returns the length of
    the body."""
    require(len(data) >= 4, "truncated")
    length = int.from_bytes(data[:4], "big")
    require(0 < length <= BYTES["stage_header"], "oversize")
    require(len(data) >= 4 + length, "truncated")
    header = decode(data[4 : 4 + length], BYTES["stage_header"], *headers)
    place, body = header["place"], data[4 + length :]
    require(len(place[0]) == BYTES["crew_prefix"] and 0 <= place[1] < COUNTS["stages"])
    counter(place[2])
    size = body_bytes(header)
    require(len(body) >= size, "truncated")
    require(len(body) == size, "size")
    return header, body


def body_bytes(header, crew):
    """Check a header and return the length of its body (section 4)."""
    rows, numbers = header.get("rows", 1), ("micro_batch", "wave", "number", "attempt")
    counter(*(header.get(field, 0) for field in numbers))
    require(1 <= rows <= crew["tokens"])
    require(1 <= header.get("about", 1) <= BYTES["stage_about_item"] * (crew["tokens"] + 16))
    for field, value in header.items():
        if isinstance(value, float):
            require(math.isfinite(value), "not_finite")
            require(value >= 0 or field in ("loss", "entropy"))
            require(value <= 1 or field != "clip")
    if header["type"] == "propose":
        ids = header["micro_batches"]
        require(
            1 <= len(ids) <= COUNTS["micro_batches"]
            and all(a < b for a, b in itertools.pairwise(ids))
        )
        counter(*ids)
    if header["type"] == "embedding":
        require(0 <= header["first"] <= crew["vocab"] - rows)
    return TEXT.body_bytes(header, crew["hidden"])


def read_body(header, body, crew):
    """Return what a body holds: {"about", "values" (activations as f32), "ids", "logprobs", …}
    (sections 6 and 7)."""
    tag, rows = header["type"], header.get("rows", 0)
    if tag in ("forward", "prefill"):
        read = read_micro_batch if tag == "forward" else read_wave
        about = read(body[: header["about"]], rows, crew, header.get("purpose"))
        values = activations(body[header["about"] :], header, crew, crew["codec"])
        return {"about": about, "values": values}
    if tag == "decode":
        values = activations(body[4 * rows :], header, crew, crew["codec"])
        return {"names": numbers(body[: 4 * rows], "I"), "values": values}
    if tag in ("backward", "embedding"):
        return {"values": activations(body, header, crew, header.get("codec", "float32"))}
    if tag == "tokens":
        ids, logprobs = token_ids(body[: 4 * rows], rows, crew), finite(body[4 * rows :], rows)
        require(all(logprob <= FLOATS["logprob_slack"] for logprob in logprobs))
        return {"ids": ids, "logprobs": [min(logprob, 0.0) + 0.0 for logprob in logprobs]}
    if tag == "scores":
        values = finite(body, 2 * rows)
        return {"logprobs": values[:rows], "entropies": values[rows:]}
    return {}


def activations(body, header, crew, codec):
    """Return numbers as little-endian f32, in hex."""
    require(header.get("codec", "float32") == codec, "schema")
    count = header["rows"] * crew["hidden"]
    if codec == "float32":
        values = numbers(body, "f")
    elif codec == "bfloat16":
        values = numbers(
            b"".join(b"\0\0" + body[at : at + 2] for at in range(0, len(body), 2)), "f"
        )
    else:
        block = TEXT.int8_block(crew["hidden"])
        scales, codes = (
            numbers(body[: 4 * (count // block)], "f"),
            struct.unpack(f"<{count}b", body[4 * (count // block) :]),
        )
        require(all(map(math.isfinite, scales)), "not_finite")
        require(all(scale >= 0 for scale in scales) and min(codes) >= -127)
        values = [scales[at // block] * code for at, code in enumerate(codes)]
    require(
        all(math.isfinite(value) and abs(value) < F32_OVERFLOW for value in values), "not_finite"
    )
    return struct.pack(f"<{count}f", *(value + 0.0 for value in values))


def read_micro_batch(data, rows, crew, purpose):
    batch = decode(data, len(data), MICRO_BATCH)
    prompts, completions = batch["prompt_lengths"], batch["completion_lengths"]
    described = sum(prompts) + sum(completions) - len(completions)
    require(prompts and completions and TEXT.micro_batch_fits(batch, described, crew["tokens"]))
    require(rows == described, "shape")
    ids = token_ids(batch["prompt_ids"], sum(prompts), crew)
    ends = list(itertools.accumulate(prompts, initial=0))
    require(len({tuple(ids[a:b]) for a, b in itertools.pairwise(ends)}) == len(prompts))
    token_ids(batch["completion_ids"], sum(completions), crew)
    positive(batch["temperature"])
    loss = batch["loss"]
    require((loss is not None) == (purpose == "learn"))
    if loss is not None:
        finite(loss["sampler_logprobs"], sum(completions))
        finite(loss["advantages"], len(completions))
        finite(loss["weights"], len(completions))
        positive(loss["normalizer"])
    return batch


def read_wave(data, rows, crew, _):
    wave = decode(data, len(data), WAVE)
    described = sum(wave["lengths"])
    counter(wave["seed"])
    require(wave["lengths"] and 1 <= wave["num_generations"] <= crew["tokens"])
    require(TEXT.wave_fits(wave, described, crew["tokens"]))
    require(rows == described, "shape")
    token_ids(wave["ids"], rows, crew)
    require(math.isfinite(wave["temperature"]) and math.isfinite(wave["top_p"]), "not_finite")
    require(wave["temperature"] >= 0 and 0 < wave["top_p"] <= 1)
    return wave


def numbers(data, kind):
    require(len(data) % 4 == 0)
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))


def token_ids(data, count, crew):
    ids = numbers(data, "I")
    require(len(ids) == count, "shape")
    require(all(token < crew["vocab"] for token in ids))
    return ids


def finite(data, count):
    values = numbers(data, "f")
    require(len(values) == count, "shape")
    require(all(map(math.isfinite, values)), "not_finite")
    return values


def positive(*values):
    require(all(map(math.isfinite, values)), "not_finite")
    require(all(value > 0 for value in values))


def stage_fence(crew, sender, step, place, control):
    """Return the reason why a member at `step` drops a frame from `sender`, or None (section 4).
    crew: the first half of its id, and its number of stages."""
    kind = "commit" if control else "forward"
    return TEXT.fence(crew["crew"], crew["stages"], sender, step, kind, place)


def stage_route(stages, swapped, micro_batch, purpose):
    """Return [stage, part of it] of each visit of a micro-batch (section 5)."""
    return [list(hop) for hop in TEXT.route(stages, swapped, micro_batch, purpose)]


def stage_commit(step, events):
    """Return the answers of a stage that has taken `step` steps to `events` (section 9)."""
    stage, norms = TEXT.Participant(step), {}
    return [commit_answer(stage, norms, *event) for event in events]


def commit_answer(stage, norms, event, *given):
    """Return a list of actions; ["garbage"] for a message that ends the crew."""
    try:
        if event == "gradient":
            return gradient_answer(stage, norms, given[0])
        if event == "propose":
            attempt, micro_batches, norms[attempt] = given
            stage.propose(attempt, micro_batches)
            return []
        getattr(stage, event)(given[0])
    except ValueError:
        return ["garbage"]
    return ["step", "done", given[0]] if event == "commit" else ["drop"]


def gradient_answer(stage, norms, micro_batch):
    if not stage.accumulate(micro_batch):
        return ["ignored"]
    if stage.missing:
        return ["added"]
    norm = norms[stage.attempt]
    if norm is None:
        return ["added", "acknowledge", stage.attempt, "not_finite", 0.0]
    stage.acknowledged = True
    return ["added", "acknowledge", stage.attempt, None, norm]


READERS = {"stage_frame": read_frame}
DERIVATIONS = {"stage_fence": stage_fence, "stage_commit": stage_commit, "stage_route": stage_route}
