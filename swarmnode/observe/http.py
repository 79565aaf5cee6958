"""The node's read-only HTTP server, in the node's own nursery.

    /metrics   Prometheus or OpenMetrics text, as the scraper asks
    /status    the snapshot and the history of the charts, as JSON
    /samples   recent answers, as JSON
    /healthz   200 while the process works
    /readyz    200 while the node is ready, otherwise 503 with the reasons
    /          the status page; its other files are /app.js, /style.css and /icon.svg

A second listener, `http.metrics`, serves METRICS_PATHS only, so that Prometheus on another machine
needs no access to answers, peers and log.

Nothing here changes the node and nothing needs a secret. Three rules protect the operator:

* A page on a web site must not read the node through the operator's browser. The node is bound to
  loopback by default and then refuses every foreign Host header (DNS rebinding). It always refuses
  requests that a browser marks as cross-site.
* A stranger who can connect must not slow the node down. Each connection carries one request
  (no keep-alive, no pipelining, HTTP/1.1 only). At most CONNECTIONS are open: a new one closes the
  oldest. Every answer is computed at most once in CACHE_SECONDS.
* Every connection has a deadline, so a client that does not send or read cannot hold one.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import h11
import msgspec
import structlog
import trio
from prometheus_client.exposition import choose_encoder

from swarmnode.config import HttpConfig
from swarmnode.errors import Unavailable
from swarmnode.observe import health, samples
from swarmnode.observe.collector import make_registry
from swarmnode.observe.history import POINTS, SAVE_SECONDS, History
from swarmnode.observe.snapshot import NodeSnapshot

TICK_SECONDS = 1.0
PORTS_TRIED = 64
"""Maximum number of ports to try, from `http.port` upwards, if other processes use them."""
CACHE_SECONDS = 1.0
CACHED_ANSWERS = 16
"""Maximum number of cached answers. It is bounded because a client chooses `points`."""
CONNECTIONS = 32
REQUEST_SECONDS = 10.0
"""Time from the start of a connection to the end of its request's headers."""
ANSWER_SECONDS = 30.0
"""Time to compute and send an answer."""
LINGER_SECONDS, LINGER_BYTES = 1.0, 2**16
"""After an answer, further bytes of the client are discarded within these bounds. Closing a socket
with unread bytes would reset the connection before the client has read the answer."""
READ_BYTES = 4096

PAGE = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
METRICS_PATHS = frozenset({"/metrics", "/healthz", "/readyz"})
"""Paths of the listener `http.metrics`."""
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    (b"connection", b"close"),
)
JSON = "application/json"

