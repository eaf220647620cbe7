"""The engine's GPU attention backend, interpreted: whole steps compared with dense attention."""

from __future__ import annotations

import pytest
import torch

from engine.attention import cuda_triton
from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttentionConfig
from kernels.triton.paged_attention import launch
from tests.closeness import unit_bound
from tests.engine.attention.test_attention import ALWAYS, DIM, KV_HEADS, PER_KV, Step, kv_types
from tests.kernels.triton.device import DEVICE


@pytest.mark.parametrize(("window", "softcap"), [pytest.param(None, None, marks=pytest.mark.long), (9, 1.5)])
@kv_types
def test_steps_equal_dense_attention_in_float64(
    window: int | None, softcap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_triton, "paged_attention", launch)
    about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    step = Step(1, ALWAYS, trees=True, dtype=dtype)
    attend = TritonAttention([about], step.kv.to(DEVICE), None if step.scales is None else step.scales.to(DEVICE))
    attend.prepare(step.metadata)
    ours = attend(0, *(x.to(DEVICE) for x in (step.q, step.k, step.v))).cpu()
    step.kv, step.scales = attend._kv.cpu(), None if attend._scales is None else attend._scales.cpu()
    if dtype is torch.float32:
        step.check(ours, about)
    else:  # the products are of float16: two units of each of scores and weights
        bound = 2 * unit_bound(torch.float16)
        torch.testing.assert_close(ours.double(), step.expected(about), atol=bound, rtol=bound)
