"""Plans of draft chains compared with their definition, and gathered rows compared with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.seeds import shift

chain = pytest.importorskip("kernels.cpu.sampling.draft_chain")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_chain_tokens_are_planned_level_by_level(depth: int) -> None:
    random = np.random.default_rng(shift(depth))
    pages = random.permutation(60).reshape(6, 10)
    starts = [(4, 17, 2), (0, 8, 1), (3, 29, 2)]  # row, tokens, num_tokens
    expected = []
    for level in range(depth):
        for row, end, due in starts:
            for position in range(end - due, end) if level == 0 else [end + level - 1]:
                expected.append((row, position + 1, 4 * pages[row, position // 4] + position % 4, position))
    plan, last = torch.zeros(4, len(expected), dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    chain.plan_chains(torch.tensor(starts), pages.ctypes.data, 10, 4, plan, last, torch.tensor([depth]))
    assert plan.T.tolist() == [list(map(int, token)) for token in expected]
    assert last.tolist() == [1, 2, 4]


@pytest.mark.parametrize("stride", [1, 3])
def test_rows_are_gathered_in_any_order_and_scaled(stride: int) -> None:
    table = torch.randn(9, 20, generator=torch.Generator().manual_seed(shift(0)))
    index = torch.tensor([8, 0, 3, 3])
    strided = torch.zeros(4, stride, dtype=torch.int64)
    strided[:, 0] = index
    out = torch.empty(4, 20)
    assert torch.equal(chain.gather_rows(table, strided[:, 0]), table[index])
    assert chain.gather_rows(table, strided[:, 0], scale=0.5, out=out) is out
    assert torch.equal(out, 0.5 * table[index])
