"""NVFP4 checkpoints of compressed-tensors and of ModelOpt: exactly their weights, multiplied from 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.models import decoder
from engine.protocol.types import EngineError
from engine.weights.formats.registry import create_reader
from engine.weights.matrices.blocks import BlockMatrix
from engine.weights.matrices.nf4 import Nf4Matrix
from engine.weights.safetensors import Weights
from kernels.linear import blocks
from kernels.linear.blocks import BlockLinear
from tests.closeness import EPS
from tests.engine.conftest import save_random_model
from tests.engine.exact import exact_logits
from tests.engine.models.test_models import random_tokens
from tests.engine.quantization.models import SIZES, dense_product
from tests.long import mostly_long
from tests.seeds import shift

ACTIVATIONS = {
    **{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    **{"dynamic": "local", "observer": "static_minmax", "scale_dtype": "torch.float8_e4m3fn", "actorder": None},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "input_activations": ACTIVATIONS,
            "weights": ACTIVATIONS | {"dynamic": False, "observer": "mse", "zp_dtype": "torch.float8_e4m3fn"},
        }
    },
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def pack(weight: Tensor, layout: str, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a matrix's tensors in a layout, and the rounded weights in float64."""
    groups = weight.view(len(weight), -1, 16)
    divisor = 448 * 6 / weight.abs().max()
    scales = (groups.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
    units = scales.float() / divisor
    codes = ((groups / units[..., None])[..., None] - VALUES).abs().argmin(-1).flatten(1)
    pairs = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    exact = VALUES.double()[codes] * scales.double().repeat_interleave(16, 1) / divisor.double()
    if layout == "compressed-tensors":
        whole = {"weight_packed": pairs, "weight_global_scale": divisor.view(1), "input_global_scale": torch.ones(1)}
    else:
        whole = {"weight": pairs, "weight_scale_2": 1 / divisor, "input_scale": torch.ones(())}
    return {f"{name}.{key}": value for key, value in (whole | {"weight_scale": scales}).items()}, exact


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], rows: int, columns: int) -> BlockMatrix:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    weights = Weights(folder)
    matrix = create_reader(config)(weights, "m", rows, columns)
    weights.finish()
    assert isinstance(matrix, BlockMatrix)
    return matrix


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("config", [COMPRESSED, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_weights_are_exact_up_to_the_rounding_of_float32(config: dict[str, Any], seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(shift(seed))
    weight = torch.randn(24, 128, generator=generator)
    tensors, exact = pack(weight, config["quant_method"], "m")
    matrix = read(tmp_path, config, tensors, 24, 128)
    # The number of the matrix is rounded once, and its product with the others.
    torch.testing.assert_close(matrix.dense().double(), exact, rtol=2 * EPS, atol=0)
    on_gpu = matrix.to_gpu_matrix()
    assert isinstance(on_gpu, Nf4Matrix)
    torch.testing.assert_close(on_gpu.dense().double(), exact, rtol=2 * EPS, atol=0)
    if config is COMPRESSED:
        scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
        own = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
        theirs = NVFP4PackedCompressor.decompress(own, scheme)["weight"]
        # Theirs are bfloat16: a quotient and a product, of which either errs by half a unit in the last place.
        torch.testing.assert_close(theirs.double(), exact, rtol=1.01 * 2**-8, atol=0)


def write_models(folder: Path, config: dict[str, Any], seed: int) -> tuple[Path, Path]:
    """Return the folders of a model in NVFP4 and of the same model in float64, which holds the exact weights."""
    ours, plain = folder / "nvfp4", folder / "plain"
    for made in (ours, plain):
        made.mkdir()
        save_random_model("Qwen3ForCausalLM", SIZES, made)
    tensors, packed = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(shift(seed))
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            weight = torch.randn(tensor.shape, generator=generator) * 0.1
            of_matrix, tensors[name] = pack(weight, config["quant_method"], name.removesuffix(".weight"))
            packed |= of_matrix
            if config is MODELOPT and name.endswith(("k_proj.weight", "v_proj.weight")):
                packed[name.replace("_proj.weight", f"_proj.{name[-13]}_scale")] = torch.ones(())
        else:
            packed[name] = tensor
    for made, chosen in ((ours, packed), (plain, tensors)):
        save_file(chosen, made / "model.safetensors", {"format": "pt"})
    fields = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return ours, plain


@pytest.mark.parametrize("seed", mostly_long(range(20), every=10))
@pytest.mark.parametrize("config", [COMPRESSED, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_logits_are_those_of_the_exact_weights(
    config: dict[str, Any], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the 4 bits as close as activations allow that are rounded to 8 bits."""
    from benchmarks.gguf.fidelity import RoundedGroups

    ours, plain = write_models(tmp_path, config, seed)
    tokens = random_tokens(60, seed)
    logits, exact = compute_text_logits(open_model(ours), tokens), exact_logits(plain, tokens)
    with RoundedGroups():
        rounding = float((exact_logits(plain, tokens) - exact).abs().max())
    assert 0 < float((logits - exact).abs().max()) < 2 * rounding
    monkeypatch.setattr(decoder, "create_product", dense_product)
    assert float((compute_text_logits(open_model(ours), tokens) - exact).abs().max()) < rounding / 100


@pytest.mark.skipif(not blocks.is_supported(), reason="this processor lacks products of bytes")
def test_matrices_with_scales_of_their_own_are_one_product(tmp_path: Path) -> None:
    ours, _ = write_models(tmp_path, COMPRESSED, 0)
    model: Any = open_model(ours)
    assert {type(product) for layer in model._layers for product in (layer.qkv, *layer.mlp.products)} == {BlockLinear}
    assert model.is_recordable


def test_an_older_modelopt_checkpoint_says_its_format_in_a_file_of_its_own(tmp_path: Path) -> None:
    ours, _ = write_models(tmp_path, MODELOPT, 0)
    expected = compute_text_logits(open_model(ours), random_tokens(20, 1))
    fields = json.loads((ours / "config.json").read_text())
    del fields["quantization_config"]
    (ours / "config.json").write_text(json.dumps(fields))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    written = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (ours / "hf_quant_config.json").write_text(json.dumps(written))
    assert torch.equal(compute_text_logits(open_model(ours), random_tokens(20, 1)), expected)
    (ours / "hf_quant_config.json").write_text('{"quantization": "NVFP4"}')
    with pytest.raises(EngineError, match=r"hf_quant_config\.json: quantization is 'NVFP4'; it must be an object"):
        open_model(ours)


def test_wrong_tensors_and_settings_are_refused(tmp_path: Path) -> None:
    tensors, _ = pack(torch.randn(24, 128), "modelopt", "m")
    packed, _ = pack(torch.randn(24, 128), "compressed-tensors", "m")
    infinite, negative = tensors["m.weight_scale"].clone(), tensors["m.weight_scale"].clone()
    infinite.view(torch.uint8)[3, 1], negative.view(torch.uint8)[3, :2] = 127, 129
    weights = COMPRESSED["config_groups"]["group_0"]["weights"]  # type: ignore[index]
    groups = COMPRESSED | {"config_groups": {"group_0": {"targets": [], "weights": weights | {"group_size": 32}}}}
    cases: list[tuple[dict[str, Any], dict[str, Tensor], int, str]] = [
        (MODELOPT, tensors | {"m.weight_scale": infinite}, 128, "1 of 192 scales are negative or not finite"),
        (MODELOPT, tensors | {"m.weight_scale": negative}, 128, "2 of 192 scales are negative or not finite"),
        (MODELOPT, tensors | {"m.weight_scale_2": torch.ones(2)}, 128, "2 numbers that scale the whole matrix, not 1"),
        (MODELOPT, tensors, 80, "80 columns in NVFP4; supported are multiples of 64"),
        (MODELOPT, tensors, 64, r"has shape \(24, 64\), .* say \(24, 32\)"),
        (COMPRESSED, packed | {"m.weight_global_scale": torch.zeros(1)}, 128, r"its weight_global_scale is \[0.0\]"),
        (MODELOPT | {"quant_algo": "FP8"}, tensors, 128, "quant_algo is 'FP8'; supported: 'NVFP4'"),
        (groups, packed, 128, "group_size is 32; supported: 16"),
    ]
    for config, chosen, columns, message in cases:
        with pytest.raises(EngineError, match=message):
            read(tmp_path, config, chosen, 24, columns)
