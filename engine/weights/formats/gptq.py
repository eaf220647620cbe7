"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

``NAME.qweight`` int32 ``[in * bits / 32, out]``, packed down the columns; ``NAME.qzeros`` int32 ``[groups, out * bits /
32]``; ``NAME.scales`` float16 ``[groups, out]``; ``NAME.g_idx`` int32 ``[in]``, the group of each column. The older
``checkpoint_format`` "gptq" stores each zero minus one, "gptq_v2" stores it as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats.checks import count_groups, read_object, refuse_unknown, require, require_finite
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrix import Matrix
from engine.weights.packing import num_words, pack, unpack
from engine.weights.safetensors import Weights

_KNOWN = {
    *("quant_method", "method", "bits", "group_size", "checkpoint_format", "format", "desc_act", "dynamic"),
    # The tensors of each matrix say whether it is quantised, and have its zeros.
    *("sym", "lm_head", "modules_to_not_convert", "modules_in_block_to_quantize", "block_name_to_quantize"),
    # How the file was made, and by which kernels others compute it.
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware", "hyb_act", "mse"),
    *("dataset", "tokenizer", "batch_size", "max_input_length", "model_seqlen", "cache_block_outputs", "pad_token_id"),
    *("module_name_preceding_first_block", "model_name_or_path", "model_file_base_name", "meta", "quantizer"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend", "device", "pack_impl"),
    *("provider", "autoround_version", "iters", "nsamples", "seqlen", "lr", "minmax_lr", "scale_dtype"),
    *("enable_minmax_tuning", "enable_quanted_input", "low_gpu_mem_usage", "gradient_accumulate_steps"),
}
_FIXED: dict[str, tuple[Any, ...]] = {"pack_dtype": ("int32",), "data_type": ("int",), "act_bits": (16, 32)}
_FORMATS = ("gptq", "gptq_v2")


def create_reader(config: dict[str, Any]) -> Callable[[Weights, str, int, int], Matrix]:
    refuse_unknown(config, _KNOWN, _FIXED)
    default_bits = require(config, "bits", 4, 8)
    version = require({"format": "gptq"} | config, "format", *_FORMATS)
    version = require({"checkpoint_format": version} | config, "checkpoint_format", *_FORMATS)
    default_size, zero_offset = int(config.get("group_size", -1)), 1 if version == "gptq" else 0
    rules = _read_rules(config)

    def read(weights: Weights, name: str, rows: int, columns: int) -> Matrix:
        if not weights.has(f"{name}.qweight"):
            return weights.take_matrix(name, rows, columns)
        rule = next((fields for pattern, fields in rules if pattern.match(name)), {})
        bits, size = int(rule.get("bits", default_bits)), int(rule.get("group_size", default_size))
        if rule.get("desc_act", config.get("desc_act")) and size != -1 and not weights.has(f"{name}.g_idx"):
            raise EngineError(f"{name!r} lacks g_idx, which desc_act asks for: the order of its columns is unknown")
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
            zeros=(unpack(zeros, bits, rows).float() + zero_offset).T.contiguous(),
            bits=bits,
            group_of=group_of,
        )

    return read


def _read_rules(config: dict[str, Any]) -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Return GPTQModel's rules for the modules whose names match, of which the first counts.

    A rule that begins with ``-:`` leaves modules as they are, which their tensors say, too.
    """
    rules = []
    for pattern in read_object(config, "dynamic"):
        where = f"dynamic[{pattern!r}]."
        fields = read_object(config["dynamic"], pattern)
        refuse_unknown(fields, {"bits", "group_size", "sym", "desc_act", "damp_percent", "mse"}, where=where)
        if "bits" in fields:
            require({f"{where}bits": fields["bits"]}, f"{where}bits", 4, 8)
        try:
            rules.append((re.compile(re.sub(r"^[-+]:", "", pattern)), fields))
        except re.error as error:
            raise EngineError(f"quantization_config: {where[:-1]} is no regular expression: {error}") from None
    return rules


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
