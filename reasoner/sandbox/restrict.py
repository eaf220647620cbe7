"""Lockdown of the current process. Uses the standard library only, since it runs in an interpreter of its own.

On Linux (x86-64 and ARM64, with or without root) a seccomp filter allows the system calls for computing, sleeping, and
reading and writing open pipes. Every other call fails with EPERM: files and sockets cannot be opened, processes and
threads cannot be started, signals cannot be sent, handled or blocked, limits cannot be raised, and other processes
cannot be inspected. Standard library modules have to be imported before the lockdown.

Source of the filter format: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys

_ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigreturn": (15, 139), "writev": (20, 66),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172),
    "exit": (60, 93), "gettimeofday": (96, 169), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "getrandom": (318, 278), "membarrier": (324, 283),
    "rseq": (334, 293),
}  # fmt: skip
"""Numbers of the allowed system calls on x86-64 and ARM64; ``None`` where there is no such call."""
_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_SOCKET = (41, 198)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_KILL_PROCESS, _ALLOW, _FAIL_WITH_EPERM = 0x80000000, 0x7FFF0000, 0x00050001
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


class LockdownUnavailable(Exception):
    """This system cannot restrict a process to computation."""


def limit_resources(seconds: float, memory_bytes: int) -> None:
    """Limit time, memory and sizes, on every system. The wall-clock alarm ends a process whose parent has died."""
    signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)
    cpu_seconds = int(seconds) + 2
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(kind, (value, value))


def lock_down() -> None:
    """Restrict this process to computation from here on.

    Raises ``LockdownUnavailable`` if the filter cannot be installed or proves ineffective.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise LockdownUnavailable(f"there is no system call filter for {sys.platform} on {machine}")
    column = _MACHINES.index(machine)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _build_program(column)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    zero, word = ctypes.c_ulong(0), ctypes.c_ulong
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, word(1), zero, zero, zero) or libc.prctl(
        _PR_SET_SECCOMP, word(_FILTER), header, zero, zero
    ):
        raise LockdownUnavailable(f"the system takes no seccomp filter: {os.strerror(ctypes.get_errno())}")
    with contextlib.suppress(PermissionError):
        os.open("/", os.O_RDONLY)
        raise LockdownUnavailable("the filter is there and files can still be opened")
    if libc.syscall(_SOCKET[column], 1, 1, 0) >= 0:
        raise LockdownUnavailable("the filter is there and sockets can still be made")


def _build_program(column: int) -> bytes:
    """Return the ``struct sock_filter[]``: calls of another architecture kill the process, unlisted calls fail."""
    numbers = sorted(number for call in _ALLOWED.values() if (number := call[column]) is not None)
    steps = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[column]), (_RETURN, 0, 0, _KILL_PROCESS)]
    steps.append((_LOAD, 0, 0, 0))
    for index, number in enumerate(numbers):
        steps.append((_JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    steps += [(_RETURN, 0, 0, _FAIL_WITH_EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
