"""The layouts of compressed-tensors (llm-compressor, vLLM) that are computed here.

- ``int-quantized``: ``NAME.weight`` int8 ``[out, in]``, ``NAME.weight_scale`` ``[out, 1]``; activations are rounded to
  8 bits token by token (W8A8).
- ``pack-quantized``: ``NAME.weight_packed`` int32 ``[out, in * bits / 32]`` of codes plus 2^(bits-1),
  ``NAME.weight_scale`` ``[out, groups]``, ``NAME.weight_shape`` ``[2]``, and where it is not symmetric
  ``NAME.weight_zero_point`` int32 ``[out * bits / 32, groups]``; with activation order ``NAME.weight_g_idx`` ``[in]``.
- ``float-quantized``: ``NAME.weight`` float8 e4m3 ``[out, in]``, ``NAME.weight_scale`` ``[out, 1]``, ``[1]`` or one
  for each block.
- ``mixed-precision``: some of these, each for the modules that its group names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import finite, groups_of, only
from engine.weights.matrix import Float8Matrix, GroupedMatrix, Int8Matrix, Matrix
from engine.weights.packing import pack, unpack, words_of
from engine.weights.safetensors import Weights

_MatrixReader = Callable[[Weights, str, int, int], Matrix]


def create_reader(config: dict[str, Any]) -> _MatrixReader:
    """See ``formats.reader``."""
    layout = only(config, "format", "int-quantized", "pack-quantized", "float-quantized", "mixed-precision")
    schemes = list((config.get("config_groups") or {}).values())
    if not schemes:
        raise EngineError("quantization_config has no config_groups")
    if layout != "mixed-precision" and len(schemes) > 1:
        raise EngineError(f"quantization_config: {len(schemes)} config_groups; with format {layout!r} there is 1")
    groups = [
        (scheme.get("targets") or [], _create_scheme_reader(scheme, scheme if layout == "mixed-precision" else config))
        for scheme in schemes
    ]
    if len(groups) == 1:
        return groups[0][1]

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        return min(groups, key=lambda group: _distance(group[0], name))[1](weights, name, rows, columns)

    return read


def _distance(targets: list[str], name: str) -> int:
    """How far a group is from being the one of a module: its name counts more than a pattern, and that more than what
    it is."""
    if name in targets:
        return 0
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    if any(re.match(pattern, name) for pattern in patterns):
        return 1
    return 2 if "Linear" in targets else 3


def _create_scheme_reader(scheme: dict[str, Any], config: dict[str, Any]) -> _MatrixReader:
    """How a group's matrices are held. ``config`` has the format."""
    layout = only(config, "format", "int-quantized", "pack-quantized", "float-quantized")
    about = scheme.get("weights") or {}
    activations = scheme.get("input_activations")
    if layout != "pack-quantized":
        only(about, "num_bits", 8)
        if activations is not None:
            only(activations, "num_bits", 8)
            only(activations, "dynamic", True)
    if layout == "int-quantized":
        only(about, "symmetric", True)
        only(about, "strategy", "channel")
        if activations is not None:
            only(activations, "strategy", "token")
        return partial(_int8, rounds=activations is not None)
    if layout == "float-quantized":
        block = None
        if only(about, "strategy", "channel", "tensor", "block") == "block":
            block = _block(about)
        return partial(_float8, block=block, rounds=activations is not None)
    bits = only(about, "num_bits", 4, 8)
    strategy = only(about, "strategy", "group", "channel")
    symmetric = only({"symmetric": True} | about, "symmetric", True, False)
    return _Packed(bits, int(about["group_size"]) if strategy == "group" else -1, symmetric).read


def config(bits: int, size: int | None, left: list[str], *, rows: str | None = None) -> dict[str, Any]:
    """The ``quantization_config`` of what ``write`` writes: without ``size`` W8A8, else symmetric weights in groups.

    ``left``: modules that are not quantised. ``rows``: one that is W8A8, whatever the others are.
    """
    groups = [_group(["Linear"], bits, size)]
    if rows is not None and size is not None:
        groups.append(_group([rows], 8, None))
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": left,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
    }


