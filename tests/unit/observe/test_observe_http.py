from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import psutil
import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from structlog.testing import capture_logs

from swarmnode.config import HttpConfig
from swarmnode.errors import Unavailable
from swarmnode.observe import http
from swarmnode.observe.history import History
from swarmnode.observe.http import (
    CACHE_SECONDS,
    CONNECTIONS,
    METRICS_PATHS,
    PAGE,
    PORTS_TRIED,
    HttpRoutes,
    LoopMonitor,
    Request,
    is_loopback,
    listen,
    serve_http,
)
from swarmnode.observe.metrics import METRICS
from swarmnode.observe.snapshot import Health, NodeSnapshot
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from tests.support.snapshots import example
from tests.support.waiting import free_port, until

PAGE_ONLY = HttpConfig(port=0)


@asynccontextmanager
async def served(
    snapshot=example, config: HttpConfig = PAGE_ONLY, **kwargs
) -> AsyncIterator[httpx.AsyncClient]:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(
            lambda task_status: serve_http(config, snapshot, task_status=task_status, **kwargs)
        )
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            yield client
        nursery.cancel_scope.cancel()


async def test_metrics_have_the_requested_format() -> None:
    async with served() as client:
        plain = await client.get("/metrics")
        kind = "application/openmetrics-text; version=1.0.0"
        open_metrics = await client.get("/metrics", headers={"accept": kind})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert len(list(parse_text(plain.text))) == len(METRICS)
    assert open_metrics.headers["content-type"].startswith(kind)
    assert len(list(parse_openmetrics(open_metrics.text))) == len(METRICS)


async def test_metrics_listener_does_not_serve_the_page() -> None:
    port = free_port()
    async with served(config=HttpConfig(port=0, metrics=f"0.0.0.0:{port}")) as client:
        codes = {}
        for path in ("/metrics", "/healthz", "/readyz", *PAGE, "/status", "/samples"):
            url = f"http://127.0.0.1:{port}{path}"
            there = await client.get(url, headers={"host": "attic.example"})
            codes[path] = (there.status_code, (await client.get(path)).status_code)
        assert (await client.get("/", headers={"host": "attic.example"})).status_code == 421
    assert codes == dict.fromkeys(METRICS_PATHS, (200, 200)) | dict.fromkeys(
        [*PAGE, "/status", "/samples"], (404, 200)
    )


async def test_readyz_lists_the_reasons() -> None:
    async with served(NodeSnapshot) as client:
        early = await client.get("/readyz")
    ready = NodeSnapshot(health=Health(policy_loaded=True))
    async with served(lambda: ready) as client:
        later = await client.get("/readyz")
        alive = await client.get("/healthz")
    assert (early.status_code, early.json()["reasons"]) == (503, ["the policy is not loaded yet"])
    assert (later.status_code, later.json()) == (200, {"ok": True, "reasons": []})
    assert alive.status_code == 200


async def test_status_has_snapshot_and_history() -> None:
    async with served() as client:
        answer = (await client.get("/status")).json()
        without = (await client.get("/status?points=0")).json()
        wrong = await client.get("/status?points=-1")
    rollouts = msgspec.convert(answer["snapshot"]["rollouts"], ExchangeStatistics, strict=False)
    assert rollouts == example().rollouts
    assert answer["history"]["policy_version"] == [250]
    assert without["history"] == {}
    assert wrong.status_code == 400


async def test_only_get_and_head_of_known_paths() -> None:
    async with served() as client:
        assert (await client.post("/status")).status_code == 405
        assert (await client.request("TRACE", "/")).status_code == 405
        head = await client.head("/status")
        assert (head.status_code, head.content) == (200, b"")
        for path in ("/nope", "/page/app.js", "/../http.py", "/%2e%2e/http.py", "/status/"):
            assert (await client.get(path)).status_code in (404, 307), path


async def test_every_answer_carries_the_security_headers() -> None:
    async with served() as client:
        for path in ("/", "/app.js", "/status", "/metrics", "/nope"):
            headers = (await client.get(path)).headers
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers


async def test_a_foreign_host_header_is_refused() -> None:
    async with served() as client:
        for host in (
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "localhost.evil.example:9464",
            "evil.example.localhost.",
            "localhost@evil.example",
            "10.0.0.1:9464",
            "",
        ):
            assert (await client.get("/status", headers={"host": host})).status_code == 421, host
        for host in ("localhost:8080", "LOCALHOST", "127.0.0.1", "[::1]:9464"):
            assert (await client.get("/status", headers={"host": host})).status_code == 200, host


def test_a_bind_address_is_loopback_or_not() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"))
    assert not any(
        is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "node.example", "[", "[::1")
    )


