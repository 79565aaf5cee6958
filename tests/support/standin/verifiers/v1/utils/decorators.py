from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def discover_decorated(obj: object, attr: str) -> list[Callable[..., Any]]:
    names = sorted(
        {
            name
            for kind in type(obj).__mro__
            for name, value in vars(kind).items()
            if hasattr(value, attr)
        }
    )
    return [getattr(obj, name) for name in names]


def invoke(fn: Callable[..., Any], available: dict[str | type, Any]) -> Any:
    return fn(
        **{name: available[name] for name in inspect.signature(fn).parameters if name in available}
    )


def metric(func: Any = None, priority: int = 0) -> Any:
    return _marked(func, metric=True)


def reward(func: Any = None, weight: float = 1.0, priority: int = 0) -> Any:
    return _marked(func, reward=True, _vf_weight=weight)


def stop(func: Any = None, priority: int = 0) -> Any:
    return _marked(func, stop=True)


def intercept(func: Any = None, priority: int = 0) -> Any:
    return _marked(func, intercept=True)


def _marked(func: Any, **marks: object) -> Any:
    def mark(function: Any) -> Any:
        vars(function).update(marks)
        return function

    return mark if func is None else mark(func)
