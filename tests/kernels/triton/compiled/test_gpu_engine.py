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

from engine.cache.paged_kv import KVCache
from engine.cache.state_layers import NUM_FIELDS, StateSegment, StateStep
from engine.cache.states import StatePool
from engine.device import KV_DTYPES, DeviceConfig, select_kv_dtype
from engine.models.decoder import Decoder
from engine.models.interface import Batch
from engine.models.load import load_model
from engine.runner.batch import lay_out
from engine.runner.forward import create_gpu_attention
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling.sampling import sample
from tests.engine.conftest import save_checkpoint, save_random_model
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


@pytest.mark.parametrize("kind", mostly_long(["qwen3_5", "falcon_h1", "lfm2", "nemotron_h"], every=4))
def test_a_decoding_step_with_states_compiles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(kind, tmp_path)
    with compiling() as made:
        step(tmp_path, torch.bfloat16, "auto", monkeypatch)
    names = {kernel.kernel for kernel in made}
    own = {"qwen3_5": {"_delta_gates", "_gated_delta", "_scale_rows"}, "lfm2": set[str]()}
    assert names >= {"_convolve", "_attend", "_rms_norm", *own.get(kind, {"_scan", "_scale_rows"})}
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel


PRODUCTS = {"_quantize", "_scaled", "_sliced", "_weight_only"}
LAUNCHED = {
    "W8A8": {"_quantize": 2, "_scaled": 5},  # the head too
    "int4": {"_sliced": 4, "_quantize": 1, "_scaled": 1},  # the head in 8 bits
    "gptq": {"_sliced": 4},
    "awq": {"_sliced": 4},
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


FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        {
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
            **{"sliding_window": 32, "global_head_dim": 256, "vocab_size_per_layer_input": 400},
            **{"hidden_size_per_layer_input": 64, "num_hidden_layers": 4},
        },
    ),
    "Gemma 4 with experts": (
        "Gemma4ForCausalLM",
        {
            **{
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 256,
                "attention_k_eq_v": True,
            },
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128},
            **{"hidden_size_per_layer_input": 0},
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {
            **{"head_dim": None, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128},
            **{"qk_rope_head_dim": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1},
            **{"num_key_value_heads": 8},
        },
    ),
}
"""Classes and options of families whose layers are not those of Llama."""


@pytest.mark.parametrize("name", mostly_long(FAMILIES, every=3))
def test_a_decoding_step_of_other_families_waits_for_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on tensors without memory: a wait for the GPU would fail, and so would a tensor that is not there."""
    architecture, options = FAMILIES[name]
    sizes = SIZES | {"num_attention_heads": 8, "num_hidden_layers": 2} | options
    save_random_model(architecture, sizes, tmp_path)
    for module in ("decoder", "gpt_oss", "gemma4"):
        monkeypatch.setattr(f"engine.models.{module}.has_grouped_products", lambda _: True)
    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self.fn.__name__))
    model = step(tmp_path, torch.bfloat16, "auto", monkeypatch)
    assert model.is_capturable
    counts = Counter(launched)
    assert counts["_attend"] == model.config.num_layers
    # Layers that share keys rotate their queries alone.
    assert counts["_rotary_write"] == model.config.num_layers


def step(folder: Path, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Run a step of three sequences; return the model."""
    device_config = DeviceConfig(torch.device("meta"), dtype, uses_gpu_kernels=True)
    model = load_model(folder, lambda config: config.max_context, device_config)
    assert isinstance(model, Decoder)
    cache = KVCache(
        layers=model.config.head_shapes,
        pages=24,
        page_size=PAGE,
        rows=3,
        context=128,
        device_config=device_config,
        dtype=select_kv_dtype(kv_dtype, device_config),
    )
    cache.page_table[:] = np.arange(3 * 8).reshape(3, 8)
    contexts = np.array([100, 5, 128])
    rows = lay_out(cache, model.config.first_attention, np.arange(3), np.ones(3, np.int64), contexts, trees={})
    attend = create_gpu_attention(model.config.attention, cache)
    attend.prepare(rows)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    ids, positions = torch.empty(2, 4, dtype=torch.int64, device="meta")
    states = None
    if model.config.states:
        pool = StatePool(model.config.states, 8, snapshot_distance=PAGE, device_config=device_config)
        table = torch.empty(4, NUM_FIELDS, dtype=torch.int64, device="meta")
        states = StateStep(pool.layers, [StateSegment(row, row + 1, row, row) for row in range(3)], table)
    hidden = model.forward(Batch(ids, positions, states=states), attend)
    logits = model.compute_logits(hidden[:3])
    columns = torch.empty(7, 4, dtype=torch.int64, device="meta")[:, :3]
    tokens, _ = sample(logits, SamplingTensors(*columns[:3].view(torch.float64), columns[3]), NoiseKeys(*columns[4:]))
    assert (hidden.dtype, logits.dtype, logits.shape, tokens.shape) == (dtype, torch.float32, (3, 400), (3,))
    return model
