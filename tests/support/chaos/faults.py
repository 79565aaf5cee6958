"""Faults of real processes. Each is applied to one node and is over when its function returns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil
import trio

from tests.support import strangers
from tests.support.chaos.nodes import (
    NETWORK,
    SCORER,
    SUPERVISOR,
    TRAINER,
    ChaosNode,
    ChaosSwarm,
    stopped,
    until,
)
from tests.support.small_disk import fill

GONE_SECONDS = 20.0
HANG_SECONDS = 120.0
"""A hung process is detected within this time. Detection takes at least 30 s without progress."""

FULL_SECONDS = 240.0
"""Limit for a node to train again on a full disk: two starts of a trainer on a busy machine."""

Act = Callable[[ChaosSwarm, ChaosNode, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: Name in the table.
        act: Applies the fault.
        restarts: Restarts of the node's processes that it causes, by the supervisor's names.
        restarts_node: The whole node is restarted.
        explains: Regular expressions of errors that the nodes may log because of it.
    """

    name: str
    act: Act
    restarts: Mapping[str, int] = field(default_factory=dict)
    restarts_node: bool = False
    explains: tuple[str, ...] = ()
    long: bool = False
    """Only in long schedules."""
    needs_mount: bool = False


def kill(name: str) -> Act:
    def act(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
        found(node, name).kill()

    return act


def stop(name: str, shortest: float = 1.0, longest: float = 4.0) -> Act:
    def act(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
        stopped([found(node, name)], rng.uniform(shortest, longest))

    return act


def hang(name: str, process: str) -> Act:
    """Stop a process permanently. Its supervisor must detect that."""

    def act(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
        one = found(node, name)
        one.suspend()
        if not until(
            lambda: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE, HANG_SECONDS
        ):
            one.kill()
            raise AssertionError(
                f"{process} was stopped for {HANG_SECONDS:.0f} s and its supervisor did not end it"
            )

    return act


def kill_supervisor(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Kill the supervisor and restart it as systemd would. Its child processes must not outlive
    it."""
    family = node.family()
    found(node, SUPERVISOR).kill()
    node.wait(GONE_SECONDS)
    _, left = psutil.wait_procs(family, GONE_SECONDS)
    assert not left, f"outlived the supervisor: {[' '.join(one.cmdline()) for one in left]}"
    node.start([])


def power_cut(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    node.kill()
    node.start([])


def restart(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    node.stop()
    node.wait(60)
    assert node.exit_code() == 0, f"after a stop request it ended with {node.exit_code()}"
    node.start([])


def disk_full(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    fill(node.data)
    pause(rng)
    (node.data / "filler").unlink()


def disk_full_and_killed(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Kill both processes on a full disk. They must restart without a free byte; space returns
    afterwards."""
    fill(node.data)
    before = [found(node, name) for name in (TRAINER, NETWORK)]
    for process in before:
        process.kill()
    _, left = psutil.wait_procs(before, GONE_SECONDS)
    assert not left, "still running after the kill"
    assert until(lambda: learns(node), FULL_SECONDS), (
        f"it does not train while its disk is full: {node.log()[-1500:]}"
    )
    (node.data / "filler").unlink()


def cables_cut(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    with_cables(swarm, lambda cable: cable.cut(), rng)


def cables_dark(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    with_cables(swarm, lambda cable: cable.hold(), rng)


def cables_slow(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Delay of 200 ms, rate of 1 Mbit/s."""
    with_cables(swarm, lambda cable: cable.slow(0.2, 125_000), rng)


def garbled(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Flip one bit in every connection. Decryption fails, so the peers must reconnect."""
    for each in swarm.nodes:
        each.cable.garble()


def clock(seconds: float) -> Act:
    def act(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
        node.skew(seconds)
        pause(rng)
        node.skew(0.0)

    return act


def stranger(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Run attacks over sockets one after another for some seconds."""

    async def attack() -> None:
        with trio.move_on_after(6.0):
            await strangers.stranger(
                f"/ip4/127.0.0.1/tcp/{node.port}/p2p/{node.peer}", rng.random()
            )

    trio.run(attack)


def caches_lost(swarm: ChaosSwarm, node: ChaosNode, rng: random.Random) -> None:
    """Delete everything from the disk except the key, the port and the learnt state. The node gets
    its bootstrap addresses as at its first start."""
    node.kill()
    for path in node.data.iterdir():
        if path.name not in ("identity.key", "port", "trainer", "demo.toml", "format"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    swarm.start(node)


def with_cables(swarm: ChaosSwarm, do: Callable, rng: random.Random) -> None:
    for each in swarm.nodes:
        do(each.cable)
    pause(rng)
    for each in swarm.nodes:
        each.cable.repair()


def pause(rng: random.Random) -> None:
    trio.run(trio.sleep, rng.uniform(1.0, 4.0))


def learns(node: ChaosNode) -> bool:
    trainer = (node.snapshot() or {"trainer": {"connected": False}})["trainer"]
    return trainer["connected"] and (trainer["report"] or {}).get("phase") in (
        "generating",
        "training",
    )


def found(node: ChaosNode, name: str) -> psutil.Process:
    one = until(lambda: node.process(name), GONE_SECONDS)
    assert one is not None, f"{node.name} has no {name}"
    return one


FULL = (r"No space left", r"not saved", r"cannot write")
FAULTS = (
    Fault("kill -9, trainer", kill(TRAINER), {"trainer": 1}),
    Fault("kill -9, network process", kill(NETWORK), {"network": 1}),
    Fault("kill -9, scorer", kill(SCORER), explains=(r"scorer",)),
    Fault("kill -9, supervisor", kill_supervisor, restarts_node=True),
    Fault("power cut", power_cut, restarts_node=True, long=True),
    Fault("SIGTERM and started again", restart, restarts_node=True, long=True),
    Fault("SIGSTOP, trainer", stop(TRAINER)),
    Fault("SIGSTOP, network process", stop(NETWORK)),
    Fault("SIGSTOP, scorer", stop(SCORER), explains=(r"scorer",), long=True),
    Fault("SIGSTOP, supervisor", stop(SUPERVISOR)),
    Fault("SIGSTOP, network process, 20 s", stop(NETWORK, 20.0, 20.0), long=True),
    Fault(
        "SIGSTOP for good, trainer",
        hang(TRAINER, "trainer"),
        {"trainer": 1},
        explains=(r"no progress",),
        long=True,
    ),
    Fault(
        "SIGSTOP for good, network process",
        hang(NETWORK, "network"),
        {"network": 1},
        explains=(r"no progress",),
        long=True,
    ),
    Fault("disk full", disk_full, explains=FULL, long=True, needs_mount=True),
    Fault(
        "disk full, trainer and network process killed",
        disk_full_and_killed,
        {"trainer": 1, "network": 1},
        explains=FULL,
        needs_mount=True,
    ),
    Fault("connections reset", cables_cut),
    Fault("nothing gets through", cables_dark),
    Fault("200 ms, 1 Mbit/s", cables_slow),
    Fault("a bit of each connection", garbled),
    Fault("clock an hour ahead", clock(3600.0)),
    Fault("clock an hour behind", clock(-3600.0)),
    Fault("a stranger's attacks", stranger),
    Fault("its caches are gone", caches_lost, restarts_node=True, long=True),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
