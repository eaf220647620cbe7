"""Rows of activations that are quantized to 8 bits before a product, and the descriptions of such rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest number of each 8-bit type."""


class Quantization(NamedTuple):
    """A way to quantize rows: the type of the codes, and the values that share a scale."""

    dtype: torch.dtype
    block: int | None = None
    """A power of two that divides the rows; ``None`` for a scale for each row."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix whose rows are codes times scales."""

    codes: Tensor
    """``[rows, n]``."""
    scales: Tensor
    """float32 ``[rows]``, or ``[rows, n / block]``."""
    dtype: torch.dtype
    """Type of the rows before they were quantized."""


Rows = Tensor | QuantizedRows
"""Inputs of a product."""
