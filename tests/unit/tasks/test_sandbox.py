"""Attempts to leave the sandbox of the scorer child. Each trial runs `sandbox.enter` in a process
of its own.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest

from swarmnode.tasks import child, sandbox
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import REFUSED
from tests.support.whole_gym import IMPORT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="most layers are Linux's")

# A compromised scorer. It first disables some layers, to show that the other layers suffice, and
# then tries every attack.
INTRUDER = """
import ctypes, json, os, resource, socket, subprocess, sys
from swarmnode.tasks import child, sandbox
marker, without = sys.argv[1], sys.argv[2].split(",")
inherited, port = int(sys.argv[3]), int(sys.argv[4])
os.fstat(inherited)
if "audit" in without:
    sys.addaudithook = lambda hook: None
if "seccomp" in without:
    sandbox.install_filter = lambda libc: False
if "rlimits" in without:
    resource.setrlimit = lambda limit, values: None
layers = sandbox.enter(os.getppid())

def connect():
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", port))

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def write():
    with open(marker, "w") as file:
        file.write("x")

def write_by_libc():
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.open(marker.encode(), os.O_WRONLY | os.O_CREAT, 0o600)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "open")

def allocate():
    if "rlimits" in without:
        raise MemoryError  # a limit that is not there is not tried: it would really take the memory
    bytearray(4 << 30)

def system():
    if os.system("touch " + marker) != 0:
        raise OSError("no shell")

trials = {
    "socket": lambda: socket.socket(),
    "connect": connect,
    "pair": lambda: socket.socketpair(),
    "write": write,
    "write_by_libc": write_by_libc,
    "read": lambda: open("/proc/self/status").read(),
    "spawn": lambda: subprocess.run(["true"], check=True),
    "system": system,
    "fork": fork,
    "allocate": allocate,
    "kill": lambda: os.kill(os.getppid(), 0),
    "mkdir": lambda: os.mkdir(marker),
    "parent_limit": lambda: resource.prlimit(
        os.getppid(), resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)
    ),
    "memory_limit": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
    "ctypes": lambda: ctypes.CDLL(None).getpid(),
    "inherited": lambda: os.fstat(inherited),
    "eval": lambda: eval("1 + 1"),
    "import": lambda: __import__("http.client"),
    "compute": lambda: sum(range(1000)),
}
done = []
for name, trial in trials.items():
    try:
        trial()
        done.append(name)
    except (OSError, MemoryError, ValueError, ImportError, subprocess.SubprocessError):
        pass
