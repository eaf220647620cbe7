"""Attention over parts of the keys compared with dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention.reference import attention, attention_piece, causal_attention, merge
from tests.closeness import assert_rounded, attention_bound


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize(("queries", "softcap"), [(1, None), (6, None), (70, None), (1, 2.0), (70, 2.0)])
def test_attention_and_its_log_sum_exp_equal_float64(queries: int, softcap: float | None) -> None:
    torch.manual_seed(queries)
    q, k, v = torch.randn(3, 2, queries, 8), torch.randn(3, 2, 75, 8), torch.randn(3, 2, 75, 8)
    mask = torch.where(torch.rand(3, 1, queries, 75) < 0.5, 0.0, -torch.inf)
    mask[..., 0] = 0
    expected = dense(q, k, v, mask, 0.7, softcap)
    whole = attention(q, k, v, scale=0.7, mask=mask, softcap=softcap)
    bound = attention_bound(q, k, v, scale=0.7, keys=75)
    assert_rounded(whole, expected[0], bound)
    if softcap is not None:
        return
    for ours, theirs in zip(attention_piece(q, k, v, scale=0.7, mask=mask), expected, strict=True):
        assert_rounded(ours, theirs, bound)


@pytest.mark.parametrize("queries", [1, 33, 300])
def test_causal_attention_equals_float64(queries: int) -> None:
    torch.manual_seed(queries)
    q, k, v = torch.randn(6, queries, 8), torch.randn(2, queries, 8), torch.randn(2, queries, 8)
    mask = torch.full((queries, queries), -torch.inf).triu(1)
    expected = dense(q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), mask, 0.3, None)
    bound = attention_bound(q, k, v, scale=0.3, keys=queries)
    for ours, theirs in zip(causal_attention(q, k, v, scale=0.3), expected, strict=True):
        assert_rounded(ours, theirs, bound)


def test_merged_parts_equal_attention_over_all_keys() -> None:
    """One part may hold almost all of the weight."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    k[0, :, 30:] *= 40
    whole = dense(q, k, v, torch.zeros(1), 1.0, None)
    pieces = [
        attention_piece(q, k[:, :, part], v[:, :, part], scale=1.0)
        for part in (slice(0, 9), slice(9, 30), slice(30, 40))
    ]
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = merge(*merged, *piece)
    for ours, theirs in zip(merged, whole, strict=True):
        assert_rounded(ours, theirs, attention_bound(q, k, v, scale=1.0, keys=40))
