"""JSON Schemas of what the members of a crew say, beside those of `wire.schema`: `python -m swarmnode.stages.schema [DIRECTORY]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from swarmnode.stages.frames import Frame
from swarmnode.stages.work import MicroBatch, Questions
from swarmnode.wire.schema import render

FRAMES: tuple[Any, ...] = get_args(Frame)
MESSAGES: dict[str, type[msgspec.Struct]] = {
    **{f"stage_{frame.__struct_config__.tag}": frame for frame in FRAMES},
    "stage_micro_batch": MicroBatch,
    "stage_wave": Questions,
}
"""File name to message."""


def schemas() -> dict[str, str]:
    """File name to its content, as it stands in protocol/schema."""
    return render(MESSAGES)


def main(arguments: Sequence[str]) -> None:
    directory = Path(arguments[0] if arguments else "protocol/schema")
    for name, content in schemas().items():
        (directory / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:])
