"""Paged attention of a step, compared with dense attention in float64, for every backend."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_numba import NumbaAttention
from engine.attention.cpu_torch import TorchAttention
from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionCostModel, AttentionMetadata, TreeMask, find_shared_prefixes
from kernels.common.int4 import INT4
from kernels.quantize import LIMITS, QUANTIZED, dequantize_vectors, quantize_vectors
from tests.closeness import assert_rounded, attention_bound
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

PAGE, KV_HEADS, PER_KV, DIM, POOL = 4, 2, 3, 16, 700
INT4_DIM = 32
"""Head size of the steps with 4 bits, the smallest that they have."""
ALWAYS, NEVER = AttentionCostModel(1, piece_cost_bytes=0, query_cost_bytes=0), AttentionCostModel(0)
USUAL = AttentionCostModel(2 * KV_HEADS * DIM * 4, piece_cost_bytes=4000, query_cost_bytes=100)


Backend = Callable[
    [list[LayerAttentionConfig], Tensor, Tensor | None], TorchAttention | NumbaAttention | TritonAttention
]
deterministic_torch_attention = partial(TorchAttention, deterministic=True)
unshared_numba_attention = partial(NumbaAttention, sharing=False)
quantized_types = pytest.mark.parametrize("dtype", QUANTIZED, ids=["int8", "fp8", "int4"])
kv_types = pytest.mark.parametrize("dtype", [torch.float32, *QUANTIZED], ids=["float32", "int8", "fp8", "int4"])
"""Data types of the cache."""


def size_of_heads(dtype: torch.dtype) -> int:
    return INT4_DIM if dtype == INT4 else DIM


class Step:
    """A step of random sequences that share prefixes as in a tree search, each with some new tokens."""

    def __init__(
        self,
        seed: int,
        cost: AttentionCostModel,
        *,
        trees: bool = False,
        page: int = PAGE,
        dim: int = DIM,
        per_kv: int = PER_KV,
        is_latent: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``trees``: the new tokens of most rows form trees. ``page``: tokens per page. ``per_kv``: query heads for
        each key-value head. ``is_latent``: one key for all heads is its value, too. ``dtype``: data type of the cache.
        """
        self.per_kv, kv_heads = per_kv, 1 if is_latent else KV_HEADS
        kinds = 1 if is_latent else 2
        rng = random.Random(shift(seed))
        dim = max(dim, size_of_heads(dtype))
        self.kv = torch.full((1, kinds, kv_heads, POOL, page, dim), 1e30)
        self.fresh = list(range(POOL))
        if seed % 2:
            rng.shuffle(self.fresh)
        trunks = [self.take(rng.randrange(0, 12)) for _ in range(rng.randrange(1, 3))]
        branches = [trunk + self.take(rng.randrange(0, 9)) for trunk in trunks for _ in range(rng.randrange(1, 4))]
        tables, self.query_lens, self.seq_lens = [], [], []
        for _ in range(rng.randrange(1, 12)):
            own = rng.choice([*branches, []])
            before = len(own) * page + rng.randrange(0, 30)
            queries = rng.choice([1, 1, 1, 1, 2, 5, 31, 32, 50, 300])
            table = own + self.take(-(-(before + queries) // page) - len(own))
            tables.append(table)
            self.query_lens.append(queries)
            self.seq_lens.append(before + queries)
        order = np.lexsort((-np.array(self.seq_lens), np.array(self.query_lens)))
        tables, self.query_lens, self.seq_lens = (
            [values[index] for index in order] for values in (tables, self.query_lens, self.seq_lens)
        )
        self.tables = tables
        pages = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in enumerate(tables):
            pages[row, : len(table)] = table
        lengths = np.array(self.query_lens), np.array(self.seq_lens)
        wide = [row for row, queries in enumerate(self.query_lens) if 1 < queries <= 50 and rng.random() < 0.8]
        self.trees = {row: random_tree(rng, self.query_lens[row]) for row in wide} if trees else {}
        self.metadata = AttentionMetadata(pages, *lengths, page, POOL, kv_heads, per_kv, cost, self.trees)
        torch.manual_seed(shift(seed))
        tokens = sum(self.query_lens)
        self.q = torch.randn(tokens, kv_heads * per_kv, dim)
        self.k, self.v = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)
        if is_latent:
            self.v = self.k
        # Fill the slots of earlier tokens; all others keep a huge value, so that reading one of them shows.
        for table, queries, context in zip(tables, self.query_lens, self.seq_lens, strict=True):
            for position in range(context - queries):
                slot = self.kv[0, :, :, table[position // page], position % page]
                if slot.max() > 1e20:
                    slot.copy_(torch.randn(kinds, kv_heads, dim))
        self.scales: Tensor | None = None
        if dtype in QUANTIZED:
            self.kv, self.scales = quantize_vectors(self.kv, dtype)

    def take(self, count: int) -> list[int]:
        taken, self.fresh = self.fresh[:count], self.fresh[count:]
        return taken

    def attend(self, config: LayerAttentionConfig, backend: Backend = TorchAttention) -> Tensor:
        attend = backend([config], self.kv, self.scales)
        attend.prepare(self.metadata)
        return attend(0, self.q, self.k, self.v)

    def check(self, found: Tensor, config: LayerAttentionConfig) -> None:
        """Compare the output of ``attend`` with dense attention in float64, within the rounding of float32."""
        held = [self.held()[0][:, :, table].flatten(2, 3) for table in self.tables]
        k, v = (
            torch.cat([one[kind, :, :context] for one, context in zip(held, self.seq_lens, strict=True)], dim=1)
            for kind in (0, -1)
        )
        bound = attention_bound(self.q, k, v, scale=config.scale, keys=max(self.seq_lens))
        assert_rounded(found, self.expected(config), bound)

    def held(self) -> Tensor:
        """Return the keys and values in the cache, dequantized."""
        return self.kv if self.scales is None else dequantize_vectors(self.kv, self.scales)

    def expected(self, config: LayerAttentionConfig) -> Tensor:
        """Return dense attention of every token in float64. Call it after ``attend``, which fills the cache."""
        kv, out, start = self.held(), [], 0
        lengths = zip(self.tables, self.query_lens, self.seq_lens, strict=True)
        for row, (table, queries, context) in enumerate(lengths):
            own = kv[0][:, :, table].flatten(2, 3)[:, :, :context].double().repeat_interleave(self.per_kv, dim=1)
            k, v = own[0], own[-1]
            q = self.q[start : start + queries].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * config.scale
            if config.softcap is not None:
                scores = torch.tanh(scores / config.softcap) * config.softcap
            key = torch.arange(context)
            if row in self.trees:
                key[context - queries :] = context - queries + torch.from_numpy(self.trees[row].depths)
            query = key[context - queries :, None]
            hidden = key > query
            if row in self.trees:
                hidden[:, context - queries :] = ~torch.from_numpy(self.trees[row].visible)
            if config.window is not None:
                hidden |= key <= query - config.window
            scores = scores.masked_fill(hidden, -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
            start += queries
        return torch.cat(out)


def random_tree(rng: random.Random, queries: int) -> TreeMask:
    sees = np.eye(queries, dtype=np.bool_)
    for token in range(1, queries):
        sees[token] |= sees[rng.randrange(max(0, token - 4), token)]
    return TreeMask(sees.sum(axis=1) - 1, sees)


@pytest.mark.parametrize(
    ("cost", "limits", "dtype"),
    mostly_long_grid(
        [ALWAYS, NEVER, USUAL], [(None, None), (9, None), (40, 1.5), (None, 1.5)], [torch.float32, *QUANTIZED], every=11
    ),
)
@pytest.mark.parametrize("seeds", mostly_long([range(3), range(3, 12)], every=2), ids=["few", "more"])
def test_torch_attention_equals_dense_attention_in_float64(
    cost: AttentionCostModel, limits: tuple[int | None, float | None], dtype: torch.dtype, seeds: range
) -> None:
    window, softcap = limits
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4, window, softcap)
    shared = 0
    for seed in seeds:
        step = Step(seed, cost, dtype=dtype)
        step.check(step.attend(config), config)
        shared += count_shared(step.metadata)
    assert (shared > 0) == (cost is not NEVER)


@pytest.mark.parametrize(
    ("cost", "limits", "dtype"),
    mostly_long_grid(
        [ALWAYS, NEVER, USUAL],
        [(None, None), (3, None), (9, None), (40, 1.5), (None, 1.5)],
        [torch.float32, *QUANTIZED],
        every=11,
    ),
)
@pytest.mark.parametrize("seeds", mostly_long([range(3), range(3, 12)], every=2), ids=["few", "more"])
def test_tokens_of_a_tree_attend_to_their_ancestors_only(
    cost: AttentionCostModel, limits: tuple[int | None, float | None], dtype: torch.dtype, seeds: range
) -> None:
    window, softcap = limits
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4, window, softcap)
    trees = 0
    for seed in seeds:
        step = Step(seed, cost, trees=True, dtype=dtype)
        step.check(step.attend(config), config)
        trees += len(step.trees)
    assert trees > len(seeds)


@pytest.mark.parametrize(
    ("limits", "dtype"),
    mostly_long_grid([(None, None), (9, None), (40, 1.5), (None, 1.5)], [torch.float32, *QUANTIZED], every=3),
    ids=str,
)
@pytest.mark.parametrize("seeds", mostly_long([range(3), range(3, 12)], every=2), ids=["few", "more"])
def test_deterministic_attention_equals_dense_attention_in_float64(
    limits: tuple[int | None, float | None], dtype: torch.dtype, seeds: range
) -> None:
    window, softcap = limits
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4, window, softcap)
    for seed in seeds:
        step = Step(seed, USUAL, dtype=dtype)
        ours = step.attend(config, deterministic_torch_attention)
        step.check(ours, config)


@pytest.mark.parametrize(
    ("page", "cost", "limits", "trees", "dtype"),
    mostly_long_grid(
        [4, 16, 32],
        [ALWAYS, NEVER, USUAL],
        [(None, None), (9, None), (40, 1.5), (None, 1.5)],
        [False, True],
        [torch.float32, *QUANTIZED],
        every=17,
    ),
)
@pytest.mark.parametrize("seeds", mostly_long([range(2), range(2, 12)], every=2), ids=["few", "more"])
def test_compiled_attention_equals_dense_attention_in_float64(
    page: int,
    cost: AttentionCostModel,
    limits: tuple[int | None, float | None],
    trees: bool,
    dtype: torch.dtype,
    seeds: range,
) -> None:
    window, softcap = limits
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4, window, softcap)
    for seed in seeds if dtype is torch.float32 else seeds[:4]:
        step = Step(seed, cost, page=page, trees=trees, dtype=dtype)
        ours = step.attend(config, NumbaAttention)
        step.check(ours, config)


