"""Whether a JSON value is as a schema says: the part of JSON Schema (2020-12) that needs no pattern
and no reference.

The schema is a dataset's, of its owner; the value is a stranger's. Patterns could take exponential
time on it, and references would have to be fetched: a schema with a keyword that is not here is
refused when the dataset is read, never at an answer. Work is bounded by the size of the schema
times that of the value.
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
    """Raises ValueError, which names the keyword, for a schema that is none, or is one that is not
    understood here."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    for keyword, said in schema.items():
        if keyword not in KNOWN:
            raise ValueError(
                f"its schema has {keyword!r}, which is not supported:"
                f" {', '.join(sorted(KNOWN - ANNOTATIONS))} are"
            )
        if keyword in BOUNDS and (isinstance(said, bool) or not isinstance(said, int | float)):
            raise ValueError(f"{keyword} is not a number")
        if keyword == "type" and not (
            said in TYPES
            or (isinstance(said, list) and said and all(each in TYPES for each in said))
        ):
            raise ValueError(f"type is {said!r}, not one of {', '.join(TYPES)}")
        if keyword in ("enum", *COMBINED) and not (isinstance(said, list) and said):
            raise ValueError(f"{keyword} is not a list with something in it")
        if keyword == "required" and not (
            isinstance(said, list) and all(isinstance(name, str) for name in said)
        ):
            raise ValueError("required is not a list of names")
        if keyword == "properties" and not isinstance(said, dict):
            raise ValueError("properties is not an object")
        for inner in _inner(keyword, said):
            check(inner)


def _inner(keyword: str, said: object) -> list[object]:
    """The schemas in a schema under `keyword`."""
    if keyword in COMBINED and isinstance(said, list):
        return said
    if keyword == "properties" and isinstance(said, dict):
        return list(said.values())
    return [said] if keyword in ("items", "additionalProperties", "not") else []


def valid(value: object, schema: object) -> bool:
    """Whether `value`, as `json.loads` made it, is as `schema` says, which `check` has passed."""
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
    """As JSON compares: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            equal(item, other[name]) for name, item in one.items()
        )
    return one == other


def _is_of_type(value: object, said: object) -> bool:
    if said is None:
        return True
    wanted = said if isinstance(said, list) else [said]
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
    """Every bound that concerns a value of this type; the others do not say anything of it."""
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


def _bound(schema: Mapping[str, object], keyword: str, otherwise: float) -> float:
    said = schema.get(keyword, otherwise)
    assert isinstance(said, int | float)
    return said


def _parts(value: object, schema: Mapping[str, object]) -> bool:
    """Items of a list; properties of an object, those that have to be there and those that nobody
    named."""
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
