"""How much guessing pays: the choice of a depth before drafting, and of the guesses after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.speculation.acceptance import Acceptance, Skill
from engine.speculation.costs import Costs, Curve, Kind
from engine.speculation.draft import Draft

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Depths that are weighed against each other."""
LEVELS = (0.3, 0.6, 0.85)
"""Branches whose usual first guess has chances between the same two of these are taken to be alike."""
_MARGIN = 1.04
"""How many times as many tokens per second guessing must promise."""
_FIRM = 1.02
"""How many times as many the depth that was chosen last is credited with."""
_DEEPER = 1.003
"""How many times as many a deeper draft must bring: guesses that are thrown away cost us time too."""
_FEW = 3
"""Drafts of branches like them by which branches are judged."""
_USUAL = (0.15, 0.45, 0.72, 0.92)
"""With fewer, chances of a guess by the level of its branch."""
_GRID = 16
"""Numbers of guesses that are weighed against each other."""
FAINT = 0.02
"""A guess with a smaller chance is never worth anything."""


Guess = tuple[float, int, bool]
"""Of a guess of a draft: the chance that it and all before it are accepted, its depth, and whether it is on the
likeliest chain."""


class Seen(NamedTuple):
    """A draft as it was proposed."""

    level: int
    """Of its branch: how many of ``LEVELS`` are below it."""
    guesses: list[Guess]
    chance: float
    """Of one more guess after the likeliest chain, if all of that is right; 0 if the drafter had no more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask a drafter for."""

    depth: int
    """0: nothing."""
    tree: bool
    level: int
    """The lowest of the branches that it is worth for."""
    rate: float
    """Tokens per (paced) second that it promises."""
    guesses: float
    """That it has computed in a step, and how many of them are right."""
    gain: float


def rated(draft: Draft, skill: Skill, acceptance: Acceptance, least: float) -> list[Guess]:
    """The guesses of a draft in their order; a chain's only as far as they have a chance of ``least``."""
    if draft.is_chain:
        return [(path, depth, True) for depth, path in enumerate(acceptance.chain(draft.chances, skill, least), 1)]
    paths, depths = acceptance.tree(draft, skill)
    best: dict[int, int] = {}
    for index, parent in enumerate(draft.parents):
        if parent not in best or paths[index] > paths[best[parent]]:
            best[parent] = index
    likeliest: set[int] = set()
    node = best.get(-1)
    while node is not None:
        likeliest.add(node)
        node = best.get(node)
    return [(path, depths[index], index in likeliest) for index, path in enumerate(paths)]


def seen(level: int, guesses: list[Guess], asked: int) -> Seen:
    """What to remember of a draft, of a branch for which guesses ``asked`` deep were asked."""
    chain = [1.0, *(path for path, _, main in guesses if main)]
    return Seen(level, guesses, chain[-1] / chain[-2] if len(chain) > asked else 0.0)


def choose(drafts: Sequence[Seen], counts: Sequence[int], costs: Costs, deepest: int, last: int) -> Plan:
    """The depth, up to ``deepest``, that brings so many branches of each level the most tokens per second in steps
    without prompts, if their drafts come out like ``drafts``; the ``last`` one unless another is clearly better."""
    branches = sum(counts)
    rate = branches / (costs.steps(Kind.CHAIN, branches).at(branches) + costs.drafting(branches, 0))
    best, best_value = Plan(0, False, 0, rate, 0.0, 0.0), _MARGIN * rate
    guesses = _pooled(drafts, counts, deepest)
    trees = not all(main for (_, _, main), _, _ in guesses)
    for level in (level for level, count in enumerate(counts) if count):
        asked = sum(counts[level:])
        # The lowest that there is means everybody, whatever becomes of them until the next plan.
        lowest = level if asked < branches else 0
        for depth in (depth for depth in DEPTHS if depth <= deepest):
            drafting = costs.drafting(asked, depth)
            for tree in (False, True) if trees else (False,):
                row = costs.steps(Kind.TREE if tree else Kind.CHAIN, branches)
                pool = [
                    (path * weight, weight)
                    for (path, deep, main), weight, of in guesses
                    if deep <= depth and of >= level and (tree or main)
                ]
                for gain, more in _prefixes(pool):
                    rate = (branches + gain) / (row.at(branches + more) + drafting)
                    value = rate * _FIRM if depth == last else rate
                    if value > best_value * (_DEEPER if best.depth and depth > best.depth else 1.0):
                        best_value, best = value, Plan(depth, tree, lowest, rate, more, gain)
    return best


def worth(paths: Sequence[float], row: Curve, tokens: int, rate: float) -> tuple[int, float]:
    """How many guesses, the likeliest first (``paths``), are worth computing in a step of ``tokens`` other tokens, when
    a second is worth ``rate`` tokens; and how many tokens that wins or loses."""
    best, most = 0, -rate * row.at(tokens)
    gain, stride = 0.0, 1 + len(paths) // _GRID
    for count, path in enumerate(paths, 1):
        gain += path
        if count % stride == 0 or count == len(paths):
            value = gain - rate * row.at(tokens + count)
            if value > most:
                best, most = count, value
    return best, most


def _pooled(drafts: Sequence[Seen], counts: Sequence[int], deepest: int) -> list[tuple[Guess, float, int]]:
    """All guesses with the number of branches that each stands for and its level, the likeliest first."""
    guesses: list[tuple[Guess, float, int]] = []
    for level, count in enumerate(counts):
        if count:
            like = [one for one in drafts if one.level == level]
            if len(like) < _FEW:
                like = [Seen(level, [(_USUAL[level], 1, True)], _USUAL[level])]
            for one in like:
                guesses += [(guess, count / len(like), level) for guess in (*one.guesses, *_more(one, deepest))]
    guesses.sort(reverse=True)
    return guesses


def _more(one: Seen, deepest: int) -> Iterator[Guess]:
    """Guesses that a deeper draft would have had."""
    if one.chance:
        path, depth, _ = next(guess for guess in reversed(one.guesses) if guess[2])
        while depth < deepest and (path := path * one.chance) > FAINT:
            depth += 1
            yield path, depth, True


def _prefixes(pool: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Gain and number of the likeliest guesses, for a few numbers of them."""
    stride = 1 + len(pool) // _GRID
    gain = number = 0.0
    for count, (path, weight) in enumerate(pool, 1):
        gain += path
        number += weight
        if count % stride == 0 or count == len(pool):
            yield gain, number