@pytest.mark.parametrize(
    ("dim", "page", "dtype"),
    [
        *mostly_long_grid([48, 64, 80, 128], [4, 16], [torch.float32, *LIMITS], every=7),
        *mostly_long_grid([64, 96, 128], [4, 16], [INT4], every=5),
    ],
)
def test_compiled_attention_equals_dense_attention_in_float64_for_heads_of_any_width(
    dim: int, page: int, dtype: torch.dtype
) -> None:
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, dim, 0.4)
    for seed in range(4):
        step = Step(seed, ALWAYS, page=page, dim=dim, dtype=dtype)
        ours = step.attend(config, NumbaAttention)
        step.check(ours, config)


@pytest.mark.parametrize("backend", [NumbaAttention, TorchAttention])
@pytest.mark.parametrize(
    ("dim", "page", "heads", "trees", "dtype"),
    mostly_long_grid([32, 96], [4, 16], [3, 20, 65], [False, True], [torch.float32, *QUANTIZED], every=13),
)
def test_attention_to_a_latent_equals_dense_attention_whose_values_are_the_keys(
    backend: Backend, dim: int, page: int, heads: int, trees: bool, dtype: torch.dtype
) -> None:
    config = LayerAttentionConfig(heads, 1, dim, dim**-0.5, is_latent=True)
    for seed in range(2 if heads < 65 else 1):
        step = Step(seed, USUAL, page=page, dim=dim, per_kv=heads, is_latent=True, trees=trees, dtype=dtype)
        step.check(step.attend(config, backend), config)


