"""Constraints of the tests, requests with them, and a drafter that guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.protocol.constraint import Constraint
from engine.protocol.types import Branch, GenerateRequest, SamplingParams
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from tests.seeds import shift

PROMPT = (17, 5, 90, 41, 5)
EOS = 0
WORDS = ("ab", "abc", "ba", "café", "c7", "step", "so 7")
"""A finite language, so that the tokens that may come next can be found by trying all of them."""
CHOICE = Constraint("choice", json.dumps(WORDS))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "step": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "done": {"type": "boolean"},
    },
    "required": ["step", "done"],
    "additionalProperties": False,
}
KINDS = {
    "json": Constraint("json", json.dumps(SCHEMA)),
    "regex": Constraint("regex", r"[a-d]{2,4}-\d"),
    "choice": CHOICE,
    "grammar": Constraint("grammar", 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,2}/'),
}
Law = dict[tuple[int, ...], float]


def make_request(
    constraint: Constraint, branches: Sequence[Branch], lifts: tuple[int, ...] = (), **sampling: Any
) -> GenerateRequest:
    params = SamplingParams(**sampling)
    return GenerateRequest(
        "r", "m", PROMPT, tuple(branches), params, constraint=constraint, constraint_escape_tokens=lifts
    )


class Guesses:
    """Drafts random tokens: most often ones that the language allows, sometimes others, as chains or trees."""

    kind = "guesses"
    hidden_state_needs = HiddenStateNeeds.NONE
    observed_layers: tuple[int, ...] = ()
    key_shapes: tuple[HeadShape, ...] = ()

    def __init__(self, law: Law) -> None:
        self._rng = np.random.default_rng(shift(5))
        self._sequences = list(law)

    def reset(self, cache: KVCache) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        return [self._guess(wish) for wish in wishes]

    def _guess(self, wish: DraftRequest) -> Draft:
        written = tuple(wish.sequence.generated)
        paths: dict[tuple[int, ...], int] = {(): -1}
        parents: list[int] = []
        while len(paths) <= wish.nodes and self._rng.random() < 0.9:
            sequence = self._sequences[self._rng.integers(len(self._sequences))]
            rest = sequence[len(written) :] if sequence[: len(written)] == written else ()
            rest = rest if self._rng.random() < 0.9 else (int(self._rng.integers(1, 300)), *rest)
            for end in range(1, min(len(rest), wish.depth) + 1):
                if rest[:end] not in paths and len(paths) <= wish.nodes:
                    parents.append(paths[rest[: end - 1]])
                    paths[rest[:end]] = len(parents) - 1
            if wish.nodes == wish.depth:
                break
        tokens = [path[-1] for path in paths if path]
        return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens))

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        pass

    def release(self, sequence: GenerateSequence) -> None:
        pass

    def warm_ups(self) -> list[Callable[[], None]]:
        return []

    def clear_cache(self) -> None:
        pass
