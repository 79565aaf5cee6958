"""Tells systemd how we are (sd_notify): datagrams of `KEY=value` lines to the socket named in
NOTIFY_SOCKET. Without it nothing is sent.

    loading   EXTEND_TIMEOUT_USEC while there is progress     running   WATCHDOG=1 while nothing
    hangs     end   STOPPING=1
    ready     READY=1, once: every process is past loading    always    STATUS=, when it changes

Source: sd_notify(3), systemd 252.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

EXTEND_SECONDS = 30
"""How much longer systemd waits after each sign of progress."""


class Notifier:
    """Takes NOTIFY_SOCKET and WATCHDOG_USEC out of `environment`: children must not speak for us.
    Never raises, never blocks."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog = environment.pop("WATCHDOG_USEC", "")
        environment.pop("WATCHDOG_PID", "")
        self.watchdog_seconds = (
            int(watchdog) / 1e6 if watchdog.isascii() and watchdog.isdigit() else None
        )
        """systemd acts when it has heard nothing for so long; None when it does not watch."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._told: dict[str, str] = {}
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def beat(self, statuses: Mapping[str, str], well: bool) -> None:
        """Once per turn of the supervisor's loop. `statuses`: process to what it says it does;
        `well`: none of them hangs."""
        self._once("STATUS", ", ".join(f"{name}: {status}" for name, status in statuses.items()))
        if all(past_loading(status) for status in statuses.values()):
            self._once("READY", "1")
        elif well and "READY" not in self._told:
            self._send(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")
        if well:
            self._send("WATCHDOG=1")

    def stopping(self, seconds: float) -> None:
        """The drain has begun and may take `seconds`."""
        self._once("STOPPING", "1")
        self._send(f"EXTEND_TIMEOUT_USEC={int((seconds + EXTEND_SECONDS) * 1e6)}")

    def _once(self, key: str, value: str) -> None:
        """What systemd has taken is not said again; what it had no room for is."""
        if self._told.get(key) != value and self._send(f"{key}={value}"):
            self._told[key] = value

    def _send(self, line: str) -> bool:
        """False when it did not get there; a manager that does not listen must not end what it
        manages."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(line.encode(), self._address)
        except OSError:
            return False
        return True


def past_loading(status: str) -> bool:
    """Whether a process that says `status` does its work."""
    return not status.startswith(("starting", "loading", "down"))


def from_environment() -> Notifier:
    return Notifier(os.environ)
