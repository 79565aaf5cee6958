"""Averaging over real libp2p hosts: two sides agree, fetch, gate and commit; a new node fetches its
neighbours' state."""

import contextlib
from functools import partial

import pytest
import torch
import trio

from swarmnode.config import WeightsConfig
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights import local
from swarmnode.weights.messages import MESSAGE_BYTES, StateRequest
from swarmnode.weights.network import discovery, swaps
from swarmnode.wire import ids, strict
from tests.support.hosts import hosts
from tests.support.replica import BASE, SWARM, TOKENIZER, averaging, identical
from tests.support.waiting import until, wait_connected

pytestmark = pytest.mark.swarm


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(swaps, "COPY_WAIT_SECONDS", (1.0, 120.0))
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)


@contextlib.asynccontextmanager
async def connected(directory, count):
    """Yield a function that starts the averaging of one of `count` connected hosts."""
    async with (
        hosts(directory, count, swarm=SWARM) as networks,
        contextlib.AsyncExitStack() as stack,
    ):
        with trio.fail_after(60):
            for network in networks:
                await wait_connected(network, count - 1)

        async def start(number, outer_step=None, **options):
            """Start a node that has moved its weights by an own step, unless it is fresh. With an
            outer step, the moved weights are φ too."""
            path, options = directory / str(number), {"seed": number, **options}
            node = await stack.enter_async_context(averaging(networks[number], path, **options))
            if not node.fresh:
                node.step()
            if outer_step is not None:
                node.replica.receive(local.SoloStep(0, node.blocks()))
                await until(lambda: node.counters.solo_steps_total)
                node.counters.outer_clocks = [outer_step] * 2
                node.connect()
            return node

        yield networks, start


def rounded(tensors):
    """Return tensors as a new node receives them."""
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}


async def test_starts_no_exchange_while_saving_a_state(tmp_path):
    async with connected(tmp_path, 2) as (_, start):
        a, b = await start(0), await start(1)
        await until(lambda: a.candidates() == b.candidates() == 1)
        b.hold = {local.WriteState}
        facts = a.replica.facts(False)
        ask = strict.encode(StateRequest(facts.fingerprint(SWARM, BASE, TOKENIZER), facts.blocks()))
        async with trio.open_nursery() as nursery:
            request = partial(
                a.network.requests.request, deadline=30.0, max_response_bytes=MESSAGE_BYTES
            )
            nursery.start_soon(request, b.network.peer_id, ids.WEIGHTS_STATE_PROTOCOL, ask)
            await until(lambda: any(isinstance(m, local.WriteState) for m in b.to_trainer))
            a.due()
            await until(lambda: a.outcome("busy"))
            b.due()
            await until(lambda: b.outcome("solo"))
            nursery.cancel_scope.cancel()
        assert not a.outcome("applied")


async def test_new_node_adopts_a_state_before_its_first_step(tmp_path):
    async with connected(tmp_path, 4) as (networks, start):
        # The third is a stranger with a false outer step.
        old = [await start(number, outer_step) for number, outer_step in enumerate((30, 31, 900))]
        await until(lambda: all(node.candidates() == 2 for node in old))
        known = KnownPeers(frozenset(network.peer_id for network in networks[:2]))
        new = await start(3, fresh=True, known=known)
        await until(lambda: new.replica.wait_for_state(0))
        assert identical(new.weights(), rounded(old[1].phi()))
        assert identical(new.phi(), new.weights())
        assert new.counters.outer_clocks == [31, 31]
        for node in old:
            node.counters.outer_clocks = [31] * 2
            node.step()
            node.connect()
        await until(lambda: new.candidates() == 2)  # the stranger is none
        before = new.weights()
        new.due()
        await until(lambda: new.outcome("applied"))
        assert not identical(new.weights(), before)


async def test_silent_neighbour_does_not_delay_a_new_node(tmp_path):
    async with connected(tmp_path, 4) as (_, start):
        for number in range(3):
            node = await start(number, 30)
        # The last one: its answer may take half a minute, and a joining node does not wait for it.
        node.hold = {local.WriteState}
        new = await start(3, fresh=True)
        await until(lambda: any(new.counters.outer_clocks), seconds=local.JOIN_SECONDS)


OPEN = WeightsConfig(fragments=1, partners="anyone")
"""It averages with strangers, but takes no first weights from them."""


@pytest.mark.parametrize("names_it", [False, True])
async def test_a_new_node_takes_the_state_of_a_known_peer_only(names_it, tmp_path):
    async with connected(tmp_path, 3) as (networks, start):
        old, _ = await start(0, 30), await start(1, 900)  # the stranger is further ahead
        known = KnownPeers(frozenset({networks[0].peer_id} if names_it else ()))
        new = await start(2, cfg=OPEN, fresh=True, known=known)
        before = new.weights()
        await until(lambda: new.replica.wait_for_state(0))
        assert identical(new.weights(), rounded(old.phi()) if names_it else before)
