"""Quantise to Q4_K, which the package ``gguf`` only reads."""

from __future__ import annotations

from typing import Any

import numpy as np

COLUMNS = 256
_GROUPS, _LEVELS, _SCALE_LEVELS = 8, 15, 63


def quantize_q4_k(values: Any) -> Any:
    """Return blocks, uint8 ``[…, columns / 256 * 144]``, of float32 ``[…, columns]``.

    A block has 8 groups of 32 numbers ``unit * scale * code - low_unit * low``, whose scales and lows have 6 bits.
    """
    groups = values.reshape(-1, _GROUPS, COLUMNS // _GROUPS).astype(np.float32)
    lows = np.maximum(-groups.min(axis=-1), 0)
    steps = (groups.max(axis=-1) + lows) / _LEVELS
    units = [(one.max(axis=-1, keepdims=True) / _SCALE_LEVELS).astype(np.float16) for one in (steps, lows)]
    scales, minimums = (
        np.clip(np.rint(one / np.maximum(unit.astype(np.float32), 1e-30)), 0, _SCALE_LEVELS).astype(np.uint8)
        for one, unit in zip((steps, lows), units, strict=True)
    )
    step, low = (unit.astype(np.float32) * code for unit, code in zip(units, (scales, minimums), strict=True))
    codes = np.rint((groups + low[..., None]) / np.maximum(step[..., None], 1e-30))
    codes = np.clip(codes, 0, _LEVELS).astype(np.uint8).reshape(-1, _GROUPS // 2, 2, COLUMNS // _GROUPS)
    packed = (codes[:, :, 0] | (codes[:, :, 1] << 4)).reshape(len(groups), -1)
    blocks = np.concatenate((*(unit.view(np.uint8) for unit in units), _pack_scales(scales, minimums), packed), axis=1)
    return blocks.reshape(*values.shape[:-1], -1)


def _pack_scales(scales: Any, minimums: Any) -> Any:
    """Return the 12 bytes of the numbers of 6 bits: the upper two bits of the last four are with the first four."""
    first = [one[:, :4] | ((one[:, 4:] >> 4) << 6) for one in (scales, minimums)]
    return np.concatenate((*first, (scales[:, 4:] & 15) | ((minimums[:, 4:] & 15) << 4)), axis=1)
