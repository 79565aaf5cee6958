"""HTTP client for an inference server that is not trusted: `JsonClient.call`.

One deadline covers a call from connecting to the last byte. The size of a response is bounded
before it is decoded, only JSON of the expected type is accepted, and the client follows no
redirects and uses no proxies.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from swarmnode.config import is_private_address

T = TypeVar("T")
Reason = Literal["unreachable", "timeout", "status", "answer", "version", "canary", "model", "disk"]
"""Reason why a server is not used; a label of a metric."""
CONNECT_SECONDS = 5.0
ANSWER_BYTES = 2**20
"""Maximum body size of a response without completions, in bytes."""
ERROR_CHARACTERS = 200
"""Maximum length of a server's error message in the log."""
READ_BYTES = 2**16


class ServerFailed(Exception):
    """Raised when a server does not complete a request."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason


class JsonClient:
    """HTTP client that any thread may call; each call opens its own connection.

    Args:
        url: Scheme, host and port; `policy.server.url` has been validated.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls is not None else 80)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def call(
        self,
        target: str,
        body: object = None,
        *,
        answer: type[T],
        seconds: float,
        limit: int = ANSWER_BYTES,
    ) -> T:
        """Send a GET request, or a POST request if there is a body, and return the decoded
        response.

        Args:
            answer: Type to decode the JSON response into.
            seconds: Deadline of the whole call.
            limit: Maximum body size of the response, in bytes.

        Raises:
            ServerFailed: The response missed the deadline, has a status other than 200, exceeds
                `limit`, or is not JSON of type `answer`.
        """
        data = self._exchange(target, body, seconds, limit)
        try:
            return msgspec.json.decode(data, type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ServerFailed("answer", f"{target}: invalid response: {error}") from None

    def order(self, target: str, body: object, seconds: float) -> None:
        """Send a POST request whose response body is ignored. Raises ServerFailed."""
        self._exchange(target, body, seconds, ANSWER_BYTES)

    def interrupt(self) -> None:
        """Abort all calls in progress; they raise ServerFailed."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _exchange(self, target: str, body: object, seconds: float, limit: int) -> bytes:
        late = time.monotonic() + seconds
        try:
            with self._connected(late) as connected:
                return _round_trip(connected, self._head(), target, body, late, limit)
        except TimeoutError:
            raise ServerFailed(
                "timeout", f"no complete response to {target} within {seconds:.0f} s"
            ) from None
        except h11.ProtocolError as error:
            raise ServerFailed("unreachable", f"{target}: {error}") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerFailed("unreachable", f"{self.url}: {why}") from None

    def _head(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @contextlib.contextmanager
    def _connected(self, late: float) -> Iterator[socket.socket]:
        """Connect to the address that was checked, without a second name lookup."""
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        public = [each for each in addresses if not is_private_address(each)]
        if public:
            raise ServerFailed(
                "unreachable",
                f"{self._host} is at the public address {public[0]}; use an SSH tunnel",
            )
        plain = _connect(addresses, self._port, late)
        with contextlib.ExitStack() as stack:
            stack.callback(plain.close)
            used = plain
            if self._tls is not None:
                used = self._tls.wrap_socket(plain, server_hostname=self._host)
                stack.callback(used.close)
            with self._lock:
                self._open.add(used)
            try:
                yield used
            finally:
                with self._lock:
                    self._open.discard(used)


def _connect(addresses: list[str], port: int, late: float) -> socket.socket:
    failure = OSError("no address")
    for address in addresses:
        try:
            seconds = min(CONNECT_SECONDS, _left(late))
            return socket.create_connection((address, port), timeout=seconds)
        except OSError as error:
            failure = error
    raise failure


def _round_trip(
    connected: socket.socket, host: str, target: str, body: object, late: float, limit: int
) -> bytes:
    """Send one request and return the response body.

    Raises:
        ServerFailed, OSError, ProtocolError: The exchange failed.
    """
    data = b"" if body is None else msgspec.json.encode(body)
    headers = [("Host", host), ("Accept", "application/json"), ("Connection", "close")]
    if body is not None:
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    http = h11.Connection(h11.CLIENT)
    method = "GET" if body is None else "POST"
    sent = http.send(h11.Request(method=method, target=target, headers=headers)) or b""
    if data:
        sent += http.send(h11.Data(data=data)) or b""
    sent += http.send(h11.EndOfMessage()) or b""
    connected.settimeout(_left(late))
    connected.sendall(sent)
    status, received = 0, bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            connected.settimeout(_left(late))
            http.receive_data(connected.recv(READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > limit:
                raise ServerFailed("answer", f"{target}: the response exceeds {limit} bytes")
        elif isinstance(event, h11.EndOfMessage):
            break
        elif isinstance(event, h11.ConnectionClosed):
            raise ServerFailed("unreachable", f"{target}: the connection was closed")
    if status != 200:
        raise ServerFailed("status", f"{target} returned status {status}: {inert(bytes(received))}")
    return bytes(received)


def _left(late: float) -> float:
    left = late - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def inert(data: bytes) -> str:
    """Return a server's text shortened and reduced to printable characters, for a log line."""
    words = " ".join(data[: 4 * ERROR_CHARACTERS].decode(errors="replace").split())
    return "".join(each for each in words if each.isprintable())[:ERROR_CHARACTERS]
