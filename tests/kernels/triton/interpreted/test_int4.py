"""The rotation of groups, and the write of keys and values of 4 bits, beside their references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from kernels.attention.kv_write import rotary_write as plain_rotary_write
from kernels.common.int4 import INT4, unpack_int4
from kernels.common.int4 import rotate_groups as plain_rotate_groups
from kernels.common.rotary import frequencies, rotary_tables
from kernels.quantize import quantize_vectors
from kernels.triton import int4, kv_write, paged_attention
from tests.closeness import EPS, unit_bound
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.interpreted.steps import Step
from tests.kernels.triton.planted import planted
from tests.seeds import shift

PAGES, PAGE, KV_HEADS, HEADS = 3, 5, 2, 6
SLOTS = torch.tensor([0, 14, -1, 7, 9])
"""Slots to write: the first and the last one, padding, and two of one page."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shift(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_groups_are_rotated_also_in_a_wider_tensor(dim: int, dtype: torch.dtype) -> None:
    x = random(5, 7, dim, dtype=dtype)
    ours = int4.rotate_groups(x.to(DEVICE)[:, 1:4], torch.float32).cpu()
    bound = 64 * EPS
    torch.testing.assert_close(ours.double(), plain_rotate_groups(x[:, 1:4].double()), atol=bound, rtol=bound)
    assert int4.rotate_groups(x.to(DEVICE), torch.bfloat16).dtype == torch.bfloat16


def check_write(write: Callable[..., Tensor], dim: int, turned: int, dtype: torch.dtype) -> None:
    """Every number that is read back is within half a step of the exact one, and other slots are unchanged."""
    qkv = random(len(SLOTS), HEADS + 2 * KV_HEADS, dim, dtype=dtype)
    qkv[3, HEADS + KV_HEADS + 1] = 0  # a vector of zeros has a scale too
    cos, sin = (table[[3, 0, 49, 7, 21]] for table in rotary_tables(frequencies(turned, 100.0), 50))
    args = [qkv[:, : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :], cos, sin, SLOTS]
    exact = torch.zeros(2, KV_HEADS, PAGES, PAGE, dim, dtype=torch.float64)
    queries = plain_rotary_write(*(x.double() if x.is_floating_point() else x for x in args), exact)
    cache, scales = (x.to(DEVICE) for x in quantize_vectors(random(*exact.shape, seed=2), INT4))
    before = cache.cpu().clone(), scales.cpu().clone()
    ours = write(*(x.to(DEVICE) for x in args), cache, scales, 0.0).cpu()
    cache, scales = cache.cpu(), scales.cpu()
    torch.testing.assert_close(ours.double(), queries, atol=unit_bound(dtype), rtol=unit_bound(dtype))
    written = torch.zeros(PAGES * PAGE, dtype=torch.bool)
    written[SLOTS[SLOTS >= 0]] = True
    for now, then in zip((cache, scales), before, strict=True):
        assert torch.equal(now.flatten(2, 3)[:, :, ~written], then.flatten(2, 3)[:, :, ~written])
    rotated = plain_rotate_groups(exact)
    step = scales.double().repeat_interleave(32, dim=-1)
    errors = (unpack_int4(cache, scales).double() - rotated).abs() - step * (0.5 + 8 * 2**-11)
    # Keys are rounded to the type of the queries before, each number of a group by its part.
    assert (errors.flatten(2, 3)[:, :, written] <= 32**0.5 * unit_bound(dtype)).all()
    largest = rotated.abs().unflatten(-1, (-1, 32)).amax(-1)
    bound = 2**-10 + unit_bound(dtype)
    torch.testing.assert_close(
        scales.double().flatten(2, 3)[:, :, written], (largest / 8).flatten(2, 3)[:, :, written], atol=bound, rtol=bound
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(32, 32), (64, 64), (96, 20), (128, 128)])
def test_a_cache_of_4_bits_holds_the_nearest_codes(dim: int, turned: int, dtype: torch.dtype) -> None:
    check_write(kv_write.rotary_write, dim, turned, dtype)


