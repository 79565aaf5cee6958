"""JSON Schemas of what partners say, beside those of `wire.schema`: `python -m swarmnode.weights.schema [DIRECTORY]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swarmnode.weights.manifest import StateManifest
from swarmnode.weights.messages import Accept, Busy, Here, Latest, Propose, Ready, Release, StateRequest, StateResponse
from swarmnode.weights.payload import Header
from swarmnode.wire.schema import render

MESSAGES: dict[str, type[msgspec.Struct]] = {
    "weights_here": Here,
    "weights_propose": Propose,
    "weights_accept": Accept,
    "weights_busy": Busy,
    "weights_release": Release,
    "weights_ready": Ready,
    "weights_latest": Latest,
    "weights_state_request": StateRequest,
    "weights_state_response": StateResponse,
    "weights_state_manifest": StateManifest,
    "weights_payload_header": Header,
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