log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The head of a request; bodies are never read."""

    method: str
    target: str
    """Path and query, visible ASCII."""
    headers: Mapping[str, str]
    """Values by lower-case name; repeated headers are joined with commas."""


@dataclass(frozen=True)
class Response:
    body: bytes
    kind: str
    """Content type."""
    status: int = 200


class LoopMonitor:
    """Adds a point to the history and measures the delay of the event loop, once per second."""

    def __init__(
        self, snapshot: Callable[[], NodeSnapshot], history: History, data_dir: Path | None = None
    ) -> None:
        self._snapshot = snapshot
        self._history = history
        self._data_dir = data_dir
        self._save_at = trio.current_time() + SAVE_SECONDS
        self._ticked_at = trio.current_time()
        self.lag_seconds = 0.0

    @property
    def silence_seconds(self) -> float:
        return trio.current_time() - self._ticked_at

    async def run(self) -> None:
        failed = False
        while True:
            try:
                self._history.add(self._snapshot())
                failed = False
            except Exception:
                # a defect of a statistics() must not end the node; requests get status 500
                if not failed:
                    log.exception("cannot take a snapshot")
                failed = True
            await self._save()
            due = trio.current_time() + TICK_SECONDS
            await trio.sleep_until(due)
            self._ticked_at = trio.current_time()
            self.lag_seconds = max(0.0, self._ticked_at - due)

    async def _save(self) -> None:
        """Save the history once per SAVE_SECONDS; a crash loses the points since then."""
        if self._data_dir is None or trio.current_time() < self._save_at:
            return
        self._save_at = trio.current_time() + SAVE_SECONDS
        await trio.to_thread.run_sync(self.save)

    def save(self) -> None:
        """Save the history. Never raises."""
        if self._data_dir is None:
            return
        try:
            self._history.save(self._data_dir)
        except OSError as error:  # for example a full disk
            log.warning("cannot save the history of the charts", error=str(error))


class HttpRoutes:
    """Responses to requests, without a socket.

    Args:
        snapshot: returns the present state of the node.
        only_loopback: refuse Host headers that do not name this machine.
        only_metrics: serve METRICS_PATHS only.
        data_dir: directory of the trainer's samples; None for none.
        now: returns the seconds of any clock.
    """

    def __init__(
        self,
        snapshot: Callable[[], NodeSnapshot],
        history: History,
        monitor: LoopMonitor,
        only_loopback: bool,
        data_dir: Path | None = None,
        now: Callable[[], float] = trio.current_time,
        only_metrics: bool = False,
    ) -> None:
        self._take_snapshot = snapshot
        self._history = history
        self._monitor = monitor
        self._only_loopback = only_loopback
        self._data_dir = data_dir
        self._now = now
        self._cache: dict[tuple[str, object], object] = {}
        self._cached_at = float("-inf")
        self._registry = make_registry(self._snapshot)
        files = resources.files("swarmnode.observe") / "page"
        self._page = {
            path: Response((files / name).read_bytes(), f"{kind}; charset=utf-8")
            for path, (name, kind) in PAGE.items()
        }
        self._routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/status": self._status,
            "/samples": self._samples,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        if only_metrics:
            self._page = {}
            self._routes = {path: self._routes[path] for path in METRICS_PATHS}

    async def answer(self, request: Request) -> Response:
        """Return the response to a request. Raises what `snapshot` raises."""
        if self._only_loopback and not is_loopback(request.headers.get("host", "")):
            return refusal(421, "this node answers to localhost only")
        if "cross-site" in request.headers.get("sec-fetch-site", "").lower():
            return refusal(403, "the request came from another web site; type the address")
        path = request.target.partition("?")[0]
        if path not in self._routes and path not in self._page:
            return refusal(404, "not found")
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "only GET and HEAD")
        return self._page[path] if path in self._page else await self._routes[path](request)

    def _cached(self, name: str, variant: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, at most CACHE_SECONDS old."""
        now = self._now()
        if now - self._cached_at >= CACHE_SECONDS:
            self._cache.clear()
            self._cached_at = now
        key = (name, variant)
        if key in self._cache:
            return self._cache[key]  # type: ignore[return-value]
        made = make()
        if len(self._cache) < CACHED_ANSWERS:
            self._cache[key] = made
        return made

    def _snapshot(self) -> NodeSnapshot:
        return self._cached("snapshot", None, self._take_snapshot)

    async def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        body = self._cached("metrics", kind, lambda: encode(self._registry))
        return Response(body, kind)

    async def _status(self, request: Request) -> Response:
        text = parse_qs(request.target.partition("?")[2]).get("points", [str(POINTS)])[-1]
        if not (text.isascii() and text.isdecimal() and len(text) <= 6):
            return refusal(400, "points must be a number")
        points = min(int(text), POINTS)
        make = lambda: status_json(self._snapshot(), self._history, points)
        return Response(self._cached("status", points, make), JSON)

    async def _samples(self, _: Request) -> Response:
        kept = self._cached("samples", None, dict[str, bytes])
        if "body" not in kept:
            found = (
                await trio.to_thread.run_sync(samples.newest, self._data_dir, samples.PAGE_GROUPS)
                if self._data_dir is not None
                else []
            )
            kept["body"] = samples.for_page(found)
        return Response(kept["body"], JSON)

    async def _healthz(self, _: Request) -> Response:
        return _verdict(health.alive(self._monitor.silence_seconds))

    async def _readyz(self, _: Request) -> Response:
        return _verdict(health.ready(self._snapshot()))


def refusal(status: int, why: str) -> Response:
    return Response(f"{status} {why}\n".encode(), "text/plain; charset=utf-8", status)


def _verdict(verdict: health.Verdict) -> Response:
    return Response(msgspec.json.encode(verdict), JSON, 200 if verdict.ok else 503)


def status_json(snapshot: NodeSnapshot, history: History, points: int = POINTS) -> bytes:
    """Return the body of /status: {"ready": Verdict, "troubles": […], "snapshot": NodeSnapshot,
    "history": {column: […]}}."""
    status = {
        "ready": health.ready(snapshot),
        "troubles": health.troubles(snapshot),
        "snapshot": snapshot,
        "history": history.columns(points) if points else {},
    }
    return msgspec.json.encode(status)


def is_loopback(host: str) -> bool:
    """Return True if a Host header or a bind address names this machine.

    These are localhost, 127.0.0.0/8 and ::1, with any port, because operators forward ports.
    """
    if ip := _ip(host):
        return ip.is_loopback
    if not host or any(c in host for c in "@/?#\\"):
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    ip = _ip(name)
    return ip.is_loopback if ip else name == "localhost"


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def listen(cfg: HttpConfig) -> socket.socket:
    """Return a listening socket at `http.port`, or at the next free port if that one is in use.

    Raises:
        Unavailable: the address cannot be used, or all `PORTS_TRIED` ports are in use.
    """
    family, address = _resolve("http.host", cfg.host, cfg.port)
    ports = range(cfg.port, min(cfg.port + PORTS_TRIED, 65536)) if cfg.port else range(1)
    for port in ports:
        try:
            sock = _listen_at(family, (address[0], port, *address[2:]))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            raise Unavailable(
                f"http {cfg.host}:{port}: {error.strerror or error}; set http.port to a free one,"
                " or 0"
            ) from error
        if port != cfg.port:
            log.warning("http.port is in use, using the next free port", taken=cfg.port, port=port)
        return sock
    raise AssertionError("no port tried")


