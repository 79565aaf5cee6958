"""Requests to a vLLM server, with tokens in and out.

    about            program, model and maximum row length
    settings         flags that decide whether the server is usable, for the doctor
    generate         completions of a prompt, with log-probabilities and weight versions
    score            log-probabilities of given ids, to check the weights
    load             new weights from a directory that the server can read; requests continue

This module does not need torch. It checks only the form of a response; `served.py` checks the
content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode.policy.engine.client import ANSWER_BYTES, JsonClient, ServerFailed

ADAPTER = "swarmnode-adapter"
"""Name of the trained adapter at a server."""
ABOUT_SECONDS = 10.0
SCORE_THREADS = 8
SCORE_SECONDS = 120.0
"""Deadline of a scoring call, which includes compilation at the first call."""
LOAD_SECONDS = 600.0
"""Deadline of a load: enough for a 70 B model from a disk that reads 250 MB/s."""
TOKEN_BYTES = 512
"""Bound on the response size per token, in bytes; vLLM sends about 150."""
COMPLETION_BYTES = 2**28
UNUSED_BIAS = -100.0
"""Lowest logit bias that vLLM accepts."""


@dataclass(frozen=True)
class Question:
    """A prompt to complete `count` times."""

    prompt_ids: Sequence[int]
    count: int
    max_tokens: int
    temperature: float
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    unused_ids: Sequence[int] = ()
    """Rows of the model's output head that correspond to no token; the server must not sample
    them."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a completion, sampled by weights of one version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """A completion as the server sent it."""

    ids: list[int]
    logprobs: list[float]
    was_cut: bool
    """True if the completion ended at its length limit."""
    spans: list[Span]


@dataclass(frozen=True)
class About:
    """A server's description of itself."""

    version: str
    model: str
    """Directory or name of the model that the server was started with."""
    context: int | None = None
    """Maximum number of tokens of a row."""


class ServerStatistics(msgspec.Struct, frozen=True):
    """State of a server as the trainer sees it. Totals count from the trainer's start."""

    url: str
    state: str = "away"
    """`sampling`, or `away` while the own engine samples instead."""
    version: str = ""
    """Version of the server program. Empty until the server has responded, like `model`."""
    model: str = ""
    reason: str = ""
    """Reason why the server is away, in one line."""
    failures: dict[str, int] = {}
    """Number of failures by `client.Reason`."""
    loads: int = 0
    """Number of times that the server has loaded weights."""
    load_seconds: float = 0.0
    """Duration of the last load until its check had passed."""
    gap: float | None = None
    """Mean |Δ log-probability| between server and trainer on the check's text, in nats."""


def answer_bytes(question: Question) -> int:
    return min(ANSWER_BYTES + TOKEN_BYTES * question.count * question.max_tokens, COMPLETION_BYTES)


class VllmToken(msgspec.Struct):
    token_id: int
    logprob: float


class VllmTokens(msgspec.Struct):
    content: list[VllmToken]


class VllmSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class VllmChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: VllmTokens
    weight_versions: list[VllmSpan]


class VllmChoices(msgspec.Struct):
    choices: list[VllmChoice]


class VllmCandidates(msgspec.Struct):
    top_logprobs: list[VllmToken]


class VllmScored(msgspec.Struct):
    content: list[VllmCandidates]


class VllmScore(msgspec.Struct):
    logprobs: VllmScored


class VllmScores(msgspec.Struct):
    choices: list[VllmScore]


class VllmModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class VllmModels(msgspec.Struct):
    data: list[VllmModel]


class VllmVersion(msgspec.Struct):
    version: str


class VllmInfo(msgspec.Struct):
    vllm_config: dict[str, object]


