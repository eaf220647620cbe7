"""Attention in torch compared with dense attention in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.reference import attention
from tests.closeness import assert_rounded, attention_bound
from tests.seeds import shift


@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (6, None), (70, None), (1, 2.0), (70, 2.0)])
def test_attention_equals_float64(queries: int, softcap: float | None) -> None:
    torch.manual_seed(shift(queries))
    q, k, v = torch.randn(3, 2, queries, 8), torch.randn(3, 2, 75, 8), torch.randn(3, 2, 75, 8)
    mask = torch.where(torch.rand(3, 1, queries, 75) < 0.5, 0.0, -torch.inf)
    mask[..., 0] = 0
    scores = q.double() @ k.double().transpose(-1, -2) * 0.7
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    expected = (scores + mask).softmax(-1) @ v.double()
    ours = attention(q, k, v, scale=0.7, mask=mask, softcap=softcap)
    assert_rounded(ours, expected, attention_bound(q, k, v, scale=0.7, keys=75))
