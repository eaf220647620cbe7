"""The sampling parameters that a checkpoint recommends in its ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.protocol.types import EngineError

_RANGES = {"temperature": (0.0, 1000.0), "top_p": (0.0, 1.0), "top_k": (-1, (1 << 31) - 1), "min_p": (0.0, 1.0)}


def read_own_sampling(generation: Mapping[str, Any], source: object) -> dict[str, float]:
    """Return the recommended parameters by their names in ``SamplingParams``; none unless ``do_sample`` is true.

    ``source`` names the file in the ``EngineError`` for a value out of range.
    """
    if generation.get("do_sample") is not True:
        return {}
    found: dict[str, float] = {}
    for name, (low, high) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise EngineError(f"{source}: {name} is {value!r}; it must be a number from {low:g} to {high:g}")
        found[name] = max(int(value), 0) if name == "top_k" else float(value)
    if found.get("top_p") == 0:  # takes the likeliest token alone
        return found | {"top_p": 1.0, "top_k": 1}
    return found
