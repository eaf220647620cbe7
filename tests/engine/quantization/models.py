"""Small random models in every format that ``quantize`` writes, with sizes that every kernel supports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.quantization.quality import compute_text_logits, open_model
from engine.device import DeviceConfig
from engine.models.load import load_model
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.weights.matrix import Matrix, dense
from kernels.linear.fp32 import Linear
from tests.engine.conftest import CORPUS, save_random_model
from tests.engine.gpu import EMULATED_GPU
from tests.seeds import shift

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
METHODS: dict[str, tuple[str, int, int | None]] = {
    "W8A8": ("rtn", 8, None),
    "int8": ("rtn", 8, 128),
    "int4": ("rtn", 4, 32),
    "gptq": ("gptq", 4, 32),
    "gptq 8": ("gptq", 8, 64),
    "awq": ("awq", 4, 64),
    "fp8": ("fp8", 8, None),
    "nf4": ("nf4", 4, None),
}
"""Method, bits and group size by name."""
ROUNDS = {"W8A8": 0.2, "fp8": 0.2, "int4": 0.02}
"""Formats that also round activations (int4 those of the head), and the largest relative change of the logits."""


def quantised(architecture: str, method: str, folder: Path, **config: object) -> Path:
    """Return the folder of a quantized random model, beside that of the original."""
    original, out, file = folder / "original", folder / method, folder / "text.txt"
    if not original.exists():
        original.mkdir()
        save_random_model(architecture, SIZES | config, original)
        file.write_text(" ".join(random.Random(shift(0)).choices(" ".join(CORPUS).split(), k=2500)))
    quantize(original, out, create_options(*METHODS[method], file), lambda *_: None)
    return out


def measure_rounding(folder: Path, tokens: Sequence[int]) -> float:
    """Return the largest change of a logit of a text by the rounding of activations that a format asks for.

    An activation at the border of two codes goes to either, and a change of one code is enough for many to change in
    the layers above. So logits of two runs may each be this far from those of activations that are not rounded.
    """
    rounded = compute_text_logits(load_model(folder, lambda config: config.max_context, EMULATED_GPU), tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.models.decoder.create_product", dense_product)
        return float((compute_text_logits(open_model(folder), tokens) - rounded).abs().max())


def dense_product(parts: Sequence[Matrix], bias: Tensor | None, device_config: DeviceConfig) -> Linear:
    """Return the product with dequantized weights in float32; replaces ``create_product``."""
    return Linear(torch.cat([dense(part) for part in parts]), bias)
