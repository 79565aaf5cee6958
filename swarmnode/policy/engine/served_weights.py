"""The weights that a server samples from: written to a directory, loaded there, and checked.

A server that silently samples other weights than it was given is the one fault that no error
message tells of; nothing but worse learning would. So a fixed text's log-probabilities are compared
with the trainer's after each load, and every answer names the version that sampled each token.
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
from swarmnode.policy.engine.servers import About, Completion, Server
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import Row, score
from swarmnode.policy.model import Adapted
from swarmnode.policy.ways import bound as rounding_bound
from swarmnode.policy.ways import mean_gap, reason

PREFIX = "swarmnode-weights-"
WRITTEN = re.compile(rf"\.?{PREFIX}[0-9a-f]{{8}}-\d+(\.partial)?")
"""Names of what is written, and removed again."""
VERSIONS = 64
"""Loads of which tokens may still be on their way."""
ALIVE_SECONDS = 0.2
"""Between two signs of progress while a server loads."""
CHECK = (
    "What is 3 + 4?",
    "7, because 3 + 4 = 7. Let's check it step by step: 4 - 3 = 1, so 3 + 4 = 2 * 3 + 1 = 7.",
)
CHECK_TOKENS = 24
"""Of the second text, at most."""
CLEAR_SIGMAS = 8.0
"""A change of the weights is told from rounding where it moves the check's log-probabilities so
many standard deviations: then a server that has not followed is at least four away."""
SMALLEST_SIGMA = 5e-5
"""Rounding in float32."""


class ServedWeights:
    """The trained weights, as the server has them. A version is `<run>.<number>`: the run is drawn
    at random when the trainer connects, so that another trainer's versions are not taken for ours.
    """

    def __init__(
        self, server: Server, policy: Policy, directory: Path, alive: Callable[[], None]
    ) -> None:
        """Connect, and load the present weights; `alive` is called meanwhile. Raises
        ServerFailed."""
        self._server, self._policy, self._directory = server, policy, directory
        self._alive = alive
        self._run = secrets.token_hex(4)
        self._number = 0
        self._named: dict[int, int] = {}
        """Number of a load → policy version."""
        self._is_behind = True
        self._check = WeightCheck(policy)
        self.gap = 0.0
        """Mean |Δ log-probability| of the check at the last load, nats."""
        self.seconds = 0.0
        """That the last load took, writing and checking included."""
        self.loads = 0
        told: list[About] = []
        self._in_thread(lambda: told.append(server.about()))
        self.about = told[0]
        _clear(directory, keep=())
        self.follow()

    def changed(self) -> None:
        """The policy's weights may have moved."""
        self._is_behind = True

    def name(self, version: int) -> None:
        """What is loaded now is the policy's `version`."""
        self._named.setdefault(self._number, version)
        for number in sorted(self._named)[:-VERSIONS]:
            del self._named[number]

    def follow(self) -> None:
        """Load the policy's weights into the server and check them, unless it has them. Raises
        ServerFailed."""
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
        except Exception as error:  # of safetensors, too  # noqa: BLE001
            why = f"cannot write weights to {self._directory}: {reason(error)}"
            raise ServerFailed("disk", why) from None
        self._server.load(target, f"{self._run}.{self._number}")

    def _in_thread(self, work: Callable[[], None]) -> None:
        """Run what takes long while the trainer shows that it is alive; nothing else moves the
        weights meanwhile."""
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
        """Return the policy version of each token. Raises ServerFailed where the server cannot say,
        or had other weights."""
        made: list[int] = []
        for span in found.spans:
            if span.start != len(made) or not span.start <= span.end <= len(found.ids):
                break
            made += [self._version(span.version)] * (span.end - span.start)
        if len(made) != len(found.ids):
            raise ServerFailed("version", "the server does not say which weights sampled a token")
        return made

    def _version(self, text: str) -> int:
        run, _, digits = text.partition(".")
        number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 12 else 0
        if run != self._run or not max(0, self._number - VERSIONS) < number <= self._number:
            raise ServerFailed("version", f"it has weights {text[:40]!r}, not this node's")
        # one that was loaded for an evaluation is named by the step after it
        later = min((each for each in self._named if each >= number), default=0)
        return self._named.get(later, 0)


def write_weights(policy: Policy, target: Path) -> None:
    """Write what is trained to the directory `target`, whole or not at all: the adapter, or all
    weights in the dtype that is computed in."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if isinstance(policy.model, Adapted):
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
    """Whether a server computes what the trainer does, on a fixed text.

    The mean difference must be within rounding. That alone would let a server pass that ignores an
    adapter which has hardly moved yet, or in 16 bits for long. So the server's numbers must also be
    nearer to those of the present weights than to those of the former ones and of the bare base, as
    soon as these are far enough apart to be told from rounding.
    """

    def __init__(self, policy: Policy) -> None:
        # a server's log-probabilities are over all rows of the head, not only known tokens
        policy = replace(policy, vocab_size=head_rows(policy), unused_ids=frozenset())
        self._policy = policy
        prompt, text = (policy.encode_prompt(each) for each in CHECK)
        most = CHECK_TOKENS
        if policy.context is not None:
            most = max(1, min(most, policy.context - len(prompt) - 1))
        self.row = Row(list(prompt), list(text[:most]))
        """What is scored."""
        self._former: list[list[float]] = []
        """Log-probabilities of weights that the server must have left: the base under an adapter,
        and the load before."""
        if isinstance(policy.model, Adapted):
            self._former = [self._scores(replace(policy, adapter_off=True))]
        self._bare = len(self._former)
        self._sigma = 0.0
        """Standard deviation of the server's rounding, at the last load that passed."""

    def _scores(self, policy: Policy) -> list[float]:
        return score(policy, [self.row], 1.0)[0]

    def __call__(self, found: Sequence[float]) -> float:
        """Return the mean difference of a server's log-probabilities of `row`, in nats. Raises
        ServerFailed where its weights are not the policy's."""
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
                    "its log-probabilities are those of former weights: it ignores what was loaded",
                )
        squares = math.fsum((a - b) ** 2 for a, b in zip(found, expected, strict=True))
        self._sigma = max(math.sqrt(squares / len(found)), SMALLEST_SIGMA)
        self._former = [*self._former[: self._bare], expected]
        return gap
