"""Validation of JSON values by the part of JSON Schema (2020-12) that has no patterns and no
references.

The schema comes from the owner of a dataset, the value from a peer. A pattern could take
exponential time on the value, and a reference would have to be fetched. A schema with an unknown
keyword is therefore refused when the dataset is read. The work is bounded by the size of the schema
times the size of the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {"$schema", "$comment", "$id", "title", "description", "default", "examples", "deprecated"}
)
BOUNDS = frozenset(
    {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
    }
)
COMBINED = ("allOf", "anyOf", "oneOf")
KNOWN = (
    ANNOTATIONS
    | BOUNDS
    | {
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "not",
        *COMBINED,
    }
)


def check(schema: object) -> None:
    """Check a schema. Raises ValueError, which names the keyword, if the schema is invalid or not
    supported.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    for keyword, setting in schema.items():
        if keyword not in KNOWN:
            raise ValueError(
                f"its schema has {keyword!r}, which is not supported:"
                f" {', '.join(sorted(KNOWN - ANNOTATIONS))} are"
            )
        if keyword in BOUNDS and (
            isinstance(setting, bool) or not isinstance(setting, int | float)
        ):
            raise ValueError(f"{keyword} is not a number")
        if keyword == "type" and not (
            setting in TYPES
            or (isinstance(setting, list) and setting and all(each in TYPES for each in setting))
        ):
            raise ValueError(f"type is {setting!r}, not one of {', '.join(TYPES)}")
        if keyword in ("enum", *COMBINED) and not (isinstance(setting, list) and setting):
            raise ValueError(f"{keyword} is not a list with at least one item")
        if keyword == "required" and not (
            isinstance(setting, list) and all(isinstance(name, str) for name in setting)
        ):
            raise ValueError("required is not a list of names")
        if keyword == "properties" and not isinstance(setting, dict):
            raise ValueError("properties is not an object")
        for inner in _inner(keyword, setting):
            check(inner)


def _inner(keyword: str, setting: object) -> list[object]:
    """Return the schemas inside a schema under `keyword`."""
    if keyword in COMBINED and isinstance(setting, list):
        return setting
    if keyword == "properties" and isinstance(setting, dict):
        return list(setting.values())
    return [setting] if keyword in ("items", "additionalProperties", "not") else []


def valid(value: object, schema: object) -> bool:
    """Return True if `value` (from `json.loads`) is valid by a checked `schema`."""
    if not isinstance(schema, dict):
        return schema is True
    return (
        _is_of_type(value, schema.get("type"))
        and ("const" not in schema or equal(value, schema["const"]))
        and ("enum" not in schema or any(equal(value, each) for each in schema["enum"]))
        and _within(value, schema)
        and _parts(value, schema)
        and all(valid(value, each) for each in schema.get("allOf", ()))
        and ("anyOf" not in schema or any(valid(value, each) for each in schema["anyOf"]))
        and ("oneOf" not in schema or sum(valid(value, each) for each in schema["oneOf"]) == 1)
        and ("not" not in schema or not valid(value, schema["not"]))
    )


def equal(one: object, other: object) -> bool:
    """Return True if two values are equal in JSON: 1 equals 1.0, and 1 does not equal true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            equal(item, other[name]) for name, item in one.items()
        )
    return one == other


def _is_of_type(value: object, types: object) -> bool:
    if types is None:
        return True
    wanted = types if isinstance(types, list) else [types]
    if isinstance(value, bool):
        return "boolean" in wanted
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return "number" in wanted or (whole and "integer" in wanted)
    if isinstance(value, str | list | dict):
        return (
            "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
        ) in wanted
    return value is None and "null" in wanted


def _within(value: object, schema: Mapping[str, object]) -> bool:
    """Check all bounds for the type of `value`. Bounds of other types do not apply."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, most = _bound(schema, "minimum", -math.inf), _bound(schema, "maximum", math.inf)
        above, below = (
            _bound(schema, "exclusiveMinimum", -math.inf),
            _bound(schema, "exclusiveMaximum", math.inf),
        )
        return (
            least <= value <= most
            and (value > above or above == -math.inf)
            and (value < below or below == math.inf)
        )
    if not isinstance(value, str | list | dict):
        return True
    kind = (
        "Length" if isinstance(value, str) else "Items" if isinstance(value, list) else "Properties"
    )
    return _bound(schema, f"min{kind}", 0) <= len(value) <= _bound(schema, f"max{kind}", math.inf)


def _bound(schema: Mapping[str, object], keyword: str, default: float) -> float:
    bound = schema.get(keyword, default)
    assert isinstance(bound, int | float)
    return bound


def _parts(value: object, schema: Mapping[str, object]) -> bool:
    """Check the items of a list, or the required, named and additional properties of an object."""
    if isinstance(value, list):
        return "items" not in schema or all(valid(item, schema["items"]) for item in value)
    if not isinstance(value, dict):
        return True
    named, required = schema.get("properties", {}), schema.get("required", [])
    assert isinstance(named, dict)
    assert isinstance(required, list)
    others = schema.get("additionalProperties", True)
    return all(name in value for name in required) and all(
        valid(item, named.get(name, others)) for name, item in value.items()
    )
