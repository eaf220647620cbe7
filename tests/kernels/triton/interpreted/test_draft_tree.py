"""Candidates and trees on a device equal those of the host's algorithm, ties included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.scheduler.draft import Draft
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters import tree_draft
from kernels.common.draft_trees import NODES, CandidateRules, TreeBuffers
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.sampling import draft_tree as plain
from kernels.triton import draft_tree
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.planted import planted
from tests.long import mostly_long
from tests.seeds import shift

RULES = CandidateRules(64, 12.0, 0.75)
WIDTH = 4
Rank = Callable[..., tuple[Tensor, Tensor]]
Grow = Callable[..., None]


def rank_kernel(module: Any) -> Rank:
    return partial(_without_purpose, module.rank_drafts)


def _without_purpose(rank: Any, *args: Any) -> tuple[Tensor, Tensor]:
    return rank(*args, SAMPLE)


@cache
def distributions(vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits of two rows a branch, many of them equal, and the parameters of 11 branches."""
    generator = torch.Generator().manual_seed(shift(vocab))
    laws = [*product((0.0, 1.0, 0.4, 1.7), (64, 5), (1.0, 0.8), (0.0, 0.05))][::3]
    logits = torch.randn(22, vocab + 5, generator=generator)[:, :vocab] * 3
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[7], logits[8, 3], logits[9, 5] = -torch.inf, torch.inf, torch.nan
    logits[10, 4:] = -torch.inf
    logits[12] = 0
    temperature, top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*laws, strict=True))
    greedy = temperature == 0
    floats = torch.stack((temperature, torch.where(greedy, 1, top_p), torch.where(greedy, 0, min_p)))
    keys = torch.randint(-(2**62), 2**62, (2, 11), generator=generator)
    ints = torch.stack((torch.where(greedy, 64, top_k.long()), *keys, torch.arange(11) * 3))
    return logits, floats, ints, torch.arange(11) % 4


def rank_rows(vocab: int) -> list[list[tuple[int, float]]]:
    """Return the candidates of each row with a positive probability, by the definition, one row after the other."""
    logits, floats, ints, ahead = (tensor.numpy() for tensor in distributions(vocab))
    found = []
    for row, x in enumerate(logits.astype(np.float64)):
        branch = row // 2
        temperature, top_p, min_p = floats[:, branch]
        found.append([])
        if not math.isfinite(x.max()):
            continue
        order = np.lexsort((np.arange(vocab), -x))[: RULES.max_candidates]
        order = order[x[order] >= x.max() - RULES.reach * max(temperature, 1)][: ints[0, branch]]
        shares = np.exp((x[order] - x.max()) / (temperature or 1))
        before = shares.cumsum() - shares
        order = order[((before < top_p * shares.sum()) | (top_p >= 1)) & (shares >= min_p)]
        where = (word[None] for word in (ints[1, branch], ints[2, branch], ints[3, branch] + ahead[branch]))
        noise = gumbel_noise(noise_streams(*where, SAMPLE), order)
        scores = x[order] - x.max() + RULES.noise * temperature * noise
        weights = np.exp(scores - scores.max())
        best = np.lexsort((np.arange(len(order)), -scores))[:WIDTH]
        found[-1] += zip(order[best].tolist(), (weights[best] / weights.sum()).tolist(), strict=True)
    return found


def ranks_right(rank: Rank, vocab: int) -> bool:
    tokens, probs = (x.cpu() for x in rank(*(x.to(DEVICE) for x in distributions(vocab)), WIDTH, RULES))
    for row, expected in enumerate(rank_rows(vocab)):
        possible = (probs[row] > 0).tolist()
        if possible != [True] * len(expected) + [False] * (WIDTH - len(expected)):
            return False
        if tokens[row, : len(expected)].tolist() != [token for token, _ in expected]:
            return False
        # The rounding of a score, of at most 745 or its exponential is 0, is the relative error of its exponential.
        if not np.allclose(
            probs[row, : len(expected)], [prob for _, prob in expected], rtol=8 * 745 * 2**-53, atol=1e-300
        ):
            return False
    return True


