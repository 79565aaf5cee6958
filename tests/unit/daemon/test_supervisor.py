"""The supervisor over real, small child processes."""

import json
import os
import signal
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from swarmnode.config import Config
from swarmnode.daemon import supervisor as module
from swarmnode.daemon.supervisor import Supervisor, describe_exit, parse_progress
from tests.support.waiting import until

CHILD = textwrap.dedent("""
    import os, signal, sys, time
    sys.path.insert(0, {path!r})
    from swarmnode.process import Progress, die_with_parent
    die_with_parent()
    progress = Progress()
    name, marks = {name!r}, {marks!r}
    with open(os.path.join(marks, name), "a") as file:
        file.write(str(os.getpid()) + "\\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    {body}
""")
FOREVER = "while True: progress('training', 0.01); time.sleep(0.02)"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Build a supervisor whose children run `bodies`; `pids(name)` lists the started children."""

    def build(network=FOREVER, trainer=FOREVER, drain_seconds=5.0):
        commands = {}
        for name, body in {"network": network, "trainer": trainer}.items():
            root = os.path.dirname(os.path.dirname(module.__file__))
            code = CHILD.format(path=root, name=name, marks=str(tmp_path), body=body)
            package = tmp_path / f"child_{name}.py"
            package.write_text(code)
            commands[name] = f"child_{name}"
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr("swarmnode.daemon.watchdog.STALL_FLOOR_SECONDS", 0.5)
        for name in ("watchdog", "supervisor"):
            monkeypatch.setattr(f"swarmnode.daemon.{name}.DRAIN_SECONDS", drain_seconds)
        config = Config.model_validate({"node": {"data_dir": tmp_path / "data"}})
        return Supervisor(config.node.data_dir, config.model_dump_json, commands)

    def pids(name):
        path = tmp_path / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    build.pids = pids
    build.statistics = lambda: json.loads(
        (tmp_path / "data" / "run" / "supervisor.json").read_text()
    )
    return build


@asynccontextmanager
async def running(supervisor):
    """Run a supervisor during the block, and stop it by a signal."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        yield
        os.kill(os.getpid(), signal.SIGTERM)


async def test_killed_child_is_restarted_alone(node):
    async with running(node()):
        await until(lambda: node.pids("trainer") and node.pids("network"))
        os.kill(node.pids("trainer")[0], signal.SIGKILL)
        await until(lambda: len(node.pids("trainer")) == 2)
        await until(lambda: node.statistics()["restarts"]["trainer"] == 1)
        await until(lambda: not node.statistics()["down"])
    assert len(node.pids("network")) == 1


async def test_repeated_exception_of_a_child_ends_the_node(node, monkeypatch):
    monkeypatch.setattr("swarmnode.daemon.watchdog.BACKOFF_SECONDS", 0.01)
    assert await node(trainer=CRASHES).run() == 70
    assert len(node.pids("trainer")) == 3
    assert len(node.pids("network")) == 1


@pytest.mark.parametrize(
    ("trainer", "code", "starts"),
    [
        ("progress('training', 0.1); sys.exit(0)", 0, 1),
        ("sys.exit(78)", 78, 1),
        ("sys.exit(1)", 75, 3),
    ],
)
async def test_exit_code_of_the_trainer_ends_the_node(node, monkeypatch, trainer, code, starts):
    monkeypatch.setattr("swarmnode.daemon.watchdog.CRASH_LIMIT", 3)
    with trio.fail_after(120):
        assert await node(trainer=trainer).run() == code
    assert len(node.pids("trainer")) == starts


async def test_a_second_signal_aborts_a_drain_that_hangs(node):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
    supervisor = node(trainer=stubborn, drain_seconds=60.0)

    async def stop():
        await until(lambda: node.pids("trainer"))
        await until(lambda: supervisor._children["trainer"].watchdog.status == "training")
        os.kill(os.getpid(), signal.SIGTERM)
        await until(supervisor._stopping.is_set)
        os.kill(os.getpid(), signal.SIGTERM)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        assert await supervisor.run() == 128 + signal.SIGTERM


DRAINS = """
def end(*_):
    print("asked", file=open({marker!r} + ".asked", "a"), flush=True)
    progress("draining")
    for _ in range({turns}):
        time.sleep(0.1)
        progress("{status}")
    open({marker!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
progress("training", {step})
open({marker!r} + ".ready", "w").close()
while True: time.sleep(0.05); progress("training")
"""


