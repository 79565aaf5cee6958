"""04-stages, sections 2 and 3: messages of membership, records, and the first message of a
stream."""

import math

import msgpack
from check_frames import BYTES, COUNTS, FLOATS, code, counter, decode, name, require, shape, shapes

TEXT = code("04-stages.md")
REQUESTS = shapes("crews", "offer", "propose", "heartbeat", "leave")
ANSWERS = shapes("crews", "accept", "refuse", "alive", "noted")
STREAM_OPEN = shape("stage_stream_open")


def read_message(frame, shapes):
    """Read a request or an answer of section 2.2."""
    message = decode(frame, BYTES["crews_message"], *shapes)
    if "crew" in message:
        require(len(message["crew"]) == BYTES["crew"])
    if "status" in message:
        counter(*message["status"][1:])
    if message["type"] == "offer":
        require(len(message["model"]) == BYTES["record_hash"])
        amounts(message["memory"], message["speed"])
        require(len(message["held_blocks"]) <= COUNTS["held_blocks"])
        [check_block(*block) for block in message["held_blocks"]]
    if message["type"] == "propose":
        check_record(message["record"])
    if message["type"] == "leave":
        require(len(message["reason"]) <= BYTES["crew_reason"])
        require(all(" " <= character <= "~" for character in message["reason"]))
    return message


def amounts(*values):
    require(all(map(math.isfinite, values)), "not_finite")
    require(all(0 <= value <= FLOATS["crew_amount"] for value in values))


def check_block(lineage, layers, stage, step, _where):
    """Check a held block (section 2.1)."""
    require(len(lineage) == BYTES["record_hash"])
    require(1 <= len(layers) <= COUNTS["stages"] and 0 <= stage < len(layers))
    require(all(1 <= count <= COUNTS["layers"] for count in layers))
    counter(step)


def check_record(record):
    """Check a record (section 2.1)."""
    require(all(len(record[field]) == BYTES["record_hash"] for field in ("lineage", "model")))
    require(len(record["nonce"]) == BYTES["crew_nonce"])
    counter(record["step"])
    require(1 <= len(record["members"]) <= COUNTS["stages"])
    for peer, layers in record["members"]:
        name(peer, BYTES["peer_id"])
        require(1 <= layers <= COUNTS["layers"])
    require(len({peer for peer, _ in record["members"]}) == len(record["members"]))


def crew_id(record):
    return TEXT.crew_id(msgpack.packb(record))


def read_stream_open(frame, given):
    """Judge a stream by its first message `frame`, from `given["peer"]` to a member (section 3)."""
    opened, crew = decode(frame, BYTES["stage_open"], STREAM_OPEN), given["crew"]
    require(opened["crew"].hex() == crew["crew"], "crew")
    require(
        opened["to_stage"] == crew["stage"] and 0 <= opened["from_stage"] < crew["stage"], "stage"
    )
    require(crew["members"][opened["from_stage"]] == given["peer"], "peer")
    return opened


def unhexed(record):
    """Return a record with its bytes decoded from hex."""
    return {
        field: bytes.fromhex(value) if field in ("lineage", "model", "nonce") else value
        for field, value in record.items()
    }


READERS = {
    "stage_stream_open": read_stream_open,
    "crews_request": lambda frame, domain, swarm: read_message(frame, REQUESTS),
    "crews_answer": lambda frame, domain, swarm: read_message(frame, ANSWERS),
}
DERIVATIONS = {"crew_id": lambda record: crew_id(unhexed(record)).hex()}
