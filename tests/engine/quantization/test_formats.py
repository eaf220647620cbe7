"""Public checkpoint layouts, built number by number from their documentation, are read correctly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.protocol.types import EngineError
from engine.weights.formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from engine.weights.formats.registry import create_reader
from engine.weights.matrices.float8 import Float8Matrix
from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.int8 import Int8Matrix
from engine.weights.matrix import Matrix, dense
from engine.weights.safetensors import Weights
from kernels.linear.nf4 import CODES
from tests.seeds import shift

ROWS, COLUMNS, GROUP = 16, 64, 32
_RANDOM = np.random.default_rng(shift(3))
SCALES = _RANDOM.uniform(0.5, 2.0, (ROWS, COLUMNS // GROUP)).astype(np.float16).astype(np.float32)


def group_matrix(codes: np.ndarray, zeros: np.ndarray, group_of: np.ndarray | None = None) -> Tensor:
    """Compute the dequantized matrix by its definition, one number at a time."""
    out = np.zeros(codes.shape, np.float32)
    for row, column in np.ndindex(*codes.shape):
        group = column // GROUP if group_of is None else group_of[column]
        out[row, column] = (codes[row, column] - zeros[row, group]) * SCALES[row, group]
    return torch.from_numpy(out)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last axis; ``order[i]`` is the index of the number in the i-th lowest bits."""
    each = 32 // bits
    out = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    for row, column in np.ndindex(*out.shape):
        for place in range(each):
            value = int(codes[row, column * each + (place if order is None else order[place])])
            out[row, column] |= np.uint32(value << (bits * place))
    return torch.from_numpy(out.view(np.int32).copy())


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Matrix:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    weights = Weights(folder)
    matrix = create_reader(config)(weights, "m", ROWS, COLUMNS)
    weights.finish()
    assert weights.parameters == ROWS * COLUMNS
    return matrix


