"""The plan of the CPU kernel equals that of the NumPy reference, and each token reads every key once."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import pytest
import torch

from engine.attention.plan import AttentionCostModel, AttentionMetadata, IntArray, find_shared_prefixes
from tests.engine.attention.test_attention import ALWAYS, KV_HEADS, NEVER, PER_KV, POOL, USUAL, Step

plans = pytest.importorskip("kernels.cpu.attention.plan")

TILE = 8


class Plan(NamedTuple):
    """The arguments of ``attend``: the keys that each token reads alone, and the shared pieces with their tokens."""

    rows: list[int]
    first: list[int]
    end: list[int]
    slots: list[int]
    pieces: list[tuple[int, int, int, tuple[int, ...]]]
    longest: int
    pages: IntArray


def planned(rows: AttentionMetadata, *, window: int = 0, sharing: bool = True, blocks: int = 1) -> Plan:
    count, columns = rows.page_table.shape
    tokens = int(rows.query_lens.sum())
    words = torch.zeros(plans.STEP_WORDS, dtype=torch.int64)
    room = torch.zeros(plans.plan_size(count, tokens, count * columns * blocks, TILE), dtype=torch.int64)
    given = [torch.from_numpy(part) for part in (rows.page_table, rows.query_lens, rows.seq_lens)]
    shape = count, tokens, columns, blocks, rows.page_size
    cost = rows.cost_model.kv_bytes_per_token, rows.cost_model.piece_cost_bytes, rows.cost_model.query_cost_bytes
    plans.plan_step(words, room, *given, 0, 0, 0, 5, 6, *shape, window, int(sharing), TILE, *cost, 7, threads=1)
    found = words.tolist()
    assert (found[0], found[10], found[11], found[12], found[15]) == (5, 6, tokens, columns * blocks, 7)
    members = at(found[9], tokens * 9)
    pieces = at(found[8], 5 * found[13]).reshape(-1, 5).tolist()
    return Plan(
        *(at(found[word], tokens).tolist() for word in (2, 3, 4, 16)),
        pieces=[(row, first, end, tuple(members[low:high].tolist())) for row, first, end, low, high in pieces],
        longest=found[14],
        pages=at(found[1], count * columns * blocks).reshape(count, -1),
    )


def at(address: int, count: int) -> IntArray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).copy()


def reference(rows: AttentionMetadata) -> tuple[list[tuple[int, int, int, tuple[int, ...]]], list[int]]:
    """Return the shared pieces in any order, and the first key that each token reads alone."""
    before, size = rows.seq_lens - rows.query_lens, rows.page_size
    begins, shared = find_shared_prefixes(rows, before // size)
    pieces = [
        (
            int(part.rows[0]),
            part.first_page * size,
            part.first_page * size + part.num_tokens,
            tuple(rows.flat_tokens(part.rows).tolist()),
        )
        for part in shared
    ]
    first = np.repeat(begins * size, rows.query_lens)
    for row in np.flatnonzero(rows.query_lens > 1).tolist():
        start, count = int(rows.query_starts[row]), int(rows.query_lens[row])
        for offset in range(0, count, TILE):
            tokens = range(start + offset, start + min(offset + TILE, count))
            begin, end = int(first[tokens[0]]), int(before[row]) + offset
            if rows.cost_model.should_share(end - begin, len(tokens), len(tokens)):
                pieces.append((row, begin, end, tuple(tokens)))
                first[tokens] = end
    return pieces, first.tolist()


@pytest.mark.parametrize("cost", [ALWAYS, USUAL, NEVER], ids=["always", "usual", "never"])
def test_shared_pieces_are_those_of_the_reference(cost: AttentionCostModel) -> None:
    pieces = 0
    for seed in range(60):
        rows = Step(seed, cost).metadata
        plan, (expected, first) = planned(rows), reference(rows)
        assert sorted(plan.pieces) == sorted(expected)
        assert plan.first == first
        assert plan.slots == rows.slots.tolist()
        assert plan.rows == np.repeat(np.arange(len(rows.query_lens)), rows.query_lens).tolist()
        assert plan.end == (rows.token_indices + 1).tolist()
        assert plan.longest == max(end - own for own, end in zip(plan.first, plan.end, strict=True))
        pieces += len(expected)
    assert (pieces > 0) == (cost is not NEVER)


def test_every_key_is_read_once_however_deep_prefixes_are_nested() -> None:
    """Each row shares one page more than the row before, which makes more levels than a token may share."""
    count, size = 30, 4
    pages = np.tile(np.arange(count + 1), (count, 1))
    for row in range(count):
        pages[row, row + 1 :] = 100 + count * row + np.arange(count - row)
    contexts = np.full(count, (count + 1) * size)
    rows = AttentionMetadata(pages, np.ones_like(contexts), contexts, size, POOL, KV_HEADS, PER_KV, ALWAYS)
    plan = planned(rows)
    assert len(reference(rows)[0]) == count - 1 > len(plan.pieces) > 0
    for token, (first, end) in enumerate(zip(plan.first, plan.end, strict=True)):
        reads = [(begin, behind) for row, begin, behind, tokens in plan.pieces if token in tokens]
        assert all(
            (pages[row, : end // size] == pages[token, : end // size]).all()
            for row, _, end, some in plan.pieces
            if token in some
        )
        bounds = [0, *(behind for _, behind in reads)]
        assert [begin for begin, _ in reads] == bounds[:-1]
        assert (bounds[-1], end) == (first, contexts[token])


def test_keys_in_a_window_are_not_shared() -> None:
    for seed in range(20):
        rows = Step(seed, ALWAYS).metadata
        plan = planned(rows, window=9)
        if rows.seq_lens.max() > 9:
            assert plan.first == np.maximum(rows.token_indices + 1 - 9, 0).tolist()
            assert not plan.pieces


def test_large_pages_are_split_into_pages_of_the_kernel() -> None:
    rows = Step(3, NEVER).metadata
    plan = planned(rows, sharing=False, blocks=3)
    assert plan.pages.tolist() == [
        [3 * page + block for page in row for block in range(3)] for row in rows.page_table.tolist()
    ]
