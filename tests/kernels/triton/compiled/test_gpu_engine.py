"""A whole decoding step of the engine, traced on tensors without memory: every kernel that it launches compiles for
Hopper in the types that the engine gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.plan import CostModel, Rows
from engine.attention.triton_backend import TritonAttention
from engine.device import Placement
from engine.models.load import load_model
from engine.models.model import Batch
from kernels.sampling import Coordinates, Laws, draw
from tests.engine.conftest import save_random_model
from tests.kernels.triton.hopper import SHARED_MEMORY, compiling

PAGE, SIZES = 16, {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_hidden_layers": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_decoding_step_compiles(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_model("Qwen3ForCausalLM", SIZES | {"num_attention_heads": 8, "tie_word_embeddings": True}, tmp_path)
    place = Placement(torch.device("meta"), dtype, on_gpu=True)
    model = load_model(tmp_path, lambda config: config.context, place)
    about = model.config.attention[0]
    pages = np.arange(3 * 8).reshape(3, 8)
    contexts = np.array([100, 5, 128])
    slots = pages[np.arange(3), (contexts - 1) // PAGE] * PAGE + (contexts - 1) % PAGE
    per_kv = about.heads // about.kv_heads
    rows = Rows(pages, slots, np.ones(3, np.int64), contexts, PAGE, 64, about.kv_heads, per_kv, CostModel(1024))
    kv = torch.empty(1, 2, about.kv_heads, 64, PAGE, about.head_dim, dtype=dtype, device="meta")
    attend = TritonAttention(model.config.attention, kv)
    attend.prepare(rows)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with compiling() as made:
        inputs = torch.empty(2, 4, dtype=torch.int64, device="meta")
        hidden = model.forward(Batch(*inputs), attend)
        logits = model.read(hidden[:3])
        columns = torch.empty(7, 4, dtype=torch.int64, device="meta")[:, :3]
        tokens, _ = draw(logits, Laws(*columns[:3].view(torch.float64), columns[3]), Coordinates(*columns[4:]))
    assert (hidden.dtype, logits.dtype, logits.shape, tokens.shape) == (dtype, torch.float32, (3, 400), (3,))
    names = [kernel.kernel for kernel in made]
    assert names == ["_rms_norm", "_rms_norm", "_rotary_write", "_attend", "_rms_norm", "_gated", "_rms_norm", "_draw"]
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel
