"""Corrections of Triton's interpreter, so that it computes with bfloat16 and float8 what a GPU computes.

The interpreter keeps these types as bit patterns in unsigned integers. It multiplies, adds, compares and reduces the
patterns; it cuts a float32 off where a GPU rounds it to the nearest bfloat16, and loses carries on the way to float8.
Here arithmetic on them is done in float32 and rounded once, to nearest even, as the hardware does; on the way to
float8 what is too large becomes the largest number, as ``cvt.rn.satfinite`` does. ``interpreted/test_interpreter.py``
holds every correction against torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]

_NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_BITS = {tl.bfloat16: np.int16, tl.float8e4nv: np.int8, tl.float8e5: np.int8}
"""Types that the interpreter stores as bits: torch's type and the NumPy type of the bits."""
_OTHER = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def widened(data: Array, dtype: Any) -> Array:
    """Convert the bits of a narrow type to float32; return anything else unchanged."""
    if dtype not in _NARROW:
        return data
    bits = torch.from_numpy(np.ascontiguousarray(data).view(_BITS[dtype]).copy())
    return bits.view(_NARROW[dtype]).float().numpy()


def narrowed(data: Array, dtype: Any) -> Array:
    """Convert numbers to ``dtype``, rounded to nearest even; float8 saturates."""
    if dtype not in _NARROW:
        return data.astype(_OTHER[dtype])
    values = torch.from_numpy(np.ascontiguousarray(data))
    if dtype != tl.bfloat16:
        largest = torch.finfo(_NARROW[dtype]).max
        values = torch.where(values.isnan(), values, values.clamp(-largest, largest))
    unsigned = np.uint16 if dtype == tl.bfloat16 else np.uint8
    return values.to(_NARROW[dtype]).view(torch.int16 if dtype == tl.bfloat16 else torch.int8).numpy().view(unsigned)


def correct() -> None:
    """Patch the interpreter of this process."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_cast, plain_binary, plain_unary = builder.cast_impl, builder.binary_op, builder.unary_op
    plain_ternary, plain_fma, plain_rsqrt = builder.ternary_op, builder.create_fma, builder.create_rsqrt

    def wide(x: Any) -> Array:
        return widened(x.data, x.dtype.scalar)

    def rounded(data: Array, dtype: Any) -> Any:
        return handle(narrowed(data.astype(np.float32), dtype), dtype)

    def cast(self: Any, x: Any, target: Any) -> Any:
        source, dtype = x.dtype.scalar, target.scalar
        if dtype in _NARROW:
            return handle(narrowed(wide(x) if source.is_floating() else x.data.astype(np.float32), dtype), dtype)
        if source in _NARROW:
            return handle(wide(x).astype(interpreter._get_np_dtype(target)), dtype)
        return plain_cast(self, x, target)

    def between_floats(self: Any, x: Any, target: Any, rounding: Any) -> Any:
        return cast(self, x, target)

    def binary(self: Any, x: Any, y: Any, operation: Any) -> Any:
        if x.dtype.scalar not in _NARROW or operation in _BITWISE:
            plain = plain_binary(self, x, y, operation)
            # Otherwise a comparison of scalars is broadcast as numbers.
            return handle(plain.data, tl.int1) if plain.data.dtype == np.bool_ else plain
        result = operation(wide(x), wide(y))
        return handle(result, tl.int1) if result.dtype == np.bool_ else rounded(result, x.dtype.scalar)

    def unary(self: Any, x: Any, operation: Any) -> Any:
        if x.dtype.scalar not in _NARROW:
            return plain_unary(self, x, operation)
        return rounded(operation(wide(x)), x.dtype.scalar)

    def ternary(self: Any, x: Any, y: Any, z: Any, operation: Any) -> Any:
        if z.dtype.scalar not in _NARROW or operation is np.where:
            return plain_ternary(self, x, y, z, operation)
        return rounded(operation(wide(x), wide(y), wide(z)), z.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar not in _NARROW:
            return plain_fma(self, x, y, z)
        return rounded(wide(x) * wide(y) + wide(z), z.dtype.scalar)

    def rsqrt(self: Any, x: Any) -> Any:
        return plain_rsqrt(self, x) if x.dtype.scalar not in _NARROW else rounded(1 / np.sqrt(wide(x)), x.dtype.scalar)

    def dot(self: Any, x: Any, y: Any, total: Any, *_: Any) -> Any:
        # A row by itself: in a product of several, BLAS adds up a row in an order that depends on its place.
        product = np.matmul(wide(x)[..., :, None, :], wide(y)[..., None, :, :], dtype=total.data.dtype)
        return handle(product[..., 0, :] + total.data, total.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp = cast, between_floats
    builder.binary_op, builder.unary_op, builder.ternary_op = binary, unary, ternary
    builder.create_fma, builder.create_rsqrt, builder.create_dot = fma, rsqrt, dot
    _correct_reductions()


def _correct_reductions() -> None:
    """Compute sums and extremes of narrow types in float32.

    The bitwise reductions of ``tl.sort`` use NumPy's, a hundred times faster than calling a function for each pair.
    """
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    plain_reduce, plain_scan = reduce.apply_impl, scan.apply_impl
    names = {"_xor_combine": np.bitwise_xor, "_or_combine": np.bitwise_or, "_and_combine": np.bitwise_and}
    bitwise: dict[Any, Any] = {
        getattr(tl.standard, name): operation for name, operation in names.items() if hasattr(tl.standard, name)
    }

    def in_float32(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def apply(self: Any, inputs: Any) -> Any:
            types = [x.dtype.scalar for x in inputs]
            if not any(dtype in _NARROW for dtype in types):
                return plain(self, inputs)
            wide = tuple(
                self.to_tensor(widened(x.handle.data, dtype), tl.float32) if dtype in _NARROW else x
                for x, dtype in zip(inputs, types, strict=True)
            )
            results = plain(self, wide)
            several = isinstance(results, (list, tuple))
            back = [
                self.to_tensor(narrowed(x.handle.data, dtype), dtype)
                if dtype in _NARROW and x.dtype.scalar == tl.float32
                else x
                for x, dtype in zip(results if several else [results], types, strict=False)
            ]
            return tuple(back) if several else back[0]

        return apply

    def reduced(self: Any, inputs: Any) -> Any:
        if self.combine_fn not in bitwise:
            # Rows of padding may be all NaN, for which a GPU gives no warning.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
                return in_float32(plain_reduce)(self, inputs)
        data = bitwise[self.combine_fn].reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, inputs[0].dtype)

    reduce.apply_impl, scan.apply_impl = reduced, in_float32(plain_scan)
