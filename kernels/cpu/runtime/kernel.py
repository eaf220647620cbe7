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
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.runtime.compile_cache import find_cache
from kernels.cpu.runtime.kernel_graph import recorder

_CACHE = find_cache()
numba.config.CACHE_DIR = str(_CACHE or "")

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

    def compile(self) -> None:
        """Makes the first call as quick as the others."""
        if self._native is None:
            signature = types.void(types.CPointer(types.int64))
            options = {"fastmath": _FAST, "error_model": "numpy", "cache": _CACHE is not None}
            self._compiled = cfunc(signature, **options)(self._body)
            self._native = _Native(self._compiled.address)

    def __call__(self, *arguments: Tensor | int | float, threads: int | None = None) -> None:
        """Runs it to its end, without the interpreter's lock. Tensors must be laid out as the body takes them to be.

        ``threads``: by default all of torch's.
        """
        if self._native is None:
            self.compile()
        pool = _pool()
        count = 1 if pool is None else min(threads or torch.get_num_threads(), pool.limit)
        words = [
            one if type(one) is int else one.data_ptr() if type(one) is Tensor else _word(one) for one in arguments
        ]
        # Made in a fifth of the time of an array of ctypes.
        values = struct.pack(f"={2 + len(words)}q", 0 if pool is None or count == 1 else pool.number, count, *words)
        if recorder.tape is not None:
            recorder.tape.add(self._compiled.address, values, count)
        if pool is None or count == 1:
            self._native(values)
        else:
            pool.run(self._native, values, count, 0)


def repeat(table: int, count: int, threads: int) -> None:
    """``count`` launches, one after the other: at ``table`` lie each one's function, its arguments' address and its
    threads, of which ``threads`` are the most."""
    pool = _pool()
    _repeat(table, count, 0 if pool is None else pool.barrier, threads=threads)


def team() -> list[int]:
    """The system's numbers of the threads on which the calling thread's kernels run, itself among them."""
    pool, count, numbers = _pool(), torch.get_num_threads(), list[int]()
    if pool is None or count == 1:
        return [threading.get_native_id()]
    pool.run(_Native(lambda _: numbers.append(threading.get_native_id())), None, count, 0)
    return numbers


def kernel(body: Callable[[Any], None]) -> Kernel:
    """Decorates a body, which is compiled at its first call. The result is kept between runs:
    ``kernels.cpu.runtime.compile_cache``."""
    return Kernel(body)


def function(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that bodies call."""
    compiled: Callable[..., Any] = njit(fastmath=_FAST, error_model="numpy")(body)
    return compiled


def inlined(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a ``function`` that becomes part of the body: a fifth faster where loops are all that it is."""
    compiled: Callable[..., Any] = njit(fastmath=_FAST, error_model="numpy", inline="always")(body)
    return compiled


def _word(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    word: int = struct.unpack("=q", struct.pack("=d", argument))[0]
    return word


def address_of(content: bytes) -> int:
    """Where they lie, for as long as something holds them."""
    address = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
    assert address is not None
    return address


class _Pool(NamedTuple):
    """torch's threads."""

    run: Any
    """Runs a function on all of them."""
    number: int
    """Address of the function that tells a thread's number."""
    barrier: int
    """Address of the function in which they wait for each other."""
    limit: int
    """How many there are at most."""


@cache
def _pool() -> _Pool | None:
    maps = Path("/proc/self/maps")
    if not maps.exists() or not torch.backends.openmp.is_available():
        return None
    # GNU's, or LLVM's and Intel's, which have GNU's entry points too.
    names = ("libgomp", "libiomp", "libomp")
    for path in mapped_files(maps.read_text()):
        if Path(path).name.startswith(names):
            library = ctypes.CDLL(path)
            run = library.GOMP_parallel
            run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            number, barrier = (
                ctypes.cast(function, ctypes.c_void_p).value
                for function in (library.omp_get_thread_num, library.GOMP_barrier)
            )
            assert number is not None
            assert barrier is not None
            # Kernels rely on as many threads as they ask for.
            return None if library.omp_get_dynamic() else _Pool(run, number, barrier, library.omp_get_thread_limit())
    return None


def mapped_files(maps: str) -> list[str]:
    """Return the files that a process has mapped, each once, as ``/proc/PID/maps`` tells them."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())  # the path is the sixth, spaces and all
    return list(dict.fromkeys(path for *_, path in fields if path.startswith("/")))


@intrinsic
def _call(_context: Any, _address: Any) -> Any:
    """The 32-bit integer that the function of that address returns."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _run(_context: Any, _address: Any, _argument: Any) -> Any:
    """Calls the function of the first address with the second."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.void(types.int64, types.int64), generate


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


@kernel
def _repeat(address: Any) -> None:
    """``(launches, count, barrier)``: the functions, arguments and threads ``[count, 3]``."""
    a, thread, threads = begin(address)
    launches = longs(a[0], (a[1], 3))
    for index in range(a[1]):
        if thread < launches[index, 2]:
            _run(launches[index, 0], launches[index, 1])
        if threads > 1:
            _run(a[2], 0)
