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


def refuse_unknown(
    config: dict[str, Any], known: set[str], fixed: dict[str, tuple[Any, ...]] | None = None, *, where: str = ""
) -> None:
    """Raise ``EngineError`` for a field that may ask for something which is not computed.

    ``known``: fields that are read elsewhere, or do not change what is computed. ``fixed``: the values at which others
    change nothing; any further field may be off, empty or zero. ``where``: the path of ``config``.
    """
    for name, value in config.items():
        allowed = (fixed or {}).get(name, ())
        if name in known or value in allowed or (not value and not allowed) or value is None:
            continue
        right = ", ".join(map(repr, allowed)) or "no such field, or an empty one"
        raise EngineError(f"quantization_config: {where}{name} is {value!r:.120}; supported: {right}")


def read_object(config: dict[str, Any], field: str, where: str = "") -> dict[str, Any]:
    """Return the fields of an object in a config; empty if there is none. Raises ``EngineError`` for another value."""
    value = config.get(field)
    if not isinstance(value, dict | None):
        raise EngineError(f"quantization_config: {where}{field} is {value!r:.120}; it must be an object")
    return value or {}


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
