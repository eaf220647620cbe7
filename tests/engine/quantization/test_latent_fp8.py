"""DeepSeek-V3 in 8-bit floats with blocks of 128 by 128, as it is published, computed on latents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.core.check import check_model
from engine.weights.formats import fp8
from tests.engine.conftest import MODELS, save_random_model
from tests.engine.exact import assert_equal_logits
from tests.engine.models.test_models import random_tokens
from tests.long import mostly_long
from tests.seeds import shift

PUBLISHED = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
SIZES = {"hidden_size": 160, "intermediate_size": 144, "kv_lora_rank": 136, "q_lora_rank": 48}
"""Several blocks in a matrix, of which the last ones are smaller."""


def dequantize(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return the weights by the format's definition."""
    codes, scales = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"]
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * spread[: codes.shape[0], : codes.shape[1]]


def write_models(folder: Path, seed: int) -> tuple[Path, Path]:
    """Return the folders of a model in 8 bits, and of the same model in float32."""
    ours, plain = folder / "fp8", folder / "plain"
    class_name, options = MODELS["deepseek_v3"]
    for made in (ours, plain):
        made.mkdir()
        save_random_model(class_name, options | SIZES, made)
    tensors, packed = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(shift(seed))
    for name, tensor in list(tensors.items()):
        if name.endswith("weight") and "_proj" in name:
            stem = name.removesuffix(".weight")
            packed |= fp8.pack_matrix(stem, torch.randn(tensor.shape, generator=generator) * 0.15)
            tensors[name] = dequantize(packed, stem)
        else:
            packed[name] = tensor
    # The layer that predicts several tokens is quantised, too, and not read.
    behind = f"model.layers.{len({name.split('.')[2] for name in tensors if name.startswith('model.layers.')})}"
    packed |= fp8.pack_matrix(f"{behind}.self_attn.o_proj", torch.randn(160, 130, generator=generator))
    save_file(packed, ours / "model.safetensors", {"format": "pt"})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    fields = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(fields | {"quantization_config": PUBLISHED}))
    return ours, plain


@pytest.mark.parametrize("seed", mostly_long(range(20), every=20))
def test_logits_are_those_of_the_dequantised_model(seed: int, tmp_path: Path) -> None:
    ours, plain = write_models(tmp_path, seed)
    tokens = random_tokens(50, seed)
    logits = compute_text_logits(open_model(ours), tokens)
    assert torch.equal(logits, compute_text_logits(open_model(plain), tokens))
    assert_equal_logits(logits, plain, tokens)


def test_the_check_compares_it_with_transformers(tmp_path: Path) -> None:
    ours, _ = write_models(tmp_path, 0)
    assert check_model(ours, lambda done, total, next_part: None).is_close
