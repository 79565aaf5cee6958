"""JSON Schemas of the messages, for other implementations: `python -m protocol.generate.schema
[DIRECTORY]`.

They define names, order, types and choices. Limits are in protocol/registry.toml and in the text.
JSON has no bytes: where a schema says base64, the wire has msgpack `bin`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.wire.listings import GroupsRequest, GroupsResponse, ListingRequest, ListingResponse
from swarmnode.wire.messages import (
    BulkManifest,
    BulkManifestRequest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
    Envelope,
    ManifestRequest,
    ManifestResponse,
    PeersRequest,
    PeersResponse,
    RolloutGroup,
    Session,
    SessionResponse,
    Summary,
    SummaryRequest,
    SummaryResponse,
    SwarmManifest,
)

MESSAGES: dict[str, type[msgspec.Struct]] = {
    "rollout_group": RolloutGroup,
    "envelope": Envelope,
    "listing_request": ListingRequest,
    "listing_response": ListingResponse,
    "groups_request": GroupsRequest,
    "groups_response": GroupsResponse,
    "peers_request": PeersRequest,
    "peers_response": PeersResponse,
    "manifest": SwarmManifest,
    "manifest_request": ManifestRequest,
    "manifest_response": ManifestResponse,
    "session": Session,
    "session_response": SessionResponse,
    "summary": Summary,
    "summary_request": SummaryRequest,
    "summary_response": SummaryResponse,
    "bulk_manifest": BulkManifest,
    "bulk_manifest_request": BulkManifestRequest,
    "bulk_manifest_response": BulkManifestResponse,
    "bulk_request": BulkRequest,
    "bulk_response": BulkResponse,
}
"""File name to message."""


def schemas() -> dict[str, str]:
    """Return the content of each file of protocol/schema by name."""
    return render(MESSAGES)


def render(messages: Mapping[str, type[msgspec.Struct]]) -> dict[str, str]:
    """Return the schema files of `messages`."""
    return {
        f"{name}.json": json.dumps(_schema(message), indent=1) + "\n"
        for name, message in messages.items()
    }


def _schema(message: type[msgspec.Struct]) -> dict[str, Any]:
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


def write(rendered: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Write schema files to the directory that is the only argument, or to protocol/schema."""
    directory = Path(arguments[0] if arguments else "protocol/schema")
    for name, content in rendered.items():
        (directory / name).write_text(content)


if __name__ == "__main__":
    write(schemas(), sys.argv[1:])
