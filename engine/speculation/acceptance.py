"""How likely guesses are to be accepted, learned from those that were computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.draft import Draft

_LOWEST, _HIGHEST, _PER_UNIT = -5.0, 6.0, 2
"""Said chances are told apart by their log-odds: from, to, and so many bins per unit."""
_FINE = 1024
_BELIEF = 0.7
"""Part of what is said that is believed at first."""


def _bin(chance: float) -> int:
    chance = min(max(chance, 1e-6), 1 - 1e-6)
    odds = min(max(math.log(chance / (1 - chance)), _LOWEST), _HIGHEST)
    return round((odds - _LOWEST) * _PER_UNIT)


_BINS = [_bin((index + 0.5) / _FINE) for index in range(_FINE)] + [_bin(1.0)]


@dataclass(slots=True)
class Skill:
    """How well a drafter guesses for one branch."""

    weight: float
    """Log-odds by which its guesses are better than what is said of them."""
    first: float
    """The usual chance of the best first guess; 0 counts where there was none."""
    doubt: float = 0.2
    """Variance of ``weight``."""


class Acceptance:
    """The chance that a guess is accepted if the one before it is.

    A logistic regression on what the drafter says of it (in bins), its depth and its branch. Each has one weight with
    a variance, updated by an extended Kalman filter with a diagonal covariance. Variances stop falling at a floor, so
    that what was learned long ago is forgotten.
    """

    def __init__(self, depth: int) -> None:
        """``depth``: of the deepest guess."""
        # Drafters exaggerate more often than not, and it costs less to believe too little at first.
        self._said = [_BELIEF * (_LOWEST + index / _PER_UNIT) for index in range(_bin(1.0) + 1)]
        self._said_doubt = [0.5] * len(self._said)
        self._depth = [0.0] * (depth + 1)
        self._depth_doubt = [0.1] * (depth + 1)

    def chain(self, chances: Sequence[float], skill: Skill, least: float) -> list[float]:
        """For guesses that follow each other, the chance that each and all before it are accepted, until it falls below
        ``least``."""
        paths: list[float] = []
        said, by_depth, weight, path = self._said, self._depth, skill.weight, 1.0
        for depth, chance in enumerate(chances, 1):
            path /= 1 + math.exp(-(said[_BINS[int(chance * _FINE)]] + by_depth[depth] + weight))
            if path < least:
                break
            paths.append(path)
        return paths

    def tree(self, draft: Draft, skill: Skill) -> tuple[list[float], list[int]]:
        """For each guess the chance that it and all before it are accepted, and its depth."""
        paths: list[float] = []
        depths: list[int] = []
        said, by_depth, weight = self._said, self._depth, skill.weight
        for parent, chance in zip(draft.parents, draft.chances, strict=True):
            depth, path = (1, 1.0) if parent < 0 else (depths[parent] + 1, paths[parent])
            depths.append(depth)
            paths.append(path / (1 + math.exp(-(said[_BINS[int(chance * _FINE)]] + by_depth[depth] + weight))))
        return paths, depths

    def learn(self, draft: Draft, accepted: Sequence[int], skill: Skill) -> None:
        """What became of a draft. Only guesses whose parents were accepted tell anything."""
        reached = {-1, *accepted}
        depths: list[int] = []
        for index, (parent, chance) in enumerate(zip(draft.parents, draft.chances, strict=True)):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if parent in reached:
                self._learn(_BINS[int(chance * _FINE)], depths[index], skill, index in reached)

    def _learn(self, said: int, depth: int, skill: Skill, right: bool) -> None:
        chance = 1 / (1 + math.exp(-(self._said[said] + self._depth[depth] + skill.weight)))
        spread = chance * (1 - chance)
        of_said, of_depth, of_branch = self._said_doubt[said], self._depth_doubt[depth], skill.doubt
        total = 1 + spread * (of_said + of_depth + of_branch)
        surprise, shrink = (right - chance) / total, spread / total
        self._said[said] += of_said * surprise
        self._depth[depth] += of_depth * surprise
        skill.weight = max(-4.0, min(4.0, skill.weight + of_branch * surprise))
        self._said_doubt[said] = max(0.005, of_said * (1 - of_said * shrink))
        self._depth_doubt[depth] = max(0.002, of_depth * (1 - of_depth * shrink))
        skill.doubt = max(0.03, of_branch * (1 - of_branch * shrink))
