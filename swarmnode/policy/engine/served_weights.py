"""Weights that a server samples from: written to a directory, loaded by the server, and checked.

A server that samples from other weights than it was given reports no error; the only symptom would
be worse learning. So after each load, the log-probabilities of a fixed text are compared with the
trainer's, and every response states the weight version that sampled each token.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from swarmnode.files import sync_directory
from swarmnode.policy.engine.client import ServerFailed
from swarmnode.policy.engine.vllm import About, Completion, VllmServer
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, score
from swarmnode.policy.model import AdaptedModel
from swarmnode.policy.ways import bound as rounding_bound
from swarmnode.policy.ways import mean_gap, reason

PREFIX = "swarmnode-weights-"
WRITTEN = re.compile(rf"\.?{PREFIX}[0-9a-f]{{8}}-\d+(\.partial)?")
"""Names of the files and directories that this module writes, and removes again."""
VERSIONS = 64
"""Number of most recent loads whose tokens may still arrive."""
ALIVE_SECONDS = 0.2
"""Interval between progress reports while a server loads, in seconds."""
CHECK = (
    "What is 3 + 4?",
    "7, because 3 + 4 = 7. Let's check it step by step: 4 - 3 = 1, so 3 + 4 = 2 * 3 + 1 = 7.",
)
CHECK_TOKENS = 24
"""Maximum number of scored tokens of the check's text."""
CLEAR_SIGMAS = 8.0
"""A change of weights is distinguishable from rounding if it moves the check's log-probabilities by
at least this many standard deviations. A server that kept the former weights is then at least four
standard deviations beyond the midpoint."""
SMALLEST_SIGMA = 5e-5
"""Lower bound of the standard deviation: rounding in float32."""


class ServedWeights:
    """The trained weights in the version that the server holds.

    A version is `<run>.<number>`. The run id is drawn at random when the trainer connects, so that
    the versions of another trainer are not mistaken for this trainer's.
    """

    def __init__(
        self, server: VllmServer, policy: Policy, directory: Path, alive: Callable[[], None]
    ) -> None:
        """Connect and load the current weights, calling `alive` meanwhile. Raises ServerFailed."""
        self._server, self._policy, self._directory = server, policy, directory
        self._alive = alive
        self._run = secrets.token_hex(4)
        self._number = 0
        self._named: dict[int, int] = {}
        """Policy version by number of the load."""
        self._is_behind = True
        self._check = WeightCheck(policy)
        self.gap = 0.0
        """Mean |Δ log-probability| in the check of the last load, in nats."""
        self.seconds = 0.0
        """Duration of the last load, including writing and checking."""
        self.loads = 0
        found: list[About] = []
        self._in_thread(lambda: found.append(server.about()))
        self.about = found[0]
        _clear(directory, keep=())
        self.follow()

    def changed(self) -> None:
        """Note that the policy's weights may have changed."""
        self._is_behind = True

    def name(self, version: int) -> None:
        """Record that the loaded weights are the policy's `version`."""
        self._named.setdefault(self._number, version)
        for number in sorted(self._named)[:-VERSIONS]:
            del self._named[number]

    def follow(self) -> None:
        """Load the policy's weights into the server and check them, if they have changed.

        Raises:
            ServerFailed: The server did not load them, or failed the check.
        """
        if not self._is_behind:
            return
        started = time.monotonic()
        self._number += 1
        target = self._directory / f"{PREFIX}{self._run}-{self._number}"
        found: list[float] = []

        def load() -> None:
            self._load(target)
            found.extend(self._server.score(self._check.row.prompt, self._check.row.completion))

        self._in_thread(load)
        self.gap = self._check(found)
        self._is_behind = False
        self.loads += 1
        self.seconds = time.monotonic() - started
        former = self._directory / f"{PREFIX}{self._run}-{self._number - 1}"
        _clear(self._directory, keep=(target.name, former.name))

    def _load(self, target: Path) -> None:
        try:
            write_weights(self._policy, target)
        except Exception as error:  # also any error of safetensors  # noqa: BLE001
            why = f"cannot write weights to {self._directory}: {reason(error)}"
            raise ServerFailed("disk", why) from None
        self._server.load(target, f"{self._run}.{self._number}")

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Run slow work in a thread while this thread reports progress.

        The weights must not change meanwhile; this thread only waits.
        """
        failures: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=run, name="load", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(ALIVE_SECONDS)
            self._alive()
        if failures:
            raise failures[0]

    def versions(self, found: Completion) -> list[int]:
        """Return the policy version of each token.

        Raises:
            ServerFailed: The server reports no version, or a version of other weights.
        """
        made: list[int] = []
        for span in found.spans:
            if span.start != len(made) or not span.start <= span.end <= len(found.ids):
                break
            made += [self._version(span.version)] * (span.end - span.start)
        if len(made) != len(found.ids):
            raise ServerFailed(
                "version", "the server does not report which weights sampled a token"
            )
        return made

    def _version(self, text: str) -> int:
        run, _, digits = text.partition(".")
        number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 12 else 0
        if run != self._run or not max(0, self._number - VERSIONS) < number <= self._number:
            raise ServerFailed("version", f"the server has weights {text[:40]!r}, not this node's")
        # weights that were loaded for an evaluation get their version at the following step
        later = min((each for each in self._named if each >= number), default=0)
        return self._named.get(later, 0)


def write_weights(policy: Policy, target: Path) -> None:
    """Write the trained weights to the directory `target` atomically.

    The directory holds the adapter, or all weights in the compute dtype.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if isinstance(policy.model, AdaptedModel):
        policy.model.save_pretrained(str(partial))  # type: ignore[attr-defined]
    else:
        cast: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
        weights = policy.base.state_dict()
        for tensor in weights.values():
            if tensor.data_ptr() not in cast:
                cast[tensor.data_ptr()] = tensor.detach().to(
                    "cpu", policy.dtype if tensor.is_floating_point() else tensor.dtype
                )
        made = {name: cast[tensor.data_ptr()] for name, tensor in weights.items()}
        policy.base.save_pretrained(partial, state_dict=made)
    for path in partial.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, target)
    sync_directory(target.parent)


