"""JSON Schemas of 04-stages: `python -m protocol.generate.schema_stages [DIRECTORY]`."""

from __future__ import annotations

import sys
from typing import Any, get_args

import msgspec

from protocol.generate.schema import render, write
from swarmnode.stages import wire
from swarmnode.stages.wire import AnyStateMessage as StateMessage
from swarmnode.stages.wire import (
    CrewRecord,
    Frame,
    HeldBlock,
    MicroBatch,
    StreamOpen,
    StreamReady,
    WaveDescription,
)


def _named(prefix: str, union: Any) -> dict[str, Any]:
    return {f"{prefix}_{message.__struct_config__.tag}": message for message in get_args(union)}


MESSAGES: dict[str, type[msgspec.Struct]] = {
    **_named("stage", Frame),
    **_named("state", StateMessage),
    **_named("crews", wire.CrewMessage),
    "crew_record": CrewRecord,
    "held_block": HeldBlock,
    "stage_stream_open": StreamOpen,
    "stage_stream_ready": StreamReady,
    "stage_micro_batch": MicroBatch,
    "stage_wave": WaveDescription,
}
"""File name to message."""


def schemas() -> dict[str, str]:
    """Return the content of each schema file of 04-stages by name."""
    return render(MESSAGES)


if __name__ == "__main__":
    write(schemas(), sys.argv[1:])
