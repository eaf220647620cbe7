"""4-bit floats (E2M1) of checkpoints as the blocks of GGUF files, which hold the same numbers in another order.

A checkpoint has the first of two neighbours in the lower half of a byte; a block has the first half of its columns in
the lower halves. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocol.types import EngineError

MXFP4_GROUP = 32
"""Columns that share a power of two."""
NVFP4_GROUP, NVFP4_BLOCK = 16, 64
"""Columns that share a scale, and those of a block."""
_NO_NUMBER = 255
"""The exponent of 8 bits that stands for no number."""


def arrange_mxfp4(name: str, pairs: Tensor, exponents: Tensor) -> Tensor:
    """Return MXFP4 blocks, uint8 ``[out, bytes]``. Raises ``EngineError`` for an exponent that is no number.

    ``pairs``: uint8 ``[out, groups, 16]``. ``exponents``: uint8 ``[out, groups]``, those of powers of two plus 127.
    """
    if num_bad := int((exponents == _NO_NUMBER).sum()):
        raise EngineError(f"{name!r} is corrupt: {num_bad} of {exponents.numel()} scales are not finite")
    return torch.cat((exponents[..., None], _pack_halves(pairs)), -1).flatten(1)


def arrange_nvfp4(name: str, pairs: Tensor, scales: Tensor) -> Tensor:
    """Return NVFP4 blocks, uint8 ``[out, bytes]``. Raises ``EngineError`` for a scale that is negative or no number.

    ``pairs``: uint8 ``[out, in / 2]``, ``in`` a multiple of 64. ``scales``: float8_e4m3fn ``[out, in / 16]``.
    """
    numbers = scales.float()
    if num_bad := int((~(numbers >= 0)).sum()):
        raise EngineError(f"{name!r} is corrupt: {num_bad} of {numbers.numel()} scales are negative or not finite")
    groups = _pack_halves(pairs.view(len(pairs), -1, NVFP4_GROUP // 2))
    codes = groups.view(len(pairs), -1, NVFP4_BLOCK // 2)
    return torch.cat((scales.view(torch.uint8).view(len(pairs), -1, NVFP4_BLOCK // NVFP4_GROUP), codes), -1).flatten(1)


def _pack_halves(pairs: Tensor) -> Tensor:
    """Return bytes ``[…, n]`` of two neighbours each with the first ``n`` numbers in their lower halves instead."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)
