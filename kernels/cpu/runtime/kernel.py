"""Python functions compiled by numba to kernels that run on the threads of torch's own pool.

A decoding step is hundreds of operations of a few microseconds each. A compiled kernel does the work of ten torch
operators and costs a few microseconds to launch. It runs on torch's OpenMP threads, because a second pool would compete
with the first, whose threads spin for a while after each operation. If torch has no such pool, it runs on one thread.

The body of a kernel takes one address, that of its arguments: 64-bit words, which are a tensor's address, an integer,
or the bits of a float64. It begins with ``arguments, thread, threads = read_arguments(address)`` and does the part of
the work that belongs to that thread.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.availability import complete_features
from kernels.cpu.runtime.compile_cache import find_cache
from kernels.cpu.runtime.recorder import Launch, active

_CACHE = find_cache()
numba.config.CACHE_DIR = str(_CACHE or "")
numba.config.CPU_FEATURES = complete_features()

_FAST_MATH = {"contract", "nsz", "reassoc"}
"""LLVM may fuse multiplications and additions, and reorder sums, in a way that depends on a loop's length alone."""
_MAX_ARGUMENTS = 64
Body = Callable[[Any, int, int], None]
"""The part of a kernel that is the work of a thread: ``body(arguments, thread, threads)``."""
_NativeFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Kernel:
    """A compiled body that can be called with tensors and numbers."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        self._body = body
        self._compiled: Any = None
        self._native: Any = None
        self.__doc__ = body.__doc__

    def compile(self) -> None:
        """Compile the body now instead of at the first call."""
        if self._native is None:
            signature = types.void(types.CPointer(types.int64))
            options = {"fastmath": _FAST_MATH, "error_model": "numpy", "cache": _CACHE is not None}
            self._compiled = cfunc(signature, **options)(self._body)
            self._native = _NativeFunction(self._compiled.address)

    def __call__(self, *arguments: Tensor | int | float, threads: int | None = None) -> None:
        """Run the kernel to its end, without the interpreter's lock.

        Tensors must have the layout that the body expects; nothing is checked. ``threads``: by default all of torch's.
        """
        if self._native is None:
            self.compile()
        pool = _get_pool()
        num_threads = 1 if pool is None else min(threads or torch.get_num_threads(), pool.max_threads)
        words = [
            value if type(value) is int else value.data_ptr() if type(value) is Tensor else _to_word(value)
            for value in arguments
        ]
        thread_number = 0 if pool is None or num_threads == 1 else pool.thread_number
        # struct.pack takes a fifth of the time of a ctypes array.
        packed = struct.pack(f"={2 + len(words)}q", thread_number, num_threads, *words)
        if active.recording is not None:
            active.recording.launches.append(Launch(self._compiled.address, packed, num_threads))
        if pool is None or num_threads == 1:
            self._native(packed)
        else:
            pool.run(self._native, packed, num_threads, 0)


def kernel(body: Callable[[Any], None]) -> Kernel:
    """Decorate the body of a kernel. It is compiled at its first call and kept in ``compile_cache`` between runs."""
    return Kernel(body)


def create_kernel(name: str, body: Body) -> Kernel:
    """Return the kernel of a ``function`` that is made at run time; see ``named_function``.

    ``name`` tells it from all others in the compile cache. The body is a global of its kernel, because numba never
    finds a kernel with a closure in its cache again.
    """

    def run(address: Any) -> None:
        run_body(*read_arguments(address))  # type: ignore[name-defined]  # noqa: F821

    named = FunctionType(run.__code__, {**globals(), "run_body": body}, name)
    named.__qualname__ = name
    return Kernel(named)


def is_in_compile_cache(name: str) -> bool:
    """Return True if the kernel that ``create_kernel`` makes by this name was compiled before on this machine."""
    return _CACHE is not None and any(_CACHE.rglob(f"*.{name}-*.nbi"))


def function(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that kernels call."""
    compiled: Callable[..., Any] = njit(fastmath=_FAST_MATH, error_model="numpy")(body)
    return compiled


def named_function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that is made several times, each time with another name.

    Functions with the same name in kernels of the compile cache are taken for each other.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        body.__qualname__ = name
        return function(body)

    return decorate


