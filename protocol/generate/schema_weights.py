"""JSON Schemas of 03-weights: `python -m protocol.generate.schema_weights [DIRECTORY]`."""

from __future__ import annotations

import sys

import msgspec

from protocol.generate.schema import render, write
from swarmnode.weights.messages import (
    Accepted,
    Busy,
    Here,
    Payload,
    Ready,
    Refused,
    StateRequest,
    StateResponse,
    Swap,
)
from swarmnode.weights.payload import Header
from swarmnode.weights.state import StateManifest

MESSAGES: dict[str, type[msgspec.Struct]] = {
    "weights_here": Here,
    "weights_swap": Swap,
    "weights_accepted": Accepted,
    "weights_busy": Busy,
    "weights_refused": Refused,
    "weights_payload": Payload,
    "weights_ready": Ready,
    "weights_state_request": StateRequest,
    "weights_state_response": StateResponse,
    "weights_state_manifest": StateManifest,
    "weights_payload_header": Header,
}
"""File name to message."""


def schemas() -> dict[str, str]:
    """Return the content of each schema file of 03-weights by name."""
    return render(MESSAGES)


if __name__ == "__main__":
    write(schemas(), sys.argv[1:])
