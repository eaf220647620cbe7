"""The torch references against float64 formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.attention import Workspace, paged_attention, plan_rows, row_classes
from kernels.norm import rms_norm
from kernels.rotary import frequencies, rotary, rotary_tables

PAGE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_equals_the_float64_formula() -> None:
    x, weight = random(5, 3, 32), random(3, 32, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-5)


def test_silu_mul_equals_the_float64_formula() -> None:
    x = random(7, 20)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-5)


def test_rotary_turns_each_pair_by_its_position_and_frequency() -> None:
    dim, theta = 8, 5000.0
    cos, sin = rotary_tables(frequencies(dim, theta), 50)
    x, positions = random(4, 3, dim), [0, 1, 17, 49]
    turned = rotary(x, cos[positions], sin[positions])
    for token, position in enumerate(positions):
        for pair in range(dim // 2):
            angle = position * theta ** (-2 * pair / dim)
            rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            expected = x[token][:, [pair, pair + dim // 2]] @ rotation.T
            torch.testing.assert_close(turned[token][:, [pair, pair + dim // 2]], expected, atol=1e-5, rtol=1e-5)


def test_row_classes_separate_lengths_that_differ_by_more_than_two() -> None:
    queries, contexts = np.array([1, 1, 1, 3, 64, 65]), np.array([5, 64, 65, 5, 64, 65])
    classes = row_classes(queries, contexts).tolist()
    assert classes[0] == classes[1]
    assert len(set(classes)) == 5


@pytest.mark.parametrize(
    ("heads_per_kv", "window", "softcap"), [(1, None, None), (3, None, None), (3, 10, None), (1, 1, None), (3, 20, 2.0)]
)
def test_paged_attention_equals_dense_attention_in_float64(
    heads_per_kv: int, window: int | None, softcap: float | None
) -> None:
    """Rows of one and of many queries, short and long, on scattered pages; unused slots hold huge values."""
    kv_heads, dim = 2, 8
    rows = [(1, 1), (1, 9), (1, 64), (3, 3), (4, 11), (1, 100), (7, 90), (6, 96)]
    queries, contexts = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    order = np.argsort(row_classes(queries, contexts), kind="stable")
    queries, contexts = queries[order], contexts[order]
    width = -(-int(contexts.max()) // PAGE)
    pages = np.random.default_rng(0).permutation(len(rows) * width).reshape(len(rows), width)
    pool = torch.full((pages.size, PAGE, 2 * kv_heads, dim), 1e30)
    q = random(int(queries.sum()), heads_per_kv * kv_heads, dim, seed=1)
    expected = torch.empty(len(q), heads_per_kv * kv_heads * dim, dtype=torch.float64)
    start = 0
    for row, (wide, keys) in enumerate(zip(queries.tolist(), contexts.tolist(), strict=True)):
        kv = random(keys, 2 * kv_heads, dim, seed=row + 2)
        for position in range(keys):
            pool[pages[row, position // PAGE], position % PAGE] = kv[position]
        expected[start : start + wide] = dense(q[start : start + wide], kv, heads_per_kv, window, softcap)
        start += wide
    plan = plan_rows(pages, queries, contexts, PAGE, heads_per_kv)
    ours = paged_attention(q, pool, plan, Workspace(), scale=dim**-0.5, window=window, softcap=softcap)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


def dense(q: Tensor, kv: Tensor, heads_per_kv: int, window: int | None, softcap: float | None) -> Tensor:
    wide, heads, dim = q.shape
    keys, kv_heads = len(kv), kv.shape[1] // 2
    k, v = kv.double().split(kv_heads, dim=1)
    out = torch.empty(wide, heads, dim, dtype=torch.float64)
    for query in range(wide):
        seen = keys - wide + query + 1
        for head in range(heads):
            own = head // heads_per_kv
            first = 0 if window is None else max(0, seen - window)
            scores = k[first:seen, own] @ q[query, head].double() / math.sqrt(dim)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[query, head] = scores.softmax(0) @ v[first:seen, own]
    return out.flatten(1)
