"""Engine that samples with a vLLM server.

Requests are sent as token ids, completions return with log-probabilities, and the weights of every
update are passed to the server through a directory.

    ServerFirst     samples with the server if possible, else with the own engine
    Served          the engine: one HTTP request for a group of completions
    ServedWeights   writes, loads and checks the weights of the server (served_weights.py)

A response that cannot be right, that comes from weights other than this node's, or whose text the
policy would not have sampled, is not trained on. After such a response the own engine takes over,
and the server is retried later.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import msgspec
import structlog

from swarmnode.policy.engine.client import ServerFailed
from swarmnode.policy.engine.protocol import (
    FinishedRequest,
    Generation,
    GenerationStatistics,
    Request,
)
from swarmnode.policy.engine.selector import OwnEngine
from swarmnode.policy.engine.served_weights import ServedWeights, head_rows
from swarmnode.policy.engine.vllm import Completion, Question, ServerStatistics, VllmServer
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, score_with_entropy
from swarmnode.policy.text import PromptTooLong

log = structlog.get_logger("swarmnode.trainer")

WORKERS = 64
"""Maximum number of concurrent requests to the server."""
POLL_SECONDS = 0.2
"""Maximum wait for a response before the trainer reports that it is alive, in seconds."""
HEALTH_SECONDS = 10.0
"""Seconds without a response after which a health check is sent to the server."""
REQUEST_SECONDS = 3600.0
"""Deadline of one request, which may queue at the server and wait for loads of weights."""
SILENCE_SECONDS, SILENCE_PER_TOKEN = 300.0, 0.1
"""Maximum wait for the next response, in seconds: 300 s, plus 0.1 s for each token of the longest
answer. On a busy CPU, vLLM's first completion of SmolLM2 took more than 64 s. A health check finds
a dead server sooner."""
RETRY_SECONDS, RETRY_MOST = 30.0, 600.0
"""Delay before a failed server is retried, in seconds; it doubles with each consecutive failure up
to RETRY_MOST."""
AHEAD = 1
"""Number of additional requests per request of a step: the server samples groups of the next step
during this one, like `continuous`."""
REASON_CHARACTERS = 300
"""Maximum length of a failure reason on the status page."""
LOWEST, ROUNDING = -1000.0, 1e-3
"""Range of a valid log-probability: LOWEST to ROUNDING. vLLM sends −9999 in place of NaN."""
CHECKED_ANSWERS = 64
"""Number of latest answers, one of each group, whose text is checked."""
DRIFT, SIGMAS = 0.1, 6.0
"""Mean excess per token in nats that a few updates since sampling explain, and standard deviations
that chance explains."""


# ---- the server, or the own engine ---------------------------------------------------------------


class ServerFirst:
    """Engine that samples with the server if possible, and with the own engine otherwise.

    Args:
        connect: Connects to the server and loads the current weights. Raises ServerFailed.
        engine: Makes an engine from a connection and a sampling configuration.
        own: Builds the own engine when the server is first unavailable.
    """

    def __init__(
        self,
        server: VllmServer,
        connect: Callable[[], ServedWeights],
        engine: Callable[[ServedWeights, Sampling], Served],
        sampling: Sampling,
        own: Callable[[], OwnEngine],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._connect, self._make = server, connect, engine
        self._sampling, self._build_own, self._clock = sampling, own, clock
        self._weights: ServedWeights | None = None
        self._served: Served | None = None
        self.own: OwnEngine | None = None
        """The own engine; None until it is first needed."""
        self._requests: dict[int, Request] = {}
        """Submitted requests that are not finished."""
        self._retry_at, self._failures = -math.inf, 0
        self._seen = ServerStatistics(server.client.url)

    # ---- the engine protocol ---------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._try_server()
        if self._served is not None:
            try:
                self._served.submit(request)
            except ServerFailed as error:
                self._give_up(error)
        if self._served is None:
            self._own_engine().submit(request)
        self._requests[request.number] = request

    def cancel(self, number: int) -> None:
        self._requests.pop(number, None)
        for engine in (self._served, self.own):
            if engine is not None:
                engine.cancel(number)

    def finished(self, version: int) -> list[FinishedRequest]:
        if self._served is None:
            done = self._own_engine().finished(version)
        else:
            try:
                done = self._served.finished(version)
            except ServerFailed as error:
                self._give_up(error)
                return []
            self._failures = 0 if done else self._failures
        for one in done:
            self._requests.pop(one.number, None)
        return done

    def pause(self) -> AbstractContextManager[None]:
        present = self._present()
        return present.pause() if present is not None else nullcontext()

    def ahead(self, count: int) -> int:
        present = self._present()
        return present.ahead(count) if present is not None else 0

    def statistics(self) -> GenerationStatistics:
        engine = self._served or self.own
        return engine.statistics() if engine is not None else GenerationStatistics(0)

    # ---- additional methods ----------------------------------------------------------------------

    def answered(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling
    ) -> list[GroupSample] | None:
        """Return a group of completions for each prompt, without disturbing requests in progress.

        Return None if the server is not sampling.
        """
        self._try_server()
        if self._weights is None:
            return None
        engine = self._make(self._weights, sampling)
        try:
            for number, prompt in enumerate(prompts):
                engine.submit(Request(number, prompt))
            found: dict[int, GroupSample] = {}
            while len(found) < len(prompts):
                found |= {one.number: one.sample for one in engine.finished(None)}
        except ServerFailed as error:
            self._give_up(error)
            return None
        finally:
            engine.close()
        return [found[number] for number in range(len(prompts))]

    def kind(self) -> str:
        """Return the name of the engine that samples now."""
        if self._served is not None:
            return "served"
        return self.own.kind if self.own is not None else ""

    def server(self) -> ServerStatistics:
        weights = self._weights
        if weights is None:
            return self._seen
        return msgspec.structs.replace(
            self._seen, loads=weights.loads, load_seconds=weights.seconds, gap=weights.gap
        )

    def _present(self) -> Generation | None:
        return self._served if self._served is not None else self.own

    def _own_engine(self) -> OwnEngine:
        if self.own is None:
            self.own = self._build_own()
        return self.own

    def _try_server(self) -> None:
        """Connect and move the own engine's unfinished requests to the server.

        Do nothing if the server samples already, or if it failed less than the retry delay ago.
        """
        if self._served is not None or self._clock() < self._retry_at:
            return
        try:
            weights = self._connect()
            served = self._make(weights, self._sampling)
            for request in self._requests.values():
                served.submit(request)
        except ServerFailed as error:
            self._give_up(error)
            return
        except PromptTooLong as error:
            self._give_up(ServerFailed("model", str(error)))
            return
        if self.own is not None:
            for number in self._requests:
                self.own.cancel(number)
        self._served, self._weights, about = served, weights, weights.about
        self._seen = msgspec.structs.replace(
            self._seen, state="sampling", version=about.version, model=about.model, reason=""
        )
        log.info(
            "engine",
            engine="served",
            version=about.version,
            url=self._server.client.url,
            gap=float(f"{weights.gap:.2g}"),
        )

    def _give_up(self, error: ServerFailed) -> None:
        """Switch to the own engine and submit the server's unfinished requests to it."""
        wait = min(RETRY_SECONDS * 2**self._failures, RETRY_MOST)
        self._failures += 1
        self._retry_at = self._clock() + wait
        failures = dict(self._seen.failures)
        failures[error.reason] = failures.get(error.reason, 0) + 1
        self._seen = msgspec.structs.replace(
            self.server(), state="away", reason=str(error)[:REASON_CHARACTERS], failures=failures
        )
        log.warning(
            "the server does not sample, the own engine does",
            reason=error.reason,
            detail=str(error),
            resubmitted=len(self._requests),
            retry_seconds=round(wait),
        )
        served, self._served, self._weights = self._served, None, None
        if served is not None:
            served.close()
            self._server.client.interrupt()
            for request in self._requests.values():
                self._own_engine().submit(request)


