"""MXFP4 as published for gpt-oss: 4-bit floats with a power of two for each 32 of them, of the experts alone.

All experts of a layer are one stack: ``NAME_blocks`` uint8 ``[experts, out, in / 32, 16]``, the first of two neighbours
in the lower bits, and ``NAME_scales`` uint8 ``[experts, out, in / 32]``, the exponents plus 127. Other matrices are
floats. Weights are exactly those that transformers dequantises; activations are not rounded for the format.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import refuse_unknown
from engine.weights.formats.float4 import MXFP4_GROUP, arrange_mxfp4
from engine.weights.matrices.blocks import BlockMatrix
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

_KNOWN = {
    *("quant_method", "modules_to_not_convert"),  # modules without blocks are not quantised, whatever is listed
    "dequantize",  # a choice of transformers, with the same weights
}


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    refuse_unknown(config, _KNOWN)
    return lambda weights, name, rows, columns: weights.take_matrix(name, rows, columns)


def has_stack(weights: Weights, name: str) -> bool:
    """Return True if the experts' matrices of this name are in MXFP4."""
    return weights.has(f"{name}_blocks") or weights.has(f"{name}_scales")


def check_stack(weights: Weights, name: str, shape: tuple[int, int, int]) -> None:
    """Raise ``EngineError`` if a tensor of a stack is missing or has another shape, without reading it.

    ``shape``: experts, outputs and inputs.
    """
    experts, rows, columns = shape
    if columns % MXFP4_GROUP:
        raise EngineError(f"{name!r}: groups of {MXFP4_GROUP}, those of MXFP4, do not divide {columns} columns")
    groups = columns // MXFP4_GROUP
    weights.expect(f"{name}_blocks", experts, rows, groups, MXFP4_GROUP // 2)
    weights.expect(f"{name}_scales", experts, rows, groups)


def take_stack(
    weights: Weights, name: str, shape: tuple[int, int, int], order: Tensor | None = None
) -> list[BlockMatrix]:
    """Take the matrices of a stack, of a shape as in ``check_stack``.

    ``order``: the row of each output; ``None``: they are in order.
    """
    check_stack(weights, name, shape)
    blocks = weights.take_raw(f"{name}_blocks", torch.uint8)
    scales = weights.take_raw(f"{name}_scales", torch.uint8)
    weights.count(prod(shape))
    return [arrange(name, *one, order) for one in zip(blocks, scales, strict=True)]


def arrange(name: str, blocks: Tensor, scales: Tensor, order: Tensor | None = None) -> BlockMatrix:
    """Return the matrix of one expert, from its part of a stack."""
    return BlockMatrix(GGMLQuantizationType.MXFP4, arrange_mxfp4(name, blocks, scales), order)
