"""Bounds checks of the memory accesses of interpreted kernels.

A kernel that reads after the end of a tensor gets some number, in the interpreter as on a GPU, mostly unnoticed. With
the guard every lane of every load, store and atomic operation that is not masked must lie in a tensor argument of the
kernel, and no two lanes of one store may have the same address, which on a GPU would be a race.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]


class OutOfBoundsError(IndexError):
    """A kernel accessed memory outside its tensors. The interpreter wraps this in its own error, with this text."""


def install() -> None:
    """Patch the interpreter of this process to check all accesses."""
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    arguments, run = grid._init_args_hst, grid.__call__
    given: list[Array] = []

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(given, pointers, mask, "load")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(given, pointers, mask, "store")
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(given, pointers, mask, "atomic")
        return atomic(self, operation, pointers, value, mask, *rest)

    def remember(self: Any, args: Any, kwargs: Any) -> Any:
        copies = arguments(self, args, kwargs)
        given.append(_ranges([*copies[0], *copies[1].values()]))
        return copies

    def forget(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            run(self, *args, **kwargs)
        finally:
            given.clear()

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_atomic
    grid._init_args_hst, grid.__call__ = remember, forget


def _ranges(args: list[Any]) -> Array:
    """Return the address ranges of the tensors, ``[ranges, 2]``, sorted; adjacent ones are merged."""
    spans = []
    for arg in args:
        tensor = getattr(arg, "base", arg)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return np.array(merged, np.int64).reshape(-1, 2)


def _check(given: list[Array], pointers: Any, mask: Any, what: str) -> None:
    ranges = given[-1]
    size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
    lanes = np.broadcast_to(np.asarray(mask.data, bool), np.shape(pointers.data))
    touched = np.asarray(pointers.data)[lanes].astype(np.int64)
    if not touched.size:
        return
    where = np.searchsorted(ranges[:, 0], touched, side="right") - 1
    outside = (where < 0) | (touched + size > ranges[np.maximum(where, 0), 1])
    place = f"in program {interpreter.interpreter_builder.grid_idx}"
    if outside.any():
        wrong = int(touched[outside][0])
        first, end = ranges[int(np.abs(ranges[:, 0] - wrong).argmin())].tolist()
        raise OutOfBoundsError(
            f"{what} {place}: {int(outside.sum())} of {touched.size} lanes are outside of every tensor; "
            f"the first is at byte {wrong - first} of one with {end - first}"
        )
    if what == "store" and np.unique(touched).size != touched.size:
        raise OutOfBoundsError(f"store {place}: {touched.size - np.unique(touched).size} lanes hit the same addresses")
