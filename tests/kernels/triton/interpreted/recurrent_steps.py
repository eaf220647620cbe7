"""Random steps over slots of states: sequences that begin, fork, are cut for snapshots, and have trees of drafts."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache.state_layers import StateSegment
from tests.seeds import shift


class Step(NamedTuple):
    table: Tensor
    """``[segments, 5]``."""
    num_tokens: int
    num_slots: int
    longest: int
    """Tokens of the longest path from a state that was there before."""


def random_step(seed: int, *, longest: int = 6, drafts: int = 3, sequences: int = 4, padding: int = 2) -> Step:
    """Return a step of ``sequences`` sequences, each with up to ``longest`` tokens and a tree of ``drafts``.

    The first begins, the second and the third fork the same state, the others advance in place. All are cut where
    snapshots are taken, one with a cut before it has a token.
    """
    rng = np.random.default_rng(shift(seed))
    segments: list[StateSegment] = []
    start, slots, deepest = 0, iter(range(1, 1000)), 0
    for row in range(sequences):
        count = int(rng.integers(1, longest + 1))
        source = (-1, 0, 0)[row] if row < 3 else next(slots)
        target = next(slots) if row < 3 else source
        cuts = sorted({0, count, *rng.integers(0, count + 1, 2).tolist()})
        own = [[start + first, start + end] for first, end in pairwise(cuts)]
        if row == 1:
            own.insert(0, [start, start])
        chain: list[StateSegment] = []
        for index, (first, end) in enumerate(own):
            into = target if index == len(own) - 1 else next(slots)
            chain.append(StateSegment(first, end, source, into))
            source = into if first < end else source
        start += count
        nodes, depths = [target], [0]
        for _ in range(drafts):
            parent = int(rng.integers(len(nodes)))
            nodes.append(next(slots))
            depths.append(depths[parent] + 1)
            chain.append(StateSegment(start, start + 1, nodes[parent], nodes[-1]))
            start += 1
        deepest = max(deepest, count + max(depths))
        segments += [chain[0]._replace(num_chained=len(chain)), *chain[1:]]
    table = torch.zeros(len(segments) + padding, len(StateSegment._fields), dtype=torch.int64)
    table[: len(segments)] = torch.tensor(segments)
    return Step(table, start, next(slots), deepest)
