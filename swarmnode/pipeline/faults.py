"""What work for a peer may fail by without being a defect of ours. No torch."""

from __future__ import annotations

from typing import Final

DEVICE: Final = "device"
"""The reason that such a failure is counted under."""
LOST: Final = "AcceleratorError"
"""torch's, by its name: the device's context is gone, and nothing but a new process helps."""


def of_device(error: BaseException) -> bool:
    """Whether memory ran out, or torch could not compute what it was asked for: RuntimeError
    itself, and torch's own kinds of it.

    Not so for any other kind of error, those that Python and trio derive from RuntimeError among
    them, and not when the device is lost.
    """
    kind = type(error)
    if kind is RuntimeError or isinstance(error, MemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and kind.__module__.split(".")[0] == "torch"
        and kind.__name__ != LOST
    )
