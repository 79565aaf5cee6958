"""A weight plane in a process of its own that kills itself with -9 the moment it enters a state, so that a test can look at its partner."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
import trio

from swarmnode.p2p import identity
from swarmnode.process import die_with_parent
from swarmnode.weights import exchange
from tests.support.hosts import host
from tests.support.replica import SWARM, Node, plane
from tests.support.waiting import until

_context = multiprocessing.get_context("forkserver")  # one server imports torch and libp2p, each child is a fork of it
_context.set_forkserver_preload(["__main__", "tests.support.replica_child"])

START_SECONDS = 180.0


def start(directory: Path, address: str, *, proposes: bool, die_in: str, linger: float) -> Any:
    """Start a node that joins through `address`. die_in: a phase, or "" to live. linger: seconds that it stays in it. A process."""
    process = _context.Process(target=main, args=(directory, address, proposes, die_in, linger), daemon=True)
    process.start()
    return process


def main(directory: Path, address: str, proposes: bool, die_in: str, linger: float) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    exchange.GREET_SECONDS = 0.05  # type: ignore[misc]
    trio.run(_run, directory, address, proposes, die_in, linger)


async def _run(directory: Path, address: str, proposes: bool, die_in: str, linger: float) -> None:
    key = identity.load_or_create(directory / "identity.key").private_key
    async with host(directory, initial_peers=[address], swarm=SWARM) as network:

        def watch(node: Node) -> None:
            pairing = node.exchange._pairing
            handle = pairing.handle

            def watched(event: Any, now: float) -> Any:
                actions = handle(event, now)
                if die_in and pairing.state.phase.value == die_in:
                    if not linger:
                        os.kill(os.getpid(), signal.SIGKILL)
                    node.exchange._soon(_die, linger)
                return actions

            pairing.handle = watched  # type: ignore[method-assign]

        async with plane(network, key, directory, seed=7, prepare=watch) as node:
            node.step()
            await until(lambda: node.candidates() == 1, seconds=START_SECONDS)
            if proposes:
                node.due()
            await trio.sleep_forever()


async def _die(linger: float) -> None:
    await trio.sleep(linger)
    os.kill(os.getpid(), signal.SIGKILL)
