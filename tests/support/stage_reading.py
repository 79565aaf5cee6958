"""Decode one frame completely, as a crew member does, and report the result as protocol/vectors
does."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from swarmnode.errors import BadMessage
from swarmnode.stages import state_messages
from swarmnode.stages.stage_frames import (
    BackwardFrame,
    DecodeFrame,
    EmbeddingFrame,
    ForwardFrame,
    Frame,
    FrameLimits,
    PrefillFrame,
    ScoresFrame,
    TokensFrame,
    read_frame,
    read_micro_batch,
    read_scores,
    read_tokens,
    read_wave,
)
from swarmnode.stages.trainer.stage_batches import decode
from swarmnode.wire.tensors import unpack_ids


class Bytes:
    """A stream that has `data` and then ends."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        some, self.data = self.data[:max_bytes], self.data[max_bytes:]
        return some


def read_whole(data: bytes, given: dict[str, Any]) -> dict[str, Any]:
    """Decode one frame. given: hidden, vocab, tokens, codec. Raise BadMessage with a reason of
    FRAME_REASONS."""
    limits = FrameLimits(given["hidden"], given["vocab"], given["tokens"])
    frame, body = _only_message(read_frame, data, limits)
    return {
        "header": _plain(frame),
        **_body(frame, body, limits, given["codec"]),
    }


def read_state(data: bytes, given: dict[str, Any]) -> dict[str, Any]:
    """Decode one message of a state stream; `given` as in `read_whole`. Raise BadMessage with a
    reason of STATE_REASONS."""
    limits = FrameLimits(given["hidden"], given["vocab"], given["tokens"])
    message, body = _only_message(state_messages.read_state, data, limits)
    return {"header": _plain(message), "body": body}


def _only_message(read: Any, data: bytes, limits: FrameLimits) -> tuple[Any, bytes]:
    stream = Bytes(data)
    got: tuple[Any, bytes] | None = trio.run(read, stream, limits)
    if got is None:
        raise BadMessage("truncated", "nothing")
    if stream.data:
        raise BadMessage("size", f"{len(stream.data)} bytes too many")
    return got


def _body(frame: Frame, body: bytes, limits: FrameLimits, codec: str) -> dict[str, Any]:
    match frame:
        case ForwardFrame():
            about = read_micro_batch(body[: frame.about], frame.rows, limits, frame.purpose)
            return {
                "about": _plain(about),
                "values": _values(body[frame.about :], frame.rows, limits, frame.codec, codec),
            }
        case PrefillFrame():
            wave = read_wave(body[: frame.about], frame.rows, limits)
            return {
                "about": _plain(wave),
                "values": _values(body[frame.about :], frame.rows, limits, frame.codec, codec),
            }
        case DecodeFrame():
            names, rest = unpack_ids(body[: 4 * frame.rows]).tolist(), body[4 * frame.rows :]
            return {"names": names, "values": _values(rest, frame.rows, limits, frame.codec, codec)}
        case BackwardFrame():
            return {"values": _values(body, frame.rows, limits, frame.codec, frame.codec)}
        case EmbeddingFrame():
            return {"values": _values(body, frame.rows, limits, "float32", "float32")}
        case TokensFrame():
            return dict(
                zip(("ids", "logprobs"), read_tokens(body, frame.rows, limits), strict=True)
            )
        case ScoresFrame():
            return dict(zip(("logprobs", "entropies"), read_scores(body, frame.rows), strict=True))
    return {}


def _values(body: bytes, rows: int, limits: FrameLimits, codec: Any, crew: str) -> bytes:
    if codec != crew:
        raise BadMessage("schema", f"activations use {codec}, the crew uses {crew}")
    return (decode(body, rows, limits.hidden, codec) + 0.0).numpy().astype("<f4").tobytes()


def _plain(about: msgspec.Struct) -> dict[str, Any]:
    return msgspec.to_builtins(about, builtin_types=(bytes,))
