from __future__ import annotations

from typing import get_args

from pydantic import BaseModel


class State(BaseModel):
    pass


def state_cls(cls: type) -> type[State]:
    named = [arg for base in getattr(cls, "__orig_bases__", ()) for arg in get_args(base)]
    return next((arg for arg in named if issubclass(arg, State)), State)
