"""One side of a swap is killed in every phase. The other side keeps its weights unchanged or fully
averaged, and continues."""

import pytest
import torch
import trio

from swarmnode.p2p import identity
from swarmnode.weights.network import discovery, swaps
from tests.support import replica_child
from tests.support.hosts import host
from tests.support.replica import SWARM, averaging, identical
from tests.support.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

STATES = ("copying", "waiting", "fetching", "judging")
CASES = [
    ("proposing", True, 0.0),
    ("proposing", True, 0.05),
    *((state, proposes, 0.0) for state in STATES for proposes in (True, False)),
    # In the middle of the trainer's work.
    *(("judging", proposes, 0.02) for proposes in (True, False)),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(swaps, "COPY_WAIT_SECONDS", (0.5, 120.0))
    # Otherwise the vanished partner would be avoided for minutes.
    monkeypatch.setattr(swaps, "LONGEST_BACKOFF_SECONDS", 1.0)
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)


@pytest.mark.parametrize(("state", "proposes", "linger"), CASES)
async def test_survivor_of_a_killed_swap_continues(state, proposes, linger, tmp_path):
    torch.set_num_threads(1)
    key = identity.load_or_create(tmp_path / "0" / "identity.key").private_key
    async with (
        host(tmp_path / "0", swarm=SWARM) as network,
        averaging(network, key, tmp_path / "0") as node,
    ):
        node.step()
        before = node.weights()
        child = replica_child.start(
            tmp_path / "1", network.listen_addrs[0], proposes=proposes, die_in=state, linger=linger
        )
        if not proposes:
            await until(lambda: node.candidates() == 1, seconds=240)
            node.due()
        await trio.to_thread.run_sync(child.join, 240)
        assert child.exitcode == -9
        await until(lambda: node.service.statistics().phase == "idle", seconds=120)
        averaged = node.outcome("applied") == 1
        assert averaged == (not identical(before, node.weights()))
        # Only then it had everything it needed.
        assert not averaged or linger or state in ("waiting", "fetching", "judging")
        assert node.counters.outer_clocks[0] <= 1

        child = replica_child.start(
            tmp_path / "1", network.listen_addrs[0], proposes=False, die_in="", linger=0.0
        )
        await until(lambda: node.candidates() == 1 and len(network.connected()) == 1, seconds=240)
        done = node.outcome("applied")

        def applied():
            # The other node may be avoided for a moment: then the step was taken without a partner.
            if node.service.statistics().phase == "idle":
                node.due()
            return node.outcome("applied") > done

        await until(applied, seconds=120, interval=0.1)
        child.kill()
        await trio.to_thread.run_sync(child.join, 10)