def _group(targets: list[str], bits: int, size: int | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
        "observer": "minmax",
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations if size is None else None,
        "output_activations": None,
        "format": "int-quantized" if size is None else "pack-quantized",
    }


def write(name: str, matrix: Int8Matrix | GroupedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix; groups must be symmetric, of consecutive columns."""
    if isinstance(matrix, Int8Matrix):
        return {f"{name}.weight": matrix.codes, f"{name}.weight_scale": matrix.scales[:, None].contiguous()}
    return {
        f"{name}.weight_packed": pack(matrix.codes, matrix.bits),
        f"{name}.weight_scale": matrix.scales,
        f"{name}.weight_shape": torch.tensor(matrix.codes.shape),
    }


class _Packed:
    def __init__(self, bits: int, size: int, symmetric: bool) -> None:
        self._bits, self._size, self._symmetric = bits, size, symmetric

    def read(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        if not weights.has(f"{name}.weight_packed"):
            return weights.take(f"{name}.weight", rows, columns)
        bits, groups = self._bits, groups_of(name, columns, self._size)
        words = weights.take_raw(f"{name}.weight_packed", torch.int32, rows, words_of(columns, bits))
        scales = weights.take_raw(f"{name}.weight_scale", None, rows, groups)
        shape = weights.take_raw(f"{name}.weight_shape", None, 2).tolist()
        if shape != [rows, columns]:
            raise EngineError(f"{name!r} is corrupt: weight_shape is {shape}, config.json says {[rows, columns]}")
        if self._symmetric:
            zeros = torch.full((rows, groups), float(1 << (bits - 1)))
        else:
            packed = weights.take_raw(f"{name}.weight_zero_point", torch.int32, words_of(rows, bits), groups)
            zeros = unpack(packed.T.contiguous(), bits, rows).T.float().contiguous()
        group_of = None
        if weights.has(f"{name}.weight_g_idx"):
            group_of = weights.take_raw(f"{name}.weight_g_idx", None, columns).long()
            if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
                raise EngineError(f"{name!r} is corrupt: weight_g_idx goes beyond its {groups} groups")
        weights.count(rows * columns)
        return GroupedMatrix(unpack(words, bits, columns), finite(name, scales), zeros, bits, group_of)


def _int8(weights: Weights, name: str, rows: int, columns: int, *, rounds: bool) -> Matrix:
    if not weights.has(f"{name}.weight_scale"):
        return weights.take(f"{name}.weight", rows, columns)
    codes = weights.take_raw(f"{name}.weight", torch.int8, rows, columns)
    scales = finite(name, weights.take_raw(f"{name}.weight_scale", None, rows, 1))
    weights.count(rows * columns)
    if rounds:
        return Int8Matrix(codes, scales.flatten())
    middle = 1 << 7
    return GroupedMatrix((codes.to(torch.int16) + middle).to(torch.uint8), scales, torch.full_like(scales, middle), 8)


def _float8(
    weights: Weights, name: str, rows: int, columns: int, *, block: tuple[int, int] | None, rounds: bool
) -> Matrix:
    if not weights.has(f"{name}.weight_scale"):
        return weights.take(f"{name}.weight", rows, columns)
    codes = weights.take_raw(f"{name}.weight", torch.float8_e4m3fn, rows, columns)
    if block is None:
        scales = finite(name, weights.take_raw(f"{name}.weight_scale", None))
        if scales.numel() not in (1, rows):
            raise EngineError(f"{name!r} is corrupt: {scales.numel()} scales for {rows} rows")
        scales, block = scales.view(-1, 1), (rows // scales.numel(), columns)
    else:
        grid = -(-rows // block[0]), -(-columns // block[1])
        scales = finite(name, weights.take_raw(f"{name}.weight_scale", None, *grid))
    weights.count(rows * columns)
    return Float8Matrix(codes, scales, block, rounds)


def _block(about: dict[str, Any]) -> tuple[int, int]:
    block = about.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
        raise EngineError(f"quantization_config: block_structure is {block}; it must be two positive numbers")
    return block[0], block[1]
