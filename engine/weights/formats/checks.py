"""What readers of every format ask of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError


def only(config: dict[str, Any], field: str, *allowed: Any) -> Any:
    """The field's value. Raises ``EngineError`` when it is not one of ``allowed``."""
    value = config.get(field)
    if value not in allowed:
        raise EngineError(
            f"quantization_config: {field} is {value!r}; supported: {', '.join(map(repr, dict.fromkeys(allowed)))}"
        )
    return value


def groups_of(name: str, columns: int, size: int) -> int:
    """How many groups of ``size`` columns there are; -1: one. Raises ``EngineError`` when it does not divide."""
    size = columns if size == -1 else size
    if size < 1 or columns % size:
        raise EngineError(f"{name!r}: groups of {size} do not divide {columns} columns")
    return columns // size


def finite(name: str, scales: Tensor) -> Tensor:
    """``scales`` in float32. Raises ``EngineError`` when one is not a number."""
    scales = scales.float()
    if bad := int((~torch.isfinite(scales)).sum()):
        raise EngineError(f"{name!r} is corrupt: {bad} of {scales.numel()} scales are not finite")
    return scales
