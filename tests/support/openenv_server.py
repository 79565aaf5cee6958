"""`python -m tests.support.openenv_server PORT TLS_PORT CERTIFICATE KEY` runs an OpenEnv 0.10
server, written from its wire format, without TLS and with it. Some of its paths misbehave.

    /sums       what is seed % 10 plus 1? One step, reward 1 for the right answer,
                an error for the answer "raise"
    /other      /sums with other questions
    /moody      another question at every reset
    /guess      an episode: guess seed % 10 plus 1; a step answers higher, lower or right
    /odd        a reward of 7
    /none       no reward
    /silent     never answers
    /huge       2 MiB in an answer
    /nonsense   no JSON
    /drop       closes at a step
    /moved      redirects
"""

from __future__ import annotations

import json
import sys

import hypercorn.trio
import trio
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

REWARDS: dict[str, float | None] = {"odd": 7.0, "none": None}


def observation(text: str, reward: float | None, done: bool) -> str:
    data = {"observation": {"text": text, "turn": 0}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": {**data, "metadata": {"by": "test"}}})


def error(message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": "EXECUTION_ERROR"}})


async def session(socket: WebSocket) -> None:
    kind = socket.path_params["kind"]
    if kind == "moved":
        await socket.send_denial_response(RedirectResponse("/sums/ws"))
        return
    await socket.accept()
    seed, resets = 0, 0
    try:
        while True:
            message = json.loads(await socket.receive_text())
            if kind == "silent":
                await trio.sleep_forever()
            if kind in ("nonsense", "huge"):
                await socket.send_text("x" * 2**21 if kind == "huge" else "<html>")
            elif message["type"] == "reset":
                seed, resets = message["data"]["seed"], resets + 1
                about = {"other": "minus", "moody": f"plus {resets} minus"}.get(kind, "plus")
                await socket.send_text(observation(f"What is {seed % 10} {about} 1?", None, False))
            elif kind == "drop":
                await socket.close(1011, "crashed")
                return
            elif message["data"]["message"] == "raise":
                await socket.send_text(error("cannot do\n that"))
            elif message["data"]["message"] == "leave":
                await socket.close(1011, "crashed")
                return
            elif kind == "guess":
                guess, secret = int(message["data"]["message"]), seed % 10 + 1
                text = "right" if guess == secret else "higher" if guess < secret else "lower"
                ended = guess == secret
                await socket.send_text(observation(text, float(ended) if ended else None, ended))
            else:
                right = float(message["data"]["message"] == str(seed % 10 + 1))
                await socket.send_text(observation("", REWARDS.get(kind, right), True))
    except WebSocketDisconnect:
        pass


async def serve(port: str, tls_port: str, certificate: str, key: str) -> None:
    config = Config()
    config.insecure_bind = [f"127.0.0.1:{port}"]
    config.bind = [f"127.0.0.1:{tls_port}"]
    config.certfile, config.keyfile = certificate, key
    config.loglevel = "ERROR"
    await hypercorn.trio.serve(Starlette(routes=[WebSocketRoute("/{kind}/ws", session)]), config)  # type: ignore[arg-type]


if __name__ == "__main__":
    trio.run(serve, *sys.argv[1:])
