"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

``NAME.qweight`` int32 ``[in * bits / 32, out]``, packed down the columns; ``NAME.qzeros`` int32 ``[groups, out * bits /
32]``; ``NAME.scales`` float16 ``[groups, out]``; ``NAME.g_idx`` int32 ``[in]``, the group of each column. The older
``checkpoint_format`` "gptq" stores each zero minus one, "gptq_v2" stores it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import count_groups, require, require_finite
from engine.weights.matrix import GroupedMatrix, Matrix
from engine.weights.packing import num_words, pack, unpack
from engine.weights.safetensors import Weights


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    bits = require(config, "bits", 4, 8)
    version = require({"checkpoint_format": "gptq"} | config, "checkpoint_format", "gptq", "gptq_v2")
    size, zero_offset = int(config.get("group_size", -1)), 1 if version == "gptq" else 0

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        if not weights.has(f"{name}.qweight"):
            return weights.take(f"{name}.weight", rows, columns)
        groups = count_groups(name, columns, size)
        if rows * bits % 32 or columns * bits % 32:
            raise EngineError(f"{name!r}: {bits} bits of {rows} rows and {columns} columns do not fill words of 32")
        words = weights.take_raw(f"{name}.qweight", torch.int32, num_words(columns, bits), rows)
        zeros = weights.take_raw(f"{name}.qzeros", torch.int32, groups, num_words(rows, bits))
        scales = weights.take_raw(f"{name}.scales", None, groups, rows)
        group_of = None
        if weights.has(f"{name}.g_idx"):
            group_of = _check_group_of(name, weights.take_raw(f"{name}.g_idx", torch.int32, columns).long(), groups)
        weights.count(rows * columns)
        return GroupedMatrix(
            unpack(words.T.contiguous(), bits, columns),
            require_finite(name, scales.T.contiguous()),
            (unpack(zeros, bits, rows).float() + zero_offset).T.contiguous(),
            bits,
            group_of,
        )

    return read


def build_config(bits: int, size: int, *, act_order: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": size,
        "desc_act": act_order,
        "sym": True,
        "lm_head": False,
        "pack_dtype": "int32",
    }


def pack_matrix(name: str, matrix: GroupedMatrix) -> dict[str, Tensor]:
    columns, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    group_of = torch.arange(columns) // (columns // groups) if matrix.group_of is None else matrix.group_of
    return {
        f"{name}.qweight": pack(matrix.codes, matrix.bits).T.contiguous(),
        f"{name}.qzeros": pack((matrix.zeros - 1).long().T, matrix.bits),
        f"{name}.scales": matrix.scales.T.to(torch.float16).contiguous(),
        f"{name}.g_idx": group_of.int(),
    }


def _check_group_of(name: str, group_of: Tensor, groups: int) -> Tensor | None:
    low, high = int(group_of.min()), int(group_of.max())
    if low < 0 or high >= groups:
        raise EngineError(f"{name!r} is corrupt: g_idx has the groups {low} to {high}, but there are {groups}")
    columns = len(group_of)
    is_consecutive = columns % groups == 0 and torch.equal(group_of, torch.arange(columns) // (columns // groups))
    return None if is_consecutive else group_of
