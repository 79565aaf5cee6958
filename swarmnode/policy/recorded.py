"""Decoding steps of a changing set of rows as CUDA graphs, one graph per shape.

A step of one token consists of about a thousand small kernels, and launching them from Python takes
several times longer than running them. A CUDA graph launches all of them at once. On an H200 with
0.5 B parameters and 64 rows, 32 tokens took 0.19 s instead of 0.85 s (benchmarks/RESULTS.md, with
one graph for all rows and columns).

A graph has fixed shapes, but the number and length of active rows change. So both are rounded up:
with multiples of 16 rows and 256 columns, 13 rows of up to 90 tokens run as 16 rows and 256
columns, and the excess is masked. A shape is launched without a graph the first time, so that
lazily allocated workspaces exist; recorded the second time, which costs about as much as a step;
and replayed afterwards. A recording lives for one call of the engine: it reads the weights that
autocast has cast, and it needs no memory during training.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from swarmnode.policy.model import Policy

log = logging.getLogger(__name__)

ROWS = 16
"""The number of rows of a recorded step is a multiple of this."""
COLUMNS = 256
"""The number of columns of a recorded step is a multiple of this."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens (R,), places (R,), width) → (R, V) logits; see `Slots`."""
Shape = tuple[int, int]
"""(rows, columns)."""

_unrecordable: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models whose step could not be recorded."""
_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass
class Recording:
    """A recorded step of one shape, with the memory that it reads and writes."""

    tokens: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None


def recordable(policy: Policy) -> bool:
    """Return True if a decoding step of this policy can be recorded as a CUDA graph.

    The policy must be on one CUDA device, and use no kernel that reads tensor values on the host.
    """
    model = policy.base
    return (
        policy.device.type == "cuda"
        and torch.version.hip is None
        and not policy.is_spread
        and not getattr(model, "is_quantized", False)
        and model not in _unrecordable
    )


class RecordedSteps:
    """The recordings of one engine."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recordings: dict[Shape, Recording] = {}
        self._works: bool | None = None
        """True if this policy's steps can be recorded; None before the first step."""

    def shape(self, rows: int, columns: int) -> Shape | None:
        """Return the rounded-up shape for `rows` rows of `columns` tokens, or None if steps cannot
        be recorded."""
        if self._works is None:
            self._works = recordable(self._policy)
        if not self._works:
            return None
        return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS

    def clear(self) -> None:
        self._recordings.clear()

    def step(
        self, step: Step, tokens: torch.Tensor, places: torch.Tensor, shape: Shape
    ) -> torch.Tensor:
        """Run one step of `shape`.

        The step also runs unused slots, to fill the shape. They write column 0 of their memory,
        which the next row in that slot overwrites.

        Returns:
            Logits (n, V), valid until the next step.
        """
        rows, width = shape
        recording = self._recordings.get(shape)
        is_new = recording is None
        if recording is None:
            unused = tokens.new_zeros(rows)
            recording = Recording(unused, unused.clone(), torch.zeros(0))
            self._recordings[shape] = recording
        recording.tokens[: len(tokens)] = tokens
        recording.places.zero_()
        recording.places[: len(tokens)] = places

        def work() -> None:
            recording.logits = step(recording.tokens, recording.places, width)

        if not is_new and recording.graph is None:
            recording.graph = record(self._policy, work)
            self._works = recording.graph is not None
        if recording.graph is not None:
            recording.graph.replay()
        else:  # the first time, and where recording failed
            with side_stream(self._policy.device):
                work()
        return recording.logits[: len(tokens)]


def record(policy: Policy, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Record the kernels that `step` launches; log the reason and return None on failure."""
    graph = torch.cuda.CUDAGraph()
    try:
        with side_stream(policy.device):
            # Other threads copy weights to the host at the same time. A recording in the default
            # mode would forbid this; "thread_local" restricts only this thread.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                # `capture_end` raises again because the recording failed
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    except RuntimeError as error:
        # the graph cannot reuse memory that the allocator caches for other pools
        if isinstance(error, torch.OutOfMemoryError):
            log.info("out of memory while recording a decoding step")
            torch.cuda.empty_cache()
        else:
            log.warning(
                "cannot record a decoding step, launching each step by itself: %s",
                str(error).split("\n")[0],
            )
            _unrecordable.add(policy.base)
        return None
    return graph


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a side stream. Recording is not allowed on the default stream. The warm-up
    uses the same side stream, so that its workspaces are reused."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    current, side = torch.cuda.current_stream(device), _streams[device]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
