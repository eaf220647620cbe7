"""Products with 16-bit weights: those of the same numbers in float32, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.linear.half import is_supported
from kernels.cpu.linear.packed_weights import ExpertWeights
from kernels.linear.fp32 import Linear
from kernels.linear.half import HalfEmbedding, HalfLinear
from tests.seeds import shift

DTYPES = [dtype for dtype in (torch.bfloat16, torch.float16) if is_supported(dtype)]
SHAPES = [(96, 48), (48, 96), (33, 7), (1, 1), (500, 1537), (1536, 512), (65, 130)]


def random_weight(out: int, into: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of all sizes of a type: denormal ones, zeros of both signs, and the largest."""
    weight = (torch.randn(out, into) * 2.0 ** torch.randint(-20, 4, (out, into))).to(dtype)
    kind = torch.finfo(dtype)
    smallest = kind.tiny * kind.eps
    special = torch.tensor([0.0, -0.0, smallest, -kind.tiny, 3 * smallest])
    places = torch.rand(out, into) < 0.05
    weight[places] = special[torch.randint(len(special), (int(places.sum()),))].to(dtype)
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_float32_weights(out: int, into: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(shift(out))
    weight, bias = random_weight(out, into, dtype), torch.randn(out) if has_bias else None
    ours, right = HalfLinear(weight.clone(), bias), Linear(weight.float(), bias)
    x, residual = torch.randn(120, into), torch.randn(120, out)
    for rows in (*range(1, 31), 120):
        assert torch.equal(ours(x[:rows]), right(x[:rows]))
        assert torch.equal(ours.add(x[:rows], residual[:rows]), right.add(x[:rows], residual[:rows]))
    assert ours.parameters == right.parameters


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_what_they_are(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0, torch.inf], [1.0, -torch.inf], [torch.nan, 0.0], [torch.finfo(dtype).max, 0.0]])
    x = torch.tensor([[1.0, 1.0]])
    found = HalfLinear(weight.to(dtype))(x)[0]
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert found[2].isnan()
    assert found[3] == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(100, 48), (33, 7), (1, 1), (300, 130)])
def test_a_table_has_the_rows_of_its_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shift(1))
    table = random_weight(*shape, dtype)
    embedding = HalfEmbedding(table.clone())
    tokens = torch.randint(shape[0], (50, 2))
    for chosen in (tokens[:0, 0], tokens[:1, 0], tokens[:, 1]):  # strided
        assert torch.equal(embedding(chosen), table[chosen].float())
        assert torch.equal(embedding(chosen, 1.7), table[chosen].float() * torch.tensor(1.7))
    x = torch.randn(3, shape[1])
    assert torch.equal(embedding.create_product()(x), Linear(table.float())(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_together_are_those_one_by_one(dtype: torch.dtype) -> None:
    torch.manual_seed(shift(2))
    linear = [HalfLinear(random_weight(96, 40, dtype), torch.randn(96)) for _ in range(4)]
    together = ExpertWeights([each.packed for each in linear], [each.bias for each in linear])
    x, ends = torch.randn(20, 40), torch.tensor([0, 3, 3, 19, 20])
    found = together.product(x, ends)
    for index, each in enumerate(linear):
        rows = slice(int(ends[index]), int(ends[index + 1]))
        if rows.start < rows.stop:
            assert torch.equal(found[rows], each(x[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_takes_two_bytes_a_number(dtype: torch.dtype) -> None:
    assert HalfLinear(torch.zeros(960, 1024, dtype=dtype)).packed.num_bytes == 2 * 960 * 1024
