"""The search that every system runs: W3 with a verifier. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.workloads import VOCAB

SEPARATOR_ID = 299
"""Stands behind each step in what the verifier reads; prompts and steps are drawn beside it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """In each of ``rounds`` rounds all survivors are continued to ``beams`` beams in all, each by a step of ``tokens``
    tokens (the end of sequence is ignored), at temperature 1; the verifier scores each beam's new step, and the
    ``survivors`` best go on."""

    prompt: int = 512
    rounds: int = 8
    beams: int = 8
    survivors: int = 4
    tokens: int = 32


W3 = Shape()
WIDE = Shape(beams=16)


@dataclass(slots=True)
class Seen:
    """What one search took."""

    seconds: float = 0.0
    scoring: float = 0.0
    """Those of ``seconds`` in which scores were waited for."""
    generated: int = 0
    computed: int = 0
    """Tokens that the verifier computed."""
    cached: int = 0
    """Tokens that the verifier read and had in its cache; with the computed ones, all that it was shown."""


@dataclass(frozen=True, slots=True)
class Beam:
    """``path``: all token ids as the policy reads them; ``steps``: what was generated, step by step."""

    path: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    def grown(self, step: Sequence[int]) -> Beam:
        """The beam with one more step."""
        return Beam((*self.path, *step), (*self.steps, tuple(step)))


def prompt(shape: Shape, seed: int) -> tuple[int, ...]:
    """Token ids of the question: every seed has its own."""
    return tuple(random.Random(seed).choices(VOCAB, k=shape.prompt))


def survivors(shape: Shape, beams: Sequence[Beam], scores: Sequence[float]) -> list[Beam]:
    """The best beams, best first."""
    order = sorted(range(len(beams)), key=lambda index: -scores[index])
    return [beams[index] for index in order[: shape.survivors]]


def check(shape: Shape, beams: Sequence[Beam], scores: Sequence[float]) -> None:
    """Raises ``RuntimeError`` where a round did not bring what the shape says."""
    lengths = [len(beam.steps[-1]) for beam in beams]
    if lengths != [shape.tokens] * shape.beams or len(scores) != shape.beams:
        raise RuntimeError(f"asked for {shape.beams} scored steps of {shape.tokens} tokens, given were {lengths}")
