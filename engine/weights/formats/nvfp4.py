"""NVFP4: 4-bit floats with an 8-bit one for each 16 of them and a number for each matrix.

In NVIDIA's layout (ModelOpt) ``NAME.weight`` is uint8 ``[out, in / 2]``, the first of two neighbours in the lower
bits, ``NAME.weight_scale`` float8 e4m3 ``[out, in / 16]``, and ``NAME.weight_scale_2`` one float32: a weight is the
product of the three. https://github.com/NVIDIA/TensorRT-Model-Optimizer, "Unified HuggingFace Checkpoint". Only
weights are in the format here: scales of activations (``input_scale``) and of keys and values are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import refuse_unknown, require, require_finite
from engine.weights.formats.float4 import NVFP4_BLOCK, NVFP4_GROUP, arrange_nvfp4
from engine.weights.matrices.blocks import BlockMatrix
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

_KNOWN = {
    *("quant_method", "quant_algo", "group_size", "producer"),
    # Modules without a scale are not quantised, whatever is listed.
    *("ignore", "exclude_modules", "config_groups"),
    *("kv_cache_scheme", "kv_cache_quant_algo"),  # of keys and values, whose dtype is the engine's own choice
}
_IGNORED = "input_scale", "k_scale", "v_scale"


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    """Return the reader for a ``quantization_config`` of ModelOpt."""
    refuse_unknown(config, _KNOWN)
    require(config, "quant_algo", "NVFP4")
    require({"group_size": NVFP4_GROUP} | config, "group_size", NVFP4_GROUP)
    return _read_matrix


def _read_matrix(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    for ignored in _IGNORED:
        weights.drop(f"{name}.{ignored}")
    if not weights.has(f"{name}.weight_scale"):
        return weights.take_matrix(name, rows, columns)
    whole = require_finite(name, weights.take_raw(f"{name}.weight_scale_2", torch.float32))
    return read_blocks(weights, name, rows, columns, packed="weight", whole=whole)


def read_blocks(weights: Weights, name: str, rows: int, columns: int, *, packed: str, whole: Tensor) -> BlockMatrix:
    """Take a matrix and the scales of its groups. ``packed``: name of the codes. ``whole``: scale of the matrix."""
    if columns % NVFP4_BLOCK:
        raise EngineError(f"{name!r}: {columns} columns in NVFP4; supported are multiples of {NVFP4_BLOCK}")
    if whole.numel() != 1:
        raise EngineError(f"{name!r} is corrupt: {whole.numel()} numbers that scale the whole matrix, not 1")
    pairs = weights.take_raw(f"{name}.{packed}", torch.uint8, rows, columns // 2)
    scales = weights.take_raw(f"{name}.weight_scale", torch.float8_e4m3fn, rows, columns // NVFP4_GROUP)
    weights.count(rows * columns)
    row_scales = whole.reshape(1).expand(rows)
    return BlockMatrix(GGMLQuantizationType.NVFP4, arrange_nvfp4(name, pairs, scales), row_scales=row_scales)
