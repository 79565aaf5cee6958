"""What the gate makes of log-probabilities: the numbers, the newest step's only, and what is a
verdict and what is none."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swarmnode.errors import Incompatible, PeerError
from swarmnode.stages import recovery
from swarmnode.stages.pipeline import run_inline
from swarmnode.stages.recovery import RecoverySettings, RestoreSource, Verdict, passes_gate
from swarmnode.stages.wire import GateProbe
from swarmnode.wire.tensors import pack_logprobs

PROBES = [
    SimpleNamespace(step=step, name=name, rows=1)
    for step, name in ((4, "old"), (5, "a"), (5, "b"), (5, "c"))
]


def test_the_divergence_and_the_rise_of_a_known_shift():
    shift = np.array([0.1, -0.3, 0.0, 0.6], np.float32)
    verdict = recovery.make_verdict(shift)
    assert verdict.kl == pytest.approx(
        sum(math.exp(r) - 1 - r for r in (0.1, -0.3, 0.0, 0.6)) / 4, rel=1e-5
    )
    assert verdict.nll_rise == pytest.approx(-0.1, rel=1e-5)
    assert (verdict.tokens, verdict.finite) == (4, True)
    assert recovery.make_verdict(np.zeros(3, np.float32)) == recovery.Verdict(0.0, 0.0, 3)


async def test_only_probes_of_the_newest_step_are_asked_and_each_once(monkeypatch):
    asked = []

    async def shift(peer, probe):
        asked.append(probe.name)
        return np.full(2, 0.2, np.float32)

    monkeypatch.setattr(recovery, "_shift", shift)
    verdict = await recovery.judge(None, PROBES)
    assert sorted(asked) == ["a", "b", "c"]
    assert verdict.tokens == 6
    assert verdict.nll_rise == pytest.approx(-0.2)


@pytest.mark.parametrize("error", [ValueError("nan"), Incompatible("not finite there")])
async def test_non_finite_numbers_condemn_the_stage(monkeypatch, error):
    bad = {}

    async def shift(peer, probe):
        if probe.name in bad:
            raise bad[probe.name]
        return np.zeros(2, np.float32)

    monkeypatch.setattr(recovery, "_shift", shift)
    for name in "abc":
        bad = {name: error}
        assert not (await recovery.judge(None, PROBES)).finite
        bad = {name: PeerError("gone")}
        with pytest.raises(PeerError):
            await recovery.judge(None, PROBES)


async def test_probe_visits_each_stage_once_in_order(
    monkeypatch,
):
    old = torch.tensor([-1.0, -2.0, -0.5])
    probe = SimpleNamespace(logprobs=pack_logprobs(old.tolist()))
    way = []

    class Peer:
        stage = SimpleNamespace(
            spec=SimpleNamespace(stages=3, index=1), runtime=None, codec=None, limits=None
        )
        tail = (-1.5, -2.0, -0.25)

        @property
        def channel(self):
            return SimpleNamespace(compute=run_inline)

        @property
        def fetch(self):
            return self

        async def run_at(self, stage, sent, count, x):
            assert (sent, count) == (probe, 3)
            way.append((stage, x))
            return b"from the head" if stage == 0 else pack_logprobs(list(self.tail))

    monkeypatch.setattr(recovery, "read_work", lambda probe, limits: "work")
    monkeypatch.setattr(
        recovery, "run_one", lambda runtime, work, x, codec: way.append((1, x)) or b"from here"
    )
    shift = await recovery._shift(Peer(), probe)
    assert way == [(0, b""), (1, b"from the head"), (2, b"from here")]
    assert shift.tolist() == [-0.5, 0.0, 0.25]
    Peer.tail = (-1.5, float("nan"), -0.25)
    with pytest.raises(ValueError, match="finite"):
        await recovery._shift(Peer(), probe)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([100] * 8, [7, 6, 5, 4, 3, 2, 1, 0]),
        (
            [2560] * 8,
            [7, 6],
        ),  # a step of 64 answers of 1,280 tokens at 7 B: 20 MB a hop instead of 84
        ([8512] * 8, [7, 6]),
        ([9000, 1000, 600, 500, 400, 400], [5, 4, 3, 2, 1]),
    ],
)
def test_no_more_micro_batches_go_through_the_stages_than_a_verdict_needs(rows, chosen):
    message = partial(GateProbe, about=b"", logprobs=b"")
    probes = [message(number, 7, count) for number, count in enumerate(rows)]
    older = [message(number, 6, 1) for number in range(3)]
    assert [probe.micro_batch for probe in recovery.choose_probes(older + probes)] == chosen


COPIES, PAPER = RecoverySettings(), RecoverySettings(mode="checkfree+")
NAN = float("nan")


@pytest.mark.parametrize(
    ("source", "settings", "kl", "rise", "good"),
    [
        (RestoreSource("base"), COPIES, 0.019, 0.049, True),
        (RestoreSource("base"), COPIES, 0.021, 0.0, False),
        (RestoreSource("base"), COPIES, 0.0, 0.051, False),
        (RestoreSource("neighbour", 3, 1), COPIES, 0.19, 0.49, True),
        (RestoreSource("neighbour", 3, 1), COPIES, 0.21, 0.0, False),
        (RestoreSource("neighbour", 3, 1), COPIES, 0.0, 0.51, False),
        (RestoreSource("checkpoint", 3), COPIES, 0.21, 0.0, False),
        (RestoreSource("checkpoint", 9, None, current=True), COPIES, 5.0, 5.0, True),
        (RestoreSource("checkpoint", 9, None, current=True), COPIES, math.inf, math.inf, False),
        (RestoreSource("neighbour", 3, 1), COPIES, NAN, NAN, False),
        (RestoreSource("checkfree+"), PAPER, 5.0, 5.0, True),
        (RestoreSource("checkfree+"), PAPER, math.inf, 0.0, False),
    ],
)
def test_the_bounds_of_the_gate(source, settings, kl, rise, good):
    assert passes_gate(source, Verdict(kl, rise, 100), settings) is good


def test_without_a_probe_every_source_passes():
    assert passes_gate(RestoreSource("base"), None, COPIES)
