"""Kernel filter for the system calls of this process. It allows the few calls for computing and
answering and returns EPERM for all others.

The filter is classic BPF written by hand: it has forty instructions, and libseccomp would be a
dependency. A refused call returns EPERM instead of killing the process, so Python code gets an
ordinary PermissionError.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

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
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_PRLIMIT64 = (302, 261)  # only on this process: pid 0
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def program(machine: str) -> bytes:
    """Return the filter for `machine` as an array of struct sock_filter (8 bytes each). Raises
    KeyError for an unsupported machine.
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


def install(libc: ctypes.CDLL) -> bool:
    """Filter this thread's system calls from now on. It requires no_new_privs.

    Returns:
        False if the kernel or the machine does not support it.
    """
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES or sys.maxsize < 2**32:
        return False
    code = program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = _Program(len(code) // 8, ctypes.addressof(buffer))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) == 0


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))
