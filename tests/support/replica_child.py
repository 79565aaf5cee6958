"""A node in a child process that kills itself with SIGKILL when a swap enters a phase. The test
examines its partner."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trio

from swarmnode.p2p import identity
from swarmnode.process import die_with_parent
from swarmnode.weights.network import discovery
from swarmnode.weights.network.swaps import SwapState
from tests.support import forked
from tests.support.hosts import host
from tests.support.replica import SWARM, averaging
from tests.support.waiting import until

START_SECONDS = 180.0


def start(directory: Path, address: str, *, proposes: bool, die_in: str, linger: float) -> Any:
    """Start a node that joins through `address`, and return the process.

    Args:
        die_in: Phase during which the process ends, or "" to run until stopped.
        linger: Seconds between the start of the phase and the end of the process.
    """
    process = forked.context.Process(
        target=main, args=(directory, address, proposes, die_in, linger), daemon=True
    )
    process.start()
    return process


def main(directory: Path, address: str, proposes: bool, die_in: str, linger: float) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    discovery.POLL_INTERVAL = 0.05  # type: ignore[misc]
    trio.run(_run, directory, address, proposes, die_in, linger)


async def _run(directory: Path, address: str, proposes: bool, die_in: str, linger: float) -> None:
    key = identity.load_or_create(directory / "identity.key").private_key
    async with host(directory, initial_peers=[address], swarm=SWARM) as network:
        if die_in:
            SwapState.__setattr__ = dying(die_in, linger)  # type: ignore[method-assign,assignment]
        async with averaging(network, key, directory, seed=7) as node:
            node.step()
            await until(lambda: node.candidates() == 1, seconds=START_SECONDS)
            if proposes:
                node.due()
            await trio.sleep_forever()


def dying(phase: str, linger: float) -> Callable[[SwapState, str, object], None]:
    """Return a `SwapState.__setattr__` that ends this process `linger` seconds after `phase`
    starts."""

    def watched(self: SwapState, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "phase" and value == phase:
            if not linger:
                os.kill(os.getpid(), signal.SIGKILL)
            trio.lowlevel.spawn_system_task(_die, linger)

    return watched


async def _die(linger: float) -> None:
    await trio.sleep(linger)
    os.kill(os.getpid(), signal.SIGKILL)
