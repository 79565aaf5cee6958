"""`policy.devices` on machines without, with one, and with several GPUs; which of them are excluded
or refused."""

import resource

import pytest
import torch

from swarmnode.config import PolicyConfig
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.policy import device
from swarmnode.policy.device import Card, devices, training_devices

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the number of the machine's GPUs."""

    def has(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    return has


def names(text):
    return [str(each) for each in devices(PolicyConfig(devices=text))]


@pytest.mark.parametrize(
    ("gpus", "text", "expected"),
    [
        (0, "auto", ["cpu"]),
        (0, 3, ["cpu"] * 3),
        (0, "cpu", ["cpu"]),
        (1, "auto", ["cuda:0"]),
        (4, "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "2", ["cuda:0", "cuda:1"]),
        (4, "cuda:2", ["cuda:2"]),
        (4, "cuda:0,cuda:2", ["cuda:0", "cuda:2"]),
        (4, "cpu", ["cpu"]),
    ],
)
def test_devices_are_those_of_the_machine(machine, gpus, text, expected):
    machine(gpus)
    assert names(text) == expected


@pytest.mark.parametrize(
    ("gpus", "text", "told"),
    [
        (0, "cuda", "sees 0 CUDA devices"),
        (1, "2", "policy.devices 2: 1 GPUs are here"),
        (2, "cuda:0,cuda:2", "'cuda:2': torch .* sees 2 CUDA devices"),
    ],
)
def test_missing_devices_are_refused_in_one_line(machine, gpus, text, told):
    machine(gpus)
    with pytest.raises(Unavailable, match=told) as error:
        names(text)
    assert "\n" not in str(error.value)


CARDS = [
    Card("cuda:0", "Big", 80 * GIB, 78 * GIB),
    Card("cuda:1", "Big", 80 * GIB, 3 * GIB),
    Card("cuda:2", "Small", 8 * GIB, 7 * GIB),
    Card("cuda:3", "Big", 80 * GIB, 70 * GIB),
]
ALL = [torch.device(card.device) for card in CARDS]


def test_auto_excludes_busy_gpus():
    chosen, left_out = training_devices(PolicyConfig(), ALL, CARDS, 5 * GIB)
    assert [str(each) for each in chosen] == ["cuda:0", "cuda:2", "cuda:3"]
    assert left_out == ["cuda:1 Big, 3.0 of 80.0 GiB free; training needs about 5.0 GiB"]


def test_too_large_model_is_left_to_fit():
    chosen, left_out = training_devices(PolicyConfig(), ALL, CARDS, 100 * GIB)
    assert [str(each) for each in chosen] == ["cuda:0"]
    assert left_out == []


@pytest.mark.parametrize("text", ["cuda:0,cuda:1", "2"])
def test_busy_named_gpus_are_refused_in_one_line(machine, text):
    machine(4)
    cfg, told = PolicyConfig(devices=text), "cuda:1 Big.*3.0 of 80.0 GiB free; training needs about"
    with pytest.raises(DeviceError, match=told) as error:
        training_devices(cfg, devices(cfg), CARDS, 5 * GIB)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(device.freed_bytes() == 0, reason="glibc only")
def test_freed_memory_is_kept_and_counted_as_spare():
    device.set_up(torch.device("cpu"))
    tensors = lambda: [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
    tensors()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        tensors()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert faults < 8 * 2**24 / 4096, "the pages of one round, were they mapped again"
    cpu = torch.device("cpu")
    assert device.spare_bytes(cpu) - device.free_bytes(cpu) > 8 * 2**23
