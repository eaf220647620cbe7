"""Check that a checkpoint can be quantised, from its config and the headers of its files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.models.decoder import LayerBuilder
from engine.models.families.config import DecoderConfig
from engine.protocol.types import EngineError
from engine.quantization.options import Options, resolve_group_size
from engine.weights.formats import bitsandbytes
from engine.weights.formats.registry import create_reader
from engine.weights.safetensors import Weights
from kernels.linear.fp32 import Linear, Product

_WORD = 32
_AWQ_ROW_MULTIPLE = 8


def check_checkpoint(config: DecoderConfig, folder: Path, options: Options) -> None:
    """Raise ``EngineError`` with the name and the sizes of the first matrix that is missing or does not fit."""
    weights = Weights(folder)
    if options.method == "awq" and (config.fused or config.experts or not config.pre_norms):
        raise EngineError(f"{folder}: awq is not supported for {config.architecture}; gptq is")
    builder = _MatrixLister(config, weights)
    for index in range(config.num_layers):
        if weights.has(f"model.layers.{index}.mlp.experts.gate_up_proj"):
            raise EngineError(f"{folder}: experts that are stacked in one tensor are not supported for quantisation")
        builder.layer(index)
    for name, (rows, columns) in builder.matrices.items():
        if not is_router(name):
            _check_fit(name, rows, columns, options)


def is_router(name: str) -> bool:
    """Return True if a matrix routes tokens to experts. Routers are never quantised."""
    return name.endswith(".gate")


def _check_fit(name: str, rows: int, columns: int, options: Options) -> None:
    size = resolve_group_size(options, columns)
    if columns % size:
        raise EngineError(f"{name!r}: a group size of {size} does not divide its {columns} columns")
    if options.method == "gptq" and (rows * options.bits % _WORD or columns * options.bits % _WORD):
        raise EngineError(
            f"{name!r}: {rows} rows and {columns} columns of {options.bits} bits do not fill words of {_WORD}"
        )
    if options.method == "awq" and rows % _AWQ_ROW_MULTIPLE:
        raise EngineError(f"{name!r}: {rows} rows are not a multiple of {_AWQ_ROW_MULTIPLE}, which AWQ's layout needs")
    if options.method == "nf4" and rows * columns % bitsandbytes.BLOCK:
        raise EngineError(f"{name!r}: {rows * columns} numbers are not a multiple of {bitsandbytes.BLOCK}")


class _MatrixLister(LayerBuilder):
    """Collects names and shapes of the matrices instead of reading them."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights, create_reader(None))
        self.matrices: dict[str, tuple[int, int]] = {}

    def product(self, parts: dict[str, int], columns: int, *, bias: bool) -> Product:
        for name, rows in parts.items():
            self._weights.expect(f"{name}.weight", rows, columns)
            if bias:
                self._weights.expect(f"{name}.bias", rows)
            self.matrices[name] = rows, columns
        return Linear(torch.empty(sum(parts.values()), columns, device="meta"))