def test_the_codes_are_those_of_the_reference_but_for_ties() -> None:
    """Sums in another order may tip a number that lies between two codes."""
    k = random(len(SLOTS), 2 * KV_HEADS, 64)
    cache, scales = quantize_vectors(torch.zeros(2, KV_HEADS, PAGES, PAGE, 64), INT4)
    ours = cache.to(DEVICE), scales.to(DEVICE)
    int4.write_packed(k.to(DEVICE), SLOTS.to(DEVICE), *ours)
    ones, zeros = torch.ones(len(SLOTS), 2), torch.zeros(len(SLOTS), 2)
    plain_rotary_write(k[:, :KV_HEADS], k[:, KV_HEADS:], ones, zeros, SLOTS, cache, scales)
    differences = (cache.int() & 15) - (ours[0].cpu().int() & 15), (cache.int() >> 4) - (ours[0].cpu().int() >> 4)
    assert all(part.abs().max() <= 1 and part.ne(0).float().mean() < 1e-3 for part in differences)
    assert (scales.view(torch.int16) - ours[1].cpu().view(torch.int16)).abs().max() <= 1


WRITE_BUGS = {
    "the matrix has a wrong sign": ("(bits ^ (bits >> 1)) & 1", "bits & 1"),
    "the rotation has no unit": ("32**-0.5", "0.25"),
    "halves are exchanged": ("run % 2 == 0, left, right", "run % 2 == 1, left, right"),
    "runs are neighbours": ("high_run = low_run + GROUPS", "high_run = low_run + 1"),
    "codes are rounded": ("tl.floor(x / ", "tl.floor(0.5 + x / "),
    "the upper number is written twice": ("packed = _encode(low, low_scale)", "packed = _encode(high, high_scale)"),
    "padding is written": ("(head < num_vectors) & (slot >= 0)", "(head < num_vectors)"),
    "a group's scale goes to its neighbour": ("tl.store(scales + high_run // 2", "tl.store(scales + low_run // 2"),
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="some of them write what is not theirs")
@pytest.mark.parametrize("name", WRITE_BUGS)
def test_planted_bugs_of_the_write_are_detected(name: str, tmp_path: Path) -> None:
    broken = planted("int4", *WRITE_BUGS[name], "kv_write", tmp_path)
    with pytest.raises((AssertionError, InterpreterError)):
        check_write(broken.rotary_write, 64, 64, torch.float32)


READ_BUGS = {
    "the halves of a byte are exchanged": ("(dim // HALF * 4)", "(4 - dim // HALF * 4)"),
    "codes are not centred": ("- 1024.0 - 7.5", "- 1024.0 - 8.0"),
    "keys have the scale of the first group": ("FIRST // 32 + group[:, None]", "FIRST // 32 + group[:, None] * 0"),
    "values have the scale of the first group": ("(DIM // 32) + group[None, :]", "(DIM // 32) + group[None, :] * 0"),
    "queries are not rotated": ("rotate_groups(q, torch.float32)", "q.float()"),
    "results are not rotated back": ("rotate_groups(out, q.dtype)", "out.to(q.dtype)"),
}  # fmt: skip


def check_read(launch: Callable[..., Any]) -> None:
    step = Step([70, 81], [1, 2], dim=64, q_type=torch.bfloat16, kv_type=INT4)
    ours = launch(step.q.to(DEVICE), step.cache, step.work(), **step.options()).cpu()
    bound = unit_bound(torch.bfloat16)
    torch.testing.assert_close(ours.double(), step.expected(), atol=bound, rtol=bound)


def test_keys_of_4_bits_are_read_as_the_reference_does() -> None:
    check_read(paged_attention.launch)


@pytest.mark.parametrize("name", READ_BUGS)
def test_planted_bugs_of_the_read_are_detected(name: str, tmp_path: Path) -> None:
    broken = planted("paged_attention", *READ_BUGS[name], "paged_attention", tmp_path)
    with pytest.raises((AssertionError, InterpreterError)):
        check_read(broken.launch)
