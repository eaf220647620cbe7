"""The supported layouts of compressed-tensors (llm-compressor, vLLM).

- ``int-quantized``: ``NAME.weight`` int8 ``[out, in]``, ``NAME.weight_scale`` ``[out, 1]``; activations are rounded to
  8 bits token by token (W8A8).
- ``pack-quantized``: ``NAME.weight_packed`` int32 ``[out, in * bits / 32]`` of codes plus 2^(bits-1),
  ``NAME.weight_scale`` ``[out, groups]``, ``NAME.weight_shape`` ``[2]``, and where it is not symmetric
  ``NAME.weight_zero_point`` int32 ``[out * bits / 32, groups]``; with activation order ``NAME.weight_g_idx`` ``[in]``.
- ``float-quantized``: ``NAME.weight`` float8 e4m3 ``[out, in]``, ``NAME.weight_scale`` ``[out, 1]``, ``[1]`` or one
  for each block.
- ``nvfp4-pack-quantized``: ``NAME.weight_packed`` uint8 ``[out, in / 2]``, ``NAME.weight_scale`` float8 e4m3
  ``[out, in / 16]``, and ``NAME.weight_global_scale``, one float32 by which the latter are divided; see ``nvfp4``.
- ``mixed-precision``: several of these, each for the modules that its group names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.gpu_requirements import GpuFormat
from engine.protocol.types import EngineError
from engine.weights.formats import fp8, nvfp4
from engine.weights.formats.checks import count_groups, read_object, refuse_unknown, require, require_finite
from engine.weights.formats.float4 import NVFP4_GROUP
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.int8 import Int8Matrix
from engine.weights.matrix import Matrix
from engine.weights.packing import num_words, pack, unpack
from engine.weights.safetensors import Weights

_MatrixReader = Callable[[Weights, str, int, int], Matrix]


_KNOWN = {
    *("quant_method", "format", "config_groups", "version", "quantization_status", "global_compression_ratio"),
    "ignore",  # modules without a scale are not quantised, whatever is listed
}
_ARGUMENTS = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
    *("observer", "observer_kwargs", "zp_dtype"),
}
_SCALE_DTYPES = tuple(f"{prefix}{name}" for prefix in ("torch.", "") for name in ("float32", "float16", "bfloat16"))
_FLOAT8_DTYPES = "torch.float8_e4m3fn", "float8_e4m3fn"
_NVFP4 = "nvfp4-pack-quantized"
_LAYOUTS = "int-quantized", "pack-quantized", "float-quantized", _NVFP4


def create_reader(config: dict[str, Any]) -> _MatrixReader:
    _refuse_unknown_parts(config)
    layout = require(config, "format", *_LAYOUTS, "mixed-precision")
    schemes = read_object(config, "config_groups")
    if not schemes:
        raise EngineError("quantization_config has no config_groups")
    if layout != "mixed-precision" and len(schemes) > 1:
        raise EngineError(f"quantization_config: {len(schemes)} config_groups; with format {layout!r} there is 1")
    groups = []
    for group in schemes:
        scheme, where = read_object(schemes, group, "config_groups."), f"config_groups.{group}."
        fixed: dict[str, tuple[Any, ...]] = {} if layout == "mixed-precision" else {"format": (layout,)}
        known = {"targets", "weights", "input_activations"} | ({"format"} if layout == "mixed-precision" else set())
        refuse_unknown(scheme, known, fixed, where=where)
        holder = scheme if layout == "mixed-precision" else config
        groups.append((scheme.get("targets") or [], _create_scheme_reader(scheme, holder, where)))
    if len(groups) == 1:
        return groups[0][1]

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        return min(groups, key=lambda group: _match_rank(group[0], name))[1](weights, name, rows, columns)

    return read


def _refuse_unknown_parts(config: dict[str, Any]) -> None:
    """Raise ``EngineError`` for a part that changes what is computed beside the weights, such as a rotation."""
    parts = {"transform_config": "config_groups", "sparsity_config": "format"}
    refuse_unknown(config, _KNOWN | parts.keys())
    for part, field in parts.items():
        value = read_object(config, part)
        if value.get(field) not in (None, {}, "dense"):
            raise EngineError(
                f"quantization_config: {part}.{field} is {value[field]!r:.120}; supported: no {part}, or an empty one"
            )


def _match_rank(targets: list[str], name: str) -> int:
    """Return how specifically a group targets a module: 0 by name, 1 by a pattern, 2 by its class, 3 not at all."""
    if name in targets:
        return 0
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    if any(re.match(pattern, name) for pattern in patterns):
        return 1
    return 2 if "Linear" in targets else 3


def _create_scheme_reader(scheme: dict[str, Any], config: dict[str, Any], where: str) -> _MatrixReader:
    """Return the reader of a group's matrices. ``config`` has the format; ``where``: the group's path."""
    layout = require(config, "format", *_LAYOUTS)
    kind = "float" if layout in ("float-quantized", _NVFP4) else "int"
    dtypes = _FLOAT8_DTYPES if layout == _NVFP4 else _SCALE_DTYPES
    arguments = _Arguments(read_object(scheme, "weights", where), f"{where}weights.", kind, dtypes)
    arguments.require("dynamic", False, default=False)
    if layout == _NVFP4:
        # Activations stay as they are, whatever the group says of them.
        arguments.require("num_bits", 4)
        arguments.require("symmetric", True, default=True)
        arguments.require("strategy", "tensor_group")
        arguments.require("group_size", NVFP4_GROUP)
        return _read_nvfp4
    activations = None
    if scheme.get("input_activations") is not None:
        if layout == "pack-quantized":
            raise EngineError(
                f"quantization_config: {where}input_activations is set; supported with pack-quantized: null, since "
                "activations are not rounded"
            )
        read = read_object(scheme, "input_activations", where)
        activations = _Arguments(read, f"{where}input_activations.", kind)
        activations.require("num_bits", 8)
        activations.require("dynamic", True)
        activations.require("symmetric", True, default=True)
    if layout == "pack-quantized":
        return _create_packed_reader(arguments)
    arguments.require("num_bits", 8)
    arguments.require("symmetric", True, default=True)
    if layout == "int-quantized":
        arguments.require("strategy", "channel")
        if activations is not None:
            activations.require("strategy", "token")
        return partial(_read_int8, rounds_activations=activations is not None)
    block = None
    if arguments.require("strategy", "channel", "tensor", "block") == "block":
        block = fp8.require_block_size(arguments.fields, "block_structure")
    if activations is not None and activations.require("strategy", "group" if block else "token") == "group":
        activations.require("group_size", fp8.BLOCK)
    return partial(_read_float8, block=block, rounds_activations=activations is not None)


def _create_packed_reader(arguments: _Arguments) -> _MatrixReader:
    bits = arguments.require("num_bits", 4, 8)
    strategy = arguments.require("strategy", "group", "channel")
    symmetric = arguments.require("symmetric", True, False, default=True)
    order = arguments.require("actorder", None, False, True, "group", "dynamic", "weight", "static", default=None)
    size = int(arguments.fields["group_size"]) if strategy == "group" else -1
    # Only these reorder the columns; the others keep the groups together.
    has_order = order in (True, "group", "dynamic") and strategy == "group"
    return partial(_read_packed, bits=bits, size=size, symmetric=symmetric, has_order=has_order)


class _Arguments:
    """The fields of ``weights`` or ``input_activations`` in a group."""

    def __init__(
        self, fields: dict[str, Any], where: str, kind: str, scale_dtypes: tuple[str, ...] = _SCALE_DTYPES
    ) -> None:
        """Raises ``EngineError`` for a field that is not known, or a ``type`` other than ``kind``."""
        self.fields, self._where = fields, where
        refuse_unknown(fields, _ARGUMENTS, {"scale_dtype": scale_dtypes}, where=where)
        self.require("type", kind, default=kind)

    def require(self, name: str, *allowed: Any, **default: Any) -> Any:
        value = self.fields.get(name, default.get("default"))
        return require({f"{self._where}{name}": value}, f"{self._where}{name}", *allowed)


def list_gpu_formats(config: dict[str, Any]) -> list[GpuFormat]:
    """Return the formats that a GPU must have kernels for, and not every GPU has."""
    groups = config["config_groups"].values()
    layouts = [(group if config["format"] == "mixed-precision" else config)["format"] for group in groups]
    return [fp8.GPU_FORMAT] if "float-quantized" in layouts else []


def build_config(bits: int, size: int | None, skipped: list[str], *, w8a8_module: str | None = None) -> dict[str, Any]:
    """Return the ``quantization_config`` for tensors of ``pack_matrix``.

    ``size``: columns of a group of symmetric weights; ``None``: W8A8.
    ``skipped``: modules that are not quantised. ``w8a8_module``: one that is W8A8, whatever the others are.
    """
    groups = [_build_group(["Linear"], bits, size)]
    if w8a8_module is not None and size is not None:
        groups.append(_build_group([w8a8_module], 8, None))
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": skipped,
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
    }


def _build_group(targets: list[str], bits: int, size: int | None) -> dict[str, Any]:
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


def pack_matrix(name: str, matrix: Int8Matrix | GroupedMatrix) -> dict[str, Tensor]:
    """Return the tensors of a matrix. Groups must be symmetric, of consecutive columns."""
    if isinstance(matrix, Int8Matrix):
        return {f"{name}.weight": matrix.codes, f"{name}.weight_scale": matrix.scales[:, None].contiguous()}
    return {
        f"{name}.weight_packed": pack(matrix.codes, matrix.bits),
        f"{name}.weight_scale": matrix.scales,
        f"{name}.weight_shape": torch.tensor(matrix.codes.shape),
    }


def _read_packed(
    weights: Weights, name: str, rows: int, columns: int, *, bits: int, size: int, symmetric: bool, has_order: bool
) -> Matrix:
    if not weights.has(f"{name}.weight_packed"):
        return weights.take_matrix(name, rows, columns)
    groups = count_groups(name, columns, size)
    words = weights.take_raw(f"{name}.weight_packed", torch.int32, rows, num_words(columns, bits))
    scales = weights.take_raw(f"{name}.weight_scale", None, rows, groups)
    shape = weights.take_raw(f"{name}.weight_shape", None, 2).tolist()
    if shape != [rows, columns]:
        raise EngineError(f"{name!r} is corrupt: weight_shape is {shape}, config.json says {[rows, columns]}")
    if symmetric:
        zeros = torch.full((rows, groups), float(1 << (bits - 1)))
    else:
        packed = weights.take_raw(f"{name}.weight_zero_point", torch.int32, num_words(rows, bits), groups)
        zeros = unpack(packed.T.contiguous(), bits, rows).T.float().contiguous()
    group_of = None
    if weights.has(f"{name}.weight_g_idx"):
        group_of = weights.take_raw(f"{name}.weight_g_idx", None, columns).long()
        if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
            raise EngineError(f"{name!r} is corrupt: weight_g_idx goes beyond its {groups} groups")
    elif has_order:
        raise EngineError(f"{name!r} lacks weight_g_idx, which actorder asks for: the order of its columns is unknown")
    weights.count(rows * columns)
    return GroupedMatrix(
        unpack(words, bits, columns), require_finite(name, scales), zeros=zeros, bits=bits, group_of=group_of
    )


def _read_int8(weights: Weights, name: str, rows: int, columns: int, *, rounds_activations: bool) -> Matrix:
    if not weights.has(f"{name}.weight_scale"):
        return weights.take_matrix(name, rows, columns)
    codes = weights.take_raw(f"{name}.weight", torch.int8, rows, columns)
    scales = require_finite(name, weights.take_raw(f"{name}.weight_scale", None, rows, 1))
    weights.count(rows * columns)
    if rounds_activations:
        return Int8Matrix(codes, scales.flatten())
    middle = 1 << 7
    return GroupedMatrix((codes.to(torch.int16) + middle).to(torch.uint8), scales, torch.full_like(scales, middle), 8)


def _read_float8(
    weights: Weights, name: str, rows: int, columns: int, *, block: list[int] | None, rounds_activations: bool
) -> Matrix:
    scale = f"{name}.weight_scale"
    if not weights.has(scale):
        return weights.take_matrix(name, rows, columns)
    return fp8.read_float8(
        weights, name, rows, columns, scale=scale, block=block, rounds_activations=rounds_activations
    )


def _read_nvfp4(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
    weights.drop(f"{name}.input_global_scale")
    if not weights.has(f"{name}.weight_packed"):
        return weights.take_matrix(name, rows, columns)
    divisor = require_finite(name, weights.take_raw(f"{name}.weight_global_scale", torch.float32))
    if not bool((divisor > 0).all()):
        raise EngineError(f"{name!r} is corrupt: its weight_global_scale is {divisor.tolist()}")
    return nvfp4.read_blocks(weights, name, rows, columns, packed="weight_packed", whole=1 / divisor)
