"""RMSNorm, gated activations and KV writes compared with float64, at sizes that no block divides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention.kv_write import rotary_write as plain_rotary_write
from kernels.common.int4 import INT4
from kernels.common.rotary import frequencies, rotary, rotary_tables
from kernels.layers import activation as plain_activation
from kernels.quantize import LIMITS, dequantize_vectors
from kernels.quantize import quantize_vectors as plain_quantize_vectors
from kernels.triton import activation, norm
from kernels.triton.kv_write import rotary_write, rotate
from kernels.triton.quantize import quantize_vectors
from tests.closeness import EPS, unit_bound
from tests.kernels.triton.device import DEVICE
from tests.seeds import shift

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shift(seed))).to(dtype)


def close(ours: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.cpu().double(), expected.double(), atol=tolerance, rtol=tolerance)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 2048), (5, 48), (17, 1000)])
def test_rms_norm_equals_float64(dtype: torch.dtype, rows: int, n: int) -> None:
    x, weight = random(rows, n, dtype=dtype) * 3, random(n, dtype=dtype, seed=1)
    ours = norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-2)
    assert ours.dtype == dtype
    close(ours, normalised(x, weight, 1e-2), unit_bound(dtype))


def test_rms_norm_of_heads_reads_the_heads_of_a_wider_tensor() -> None:
    """Each head is normalised with its own weight, without a copy."""
    qkv, weight = random(5, 7, 24).to(DEVICE), random(4, 24, seed=1).to(DEVICE)
    ours = norm.rms_norm(qkv[:, :4], weight, 1e-5)
    close(ours, normalised(qkv[:, :4].cpu(), weight.cpu(), 1e-5), unit_bound(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_normalises_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (random(6, 300, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    ours, total = norm.add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight[0].to(DEVICE), 1e-5)
    assert torch.equal(total.cpu(), x + residual)
    close(ours, normalised(x + residual, weight[0], 1e-5), unit_bound(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_equal_float64(name: str, dtype: torch.dtype) -> None:
    x = random(3, 2 * 2050, dtype=dtype) * 4
    ours: Callable[[Tensor], Tensor] = getattr(activation, name)
    plain: Callable[[Tensor], Tensor] = getattr(plain_activation, name)
    close(ours(x.to(DEVICE)), plain(x.double()), unit_bound(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_activations_equal_float64(dtype: torch.dtype) -> None:
    x = random(3, 2 * 2050, dtype=dtype) * 4
    ours = activation.clamped_silu_mul(x.to(DEVICE), 1.702, 3.0)
    expected = plain_activation.clamped_silu_mul(x.double(), alpha=1.702, limit=3.0)
    close(ours, expected, unit_bound(dtype))


PAGES, PAGE, KV_HEADS, HEADS = 3, 5, 2, 6
SLOTS = torch.tensor([0, 14, -1, 7, 9])
"""Slots to write: the first and the last one, padding, and two of one page."""


def tokens(dim: int, turned: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries and keys, values, and the rotation angles at ``SLOTS``."""
    qkv = random(len(SLOTS), HEADS + 2 * KV_HEADS, dim, dtype=dtype)
    cos, sin = (table[[3, 0, 49, 7, 21]] for table in rotary_tables(frequencies(turned, 100.0), 50))
    return [qkv[:, : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :], cos, sin, SLOTS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(32, 32), (24, 24), (48, 20)])
def test_queries_are_rotated_and_keys_and_values_written_to_their_slots(
    dim: int, turned: int, dtype: torch.dtype
) -> None:
    """Padding is not written, and other slots are unchanged."""
    args = tokens(dim, turned, dtype)
    cache = random(2, KV_HEADS, PAGES, PAGE, dim, dtype=dtype, seed=2).to(DEVICE)
    expected = cache.cpu().double()
    queries = plain_rotary_write(*(x.double() if x.is_floating_point() else x for x in args), expected)
    ours = rotary_write(*(x.to(DEVICE) for x in args), cache, None, 0.0)
    close(ours, queries, unit_bound(dtype))
    close(cache, expected, unit_bound(dtype))
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
    untouched[SLOTS[SLOTS >= 0]] = False
    before = random(2, KV_HEADS, PAGES, PAGE, dim, dtype=dtype, seed=2)
    assert torch.equal(cache.cpu().flatten(2, 3)[:, :, untouched], before.flatten(2, 3)[:, :, untouched])


