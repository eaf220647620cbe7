"""The searches that every system runs on a GPU. Standard library only: peers run in their own environments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

GRADES = tuple(range(16, 21))
"""Tokens of five grades."""
QUESTION = tuple(range(32, 72))
"""Tokens of the question for a grade, which follows a solution; the kinds of tokens do not change the time."""
SEPARATOR = (15,)
"""Token after each step in the PRM's input."""

WARM_TOKENS = 8
"""Tokens of a step of the search before the one that is timed, in which kernels are compiled."""


@dataclass(frozen=True)
class Search:
    """In each of ``rounds`` rounds the survivors are continued to ``beams`` beams in all, each by a step of ``tokens``
    tokens (the end of sequence is ignored) at temperature 1; each beam's new step is scored, and the best ones survive.
    Best-of-N has one round.
    """

    name: str
    prompt: int
    """Tokens of the prompt."""
    beams: int
    scores: str
    """``prm``: a second model of the same size reads the solution and its steps. ``grades``: the policy itself answers
    a question behind the solution. ``none``: survivors are the first beams."""
    rounds: int = 1
    survivors: int = 1
    tokens: int = 256

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return self.rounds * self.beams * self.tokens

    @property
    def kept(self) -> int:
        """Upper bound of the tokens whose keys one model holds."""
        return self.prompt + self.generated + self.beams * (len(QUESTION) + 2 * self.rounds + 64)


@dataclass(frozen=True)
class Beam:
    """A solution: the tokens of its prompt and those of its steps."""

    prompt: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...] = ()

    @property
    def path(self) -> tuple[int, ...]:
        """All tokens as the policy reads them."""
        return (*self.prompt, *(token for step in self.steps for token in step))

    def grow(self, step: Sequence[int]) -> Beam:
        """Return the beam with one more step."""
        return Beam(self.prompt, (*self.steps, tuple(step)))


@dataclass
class Seen:
    """What a search took."""

    seconds: float
    scoring: float
    """Part of ``seconds`` in which scores were waited for."""
    computed: int = 0
    """Tokens that scoring computed; the rest of its input was cached."""


def list_searches() -> list[Search]:
    """Return the searches of the table."""
    best = [
        Search(f"best of {beams}, prompt of {prompt:,}", prompt, beams, scores)
        for prompt in (1024, 8192)
        for beams in (16, 64, 256)
        for scores in ("none", "prm")
    ]
    trees = [
        Search(
            f"tree of 4 × 4, 8 steps, prompt of {prompt:,}",
            prompt,
            16,
            scores,
            rounds=8,
            survivors=4,
            tokens=64,
        )
        for prompt in (1024, 8192)
        for scores in ("none", "prm", "grades")
    ]
    return [*best, *trees]


def list_tiny_searches() -> list[Search]:
    """Return one small search of each kind."""
    best = Search("best of 2, prompt of 40", 40, 2, "prm", tokens=6)
    trees = [
        Search("tree of 2 × 2, 2 steps", 40, 4, scores, rounds=2, survivors=2, tokens=5)
        for scores in ("none", "grades")
    ]
    return [best, *trees]


def make_prompt(search: Search, seed: int) -> Beam:
    """Return a beam without steps; every seed has its own prompt."""
    return Beam(tuple(random.Random(seed).choices(range(100, 400), k=search.prompt)))


def choose(search: Search, beams: Sequence[Beam], scores: Sequence[float]) -> list[Beam]:
    """Return the survivors, best first, of equal scores the earlier. Raises ``RuntimeError`` for steps of a wrong
    size."""
    if len(scores) != search.beams or any(len(beam.steps[-1]) != search.tokens for beam in beams):
        raise RuntimeError(f"{search.name}: asked for {search.beams} steps of {search.tokens} tokens and their scores")
    order = sorted(range(len(beams)), key=lambda index: -scores[index])
    return [beams[index] for index in order[: search.survivors]]