def _clear(directory: Path, keep: Sequence[str]) -> None:
    for path in directory.glob(f"*{PREFIX}*"):
        if WRITTEN.fullmatch(path.name) and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def head_rows(policy: Policy) -> int:
    return int(policy.base.get_input_embeddings().get_parameter("weight").shape[0])


class WeightCheck:
    """Check that a server computes the trainer's log-probabilities on a fixed text.

    The mean difference must be within rounding. This condition alone would accept a server that
    ignores a new adapter while the adapter has hardly changed, which lasts long in 16-bit dtypes.
    So there is a second condition: the server's values must be nearer to those of the current
    weights than to those of the previous weights and of the base model without adapter. It applies
    once the weights have moved by `CLEAR_SIGMAS` standard deviations of the rounding.
    """

    def __init__(self, policy: Policy) -> None:
        # a server normalises over all rows of the head, not only over those that are tokens
        policy = replace(policy, vocab_size=head_rows(policy), unused_ids=frozenset())
        self._policy = policy
        prompt, text = (policy.encode_prompt(each) for each in CHECK)
        most = CHECK_TOKENS
        if policy.context is not None:
            most = max(1, min(most, policy.context - len(prompt) - 1))
        self.row = Row(list(prompt), list(text[:most]))
        """Prompt and completion that are scored."""
        self._former: list[list[float]] = []
        """Log-probabilities under weights that the server must no longer use: the base model
        without its adapter, and the previous load."""
        if isinstance(policy.model, AdaptedModel):
            self._former = [self._scores(replace(policy, adapter_off=True))]
        self._bare = len(self._former)
        self._sigma = 0.0
        """Standard deviation of the server's rounding at the last load that passed, in nats."""

    def _scores(self, policy: Policy) -> list[float]:
        return score(policy, [self.row], 1.0)[0]

    def __call__(self, found: Sequence[float]) -> float:
        """Check a server's log-probabilities of `row` and return their mean difference, in nats.

        Raises:
            ServerFailed: The server's weights are not the policy's.
        """
        expected = self._scores(self._policy)
        gap = mean_gap(found, expected)
        if not gap <= rounding_bound(self._policy):
            raise ServerFailed(
                "canary",
                f"its log-probabilities differ from the trainer's by {gap:.2g} nats: it has other"
                " weights, or another model",
            )
        sigma = self._sigma or rounding_bound(self._policy)
        for former in self._former:
            moved = [a - b for a, b in zip(expected, former, strict=True)]
            square = math.fsum(x * x for x in moved)
            if math.sqrt(square) < CLEAR_SIGMAS * sigma:
                continue
            off = math.fsum((a - b) * m for a, b, m in zip(found, former, moved, strict=True))
            if off < 0.5 * square:
                raise ServerFailed(
                    "canary",
                    "its log-probabilities are those of former weights: it ignored the load",
                )
        squares = math.fsum((a - b) ** 2 for a, b in zip(found, expected, strict=True))
        self._sigma = max(math.sqrt(squares / len(found)), SMALLEST_SIGMA)
        self._former = [*self._former[: self._bare], expected]
        return gap
