"""Elementwise operations on float32 tensors of any strides; see ``kernels.layers.elementwise``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.cpu.runtime.kernel import (
    Kernel,
    float32_array,
    function,
    kernel,
    named_function,
    read_arguments,
    split_range,
)
from kernels.cpu.runtime.recorder import empty

_MIN_NUMBERS_FOR_THREADS = 1 << 14
"""With fewer numbers one thread is done before a second one has started."""
_MAX_AXES = 4


def contiguous(x: Tensor) -> Tensor:
    """``kernels.layers.elementwise.contiguous`` of a float32 tensor."""
    if x.is_contiguous():
        return x
    out = empty(*x.shape)
    copy(x, out)
    return out


def copy(source: Tensor, target: Tensor) -> None:
    """Write ``source`` to ``target``, both of the same shape, of up to four axes."""
    _launch(_copy, source, source, target)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``, both of the same shape, of up to four axes."""
    out = empty(*x.shape)
    _launch(_add, x, y, out)
    return out


def multiply(x: Tensor, y: Tensor, target: Tensor) -> None:
    """Write ``x * y`` to ``target``, all of the same shape, of up to four axes. ``target`` may be ``x``."""
    _launch(_multiply, x, y, target)


def _launch(operation: Kernel, x: Tensor, y: Tensor, out: Tensor) -> None:
    missing = _MAX_AXES - x.dim()
    # The new axes come behind the first one, which the threads divide.
    shape = x.shape[0], *[1] * missing, *x.shape[1:]
    strides = [number for tensor in (x, y, out) for number in (tensor.stride(0), *[0] * missing, *tensor.stride()[1:])]
    operation(x, y, out, *shape, *strides, threads=1 if x.numel() < _MIN_NUMBERS_FOR_THREADS else None)


def _create_loop(name: str, combine: Any) -> Any:
    """Make a function that computes a thread's part of ``out = combine(x, y)``.

    Arguments ``(x, y, out, shape, strides of x, of y, of out)``, four numbers for the shape and for each strides.
    """

    @named_function(name)
    def loop(a: Any, thread: int, threads: int) -> None:
        count, step_x, step_y, step_out = a[6], a[10], a[14], a[18]
        first, end = split_range(a[3], thread, threads)
        for i in range(first, end):
            for j in range(a[4]):
                for k in range(a[5]):
                    to_x = a[0] + 4 * (i * a[7] + j * a[8] + k * a[9])
                    to_y = a[1] + 4 * (i * a[11] + j * a[12] + k * a[13])
                    to_out = a[2] + 4 * (i * a[15] + j * a[16] + k * a[17])
                    if step_x == 1 and step_y == 1 and step_out == 1:
                        x, y, out = float32_array(to_x, count), float32_array(to_y, count), float32_array(to_out, count)
                        for index in range(count):
                            out[index] = combine(x[index], y[index])
                    else:
                        x = float32_array(to_x, count * step_x)
                        y = float32_array(to_y, count * step_y)
                        out = float32_array(to_out, count * step_out)
                        for index in range(count):
                            out[index * step_out] = combine(x[index * step_x], y[index * step_y])

    return loop


@function
def _take_first(x: Any, _y: Any) -> Any:
    return x


@function
def _add_numbers(x: Any, y: Any) -> Any:
    return x + y


@function
def _multiply_numbers(x: Any, y: Any) -> Any:
    return x * y


_copy_loop = _create_loop("copy_elements", _take_first)
_add_loop = _create_loop("add_elements", _add_numbers)
_multiply_loop = _create_loop("multiply_elements", _multiply_numbers)


@kernel
def _copy(address: Any) -> None:
    _copy_loop(*read_arguments(address))


@kernel
def _add(address: Any) -> None:
    _add_loop(*read_arguments(address))


@kernel
def _multiply(address: Any) -> None:
    _multiply_loop(*read_arguments(address))
