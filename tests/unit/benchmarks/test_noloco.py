"""benchmarks.noloco: replicas are independent, shards differ, and payload bytes are counted."""

import pytest
import torch

from benchmarks.lib.replicas import Text, batches, initial, losses
from benchmarks.noloco import REPLICAS, Arm, Size, Swarm


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text():
    """Nine tasks of nine different tokens."""
    streams = [torch.full((200,), 5 + i) for i in range(9)]
    rows = torch.stack([s[:33] for s in streams])
    return Text(streams, rows, rows, 20)


def test_replicas_do_not_leak_into_each_other():
    parameters = initial(0, 3, 20)
    for p in parameters.values():
        p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        p.requires_grad_(True)
    tokens = torch.randint(0, 20, (3, 2, 33), generator=torch.Generator().manual_seed(2))
    each = losses(parameters, tokens)
    for i in range(3):
        alone = losses({n: p[i : i + 1] for n, p in parameters.items()}, tokens[i : i + 1])
        assert float(alone.detach()) == pytest.approx(float(each[i].detach()), rel=1e-5)
    each[1].backward()
    for p in parameters.values():
        assert float(p.grad[[0, 2]].abs().max()) == 0.0
        assert float(p.grad[1].abs().max()) > 0.0


@pytest.mark.parametrize(
    ("arm", "per_sync"),
    [
        (Arm("diloco", "diloco"), 3.5),
        (Arm("noloco"), 2.0),
        (Arm("int8", codec="int8"), 1.0),
        (Arm("drop", dropped=1.0), 0.0),
    ],
)
def test_bytes_are_counted_per_node_and_parameter(arm, per_sync):
    size = Size(steps=8, sync_every=4, batch=1, warmup=1)
    swarm = Swarm(arm, size, text(), 0, initial(0, REPLICAS, 20))
    swarm.run(batches(text(), REPLICAS, size.steps, size.batch, 0.5, 0))
    assert swarm.sent / max(1, swarm.syncs) == pytest.approx(per_sync, rel=0.05)
    assert len(swarm.curve) == 2


def test_averaging_brings_replicas_together_and_ddp_keeps_them_equal():
    size = Size(steps=8, sync_every=4, batch=1, warmup=1)
    data = batches(text(), REPLICAS, size.steps, size.batch, 0.5, 0)
    ends = {}
    for rule in ("off", "noloco", "diloco", "ddp"):
        swarm = Swarm(Arm(rule, rule), size, text(), 0, initial(0, REPLICAS, 20))
        swarm.run(data)
        ends[rule] = swarm.deviation()
    assert ends["off"] > ends["noloco"] > 0
    assert ends["ddp"] < 1e-6
    assert ends["diloco"] < 1e-6


def swarm_of(arm, steps=16):
    size = Size(steps=steps, sync_every=4, batch=1, warmup=1)
    swarm = Swarm(arm, size, text(), 0, initial(0, REPLICAS, 20))
    swarm.run(batches(text(), REPLICAS, size.steps, size.batch, 0.5, 0))
    return swarm


@pytest.mark.parametrize("meeting", ["all at once", "swap"])
def test_replicas_whose_exchanges_all_fail_train_as_without_averaging(meeting):
    options = {"in_flight": 2, "unequal": True}
    off = swarm_of(Arm("off", "off", **options))
    alone = swarm_of(Arm("alone", meeting=meeting, dropped=1.0, **options))
    for name, p in off.parameters.items():
        assert torch.equal(p, alone.parameters[name])