os.write(1, json.dumps([layers, done]).encode())
"""


def intrude(folder, without="", port=9):
    """(active layers, what succeeded)"""
    secret = os.open("/dev/null", os.O_RDONLY)
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, str(folder / "marker"), without, str(secret), str(port)],
        pass_fds=(secret,),
        capture_output=True,
        text=True,
        timeout=120,
        env={"LANG": "C.UTF-8"},
        check=True,
    )
    os.close(secret)
    layers, succeeded = json.loads(done.stdout)
    return layers, succeeded


def test_nothing_but_computing_is_possible(tmp_path):
    layers, succeeded = intrude(tmp_path)
    assert {"env", "fds", "rlimits", "no_new_privs", "parent_death", "audit"} <= set(layers)
    assert succeeded == ["compute"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"),
    reason="the filter has no call numbers for this machine",
)
def test_the_kernel_refuses_it_when_the_interpreter_does_not(tmp_path):
    layers, succeeded = intrude(tmp_path, without="audit")
    if "seccomp" not in layers:
        pytest.skip("this kernel has no seccomp filters")
    assert set(succeeded) == {"ctypes", "eval", "compute"}
    assert list(tmp_path.iterdir()) == []


def test_limits_hold_without_interpreter_and_filter(tmp_path):
    _, succeeded = intrude(tmp_path, without="audit,seccomp")
    stopped = "socket connect pair write read spawn system allocate memory_limit inherited"
    assert not set(stopped.split()) & set(succeeded)


def test_network_namespace_has_no_way_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        layers, succeeded = intrude(
            tmp_path, without="audit,seccomp,rlimits", port=server.getsockname()[1]
        )
    if "namespaces" not in layers:
        pytest.skip("this machine lets us make no namespaces")
    assert "socket" in succeeded
    assert "connect" not in succeeded


def test_filter_lets_through_only_what_is_listed():
    """Run the program as the kernel would: every call of the list is allowed, every other one and
    every other architecture is not."""
    for machine, (column, arch) in sandbox._ARCHITECTURES.items():
        listed = {call[column] for call in sandbox._CALLS.values()} - {None}
        for number in range(600):
            verdict = 0x7FFF0000 if number in listed else 0x00050001
            own = 0x7FFF0000 if number in listed | {sandbox._PRLIMIT64[column]} else 0x00050001
            assert run_filter(sandbox.filter_program(machine), number, arch, pid=1) == verdict
            assert run_filter(sandbox.filter_program(machine), number, arch, pid=0) == own
        assert (
            run_filter(sandbox.filter_program(machine), min(listed), arch ^ 1, pid=0) == 0x80000000
        )
        # the x32 numbers
        assert (
            run_filter(sandbox.filter_program(machine), min(listed) | 0x40000000, arch, pid=0)
            == 0x00050001
        )


def run_filter(program, number, arch, pid):
    code = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    words = {0: number, 4: arch, 16: pid}
    place, accumulator = 0, 0
    while True:
        operation, if_true, if_false, constant = code[place]
        place += 1
        if operation == 0x20:
            accumulator = words[constant]
        elif operation == 0x15:
            place += if_true if accumulator == constant else if_false
        elif operation == 0x06:
            return constant


def test_cpu_time_ends_a_computation_that_does_not():
    code = (
        "import os; from swarmnode.tasks import sandbox; sandbox.enter(os.getppid());"
        " sandbox.allow_cpu(0)\nwhile True: pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGXCPU


def test_an_orphan_does_not_start():
    code = (
        "import os; from swarmnode.tasks import sandbox; sandbox.enter(os.getppid() + 1);"
        " os.write(1, b'started')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout == b""


def test_child_reports_its_sandbox_layers(monkeypatch):
    environments = []

    class Popen(child.subprocess.Popen):
        def __init__(self, *args, env, **options):
            environments.append(env)
            super().__init__(*args, env=env, **options)

    monkeypatch.setattr(child.subprocess, "Popen", Popen)
    monkeypatch.setenv("SWARMNODE_SECRET", "token")
    with Scorer() as scorer:
        layers = scorer.statistics().layers
    assert set(layers) <= set(sandbox.LAYERS)
    assert {"env", "fds", "rlimits", "no_new_privs", "parent_death", "audit"} <= set(layers)
    assert set(environments[0]) <= {"LANG", "PYTHONHASHSEED", "LD_LIBRARY_PATH"}


def test_the_child_loads_nothing_heavy_and_no_refused_scorer():
    code = (
        "import sys; from swarmnode.tasks.scorer import Judge; Judge(); print('"
        " '.join(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    loaded = set(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    )
    heavy = {"torch", "transformers", "trio", "libp2p", "numpy", "sympy", "matplotlib", "pydantic"}
    assert not heavy & loaded
    refused = {name.removeprefix("rg/") for name in REFUSED}
    assert not refused & {
        module.rpartition(".")[2] for module in loaded if module.startswith("reasoning_gym")
    }


def test_questions_and_rewards_load_a_part_of_the_library():
    code = (
        """
import sys
from swarmnode.tasks.scorer import GymTask
from swarmnode.tasks.registry import TASKS
for spec in [spec for spec in TASKS.values() if spec.kind == "reasoning_gym"]:
    item = GymTask(spec).item(5, 0)
    assert item.reward(item.answer) == 1.0
assert not {"reasoning_gym", "sympy", "matplotlib"} & set(sys.modules)
"""
        + IMPORT
        + """
print(len(reasoning_gym.create_dataset("polynomial_multiplication", seed=1, size=1)))
"""
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
