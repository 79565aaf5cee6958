"""JSON Schemas of the messages, for other implementations.

They define names, order, types and choices. Limits are in protocol/registry.toml and in the text.
JSON has no bytes: where a schema says base64, the wire has msgpack `bin`.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import msgspec

from swarmnode.stages.crew_messages import (
    CrewMessage,
    CrewRecord,
    HeldBlock,
    StreamOpen,
    StreamReady,
)
from swarmnode.stages.stage_frames import Frame, MicroBatch, WaveDescription
from swarmnode.stages.state_messages import AnyStateMessage
from swarmnode.weights import messages as weights
from swarmnode.weights.payload import Header
from swarmnode.wire import listings, messages

Message = type[msgspec.Struct]


def _tagged(prefix: str, *kinds: Message) -> dict[str, Message]:
    return {f"{prefix}_{kind.__struct_config__.tag}": kind for kind in kinds}


def _named(prefix: str, *kinds: Message) -> dict[str, Message]:
    words = lambda kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    return {prefix + words(kind): kind for kind in kinds}


MESSAGES: dict[str, Message] = {
    **_named(
        "",
        *(messages.RolloutGroup, messages.Envelope),
        *(listings.ListingRequest, listings.ListingResponse),
        *(listings.GroupsRequest, listings.GroupsResponse),
        *(messages.NeighboursRequest, messages.NeighboursResponse),
        *(messages.ManifestRequest, messages.ManifestResponse),
        *(messages.Session, messages.Summary),
        *(messages.BulkManifest, messages.BulkManifestRequest, messages.BulkManifestResponse),
        *(messages.BulkRequest, messages.BulkResponse),
        *(CrewRecord, HeldBlock),
    ),
    "manifest": messages.SwarmManifest,
    **_tagged("weights", weights.Here, weights.Swap, weights.Accepted, weights.Busy),
    **_tagged("weights", weights.Refused, weights.Payload, weights.Ready),
    **_named("weights_", weights.StateRequest, weights.StateResponse),
    "weights_payload_header": Header,
    **_tagged("stage", *get_args(Frame)),
    **_tagged("state", *get_args(AnyStateMessage)),
    **_tagged("crews", *get_args(CrewMessage)),
    **_named("stage_", StreamOpen, StreamReady, MicroBatch),
    "stage_wave": WaveDescription,
}
"""File name to message."""


def schemas() -> dict[str, str]:
    """Return the content of each file of protocol/schema by name."""
    return {
        f"{name}.json": json.dumps(_schema(message), indent=1) + "\n"
        for name, message in MESSAGES.items()
    }


def _schema(message: Message) -> dict[str, Any]:
    schema = msgspec.json.schema(message)
    for definition in schema["$defs"].values():
        if "properties" not in definition:
            continue  # an array: its fields are identified by position
        # A default is a convenience of the constructors. On the wire every field is present, in
        # this order.
        definition["required"] = list(definition["properties"])
        for field in definition["properties"].values():
            field.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
