"""A whole decoding step of the engine, traced on tensors without memory.

Every kernel that it launches compiles for Hopper with the types that the engine passes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from engine.attention.cuda_triton import TritonAttention
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from engine.device import KV_DTYPES, DeviceConfig, select_kv_dtype
from engine.models.interface import Batch
from engine.models.load import load_model
from kernels.common.int4 import GROUP, INT4
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling.sampling import sample
from tests.engine.conftest import save_random_model
from tests.engine.quantization.models import METHODS, quantised
from tests.kernels.triton.hopper import SHARED_MEMORY, compiling
from tests.long import mostly_long

PAGE, SIZES = 16, {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    mostly_long([*((torch.bfloat16, kv_dtype) for kv_dtype in KV_DTYPES), (torch.float32, "auto")], every=8),
    ids=str,
)
def test_a_decoding_step_compiles(
    dtype: torch.dtype, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model("Qwen3ForCausalLM", SIZES | {"num_attention_heads": 8, "tie_word_embeddings": True}, tmp_path)
    with compiling() as made:
        step(tmp_path, dtype, kv_dtype, monkeypatch)
    names = [kernel.kernel for kernel in made]
    assert names == [
        "_rms_norm",
        "_rms_norm",
        "_rotary_write",
        *(["_pack", "_rotate", "_attend", "_rotate"] if kv_dtype == "int4" else ["_attend"]),
        "_rms_norm",
        "_gated",
        "_rms_norm",
        "_sample",
    ]
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel


PRODUCTS = {"_quantize", "_scaled", "_weight_only"}
LAUNCHED = {
    "W8A8": {"_quantize": 2, "_scaled": 5},  # the head too
    "int4": {"_weight_only": 4, "_quantize": 1, "_scaled": 1},  # the head in 8 bits
    "fp8": {"_quantize": 1, "_scaled": 4},
}
"""Launches of kernels by method: of a layer's inputs only those of the attention's output product are quantized by a
kernel of their own. Other methods launch ``_weight_only`` for each of the layer's four products."""


@pytest.mark.parametrize("method", mostly_long(METHODS, every=3))
def test_a_decoding_step_with_quantized_weights_launches_only_kernels(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs on tensors without memory, so a wait for the GPU would fail. Compiles nothing (see
    ``test_products``).
    """
    folder = quantised("Qwen2ForCausalLM", method, tmp_path, **SIZES | {"num_attention_heads": 4})
    launched: list[str] = []
    dense: list[torch.Size] = []
    linear, multiply = torch.nn.functional.linear, torch.mm

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dense.append(weight.shape)
        return linear(x, weight, bias)

    def counted_head(x: Tensor, columns: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        dense.append(columns.T.shape)
        return multiply(x, columns, out_dtype=out_dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    monkeypatch.setattr(torch, "mm", counted_head)
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self.fn.__name__))
    step(folder, torch.bfloat16, "auto", monkeypatch)
    products = Counter(name for name in launched if name in PRODUCTS)
    assert products == LAUNCHED.get(method, {"_weight_only": 4})
    assert dense == ([] if method in ("W8A8", "int4") else [(400, 512)])


def step(folder: Path, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a step of three sequences."""
    device_config = DeviceConfig(torch.device("meta"), dtype, uses_gpu_kernels=True)
    model = load_model(folder, lambda config: config.max_context, device_config)
    about = model.config.attention[0]
    pages = np.arange(3 * 8).reshape(3, 8)
    contexts = np.array([100, 5, 128])
    per_kv = about.heads // about.kv_heads
    rows = AttentionMetadata(
        pages, np.ones(3, np.int64), contexts, PAGE, 64, about.kv_heads, per_kv, AttentionCostModel(1024)
    )
    slots, stored = (1, 2, about.kv_heads, 64, PAGE), select_kv_dtype(kv_dtype, device_config)
    width = about.head_dim // 2 if stored == INT4 else about.head_dim
    kv = torch.empty(*slots, width, dtype=stored, device="meta")
    scales = None if kv_dtype == "auto" else torch.empty(slots, device="meta")
    if stored == INT4:
        scales = torch.empty(*slots, about.head_dim // GROUP, dtype=torch.float16, device="meta")
    attend = TritonAttention(model.config.attention, kv, scales)
    attend.prepare(rows)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    inputs = torch.empty(2, 4, dtype=torch.int64, device="meta")
    hidden = model.forward(Batch(*inputs), attend)
    logits = model.compute_logits(hidden[:3])
    columns = torch.empty(7, 4, dtype=torch.int64, device="meta")[:, :3]
    tokens, _ = sample(logits, SamplingTensors(*columns[:3].view(torch.float64), columns[3]), NoiseKeys(*columns[4:]))
    assert (hidden.dtype, logits.dtype, logits.shape, tokens.shape) == (dtype, torch.float32, (3, 400), (3,))
