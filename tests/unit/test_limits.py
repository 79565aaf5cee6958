"""Limits of control groups, in versions 1 and 2, as a container sees them."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from swarmnode import limits
from swarmnode.cli import node
from swarmnode.config import PolicyConfig
from swarmnode.errors import Unavailable
from swarmnode.policy import device

GIB = 2**30


def write(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def v2(tmp_path):
    """/proc/self of a process in the group /slice/box; the mount is empty."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(
        proc,
        cgroup="0::/slice/box",
        mountinfo=f"30 24 0:26 / {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw",
    )
    write(mount / "slice" / "box")
    return proc, mount


@pytest.fixture
def v1(tmp_path):
    """/proc/self of a container of Docker without a namespace: the mounts show its own group."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    lines = [
        f"31 30 0:27 /docker/7 {mount}/{each} ro - cgroup cgroup rw,{each}"
        for each in ("memory", "cpu,cpuacct", "pids")
    ]
    write(
        proc,
        cgroup="9:memory:/docker/7\n8:cpu,cpuacct:/docker/7\n7:pids:/docker/7\n0::/",
        mountinfo="\n".join(lines),
    )
    return proc, mount


def test_memory_is_that_of_the_smallest_group_of_the_chain(v2, monkeypatch):
    proc, mount = v2
    monkeypatch.setattr(limits, "PROC", proc)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    assert limits.available_memory() == 10 * GIB
    stat = "anon 5\nactive_file 300\ninactive_file 700\nslab 9"
    write(mount / "slice", memory__max=10_000, memory__current=4_000, memory__stat=stat)
    write(mount / "slice" / "box", memory__max="max", memory__current=3_000, memory__stat=stat)
    assert limits.available_memory() == 7_000  # cached files are free
    write(mount / "slice" / "box", memory__max=3_500)
    assert limits.available_memory() == 1_500
    assert device.free_bytes(torch.device("cpu")) == 1_500
    write(mount / "slice" / "box", memory__high=3_200)
    assert limits.available_memory() == 1_200


def test_memory_of_a_container_in_version_1(v1, monkeypatch):
    proc, mount = v1
    write(
        mount / "memory",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=1_000,
        memory__stat="total_active_file 100\ntotal_inactive_file 200\nactive_file 7",
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    assert limits.available_memory(proc) == GIB - 700
    write(mount / "memory", memory__limit_in_bytes=9_223_372_036_854_771_712)
    assert limits.available_memory(proc) == 10 * GIB


def test_quota_limits_the_threads(v2, monkeypatch):
    proc, mount = v2
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: set(range(32)))
    assert limits.processors(proc) == 32
    write(mount / "slice", cpu__max="250000 100000")
    write(mount / "slice" / "box", cpu__max="max 100000")
    assert limits.processors(proc) == 3
    monkeypatch.setattr(limits, "PROC", proc)
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    device.set_threads(PolicyConfig())
    device.set_threads(PolicyConfig(threads=5))
    assert chosen == [2, 5], "one of few processors is left for the rest of the node"


def test_quota_of_version_1(v1, monkeypatch):
    proc, mount = v1
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: set(range(32)))
    write(mount / "cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert limits.processors(proc) == 32
    write(mount / "cpu,cpuacct", cpu__cfs_quota_us=50_000)
    assert limits.processors(proc) == 1


def test_too_few_processes_are_one_line_before_the_start(v2, monkeypatch):
    proc, mount = v2
    monkeypatch.setattr(limits, "PROC", proc)
    assert limits.missing_tasks() == ""
    write(mount / "slice", pids__max=20, pids__current=3)
    write(mount / "slice" / "box", pids__max="max", pids__current=3)
    with pytest.raises(Unavailable, match=r"allows 20 processes .* 3 exist.*--pids-limit") as error:
        node.check_limits()
    assert "\n" not in str(error.value)
    write(mount / "slice", pids__max=4_096)
    node.check_limits()


def test_outside_linux_there_are_no_groups(tmp_path):
    assert limits.available_memory(tmp_path) > 0
    assert limits.processors(tmp_path) >= 1
    assert limits.missing_tasks(tmp_path) == ""