@pytest.mark.parametrize(
    ("status", "step", "survives"),
    [
        ("draining", 0.01, True),  # saves for longer than drain_seconds
        ("training", 0.01, False),  # neither saves nor is within a step
        ("training", 1.0, True),  # is within its step
    ],
)
async def test_drain_waits_for_step_and_save(node, tmp_path, status, step, survives):
    body = "import signal\n" + DRAINS.format(
        turns=15, status=status, step=step, marker=str(tmp_path / "saved")
    )
    async with running(node(trainer=body, drain_seconds=0.5)):
        await until((tmp_path / "saved.ready").exists)
    assert (tmp_path / "saved").exists() is survives


async def test_the_network_process_ends_after_the_trainer_has_saved(node, tmp_path):
    saved, seen = tmp_path / "saved", tmp_path / "seen"
    network = f"""
def end(*_):
    open({str(seen)!r}, "w").write(str(os.path.exists({str(saved)!r})))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open({str(seen)!r} + ".ready", "w").close()
"""
    trainer = DRAINS.format(turns=3, status="draining", step=0.01, marker=str(saved))
    async with running(node(network + FOREVER, trainer)):
        await until(lambda: all(file.with_suffix(".ready").exists() for file in (saved, seen)))
    assert seen.read_text() == "True"


@pytest.mark.parametrize(
    "line", [b"", b'{"status":"x"}', b'{"step_seconds":"a","status":"x"}', b"\xff"]
)
def test_invalid_progress_lines_are_ignored(line):
    assert parse_progress(line) is None


async def test_children_are_started_by_the_main_thread(node):
    async with running(node()):
        await until(lambda: node.pids("trainer") and node.pids("network"))
        assert node.pids("trainer")[0] in made_by_main_thread()


def made_by_main_thread():
    return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]


CRASHES = textwrap.dedent("""
    from pathlib import Path
    from swarmnode.config import LogConfig
    from swarmnode.observe import logs
    from swarmnode.process import run_main
    logs.configure(LogConfig(), name, data_dir=Path(marks) / "data")
    def main():
        open("/absent/model")
    sys.exit(run_main(name, main))
""")
FIRST_ONLY = (
    "if len(open(os.path.join(marks, name)).readlines()) > 1: progress('loading'); time.sleep(60)\n"
)
"""The replacement stays in loading, so that the reason of the first end remains readable."""


async def down(node, name="trainer"):
    """Return why a process is down, once it is."""
    await until(lambda: name in node.statistics()["down"])
    return node.statistics()["down"][name]


async def test_down_reason_is_the_last_logged_error(node, tmp_path):
    async with running(node(trainer=CRASHES)):
        await until(lambda: node.pids("trainer"))
        why = await down(node)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/absent/model'" in why
    assert why.endswith("(exit code 1)")
    assert "\n" not in why
    assert "Traceback" in (tmp_path / "data" / "log" / "trainer.jsonl").read_text()


async def test_the_status_names_what_a_loading_process_does(node, tmp_path):
    loads = (
        "progress('loading, trying the policy')\n"
        "while not os.path.exists(os.path.join(marks, 'go')): time.sleep(0.02)\n" + FOREVER
    )
    supervisor = node(trainer=loads)
    shown = lambda: node.pids("trainer") and node.statistics()["loading"]
    async with running(supervisor):
        await until(lambda: shown() == {"trainer": "loading, trying the policy"})
        (tmp_path / "go").touch()
        await until(lambda: shown() == {})


async def test_a_process_that_hung_did_not_crash(node):
    async with running(node(trainer=FIRST_ONLY + "progress('training', 0.01); time.sleep(60)")):
        await until(lambda: node.pids("trainer"))
        assert await down(node) == "no progress while training, killed"


@pytest.mark.parametrize(
    ("code", "last", "expected"),
    [
        (1, "crashed error=KeyError: 'x'", "KeyError: 'x' (exit code 1)"),
        (-9, "", "killed by SIGKILL; unless someone killed it, the machine ran out of memory"),
        (-11, "", "killed by SIGSEGV"),
        (0, "old", "finished"),
        (79, "the node has moved", "the node has moved"),
        (79, "", "the process wants to be restarted"),
    ],
)
def test_exit_is_described_in_one_line(code, last, expected):
    assert describe_exit(code, last) == expected