def test_heads_of_a_latent_are_divided_into_groups_that_fit_the_kernel() -> None:
    groups = [LayerAttentionConfig(heads, 1, 16, 1.0, is_latent=True).num_head_groups for heads in (1, 20, 64, 65, 128)]
    assert groups == [1, 1, 1, 5, 2]


def test_compiled_attention_equals_float64_when_later_keys_have_much_higher_scores() -> None:
    """Scores rise by tens, so the running maximum of the softmax must be rescaled between blocks."""
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    for seed in range(12):
        step = Step(seed, ALWAYS, page=32)
        step.q *= 16
        ours = step.attend(config, NumbaAttention)
        step.check(ours, config)


@quantized_types
@pytest.mark.parametrize("other", [NumbaAttention, deterministic_torch_attention, TritonAttention])
def test_every_backend_writes_identical_keys_and_values(other: Backend, dtype: torch.dtype) -> None:
    """One vector is zero, one is tiny, and one is near the smallest float32."""
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4)
    for seed in range(4):
        steps = [Step(seed, USUAL, page=16, dtype=dtype) for _ in range(2)]
        for step, backend in zip(steps, (TorchAttention, other), strict=True):
            step.k[0], step.v[0] = 0, step.v[0] * 1e-30
            step.k[-1] = step.k[-1] * 1e-12
            step.attend(config, backend)
        ours, theirs = ((step.kv.view(torch.int8), step.scales) for step in steps)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


@quantized_types
@pytest.mark.parametrize("backend", [NumbaAttention, TorchAttention, deterministic_torch_attention])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_a_quantized_cache(backend: Backend, dtype: torch.dtype, value: float) -> None:
    step = Step(3, USUAL, dtype=dtype)
    step.v[0, 1, 5] = value
    out = step.attend(LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4), backend)
    assert not out[0].isfinite().all()


