"""Copies, sums and products of tensors of any strides.

Unlike torch's operators those on float32 tensors on the CPU are kernels, which kernel graphs record. The results are
the same to the bit: each number is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import elementwise as on_cpu
from kernels.cpu.runtime.recorder import empty


def contiguous(x: Tensor) -> Tensor:
    """Return ``x`` if it is contiguous, else a copy that is. At most four axes."""
    return on_cpu.contiguous(x) if can_use_kernels(x) else x.contiguous()


def write(target: Tensor, source: Tensor) -> None:
    """Write ``source`` to ``target``, both of the same shape, of at most four axes."""
    if can_use_kernels(target, source):
        on_cpu.copy(source, target)
    else:
        target.copy_(source)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors ``[rows, any, …]`` one behind the other along their second axis."""
    if not can_use_kernels(*parts):
        return torch.cat(list(parts), dim=1)
    rows, _, *rest = parts[0].shape
    out, start = empty(rows, sum(part.shape[1] for part in parts), *rest), 0
    for part in parts:
        on_cpu.copy(part, out[:, start : start + part.shape[1]])
        start += part.shape[1]
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``, both of the same shape."""
    return on_cpu.add(x, y) if can_use_kernels(x, y) else x + y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x * y``, both of the same shape."""
    if not can_use_kernels(x, y):
        return x * y
    out = empty(*x.shape)
    on_cpu.multiply(x, y, out)
    return out


def scale(x: Tensor, factors: Tensor) -> None:
    """Multiply ``x`` by ``factors`` in place, which have as many axes, those that are repeated of size 1."""
    if can_use_kernels(x, factors):
        on_cpu.multiply(x, factors.expand_as(x), x)
    else:
        x *= factors
