"""Attention of draft levels compared with float64: own keys in pages of all types, and the masks of trees."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.attention import draft as plain
from kernels.attention.draft import merge_table
from kernels.common.draft_keys import DraftKeys
from kernels.common.int4 import INT4
from kernels.common.paged_keys import PagedKeys
from kernels.quantize import QUANTIZED, dequantize_vectors, quantize_vectors
from kernels.triton import draft_attention
from tests.closeness import EPS
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.planted import planted
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

BRANCHES, ROWS, GROUP, KV_HEADS, DIM, PAGE, ROOM = 4, 3, 2, 2, 32, 16, 40
ENDS = [1, 600, 0, 143]
"""Numbers of own keys; the third branch is padding."""
POSITIONS = [[0, 0, 0], [40, 599, 597], [0, 0, 0], [200, 200, 200]]
NUM_DRAFTS = 35
TYPES = [torch.float32, torch.int8, torch.float8_e4m3fn, INT4]


def stored(numbers: Tensor, dtype: torch.dtype) -> tuple[PagedKeys, Tensor]:
    """Return keys and values ``[2, kv_heads, pages, page, dim]`` in a type, and their exact values in float64."""
    if dtype in QUANTIZED:
        codes, scales = quantize_vectors(numbers, dtype)
        exact = dequantize_vectors(codes, scales)
        return PagedKeys(*codes.to(DEVICE), *scales.to(DEVICE)), exact.double()
    return PagedKeys(*numbers.to(DEVICE)), numbers.double()


def case(dtype: torch.dtype, *, with_drafts: bool) -> tuple[Tensor, DraftKeys, DraftKeys | None, Tensor, Tensor]:
    """Return queries, own and draft keys, and exact keys and values; slots without a token are not zero."""
    generator = torch.Generator().manual_seed(shift(1))
    q = torch.randn(BRANCHES * ROWS, KV_HEADS * GROUP, DIM, generator=generator)
    columns = -(-max(ENDS) // PAGE)
    pages = torch.randperm(BRANCHES * columns, generator=generator).view(BRANCHES, columns)
    own, exact = stored(torch.randn(2, KV_HEADS, pages.numel(), PAGE, DIM, generator=generator), dtype)
    positions = torch.tensor(POSITIONS).flatten().to(DEVICE)
    keys = DraftKeys(own, pages.int().to(DEVICE), torch.tensor(ENDS).to(DEVICE), positions)
    if not with_drafts:
        return q, keys, None, exact, exact
    entries = torch.randn(2, KV_HEADS, BRANCHES, ROOM, DIM, generator=generator)
    entries[:, :, :, NUM_DRAFTS:] = torch.nan  # not written yet
    sees = torch.randint(-(2**31), 2**31 - 1, (BRANCHES * ROWS, 2), generator=generator).int()
    sees[:, 0] |= 1
    table = torch.arange(BRANCHES, dtype=torch.int32)[:, None].to(DEVICE)
    numbers = torch.full((BRANCHES,), NUM_DRAFTS).to(DEVICE)
    drafts = DraftKeys(PagedKeys(*entries.to(DEVICE)), table, numbers, positions, sees.to(DEVICE))
    return q, keys, drafts, exact, entries.double()


def expected(
    q: Tensor, own: DraftKeys, drafts: DraftKeys | None, exact: Tensor, entries: Tensor, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        branch = row // ROWS
        position, pages = POSITIONS[branch][row % ROWS], own.pages[branch].tolist()
        seen = [key for key in range(ENDS[branch]) if position - (window or 9999) < key <= position]
        vectors = [exact[:, :, pages[key // PAGE], key % PAGE] for key in seen]
        if drafts is not None and drafts.sees is not None:
            words = drafts.sees[row].tolist()
            vectors += [entries[:, :, branch, i] for i in range(NUM_DRAFTS) if words[i // 32] >> (i % 32) & 1]
        if not vectors:
            continue
        k, v = torch.stack(vectors, dim=2).repeat_interleave(GROUP, dim=1)
        scores = torch.einsum("hd,hnd->hn", q[row].double(), k) * 0.3
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=-1)
        out[row] = torch.einsum("hn,hnd->hd", scores.softmax(dim=-1)[:, : v.shape[1]], v)
    return out


def largest_error(
    module: ModuleType,
    dtype: torch.dtype,
    *,
    with_drafts: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> float:
    q, own, drafts, exact, entries = case(dtype, with_drafts=with_drafts)
    tables = merge_table(len(q), 3 + with_drafts, DEVICE)
    options = {"window": window, "softcap": softcap, "sinks": None if sinks is None else sinks.to(DEVICE)}
    ours = module.draft_attention(q.to(DEVICE), own, drafts, *tables, scale=0.3, **options).cpu()
    error = (ours.double() - expected(q, own, drafts, exact, entries, window, softcap, sinks)).abs()
    if not with_drafts:
        error = error.view(BRANCHES, -1)[[0, 1, 3]]  # rows that see no key are undefined
    return float(error.nan_to_num(torch.inf).max())


def bound(dtype: torch.dtype) -> float:
    """Return 600 roundings of float32, or where keys are float16 the rounding of queries, weights and values."""
    return 600 * EPS if dtype == torch.float32 else 16 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize(("dtype", "with_drafts"), mostly_long_grid(TYPES, [True, False], every=3), ids=str)
def test_own_and_draft_keys_are_attended_to_as_in_float64(dtype: torch.dtype, with_drafts: bool) -> None:
    assert largest_error(plain, dtype, with_drafts=with_drafts) <= bound(torch.float32)
    assert largest_error(draft_attention, dtype, with_drafts=with_drafts) <= bound(dtype)


def test_windows_and_soft_caps_apply_to_own_keys() -> None:
    for module in (plain, draft_attention):
        for window, softcap in ((160, None), (None, 2.0)):
            error = largest_error(module, torch.float32, with_drafts=False, window=window, softcap=softcap)
            assert error <= bound(torch.float32)


@pytest.mark.parametrize("with_drafts", [True, False])
def test_a_sink_counts_once_for_each_row(with_drafts: bool) -> None:
    sinks = torch.tensor([-3.0, 0.5, 2.0, 60.0])
    for module in (plain, draft_attention):
        error = largest_error(module, torch.float32, with_drafts=with_drafts, sinks=sinks)
        assert error <= bound(torch.float32)


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    mostly_long(
        [
            ("begin = first + part * share", "begin = first"),
            ("stop = tl.minimum(begin + share, end)", "stop = tl.minimum(begin + share, end - 1)"),
            ("branch.to(tl.int64) * pages_stride", "branch.to(tl.int64) * 0"),
            ("head.to(tl.int64) * value_head_stride", "head.to(tl.int64) * 0"),
            ("token.to(tl.int64) * WORDS", "token.to(tl.int64) * 1"),
            ("((first_part + part).to(tl.int64) * tokens + token)", "(part.to(tl.int64) * tokens + token)"),
            ("top + tl.log2(total)", "top"),
            ("tl.load(positions + token)", "tl.load(ends + branch)"),
        ],
        every=3,
    ),
)
def test_planted_bugs_are_detected(right: str, wrong: str, tmp_path: Path) -> None:
    module = planted("draft_attention", right, wrong, "draft_attention", tmp_path)
    assert largest_error(module, torch.float32, with_drafts=True) > bound(torch.float32)
