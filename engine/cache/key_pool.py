"""Memory of keys and values: the tensors of layers of one shape, in pages, in floats or in few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.device import DeviceConfig
from engine.protocol.types import EngineError
from kernels.common.int4 import GROUP, INT4
from kernels.cpu.runtime.memory import allocate_resident
from kernels.quantize import LIMITS, QUANTIZED


def kv_bytes_per_token(layer: HeadShape, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in one layer of a cache of ``dtype``, scales
    included."""
    if dtype == INT4:
        vector_bytes = layer.head_dim // 2 + layer.head_dim // GROUP * torch.float16.itemsize
    else:
        vector_bytes = layer.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in LIMITS else 0)
    return layer.num_kinds * layer.kv_heads * vector_bytes


class KeyPool:
    """Keys and values of the layers of one shape, in pages that all pools of a cache number alike.

    ``data``: ``[layers, kinds, kv_heads, pages, page_size, head_dim]``, keys before values, or one kind of vectors that
    are both (``HeadShape.num_kinds``). A head's consecutive pages are one matrix, which a product can read in place.
    Each vector of 8-bit ``data`` has a float32 in ``scales``, ``[layers, kinds, kv_heads, pages, page_size]``. ``INT4``
    data has two numbers in a byte, ``[…, head_dim / 2]``, and a float16 for each 32 numbers, ``[…, head_dim / 32]``;
    see ``kernels.common.int4``.
    """

    def __init__(
        self, shape: HeadShape, layers: Sequence[int], slots: tuple[int, int], dtype: torch.dtype, device: DeviceConfig
    ) -> None:
        """``layers``: indices of the layers, ascending; ``slots``: the number of pages and their size."""
        check_head_dim(shape.head_dim, dtype)
        self.shape, self.layers = shape, layers
        sizes = len(layers), shape.num_kinds, shape.kv_heads, *slots
        width = shape.head_dim // 2 if dtype == INT4 else shape.head_dim
        self.data = _allocate_zeros((*sizes, width), dtype, device)
        self.scales = _create_scales(sizes, shape.head_dim, dtype, device)
        # Torch can copy float8 but not scatter it; its bytes can be scattered.
        vectors = self.data if self.scales is None else self.data.view(torch.int8)
        factors = [] if self.scales is None else [self.scales if dtype == INT4 else self.scales[..., None]]
        self.slot_tensors = [vectors, *factors]
        """Everything stored per slot, ``[layers, kinds, kv_heads, pages, page_size, …]``."""

    def is_finite(self, page: int) -> bool:
        stored = self.data if self.scales is None else self.scales
        return bool(stored[:, :, :, page].isfinite().all())


def check_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    """Raise ``EngineError`` if vectors of ``head_dim`` numbers cannot be stored in ``dtype``."""
    if dtype == INT4 and head_dim % GROUP:
        raise EngineError(
            f"kv_dtype 'int4' needs heads whose size is a multiple of {GROUP}; those of this model have {head_dim} "
            "numbers: choose int8"
        )


def _create_scales(
    slots: tuple[int, ...], head_dim: int, dtype: torch.dtype, device_config: DeviceConfig
) -> Tensor | None:
    """Return the scales of a cache of ``dtype``, if it is quantized."""
    if dtype not in QUANTIZED:
        return None
    if dtype == INT4:
        return _allocate_zeros((*slots, head_dim // GROUP), torch.float16, device_config)
    return _allocate_zeros(slots, torch.float32, device_config)


def _allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device_config: DeviceConfig) -> Tensor:
    """Allocate zeros. The memory must not hold NaN, which would survive the multiplication by a masked slot's weight of
    zero."""
    if device_config.uses_gpu_kernels:
        return torch.zeros(shape, dtype=dtype, device=device_config.device)
    size = math.prod(shape)
    words = allocate_resident(-(-size * dtype.itemsize // 4))
    return words.view(dtype)[:size].view(shape)
