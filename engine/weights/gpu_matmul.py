"""Products with quantised weights on a GPU, each by a kernel that reads them as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.device import DeviceConfig
from engine.protocol.types import EngineError
from engine.weights.matrix import (
    BlockMatrix,
    Float8Matrix,
    GroupedMatrix,
    Int8Matrix,
    Matrix,
    Nf4Matrix,
    have_same_groups,
    stack,
)
from engine.weights.packing import pack
from kernels.common.quantization import Quantization, Rows
from kernels.linear.fp8 import BLOCK, find_quantization, fp8_linear
from kernels.linear.fp32 import Linear, Product
from kernels.linear.nf4 import Nf4, nf4_linear
from kernels.linear.weight_only_int4 import Int4, int4_linear
from kernels.linear.weight_only_int8 import QUANTIZATION, int8_linear, int8_weight_linear

T = TypeVar("T")


class Multiply(Protocol):
    """A function that multiplies by a quantized weight ``[out, in]``."""

    def __call__(
        self, x: Any, bias: Tensor | None, *, dtype: torch.dtype | None = None, is_batch_invariant: bool = False
    ) -> Tensor:
        """Return ``[rows, out]`` in ``dtype`` for ``x`` ``[rows, in]``; ``None``: in that of ``x``.

        ``x``: a tensor, or ``QuantizedRows`` if the function quantizes its inputs.

        ``is_batch_invariant``: no row depends, to the bit, on the others.
        """
        ...


_DEPTH = 16
"""Inputs that a matrix instruction takes at once."""
_DEPTH_8BIT = 32
"""Inputs that it takes at once where weights and activations both have 8 bits."""


def create_gpu_product(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    """Return the product with matrices of the same input, one below the other, for activations in the config's dtype.

    Parts that are stored alike are one launch. Blocks of GGUF files other than Q4_0 are widened to the config's dtype.
    Raises ``EngineError`` for other parts that no kernel supports.
    """
    parts = [(part.to_groups() or part.dense()) if isinstance(part, BlockMatrix) else part for part in parts]
    for part in parts:
        if missing := _find_missing_kernel(part):
            raise EngineError(f"no kernel of a GPU multiplies {missing}: quantize otherwise, or use --device cpu")
    if _can_fuse(parts):
        return _fuse(parts, bias, device_config)
    sizes = [_shape(part)[0] for part in parts]
    biases: Sequence[Tensor | None] = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    return ConcatenatedProducts([_fuse([part], own, device_config) for part, own in zip(parts, biases, strict=True)])


class QuantizedLinear:
    """``x @ weight.T + bias`` by a kernel for the weight's format."""

    is_kernel = False

    def __init__(
        self, multiply: Multiply, parameters: int, bias: Tensor | None, *,
        quantization: Quantization | None = None, is_batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.parameters, self.quantization = parameters, quantization
        self._multiply, self._bias, self._is_batch_invariant = multiply, bias, is_batch_invariant

    def __call__(self, x: Rows) -> Tensor:
        return self._multiply(x, self._bias, is_batch_invariant=self._is_batch_invariant)

    def to_float32(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._bias, dtype=torch.float32, is_batch_invariant=self._is_batch_invariant)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


class ConcatenatedProducts:
    """Several products of the same input, with their results side by side."""

    is_kernel = False

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products
        quantizations = {product.quantization for product in products}
        self.quantization = quantizations.pop() if len(quantizations) == 1 else None
        self.parameters = sum(product.parameters for product in products)

    def __call__(self, x: Rows) -> Tensor:
        return torch.cat([product(x) for product in self.products], dim=1)

    def to_float32(self, x: Tensor) -> Tensor:
        return torch.cat([product.to_float32(x) for product in self.products], dim=1)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


def _find_missing_kernel(matrix: Matrix) -> str | None:
    """Return a description of a weight that no kernel supports; ``None`` for the others."""
    columns = _shape(matrix)[1]
    size = f"weights of {columns} inputs"
    if isinstance(matrix, Int8Matrix) and columns % _DEPTH_8BIT:
        return f"{size} by activations of 8 bits, which takes multiples of {_DEPTH_8BIT}"
    if isinstance(matrix, GroupedMatrix):
        if not matrix.has_equal_groups:
            return f"{size} in groups of different sizes"
        if columns // matrix.scales.shape[1] % _DEPTH:
            return f"{size} in {matrix.scales.shape[1]} groups, each of which must be a multiple of {_DEPTH} inputs"
    if isinstance(matrix, Float8Matrix):
        blocks, (height, width) = matrix.scales.shape[1], matrix.block
        if matrix.rounds_activations:
            is_whole = columns % _DEPTH_8BIT == 0 if blocks == 1 else matrix.block == (BLOCK, BLOCK)
            if not is_whole or (blocks > 1 and columns % BLOCK):
                return (
                    f"float8 {size} in blocks of {height} by {width}; {BLOCK} by {BLOCK} and whole rows are supported"
                )
        elif columns % (blocks * _DEPTH) or columns // blocks != min(columns, width):
            return f"float8 {size} in blocks of {width} inputs, which must be multiples of {_DEPTH} that divide a row"
    return None


def _can_fuse(parts: Sequence[Matrix]) -> bool:
    """Return True if one kernel takes all parts at once."""
    first, last = parts[0], parts[-1]
    if isinstance(first, GroupedMatrix):
        return all(isinstance(part, GroupedMatrix) and have_same_groups(part, first) for part in parts)
    if isinstance(first, Nf4Matrix):
        groups = len(first.weight.scales)
        return all(isinstance(part, Nf4Matrix) and len(part.weight.scales) == groups for part in parts)
    if isinstance(first, Float8Matrix):
        rounds, blocks = first.rounds_activations, first.scales.shape[1]
        by_row = blocks == 1 or not rounds
        return all(
            isinstance(part, Float8Matrix)
            and (part.rounds_activations, part.scales.shape[1]) == (rounds, blocks)
            # No block of the fused matrix has rows of two parts.
            and (by_row or part is last or len(part.codes) % BLOCK == 0)
            for part in parts
        )
    return all(type(part) is type(first) for part in parts)


def _fuse(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Product:
    """Return the product with parts that can be fused."""
    bias = None if bias is None else device_config.convert(bias)
    if dense := _select(parts, Tensor):
        weight = stack([device_config.convert(part) for part in dense])
        return Linear(weight, bias, is_batch_invariant=device_config.is_batch_invariant)
    num_parameters = sum(rows * columns for rows, columns in map(_shape, parts)) + (0 if bias is None else bias.numel())
    quantization = None
    if int8_parts := _select(parts, Int8Matrix):
        multiply, quantization = _multiply_int8(int8_parts, device_config.device), QUANTIZATION
    elif grouped := _select(parts, GroupedMatrix):
        multiply = (_multiply_int4 if grouped[0].bits == 4 else _multiply_int8_weights)(grouped, device_config.device)
    elif floats := _select(parts, Float8Matrix):
        multiply, quantization = _multiply_float8(floats, device_config.device)
    else:
        multiply = _multiply_nf4(_select(parts, Nf4Matrix), device_config.device)
    return QuantizedLinear(
        multiply,
        num_parameters,
        bias,
        quantization=quantization,
        is_batch_invariant=device_config.is_batch_invariant,
    )


def _multiply_int8(parts: Sequence[Int8Matrix], device: torch.device) -> Multiply:
    codes, scales = stack([part.codes for part in parts]).to(device), stack([part.scales for part in parts]).to(device)
    return lambda x, bias, **options: int8_linear(x, codes, scales, bias, **options)


def _multiply_int4(parts: Sequence[GroupedMatrix], device: torch.device) -> Multiply:
    codes, scales, zeros, order = _stack_groups(parts, device)
    weight = Int4(pack(codes, 4).T.contiguous(), scales, zeros.to(torch.uint8), order)
    return lambda x, bias, **options: int4_linear(x, weight, bias, **options)


def _multiply_int8_weights(parts: Sequence[GroupedMatrix], device: torch.device) -> Multiply:
    codes, scales, zeros, order = _stack_groups(parts, device)
    middle = 1 << 7
    symmetric = all(bool((part.zeros == middle).all()) for part in parts)
    shifted, offsets = (codes.to(torch.int16) - middle).to(torch.int8), None if symmetric else zeros - middle
    return lambda x, bias, **options: int8_weight_linear(
        x, shifted, scales, bias, zeros=offsets, order=order, **options
    )


def _stack_groups(parts: Sequence[GroupedMatrix], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return codes ``[out, in]``, scales and zeros ``[groups, out]``, and the order of the inputs, sorted by group."""
    codes, scales = stack([part.codes for part in parts]).to(device), stack([part.scales for part in parts]).T
    zeros, group_of, order = stack([part.zeros for part in parts]).T.contiguous().to(device), parts[0].group_of, None
    if group_of is not None:
        sorted_by_group = group_of.argsort(stable=True).to(device)
        codes, order = codes[:, sorted_by_group], sorted_by_group.to(torch.int32)
    half = scales.half()  # the dtype in most checkpoints
    scales = half if torch.equal(half.float(), scales) else scales
    return codes, scales.contiguous().to(device), zeros, order


def _multiply_float8(parts: Sequence[Float8Matrix], device: torch.device) -> tuple[Multiply, Quantization | None]:
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).to(device).view(torch.float8_e4m3fn)
    by_row = torch.cat([part.row_scales() for part in parts])
    if not parts[0].rounds_activations:
        groups = by_row.T.contiguous().to(device)
        return lambda x, bias, **options: int8_weight_linear(x, codes, groups, bias, **options), None
    blocks = by_row.flatten() if by_row.shape[1] == 1 else torch.cat([part.scales for part in parts])
    scales = blocks.to(device)
    quantization = find_quantization(codes, scales)
    return lambda x, bias, **options: fp8_linear(x, codes, scales, bias, **options), quantization


def _multiply_nf4(parts: Sequence[Nf4Matrix], device: torch.device) -> Multiply:
    packed = stack([part.weight.packed for part in parts]).to(device)
    scales = torch.cat([part.weight.scales for part in parts], dim=1).to(device)
    return lambda x, bias, **options: nf4_linear(x, Nf4(packed, scales), bias, **options)


def _select(parts: Sequence[Matrix], kind: type[T]) -> list[T]:
    return [part for part in parts if isinstance(part, kind)]


def _shape(matrix: Matrix) -> tuple[int, int]:
    if isinstance(matrix, Tensor):
        return len(matrix), matrix.shape[1]
    if isinstance(matrix, Nf4Matrix):
        return len(matrix.weight.packed), 2 * matrix.weight.packed.shape[1]
    assert not isinstance(matrix, BlockMatrix)  # widened, as there is no kernel
    return len(matrix.codes), matrix.codes.shape[1]
