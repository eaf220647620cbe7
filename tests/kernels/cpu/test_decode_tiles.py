"""Tiles of a decoding step by the compiled planner: those of the reference, whatever sequences share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.attention.cuda_triton import _build_segments
from engine.attention.plan import AttentionCostModel, AttentionMetadata, IntArray
from kernels.common.attention_schedule import BEGIN, COUNT, END, FIRST, FREE, PARTIAL, ROW, TREE, TilePlan, plan_tiles
from kernels.cpu.attention.decode_tiles import DecodeTilePlanner
from kernels.cpu.attention.plan import MAX_SHARED
from tests.seeds import shift

SIZE = 16
ALWAYS, USUAL, NEVER = AttentionCostModel(1024, 0, 0), AttentionCostModel(4096), AttentionCostModel(1, 1 << 60)


def decode_step(seed: int, cost: AttentionCostModel) -> AttentionMetadata:
    """Return a step whose rows come from a random tree of pages, with few levels."""
    dice = random.Random(shift(seed))
    unused = iter(range(1 << 20))
    paths: list[list[int]] = [[]]
    for _ in range(dice.choice([1, 3, 17, 60])):
        parent = dice.choice(paths[:6])
        shared = dice.randint(0, len(parent))
        own = [next(unused) for _ in range(dice.choice([1, 2, 40, 200]))]
        paths.append([*parent[:shared], *own])
    rows = paths[1:]
    pages = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, path in enumerate(rows):
        pages[row, : len(path)] = path
    contexts = np.array([len(path) * SIZE - dice.randrange(SIZE) for path in rows])
    return AttentionMetadata(pages, np.ones_like(contexts), contexts, SIZE, 1 << 20, 2, 4, cost)


def plans(
    step: AttentionMetadata,
    heads: int,
    programs: int,
    window: int | None,
    planner: DecodeTilePlanner | None = None,
    *,
    is_float32: bool = False,
) -> tuple[TilePlan, TilePlan]:
    """Return the compiled plan and the reference."""
    sizes: dict[str, Any] = {"heads_per_kv": heads, "kv_heads": 2, "head_dim": 64, "programs": programs}
    sizes["is_float32"] = is_float32
    planner = planner or DecodeTilePlanner(**sizes)
    ours = planner.plan(step.page_table, step.seq_lens, SIZE, costs=step.cost_model.as_bytes, window=window)
    segments, positions, _ = _build_segments(step, should_share=window is None)
    return ours, plan_tiles(segments, step.page_table, positions, step.slots, window=window, **sizes)


def reads(plan: TilePlan) -> list[list[tuple[int, ...]]]:
    """Return the tiles that each token reads, in the order in which their results are merged."""
    arrays = plan.arrays
    tiles = np.concatenate((arrays["low"], arrays["high"]))
    owner: dict[int, IntArray] = {}
    whole: dict[int, list[IntArray]] = {}
    for tile in tiles:
        for offset in range(tile[COUNT]):
            if tile[PARTIAL] >= 0:
                assert owner.setdefault(int(tile[PARTIAL]) + offset, tile) is tile
            else:
                whole.setdefault(int(arrays["tokens"][tile[FIRST] + offset]), []).append(tile)
    assert sorted(owner) == sorted(arrays["partials"].tolist()) == list(range(len(owner)))
    for token, first, count in arrays["merged"].tolist():
        assert token not in whole
        whole[token] = [owner[entry] for entry in arrays["partials"][first : first + count].tolist()]
    fields = [ROW, COUNT, BEGIN, END, FREE, TREE]
    return [[tuple(tile[fields].tolist()) for tile in whole[token]] for token in range(len(arrays["positions"]))]


def is_deep(expected: TilePlan) -> bool:
    """Return True if tokens are in more shared pieces than the compiled planner shares (``MAX_SHARED``)."""
    num_tokens = len(expected.arrays["positions"])
    return len(expected.arrays["tokens"]) - num_tokens > MAX_SHARED * num_tokens


@pytest.mark.parametrize("cost", [ALWAYS, USUAL, NEVER], ids=["always", "usual", "never"])
@pytest.mark.parametrize("window", [None, 9, 700])
def test_each_token_reads_the_tiles_of_the_reference(cost: AttentionCostModel, window: int | None) -> None:
    num_shared = num_deep = 0
    for seed in range(60):
        step, heads, programs = decode_step(seed, cost), (1, 4, 7)[seed % 3], (4, 264)[seed % 2]
        ours, expected = plans(step, heads, programs, window, is_float32=seed % 5 == 0)
        if is_deep(expected):
            num_deep += 1
            continue
        assert reads(ours) == reads(expected)
        assert ours.height == expected.height
        for name in ("pages", "positions", "slots"):
            assert ours.arrays[name].dtype == expected.arrays[name].dtype
            assert (ours.arrays[name] == expected.arrays[name]).all()
        assert [len(ours.arrays[name]) for name in ours.arrays] == [len(expected.arrays[name]) for name in ours.arrays]
        num_shared += len(expected.arrays["tokens"]) - len(step.seq_lens)
    assert (num_shared > 0) == (cost is not NEVER and window is None)
    assert num_deep < 30


def test_every_array_is_that_of_the_reference_if_one_prefix_is_shared() -> None:
    pages = np.arange(40 * 200).reshape(40, 200)
    pages[:, :130] = pages[0, :130]
    contexts = np.array([131 * SIZE + 37 * row for row in range(30)] + [SIZE * 131] * 10)
    for count in (2, 4, 40):
        step = AttentionMetadata(pages[:count], np.ones(count, np.int64), contexts[:count], SIZE, 1 << 20, 2, 4, ALWAYS)
        ours, expected = plans(step, 4, 264, None)
        for name, array in expected.arrays.items():
            compared = [ROW, FIRST, COUNT, BEGIN, END, FREE, TREE, PARTIAL] if name in ("low", "high") else slice(None)
            assert (ours.arrays[name][..., compared] == array[..., compared]).all(), name


def test_a_planner_serves_steps_of_growing_and_shrinking_size() -> None:
    planner = DecodeTilePlanner(heads_per_kv=4, kv_heads=2, head_dim=64, programs=264)
    for seed in range(20):
        ours, expected = plans(decode_step(seed, ALWAYS), 4, 264, None, planner)
        assert is_deep(expected) or reads(ours) == reads(expected)


def test_deeply_nested_prefixes_are_read_once_by_each_token() -> None:
    """Each row shares one page more than the row before: more levels than a row may share on average."""
    count = 60
    pages = np.tile(np.arange(count + 1), (count, 1))
    for row in range(count):
        pages[row, row + 1 :] = 100 + count * row + np.arange(count - row)
    contexts = np.full(count, (count + 1) * SIZE)
    step = AttentionMetadata(pages, np.ones_like(contexts), contexts, SIZE, 1 << 20, 2, 4, ALWAYS)
    ours, expected = plans(step, 4, 264, None)
    assert len(step.seq_lens) < len(ours.arrays["tokens"]) < len(expected.arrays["tokens"])
    for token, tiles in enumerate(reads(ours)):
        ranges = sorted((begin, end) for _, _, begin, end, _, _ in tiles)
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == contexts[token]
        for row, _, _, end, _, _ in tiles:
            shared = min(end, int(contexts[token])) // SIZE
            assert row == token or (pages[row, :shared] == pages[token, :shared]).all()
