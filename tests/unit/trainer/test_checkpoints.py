"""Saves in the background, earlier states, and rollback."""

import os
import threading
import time
from itertools import pairwise

import pytest
import structlog
import torch

from swarmnode import cli
from swarmnode.errors import Unavailable
from swarmnode.files import locked_data_dir
from swarmnode.swarm import rollback
from swarmnode.trainer import checkpoints, state
from swarmnode.trainer.checkpoints import Checkpoints, Saver
from swarmnode.trainer.state import SEQUENCE_MARGIN, Counters


class Source:
    """The attributes of an engine that `Checkpoints` reads: model, optimizer and lock."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.lock = threading.Lock()
        self.taken = 0

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 4)).sum().backward()
        with self.lock:
            self.optimizer.step()

    def snapshot(self, rng, counters):
        self.taken += 1
        return state.take(self.model, self.optimizer, rng, counters, "f", lock=self.lock)

    def weight(self):
        return self.model.weight.detach().clone()


def saved(directory):
    counters, tensors = state.read_file(directory / state.FILE, "f")
    return counters, tensors["weights.weight"]


def save(kept):
    """Save if a save is due, and wait for its end."""
    kept.save()
    while not kept.idle:
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    """A fake clock for `checkpoints` that only the test advances."""
    now = [1000.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    return now


def test_saves_by_time_and_at_the_end(tmp_path, clock):
    source, counters = Source(), Counters()
    with Checkpoints(tmp_path, 60.0, source, torch.Generator(), counters) as kept:
        for step in range(1, 201):  # a second each
            source.step()
            counters.step = step
            save(kept)
            assert step - saved(tmp_path)[0].step < 60, "more than save_every would be lost"
            clock[0] += 1.0
        assert source.taken == 4  # at 0, 59, 118 and 177 s: a step before it would be too late
        source.step()
        counters.step = 201
        kept.save(last=True)
    numbers, weight = saved(tmp_path)
    assert numbers.step == 201
    assert torch.equal(weight, source.weight())


def test_a_write_that_takes_time_begins_as_much_earlier(tmp_path, clock, monkeypatch):
    """A crash loses everything after the step of the last completed state on disk."""
    source, counters, steps = Source(), Counters(), []
    write = state.write

    def slowly(*args):
        write(*args)
        clock[0] += 10.0

    monkeypatch.setattr(checkpoints.state, "write", slowly)
    with Checkpoints(tmp_path, 60.0, source, torch.Generator(), counters) as kept:
        for _ in range(40):  # five seconds each, or more while a state is written
            save(kept)
            if source.taken > len(steps):
                steps.append(clock[0] - 10.0)
            clock[0] += 5.0
    gaps = [after - before for before, after in pairwise(steps)]
    assert len(gaps) >= 3
    assert all(gap + 10.0 <= 60.0 for gap in gaps), (
        "more than save_every would be lost by a crash just before the write has ended"
    )


def test_a_large_state_is_saved_less_often(tmp_path, clock):
    source, counters, saves = Source(), Counters(), []
    source.step()
    with Checkpoints(tmp_path, 60.0, source, torch.Generator(), counters) as kept:
        kept.save(last=True)
    size = (tmp_path / state.FILE).stat().st_size
    with (
        structlog.testing.capture_logs() as lines,
        Checkpoints(  # a state an hour
            tmp_path, 60.0, source, torch.Generator(), counters, bytes_per_day=24 * size
        ) as kept,
    ):
        for second in range(1, 3 * 3600 + 1):
            counters.step, taken = second, source.taken
            save(kept)
            if source.taken > taken:
                saves.append(second)
            clock[0] += 1.0
    assert len(saves) == 2 + 2, "two at once, and one an hour"
    assert all(3500 < after - before < 3700 for before, after in pairwise(saves[1:]))
    assert [line["save_every"] for line in lines if line["log_level"] == "warning"] == [60.0]


def test_saves_before_reserved_group_numbers_run_out(tmp_path, clock):
    source, counters = Source(), Counters()
    with Checkpoints(tmp_path, 1e9, source, torch.Generator(), counters) as kept:
        kept.save()
        for _ in range(100):
            counters.sequence += 100
            save(kept)
            assert counters.sequence - saved(tmp_path)[0].sequence < SEQUENCE_MARGIN
    assert 4 < source.taken < 10


def test_copies_weights_and_counters_of_one_step(tmp_path, monkeypatch):
    """The optimizer waits for the copy, and for nothing else."""
    source, counters = Source(), Counters()
    copying, go_on = threading.Event(), threading.Event()
    real = state._host_copy

    def slowly(tensor):
        copying.set()
        assert go_on.wait(30)
        return real(tensor)

    monkeypatch.setattr(state, "_host_copy", slowly)
    with Checkpoints(tmp_path, 0.0, source, torch.Generator(), counters) as kept:
        source.step()
        counters.step = 1
        before = source.weight()
        kept.save()  # returns at once
        assert copying.wait(30)
        counters.step = 2
        stepping = threading.Thread(target=source.step)
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive(), "a step while weights are copied would mix two of them"
        kept.save()  # busy: not another one
        go_on.set()
        stepping.join(30)
    numbers, weight = saved(tmp_path)
    assert source.taken == 1
    assert numbers.step == 1
    assert torch.equal(weight, before)
    assert not torch.equal(weight, source.weight())


def write(saver, source, step, reward=None):
    saver.wait()
    saver.submit(
        state.take(
            source.model,
            source.optimizer,
            torch.Generator(),
            Counters(step=step, sequence=step, policy_version=step, reward_held_out=reward),
            "f",
        )
    )
    saver.wait()


def test_full_disk_is_reported_and_frees_earlier_states(tmp_path, monkeypatch):
    source, real = Source(), state.write
    full = [False]

    def sometimes(directory, snapshot, before):
        if full[0]:
            raise OSError("No space left on device")
        real(directory, snapshot, before)

    monkeypatch.setattr(state, "write", sometimes)
    saver = Saver(tmp_path, history_seconds=0.0)
    saver.start()
    for step in range(1, 4):
        write(saver, source, step)
    assert list((tmp_path / "history").iterdir())
    full[0] = True
    write(saver, source, 4)
    assert saver.error
    assert saver.saved_step == 3
    assert list((tmp_path / "history").iterdir()) == []
    full[0] = False
    write(saver, source, 5)
    assert saver.error is None
    assert saved(tmp_path)[0].step == saver.saved_step == 5
    saver.close()


def test_a_save_is_due_until_it_succeeds(tmp_path, clock, monkeypatch):
    source, counters, real, full = Source(), Counters(), state.write, [True]
    wall, ends = [5000.0], []

    def sometimes(*args):
        real(*args)  # releases the lock of the optimizer
        if full[0]:
            raise OSError("No space left on device")

    def pass_minute(kept):
        counters.step += 1
        save(kept)
        clock[0] += 60.0
        wall[0] += 60.0

    monkeypatch.setattr(state, "write", sometimes)
    monkeypatch.setattr(checkpoints.time, "time", lambda: wall[0])
    with Checkpoints(
        tmp_path,
        60.0,
        source,
        torch.Generator(),
        counters,
        on_end=lambda: ends.append((kept.due_at, bool(kept.error))),
    ) as kept:
        assert kept.due_at is None
        pass_minute(kept)
        pass_minute(kept)
        full[0] = False
        pass_minute(kept)
        assert (kept.due_at, kept.error, kept.saved_step) == (None, "", 3)
    assert ends == [(5000.0, True), (5000.0, True), (None, False)]


def test_a_restored_state_is_saved_already(tmp_path, clock):
    kept = Checkpoints(tmp_path, 60.0, Source(), torch.Generator(), Counters(step=40))
    assert (kept.saved_step, kept.due_at) == (40, None)


def test_few_earlier_states_are_kept_at_growing_intervals(tmp_path, clock):
    source = Source()
    saver = Saver(tmp_path, history_seconds=900.0)
    saver.start()
    for minute in range(60 * 12):
        write(saver, source, minute)
        clock[0] += 60.0
    saver.close()
    ages = sorted(60 * 12 - 1 - kept.counters.step for kept in rollback.list_states(tmp_path))
    assert len(ages) == 1 + checkpoints.SLOTS
    assert ages[0] == 0
    assert ages[1] <= 2 * 15 + 1
    assert 60 < ages[-1] <= 8 * 60
    assert len(list((tmp_path / "history").iterdir())) == checkpoints.SLOTS


@pytest.fixture
def data_dir(tmp_path):
    """A trained node with states of steps 1 to 3. The last state is worse than the second."""
    source = Source()
    saver = Saver(tmp_path / "trainer", history_seconds=0.0)
    saver.start()
    for step, reward in ((1, 0.2), (2, 0.4), (3, 0.01)):
        write(saver, source, step, reward)
        source.step()
    saver.close()
    return tmp_path


def test_rollback_and_its_reversal(data_dir, capsys):
    arguments = ["--data-dir", str(data_dir)]
    assert cli.run(["rollback", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step        3" in lines[0]
    assert "(current)" in lines[0]
    assert "0.400" in "".join(lines)
    bad = (data_dir / "trainer" / state.FILE).read_bytes()

    assert cli.run(["rollback", "2", *arguments]) == 0
    assert saved(data_dir / "trainer")[0].step == 2
    assert saved(data_dir / "trainer")[0].reward_held_out == 0.4
    assert cli.run(["rollback", "3", *arguments]) == 0
    assert (data_dir / "trainer" / state.FILE).read_bytes() == bad


def test_impossible_rollback_fails_with_one_line(data_dir, capsys):
    assert cli.run(["rollback", "77", "--data-dir", str(data_dir)]) == Unavailable.exit_code
    assert "available steps: 2" in capsys.readouterr().err
    with locked_data_dir(data_dir):
        assert cli.run(["rollback", "2", "--data-dir", str(data_dir)]) == Unavailable.exit_code
    assert "in use by another node" in capsys.readouterr().err
    assert saved(data_dir / "trainer")[0].step == 3


def test_published_numbers_are_read_from_every_state(data_dir):
    rollback.roll_back(data_dir, 2)
    (data_dir / "trainer" / "history" / "9.safetensors").write_bytes(os.urandom(100))
    (data_dir / "trainer" / "history" / "8.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    (data_dir / "trainer" / "history" / "7.safetensors").write_bytes(b"")
    numbers = [kept.counters for kept in rollback.list_states(data_dir / "trainer")]
    assert (
        max(each.sequence for each in numbers) == max(each.policy_version for each in numbers) == 3
    )
