"""Every field of a ``quantization_config`` is read, known to have no influence, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config import read_raw_config
from engine.models.load import load_model
from engine.protocol.types import EngineError
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.formats.registry import create_reader
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrix import dense
from tests.engine.conftest import save_random_model
from tests.engine.quantization.test_formats import gptq_file, packed_file, read, scheme

GPTQ = gptq.build_config(4, 32, act_order=False)
AWQ = awq.build_config(32, [])
FP8 = fp8.build_config([])
NF4 = bitsandbytes.build_config([])
PACKED = compressed_tensors.build_config(4, 32, [])
W8A8 = compressed_tensors.build_config(8, None, [])
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
HADAMARD = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    (PACKED | {"transform_config": HADAMARD}, "transform_config.config_groups is {'R1'"),
    (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
    (PACKED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme is {'num_bits': 8"),
    (PACKED | {"moe_sparsity_config": {"keep": 4}}, "moe_sparsity_config is {'keep': 4}"),
    (PACKED | {"rotation": "random"}, "rotation is 'random'; supported: no such field, or an empty one"),
    (PACKED | {"transform_config": "x"}, "transform_config is 'x'; it must be an object"),
    (scheme("pack-quantized", INT4, TOKENS), "input_activations is set; supported with pack-quantized: null"),
    (scheme("pack-quantized", INT4 | {"type": "float"}, None), "weights.type is 'float'; supported: 'int'"),
    (scheme("pack-quantized", INT4 | {"dynamic": True}, None), "weights.dynamic is True; supported: False"),
    (scheme("pack-quantized", INT4 | {"scale_dtype": "torch.float8_e4m3fn"}, None), "weights.scale_dtype is"),
    (scheme("pack-quantized", INT4 | {"rounding": "odd"}, None), "weights.rounding is 'odd'"),
    (scheme("int-quantized", INT8, TOKENS | {"symmetric": False}), "input_activations.symmetric is False"),
    (scheme("int-quantized", INT8, TOKENS | {"num_bits": 4}), "input_activations.num_bits is 4; supported: 8"),
    (scheme("int-quantized", INT8 | {"symmetric": False}, TOKENS), "weights.symmetric is False; supported: True"),
    (scheme("float-quantized", FLOAT8, TOKENS), "input_activations.type is 'int'; supported: 'float'"),
    (scheme("float-quantized", FLOAT8, TOKENS | {"type": "float", "strategy": "tensor"}), "strategy is 'tensor'"),
    (scheme("float-quantized", FLOAT8 | {"symmetric": False}, None), "weights.symmetric is False"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 3}}}, "dynamic['+:.*down.*'].bits is 3; supported: 4, 8"),
    (GPTQ | {"dynamic": {".*": {"rotation": "x"}}}, "dynamic['.*'].rotation is 'x'"),
    (GPTQ | {"dynamic": {"(": {}}}, "dynamic['('] is no regular expression"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; supported: 'int32'"),
    (GPTQ | {"rotation": "hadamard"}, "rotation is 'hadamard'"),
    (GPTQ | {"adapter": {"rank": 8}}, "adapter is {'rank': 8}"),
    (GPTQ | {"act_bits": 8}, "act_bits is 8; supported: 16, 32"),
    ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format is 'marlin'; supported: 'gptq', 'gptq_v2'"),
    (AWQ | {"format": "gemv"}, "format is 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point is False; supported: True"),
    (AWQ | {"desc_act": True}, "desc_act is True"),
    (FP8 | {"scale_fmt": "e5m0"}, "scale_fmt is 'e5m0'; supported: 'float', 'ue8m0'"),
    (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; supported: 'e4m3'"),
    (FP8 | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    (FP8 | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is 'FP8'"),
    (NF4 | {"load_in_8bit": True}, "load_in_8bit is True"),
    (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'; supported: 'uint8'"),
    (NF4 | {"target_modules_rotation": 1}, "target_modules_rotation is 1"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_field_that_asks_for_what_is_not_computed_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        create_reader(config)


ACCEPTED: list[dict[str, Any]] = [
    # As llm-compressor writes them.
    PACKED | {"version": "0.9.0", "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}},
    PACKED | {"sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}, "ignore": ["lm_head"]},
    PACKED | {"quantization_status": "compressed", "global_compression_ratio": 1.5},
    scheme("pack-quantized", INT4 | {"actorder": "weight", "observer": "mse", "observer_kwargs": {"n": 1}}, None),
    scheme("pack-quantized", INT4 | {"block_structure": None, "zp_dtype": None, "scale_dtype": None}, None),
    W8A8 | {"version": "0.8.1"},
    # GPTQModel, AutoGPTQ, transformers and AutoRound.
    GPTQ | {"format": "gptq", "meta": {"quantizer": ["gptqmodel:2.2"], "damp_percent": 0.05}, "dynamic": None},
    GPTQ | {"damp_percent": 0.1, "static_groups": False, "true_sequential": True, "model_file_base_name": "model"},
    GPTQ | {"dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 8, "group_size": 64}}, "act_bits": 16},
    GPTQ | {"is_marlin_format": False, "exllama_config": {"version": 1}, "use_exllama": True, "batch_size": 1},
    AWQ | {"do_fuse": False, "backend": "auto", "fuse_max_seq_len": None, "exllama_config": None, "format": "gemm"},
    FP8 | {"dequantize": False, "scale_fmt": "float", "ignored_layers": ["lm_head"]},
    FP8 | {"scale_fmt": "ue8m0"},
    NF4 | {"_load_in_4bit": True, "_load_in_8bit": False, "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False},
]


@pytest.mark.parametrize("config", ACCEPTED)
def test_fields_of_public_checkpoints_without_influence_are_accepted(config: dict[str, Any]) -> None:
    create_reader(config)


def test_a_rotated_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    save_random_model("Qwen3ForCausalLM", {"hidden_size": 96, "intermediate_size": 128}, tmp_path / "model")
    options = create_options("rtn", 4, 32, None)
    quantize(tmp_path / "model", tmp_path / "packed", options, lambda done, total, next_part: None)
    path = tmp_path / "packed" / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["transform_config"] = HADAMARD
    path.write_text(json.dumps(fields))
    for strict in (True, False):
        with pytest.raises(EngineError, match="transform_config"):
            load_model(tmp_path / "packed", lambda config: config.max_context, strict_config=strict)
    assert read_raw_config(tmp_path / "packed").fields["quantization_config"]


def test_rules_of_gptqmodel_give_modules_their_own_bits(tmp_path: Path) -> None:
    """The first rule that matches from the start of a name counts."""
    config, tensors, expected = gptq_file(8, "gptq", shuffled=False)
    rules = {"-:other": {}, "+:m": {"bits": 8}, "m": {"bits": 4}}
    assert torch.equal(dense(read(tmp_path, config | {"bits": 4, "dynamic": rules}, tensors)), expected)


def test_the_newer_name_of_the_format_is_read(tmp_path: Path) -> None:
    config, tensors, expected = gptq_file(4, "gptq_v2", shuffled=False)
    renamed = {name: value for name, value in config.items() if name != "checkpoint_format"} | {"format": "gptq_v2"}
    assert torch.equal(dense(read(tmp_path, renamed, tensors)), expected)


def test_columns_whose_order_is_unknown_are_refused(tmp_path: Path) -> None:
    config, tensors, _ = gptq_file(4, "gptq", shuffled=True)
    tensors.pop("m.g_idx")
    with pytest.raises(EngineError, match="'m' lacks g_idx, which desc_act asks for"):
        read(tmp_path, config | {"desc_act": True}, tensors)
    packed, packed_tensors, _ = packed_file(symmetric=True)
    packed_tensors.pop("m.weight_g_idx", None)
    weights = packed["config_groups"]["group_0" if "group_0" in packed["config_groups"] else "a"]["weights"]
    weights["actorder"] = "group"
    (tmp_path / "packed").mkdir()
    with pytest.raises(EngineError, match="'m' lacks weight_g_idx, which actorder asks for"):
        read(tmp_path / "packed", packed, packed_tensors)
    weights["actorder"] = "weight"
    (tmp_path / "weight").mkdir()
    assert isinstance(read(tmp_path / "weight", packed, packed_tensors), GroupedMatrix)