@pytest.mark.parametrize("threads", [2, 3, 4, 5])
def test_compiled_attention_gives_the_same_bits_on_every_number_of_threads(threads: int) -> None:
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    torch.set_num_threads(1)
    alone = [Step(seed, USUAL, page=16).attend(config, NumbaAttention) for seed in range(12)]
    torch.set_num_threads(threads)
    try:
        several = [Step(seed, USUAL, page=16).attend(config, NumbaAttention) for seed in range(12)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(alone, several, strict=True))


@pytest.mark.parametrize(
    ("backend", "dtype", "window"),
    mostly_long_grid(
        [unshared_numba_attention, deterministic_torch_attention], [torch.float32, *QUANTIZED], [None, 9], every=3
    ),
)
@pytest.mark.parametrize("seeds", mostly_long([range(2), range(2, 6)], every=2), ids=["few", "more"])
def test_without_prefix_sharing_results_are_identical_in_any_batch(
    backend: Backend, window: int | None, dtype: torch.dtype, seeds: range
) -> None:
    """Rows one at a time, and their new tokens one at a time, are compared with all at once."""
    config = LayerAttentionConfig(KV_HEADS * PER_KV, KV_HEADS, size_of_heads(dtype), 0.4, window)
    several = 0
    for seed in seeds:
        step = Step(seed, ALWAYS, page=16, dtype=dtype)
        attend = backend([config], step.kv, step.scales)
        attend.prepare(step.metadata)
        together = attend(0, step.q, step.k, step.v)
        for row, start in enumerate(step.metadata.query_starts.tolist()):
            for token in range(start, start + step.query_lens[row]):
                before = step.seq_lens[row] - step.query_lens[row] + token - start
                one = np.ones(1, np.int64)
                alone = replace(
                    step.metadata, page_table=step.metadata.page_table[[row]], query_lens=one, seq_lens=one + before
                )
                attend.prepare(alone)
                q, k, v = (x[[token]] for x in (step.q, step.k, step.v))
                assert torch.equal(attend(0, q, k, v)[0], together[token])
        several += len(step.query_lens) > 1
    assert several


def count_shared(metadata: AttentionMetadata) -> int:
    """Return the number of prefixes that the rows of a step share."""
    num_computed = metadata.seq_lens - metadata.query_lens
    return len(find_shared_prefixes(metadata, num_computed // metadata.page_size)[1])


def decoding_branches(prefix: int, branches: int, suffix: int, cost: AttentionCostModel) -> AttentionMetadata:
    """Return decoding branches of one prompt; all lengths are in pages."""
    pages = np.array(
        [[*range(prefix), *(prefix + branch * suffix + page for page in range(suffix))] for branch in range(branches)]
    )
    seq_lens = np.full(branches, (prefix + suffix) * PAGE)
    return AttentionMetadata(pages, np.ones_like(seq_lens), seq_lens, PAGE, POOL, KV_HEADS, PER_KV, cost)


@pytest.mark.parametrize("cost", [AttentionCostModel(2048), AttentionCostModel(8192)], ids=["small", "large"])
def test_a_prefix_is_shared_from_the_crossover_of_the_cost_model(cost: AttentionCostModel) -> None:
    """Sharing pays for longer prefixes and more branches; a prefix read by one branch is never shared."""
    for branches in (1, 2, 4, 16, 40):
        tokens_saved = (cost.piece_cost_bytes + cost.query_cost_bytes * branches) / cost.kv_bytes_per_token
        for prefix in (1, 5, 20, 60, 150, 300):
            pays = (branches - 1) * prefix * PAGE > tokens_saved
            assert (count_shared(decoding_branches(prefix, branches, 1, cost)) > 0) == pays


def test_nested_branches_share_prefixes_at_every_level() -> None:
    """All branches share three pages, the first pair two more and the second pair four more; then each has its own."""
    pages = np.array(
        [[0, 1, 2, 3, 4, 20, 0, 0], [0, 1, 2, 3, 4, 21, 0, 0], [0, 1, 2, 5, 6, 7, 8, 22], [0, 1, 2, 5, 6, 7, 8, 23]]
    )
    seq_lens = np.array([6, 6, 8, 8]) * PAGE
    metadata = AttentionMetadata(pages, np.ones_like(seq_lens), seq_lens, PAGE, POOL, KV_HEADS, PER_KV, ALWAYS)
    own_first_page, shared = find_shared_prefixes(metadata, (seq_lens - 1) // PAGE)
    assert own_first_page.tolist() == [5, 5, 7, 7]
    assert [(prefix.rows.tolist(), prefix.first_page, prefix.num_tokens) for prefix in shared] == [
        ([0, 1, 2, 3], 0, 3 * PAGE),
        ([0, 1], 3, 2 * PAGE),
        ([2, 3], 3, 4 * PAGE),
    ]
