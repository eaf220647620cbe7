"""The operators of draft heads compared with torch's."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import EPS, assert_rounded
from tests.seeds import shift

heads = pytest.importorskip("kernels.cpu.sampling.draft_heads")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [16, 48, 127])
def test_normalized_states_are_concatenated_with_embeddings(rows: int, size: int) -> None:
    states, beside = torch.randn(2, rows, size, generator=torch.Generator().manual_seed(shift(0))).unbind()
    normal = torch.nn.functional.rms_norm(states.double(), (size,), eps=1e-6)
    found, right = heads.concat_normalized(states, beside, 1e-6), torch.cat((normal, beside.double()), dim=1)
    # Half the relative error of a sum of squares, a root, a division and a product.
    assert_rounded(found, right, (size / 2 + 4) * EPS / 2 * right.abs())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_blocks_are_added_to_the_beginning_of_their_row(count: int) -> None:
    generator = torch.Generator().manual_seed(shift(1))
    base, blocks = torch.randn(3, 70, generator=generator), torch.randn(3, 5, 40, generator=generator)
    expected = (base[:, None, :40] + blocks[:, :count]).flatten(0, 1)
    assert torch.equal(heads.add_to_blocks(base, blocks, count), expected)
