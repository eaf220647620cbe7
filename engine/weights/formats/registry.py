"""Select the format of a quantised checkpoint.

``quantization_config`` in the model's ``config.json`` names it. A matrix ``NAME`` is then held in tensors whose names
begin with ``NAME.``; a matrix that is not quantised has a plain ``NAME.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.protocol.types import EngineError
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

MatrixReader = Callable[[Weights, str, int, int], Matrix]
"""Function that takes the tensors of a matrix: weights, name, rows, columns."""

_FORMATS: dict[str, Callable[[dict[str, Any]], MatrixReader]] = {
    "compressed-tensors": compressed_tensors.create_reader,
    "gptq": gptq.create_reader,
    "awq": awq.create_reader,
    "fp8": fp8.create_reader,
    "bitsandbytes": bitsandbytes.create_reader,
}


def create_reader(config: dict[str, Any] | None) -> MatrixReader:
    """Return the reader for a checkpoint's ``quantization_config``; ``None`` is a plain checkpoint.

    Raises ``EngineError`` naming what is not supported.
    """
    if not config:
        return _read_plain
    method = config.get("quant_method")
    if method not in _FORMATS:
        raise EngineError(f"quant_method {method!r} is not supported; choose one of {', '.join(_FORMATS)}")
    return _FORMATS[method](config)


def list_formats(config: dict[str, Any] | None) -> list[str]:
    """Return the formats of weights (``engine.gpu_requirements.check_format``) that a checkpoint's config names.

    The config must be one that ``create_reader`` accepts.
    """
    if not config:
        return []
    match config["quant_method"]:
        case "compressed-tensors":
            return compressed_tensors.list_formats(config)
        case "fp8":
            return ["fp8 weights and activations"]
        case "bitsandbytes":
            return ["NF4 weights"]
        case "gptq" | "awq":
            return [f"int{config['bits']} weights"]
    return []


def _read_plain(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    return weights.take(f"{name}.weight", rows, columns)
