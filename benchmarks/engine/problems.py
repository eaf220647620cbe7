"""What systems that guess are asked to do: real problems, several at a time, and a tree search. Standard library only:
peers import it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PLAIN, GUESSING, ALWAYS = "plain", "controller", "always 4"
"""Ways to run a system that guesses: not at all, as many guesses as pay, and without a controller."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to continue."""

    ids: tuple[int, ...]
    temperature: float
    tokens: int
    """Most new tokens."""
    ends: bool
    """Whether the end of sequence ends it."""


@dataclass(slots=True)
class Solved:
    """What a system did with prompts."""

    seconds: float
    texts: list[list[int]]
    """New tokens by prompt, those of all branches."""
    drafted: int = 0
    accepted: int = 0
    """Guesses that were computed, and those of them that were right."""
    prompt: int = 0
    cached: int = 0
    """Prompt tokens, and those of them that were cached."""

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return sum(map(len, self.texts))


class Solver(Protocol):
    """A system with a checkpoint loaded. Every call starts with a cold cache. Those that can run in several ways take
    one of the above as ``way``."""

    def tokenize(self, problem: str) -> list[int]:
        """A problem as the model reads it."""
        ...

    def solve(self, prompts: Sequence[Prompt], batch: int, seed: int) -> Solved:
        """Continues the prompts, ``batch`` at a time: when one ends, the next begins."""
        ...

    def search(self, prompts: Sequence[Prompt], seed: int) -> Solved:
        """W3 on each prompt after the other: rounds of 8 beams, which end with a step (an empty line) or after
        ``Prompt.tokens``. After each round 4 survive and are doubled; the next round sends each survivor's path."""
        ...

    def imitate(self, texts: list[list[int]], right: float) -> None:
        """From now on the drafter guesses what is known of each prompt's text, so often right."""
        ...


def call(system: Solver, name: str, prompts: Sequence[dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """``solve`` or ``search`` from and to plain JSON values."""
    asked = [Prompt(**{**prompt, "ids": tuple(prompt["ids"])}) for prompt in prompts]
    return asdict(getattr(system, name)(asked, **arguments))
