"""AWQ's layout "gemm", as AutoAWQ writes it.

``NAME.qweight`` int32 ``[in, out / 8]`` and ``NAME.qzeros`` int32 ``[groups, out / 8]``, packed along the rows of the
matrix, eight to a word in the order 0 2 4 6 1 3 5 7; ``NAME.scales`` float16 ``[groups, out]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import count_groups, refuse_unknown, require, require_finite
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrix import Matrix
from engine.weights.packing import pack, unpack
from engine.weights.safetensors import Weights

_BITS = 4
_PER_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the neighbour in the i-th lowest bits of a word."""


_KNOWN = {
    *("quant_method", "bits", "group_size", "zero_point", "version"),
    # Modules without packed tensors are not quantised, whatever is listed.
    *("modules_to_not_convert", "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config"),
    *("lm_head", "sym", "meta", "provider", "autoround_version", "damp_percent", "true_sequential", "static_groups"),
}
_FIXED: dict[str, tuple[Any, ...]] = {"format": ("gemm", "GEMM"), "checkpoint_format": ("gemm", "GEMM")} | {
    "pack_dtype": ("int32",)
}


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    refuse_unknown(config, _KNOWN, _FIXED)
    require(config, "bits", _BITS)
    require({"version": "gemm"} | config, "version", "gemm", "GEMM")
    require({"zero_point": True} | config, "zero_point", True)
    size = int(config.get("group_size", 128))

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        if not weights.has(f"{name}.qweight"):
            return weights.take_matrix(name, rows, columns)
        groups = count_groups(name, columns, size)
        if rows % _PER_WORD:
            raise EngineError(f"{name!r}: {rows} rows do not fill words of {_PER_WORD}")
        words = weights.take_raw(f"{name}.qweight", torch.int32, columns, rows // _PER_WORD)
        zeros = weights.take_raw(f"{name}.qzeros", torch.int32, groups, rows // _PER_WORD)
        scales = weights.take_raw(f"{name}.scales", None, groups, rows)
        weights.count(rows * columns)
        return GroupedMatrix(
            _unpack(words, rows).T.contiguous(),
            require_finite(name, scales.T.contiguous()),
            _unpack(zeros, rows).T.float().contiguous(),
            _BITS,
        )

    return read


def build_config(size: int, skipped: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": skipped,
    }


def pack_matrix(name: str, matrix: GroupedMatrix) -> dict[str, Tensor]:
    """Return the tensors of a matrix of 4 bits and a multiple of 8 rows."""
    return {
        f"{name}.qweight": _pack(matrix.codes.T),
        f"{name}.qzeros": _pack(matrix.zeros.T),
        f"{name}.scales": matrix.scales.T.to(torch.float16).contiguous(),
    }


def _pack(codes: Tensor) -> Tensor:
    eights = codes.reshape(len(codes), -1, _PER_WORD)[..., list(_ORDER)]
    return pack(eights.flatten(1), _BITS)


def _unpack(words: Tensor, count: int) -> Tensor:
    eights = unpack(words, _BITS, count).view(len(words), -1, _PER_WORD)
    inverse = [_ORDER.index(index) for index in range(_PER_WORD)]
    return eights[..., inverse].flatten(1)
