"""Whether the policy with a recovered stage in it is still the policy: the last committed
micro-batches again, through all stages. Torch.

    r = log π_new(token) − log π_old(token)     over the tokens that were learnt from, drawn from
    about the old policy
    KL(old ‖ new) ≈ mean(eʳ − 1 − r) ≥ 0        rise of the negative log-likelihood = − mean r

π_old is what the tail computed before the step that the micro-batch was in. Only the newest step's
are asked: what was learnt since would count as damage, and a policy that learns fast moves by more
than the gate allows in a few steps. A damaged policy earns the same rewards everywhere, so nothing
that is learnt from rewards can heal it: it has to be found out before it takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import trio

from swarmnode.errors import Incompatible, PeerError
from swarmnode.pipeline import faults
from swarmnode.recovery.bodies import run_one
from swarmnode.recovery.messages import Probe
from swarmnode.recovery.probes import work_of
from swarmnode.recovery.sources import Verdict
from swarmnode.recovery.transfer import StatePeer
from swarmnode.wire.tensors import unpack_logprobs

AT_ONCE = 2
"""Probes on their way through the stages."""
LEAST, ROWS = 2, 2048
"""Probes, and rows of them, that are enough: a token's r of a stage in order is some hundredths, so
that their mean square is known to a tenth, and at 7 B more would be minutes of a home's line, for
each source that is tried."""


async def judge(peer: StatePeer, probes: Sequence[Probe]) -> Verdict:
    """`peer.stage.runtime` in its place among the others. `probes` is not empty.

    Raises PeerError when a stage is gone or never gets ready, and what `faults.of_device` knows.
    """
    shifts: list[np.ndarray] = []
    errors: list[Exception] = []
    waiting = enough(probes)

    async def work() -> None:
        while waiting and not errors:
            try:
                shifts.append(await _shift(peer, waiting.pop()))
            except (PeerError, ValueError) as error:
                errors.append(error)
            except (RuntimeError, MemoryError) as error:
                if not faults.of_device(error):
                    raise
                errors.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)
    for error in errors:
        if not isinstance(error, (Incompatible, ValueError)):
            raise error
    if errors:
        return Verdict(float("inf"), float("inf"), 0, finite=False)
    return verdict_of(np.concatenate(shifts))


def enough(probes: Sequence[Probe]) -> list[Probe]:
    """The last of the newest step's."""
    newest, rows, chosen = max(probe.step for probe in probes), 0, list[Probe]()
    for probe in reversed([probe for probe in probes if probe.step == newest]):
        if len(chosen) < LEAST or rows < ROWS:
            chosen.append(probe)
            rows += probe.rows
    return chosen


def verdict_of(shift: np.ndarray) -> Verdict:
    """shift: (tokens,) r as above."""
    shift = shift.astype(np.float64)
    return Verdict(float(np.mean(np.expm1(shift) - shift)), float(-shift.mean()), len(shift))


async def _shift(peer: StatePeer, probe: Probe) -> np.ndarray:
    """(tokens,) r. Raises ValueError or Incompatible where numbers are not finite, here or
    elsewhere."""
    micro_batch = work_of(probe, peer.stage.limits)
    old = unpack_logprobs(probe.logprobs)
    x = b""
    for stage in range(peer.stage.spec.stages):
        if stage == peer.stage.spec.index:
            x = await peer.channel.compute(
                partial(run_one, peer.stage.runtime, micro_batch, x, peer.stage.codec)
            )
        else:
            x = await peer.fetch.run_at(stage, probe, len(old), x)
    new = unpack_logprobs(x)
    if not np.isfinite(new).all():
        raise ValueError("a log-probability is not finite")
    return new - old
