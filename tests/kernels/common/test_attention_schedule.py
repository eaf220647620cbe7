"""The tiles of attention cover every key once, in chunks of similar size."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.common.attention_schedule import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    NO_TREE,
    PARTIAL,
    Segments,
    TilePlan,
    pack_bits,
    plan_tiles,
)

GROUP, KV_HEADS = 4, 8


def plan(contexts: list[int], queries: list[int], *, programs: int = 264, window: int | None = None) -> TilePlan:
    rows, counts, ends = np.arange(len(contexts)), np.array(queries), np.array(contexts)
    tokens = np.arange(counts.sum())
    positions = np.repeat(ends - counts, counts) + tokens - np.repeat(np.cumsum(counts) - counts, counts)
    segments = Segments(rows, counts, tokens, 0 * rows, ends, 0 * rows + NO_TREE, 0 * rows)
    sizes = {"heads_per_kv": GROUP, "kv_heads": KV_HEADS, "head_dim": 128}
    return plan_tiles(segments, rows[:, None], positions, positions, programs=programs, window=window, **sizes)


@pytest.mark.parametrize("window", [None, 7, 300])
def test_every_visible_key_is_in_exactly_one_tile_of_its_query(window: int | None) -> None:
    contexts, queries = [1, 64, 65, 700, 3000, 500], [1, 1, 4, 5, 1, 200]
    made = plan(contexts, queries, programs=100, window=window).arrays
    read = {token: np.zeros(max(contexts), np.int64) for token in range(sum(queries))}
    for tile in np.concatenate((made["low"], made["high"])):
        for token in made["tokens"][tile[FIRST] : tile[FIRST] + tile[COUNT]]:
            read[token][tile[BEGIN] : tile[END]] += 1
    for token, times in read.items():
        last = made["positions"][token]
        first = 0 if window is None else max(0, last - window + 1)
        assert (times[first : last + 1] == 1).all()
        assert (times <= 1).all()


def test_a_short_context_is_not_split_and_a_long_one_is_split_for_the_whole_gpu() -> None:
    assert len(plan([256], [1]).arrays["low"]) == 1
    for context in (4096, 32768, 131072):
        tiles = plan([context], [1]).arrays["low"]
        lengths = tiles[:, END] - tiles[:, BEGIN]
        assert min(264, context * KV_HEADS // 256) * 0.75 <= len(tiles) * KV_HEADS <= 264 + KV_HEADS
        assert np.ptp(lengths[:-1]) == 0 < lengths[-1] <= lengths[0]


def test_chunks_of_unequal_contexts_are_of_similar_length() -> None:
    """The longest context must not keep the GPU waiting."""
    tiles = plan([30000, 500, 700, 900], [1] * 4).arrays["low"]
    assert (tiles[:, END] - tiles[:, BEGIN]).max() <= 1.1 * (30000 + 2100) * KV_HEADS / 264


def test_each_partial_result_has_an_index_and_is_merged_once() -> None:
    made = plan([4096, 100, 2000], [1, 2, 3]).arrays
    tiles = made["low"]
    partial = tiles[tiles[:, PARTIAL] >= 0]
    places = np.concatenate([np.arange(tile[PARTIAL], tile[PARTIAL] + tile[COUNT]) for tile in partial])
    assert sorted(made["partials"]) == sorted(places) == list(range(len(places)))
    for token, first, count in made["merged"]:
        owners = [
            made["tokens"][tile[FIRST] + place - tile[PARTIAL]]
            for place in made["partials"][first : first + count]
            for tile in partial
            if tile[PARTIAL] <= place < tile[PARTIAL] + tile[COUNT]
        ]
        assert owners == [token] * count
    assert made["merged"][:, 0].tolist() == [0, 3, 4, 5]


def test_bits_are_packed_lowest_first() -> None:
    sees = np.zeros((2, 40), np.bool_)
    sees[0, [0, 31, 32]] = sees[1, 39] = True
    assert pack_bits(sees, 2).tolist() == [[1 - 2**31, 1], [0, 128]]