def inlined_function(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that becomes part of its caller: a fifth faster if it consists of loops alone."""
    compiled: Callable[..., Any] = njit(fastmath=_FAST_MATH, error_model="numpy", inline="always")(body)
    return compiled


def run_launches(table: int, count: int, num_threads: int) -> None:
    """Launch ``count`` kernels one after the other, on threads that are started once.

    ``table``: the address of ``[count, 3]`` words: each launch's function, address of its arguments and number of
    threads, at most ``num_threads``.
    """
    pool = _get_pool()
    _run_launches(table, count, 0 if pool is None else pool.barrier, threads=num_threads)


def thread_ids() -> list[int]:
    """Return the native ids of the threads that run the calling thread's kernels, its own included."""
    pool, num_threads, ids = _get_pool(), torch.get_num_threads(), list[int]()
    if pool is None or num_threads == 1:
        return [threading.get_native_id()]
    pool.run(_NativeFunction(lambda _: ids.append(threading.get_native_id())), None, num_threads, 0)
    return ids


def address_of(content: bytes) -> int:
    """Return the address of the bytes, which is valid as long as the object lives."""
    address = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
    assert address is not None
    return address


def _to_word(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    word: int = struct.unpack("=q", struct.pack("=d", argument))[0]
    return word


class _Pool(NamedTuple):
    """Torch's OpenMP threads."""

    run: Any
    """``GOMP_parallel``: runs a function on all threads."""
    thread_number: int
    """Address of ``omp_get_thread_num``."""
    barrier: int
    """Address of ``GOMP_barrier``, at which the threads wait for each other."""
    max_threads: int


@cache
def _get_pool() -> _Pool | None:
    maps = Path("/proc/self/maps")
    if not maps.exists() or not torch.backends.openmp.is_available():
        return None
    # GNU's library, or LLVM's and Intel's, which have GNU's entry points too.
    names = ("libgomp", "libiomp", "libomp")
    for path in mapped_files(maps.read_text()):
        if Path(path).name.startswith(names):
            library = ctypes.CDLL(path)
            run = library.GOMP_parallel
            run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            thread_number, barrier = (
                ctypes.cast(entry, ctypes.c_void_p).value
                for entry in (library.omp_get_thread_num, library.GOMP_barrier)
            )
            assert thread_number is not None
            assert barrier is not None
            # With a dynamic number of threads a kernel may get fewer than it divided its work by.
            if library.omp_get_dynamic():
                return None
            return _Pool(run, thread_number, barrier, library.omp_get_thread_limit())
    return None


def mapped_files(maps: str) -> list[str]:
    """Return the files that a process has mapped, each once. ``maps``: the text of ``/proc/PID/maps``."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines())  # the path is the sixth field, spaces and all
    return list(dict.fromkeys(path for *_, path in lines if path.startswith("/")))


@intrinsic
def _call(_context: Any, _address: Any) -> Any:
    """Call the function at an address and return its 32-bit result."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _call_with(_context: Any, _address: Any, _argument: Any) -> Any:
    """Call the function at an address with one argument."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.void(types.int64, types.int64), generate


@intrinsic
def _to_pointer(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def as_float(_context: Any, _to_word: Any) -> Any:
    """Return the float64 whose bits an argument word holds."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@function
def read_arguments(address: Any) -> Any:
    """Return a body's argument words, the thread that runs it, and the number of threads."""
    words = carray(address, (_MAX_ARGUMENTS,))
    return words[2:], _call(words[0]) if words[0] else 0, words[1]


@function
def float32_array(address: int, shape: Any) -> Any:
    """Return the contiguous float32 tensor at an address."""
    return carray(_to_pointer(address), shape, np.float32)


@function
def int64_array(address: int, shape: Any) -> Any:
    """Return the contiguous int64 tensor at an address."""
    return carray(_to_pointer(address), shape, np.int64)


@function
def int32_array(address: int, shape: Any) -> Any:
    """Return the contiguous int32 tensor at an address."""
    return carray(_to_pointer(address), shape, np.int32)


@function
def uint8_array(address: int, shape: Any) -> Any:
    """Return the contiguous uint8 or bool tensor at an address."""
    return carray(_to_pointer(address), shape, np.uint8)


@function
def split_range(items: int, part: int, parts: int) -> Any:
    """Return the first item of a part and the first after it, if ``items`` are divided into ``parts`` equal ranges."""
    return items * part // parts, items * (part + 1) // parts


@kernel
def _run_launches(address: Any) -> None:
    """Arguments ``(launches, count, barrier)``, with ``launches`` ``[count, 3]`` as in ``run_launches``."""
    a, thread, threads = read_arguments(address)
    launches = int64_array(a[0], (a[1], 3))
    for index in range(a[1]):
        if thread < launches[index, 2]:
            _call_with(launches[index, 0], launches[index, 1])
        if threads > 1:
            _call_with(a[2], 0)
