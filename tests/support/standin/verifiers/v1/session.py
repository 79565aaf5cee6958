from __future__ import annotations

from collections.abc import Callable
from typing import get_type_hints

from verifiers.v1 import Request, Trace


def hook_boundary(handler: Callable, *, allow_trace: bool) -> type:
    hints = set(get_type_hints(handler).values())
    if Request in hints:
        return Request
    if allow_trace and Trace in hints:
        return Trace
    raise TypeError(f"{handler.__name__} must have one parameter of a boundary")
