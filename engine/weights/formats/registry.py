"""The public formats of quantised checkpoints: one module each, which reads and writes it.

The model's ``config.json`` says in ``quantization_config`` which it is. A matrix ``NAME`` is then held in tensors
whose names begin with ``NAME.``; those that the checkpoint leaves alone have a plain ``NAME.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.protocol.types import EngineError
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

MatrixReader = Callable[[Weights, str, int, int], Matrix]
"""Takes the tensors of a matrix: weights, its name, rows, columns."""

_FORMATS: dict[str, Callable[[dict[str, Any]], MatrixReader]] = {
    "compressed-tensors": compressed_tensors.create_reader,
    "gptq": gptq.create_reader,
    "awq": awq.create_reader,
    "fp8": fp8.create_reader,
    "bitsandbytes": bitsandbytes.create_reader,
}


def create_reader(config: dict[str, Any] | None) -> MatrixReader:
    """How a checkpoint with that ``quantization_config`` holds its matrices. Raises ``EngineError`` that says what of
    it is not supported."""
    if not config:
        return _plain
    method = config.get("quant_method")
    if method not in _FORMATS:
        raise EngineError(f"quant_method {method!r} is not supported; supported are {', '.join(_FORMATS)}")
    return _FORMATS[method](config)


def _plain(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    return weights.take(f"{name}.weight", rows, columns)
