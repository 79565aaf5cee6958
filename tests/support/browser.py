"""The status page in a headless Chromium tab, driven over the DevTools protocol, for tests and
screenshots."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self
from unittest import mock

import trio
from trio_websocket import WebSocketConnection, open_websocket_url

from swarmnode.config import HttpConfig
from swarmnode.observe import http
from swarmnode.observe.history import History
from swarmnode.observe.snapshot import NodeSnapshot
from tests.support.snapshots import example, example_at

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
"""The browser may connect to this machine only."""
START_SECONDS = 60.0
CALL_SECONDS = 60.0


class Tab:
    """One page. Its methods raise RuntimeError when the browser or a script in the page fails."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._calls = 0
        self._loaded = False
        self.errors: list[str] = []
        """Console errors of the page, its uncaught exceptions, and what its policy blocked."""
        self.requests: set[str] = set()
        """Requested URLs."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        with trio.fail_after(CALL_SECONDS):
            await self._socket.send_message(
                json.dumps({"id": self._calls, "method": method, "params": params})
            )
            while (reply := await self._receive()).get("id") != self._calls:
                pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return dict(reply["result"])

    async def _receive(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(await self._socket.get_message())
        method, params = reply.get("method"), reply.get("params", {})
        self._loaded |= method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requests.add(params["request"]["url"])
        elif (
            method in ("Runtime.exceptionThrown", "Log.entryAdded") or params.get("type") == "error"
        ):
            self.errors.append(json.dumps(params))
        return reply

    async def js(self, expression: str) -> Any:
        """Evaluate an expression in the page. A promise is awaited."""
        reply = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    async def text(self, name: str) -> str:
        """Return the visible text of the element with this id."""
        return str(await self.js(f"document.getElementById('{name}').innerText"))

    async def until(self, condition: str) -> None:
        """Wait in the page until `condition` holds. Raise RuntimeError after CALL_SECONDS."""
        look = f"const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look();"
        try:
            await self.js(f"new Promise((done) => {{ {look} }})")
        except trio.TooSlowError:
            raise RuntimeError(f"never true: {condition}") from None

    async def open(self, url: str) -> Self:
        self._loaded = False
        await self.call("Page.navigate", url=url)
        with trio.fail_after(CALL_SECONDS):
            while not self._loaded:
                await self._receive()
        return self

    async def look(self, width: int) -> None:
        """Set the viewport width in px."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "Escape": 27, "ArrowLeft": 37}[key]
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            await self.call("Input.dispatchKeyEvent", **event)

    async def picture(self) -> bytes:
        """Return the whole page as PNG."""
        reply = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(reply["data"])


@contextlib.asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Tab]:
    """Start a browser with its profile in `directory` and end it on exit. Raise RuntimeError where
    Chromium is not installed."""
    if CHROMIUM is None:
        raise RuntimeError("no Chromium on this machine")
    profile = f"--user-data-dir={directory / 'profile'}"
    command = [CHROMIUM, *QUIET, profile, "--remote-debugging-port=0", "about:blank"]
    async with trio.open_nursery() as nursery:
        quietly = functools.partial(
            trio.run_process, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
        process = await nursery.start(quietly, command)
        with trio.fail_after(START_SECONDS):
            output = b""
            while (found := re.search(rb"DevTools listening on ws://([^/]+)/", output)) is None:
                more = await process.stderr.receive_some()
                if not more:
                    raise RuntimeError(f"Chromium ended: {output.decode(errors='replace')[-500:]}")
                output += more
        nursery.start_soon(_drain, process.stderr)
        first = await trio.to_thread.run_sync(_first_tab, f"http://{found.group(1).decode()}/json")
        async with open_websocket_url(first, max_message_size=2**27) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.call(f"{domain}.enable")
            yield tab
        nursery.cancel_scope.cancel()


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


def _first_tab(url: str) -> str:
    """Return the WebSocket address of the first tab."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=START_SECONDS) as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))


@contextlib.asynccontextmanager
async def status_page(
    directory: Path,
    snapshot: Callable[[], NodeSnapshot] = example,
    *,
    change: Callable[[NodeSnapshot], NodeSnapshot] = lambda moment: moment,
    history: type[History] | None = None,
    width: int = 1280,
    data_dir: Path | None = None,
) -> AsyncIterator[Tab]:
    """Yield a tab with the drawn page of a node.

    Args:
        directory: For the browser's profile.
        change: Applied to `snapshot` and to each moment of the history.
        history: Past of the node instead of five minutes of the example.
    """

    class Past(History):
        def __init__(self) -> None:
            super().__init__()
            for second in range(300, 600):
                self.add(change(example_at(float(second))))

    serve = functools.partial(
        http.serve_http, HttpConfig(port=0), lambda: change(snapshot()), data_dir=data_dir
    )
    with mock.patch.object(http, "History", history or Past):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(serve)
            async with chromium(directory) as tab:
                await tab.look(width)
                await tab.open(url)
                await tab.until("document.body.dataset.state !== 'connecting'")
                yield tab
            nursery.cancel_scope.cancel()
