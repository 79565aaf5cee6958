"""The node's read-only HTTP surface, in the node's own nursery.

    /metrics   Prometheus or OpenMetrics text, as the scraper asks      /healthz   200 while the
    process works
    /status    the snapshot and the charts' past, as JSON               /readyz    200 once it does
    its job, else 503 and why
    /samples   what was answered lately, as JSON                        /          the status page;
    its two files beside it

Nothing here changes the node and nothing needs a secret, but it is bound to loopback unless told
otherwise, and then a page on somebody's web site must not read it through the browser either (DNS
rebinding): hence the check of the Host header.
"""

from __future__ import annotations

import errno
import logging
import socket
import typing
from collections.abc import Awaitable, Callable
from importlib import resources
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

import hypercorn.config
import hypercorn.trio
import msgspec
import structlog
import trio
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnode.config import HttpConfig
from swarmnode.errors import Unavailable
from swarmnode.observe import health, samples
from swarmnode.observe.collector import make_registry
from swarmnode.observe.history import POINTS, SAVE_SECONDS, History
from swarmnode.observe.snapshot import NodeSnapshot

TICK_SECONDS = 1.0
PORTS_TRIED = 64
"""Ports from `http.port` on, at most, where other processes listen."""
STALLED_READER_SECONDS = 10
"""A client that does not read its answer is dropped after this long; hypercorn itself would wait
for ever, and with it the drain."""

PAGE = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
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
)

log = structlog.get_logger(__name__)


class Pulse:
    """Once a second: takes a point of history, and measures how late the event loop is."""

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
                # a defect in what watches the node must not end the node; requests show it as
                # status 500
                if not failed:
                    log.exception("no snapshot")
                failed = True
            await self._save()
            due = trio.current_time() + TICK_SECONDS
            await trio.sleep_until(due)
            self._ticked_at = trio.current_time()
            self.lag_seconds = max(0.0, self._ticked_at - due)

    async def _save(self) -> None:
        """Now and then: what is lost with the process is a minute of charts."""
        if self._data_dir is None or trio.current_time() < self._save_at:
            return
        self._save_at = trio.current_time() + SAVE_SECONDS
        await trio.to_thread.run_sync(self.save)

    def save(self) -> None:
        """Keep the history. Never raises."""
        if self._data_dir is None:
            return
        try:
            self._history.save(self._data_dir)
        except OSError as error:  # a full disk: the charts go on
            log.warning("the charts' past is not saved", error=str(error))


def make_app(
    snapshot: Callable[[], NodeSnapshot],
    history: History,
    pulse: Pulse,
    only_loopback: bool,
    data_dir: Path | None = None,
) -> ASGIApp:
    """The ASGI application, without a socket. data_dir: where the trainer writes what was
    answered."""
    registry = make_registry(snapshot)
    files = resources.files("swarmnode.observe") / "page"
    page = {path: ((files / name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}

    async def metrics(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    async def healthz(_: Request) -> Response:
        return _json(health.alive(pulse.silence_seconds))

    async def readyz(_: Request) -> Response:
        return _json(health.ready(snapshot()))

    async def status(request: Request) -> Response:
        asked = request.query_params.get("points", str(POINTS))
        if not (asked.isascii() and asked.isdecimal() and len(asked) <= 6):
            raise HTTPException(400, "points must be a number")
        return Response(status_json(snapshot(), history, int(asked)), media_type="application/json")

    async def answers(_: Request) -> Response:
        found = (
            await trio.to_thread.run_sync(samples.newest, data_dir, samples.PAGE_GROUPS)
            if data_dir is not None
            else []
        )
        return Response(samples.for_page(found), media_type="application/json")

    async def asset(request: Request) -> Response:
        body, kind = page[request.url.path]
        return Response(body, media_type=f"{kind}; charset=utf-8")

    routes = [
        ("/metrics", metrics),
        ("/healthz", healthz),
        ("/readyz", readyz),
        ("/status", status),
        ("/samples", answers),
    ]
    app = Starlette(
        routes=[
            Route(path, serve, methods=["GET"])
            for path, serve in [*routes, *((path, asset) for path in page)]
        ]
    )
    return Gate(app, only_loopback)


def status_json(snapshot: NodeSnapshot, history: History, points: int = POINTS) -> bytes:
    """What /status answers: {"ready": Verdict, "troubles": [..], "snapshot": NodeSnapshot,
    "history": {column: [..]}}."""
    told = {
        "ready": health.ready(snapshot),
        "troubles": health.troubles(snapshot),
        "snapshot": snapshot,
        "history": history.columns(points) if points else {},
    }
    return msgspec.json.encode(told)


def _json(verdict: health.Verdict) -> Response:
    return Response(
        msgspec.json.encode(verdict),
        status_code=200 if verdict.ok else 503,
        media_type="application/json",
    )


class Gate:
    """In front of every route: refuses foreign hosts, sends the security headers with whatever is
    answered."""

    def __init__(self, app: ASGIApp, only_loopback: bool) -> None:
        self._app = app
        self._only_loopback = only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            # a WebSocket handshake ends without an answer, which hypercorn turns into an error
            # status
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [
                        *((k, v) for k, v in message["headers"] if k != b"cache-control"),
                        *HEADERS,
                    ],
                }
            await send(message)

        host = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), ""
        )
        if self._only_loopback and not is_loopback(host):
            await Response("421 this node answers to localhost only\n", 421)(
                scope, receive, send_with_headers
            )
            return
        await self._app(scope, receive, send_with_headers)


