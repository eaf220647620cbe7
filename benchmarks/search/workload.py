"""The search that every system runs: W3 with a verifier. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.workloads import VOCAB

SEPARATOR_ID = 299
"""Token that follows each step in the verifier's input; prompts and steps never contain it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a search. In each of ``rounds`` rounds all survivors are continued to ``beams`` beams in all, each by a
    step of ``tokens`` tokens (the end of sequence is ignored), at temperature 1; the verifier scores each beam's new
    step, and the ``survivors`` best continue.
    """

    prompt: int = 512
    rounds: int = 8
    beams: int = 8
    survivors: int = 4
    tokens: int = 32


W3 = Shape()
WIDE = Shape(beams=16)


@dataclass(slots=True)
class Seen:
    """Time and tokens of one search."""

    seconds: float = 0.0
    scoring: float = 0.0
    """Part of ``seconds`` spent waiting for scores."""
    generated: int = 0
    computed: int = 0
    """Tokens that the verifier computed."""
    cached: int = 0
    """Tokens of the verifier's input that were cached; the others were computed."""


@dataclass(frozen=True, slots=True)
class Beam:
    """``path``: all token ids as the policy reads them; ``steps``: the generated steps."""

    path: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    def grown(self, step: Sequence[int]) -> Beam:
        """Return the beam with one more step."""
        return Beam((*self.path, *step), (*self.steps, tuple(step)))


def prompt(shape: Shape, seed: int) -> tuple[int, ...]:
    """Return the token ids of the question; every seed has its own."""
    return tuple(random.Random(seed).choices(VOCAB, k=shape.prompt))


def survivors(shape: Shape, beams: Sequence[Beam], scores: Sequence[float]) -> list[Beam]:
    """Return the best beams, best first."""
    order = sorted(range(len(beams)), key=lambda index: -scores[index])
    return [beams[index] for index in order[: shape.survivors]]


def check(shape: Shape, beams: Sequence[Beam], scores: Sequence[float]) -> None:
    """Raise ``RuntimeError`` if a round's beams and scores do not have the requested shape."""
    lengths = [len(beam.steps[-1]) for beam in beams]
    if lengths != [shape.tokens] * shape.beams or len(scores) != shape.beams:
        raise RuntimeError(f"asked for {shape.beams} scored steps of {shape.tokens} tokens, given were {lengths}")
