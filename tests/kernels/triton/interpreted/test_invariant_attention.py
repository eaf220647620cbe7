"""Batch-invariant attention: a token's result is, bit for bit, the same in every step that computes it.

Steps are cut at random: a token decodes alone or with others, or is one of a chunk of its prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from kernels.common import attention_schedule
from kernels.common.attention_schedule import MAX_FIXED_CHUNKS, MIN_KEYS, fixed_chunk
from kernels.quantize import quantize_vectors
from kernels.triton.paged_attention import launch
from tests.closeness import attention_bound
from tests.kernels.triton.device import DEVICE
from tests.long import mostly_long
from tests.seeds import shift

LENGTHS = (530, 300)
"""Tokens of the sequences: three chunks of keys, the last just begun, and two."""
SHARED = 256
"""Tokens that begin every sequence."""
PAGE, DIM, KV_HEADS, PER_KV = 16, 16, 2, 2
ALWAYS = AttentionCostModel(1 << 20, 0, 0)
"""Costs at which every prefix would be shared."""


@dataclass
class Cache:
    """Keys and values of all tokens, and queries for each of them."""

    window: int | None
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(shift(0))
        self.pages = np.zeros((len(LENGTHS), -(-max(LENGTHS) // PAGE)), np.int64)
        count = SHARED // PAGE
        for row, length in enumerate(LENGTHS):
            own = -(-length // PAGE) - SHARED // PAGE
            self.pages[row, : SHARED // PAGE] = np.arange(SHARED // PAGE)
            self.pages[row, SHARED // PAGE : SHARED // PAGE + own] = np.arange(count, count + own)
            count += own
        numbers = torch.randn(1, 2, KV_HEADS, count, PAGE, DIM)
        if self.dtype != torch.float32:
            stored, scales = quantize_vectors(numbers, self.dtype)
            self.kv, self.scales = stored.to(DEVICE), scales.to(DEVICE)
        else:
            self.kv, self.scales = numbers.to(DEVICE), None
        self.q = [torch.randn(length, KV_HEADS * PER_KV, DIM) for length in LENGTHS]
        self.sinks = torch.randn(KV_HEADS * PER_KV) if self.has_sinks else None
        self.about = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, self.window)

    def attend(self, spans: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        """Return the results of a step that computes a span of tokens of each of some sequences."""
        attention = TritonAttention([self.about], self.kv, self.scales, is_batch_invariant=True)
        attention._programs = 8
        rows = list(spans)
        begins, ends = np.array([spans[row] for row in rows]).T
        metadata = AttentionMetadata(
            self.pages[rows], ends - begins, ends, PAGE, self.kv.shape[3], KV_HEADS, PER_KV, ALWAYS
        )
        attention.prepare(metadata)
        q = torch.cat([self.q[row][slice(*spans[row])] for row in rows])
        out = launch(
            q.to(DEVICE), attention._caches[0], attention._work[self.window], scale=self.about.scale,
            window=self.window, softcap=None, merges_in_order=True,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
        ).cpu()  # fmt: skip
        return dict(zip(rows, torch.split(out, (ends - begins).tolist()), strict=True))

    def expected(self, row: int, position: int) -> Tensor:
        """Return a token's attention in float64."""
        keys = np.arange(position + 1)[-(self.window or 1 << 20) :]
        slots = torch.from_numpy(self.pages[row, keys // PAGE] * PAGE + keys % PAGE)
        k, v = self.kv[0].cpu().double().flatten(2, 3)[:, :, slots].repeat_interleave(PER_KV, dim=1)
        scores = torch.einsum("hd,hkd->hk", self.q[row][position].double(), k) * 0.4
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None]), dim=1)
        return scores.softmax(1)[:, None, : len(keys)] @ v


def differing_tokens(cache: Cache) -> list[tuple[int, int]]:
    """Return the tokens whose results in a random step are not those of a step of their own."""
    rng, alone = random.Random(shift(1)), {}
    watched = [(row, position) for row, length in enumerate(LENGTHS) for position in (257, length - 1)]
    for row, position in watched:
        alone[row, position] = cache.attend({row: (position, position + 1)})[row][0]
    differing = []
    for size in (1, 3, 40):  # decoding, a draft, and chunks of prompts
        spans = {}
        for row in rng.sample(range(len(LENGTHS)), len(LENGTHS)):
            _, position = rng.choice([one for one in watched if one[0] == row])
            begin = max(0, position - rng.randrange(size))
            spans[row] = begin, min(LENGTHS[row], begin + size)
        found = cache.attend(spans)
        for row, position in watched:
            begin, end = spans[row]
            if begin <= position < end and not torch.equal(found[row][position - begin], alone[row, position]):
                differing.append((row, position))
    return differing


@pytest.mark.parametrize(
    ("window", "dtype"),
    mostly_long([(90, torch.float32), (None, torch.float32), (None, torch.int8)], every=3),
)
def test_a_token_attends_alike_in_every_step(window: int | None, dtype: torch.dtype) -> None:
    assert differing_tokens(Cache(window, dtype)) == []


@pytest.mark.long
@pytest.mark.parametrize("window", [90, None])
def test_a_token_attends_alike_beside_a_sink(window: int | None) -> None:
    assert differing_tokens(Cache(window, has_sinks=True)) == []


@pytest.mark.parametrize(
    ("window", "has_sinks"), mostly_long([(90, True), (None, False), (90, False), (None, True)], every=4)
)
def test_its_results_equal_float64(window: int | None, has_sinks: bool) -> None:
    cache = Cache(window, has_sinks=has_sinks)
    found = cache.attend(dict(enumerate(((490, 530), (299, 300)))))
    bound = attention_bound(torch.cat(cache.q), *cache.kv[0].cpu(), scale=0.4, keys=max(LENGTHS))
    for row, index, position in ((0, 0, 490), (0, 21, 511), (0, 22, 512), (0, 39, 529), (1, 0, 299)):
        expected = cache.expected(row, position).squeeze(1)
        assert float((found[row][index].double() - expected).abs().max()) <= bound


def test_a_query_has_a_bounded_number_of_chunks_of_its_own_position_alone() -> None:
    keys = np.arange(1, 1 << 18)
    chunk = fixed_chunk(keys)
    assert int(chunk.min()) == MIN_KEYS
    assert int((-(-keys // chunk)).max()) == MAX_FIXED_CHUNKS
    assert np.all(np.diff(chunk) >= 0)
    assert len(np.unique(chunk)) == 7  # so that a prompt is cut by few of them


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
def test_keys_cut_by_the_load_of_the_step_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_schedule, "MIN_KEYS", 64)
    cut_by_load = attention_schedule._cut_by_keys
    monkeypatch.setattr(attention_schedule, "_cut_at_fixed_keys", lambda tiles: cut_by_load(tiles, 8))
    assert differing_tokens(Cache(None)) != []


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
def test_chunks_that_begin_with_the_window_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key that some query of a tile sees depends on the other queries."""
    monkeypatch.setattr(attention_schedule, "_cut_at_fixed_keys", lambda tiles: tiles)
    assert differing_tokens(Cache(90)) != []