class VllmServer:
    """Client for vLLM 0.32, started with --enable-scale-out in development mode.

    Every call has a deadline and may raise ServerFailed. Any thread may call `generate`.
    """

    def __init__(self, url: str, adapter: bool) -> None:
        """
        Args:
            adapter: True if the trainer loads a LoRA adapter, False if it loads all weights.
        """
        self.client = JsonClient(url)
        self._adapter = adapter
        self._model = ""
        """Model name in requests: the base model, or the adapter once it is loaded."""
        self._version = "none"

    def about(self) -> About:
        models = self.client.call("/v1/models", answer=VllmModels, seconds=ABOUT_SECONDS).data
        bases = [each for each in models if each.parent is None]
        if not bases:
            raise ServerFailed("model", f"{self.client.url} serves no model")
        version = self.client.call("/version", answer=VllmVersion, seconds=ABOUT_SECONDS).version
        self._model, self._version = bases[0].id, "none"
        context = bases[0].max_model_len
        return About(version, bases[0].root or bases[0].id, context)

    def settings(self) -> dict[str, object]:
        info = self.client.call(
            "/server_info?config_format=json", answer=VllmInfo, seconds=6 * ABOUT_SECONDS
        ).vllm_config
        model, lora = info.get("model_config"), info.get("lora_config")
        found = {
            key: model.get(key)
            for key in ("dtype", "logprobs_mode", "max_logprobs")
            if isinstance(model, dict)
        }
        return {**found, "lora_rank": lora.get("max_lora_rank", 0) if isinstance(lora, dict) else 0}

    def generate(self, question: Question, seconds: float) -> list[Completion]:
        params: dict[str, object] = {
            "n": question.count,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            # set explicitly, since a model's generation_config.json may have other defaults
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
            "logprobs": 0,  # no alternatives to the sampled token
            "stop_token_ids": list(question.end_ids),
            **{"skip_special_tokens": False, "detokenize": False},
        }
        if question.unused_ids:
            params["logit_bias"] = {str(each): UNUSED_BIAS for each in question.unused_ids}
        answer = self.client.call(
            "/inference/v1/generate",
            {
                "model": self._model,
                "token_ids": list(question.prompt_ids),
                "cache_salt": self._version,  # reuse no keys and values of former weights
                "sampling_params": params,
            },
            answer=VllmChoices,
            seconds=seconds,
            limit=answer_bytes(question),
        )
        return [_vllm_completion(choice) for choice in answer.choices]

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token, from one request per token.

        Each request asks for the next token of a prefix. `prompt_logprobs` would need a single
        request, but with --enable-lora it crashes vLLM 0.32 if other requests are active.
        """
        prefixes = [[*prompt_ids, *ids[:place]] for place in range(len(ids))]
        with ThreadPoolExecutor(SCORE_THREADS) as threads:
            return list(threads.map(self._next_logprob, prefixes, ids))

    def _next_logprob(self, prefix: list[int], token: int) -> float:
        choices = self.client.call(
            "/inference/v1/generate",
            {
                "model": self._model,
                "token_ids": prefix,
                "cache_salt": self._version,
                "sampling_params": {
                    **{"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
                    # the response covers the sampled token and all but the last of these
                    **{"logprobs": 2, "logprob_token_ids": [token, token - 1 if token else 1]},
                    "detokenize": False,
                },
            },
            answer=VllmScores,
            seconds=SCORE_SECONDS,
        ).choices
        for candidate in (
            each for choice in choices for at in choice.logprobs.content for each in at.top_logprobs
        ):
            if candidate.token_id == token:
                return candidate.logprob
        raise ServerFailed("answer", "the log-probability of a token is missing")

    def load(self, directory: Path, version: str) -> None:
        with self._paused():
            if self._adapter:
                body = {"lora_name": ADAPTER, "lora_path": str(directory), "load_inplace": True}
                self.client.order("/v1/load_lora_adapter", body, LOAD_SECONDS)
                self._model = ADAPTER
            else:
                kwargs = {"weights_path": str(directory)}
                body = {"method": "reload_weights", "kwargs": kwargs}
                self.client.order("/collective_rpc", body, LOAD_SECONDS)
            body = {"new_version": version}
            self.client.order("/update_weight_version", body, ABOUT_SECONDS)
            self._version = version

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.client.order("/pause?mode=keep", {}, LOAD_SECONDS)
        try:
            yield
        finally:
            self.client.order("/resume", {}, ABOUT_SECONDS)


def _vllm_completion(choice: VllmChoice) -> Completion:
    tokens = choice.logprobs.content
    if choice.finish_reason not in ("stop", "length"):
        raise ServerFailed("answer", f"a completion ended by {choice.finish_reason[:40]!r}")
    if [each.token_id for each in tokens] != choice.token_ids:
        raise ServerFailed("answer", "log-probabilities are of other tokens")
    spans = [Span(each.version, each.start, each.end) for each in choice.weight_versions]
    return Completion(
        choice.token_ids,
        [each.logprob for each in tokens],
        choice.finish_reason == "length",
        spans,
    )