@pytest.mark.parametrize("vocab", mostly_long([40, 400, 2100], every=3))
def test_candidates_are_ranked_by_the_definition(vocab: int) -> None:
    """One chunk of a row, which is smaller than the number of candidates, and several."""
    assert ranks_right(plain.rank_drafts, vocab)
    assert ranks_right(rank_kernel(draft_tree), vocab)


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    mostly_long(
        [
            ("(0x7FFFFFFF - token).to(tl.int64)", "token.to(tl.int64)"),
            ("tl.where(x == 0, 0.0, x)", "-x"),
            ("gap < -reach", "gap < -0.5 * reach"),
            ("mass - weight < top_p", "mass < top_p"),
            ("lane < top_k", "lane <= top_k"),
            ("+ tl.load(AHEAD + branch)", ""),
            ("branch = row // ROWS", "branch = row // ROWS * 0"),
            ("score = tl.where(lane == chosen, float", "score = tl.where(lane < chosen, float"),
            ("tl.where(x != x, 0x7FFFFFFF,", "tl.where(x != x, 0,"),
        ],
        every=9,
    ),
)
def test_bugs_planted_in_the_ranking_are_detected(right: str, wrong: str, tmp_path: Path) -> None:
    module = planted("draft_tree", right, wrong, "draft_tree", tmp_path)
    assert not all(ranks_right(rank_kernel(module), vocab) for vocab in (400, 40))


SHAPES = [(4, 12), (5, 5), (1, 1), (6, 24), (3, 4), (2, 7)]
"""Depths and numbers of nodes; equal ones are chains."""
ENDING = [5, 9]


