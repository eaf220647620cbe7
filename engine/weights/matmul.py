"""Products with weight matrices, in the form that is fastest on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from engine.device import CPU, DeviceConfig
from engine.weights.gpu_matmul import create_gpu_product
from engine.weights.matrix import BlockMatrix, GroupedMatrix, Int8Matrix, Matrix, dense, have_same_groups, stack
from kernels.cpu.linear.ggml.packed import PackedBlocks
from kernels.linear import blocks, int4, int8
from kernels.linear.blocks import BlockLinear
from kernels.linear.embedding import BlockEmbedding, Embedding, EmbeddingTable
from kernels.linear.fp32 import Linear, Product
from kernels.linear.int4 import Int4Linear
from kernels.linear.int8 import Int8Linear


def create_product(parts: Sequence[Matrix], bias: Tensor | None = None, device_config: DeviceConfig = CPU) -> Product:
    """Return the product with matrices of the same input, one below the other.

    On a GPU see ``create_gpu_product``. On a CPU the layout is

    - int8, if every part is W8A8: the fastest for every shape and number of rows;
    - that of blocks, if every part has blocks of a GGUF file, of the same format or not: their bits are kept;
    - int4, if every part has 4 bits in groups of the same size: an eighth of the memory. It rounds the activations,
      too, but far more finely than the checkpoint rounded the weights;
    - float32 otherwise: nothing is faster without rounding activations as coarsely as the weights.
    """
    if device_config.uses_gpu_kernels:
        return create_gpu_product(parts, bias, device_config)
    first = parts[0]
    int8_parts = [part for part in parts if isinstance(part, Int8Matrix)]
    if len(int8_parts) == len(parts) and int8.is_supported(int8_parts[0].codes.shape[1]):
        codes, scales = stack([part.codes for part in int8_parts]), stack([part.scales for part in int8_parts])
        return Int8Linear(codes, scales, bias)
    block_parts = [part for part in parts if isinstance(part, BlockMatrix)]
    if len(block_parts) == len(parts) and blocks.is_supported():
        return BlockLinear(_pack_blocks(block_parts), bias)
    if isinstance(first, GroupedMatrix) and first.bits == 4 and first.has_equal_groups:
        grouped = [part for part in parts if isinstance(part, GroupedMatrix) and have_same_groups(part, first)]
        if len(grouped) == len(parts) and int4.is_supported(first.codes.shape[1], first.scales.shape[1]):
            codes, order = stack([part.codes for part in grouped]), None
            if first.group_of is not None:
                order = first.group_of.argsort(stable=True)
                codes = codes[:, order]
            scales, zeros = stack([part.scales for part in grouped]), stack([part.zeros for part in grouped])
            return Int4Linear(codes, scales, zeros, bias, order)
    return Linear(stack([dense(part) for part in parts]), bias)


def create_embedding(matrix: Matrix, device_config: DeviceConfig = CPU) -> Embedding:
    """Return the embedding table of a matrix, in the same layout as its product."""
    if isinstance(matrix, BlockMatrix) and blocks.is_supported() and not device_config.uses_gpu_kernels:
        return BlockEmbedding(*_pack_blocks([matrix]))
    return EmbeddingTable(device_config.convert(dense(matrix)), is_batch_invariant=device_config.is_batch_invariant)


def _pack_blocks(parts: Sequence[BlockMatrix]) -> list[PackedBlocks]:
    """Pack consecutive parts of the same format together, from where they lie in the file."""
    runs = (list(run) for _, run in groupby(parts, lambda part: part.kind))
    return [
        PackedBlocks(run[0].kind.name, run[0].blocks.shape[1], torch.cat([part.row_addresses() for part in run]))
        for run in runs
    ]
