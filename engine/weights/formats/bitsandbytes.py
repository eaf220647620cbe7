"""bitsandbytes' NF4: sixteen levels, the quantiles of a normal distribution, times the largest number of a block.

``NAME.weight`` uint8 ``[out * in / 2, 1]``, row by row, the first of two in the high bits; ``NAME.weight.absmax``
``[blocks]``; ``NAME.weight.quant_map`` ``[16]``; ``NAME.weight.quant_state.bitsandbytes__nf4``, a JSON of shape and
block size in bytes. With double quantisation ``absmax`` is uint8, codes of ``nested_quant_map`` times
``nested_absmax`` plus ``nested_offset``. (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import refuse_unknown, require, require_finite
from engine.weights.matrices.nf4 import Nf4Matrix
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights
from kernels.linear.nf4 import CODES, from_bitsandbytes

BLOCK = 64
_STATE = "quant_state.bitsandbytes__nf4"
_LEVELS = 16
_BLOCK_MULTIPLE = 16
"""Kernels support blocks of multiples of this size, if they divide a row, with the paper's levels."""


_KNOWN = {
    *("quant_method", "load_in_4bit", "_load_in_4bit", "bnb_4bit_quant_type"),
    "bnb_4bit_use_double_quant",  # the tensors of each matrix say it
    "bnb_4bit_compute_dtype",
    # Settings of 8-bit weights; modules without a state are not quantised, whatever is listed.
    *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
}
_FIXED: dict[str, tuple[Any, ...]] = {"bnb_4bit_quant_storage": ("uint8", "torch.uint8")}


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    require(config, "load_in_4bit", True)
    require(config, "bnb_4bit_quant_type", "nf4")
    refuse_unknown(config, _KNOWN, _FIXED)
    return _read_matrix


def build_config(skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    }


def pack_matrix(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Round a float32 matrix ``[out, in]`` and return its tensors, whose size must be a multiple of ``BLOCK``."""
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    levels = torch.tensor(CODES)
    codes = torch.bucketize(blocks / absmax.clamp(min=1e-30)[:, None], (levels[1:] + levels[:-1]) / 2)
    pairs = codes.to(torch.uint8).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    return {
        f"{name}.weight": (pairs[:, :1] << 4) | pairs[:, 1:],
        f"{name}.weight.absmax": absmax,
        f"{name}.weight.quant_map": levels,
        f"{name}.weight.{_STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _read_matrix(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    if not weights.has(f"{name}.weight.{_STATE}"):
        return weights.take_matrix(name, rows, columns)
    state = _parse_state(name, weights.take_raw(f"{name}.weight.{_STATE}", torch.uint8))
    count, size = rows * columns, state["blocksize"]
    if state["shape"] != [rows, columns] or count % 2:
        raise EngineError(f"{name!r} is corrupt: its state says {state['shape']}, config.json {[rows, columns]}")
    pairs = weights.take_raw(f"{name}.weight", torch.uint8, count // 2, 1)
    levels = weights.take_raw(f"{name}.weight.quant_map", torch.float32, _LEVELS)
    absmax = _read_absmax(weights, f"{name}.weight", state, -(-count // size))
    weights.count(count)
    if columns % size == 0 and size % _BLOCK_MULTIPLE == 0 and torch.equal(levels, torch.tensor(CODES)):
        return Nf4Matrix(from_bitsandbytes(pairs, absmax, rows, columns))
    codes = torch.cat((pairs >> 4, pairs & 15), dim=1).flatten().int()
    return levels[codes].view(rows, columns) * absmax.repeat_interleave(size)[:count].view(rows, columns)


def _read_absmax(weights: Weights, name: str, state: dict[str, Any], blocks: int) -> Tensor:
    if not weights.has(f"{name}.nested_absmax"):
        return require_finite(name, weights.take_raw(f"{name}.absmax", torch.float32, blocks))
    size = int(state["nested_blocksize"])
    codes = weights.take_raw(f"{name}.absmax", torch.uint8, blocks).int()
    levels = weights.take_raw(f"{name}.nested_quant_map", torch.float32, 256)
    scales = require_finite(name, weights.take_raw(f"{name}.nested_absmax", torch.float32, -(-blocks // size)))
    return levels[codes] * scales.repeat_interleave(size)[:blocks] + float(state["nested_offset"])


def _parse_state(name: str, data: Tensor) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(bytes(data.tolist()))
        return state | {"shape": list(state["shape"]), "blocksize": int(state["blocksize"])}
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{name!r} is corrupt: its {_STATE} is invalid: {error!r}") from None
