"""Workloads of systems with speculative decoding: real problems, several at a time, and a tree search. Standard library
only, since peers import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PLAIN, SPECULATIVE, ALWAYS, SHORT = "plain", "controller", "always 4", "n-grams of 1 to 4"
"""Ways to run such a system: without draft tokens, with as many as the controller chooses, with always four, and with a
controller and n-grams of at most four tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to continue."""

    ids: tuple[int, ...]
    temperature: float
    tokens: int
    """Maximum number of new tokens."""
    ends: bool
    """True if the end-of-sequence token ends the text."""


@dataclass(slots=True)
class Solved:
    """Results of one call."""

    seconds: float
    texts: list[list[int]]
    """New tokens by prompt; those of all branches are concatenated."""
    drafted: int = 0
    accepted: int = 0
    """Number of accepted draft tokens, of the ``drafted`` ones."""
    prompt: int = 0
    cached: int = 0
    """Number of cached prompt tokens, of the ``prompt`` ones."""

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return sum(map(len, self.texts))


class Solver(Protocol):
    """A system with a checkpoint loaded. Every call starts with a cold cache. Systems that can run in several ways take
    one of the above as ``way``.
    """

    def tokenize(self, problem: str) -> list[int]:
        """Return the prompt of a problem."""
        ...

    def solve(self, prompts: Sequence[Prompt], batch: int, seed: int) -> Solved:
        """Continue the prompts, ``batch`` at a time: when one ends, the next begins."""
        ...

    def best_of(self, prompts: Sequence[Prompt], branches: int, seed: int) -> Solved:
        """Continue one prompt after the other, each in ``branches`` at once."""
        ...

    def search(self, prompts: Sequence[Prompt], seed: int) -> Solved:
        """Run W3 on one prompt after the other: rounds of 8 beams, which end with a step (an empty line) or after
        ``Prompt.tokens``. After each round 4 survive and are doubled; the next round sends each survivor's path.
        """
        ...

    def imitate(self, texts: list[list[int]], right: float) -> None:
        """Let the simulated drafter propose tokens of these texts, each correct with probability ``right``."""
        ...


def call(system: Solver, name: str, prompts: Sequence[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """Call ``solve``, ``best_of`` or ``search`` with plain JSON values, and return such values."""
    asked = [Prompt(**{**prompt, "ids": tuple(prompt["ids"])}) for prompt in prompts]
    return asdict(getattr(system, name)(asked, **arguments))
