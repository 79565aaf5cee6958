"""A bounded mapping that forgets its oldest entry."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(OrderedDict[Key, Value]):
    """A mapping in the order of the last assignment. Identities are free, so a table of
    peers needs a limit.

    Args:
        most: Maximum number of entries. A further one removes the entry with the oldest assignment.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:  # `most` is an argument of the copy
        return Latest, (self.most,), None, None, iter(self.items())
