"""Stages of different crews are averaged over real hosts in their common layers, and only with each
other."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import trio

from swarmnode.config import Config
from swarmnode.policy.build_deep import write_deep_model
from swarmnode.stages.crew_messages import StageAssignment
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_averaging import AverageProbe, averaged_parameters
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights.network import discovery, swaps
from swarmnode.weights.network.service import WeightService
from swarmnode.weights.trainer.gate import Losses
from tests.support.crew_models import averaging_of, opened
from tests.support.hosts import hosts
from tests.support.waiting import until, wait_connected

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
SWARM = b"\x21" * 32


class Holder:
    """One node with a stage, its averaging and the network half. The test takes the steps."""

    def __init__(self, network, directory, config, model, seat, seed):
        crew, index, *cut = seat
        layers = tuple(cut) or (2, 2)
        self.model = model
        assigned = StageAssignment(bytes([crew]) * 32, SWARM, index, layers, ("a", "b"), 0, "")
        self.stage = Stage(assigned, model.build(layers, index), model.settings(), model.limits())
        self.service = WeightService(
            network,
            SWARM,
            config.weights,
            KnownPeers(everyone=True),
            directory,
            self._send_to_trainer,
        )
        self._token = trio.lowlevel.current_trio_token()
        self.averaging = averaging_of(config, self.stage, self._send)
        self._generator = torch.Generator().manual_seed(seed)
        self.steps = 0

    def _send_to_trainer(self, message):
        self.averaging.receive(message)
        return True

    def _send(self, message):
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.service.receive, message)

    def connect(self):
        self.averaging.begin()
        self.service.set_policy(
            self.averaging.facts(False), self.model.text.fingerprint, self.model.text.tokenizer_hash
        )

    def step(self, size=0.001):
        """Take a step of its crew."""
        with torch.no_grad():
            for p in self.stage.runtime.parameters():
                p.add_(size * torch.randn(p.shape, generator=self._generator))
        self.steps += 1
        self.averaging.on_step_in_thread(
            SimpleNamespace(participant=SimpleNamespace(step=self.steps))
        )

    def weights(self):
        return {n: p.detach().clone() for n, p in averaged_parameters(self.stage).items()}

    def candidates(self):
        return self.service.statistics().candidates


def distance(a, b):
    """Return the distance of two holders over their common layers."""
    one, other = a.weights(), b.weights()
    return float(sum((one[n] - other[n]).norm() for n in one.keys() & other.keys()))


def as_good(_probe, _mine, _mean, answer):
    """Accept every average. No crew runs around these stages, and an average without a verdict is
    not applied."""
    answer(Losses(1.0, 1.0))
    return True


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(swaps, "COPY_WAIT_SECONDS", (1.0, 120.0))
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(AverageProbe, "measure", as_good)


@contextlib.asynccontextmanager
async def stages(tmp_path, seats, layers=4, fragments=1):
    """Yield a holder for each (crew, stage, cut of the crew; default: two halves). Hosts are
    connected and weight planes run, but no holder is connected to its own plane yet."""
    path = write_deep_model(tmp_path / "model", layers=layers)
    weights = {"fragments": fragments, "sync_every": 4}

    def config(directory):
        policy = {"model": str(path), "devices": "cpu"}
        return Config.model_validate(
            {
                "node": {"data_dir": directory},
                "policy": policy,
                "weights": weights,
                "stages": {"mode": "always"},
            }
        )

    async with (
        hosts(tmp_path, len(seats), swarm=SWARM) as networks,
        contextlib.AsyncExitStack() as stack,
        trio.open_nursery() as nursery,
    ):
        holders = []
        for number, (network, seat) in enumerate(zip(networks, seats, strict=True)):
            await wait_connected(network, len(seats) - 1)
            directory = tmp_path / str(number)
            model = stack.enter_context(opened(config(directory)))
            holders.append(Holder(network, directory, config(directory), model, seat, number))
            stack.callback(holders[-1].averaging.close)
            await nursery.start(holders[-1].service.run)
        yield holders
        nursery.cancel_scope.cancel()


async def meet(first, second):
    """Make every fourth step an outer step and wait for its commit. Return the distance before
    it."""
    for _ in range(2):
        first.step()
        second.step()
    before = distance(first, second)
    counts = lambda: {holder.averaging.report().exchanges_total for holder in (first, second)}
    # On a busy machine the first payload may hold weights from before these steps.
    with trio.fail_after(280):
        while 0 in counts() or distance(first, second) >= 0.1 * before:
            first.step(0.0)
            second.step(0.0)
            await trio.sleep(0.05)
    return before


async def test_averages_only_equal_layers_of_another_crew(tmp_path):
    async with stages(tmp_path, [(1, 1), (2, 1), (1, 0)]) as holders:
        first, second, head = holders
        # The tied embedding is at both ends of a crew. Averaged at only one end, its copies would
        # diverge.
        assert not any(
            "embed_tokens" in name or "lm_head" in name
            for holder in holders
            for name in holder.weights()
        )
        assert set(first.weights()) == set(second.weights())
        assert not set(first.weights()) & set(head.weights())
        for holder in holders:
            holder.connect()
        await until(lambda: first.candidates() == second.candidates() == 1)
        assert head.candidates() == 0
        before, others = await meet(first, second), head.weights()
        assert distance(first, second) < 0.1 * before
        assert all(torch.equal(t, others[n]) for n, t in head.weights().items())
