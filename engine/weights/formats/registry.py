"""Select the format of a quantised checkpoint.

``quantization_config`` in the model's ``config.json`` names it. A matrix ``NAME`` is then held in tensors whose names
begin with ``NAME.``; a matrix that is not quantised has a plain ``NAME.weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.gpu_requirements import GpuFormat
from engine.protocol.types import EngineError
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, nvfp4
from engine.weights.matrix import Matrix
from engine.weights.safetensors import Weights

MatrixReader = Callable[[Weights, str, int, int], Matrix]
"""Function that takes the tensors of a matrix: weights, name, rows, columns."""


class Format(NamedTuple):
    """A format of quantised checkpoints. Its functions take a ``quantization_config``."""

    create_reader: Callable[[dict[str, Any]], MatrixReader]
    """Raises ``EngineError`` naming what is not supported."""
    list_gpu_formats: Callable[[dict[str, Any]], list[GpuFormat]] = lambda _: []
    """Lists the formats of weights that not every supported GPU has kernels for."""


_FORMATS = {
    "compressed-tensors": Format(compressed_tensors.create_reader, compressed_tensors.list_gpu_formats),
    "gptq": Format(gptq.create_reader),
    "awq": Format(awq.create_reader),
    "fp8": Format(fp8.create_reader, fp8.list_gpu_formats),
    "bitsandbytes": Format(bitsandbytes.create_reader),
    "mxfp4": Format(mxfp4.create_reader),
    "modelopt": Format(nvfp4.create_reader),
}
"""Formats by the ``quant_method`` of a checkpoint."""


def create_reader(config: dict[str, Any] | None) -> MatrixReader:
    """Return the reader for a checkpoint's ``quantization_config``; ``None`` is a plain checkpoint.

    Raises ``EngineError`` naming what is not supported.
    """
    if not config:
        return _read_plain
    method = config.get("quant_method")
    if method not in _FORMATS:
        raise EngineError(f"quant_method {method!r} is not supported; choose one of {', '.join(_FORMATS)}")
    return _FORMATS[method].create_reader(config)


def list_gpu_formats(config: dict[str, Any] | None) -> list[GpuFormat]:
    """Return the formats that a GPU must have kernels for; the config must be one that ``create_reader`` accepts."""
    return _FORMATS[config["quant_method"]].list_gpu_formats(config) if config else []


def _read_plain(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    return weights.take_matrix(name, rows, columns)