async def test_used_port_is_replaced_by_the_next_free_one() -> None:
    with listen(HttpConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        with capture_logs() as lines, listen(HttpConfig(port=port)) as next_free:
            assert port < next_free.getsockname()[1] < port + PORTS_TRIED
    assert [line["taken"] for line in lines] == [port]


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_unusable_address_is_one_line(host: str) -> None:
    with pytest.raises(Unavailable, match=host) as raised:
        listen(HttpConfig(host=host, port=0))
    assert "\n" not in str(raised.value)


async def test_failing_snapshot_fails_only_requests() -> None:
    broken = True

    def sometimes() -> NodeSnapshot:
        if broken:
            raise RuntimeError("a part is restarting")
        return example()

    async with served(sometimes) as client:
        assert [
            (await client.get(path)).status_code for path in ("/status", "/metrics", "/healthz")
        ] == [500, 500, 200]
        broken = False
        assert (await client.get("/status")).status_code == 200


async def exchange(client: httpx.AsyncClient, sent: bytes) -> bytes:
    """Return all bytes of the server's answer to a request, until the server closes."""
    answer = bytearray()
    async with await trio.open_tcp_stream(client.base_url.host, client.base_url.port) as stream:
        with trio.fail_after(60):
            try:
                await stream.send_all(sent)
                async for part in stream:
                    answer += part
            except trio.BrokenResourceError:
                pass  # it closed before everything was sent
    return bytes(answer)


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_connection_answers_one_request() -> None:
    snapshots = 0

    def counted() -> NodeSnapshot:
        nonlocal snapshots
        snapshots += 1
        return example()

    async with served(counted) as client:
        for count in (2, 16_000):
            answer = await exchange(client, GET.replace(b"healthz", b"status?points=0") * count)
            assert answer.count(b"HTTP/1.1 ") <= 1
        answer = await exchange(client, GET * 2)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()
    assert snapshots < 20


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        GET.replace(b"1.1", b"1.0"),
        GET.replace(b"1.1", b"2.0"),
        GET.replace(b"1.1", b"9.9"),
        GET.replace(b" HTTP/1.1", b""),
        GET.replace(b"Host: localhost\r\n", b""),
        GET.replace(b"Host", b"Host: evil.example\r\nHost"),
        GET.replace(b"/healthz", b"http://localhost/healthz"),
        GET.replace(b"/healthz", b"*"),
        GET.replace(b"Host", b"X: " + b"a" * 100_000 + b"\r\nHost"),
    ],
    ids=lambda sent: repr(sent[:24]),
)
async def test_serves_only_plain_http_1_1_requests(sent) -> None:
    async with served() as client:
        answer = await exchange(client, sent)
        assert b" 200 " not in answer
        assert (await client.get("/healthz")).status_code == 200


async def test_silent_connections_do_not_block_new_ones() -> None:
    async with served() as client, contextlib.AsyncExitStack() as stack:
        where = (client.base_url.host, client.base_url.port)
        silent = [
            await stack.enter_async_context(await trio.open_tcp_stream(*where))
            for _ in range(3 * CONNECTIONS)
        ]
        for stream in silent:
            await stream.send_all(GET[:10])
        assert (await client.get("/status")).status_code == 200
        closed = 0
        with trio.fail_after(60):
            for stream in silent[:CONNECTIONS]:  # the oldest
                with contextlib.suppress(trio.BrokenResourceError):
                    assert await stream.receive_some(1) == b""
                closed += 1
        assert closed == CONNECTIONS


async def test_stalled_client_is_disconnected(monkeypatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    large = msgspec.structs.replace(example(), peers=example().peers * 50_000)
    async with served(lambda: large) as client:
        where = (client.base_url.host, client.base_url.port)
        async with await trio.open_tcp_stream(*where) as drips:
            with trio.fail_after(60), contextlib.suppress(trio.BrokenResourceError):
                while True:
                    await drips.send_all(b"G")
                    await trio.sleep(0.05)
        async with await trio.open_tcp_stream(*where) as greedy:
            await greedy.send_all(GET.replace(b"healthz", b"status"))
            got = len(await greedy.receive_some(10))
            with trio.fail_after(60):
                await until(lambda: not http_connections(greedy))
            with contextlib.suppress(trio.BrokenResourceError):
                async for part in greedy:
                    got += len(part)
        assert got < len(msgspec.json.encode(large))


def http_connections(client: trio.SocketStream) -> list[object]:
    """The server's ends of a client's connection."""
    port = client.socket.getsockname()[1]
    return [
        each
        for each in psutil.Process().net_connections("tcp4")
        if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
    ]


async def test_requests_of_a_second_share_one_snapshot(autojump_clock) -> None:
    taken = 0

    def counted() -> NodeSnapshot:
        nonlocal taken
        taken += 1
        return example()

    history = History()
    surface = HttpRoutes(counted, history, LoopMonitor(counted, history), only_loopback=True)

    async def ask(target: str) -> None:
        answered = await surface.answer(Request("GET", target, {"host": "localhost"}))
        assert answered.status == 200

    for points in range(100):
        await ask(f"/status?points={points}")
        await ask("/metrics")
    assert taken == 1
    await trio.sleep(CACHE_SECONDS)
    await ask("/metrics")
    assert taken == 2


async def test_cross_site_requests_are_refused() -> None:
    async with served() as client:
        for path in ("/", "/status", "/metrics", "/samples", "/healthz", "/app.js"):
            site = lambda name: {"sec-fetch-site": name}
            assert (await client.get(path, headers=site("cross-site"))).status_code == 403, path
            for own in ("same-origin", "none"):
                assert (await client.get(path, headers=site(own))).status_code == 200, path
