"""Report the node's state to systemd (sd_notify): datagrams of `KEY=value` lines to the socket in
NOTIFY_SOCKET. Without that variable nothing is sent.

    EXTEND_TIMEOUT_USEC   while a process loads and makes progress
    READY=1               once, when all processes have loaded
    WATCHDOG=1            while no process hangs
    STATUS=               at each change
    STOPPING=1            at the end

Source: sd_notify(3), systemd 252.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

EXTEND_SECONDS = 30
"""Time by which each report of progress extends systemd's timeout."""


class Notifier:
    """Sends notifications. Never raises, never blocks.

    It removes NOTIFY_SOCKET and WATCHDOG_USEC from `environment`, so that child processes send
    none.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._sent: dict[str, str] = {}
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def beat(self, statuses: Mapping[str, str], healthy: bool) -> None:
        """Send the changed values. The supervisor calls this in each turn of its loop.

        Args:
            statuses: status of each process.
            healthy: True if no process hangs.
        """
        self._once("STATUS", ", ".join(f"{name}: {status}" for name, status in statuses.items()))
        if all(has_loaded(status) for status in statuses.values()):
            self._once("READY", "1")
        elif healthy and "READY" not in self._sent:
            self._send(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}")
        if healthy:
            self._send("WATCHDOG=1")

    def stopping(self, seconds: float) -> None:
        """Report that the node stops, which may take `seconds`."""
        self._once("STOPPING", "1")
        self._send(f"EXTEND_TIMEOUT_USEC={int((seconds + EXTEND_SECONDS) * 1e6)}")

    def _once(self, key: str, value: str) -> None:
        """Send a value unless it was sent before. A value that could not be sent is sent again."""
        if self._sent.get(key) != value and self._send(f"{key}={value}"):
            self._sent[key] = value

    def _send(self, line: str) -> bool:
        """Return False if the datagram could not be sent, which the node ignores."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(line.encode(), self._address)
        except OSError:
            return False
        return True


def has_loaded(status: str) -> bool:
    """Return True if `status` is that of a process that has loaded."""
    return not status.startswith(("starting", "loading", "down"))
