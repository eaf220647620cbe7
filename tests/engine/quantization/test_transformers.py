"""Checkpoints written by ``quantize`` give the same logits in transformers.

Tests need the package that transformers needs for a format. That of GPTQ and AWQ is built from source and bitsandbytes
is very large, so these tests are skipped unless the packages are installed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AwqConfig, BitsAndBytesConfig, GPTQConfig

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.models import decoder
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from tests.engine.conftest import Checkpoints, save_random_model
from tests.engine.exact import float32_share
from tests.engine.quantization.models import METHODS, SIZES, dense_product, quantised
from tests.seeds import shift

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
KIND = "Qwen2ForCausalLM"
TOKENS = random.Random(shift(0)).choices(range(3, 360), k=60)


def load(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **how).eval()


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return logits of dense weights in float32, since some products here round activations to 16 bits. The error of
    float32 is measured on the original model.
    """
    monkeypatch.setattr(decoder, "create_product", dense_product)
    return compute_text_logits(open_model(folder), TOKENS)


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_compressed_tensors_logits_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers needs the package compressed-tensors for these")
    folder = quantised(KIND, "int8", tmp_path)
    assert difference(here(folder, monkeypatch), theirs(load(folder))) < float32_share(folder.with_name("original"))


@pytest.mark.parametrize(
    ("method", "groups"), [("W8A8", ["int-quantized"]), ("int4", ["pack-quantized", "int-quantized"])]
)
def test_compressed_tensors_with_rounded_activations_are_close_to_transformers(
    method: str, groups: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding logits are equal; with it transformers rounds to 255 levels and we to 254."""
    pytest.importorskip("compressed_tensors", reason="transformers needs the package compressed-tensors for these")
    folder = quantised(KIND, method, tmp_path)
    assert difference(compute_text_logits(open_model(folder), TOKENS), theirs(load(folder))) < 0.06
    fields = json.loads((folder / "config.json").read_text())
    written = fields["quantization_config"]["config_groups"].values()
    assert [group["format"] for group in written] == groups
    for group in written:
        group["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(fields))
    assert difference(here(folder, monkeypatch), theirs(load(folder))) < float32_share(folder.with_name("original"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_fp8_logits_equal_transformers(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    quantize(checkpoints(kind), tmp_path / "out", create_options("fp8", None, None, None), lambda *_: None)
    expected = theirs(load(tmp_path / "out").float())
    assert difference(compute_text_logits(open_model(tmp_path / "out"), TOKENS), expected) < float32_share(
        checkpoints(kind)
    )
    assert difference(compute_text_logits(open_model(checkpoints(kind)), TOKENS), expected) > 1e-2


def test_nf4_logits_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes", reason="transformers needs the package bitsandbytes for it")
    folder = quantised(KIND, "nf4", tmp_path)
    model = load(folder)
    # In inference it rounds activations to bfloat16 on processors that support it.
    expected = theirs(model.train())
    assert type(model.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    assert difference(here(folder, monkeypatch), expected) < float32_share(folder.with_name("original"))


@pytest.mark.parametrize("nested", [False, True], ids=["", "double"])
def test_nf4_written_by_bitsandbytes_is_read(nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is written by bitsandbytes and read here."""
    pytest.importorskip("bitsandbytes", reason="transformers needs the package bitsandbytes for it")
    (tmp_path / "original").mkdir()
    save_random_model(KIND, SIZES, tmp_path / "original")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
    model = load(tmp_path / "original", quantization_config=how)
    model.save_pretrained(tmp_path / "out")
    assert difference(here(tmp_path / "out", monkeypatch), theirs(model.train())) < float32_share(tmp_path / "original")


@pytest.mark.parametrize("method", ["gptq", "gptq 8", "awq"])
def test_gptq_and_awq_are_close_to_transformers(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of transformers' package use 16-bit activations."""
    pytest.importorskip("gptqmodel", reason="transformers needs the package gptqmodel for these")
    folder = quantised(KIND, method, tmp_path)
    bits = METHODS[method][1]
    simplest = AwqConfig(backend="torch_awq") if method == "awq" else GPTQConfig(bits, backend="torch")
    expected = theirs(load(folder, quantization_config=simplest))
    assert difference(here(folder, monkeypatch), expected) < 0.01
