"""A fake inference server. It answers in the form of vLLM 0.32.0, samples from a small policy,
and misbehaves on demand.

    with StandIn(policy.clone()) as server:
        server.fault = "nan"

A node is configured with `server.url`. Faults are the keys of ANSWER_FAULTS, and `ignores_weights`,
`ignores_adapter` and `other_model`.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file

from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import score

ANSWER_FAULTS = {
    "positive": "invalid log-probabilities",
    "nan": "invalid response",
    "minus_9999": "invalid log-probabilities",
    "one_fewer": "completions",
    "text": "invalid response",
    "beyond_vocabulary": "outside the vocabulary",
    "negative_id": "outside the vocabulary",
    "other_tokens": "of other tokens",
    "after_the_end": "after its end",
    "too_long": "a completion of",
    "aborted": "ended by",
    "empty": "a completion of 0 tokens",
    "no_versions": "which weights",
    "error_500": "returned status 500",
    "html": "invalid response",
    "huge": "exceeds",
    "half": "closed",
    "moved": "returned status 307",
    "invented": "would not have sampled",
}
"""Fault of an answer to `generate` → words of the log line that reports it."""


class StandIn:
    """A server on loopback. policy: the sampling policy, whose weights the server changes."""

    def __init__(self, policy: Policy) -> None:
        self.fault = ""
        self.context: int | None = policy.context
        self.asked: list[str] = []
        """Targets of all requests, in order."""
        self.bodies: list[Any] = []
        """Bodies of the requests to `generate`."""
        self.hold_at: int | None = None
        """A completion waits for a weight load before this token."""
        self._policy, self._first = policy, policy.clone()
        self._random = torch.Generator().manual_seed(0)
        self._adapter_on = False
        self._version = "default"
        self._loads = 0
        self._running = threading.Event()
        self._running.set()
        self._loaded = threading.Condition()
        self._lock = threading.Lock()
        self._stopping = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self, None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                outer._answer(self, json.loads(body))

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening. Requests in progress end without an answer."""
        self._stopping = True
        with self._loaded:
            self._loaded.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def restart(self) -> None:
        """Restart with the base weights and without a weight version."""
        with self._lock:
            self._policy.base.load_state_dict(self._first.base.state_dict())
            self._adapter_on, self._version = False, "default"

    # ---- HTTP ------------------------------------------------------------------------------------

    def _answer(self, http: BaseHTTPRequestHandler, body: Any) -> None:
        target = http.path
        self.asked.append(target)
        sampled = target == "/inference/v1/generate" and "logprob_token_ids" not in json.dumps(body)
        fault = self.fault if sampled else ""
        if fault == "slow":
            with self._loaded:
                self._loaded.wait_for(lambda: self._stopping or self.fault != "slow")
        if fault == "moved":
            self._send(http, 307, b"")
            return
        try:
            made = self._handle(target, body)
        except Exception as error:  # reported as HTTP 500
            message = {"error": {"message": repr(error), "type": "InternalServerError"}}
            self._send(http, 500, json.dumps(message).encode())
            return
        if self._stopping:
            http.close_connection = True
            return
        if fault == "error_500":
            self._send(http, 500, json.dumps({"error": {"message": "EngineCore died"}}).encode())
            return
        if fault in SPOILED:
            choice = made["choices"][-1]
            SPOILED[fault](choice, choice["logprobs"]["content"][0])
        if fault == "one_fewer":
            made["choices"].pop()
        data = json.dumps(made).encode() if made is not None else b""
        if fault == "html":
            data = b"<html>It works!</html>"
        if fault == "huge":
            data = b" " * 2**24 + data
        self._send(http, 200, data, half=fault == "half")

    def _send(
        self, http: BaseHTTPRequestHandler, status: int, data: bytes, half: bool = False
    ) -> None:
        with contextlib.suppress(OSError):  # the client disconnected
            http.send_response(status)
            http.send_header("Content-Type", "application/json")
            http.send_header("Content-Length", str(len(data)))
            if status == 307:
                http.send_header("Location", f"{self.url}/elsewhere")
            http.end_headers()
            http.wfile.write(data[: len(data) // 2] if half else data)
        http.close_connection = True

    def _handle(self, target: str, body: Any) -> Any:
        path = target.split("?")[0]
        match path:
            case "/v1/models":
                model = {"id": "policy", "root": "DIRECTORY", "parent": None}
                return {"object": "list", "data": [{**model, "max_model_len": self.context}]}
            case "/version":
                return {"version": "0.32.0"}
            case "/health":
                return None
            case "/server_info":
                model = {"dtype": "torch.float32", "max_logprobs": -1}
                model["logprobs_mode"] = "processed_logprobs"
                lora = {"max_lora_rank": 16}
                return {"vllm_config": {"model_config": model, "lora_config": lora}}
            case "/pause":
                self._running.clear()
                return {"status": "paused"}
            case "/resume":
                self._running.set()
                return {"status": "resumed"}
            case "/collective_rpc":
                self._load(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                return {"results": [None]}
            case "/v1/load_lora_adapter":
                self._load(Path(body["lora_path"]) / "adapter_model.safetensors")
                return None
            case "/update_weight_version":
                self._set_version(body["new_version"])
                return {"success": True, "new_version": self._version}
            case "/inference/v1/generate":
                return self._vllm(body)
        raise ValueError(f"no such target: {path}")

    # ---- weights ---------------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        tensors = load_file(path)
        if self.fault in ("ignores_weights", "other_model") and self._loads:
            return
        if self.fault == "other_model":
            tensors = {name: 1.05 * tensor for name, tensor in tensors.items()}
        with self._lock, torch.no_grad():
            if path.name == "adapter_model.safetensors":
                mine = dict(self._policy.model.named_parameters())
                for name, tensor in tensors.items():
                    mine[name.replace(".weight", ".default.weight")].copy_(tensor)
                self._adapter_on = True
            else:
                mine = self._policy.base.state_dict()
                for name, tensor in tensors.items():
                    under = name.replace(".weight", ".base_layer.weight")
                    mine[name if name in mine else under].copy_(tensor)
        self._loads += 1

    def _set_version(self, version: str) -> None:
        with self._loaded:
            self._version = version
            self._loaded.notify_all()

    def _present(self) -> Policy:
        with_adapter = self._adapter_on and self.fault != "ignores_adapter"
        return replace(self._policy, adapter_off=not with_adapter)

    # ---- sampling --------------------------------------------------------------------------------

    def _sample(
        self, prompt: list[int], most: int, params: dict[str, Any]
    ) -> list[tuple[list[int], list[float], list[str]]]:
        """Return (ids, log-probabilities, versions) of each completion."""
        rows, temperature = params["n"], params["temperature"]
        ends, bias = params["stop_token_ids"], params.get("logit_bias") or {}
        draws = self._random
        ids: list[list[int]] = [[] for _ in range(rows)]
        scores: list[list[float]] = [[] for _ in range(rows)]
        versions: list[list[str]] = [[] for _ in range(rows)]
        for place in range(most):
            alive = [row for row in range(rows) if not ids[row] or ids[row][-1] not in ends]
            if not alive:
                break
            self._wait(place)
            with self._lock, torch.no_grad():
                batch = torch.tensor([prompt + ids[row] for row in alive])
                positions = torch.arange(batch.shape[1]).expand_as(batch)
                logits = self._present().logits(batch, None, positions, keep=1)[:, -1]
                for token, value in bias.items():
                    logits[:, int(token)] += value
                chances = torch.log_softmax(logits.float() / temperature, -1)
                drawn = torch.multinomial(chances.exp(), 1, generator=draws)[:, 0]
                if self.fault == "invented":  # true log-probabilities of another text
                    drawn = chances.topk(24).indices[:, -1]
                for row, token, chance in zip(alive, drawn, chances, strict=True):
                    ids[row].append(int(token))
                    scores[row].append(float(chance[token]))
                    versions[row].append(self._version)
        return list(zip(ids, scores, versions, strict=True))

    def _wait(self, place: int) -> None:
        self._running.wait()
        if self.hold_at == place:
            now = self._version
            with self._loaded:
                self._loaded.wait_for(lambda: self._stopping or self._version != now)
            self._running.wait()

    def _vllm(self, body: Any) -> Any:
        params, prompt = body["sampling_params"], body["token_ids"]
        head = {"request_id": "generate-tokens-0", "model": "policy", "output_mode": "tokens"}
        if (wanted := params.get("logprob_token_ids")) is not None:
            with self._lock:
                logprobs = [
                    score(self._present(), [(prompt, [token])], 1.0)[0][0] for token in wanted
                ]
            scored = [{"token_id": i, "logprob": x} for i, x in zip(wanted, logprobs, strict=True)]
            content = [{**scored[0], "rank": 1, "top_logprobs": scored[:1]}]
            choice = {"index": 0, "finish_reason": "length", "token_ids": wanted[:1]}
            return {**head, "choices": [{**choice, "logprobs": {"content": content}}]}
        self.bodies.append(body)
        ends = params["stop_token_ids"]
        made = self._sample(prompt, params["max_tokens"], params)
        choices = [
            {
                "index": index,
                "finish_reason": "stop" if ids[-1] in ends else "length",
                "stop_reason": ids[-1] if ids[-1] in ends else None,
                "token_ids": ids,
                "routed_experts": None,
                "weight_versions": spans(versions),
                "logprobs": {
                    "content": [
                        {
                            "token_id": token,
                            "logprob": x,
                            "rank": 1,
                            "top_logprobs": [{"token_id": token, "logprob": x, "rank": 1}],
                        }
                        for token, x in zip(ids, scores, strict=True)
                    ]
                },
            }
            for index, (ids, scores, versions) in enumerate(made)
        ]
        return {**head, "prompt_logprobs": None, "choices": choices}


def spans(versions: list[str]) -> list[dict[str, object]]:
    """Return runs of equal versions, as vLLM reports them."""
    made: list[dict[str, object]] = []
    for place, version in enumerate(versions):
        if made and made[-1]["version"] == version:
            made[-1]["end"] = place + 1
        else:
            made.append({"version": version, "start": place, "end": place + 1})
    return made


def _rename(choice: Any, first: Any, token: int) -> None:
    choice["token_ids"][0] = first["token_id"] = token


def _continue_after_the_end(choice: Any, first: Any) -> None:
    repeated = [1, *choice["token_ids"]]
    choice["logprobs"]["content"].insert(0, {"token_id": 1, "logprob": -1.0})
    choice["token_ids"] = repeated[: max(2, len(repeated))]
    choice["weight_versions"][-1]["end"] += 1


def _repeat(choice: Any, first: Any, times: int) -> None:
    choice["token_ids"] = choice["token_ids"] * times
    choice["logprobs"]["content"] = choice["logprobs"]["content"] * times


SPOILED: dict[str, Callable[[Any, Any], object]] = {
    "positive": lambda choice, first: first.update(logprob=0.5),
    # json.dumps writes NaN, which is not valid JSON
    "nan": lambda choice, first: first.update(logprob=math.nan),
    "minus_9999": lambda choice, first: first.update(logprob=-9999.0),
    "text": lambda choice, first: choice.update(token_ids="seven"),
    "beyond_vocabulary": lambda choice, first: _rename(choice, first, 10**6),
    "negative_id": lambda choice, first: _rename(choice, first, -1),
    "other_tokens": lambda choice, first: first.update(token_id=first["token_id"] + 1),
    "after_the_end": _continue_after_the_end,
    "too_long": lambda choice, first: _repeat(choice, first, 300),
    "aborted": lambda choice, first: choice.update(finish_reason="abort"),
    "empty": lambda choice, first: _repeat(choice, first, 0),
    "no_versions": lambda choice, first: choice.update(weight_versions=[]),
}
"""Fault → change of the last choice of a correct answer and of its first token."""


@contextmanager
def raw_server(chunks: Iterable[bytes] = ()) -> Iterator[str]:
    """Yield the URL of a port that sends `chunks` to its first client and then nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                caller, _ = listener.accept()
                with caller:
                    caller.recv(2**16)
                    for chunk in chunks:
                        caller.sendall(chunk)

        thread = threading.Thread(target=serve, daemon=True)
        if chunks:
            thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
