"""Checks that the readers of several formats share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError


def require(config: dict[str, Any], field: str, *allowed: Any) -> Any:
    """Return a field's value. Raises ``EngineError`` if it is not one of ``allowed``."""
    value = config.get(field)
    if value not in allowed:
        raise EngineError(
            f"quantization_config: {field} is {value!r}; supported: {', '.join(map(repr, dict.fromkeys(allowed)))}"
        )
    return value


def count_groups(name: str, columns: int, size: int) -> int:
    """Return the number of groups of ``size`` columns (-1: one group). Raises ``EngineError`` if it does not divide."""
    size = columns if size == -1 else size
    if size < 1 or columns % size:
        raise EngineError(f"{name!r}: groups of {size} do not divide {columns} columns")
    return columns // size


def require_finite(name: str, scales: Tensor) -> Tensor:
    """Return ``scales`` in float32. Raises ``EngineError`` if one is not finite."""
    scales = scales.float()
    if num_bad := int((~torch.isfinite(scales)).sum()):
        raise EngineError(f"{name!r} is corrupt: {num_bad} of {scales.numel()} scales are not finite")
    return scales