def is_loopback(host: str) -> bool:
    """Whether a Host header or a bind address names this machine: localhost, 127.0.0.0/8 or ::1,
    with any port, as people forward ports."""
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


def listen(cfg: HttpConfig, stalled_reader_seconds: int = STALLED_READER_SECONDS) -> socket.socket:
    """Return the listening socket: at `http.port`, or at the next free port where another process
    has that one, because a page's port is no reason not to train.

    Raises:
        Unavailable: the address cannot be had, or all `PORTS_TRIED` ports are taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            cfg.host, cfg.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise Unavailable(f"http.host {cfg.host!r}: {error.strerror or error}") from error
    ports = range(cfg.port, min(cfg.port + PORTS_TRIED, 65536)) if cfg.port else range(1)
    for port in ports:
        try:
            sock = _listen_at(family, (address[0], port, *address[2:]), stalled_reader_seconds)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            raise Unavailable(
                f"http {cfg.host}:{port}: {error.strerror or error}; set http.port to a free one,"
                " or 0"
            ) from error
        if port != cfg.port:
            log.warning("http.port is taken, using the next free port", taken=cfg.port, port=port)
        return sock
    raise AssertionError("no port tried")


def _listen_at(
    family: int, address: tuple[object, ...], stalled_reader_seconds: int
) -> socket.socket:
    """Return a socket that listens at `address`. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; inherited by accepted connections
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_reader_seconds * 1000
            )
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
    sock: socket.socket | None = None,
    shutdown_trigger: Callable[[], Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]  # old stubs may be installed
) -> None:
    """Serve until cancelled, or until `shutdown_trigger` returns and open answers are sent.

    Starts with the base URL, e.g. `http://127.0.0.1:9464`. `snapshot` is called once a second and
    once per request; what it raises is logged and answered with status 500. `data_dir`: where the
    charts' past is kept over restarts, and where the trainer writes samples; None is nowhere.
    `sock` is a listening socket to use, and close, instead of `listen(cfg)`. An error inside the
    HTTP server is logged and the server started again: nobody who can open a connection may end the
    node.

    Raises:
        Unavailable: see `listen`.
    """
    sock = sock or listen(cfg)
    host, port = sock.getsockname()[:2]
    history = History()
    if data_dir is not None:
        history.load(data_dir)
    pulse = Pulse(snapshot, history, data_dir)
    timed = lambda: msgspec.structs.replace(snapshot(), loop_lag_seconds=pulse.lag_seconds)
    app = make_app(timed, history, pulse, only_loopback=is_loopback(host), data_dir=data_dir)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pulse.run)
            task_status.started(
                f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            )
            await _serve_steadily(app, sock, shutdown_trigger)
            nursery.cancel_scope.cancel()
    finally:
        sock.close()
        pulse.save()


async def _serve_steadily(
    # an ASGI application, for which starlette and hypercorn have types that do not fit each other
    app: typing.Any,  # noqa: ANN401
    sock: socket.socket,
    shutdown_trigger: Callable[[], Awaitable[None]] | None,
) -> None:
    while True:
        config = hypercorn.config.Config()
        # a copy: hypercorn closes what it is given, and we may need it again
        config.bind = [f"fd://{sock.dup().detach()}"]
        config.include_server_header = False
        config.errorlog = logging.getLogger("hypercorn.error")
        config.errorlog.setLevel(logging.WARNING)
        try:
            await hypercorn.trio.serve(app, config, shutdown_trigger=shutdown_trigger, mode="asgi")
            return
        except Exception:
            log.exception("the HTTP server failed and is started again")
            await trio.sleep(TICK_SECONDS)