def gptq_file(bits: int, version: str, *, shuffled: bool) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    codes = _RANDOM.integers(0, 1 << bits, (ROWS, COLUMNS))
    zeros = _RANDOM.integers(1, 1 << bits, (ROWS, COLUMNS // GROUP))
    group_of = np.arange(COLUMNS) // GROUP
    if shuffled:
        _RANDOM.shuffle(group_of)
    tensors = {
        "m.qweight": words(codes, bits).T,
        "m.scales": torch.from_numpy(SCALES.T.copy()).half(),
        "m.g_idx": torch.from_numpy(group_of).int(),
        "m.qzeros": words((zeros - (version == "gptq")).T, bits),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    return config, tensors, group_matrix(codes, zeros, group_of)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq_is_read(tmp_path: Path, bits: int, version: str, shuffled: bool) -> None:
    config, tensors, expected = gptq_file(bits, version, shuffled=shuffled)
    matrix = read(tmp_path, config, tensors)
    assert isinstance(matrix, GroupedMatrix)
    assert (matrix.group_of is not None) == shuffled
    assert torch.equal(matrix.dense(), expected)


def awq_file() -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    codes = _RANDOM.integers(0, 16, (ROWS, COLUMNS))
    zeros = _RANDOM.integers(0, 16, (ROWS, COLUMNS // GROUP))
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "m.qweight": words(codes.T, 4, order),
        "m.qzeros": words(zeros.T, 4, order),
        "m.scales": torch.from_numpy(SCALES.T.copy()).half(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return config, tensors, group_matrix(codes, zeros)


def test_awq_is_read(tmp_path: Path) -> None:
    config, tensors, expected = awq_file()
    assert torch.equal(dense(read(tmp_path, config, tensors)), expected)


def scheme(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def packed_file(
    bits: int = 4, *, symmetric: bool, shuffled: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    codes, most = _RANDOM.integers(0, 1 << bits, (ROWS, COLUMNS)), 1 << bits
    zeros = np.full((ROWS, COLUMNS // GROUP), most // 2)
    group_of = np.arange(COLUMNS) // GROUP
    if shuffled:
        _RANDOM.shuffle(group_of)
    if not symmetric:
        zeros = _RANDOM.integers(0, most, zeros.shape)
    tensors = {
        "m.weight_packed": words(codes, bits),
        "m.weight_scale": torch.from_numpy(SCALES),
        "m.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if not symmetric:
        tensors["m.weight_zero_point"] = words(zeros.T, bits).T
    if shuffled:
        tensors["m.weight_g_idx"] = torch.from_numpy(group_of).int()
    about = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    return scheme("pack-quantized", about, None), tensors, group_matrix(codes, zeros, group_of)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
def test_compressed_tensors_packed_is_read(tmp_path: Path, bits: int, symmetric: bool, shuffled: bool) -> None:
    config, tensors, expected = packed_file(bits, symmetric=symmetric, shuffled=shuffled)
    assert torch.equal(dense(read(tmp_path, config, tensors)), expected)


def test_compressed_tensors_packed_with_a_scale_for_each_row_is_read(tmp_path: Path) -> None:
    codes = _RANDOM.integers(0, 16, (ROWS, COLUMNS))
    tensors = {
        "m.weight_packed": words(codes, 4),
        "m.weight_scale": torch.from_numpy(SCALES[:, :1].copy()),
        "m.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    config = scheme("pack-quantized", {"num_bits": 4, "symmetric": True, "strategy": "channel"}, None)
    expected = torch.from_numpy((codes - 8).astype(np.float32) * SCALES[:, :1])
    assert torch.equal(dense(read(tmp_path, config, tensors)), expected)


def test_compressed_tensors_targets_can_have_different_formats(tmp_path: Path) -> None:
    """A module's name has precedence over a pattern, and a pattern over the class."""
    packed, tensors, expected = packed_file(symmetric=True)
    tensors |= {"head.weight": torch.ones(ROWS, COLUMNS, dtype=torch.int8), "head.weight_scale": torch.ones(ROWS, 1)}
    tensors |= {"layers.1.proj.weight": torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)}
    tensors |= {
        "layers.1.proj.weight_scale": torch.full((ROWS, 1), 2.0),
        "left.weight": torch.full((ROWS, COLUMNS), 3.0),
    }
    rows = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    groups = [
        packed["config_groups"]["group_0"] | {"format": "pack-quantized"},
        {"targets": ["head"], "weights": rows, "format": "int-quantized"},
        {"targets": ["re:.*head|layers.1.*"], "weights": rows, "format": "float-quantized"},
    ]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for order in (groups, groups[::-1]):
        config = packed | {"format": "mixed-precision", "config_groups": dict(zip("abc", order, strict=True))}
        weights, read_one = Weights(tmp_path), create_reader(config)
        assert torch.equal(dense(read_one(weights, "m", ROWS, COLUMNS)), expected)
        for name, value in (("head", 1.0), ("layers.1.proj", 2.0), ("left", 3.0)):
            assert torch.equal(dense(read_one(weights, name, ROWS, COLUMNS)), torch.full((ROWS, COLUMNS), value))


@pytest.mark.parametrize("dynamic", [True, False])
def test_compressed_tensors_int8_rounds_activations_only_if_configured(tmp_path: Path, dynamic: bool) -> None:
    codes = torch.from_numpy(_RANDOM.integers(-127, 128, (ROWS, COLUMNS))).to(torch.int8)
    scales = torch.from_numpy(SCALES[:, :1].copy())
    about = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "dynamic": True, "strategy": "token"} if dynamic else None
    matrix = read(tmp_path, scheme("int-quantized", about, activations), {"m.weight": codes, "m.weight_scale": scales})
    assert isinstance(matrix, Int8Matrix) == dynamic
    assert torch.equal(dense(matrix), codes.float() * scales)


@pytest.mark.parametrize("per_channel", [True, False])
def test_compressed_tensors_fp8_is_read(tmp_path: Path, per_channel: bool) -> None:
    codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scales = torch.rand(ROWS, 1) if per_channel else torch.rand(1)
    about = {"num_bits": 8, "type": "float", "strategy": "channel" if per_channel else "tensor"}
    config = scheme("float-quantized", about, {"num_bits": 8, "dynamic": True, "strategy": "token"})
    matrix = read(tmp_path, config, {"m.weight": codes, "m.weight_scale": scales})
    assert torch.equal(dense(matrix), codes.float() * scales)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compressed_tensors_fp8_in_blocks_is_read(tmp_path: Path, dynamic: bool) -> None:
    _, tensors, expected = fp8_file()
    about = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [5, 40]}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128}
    config = scheme("float-quantized", about, activations if dynamic else None)
    tensors = {"m.weight": tensors["m.weight"], "m.weight_scale": tensors["m.weight_scale_inv"]}
    matrix = read(tmp_path, config, tensors)
    assert isinstance(matrix, Float8Matrix)
    assert matrix.rounds_activations == dynamic
    assert torch.equal(dense(matrix), expected)


@pytest.mark.parametrize("name", ["m.weight_scale", "m.weight_scale_inv"])
def test_fp8_with_one_scale_is_read(tmp_path: Path, name: str) -> None:
    codes, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.rand(())
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    assert torch.equal(dense(read(tmp_path, config, {"m.weight": codes, name: scale})), codes.float() * scale)


def fp8_file() -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return a file with blocks of 5 by 40, which divide neither side."""
    codes, scales = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.rand(4, 2)
    expected = torch.stack(
        [
            torch.stack([codes[row, column].float() * scales[row // 5, column // 40] for column in range(COLUMNS)])
            for row in range(ROWS)
        ]
    )
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [5, 40]}
    return config, {"m.weight": codes, "m.weight_scale_inv": scales}, expected


def test_fp8_in_blocks_is_read(tmp_path: Path) -> None:
    config, tensors, expected = fp8_file()
    assert torch.equal(dense(read(tmp_path, config, tensors)), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_with_powers_of_two_as_scales_is_read_as_they_are_stored(tmp_path: Path, stored: torch.dtype) -> None:
    """DeepSeek-V3.1 stores them as float32, later ones their exponents in a byte."""
    config, tensors, _ = fp8_file()
    exponents = torch.randint(120, 132, (4, 2), dtype=torch.uint8)
    scales = 2.0 ** (exponents.float() - 127)
    by_float32 = dense(read(tmp_path, config, tensors | {"m.weight_scale_inv": scales}))
    kept = {torch.uint8: exponents, torch.float8_e8m0fnu: exponents.view(torch.float8_e8m0fnu)}.get(stored, scales)
    found = read(tmp_path, config | {"scale_fmt": "ue8m0"}, tensors | {"m.weight_scale_inv": kept})
    assert torch.equal(dense(found), by_float32)


def nf4_file(*, nested: bool) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    count, block = ROWS * COLUMNS, 64
    codes = _RANDOM.integers(0, 16, count)
    absmax = _RANDOM.uniform(1, 2, count // block).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    tensors = {
        "m.weight": torch.tensor([[int(first) * 16 + int(second)] for first, second in codes.reshape(-1, 2)]).byte(),
        "m.weight.quant_map": torch.tensor(CODES),
        "m.weight.absmax": torch.from_numpy(absmax),
    }
    if nested:
        small, levels = _RANDOM.integers(0, 256, count // block), np.linspace(-1, 1, 256, dtype=np.float32)
        absmax = levels[small] * np.float32(0.5) + np.float32(1.5)
        state |= {"nested_blocksize": 256, "nested_offset": 1.5}
        tensors |= {
            "m.weight.absmax": torch.from_numpy(small).byte(),
            "m.weight.nested_quant_map": torch.from_numpy(levels),
            "m.weight.nested_absmax": torch.tensor([0.5]),
        }
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode())).byte()
    expected = np.array([np.float32(CODES[code]) * absmax[index // block] for index, code in enumerate(codes)])
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return config, tensors, torch.from_numpy(expected.reshape(ROWS, COLUMNS))


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_read(tmp_path: Path, nested: bool) -> None:
    config, tensors, expected = nf4_file(nested=nested)
    assert torch.equal(dense(read(tmp_path, config, tensors)), expected)


def test_the_levels_of_nf4_are_the_quantiles_of_a_normal_distribution() -> None:
    """Appendix E of the paper, with scipy's quantile function."""
    from scipy.stats import norm

    ends = np.linspace(0.9677083, 0.5, 9)[:-1], np.linspace(0.9677083, 0.5, 8)[:-1]
    levels = np.sort(np.concatenate([norm.ppf(ends[0]), [0.0], -norm.ppf(ends[1])]))
    # The offset is given with seven digits, and there the slope of the quantile function is fourteen.
    np.testing.assert_allclose(CODES, levels / levels.max(), atol=14 * 5e-8, rtol=0)


def grouped(bits: int, *, symmetric: bool) -> GroupedMatrix:
    codes = torch.from_numpy(_RANDOM.integers(0, 1 << bits, (ROWS, COLUMNS))).byte()
    middle = torch.full(SCALES.shape, float(1 << (bits - 1)))
    zeros = middle if symmetric else torch.from_numpy(_RANDOM.integers(0, 1 << bits, SCALES.shape)).float()
    return GroupedMatrix(codes, torch.from_numpy(SCALES), zeros, bits)


@pytest.mark.parametrize(
    ("layout", "bits"), [("gptq", 4), ("gptq", 8), ("awq", 4), ("compressed-tensors", 4), ("compressed-tensors", 8)]
)
def test_written_weights_are_read_back_exactly(tmp_path: Path, layout: str, bits: int) -> None:
    matrix = grouped(bits, symmetric=layout != "awq")
    if layout == "gptq":
        config, tensors = gptq.build_config(bits, GROUP, act_order=False), gptq.pack_matrix("m", matrix)
    elif layout == "awq":
        config, tensors = awq.build_config(GROUP, []), awq.pack_matrix("m", matrix)
    else:
        config, tensors = (
            compressed_tensors.build_config(bits, GROUP, skipped=[]),
            compressed_tensors.pack_matrix("m", matrix),
        )
    assert torch.equal(dense(read(tmp_path, config, tensors)), matrix.dense())


@pytest.mark.parametrize("layout", [fp8, bitsandbytes])
def test_weights_rounded_to_small_floats_are_close_when_read_back(tmp_path: Path, layout: Any) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    found = dense(read(tmp_path, layout.build_config([]), layout.pack_matrix("m", weight)))
    assert (found - weight).norm() / weight.norm() < (0.04 if layout is fp8 else 0.12)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def test_a_corrupt_tensor_is_refused_with_the_sizes_that_disagree(tmp_path: Path) -> None:
    config, tensors, _ = gptq_file(4, "gptq", shuffled=False)
    packed, packed_tensors, _ = packed_file(symmetric=True)
    blocks, block_tensors, _ = fp8_file()
    nf4, nf4_tensors, _ = nf4_file(nested=False)
    wrong = {"m.g_idx": tensors["m.g_idx"] + 1}
    infinite = {"m.scales": tensors["m.scales"] * torch.inf}
    cases: list[tuple[dict[str, Any], dict[str, Tensor], str]] = [
        (config, tensors | {"m.qweight": tensors["m.qweight"][:-1]}, "(7, 16), its config.json and .* say (8, 16)"),
        (config, tensors | {"m.qzeros": tensors["m.qzeros"].long()}, "is torch.int64, .* says torch.int32"),
        (config, tensors | wrong, "groups 1 to 2, but there are 2"),
        (config, tensors | infinite, "32 of 32 scales are not finite"),
        (config, without(tensors, "m.scales"), "lacks the tensor 'm.scales'"),
        (config | {"group_size": 24}, tensors, "groups of 24 do not divide 64 columns"),
        (packed, packed_tensors | {"m.weight_shape": torch.tensor([16, 32])}, "is [16, 32], config.json says [16, 64]"),
        (blocks, block_tensors | {"m.weight_scale_inv": torch.rand(4, 1)}, "(4, 1), .* say (4, 2)"),
        (nf4, nf4_tensors | {"m.weight": nf4_tensors["m.weight"][1:]}, "(511, 1), .* say (512, 1)"),
        (nf4, nf4_tensors | {"m.weight.quant_state.bitsandbytes__nf4": torch.zeros(3).byte()}, "is corrupt"),
    ]
    for index, (about, files, message) in enumerate(cases):
        folder = tmp_path / str(index)
        folder.mkdir()
        with pytest.raises(EngineError, match=re.escape(message).replace(r"\.\*", ".*")):
            read(folder, about, files)


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quip"}, "quant_method 'quip' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "no config_groups"),
        (
            scheme("pack-quantized", {}, None) | {"config_groups": {"a": {}, "b": {}}},
            "2 config_groups; with format 'pack-",
        ),
        (scheme("mixed-precision", {"num_bits": 8}, None), "format is None"),
        (scheme("pack-quantized", {"num_bits": 2}, None), "num_bits is 2; supported: 4, 8"),
        (scheme("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "tensor"}, None), "'tensor'"),
        (scheme("float-quantized", FLOATS, {"num_bits": 8, "dynamic": False}), "dynamic is False; supported: True"),
        (scheme("float-quantized", FLOATS | {"strategy": "block"}, None), "block_structure is None"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "'static'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit is None; supported: True"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "'fp4'"),
    ],
)
def test_unsupported_quantization_settings_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        create_reader(config)
