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

import contextlib
import ctypes
import errno
import functools
import os
import platform
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

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
REFUSALS = 16
"""Maximum number of different refusals that are recorded at once."""
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
        "array.__new__",
        "builtins.id",
        "gc.get_objects",
    }
)
_UNAUDITED = (
    (os, "stat lstat access readlink statvfs getcwd uname pipe times sched_getaffinity"),
    (time, "sleep"),
    (threading, "_start_new_thread"),
)
"""Functions that raise no audit event, and whose system calls the kernel refuses. `os.path.exists`
would only return False."""
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
        if install_filter(libc):
            layers.append("seccomp")
    sys.addaudithook(_refuse)
    for module, names in _UNAUDITED:
        for name in filter(functools.partial(hasattr, module), names.split()):
            setattr(module, name, _refused(f"{module.__name__}.{name.strip('_')}"))
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


class _CpuLimit(BaseException):
    """Raised inside a computation at its limit; libraries that catch Exception do not stop it."""


@contextlib.contextmanager
def limit_cpu(seconds: float) -> Iterator[None]:
    """Limit the CPU time of a computation. Raises RuntimeError if it takes more.

    The timer repeats, because the computation may catch an exception. Code in C that does not
    return to the interpreter ends at the limit of `allow_cpu`, which kills the process.
    """

    def stop(number: int, frame: object) -> None:
        raise _CpuLimit

    former = signal.signal(signal.SIGPROF, stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 4)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _CpuLimit:
        raise RuntimeError(f"it takes more than {seconds:g} s of CPU time") from None
    finally:
        signal.signal(signal.SIGPROF, former)


_refusals: dict[str, int] = {}
"""Refused event → number, since `take_refusals`."""


def take_refusals() -> dict[str, int]:
    """Return what the sandbox has refused since the last call. Code may catch the PermissionError
    and return a wrong result, so a refusal is recorded where it happens.
    """
    taken = dict(_refusals)
    _refusals.clear()
    return taken


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event not in _ALLOWED_EVENTS:
        what = f"{event} {args[0]}"[:100] if event == "import" and args else event
        if not _shows_traceback() and (what in _refusals or len(_refusals) < REFUSALS):
            _refusals[what] = _refusals.get(what, 0) + 1
        raise PermissionError(f"the scorer's sandbox refuses {what}")


def _refused(what: str) -> Callable[..., NoReturn]:
    """Return a function that takes the place of another one, and is refused and recorded."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        _refuse(what, ())
        raise AssertionError

    return refuse


def _shows_traceback() -> bool:
    """Return True if the refused call reads source code for a traceback: it changes no reward."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_globals.get("__name__") == "linecache":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def refuse_alarm(seconds: int) -> int:
    """Take the place of `signal.alarm`, which the kernel refuses without an error."""
    _refuse("signal.alarm", ())
    return 0


def _drop_capabilities(libc: ctypes.CDLL) -> bool:
    """Drop every capability, also from the bounding set, so that none can be regained."""
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    return libc.capset(ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(24)) == 0


# ---- seccomp -------------------------------------------------------------------------------------


_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data; both machines are little-endian.
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16

# System call → number on x86-64, number on arm64 (None if arm64 does not have it).
_CALLS: dict[str, tuple[int, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, None),
    "ppoll": (271, 73),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "clock_gettime": (228, 113),
    "gettimeofday": (96, 169),
    "setitimer": (38, 103),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_PRLIMIT64 = (302, 261)  # only on this process: pid 0
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_program(machine: str) -> bytes:
    """Return the filter for `machine` as an array of struct sock_filter (8 bytes each). Raises
    KeyError for an unsupported machine.

    It is classic BPF written by hand: it has forty instructions, and libseccomp would be a
    dependency.
    """
    column, arch = _ARCHITECTURES[machine]
    numbers = [call[column] for call in _CALLS.values() if call[column] is not None]
    code = [
        (_LOAD_WORD, 0, 0, _ARCH_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, arch),  # the numbers of 32-bit calls differ
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        *((_JUMP_IF_EQUAL, len(numbers) - i + 3, 0, number) for i, number in enumerate(numbers)),
        (_JUMP_IF_EQUAL, 0, 2, _PRLIMIT64[column]),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install_filter(libc: ctypes.CDLL) -> bool:
    """Filter this thread's system calls from now on: allow the few calls for computing and
    answering, and return EPERM for all others. It requires no_new_privs.

    A refused call returns EPERM instead of killing the process, so Python code gets an ordinary
    PermissionError.

    Returns:
        False if the kernel or the machine does not support it.
    """
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES or sys.maxsize < 2**32:
        return False
    code = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = _Program(len(code) // 8, ctypes.addressof(buffer))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) == 0


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))