# ---- the engine ----------------------------------------------------------------------------------


@dataclass
class PendingRequest:
    prompt_ids: list[int]
    generations: int
    max_tokens: int
    since: int | None = None
    """Policy version at the time the request was sent."""


class Served:
    """Engine whose requests run on a server. Every call that needs the server may raise
    ServerFailed."""

    def __init__(
        self,
        server: VllmServer,
        weights: ServedWeights,
        policy: Policy,
        sampling: Sampling,
        alive: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._weights, self._policy = server, weights, policy
        self._sampling, self._alive, self._clock = sampling, alive, clock
        self._unused = unused_ids(policy)
        self._check = TextCheck(policy, sampling.temperature)
        self._asked: dict[int, PendingRequest] = {}
        self._waiting: queue.SimpleQueue[tuple[int, Question] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, list[Completion] | Exception]] = (
            queue.SimpleQueue()
        )
        self._workers: list[threading.Thread] = []
        self._silent = self._unseen = 0.0
        """Seconds of waiting since the last response, and since the last sign that the server is
        up."""

    def submit(self, request: Request) -> None:
        prompt_ids = self._policy.prompt_ids(request.prompt)
        most = self._policy.room(prompt_ids, self._sampling.max_tokens)
        context = self._weights.about.context
        if context is not None:
            most = min(most, context - len(prompt_ids))
        if most < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt_ids):,} tokens leaves no room for an answer in the"
                f" server's context of {context:,} tokens"
            )
        self._weights.follow()
        asked = PendingRequest(
            prompt_ids, self._sampling.with_generations(request.generations).num_generations, most
        )
        self._asked[request.number] = asked
        self._waiting.put((request.number, self._question(asked)))
        if len(self._workers) < min(WORKERS, len(self._asked)):
            worker = threading.Thread(target=self._work, name="served", daemon=True)
            self._workers.append(worker)
            worker.start()

    def _question(self, asked: PendingRequest) -> Question:
        sampling = self._sampling
        return Question(
            asked.prompt_ids,
            asked.generations,
            asked.max_tokens,
            sampling.temperature,
            sorted(self._policy.eos_ids),
            self._unused,
        )

    def _work(self) -> None:
        """Send queued requests and collect their responses; runs in each worker thread."""
        while (item := self._waiting.get()) is not None:
            number, question = item
            try:
                self._answers.put((number, self._server.generate(question, REQUEST_SECONDS)))
            except Exception as error:  # noqa: BLE001 - raised where answers are taken
                self._answers.put((number, error))

    def cancel(self, number: int) -> None:
        self._asked.pop(number, None)

    def finished(self, version: int | None) -> list[FinishedRequest]:
        """Return finished requests, as the protocol defines. With `version` None, the caller does
        not train on them."""
        self._weights.follow()
        if version is not None:
            self._weights.name(version)
        for asked in self._asked.values():
            asked.since = version if asked.since is None else asked.since
        done, started = list[FinishedRequest](), self._clock()
        for number, answer in self._arrived():
            if number not in self._asked:  # it was cancelled
                continue
            asked = self._asked.pop(number)
            if isinstance(answer, ServerFailed):
                raise answer
            if isinstance(answer, Exception):
                raise ServerFailed("answer", f"{type(answer).__name__}: {answer}")
            done.append(FinishedRequest(number, self._sample(asked, answer)))
        if version is not None:
            for one in done:
                self._check(one.sample)
        self._alive()
        self._watch(bool(done), self._clock() - started)
        return done

    def _arrived(self) -> Iterator[tuple[int, list[Completion] | Exception]]:
        """Wait up to POLL_SECONDS for a response, then yield all that have arrived."""
        wait = POLL_SECONDS if self._asked else 0.0
        try:
            while True:
                yield self._answers.get(wait > 0, wait or None)
                wait = 0.0
        except queue.Empty:
            return

    def _patience(self) -> float:
        return SILENCE_SECONDS + SILENCE_PER_TOKEN * self._sampling.max_tokens

    def _watch(self, has_answered: bool, waited: float) -> None:
        """Raise ServerFailed if the server is silent for too long or fails the health check.

        Only the time that the trainer spends waiting counts, not the training step in between.
        """
        if has_answered or not self._asked:
            self._silent = self._unseen = 0.0
            return
        self._silent += waited
        self._unseen += waited
        if self._silent > self._patience():
            raise ServerFailed("timeout", f"no completion in {self._patience():.0f} seconds")
        if self._unseen > HEALTH_SECONDS:
            self._server.client.order("/health", None, HEALTH_SECONDS)
            self._unseen = 0.0

    def _sample(self, asked: PendingRequest, answer: Sequence[Completion]) -> GroupSample:
        """Return the group of completions in a response.

        Raises:
            ServerFailed: The response must not be trained on.
        """
        if len(answer) != asked.generations:
            raise ServerFailed("answer", f"{len(answer)} completions, not {asked.generations}")
        return GroupSample(
            asked.prompt_ids, [self._completion(each, asked.max_tokens) for each in answer]
        )

    def _completion(self, found: Completion, most: int) -> SampledCompletion:
        policy, ids = self._policy, found.ids
        if not ids or len(ids) > most or len(found.logprobs) != len(ids):
            raise ServerFailed("answer", f"a completion of {len(ids)} tokens, at most {most}")
        if min(ids) < 0 or max(ids) >= policy.vocab_size or not policy.unused_ids.isdisjoint(ids):
            raise ServerFailed("answer", "token ids outside the vocabulary")
        if not all(math.isfinite(x) and LOWEST < x <= ROUNDING for x in found.logprobs):
            raise ServerFailed("answer", "invalid log-probabilities")
        has_ended = ids[-1] in policy.eos_ids
        if found.was_cut == has_ended or (found.was_cut and len(ids) != most):
            raise ServerFailed("answer", "a completion that neither ended nor was cut at its limit")
        if not policy.eos_ids.isdisjoint(ids[:-1]):
            raise ServerFailed("answer", "a completion that continues after its end")
        return SampledCompletion(
            list(ids),
            [min(x, 0.0) for x in found.logprobs],
            policy.decode(list(ids)),
            "length" if found.was_cut else "eos",
            self._weights.versions(found),
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the server continue with its current weights during the pause."""
        try:
            yield
        finally:
            self._weights.changed()

    def ahead(self, count: int) -> int:
        return AHEAD * count

    def statistics(self) -> GenerationStatistics:
        since = [each.since for each in self._asked.values() if each.since is not None]
        return GenerationStatistics(len(self._asked), min(since, default=None))

    def close(self) -> None:
        """Stop sending requests, without waiting for those in progress."""
        self._asked.clear()
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        for _ in self._workers:
            self._waiting.put(None)


class TextCheck:
    """Check that the policy may have sampled a server's answers.

    A server that returns another text can report that text's true log-probabilities. In samples of
    the policy, surprise minus entropy has mean 0 at every token, so its sum over n tokens is at
    most DRIFT · n + SIGMAS · √(variance · n).
    """

    def __init__(self, policy: Policy, temperature: float) -> None:
        self._policy, self._temperature = policy, temperature
        # SmolLM2's variance is 1.0, 2.1 and 7.7 nats² at temperatures 0.7, 1 and 1.5.
        self._variance = 2.0 * max(1.0, temperature) ** 4
        self._latest: deque[tuple[float, int]] = deque(maxlen=CHECKED_ANSWERS)
        """Surprise minus entropy, and number of tokens, of each answer."""

    def __call__(self, group: GroupSample) -> None:
        """Check one answer of a group, which the server cannot predict, with the latest ones.

        Raises:
            ServerFailed: The policy would not have sampled these answers.
        """
        ids = secrets.choice(group.completions).ids
        row = Row(group.prompt_ids, ids)
        ((chosen, spread),) = score_with_entropy(self._policy, [row], self._temperature)
        self._latest.append((-math.fsum(chosen) - math.fsum(spread), len(ids)))
        excess = math.fsum(each for each, _ in self._latest)
        tokens = sum(count for _, count in self._latest)
        if not excess <= DRIFT * tokens + SIGMAS * math.sqrt(self._variance * tokens):
            raise ServerFailed(
                "answer",
                f"answers that the policy would not have sampled: surprise minus entropy is"
                f" {excess / tokens:.2f} nats in {tokens} tokens",
            )


def unused_ids(policy: Policy) -> list[int]:
    """Return the rows of the model's output head that correspond to no token.

    The trainer gives them probability 0, and the server must be configured to do the same.
    """
    return sorted(policy.unused_ids) + list(range(policy.vocab_size, head_rows(policy)))
