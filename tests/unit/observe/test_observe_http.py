from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from structlog.testing import capture_logs

from swarmnode.config import HttpConfig
from swarmnode.errors import Unavailable
from swarmnode.observe.http import PORTS_TRIED, is_loopback, listen, serve_http
from swarmnode.observe.metrics import METRICS
from swarmnode.observe.snapshot import Health, NodeSnapshot
from tests.support.snapshots import example
from tests.support.waiting import until


@asynccontextmanager
async def served(snapshot=example, **kwargs) -> AsyncIterator[httpx.AsyncClient]:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(
            lambda task_status: serve_http(
                HttpConfig(port=0), snapshot, task_status=task_status, **kwargs
            )
        )
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
            yield client
        nursery.cancel_scope.cancel()


async def test_metrics_come_in_the_format_that_was_asked_for() -> None:
    async with served() as client:
        plain = await client.get("/metrics")
        open_metrics = await client.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert len(list(parse_text(plain.text))) == len(METRICS)
    assert open_metrics.headers["content-type"].startswith(
        "application/openmetrics-text; version=1.0.0"
    )
    assert len(list(parse_openmetrics(open_metrics.text))) == len(METRICS)


async def test_readyz_says_what_is_missing() -> None:
    now = NodeSnapshot()
    async with served(lambda: now) as client:
        early = await client.get("/readyz")
        now = NodeSnapshot(health=Health(network_ready=True, policy_loaded=True))
        later = await client.get("/readyz")
        alive = await client.get("/healthz")
    assert (early.status_code, early.json()["reasons"]) == (
        503,
        ["network not up yet", "policy not loaded yet"],
    )
    assert (later.status_code, later.json()) == (200, {"ok": True, "reasons": []})
    assert alive.status_code == 200


async def test_status_is_the_snapshot_and_its_past() -> None:
    async with served() as client:
        told = (await client.get("/status")).json()
        without = (await client.get("/status?points=0")).json()
        wrong = await client.get("/status?points=-1")
    assert (
        msgspec.json.decode(msgspec.json.encode(told["snapshot"]), type=NodeSnapshot).rollouts
        == example().rollouts
    )
    assert told["history"]["policy_version"] == [250]
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
            assert (headers["x-frame-options"], headers["x-content-type-options"]) == (
                "DENY",
                "nosniff",
            )
            assert "server" not in headers


async def test_a_foreign_host_header_is_refused() -> None:
    async with served() as client:
        for host in (
            "evil.example",
            "127.0.0.1.evil.example",
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


async def test_a_taken_port_is_replaced_by_the_next_free_one() -> None:
    with listen(HttpConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        with capture_logs() as lines, listen(HttpConfig(port=port)) as next_free:
            assert port < next_free.getsockname()[1] < port + PORTS_TRIED
    assert [line["taken"] for line in lines] == [port]


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_had_is_one_clear_line(host: str) -> None:
    with pytest.raises(Unavailable, match=host) as raised:
        listen(HttpConfig(host=host, port=0))
    assert "\n" not in str(raised.value)


async def test_shutdown_trigger_ends_it() -> None:
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        with trio.fail_after(120):
            url = await nursery.start(
                lambda task_status: serve_http(
                    HttpConfig(port=0), example, shutdown_trigger=stop.wait, task_status=task_status
                )
            )
            stop.set()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1).close()


async def test_a_failing_snapshot_fails_requests_and_not_the_node() -> None:
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


async def test_who_does_not_read_its_answers_does_not_hold_the_shutdown() -> None:
    large = msgspec.structs.replace(example(), peers=example().peers * 5000)
    stop = trio.Event()
    sock = listen(HttpConfig(port=0), stalled_reader_seconds=1)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_http(
                HttpConfig(port=0),
                lambda: large,
                sock=sock,
                shutdown_trigger=stop.wait,
                task_status=task_status,
            )
        )
        async with await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])) as greedy:
            await greedy.send_all(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
            await greedy.receive_some(10)
            stop.set()
            await until(lambda: not nursery.child_tasks, seconds=15)


async def test_garbage_on_the_port_leaves_it_serving() -> None:
    async with served() as client:
        for garbage in (
            b"\x16\x03\x01\x00\xff" * 40,
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
            b"A" * 70000,
        ):
            stream = await trio.open_tcp_stream(client.base_url.host, client.base_url.port)
            async with stream:
                with trio.move_on_after(1):
                    try:
                        await stream.send_all(garbage)
                        await stream.receive_some(100)
                    except trio.BrokenResourceError:
                        continue
        assert (await client.get("/healthz")).status_code == 200
