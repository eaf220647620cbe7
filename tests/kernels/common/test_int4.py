"""Vectors of 4 bits: the rotation, the packing, and the nearest codes."""

from __future__ import annotations

import pytest
import torch

from kernels.common.int4 import GROUP, dequantize_int4, quantize_int4, rotate_groups, unpack_int4
from tests.closeness import EPS, assert_rounded
from tests.seeds import shift


def hadamard() -> torch.Tensor:
    """Return the orthonormal Hadamard matrix of 32 rows by Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < GROUP:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / GROUP**0.5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shift(1)))


def test_groups_are_rotated_by_an_orthonormal_matrix_that_is_its_own_inverse() -> None:
    x = random(5, 3, 96).double()
    rotated = rotate_groups(x)
    torch.testing.assert_close(rotated, (x.view(5, 3, 3, GROUP) @ hadamard()).view(x.shape))
    torch.testing.assert_close(rotate_groups(rotated), x)
    torch.testing.assert_close((rotated * rotated[:1]).sum(-1), (x * x[:1]).sum(-1))


@pytest.mark.parametrize("size", [32, 64, 96, 128])
def test_stored_numbers_are_within_half_a_step(size: int) -> None:
    x = random(50, size) * torch.logspace(-3, 3, 50)[:, None]
    packed, scales = quantize_int4(x)
    assert (packed.shape, packed.dtype) == ((50, size // 2), torch.uint8)
    assert (scales.shape, scales.dtype) == ((50, size // GROUP), torch.float16)
    rotated = rotate_groups(x)
    step = scales.float().repeat_interleave(GROUP, dim=1)
    # A scale is rounded to 11 bits, and the largest of the numbers is eight of it.
    assert ((unpack_int4(packed, scales) - rotated).abs() <= step * (0.5 + 8 * 2**-11)).all()
    # A rotation has five sums of at most the norm of a group, a product and its rounded factor; the second rotation
    # adds up the errors of the first.
    stored = unpack_int4(packed, scales).double()
    norms = stored.view(50, -1, GROUP).norm(dim=-1).repeat_interleave(GROUP, dim=1)
    bound = (5 / 2 + 1) * (1 + GROUP**0.5) * EPS * norms
    assert_rounded(rotate_groups(dequantize_int4(packed, scales)), stored, bound)


def test_a_byte_holds_the_numbers_half_a_vector_apart() -> None:
    packed = torch.tensor([[0x10 * (15 - index) + index for index in range(16)] * 2], dtype=torch.uint8)
    values = unpack_int4(packed, torch.tensor([[2.0, 4.0]], dtype=torch.float16))
    codes = torch.arange(16) - 7.5
    assert values.tolist() == [[*(2 * codes).tolist() * 2, *(-4 * codes).tolist() * 2]]


def test_one_large_number_costs_the_others_less_than_without_the_rotation() -> None:
    x = random(100, 64)
    x[:, 5] = 20
    unrotated = dequantize_int4(*quantize_int4(rotate_groups(x)))  # the rotation of a rotated vector is none
    errors = [
        (found - x)[:, 6:].square().mean() for found in (dequantize_int4(*quantize_int4(x)), rotate_groups(unrotated))
    ]
    assert errors[0] < errors[1] / 2


def test_zeros_and_tiny_numbers_are_zeros_and_what_is_not_finite_stays_so() -> None:
    x = torch.zeros(4, 64)
    x[1], x[2, 3], x[3, 40] = 1e-12, torch.nan, torch.inf
    found = dequantize_int4(*quantize_int4(x))
    assert found[:2].eq(0).all()
    assert found[2, 32:].eq(0).all()
    assert not found[2, :32].isfinite().any()
    assert not found[3, 32:].isfinite().all()


def test_sizes_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 32 numbers; these have 48"):
        quantize_int4(torch.zeros(2, 48))
