"""Drafters for tests: draft trees of any shape with a given acceptance rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from tests.seeds import shift

Place = tuple[int, int, int]
"""A branch's seed and key, and a position."""


class Oracle:
    """Drafts the branch's true next tokens with probability ``right``, at a random node of a random tree."""

    kind = "oracle"
    hidden_state_needs = HiddenStateNeeds.ALL
    observed_layers: tuple[int, ...] = ()
    key_shapes: tuple[HeadShape, ...] = ()

    def __init__(self, known: Mapping[Place, int], vocab: int, right: float, seed: int = 0) -> None:
        self._known, self._vocab, self._right = known, vocab, right
        self._random = random.Random(shift(seed))
        self.wishes = 0
        self.known: set[GenerateSequence] = set()

    def reset(self, cache: KVCache) -> None:
        self.known.clear()

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        self.wishes += len(wishes)
        return [self._guess(wish.sequence, wish.depth, wish.nodes) for wish in wishes]

    def _guess(self, sequence: GenerateSequence, depth: int, nodes: int) -> Draft:
        rng = self._random
        self.known.add(sequence)
        tokens: list[int] = []
        parents: list[int] = []
        depths = {-1: 0}
        while len(tokens) < nodes:
            able = [node for node, far in depths.items() if far < depth]
            if nodes == depth:
                able = able[-1:]
            if not able or rng.random() < 0.05:
                break
            parent = rng.choice(able[-3:])
            token = self._known.get((sequence.seed, sequence.key, len(sequence.tokens) + depths[parent]))
            if token is None:
                token = rng.randrange(self._vocab)
            elif rng.random() >= self._right:
                token = (token + rng.randrange(1, self._vocab)) % self._vocab  # any but the true one
            depths[len(tokens)] = depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), (self._right,) * len(tokens))

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        for sequence, first, rows in steps:
            assert first + len(rows) == sequence.num_computed <= len(sequence.tokens)
            assert (
                sequence.num_computed < len(sequence.tokens) or sequence.num_computed < sequence.num_prefix_tokens + 1
            )
            assert max(rows) < len(hidden)

    def release(self, sequence: GenerateSequence) -> None:
        self.known.discard(sequence)

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        pass