@pytest.mark.parametrize("stored", [torch.float32, *LIMITS, INT4], ids=str)
def test_vectors_that_are_keys_and_values_are_written_once(stored: torch.dtype) -> None:
    """As the reference writes them, up to roundings of float32."""
    dim, turned = 96, 20
    qk, _, *others = tokens(dim, turned, torch.float32)
    qk = qk[:, : HEADS + 1]
    width = dim // 2 if stored == INT4 else dim
    ours, expected = (torch.zeros(1, 1, PAGES, PAGE, width).to(stored) for _ in range(2))
    scales = expected_scales = None
    if stored != torch.float32:
        shape, dtype = ((*ours.shape[:-1], dim // 32), torch.float16) if stored == INT4 else (ours.shape[:-1], None)
        scales, expected_scales = (torch.zeros(shape, dtype=dtype) for _ in range(2))
    queries = plain_rotary_write(qk, qk[:, :0], *others, expected, expected_scales)
    ours, scales = ours.to(DEVICE), None if scales is None else scales.to(DEVICE)
    given = [x.to(DEVICE) for x in (qk, qk[:, :0], *others)]
    found = rotary_write(*given, ours, scales, LIMITS.get(stored, 0.0))
    close(found, queries.double(), unit_bound(torch.float32))
    if scales is None or expected_scales is None:
        close(ours, expected.double(), unit_bound(torch.float32))
    else:
        one, other = dequantize_vectors(ours.cpu(), scales.cpu()), dequantize_vectors(expected, expected_scales)
        # A rounding of float32 moves few numbers to the next code.
        assert ((one - other).abs() > 1e-5).float().mean() < 0.02
        assert bool((other != 0).any())


def test_queries_alone_are_rotated() -> None:
    q, _, cos, sin, _ = tokens(48, 20, torch.bfloat16)
    close(
        rotate(q.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE)), rotary(q.double(), cos, sin), unit_bound(torch.bfloat16)
    )


@pytest.mark.parametrize("stored", list(LIMITS), ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(32, 32), (48, 20)])
def test_a_quantized_cache_holds_the_nearest_representable_numbers(dim: int, turned: int, stored: torch.dtype) -> None:
    """Each number times the scale of its token, head and kind is within half a step of the exact one."""
    args = tokens(dim, turned, torch.float32)
    args[1][3, 1] = 0  # a vector of zeros has a scale too
    exact = torch.zeros(2, KV_HEADS, PAGES, PAGE, dim, dtype=torch.float64)
    plain_rotary_write(*(x.double() if x.is_floating_point() else x for x in args), exact)
    cache = torch.zeros(exact.shape, dtype=stored).to(DEVICE)
    scales = torch.zeros(exact.shape[:-1]).to(DEVICE)
    rotary_write(*(x.to(DEVICE) for x in args), cache, scales, LIMITS[stored])
    scales, restored = scales.cpu().double(), cache.cpu().double() * scales.cpu().double()[..., None]
    largest = exact.abs().amax(-1)
    close(scales, torch.where(largest > 0, largest, 0) / LIMITS[stored], 8 * EPS)
    # float8_e4m3fn has 3 bits after the leading one, and nothing finer than 2**-9.
    step = scales[..., None] * (1 if stored == torch.int8 else 2**-9)
    if stored == torch.float8_e4m3fn:
        step = torch.maximum(step, exact.abs() * 2**-3)
    assert ((restored - exact).abs() <= step * 0.5001 + 8 * EPS).all()  # of the rotated keys


@pytest.mark.parametrize("stored", list(LIMITS), ids=str)
@pytest.mark.parametrize("shape", [(1, 1500), (50, 3, 40)])
def test_quantized_vectors_are_the_nearest_representable_numbers(shape: tuple[int, ...], stored: torch.dtype) -> None:
    """Vectors of all magnitudes, and one of zeros."""
    x = random(*shape)
    x = (x.flatten(0, -2) * torch.logspace(-6, 6, x.shape[:-1].numel())[:, None]).view(shape)
    x[0, :4] = x[0, :4] * (len(x) == 1)
    for values, scales in (
        quantize_vectors(x.to(DEVICE), stored, LIMITS[stored]),
        plain_quantize_vectors(x, stored),
    ):
        step = scales.cpu().double()[..., None] * (1 if stored == torch.int8 else 2**-9)
        if stored == torch.float8_e4m3fn:
            step = torch.maximum(step, x.double().abs() * 2**-3)
        restored = values.cpu().double() * scales.cpu().double()[..., None]
        assert ((restored - x.double()).abs() <= step * 0.5001).all()
        assert (values.float().abs().amax(-1).cpu() == LIMITS[stored] * (x != 0).any(-1)).all()
