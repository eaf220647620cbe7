"""8-bit floats (e4m3) with a scale for each block, DeepSeek's layout, which transformers, vLLM and SGLang read.

``NAME.weight`` float8 e4m3 ``[out, in]``; ``NAME.weight_scale_inv`` float32 ``[ceil(out / 128), ceil(in / 128)]``, by
which a block's numbers are multiplied. Where ``scale_fmt`` is ``ue8m0`` (DeepSeek-V3.1 and later) the scales are powers
of two, and may be stored as their exponents, in a byte each. Without ``weight_block_size`` there is one number for a
matrix, of that name (transformers) or ``NAME.weight_scale`` (vLLM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.gpu_requirements import CPU_INSTEAD, FLOAT8_CAPABILITY, GpuFormat
from engine.protocol.types import EngineError
from engine.weights.formats.checks import refuse_unknown, require, require_finite
from engine.weights.matrices.float8 import Float8Matrix
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

BLOCK = 128
GPU_FORMAT = GpuFormat(
    "fp8 weights", FLOAT8_CAPABILITY, f"serve a checkpoint with integers (int4, int8 or W8A8) {CPU_INSTEAD}"
)
_MAX = 448.0
"""The largest e4m3 number."""


_KNOWN = {
    *("quant_method", "activation_scheme", "fmt", "weight_block_size", "dequantize"),
    # Modules without a scale are not quantised, whatever is listed.
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers"),
}
_FIXED: dict[str, tuple[Any, ...]] = {"scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)}


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    """Return the reader for a ``quantization_config``. On a CPU activations stay float32."""
    refuse_unknown(config, _KNOWN, _FIXED)
    require({"activation_scheme": "dynamic"} | config, "activation_scheme", "dynamic")
    require({"fmt": "e4m3"} | config, "fmt", "e4m3")
    has_blocks = config.get("weight_block_size") is not None
    block = require_block_size(config, "weight_block_size") if has_blocks else None

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        scale = f"{name}.weight_scale_inv"
        if block is None and not weights.has(scale):
            scale = f"{name}.weight_scale"
        if not weights.has(scale):
            return weights.take_matrix(name, rows, columns)
        rounds = not config.get("dequantize")
        return read_float8(weights, name, rows, columns, scale=scale, block=block, rounds_activations=rounds)

    return read


def list_gpu_formats(config: dict[str, Any]) -> list[GpuFormat]:  # noqa: ARG001
    """Return the formats that a GPU must have kernels for."""
    return [GPU_FORMAT]


def read_float8(
    weights: Weights,
    name: str,
    rows: int,
    columns: int,
    *,
    scale: str,
    block: Sequence[int] | None,
    rounds_activations: bool,
) -> Float8Matrix:
    """Take ``NAME.weight`` and its scales: one for each ``block``, or without blocks one for the matrix or each row."""
    codes = weights.take_raw(f"{name}.weight", torch.float8_e4m3fn, rows, columns)
    if block is None:
        scales = _take_scales(weights, name, scale)
        if scales.numel() not in (1, rows):
            raise EngineError(f"{name!r} is corrupt: {scales.numel()} scales for {rows} rows")
        scales, block = scales.view(-1, 1), (rows // scales.numel(), columns)
    else:
        grid = -(-rows // block[0]), -(-columns // block[1])
        scales = _take_scales(weights, name, scale, *grid)
    weights.count(rows * columns)
    return Float8Matrix(codes, scales, (block[0], block[1]), rounds_activations)


def _take_scales(weights: Weights, name: str, scale: str, *shape: int) -> Tensor:
    """Take the scales of a matrix, in float32."""
    scales = weights.take_raw(scale, None, *shape)
    return require_finite(name, scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales)


def require_block_size(config: dict[str, Any], field: str) -> list[int]:
    """Return the rows and columns of a block. Raises ``EngineError`` unless both are positive."""
    block = config.get(field)
    if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
        raise EngineError(f"quantization_config: {field} is {block}; it must be two positive numbers")
    return block


def build_config(skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped,
    }


def pack_matrix(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Round a float32 matrix ``[out, in]``, each block's largest number to e4m3's largest, and return its tensors."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.amax((1, 3)).clamp(min=1e-12) / _MAX
    expanded = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return {f"{name}.weight": (weight / expanded).to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}