def buffers_for(wide: int, shapes: Sequence[tuple[int, int]]) -> TreeBuffers:
    """Return buffers of branches with ``shapes``, then one that is padding. Their contents are undefined."""
    branches, most = len(shapes) + 1, max(depth for depth, _ in shapes)

    def garbage(*shape: int) -> Tensor:
        return torch.full(shape, 77, device=DEVICE)

    params = torch.tensor(
        [[nodes, depth, int(nodes == depth), 100 + place, *ENDING] for place, (depth, nodes) in enumerate(shapes)]
        + [[0, 0, 0, 0, -1, -1]]
    ).T.contiguous()
    rows, words = branches * wide, -(-wide * most // 32)
    return TreeBuffers(
        params=params.to(DEVICE),
        tree=garbage(branches, 3 * NODES + 1),
        values=torch.full((branches, NODES), 0.5, dtype=torch.float64, device=DEVICE),
        row_nodes=garbage(rows),
        level=garbage(branches),
        ends=garbage(branches),
        parent_rows=garbage(rows),
        row_tokens=garbage(rows),
        positions=garbage(rows),
        slots=garbage(rows),
        sees=torch.full((rows, words), -1, dtype=torch.int32, device=DEVICE),
        wide=wide,
        room=wide * most,
    )


def read_tree(row: Tensor) -> Draft:
    count = int(row[-1])
    tokens, parents, probs = row[:-1].view(3, NODES)[:, :count]
    return Draft(tuple(tokens.tolist()), tuple(parents.tolist()), tuple(probs.view(torch.float64).tolist()))


def grows_right(grow: Grow, seed: int, wide: int = 5) -> bool:
    """Return True if random candidates give the host's trees, and each level's rows are the host's.

    Every probability is a power of two, so that many values are equal."""
    rng = np.random.default_rng(shift(seed))
    requests: list[Any] = [
        DraftRequest(SimpleNamespace(terminal_tokens=frozenset(ENDING)), *shape)  # type: ignore[arg-type]
        for shape in SHAPES
    ]
    trees, buffers = [tree_draft._Tree(request) for request in requests], buffers_for(wide, SHAPES)
    count, rows = len(SHAPES), [(branch, 0, -1) for branch in range(len(SHAPES))]
    seen: dict[tuple[int, int], set[int]] = {}
    for ahead in range(6):
        num_rows = wide if ahead else 1
        tokens = rng.integers(0, 12, (count + 1, num_rows, WIDTH))
        choices = np.array([[0.5, 0.25, 0.125, 0.125], [0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4, [math.nan] * 4])
        probs = choices[rng.choice(5, (count + 1, num_rows), p=[0.3, 0.2, 0.3, 0.15, 0.05])]
        flat = (torch.from_numpy(x).view(-1, WIDTH).to(DEVICE) for x in (tokens, probs))
        grow(*flat, buffers, tree_draft.FLOOR, is_first=ahead == 0)
        for index, (branch, place, node) in enumerate(rows):
            trees[branch].add(node, index, tokens[branch, place].tolist(), probs[branch, place].tolist())
        level, nodes = tree_draft._next_level(trees, ahead + 1)
        if [read_tree(row) for row in buffers.tree[:count].cpu()] != [tree.draft() for tree in trees]:
            return False
        before, rows, sees = rows, [], {}
        used = [0] * (count + 1)
        for branch, parent, token, node in zip(*(x.tolist() for x in level), nodes, strict=True):
            place = used[branch]
            used[branch] += 1
            rows.append((branch, place, node))
            row = branch * wide + place
            parent_place = before[parent][1]
            sees[branch, place] = seen.get((branch, parent_place), set()) | {ahead * wide + place}
            expected = (branch * wide + parent_place, token, 100 + branch + ahead, branch * buffers.room)
            found = (buffers.parent_rows, buffers.row_tokens, buffers.positions, buffers.slots)
            offset = ahead * wide + place
            if tuple(int(x[row]) for x in found) != (*expected[:3], expected[3] + offset):
                return False
            if bits(buffers.sees[row]) != sees[branch, place]:
                return False
        seen = sees
        for branch, place in product(range(count + 1), range(wide)):
            row = branch * wide + place
            if (int(buffers.row_nodes[row]) >= 0) != (place < used[branch]):
                return False
            if place >= used[branch] and bits(buffers.sees[row]) != {ahead * wide + place}:
                return False
        if int(buffers.tree[count, -1]) or buffers.ends.tolist() != [(ahead + 1) * wide] * (count + 1):
            return False
    return True


def bits(words: Tensor) -> set[int]:
    return {index for index in range(32 * len(words)) if int(words[index // 32]) >> (index % 32) & 1}


SEEDS = range(2)
PLANTED_SEEDS = range(40)
"""Some bugs show in a quarter of the random trees."""


@pytest.fixture(autouse=True)
def _some_values_equal_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_draft, "FLOOR", 0.25)


def test_trees_are_those_of_the_hosts_algorithm() -> None:
    for seed in SEEDS:
        assert grows_right(plain.grow, seed)
        assert grows_right(draft_tree.grow, seed)


def test_without_a_floor_levels_are_as_wide_as_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)
    for grow in (plain.grow, draft_tree.grow):
        assert grows_right(grow, 7, wide=24)


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    mostly_long(
        [
            ("(lane[None, :] < lane[:, None])", "(lane[None, :] > lane[:, None])"),
            ("new_prob > 0", "new_prob >= 0"),
            ("(value >= floor)", "(value > floor)"),
            ("base * new_prob", "new_prob"),
            ("(level + 1 < depth)", "(level < depth)"),
            ("((is_chain == 0) | (rank == 0))", "(is_chain >= 0)"),
            ("tl.sum(tl.where(is_parent, index[None, :], 0), axis=1)", "parent"),
            ("& (ends == 0)", ""),
            ("seen |= tl.load", "seen += 2 * tl.load"),
            ("branch * room + level * WIDE", "branch * room"),
            ("tl.full([LANES], -2, tl.int64)", "tl.full([LANES], 0, tl.int64)"),
        ],
        every=4,
    ),
)
def test_bugs_planted_in_the_growth_are_detected(right: str, wrong: str, tmp_path: Path) -> None:
    module = planted("draft_tree", right, wrong, "draft_tree", tmp_path)
    assert not all(grows_right(module.grow, seed) for seed in PLANTED_SEEDS)
