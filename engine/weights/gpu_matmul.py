"""Products with weights of few bits on a GPU, each by the kernel that multiplies them as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engine.device import DeviceConfig
from engine.weights.matrix import Float8Matrix, GroupedMatrix, Int8Matrix, Matrix, Nf4Matrix, Packed, alike, stack
from engine.weights.packing import pack
from kernels.linear.fp8 import BLOCK, fp8_linear
from kernels.linear.fp32 import Linear, Product
from kernels.linear.nf4 import Nf4, nf4_linear
from kernels.linear.weight_only_int4 import Int4, Layout, int4_linear
from kernels.linear.weight_only_int8 import int8_linear, int8_weight_linear

T = TypeVar("T")
Multiply = Callable[[Tensor, Tensor | None], Tensor]
"""From ``x`` ``[rows, in]`` and a bias ``[out]`` to ``[rows, out]``, in the type of ``x``."""
_DEEP = 32
"""Inputs that the matrix units take at once of 8 bits by 8 bits."""
_FLOAT8 = 8, 9
"""The first compute capability that has float8: Ada's, before Hopper's 9.0."""
_GROUP = 16
"""Inputs that they take at once of other types."""


def gpu_product(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    """The product with matrices of the same input, one below the other, activations in the type of ``device_config``.

    Parts that are stored alike are one launch. What no kernel takes (groups of fewer than 16 inputs or of different
    sizes; blocks of float8 other than 128 by 128, where activations are rounded too; float8 on a GPU that has none) is
    widened to the type of ``device_config``.
    """
    parts = [part if isinstance(part, Tensor) or _has_kernel(part, device_config) else part.dense() for part in parts]
    if _join(parts):
        return _one(parts, bias, device_config)
    sizes = [_shape(part)[0] for part in parts]
    biases: Sequence[Tensor | None] = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    return SideBySide([_one([part], own, device_config) for part, own in zip(parts, biases, strict=True)])


class PackedLinear:
    """``x @ weight.T + bias`` by a kernel that knows how the weight is stored."""

    is_kernel = False
    """See ``Product``."""

    def __init__(self, multiply: Multiply, parameters: int, bias: Tensor | None) -> None:
        self.parameters = parameters
        """Number of weights."""
        self._multiply, self._bias = multiply, bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        return self._multiply(x, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return self(x).add_(residual)


class SideBySide:
    """Products of the same input, their results side by side."""

    is_kernel = False
    """See ``Product``."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.parameters = sum(one.parameters for one in products)
        """Number of weights."""
        self.products = products

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        return torch.cat([one(x) for one in self.products], dim=1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return self(x).add_(residual)


def _has_kernel(matrix: Packed, device_config: DeviceConfig) -> bool:
    columns = _shape(matrix)[1]
    if isinstance(matrix, Int8Matrix):
        return columns % _DEEP == 0
    if isinstance(matrix, GroupedMatrix):
        groups = matrix.scales.shape[1]
        equal = matrix.group_of is None or len(set(matrix.group_of.bincount(minlength=groups).tolist())) == 1
        return equal and columns // groups % _GROUP == 0
    if isinstance(matrix, Float8Matrix):
        blocks = matrix.scales.shape[1]
        if device_config.device.type == "cuda" and torch.cuda.get_device_capability(device_config.device) < _FLOAT8:
            return False
        if not matrix.rounds:
            return columns % (blocks * _GROUP) == 0 and columns // blocks == min(columns, matrix.block[1])
        return columns % _DEEP == 0 if blocks == 1 else matrix.block == (BLOCK, BLOCK) and columns % BLOCK == 0
    return True


def _join(parts: Sequence[Matrix]) -> bool:
    """Whether one kernel takes all parts at once."""
    first, last = parts[0], parts[-1]
    if isinstance(first, GroupedMatrix):
        return all(isinstance(part, GroupedMatrix) and alike(part, first) for part in parts)
    if isinstance(first, Nf4Matrix):
        groups = len(first.weight.scales)
        return all(isinstance(part, Nf4Matrix) and len(part.weight.scales) == groups for part in parts)
    if isinstance(first, Float8Matrix):
        rounds, blocks = first.rounds, first.scales.shape[1]
        by_row = blocks == 1 or not rounds
        return all(
            isinstance(part, Float8Matrix)
            and (part.rounds, part.scales.shape[1]) == (rounds, blocks)
            # No block of the whole has rows of two parts.
            and (by_row or part is last or len(part.codes) % BLOCK == 0)
            for part in parts
        )
    return all(type(part) is type(first) for part in parts)


def _one(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    """The product with parts that join."""
    bias = None if bias is None else device_config.convert(bias)
    if whole := _only(parts, Tensor):
        return Linear(stack([device_config.convert(part) for part in whole]), bias)
    count = sum(rows * columns for rows, columns in map(_shape, parts)) + (0 if bias is None else bias.numel())
    if ints := _only(parts, Int8Matrix):
        multiply = _int8(ints, device_config.device)
    elif grouped := _only(parts, GroupedMatrix):
        multiply = (_int4 if grouped[0].bits == 4 else _int8_weights)(grouped, device_config.device)
    elif floats := _only(parts, Float8Matrix):
        multiply = _float8(floats, device_config.device)
    else:
        multiply = _nf4(_only(parts, Nf4Matrix), device_config.device)
    return PackedLinear(multiply, count, bias)


def _int8(parts: Sequence[Int8Matrix], device: torch.device) -> Multiply:
    codes, scales = stack([part.codes for part in parts]).to(device), stack([part.scales for part in parts]).to(device)
    return lambda x, bias: int8_linear(x, codes, scales, bias)


def _int4(parts: Sequence[GroupedMatrix], device: torch.device) -> Multiply:
    codes, scales, zeros, order = _groups(parts, device)
    weight = Int4(pack(codes, 4).T.contiguous(), scales, zeros.to(torch.uint8), Layout.GPTQ, order)
    return lambda x, bias: int4_linear(x, weight, bias)


def _int8_weights(parts: Sequence[GroupedMatrix], device: torch.device) -> Multiply:
    codes, scales, zeros, order = _groups(parts, device)
    middle = 1 << 7
    symmetric = all(bool((part.zeros == middle).all()) for part in parts)
    moved, offsets = (codes.to(torch.int16) - middle).to(torch.int8), None if symmetric else zeros - middle
    return lambda x, bias: int8_weight_linear(x, moved, scales, bias, zeros=offsets, order=order)


def _groups(parts: Sequence[GroupedMatrix], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Codes ``[out, in]``, scales and zeros ``[groups, out]``, and the order of the inputs, sorted by group."""
    codes, scales = stack([part.codes for part in parts]).to(device), stack([part.scales for part in parts]).T
    zeros, group_of, order = stack([part.zeros for part in parts]).T.contiguous().to(device), parts[0].group_of, None
    if group_of is not None:
        sorted_by_group = group_of.argsort(stable=True).to(device)
        codes, order = codes[:, sorted_by_group], sorted_by_group.to(torch.int32)
    half = scales.half()  # as most checkpoints hold them
    scales = half if torch.equal(half.float(), scales) else scales
    return codes, scales.contiguous().to(device), zeros, order


def _float8(parts: Sequence[Float8Matrix], device: torch.device) -> Multiply:
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).to(device).view(torch.float8_e4m3fn)
    by_row = torch.cat([part.row_scales() for part in parts])
    if not parts[0].rounds:
        groups = by_row.T.contiguous().to(device)
        return lambda x, bias: int8_weight_linear(x, codes, groups, bias)
    blocks = by_row.flatten() if by_row.shape[1] == 1 else torch.cat([part.scales for part in parts])
    scales = blocks.to(device)
    return lambda x, bias: fp8_linear(x, codes, scales, bias)


def _nf4(parts: Sequence[Nf4Matrix], device: torch.device) -> Multiply:
    packed = stack([part.weight.packed for part in parts]).to(device)
    scales = torch.cat([part.weight.scales for part in parts], dim=1).to(device)
    return lambda x, bias: nf4_linear(x, Nf4(packed, scales), bias)


def _only(parts: Sequence[Matrix], kind: type[T]) -> list[T]:
    return [part for part in parts if isinstance(part, kind)]


def _shape(matrix: Matrix) -> tuple[int, int]:
    if isinstance(matrix, Tensor):
        return len(matrix), matrix.shape[1]
    if isinstance(matrix, Nf4Matrix):
        return len(matrix.weight.packed), 2 * matrix.weight.packed.shape[1]
    return len(matrix.codes), matrix.codes.shape[1]
