"""Python functions as native kernels on the threads of torch's own pool.

A decoding step is hundreds of operations of a few microseconds each. A kernel that numba compiled does what ten torch
operators do and costs a few microseconds to start. It runs on torch's OpenMP threads, since a second pool would compete
with the first, whose threads spin for a while after each operation. Where torch has no such pool it runs on one thread.

A kernel's body takes the address of its arguments, 64-bit integers: a tensor is its address, a float its bits. It
begins with ``arguments, thread, threads = begin(address)`` and does the share of that thread.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

_FAST = {"contract", "nsz", "reassoc"}
"""What the compiler may do with floats: fuse, and add in another order (one that depends on a loop's length alone)."""
_MOST = 64
"""Arguments of a kernel."""
_Native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Kernel:
    """A compiled body."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self._compiled: Any = None
        self._native: Any = None
        self.__doc__ = body.__doc__

    def __call__(self, *arguments: Tensor | int | float, threads: int | None = None) -> None:
        """Runs it to its end, without the interpreter's lock. Tensors must be laid out as the body takes them to be.

        ``threads``: by default all of torch's.
        """
        if self._native is None:
            signature = types.void(types.CPointer(types.int64))
            options = {"fastmath": _FAST, "error_model": "numpy", "cache": True}
            self._compiled = cfunc(signature, **options)(self._body)
            self._native = _Native(self._compiled.address)
        pool = _pool()
        words = [one if type(one) is int else _word(one) for one in arguments]
        # Made in a fifth of the time of an array of ctypes.
        form = f"={2 + len(words)}q"
        if pool is None or threads == 1:
            self._native(struct.pack(form, 0, 1, *words))
            return
        run, counter = pool
        threads = threads or torch.get_num_threads()
        run(self._native, struct.pack(form, counter, threads, *words), threads, 0)


def kernel(body: Callable[[Any], None]) -> Kernel:
    """Decorates a body, which is compiled at its first call; the result is kept beside its source between runs."""
    return Kernel(body)


def function(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that bodies call."""
    compiled: Callable[..., Any] = njit(fastmath=_FAST, error_model="numpy", cache=True)(body)
    return compiled


def _word(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    word: int = struct.unpack("=q", struct.pack("=d", argument))[0]
    return word


@cache
def _pool() -> tuple[Any, int] | None:
    """The OpenMP call that runs a function on all threads, and the address of the one that tells a thread's number."""
    maps = Path("/proc/self/maps")
    if not maps.exists() or not torch.backends.openmp.is_available():
        return None
    # GNU's, or LLVM's and Intel's, which have GNU's entry points too.
    names = ("libgomp", "libiomp", "libomp")
    for path in dict.fromkeys(line.split()[-1] for line in maps.read_text().splitlines() if "/" in line):
        if Path(path).name.startswith(names):
            library = ctypes.CDLL(path)
            run = library.GOMP_parallel
            run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            number = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value
            assert number is not None
            return run, number
    return None


@intrinsic
def _call(_context: Any, _address: Any) -> Any:
    """The 32-bit integer that the function of that address returns."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def number(_context: Any, _word: Any) -> Any:
    """An argument that is a float."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@function
def begin(address: Any) -> Any:
    """A body's arguments, its thread and the number of threads."""
    words = carray(address, (_MOST,))
    return words[2:], _call(words[0]) if words[0] else 0, words[1]


@function
def floats(address: int, shape: Any) -> Any:
    """The contiguous float32 tensor at an address."""
    return carray(_pointer(address), shape, np.float32)


@function
def longs(address: int, shape: Any) -> Any:
    """The contiguous int64 tensor at an address."""
    return carray(_pointer(address), shape, np.int64)


@function
def flags(address: int, shape: Any) -> Any:
    """The contiguous tensor of truth values at an address."""
    return carray(_pointer(address), shape, np.uint8)


@function
def share(items: int, thread: int, threads: int) -> Any:
    """The first of ``items`` equal items that a thread does, and the first that it does not."""
    return items * thread // threads, items * (thread + 1) // threads
