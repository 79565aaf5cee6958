"""Sandbox of the scorer child, permanent for its process. The child enters it after it has loaded
its tasks and before it reads any text.

Every layer assumes that the others have failed. From the outside in:

    env          only the environment variables that the interpreter needs (the client starts the
    child with them)
    fds          only stdin, stdout and stderr are open
    rlimits      limits of address space and CPU seconds; no file writes, core dumps, new processes
    or new descriptors
    no_new_privs set-uid programs gain no privileges
    parent_death the kernel kills the child when the thread that started it ends
    namespaces   own user, network and IPC namespaces without any interface, not even loopback (if
    the kernel permits)
    no_caps      no capability in the new user namespace
    seccomp      the kernel refuses all system calls but the few for computing and answering (Linux
    on x86-64 and arm64)
    audit        the interpreter refuses files, sockets, processes, ctypes, compile() and exec()

`enter()` returns the active layers; a client shows them in its `statistics()`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

from swarmnode.tasks import seccomp

LAYERS = (
    "env",
    "fds",
    "rlimits",
    "no_new_privs",
    "parent_death",
    "namespaces",
    "no_caps",
    "seccomp",
    "audit",
)

MEMORY_BYTES = 768 * 2**20
"""Limit of the address space, in bytes. The child needs about 50 MiB."""
CPU_SECONDS = 30
"""CPU time in seconds before the first `allow_cpu()`."""

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

# Audit events without an effect outside of the process. All other events are refused, including
# those of later Python versions.
_ALLOWED_EVENTS = frozenset(
    {
        "resource.setrlimit",
        "sys._getframe",
        "sys.unraisablehook",
        "sys.excepthook",
        "object.__getattr__",
        "builtins.id",
        "gc.get_objects",
    }
)
_ENVIRONMENT = frozenset({"PATH", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHASHSEED"})


def enter(parent: int) -> list[str]:
    """Activate every layer that this machine supports.

    Call it once, with a single thread, after all imports and file reads.

    Args:
        parent: Pid of the expected parent. The process exits if it has another parent.

    Returns:
        The active layers, in the order of LAYERS.
    """
    layers = []
    if set(os.environ) <= _ENVIRONMENT:
        layers.append("env")
    os.closerange(3, max(4096, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)))
    layers.append("fds")
    libc = ctypes.CDLL(None, use_errno=True)
    on_linux = sys.platform == "linux"
    if on_linux and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        layers.append("namespaces")
    # after unshare(), which clears it
    if on_linux and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        layers.append("parent_death")
    if os.getppid() != parent:
        os._exit(0)
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 3,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    allow_cpu(CPU_SECONDS)
    layers.append("rlimits")
    if on_linux and _drop_capabilities(libc):
        layers.append("no_caps")
    if on_linux and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        layers.append("no_new_privs")
        if seccomp.install(libc):
            layers.append("seccomp")
    sys.addaudithook(_refuse)
    layers.append("audit")
    return sorted(layers, key=LAYERS.index)


def allow_cpu(seconds: int) -> None:
    """Let this process use at most `seconds` more of CPU time, rounded up to a whole second. The
    kernel kills the process beyond that.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + seconds, hard)
    )


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event not in _ALLOWED_EVENTS:
        raise PermissionError(f"the scorer's sandbox refuses {event}")


def _drop_capabilities(libc: ctypes.CDLL) -> bool:
    """Drop every capability, also from the bounding set, so that none can be regained."""
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    return libc.capset(ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(24)) == 0
