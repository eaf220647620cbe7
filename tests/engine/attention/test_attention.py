"""The paged attention of a step equals dense attention, however its context is cut into pieces."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.cpu_deterministic import DeterministicAttention
from engine.attention.cpu_numba import CompiledAttention
from engine.attention.cpu_torch import TorchAttention
from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttention
from engine.attention.plan import CostModel, Rows, StepPlan, Tree, plan_step
from kernels.quantize import dequantize_vectors, quantize_vectors
from tests.closeness import assert_rounded, attention_bound
from tests.long import mostly_long_grid

PAGE, KV_HEADS, PER_KV, DIM, POOL = 4, 2, 3, 16, 700
ALWAYS, NEVER = CostModel(1, piece=0, query=0), CostModel(0)
USUAL = CostModel(2 * KV_HEADS * DIM * 4, piece=4000, query=100)


Backend = type[TorchAttention] | type[DeterministicAttention] | type[CompiledAttention] | type[TritonAttention]
EIGHT = [torch.int8, torch.float8_e4m3fn]
kv_types = pytest.mark.parametrize("dtype", [torch.float32, *EIGHT], ids=["float32", "int8", "fp8"])
"""Of the cache."""


class Step:
    """Random sequences that share prefixes as a tree search's do, with some new tokens each."""

    def __init__(
        self,
        seed: int,
        cost: CostModel,
        *,
        trees: bool = False,
        page: int = PAGE,
        dim: int = DIM,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """With ``trees`` the new tokens of most rows are trees instead of chains. ``page``: tokens of a page.
        ``dtype``: of the cache."""
        rng = random.Random(seed)
        self.kv = torch.full((1, 2, KV_HEADS, POOL, page, dim), 1e30)
        self.fresh = list(range(POOL))
        if seed % 2:
            rng.shuffle(self.fresh)
        trunks = [self.take(rng.randrange(0, 12)) for _ in range(rng.randrange(1, 3))]
        branches = [trunk + self.take(rng.randrange(0, 9)) for trunk in trunks for _ in range(rng.randrange(1, 4))]
        tables, self.queries, self.contexts = [], [], []
        for _ in range(rng.randrange(1, 12)):
            own = rng.choice([*branches, []])
            before = len(own) * page + rng.randrange(0, 30)
            queries = rng.choice([1, 1, 1, 1, 2, 5, 31, 32, 50, 300])
            table = own + self.take(-(-(before + queries) // page) - len(own))
            tables.append(table)
            self.queries.append(queries)
            self.contexts.append(before + queries)
        order = np.lexsort((-np.array(self.contexts), np.array(self.queries)))
        tables, self.queries, self.contexts = (
            [values[index] for index in order] for values in (tables, self.queries, self.contexts)
        )
        self.tables = tables
        pages = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in enumerate(tables):
            pages[row, : len(table)] = table
        lengths = np.array(self.queries), np.array(self.contexts)
        wide = [row for row, queries in enumerate(self.queries) if 1 < queries <= 50 and rng.random() < 0.8]
        self.trees = {row: random_tree(rng, self.queries[row]) for row in wide} if trees else {}
        self.rows = Rows(pages, *lengths, page, POOL, KV_HEADS, PER_KV, cost, self.trees)
        self.plan = plan_step(self.rows)
        torch.manual_seed(seed)
        tokens = sum(self.queries)
        self.q = torch.randn(tokens, KV_HEADS * PER_KV, dim)
        self.k, self.v = torch.randn(tokens, KV_HEADS, dim), torch.randn(tokens, KV_HEADS, dim)
        # Every slot before the new tokens holds something; what no row may read stays huge.
        for table, queries, context in zip(tables, self.queries, self.contexts, strict=True):
            for position in range(context - queries):
                slot = self.kv[0, :, :, table[position // page], position % page]
                if slot.max() > 1e20:
                    slot.copy_(torch.randn(2, KV_HEADS, dim))
        self.scales: Tensor | None = None
        if dtype in EIGHT:
            self.kv, self.scales = quantize_vectors(self.kv, dtype)

    def take(self, count: int) -> list[int]:
        taken, self.fresh = self.fresh[:count], self.fresh[count:]
        return taken

    def attend(self, about: LayerAttention, backend: Backend = TorchAttention) -> Tensor:
        attend = backend([about], self.kv, self.scales)
        attend.prepare(self.rows)
        return attend(0, self.q, self.k, self.v)

    def check(self, found: Tensor, about: LayerAttention) -> None:
        """Check what ``attend`` returned against dense attention in float64, up to the rounding of float32."""
        held = [self.held()[0][:, :, table].flatten(2, 3) for table in self.tables]
        k, v = (
            torch.cat([one[kind, :, :context] for one, context in zip(held, self.contexts, strict=True)], dim=1)
            for kind in range(2)
        )
        bound = attention_bound(self.q, k, v, scale=about.scale, keys=max(self.contexts))
        assert_rounded(found, self.expected(about), bound)

    def held(self) -> Tensor:
        """Return the keys and values in the cache."""
        return self.kv if self.scales is None else dequantize_vectors(self.kv, self.scales)

    def expected(self, about: LayerAttention) -> Tensor:
        """After ``attend``: dense attention of every token, in float64, to what lies in the cache."""
        kv, out, start = self.held(), [], 0
        lengths = zip(self.tables, self.queries, self.contexts, strict=True)
        for row, (table, queries, context) in enumerate(lengths):
            own = kv[0][:, :, table].flatten(2, 3)[:, :, :context].double()
            k, v = own.repeat_interleave(PER_KV, dim=1)
            q = self.q[start : start + queries].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * about.scale
            if about.softcap is not None:
                scores = torch.tanh(scores / about.softcap) * about.softcap
            key = torch.arange(context)
            if row in self.trees:
                key[context - queries :] = context - queries + torch.from_numpy(self.trees[row].depths)
            query = key[context - queries :, None]
            hidden = key > query
            if row in self.trees:
                hidden[:, context - queries :] = ~torch.from_numpy(self.trees[row].sees)
            if about.window is not None:
                hidden |= key <= query - about.window
            scores = scores.masked_fill(hidden, -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
            start += queries
        return torch.cat(out)


def random_tree(rng: random.Random, queries: int) -> Tree:
    sees = np.eye(queries, dtype=np.bool_)
    for token in range(1, queries):
        sees[token] |= sees[rng.randrange(max(0, token - 4), token)]
    return Tree(sees.sum(axis=1) - 1, sees)


@pytest.mark.parametrize(
    ("cost", "limits", "dtype"),
    mostly_long_grid(
        [ALWAYS, NEVER, USUAL], [(None, None), (9, None), (40, 1.5), (None, 1.5)], [torch.float32, *EIGHT], every=5
    ),
)
def test_paged_attention_equals_dense_attention_in_float64(
    cost: CostModel, limits: tuple[int | None, float | None], dtype: torch.dtype
) -> None:
    window, softcap = limits
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    shared = 0
    for seed in range(12):
        step = Step(seed, cost, dtype=dtype)
        step.check(step.attend(about), about)
        shared += sharing(step.plan)
    assert (shared > 0) == (cost is not NEVER)


@pytest.mark.parametrize(
    ("cost", "limits", "dtype"),
    mostly_long_grid(
        [ALWAYS, NEVER, USUAL],
        [(None, None), (3, None), (9, None), (40, 1.5), (None, 1.5)],
        [torch.float32, *EIGHT],
        every=4,
    ),
)
def test_a_tree_of_tokens_attends_along_its_branches(
    cost: CostModel, limits: tuple[int | None, float | None], dtype: torch.dtype
) -> None:
    window, softcap = limits
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    trees = 0
    for seed in range(12):
        step = Step(seed, cost, trees=True, dtype=dtype)
        step.check(step.attend(about), about)
        trees += len(step.trees)
    assert trees > 12


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (40, 1.5), (None, 1.5)])
@kv_types
def test_deterministic_attention_equals_dense_attention_in_float64(
    window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    for seed in range(12):
        step = Step(seed, USUAL, dtype=dtype)
        ours = step.attend(about, DeterministicAttention)
        step.check(ours, about)


@pytest.mark.parametrize(
    ("page", "cost", "limits", "trees", "dtype"),
    mostly_long_grid(
        [4, 16, 32],
        [ALWAYS, NEVER, USUAL],
        [(None, None), (9, None), (40, 1.5), (None, 1.5)],
        [False, True],
        [torch.float32, *EIGHT],
        every=7,
    ),
)
def test_the_kernel_equals_dense_attention_in_float64(
    page: int, cost: CostModel, limits: tuple[int | None, float | None], trees: bool, dtype: torch.dtype
) -> None:
    window, softcap = limits
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window, softcap)
    for seed in range(12 if dtype is torch.float32 else 4):
        step = Step(seed, cost, page=page, trees=trees, dtype=dtype)
        ours = step.attend(about, CompiledAttention)
        step.check(ours, about)


@pytest.mark.parametrize(
    ("dim", "page", "dtype"), mostly_long_grid([48, 64, 80, 128], [4, 16], [torch.float32, *EIGHT], every=5)
)
def test_the_kernel_equals_dense_attention_in_float64_for_heads_of_any_width(
    dim: int, page: int, dtype: torch.dtype
) -> None:
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, dim, 0.4)
    for seed in range(4):
        step = Step(seed, ALWAYS, page=page, dim=dim, dtype=dtype)
        ours = step.attend(about, CompiledAttention)
        step.check(ours, about)


def test_the_kernel_equals_dense_attention_in_float64_where_later_keys_matter_far_more() -> None:
    """Scores rise by tens, so that weights must be made relative to another one on the way."""
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    for seed in range(12):
        step = Step(seed, ALWAYS, page=32)
        step.q *= 16
        ours = step.attend(about, CompiledAttention)
        step.check(ours, about)


@pytest.mark.parametrize("dtype", EIGHT, ids=["int8", "fp8"])
@pytest.mark.parametrize("other", [CompiledAttention, DeterministicAttention, TritonAttention])
def test_all_write_the_same_numbers(other: Backend, dtype: torch.dtype) -> None:
    """Bit for bit: a cache does not depend on who filled it. One vector is zeros, one tiny, one hardly a number."""
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    for seed in range(4):
        steps = [Step(seed, USUAL, page=16, dtype=dtype) for _ in range(2)]
        for step, backend in zip(steps, (TorchAttention, other), strict=True):
            step.k[0], step.v[0] = 0, step.v[0] * 1e-30
            step.k[-1] = step.k[-1] * 1e-12
            step.attend(about, backend)
        ours, theirs = ((step.kv.view(torch.int8), step.scales) for step in steps)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", EIGHT, ids=["int8", "fp8"])
@pytest.mark.parametrize("backend", [CompiledAttention, TorchAttention, DeterministicAttention])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_does_not_become_one(backend: Backend, dtype: torch.dtype, value: float) -> None:
    step = Step(3, USUAL, dtype=dtype)
    step.v[0, 1, 5] = value
    out = step.attend(LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4), backend)
    assert not out[0].isfinite().all()


@pytest.mark.parametrize("threads", [2, 3, 4, 5])
def test_the_kernel_gives_the_same_bits_on_every_number_of_threads(threads: int) -> None:
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4)
    torch.set_num_threads(1)
    alone = [Step(seed, USUAL, page=16).attend(about, CompiledAttention) for seed in range(12)]
    torch.set_num_threads(threads)
    try:
        several = [Step(seed, USUAL, page=16).attend(about, CompiledAttention) for seed in range(12)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(alone, several, strict=True))


@pytest.mark.parametrize("window", [None, 9])
@kv_types
def test_without_sharing_the_kernel_gives_a_token_the_same_bits_in_any_company(
    window: int | None, dtype: torch.dtype
) -> None:
    """Rows one at a time, and their new tokens one at a time, against all at once."""
    about = LayerAttention(KV_HEADS * PER_KV, KV_HEADS, DIM, 0.4, window)
    several = 0
    for seed in range(6):
        step = Step(seed, ALWAYS, page=16, dtype=dtype)
        attend = CompiledAttention([about], step.kv, step.scales, sharing=False)
        attend.prepare(step.rows)
        together = attend(0, step.q, step.k, step.v)
        for row, start in enumerate(step.rows.starts.tolist()):
            for token in range(start, start + step.queries[row]):
                before = step.contexts[row] - step.queries[row] + token - start
                one = np.ones(1, np.int64)
                alone = replace(step.rows, pages=step.rows.pages[[row]], queries=one, contexts=one + before)
                attend.prepare(alone)
                q, k, v = (x[[token]] for x in (step.q, step.k, step.v))
                assert torch.equal(attend(0, q, k, v)[0], together[token])
        several += len(step.queries) > 1
    assert several


def sharing(plan: StepPlan) -> int:
    """How many pieces serve queries of more than one row."""
    starts = plan.rows.starts
    count = 0
    for piece in plan.pieces:
        tokens = torch.arange(len(plan.slots) // (2 * KV_HEADS))[piece.queries].numpy()
        count += len(np.unique(np.searchsorted(starts, tokens, side="right"))) > 1
    return count


def decode_plan(prefix: int, branches: int, suffix: int, cost: CostModel) -> StepPlan:
    """Branches of one prompt that decode; all lengths in pages."""
    pages = np.array(
        [[*range(prefix), *(prefix + branch * suffix + page for page in range(suffix))] for branch in range(branches)]
    )
    contexts = np.full(branches, (prefix + suffix) * PAGE)
    return plan_step(Rows(pages, np.ones_like(contexts), contexts, PAGE, POOL, KV_HEADS, PER_KV, cost))


@pytest.mark.parametrize("cost", [CostModel(2048), CostModel(8192)], ids=["small", "large"])
def test_a_prefix_is_shared_from_the_crossover_of_the_cost_model_on(cost: CostModel) -> None:
    """Longer prefixes and more branches pay; the same prefix read by one branch never does."""
    for branches in (1, 2, 4, 16, 40):
        tokens_saved = (cost.piece + cost.query * branches) / cost.token_bytes
        for prefix in (1, 5, 20, 60, 150, 300):
            worth = (branches - 1) * prefix * PAGE > tokens_saved
            assert (sharing(decode_plan(prefix, branches, 1, cost)) > 0) == worth


def test_branches_of_branches_share_at_every_level() -> None:
    """Three pages for all, then two more for the first pair and four for the second, then their own."""
    pages = np.array(
        [[0, 1, 2, 3, 4, 20, 0, 0], [0, 1, 2, 3, 4, 21, 0, 0], [0, 1, 2, 5, 6, 7, 8, 22], [0, 1, 2, 5, 6, 7, 8, 23]]
    )
    contexts = np.array([6, 6, 8, 8]) * PAGE
    plan = plan_step(Rows(pages, np.ones_like(contexts), contexts, PAGE, POOL, KV_HEADS, PER_KV, ALWAYS))
    read = sorted((piece.keys.first_slot, piece.keys.tokens, piece.queries) for piece in plan.pieces)
    assert read == [
        (0, 3 * PAGE, slice(0, 4)),
        (3 * PAGE, 2 * PAGE, slice(0, 2)),
        (5 * PAGE, 4 * PAGE, slice(2, 4)),
    ]
    assert [group.keys.tokens for group in plan.groups] == [PAGE]


def test_a_long_consecutive_beginning_is_read_in_place() -> None:
    """A row of its own with a long cached prefix: the prefix is a piece in consecutive slots, the rest is gathered."""
    cost = CostModel(2048)
    pages = np.array([[*range(10, 510), 3, 1]])
    lengths = np.array([6]), np.array([500 * PAGE + 6])
    plan = plan_step(Rows(pages, *lengths, PAGE, POOL, KV_HEADS, PER_KV, cost))
    [piece], [group] = plan.pieces, plan.groups
    assert (piece.keys.first_slot, piece.keys.tokens, piece.queries) == (10 * PAGE, 500 * PAGE, slice(0, 6))
    assert group.keys.tokens == 6


def test_a_window_reads_only_the_pages_that_it_sees() -> None:
    plan = decode_plan(50, 4, 2, NEVER)
    [group] = plan.masked(10)
    assert group.keys.tokens <= 10 + PAGE