def listen_for_metrics(host: str, port: int) -> socket.socket:
    """Return a listening socket at the address of `http.metrics`.

    Raises:
        Unavailable: the address cannot be used.
    """
    family, address = _resolve("http.metrics", host, port)
    try:
        return _listen_at(family, address)
    except OSError as error:
        raise Unavailable(
            f"http.metrics {host}:{port}: {error.strerror or error}; set it to a free port"
        ) from error


def _resolve(setting: str, host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Return the address family and the socket address of `host` and `port`.

    Raises:
        Unavailable: the host has no address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise Unavailable(f"{setting} {host!r}: {error.strerror or error}") from error
    return family, address


def _listen_at(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a socket that listens at `address`. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(64)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def serve_http(
    cfg: HttpConfig,
    snapshot: Callable[[], NodeSnapshot],
    *,
    data_dir: Path | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]  # old stubs may be installed
) -> None:
    """Serve until cancelled.

    The value of `task_status` is the base URL, such as `http://127.0.0.1:9464`.

    Args:
        snapshot: returns the present state of the node. It is called at most three times per
            second. An exception is logged, and the request gets status 500.
        data_dir: directory of the charts' history and the trainer's samples; None for none.

    Raises:
        Unavailable: see `listen` and `listen_for_metrics`.
    """
    with ExitStack() as sockets:
        sock = sockets.enter_context(listen(cfg))
        host, port = sock.getsockname()[:2]
        history = History()
        if data_dir is not None:
            history.load(data_dir)
        monitor = LoopMonitor(snapshot, history, data_dir)
        timed = lambda: msgspec.structs.replace(snapshot(), loop_lag_seconds=monitor.lag_seconds)
        served = {sock: HttpRoutes(timed, history, monitor, is_loopback(host), data_dir)}
        if cfg.metrics_address is not None:
            second = sockets.enter_context(listen_for_metrics(*cfg.metrics_address))
            loopback = is_loopback(cfg.metrics_address[0])
            served[second] = HttpRoutes(timed, history, monitor, loopback, only_metrics=True)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(monitor.run)
                for each, routes in served.items():
                    listener = trio.SocketListener(trio.socket.from_stdlib_socket(each))
                    nursery.start_soon(
                        trio.serve_listeners, Connections(routes.answer).serve, [listener]
                    )
                task_status.started(
                    f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                )
        finally:
            monitor.save()


class Connections:
    """The open connections of a listener, oldest first."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer
        self._open: list[trio.CancelScope] = []

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer the one request of a connection and close it. Never raises."""
        with trio.CancelScope() as scope:
            self._open.append(scope)
            if len(self._open) > CONNECTIONS:
                self._open.pop(0).cancel()
            try:
                await self._exchange(stream)
            except (trio.BrokenResourceError, h11.ProtocolError):
                pass  # the client has disconnected
            except Exception:
                log.exception("the HTTP server failed")
            finally:
                if scope in self._open:
                    self._open.remove(scope)
                await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        received: Request | Response | None = None
        with trio.move_on_after(REQUEST_SECONDS):
            received = await _receive(connection, stream)
        if received is None:
            return
        with trio.move_on_after(ANSWER_SECONDS) as deadline:
            await _send(connection, stream, await self._respond(received), received)
        if deadline.cancelled_caught:
            return
        left = LINGER_BYTES
        with trio.move_on_after(LINGER_SECONDS):
            await stream.send_eof()
            while left > 0 and (read := len(await stream.receive_some(READ_BYTES))):
                left -= read

    async def _respond(self, received: Request | Response) -> Response:
        if isinstance(received, Response):
            return received
        try:
            return await self._answer(received)
        except Exception:
            log.exception("a request failed", target=received.target)
            return refusal(500, "the node failed to answer; see its log")


async def _receive(
    connection: h11.Connection, stream: trio.SocketStream
) -> Request | Response | None:
    """Return the request, the response to an invalid one, or None at the end of the stream."""
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(READ_BYTES))
    except h11.RemoteProtocolError as error:
        return refusal(error.error_status_hint, "not a request")
    if not isinstance(event, h11.Request):
        return None
    if event.http_version != b"1.1":
        return refusal(505, "HTTP/1.1 only")
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode("ascii"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return Request(event.method.decode("ascii"), event.target.decode("ascii"), headers)


async def _send(
    connection: h11.Connection,
    stream: trio.SocketStream,
    response: Response,
    request: Request | Response,
) -> None:
    length = (b"content-length", str(len(response.body)).encode())
    kind = (b"content-type", response.kind.encode())
    head = h11.Response(
        status_code=response.status,
        reason=HTTPStatus(response.status).phrase.encode(),
        headers=[kind, length, *HEADERS],
    )
    data = connection.send(head) or b""
    if not (isinstance(request, Request) and request.method == "HEAD"):
        data += connection.send(h11.Data(data=response.body)) or b""
    await stream.send_all(data)
