"""A Hub server on loopback. It implements the HTTP calls that create a repository and commit to
it."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Requests that the server received. status: HTTP status of every answer, if not 200."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.message = ""
        self.tokens: set[str] = set()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.made.append(asked)
            return {"url": f"{self.url}/{asked.get('organization', 'me')}/{asked['name']}"}
        if "/preupload/" in path:
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        if "/commit/" in path:
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "header":
                    self.message = operation["value"]["summary"]
                elif operation["key"] == "file":
                    self.files[operation["value"]["path"]] = base64.b64decode(
                        operation["value"]["content"]
                    )
            return {
                "commitUrl": f"{self.url}/me/model/commit/0",
                "commitOid": "0" * 40,
                "success": True,
            }
        return {"errors": [], "warnings": []}


@contextlib.contextmanager
def served() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            hub.tokens.add(self.headers.get("authorization", ""))
            answer = (
                hub.answer(self.path.split("?")[0], body) if hub.status == 200 else {"error": "no"}
            )
            self._respond(hub.status, answer)

        def do_GET(self) -> None:
            self._respond(404, {"error": "nothing here"})

        def _respond(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
