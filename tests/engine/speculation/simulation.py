"""An engine that computes nothing: known acceptance, known costs, its own clock.

What a branch draws and what is guessed of it depends on the branch and the position alone, so that two controllers are
compared on the very same work.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import Controller, DraftOutcome
from engine.speculation.drafter import DraftRequest

AcceptanceCalibrator = Callable[[random.Random, float], tuple[float, float]]


def honest(_: random.Random, usual: float) -> tuple[float, float]:
    """The drafter says of each guess of a branch what is true of all of them."""
    return usual, usual


def mute(_: random.Random, usual: float) -> tuple[float, float]:
    """The drafter knows nothing of its guesses."""
    return 0.5, usual


def informed(rng: random.Random, usual: float) -> tuple[float, float]:
    """Guesses differ, and the drafter knows how much."""
    chance = _logistic(_odds(usual) + rng.gauss(0, 1.5))
    return chance, chance


def boastful(rng: random.Random, usual: float) -> tuple[float, float]:
    """Guesses differ, and the drafter exaggerates."""
    chance = _logistic(_odds(usual) + rng.gauss(0, 1.5))
    return _logistic(2 * _odds(chance) + 1), chance


@dataclass(eq=False)
class Branch:
    """What a controller and a drafter see of a branch."""

    usual: float
    """Chance of a guess to be right."""
    left: int
    """Tokens until it ends."""
    rng: random.Random
    position: int = 0
    missed: int = 0
    """Tokens that it was given without being asked for."""
    job: Any = field(default_factory=lambda: SimpleNamespace(lease=None))
    table: object | None = True
    known: list[tuple[tuple[float, float], float]] = field(default_factory=list)
    """By position: what is said of a guess and what is true; and what decides which of the guesses is right."""

    def at(self, position: int, chances: AcceptanceCalibrator) -> tuple[tuple[float, float], float]:
        while len(self.known) <= position:
            self.known.append((chances(self.rng, self.usual), self.rng.random()))
        return self.known[position]


@dataclass
class Simulation:
    """``branches`` branches at a time; when one ends, another begins."""

    step: Callable[[int, int], float]
    """Seconds of a step by its branches and tokens."""
    draft: Callable[[int, int], float]
    """Seconds of drafting by branches and depth."""
    usual: Callable[[random.Random], float]
    """Of a new branch: the chance of a guess to be right."""
    chances: AcceptanceCalibrator = honest
    offers: float = 1.0
    """How often the drafter has any guess."""
    siblings: int = 1
    """Guesses after each token of the likeliest chain where trees are asked for."""
    firsts: int = 0
    """Of so many steps each number of tokens is recorded in: they take eight times as long, and are said to."""
    missing: float = 0.0
    """Seconds that the drafter needs for each token that it has missed, once it is asked again."""
    branches: int = 1
    length: int = 200
    """Mean number of tokens of a branch."""
    noise: float = 0.05
    """Standard deviation of the logarithm of every time; one in 200 takes five times as long."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.running: list[Branch] = []
        self.born = 0
        self.seconds = 0.0
        self.tokens = 0
        self.rest = self.resting = self.rested = 0
        """Steps to go in which the controller wants to hear nothing, branches of the step before them, and those that
        went by."""
        self.met: Counter[int] = Counter()
        """Steps by tokens."""
        self.sizes: list[int] = []
        """Guesses by step."""

    def run(self, controller: Controller, tokens: int) -> float:
        """Tokens per second while so many are generated."""
        seconds, before = self.seconds, self.tokens
        while self.tokens - before < tokens:
            self._advance(controller)
        return (self.tokens - before) / (self.seconds - seconds)

    def _advance(self, controller: Controller) -> None:
        del self.running[self.branches :]
        while len(self.running) < self.branches:
            rng = random.Random(self.seed << 32 | self.born)
            self.running.append(Branch(self.usual(rng), rng.randint(1, 2 * self.length), rng))
            self.born += 1
        rows = cast(list[GenerateSequence], self.running)
        if 8 * abs(len(rows) - self.resting) > self.resting:
            self.rest = 0
        resting = self.rest > 0
        sizes = [(0, 0)] * len(rows) if resting else controller.choose_sizes(rows, 0, self.rested)
        self.rested = self.rested + 1 if resting else 0
        wishes = [DraftRequest(row, *size) for row, size in zip(rows, sizes, strict=True) if size[0]]
        drafting = self.draft(len(wishes), max((wish.depth for wish in wishes), default=0)) * self._noise()
        for branch in self.running:
            branch.missed += 1
        for wish in wishes:
            drafting += self.missing * (cast(Branch, wish.sequence).missed - 1)
            cast(Branch, wish.sequence).missed = 0
        drafts = controller.trim(wishes, [self._guess(wish) for wish in wishes]) if wishes else []
        outcomes: list[DraftOutcome] = []
        for wish, draft in zip(wishes, drafts, strict=True):
            branch = cast(Branch, wish.sequence)
            if draft:
                outcomes.append(DraftOutcome(wish.sequence, draft, self._accepted(branch, draft)))
        kept = {id(outcome.sequence): len(outcome.accepted) for outcome in outcomes}
        for branch in self.running:
            new = min(branch.left, 1 + kept.get(id(branch), 0))
            branch.position += new
            branch.left -= new
            self.tokens += new
            branch.table = branch.left or None
        guesses = sum(len(outcome.draft) for outcome in outcomes)
        tokens = len(rows) + guesses
        self.met[tokens] += 1
        first = self.met[tokens] <= self.firsts
        seconds = self.step(len(rows), tokens) * self._noise() * (8 if first else 1)
        if resting:
            self.rest -= 1
            drafting = 0.0
        else:
            self.rest, self.resting = controller.update(outcomes, tokens, drafting, seconds, first), len(rows)
        for branch in [branch for branch in self.running if branch.table is None]:
            self.running.remove(branch)
        self.seconds += drafting + seconds
        self.sizes.append(guesses)

    def _guess(self, wish: DraftRequest) -> Draft:
        """The likeliest chain, whose tokens are 0; where trees are asked for, with leaves 1, 2, … beside it, of which
        each is as likely among what is left as the chain's."""
        branch = cast(Branch, wish.sequence)
        if self.rng.random() >= self.offers:
            return EMPTY_DRAFT
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        parent = -1
        for depth in range(wish.depth):
            (said, _), _ = branch.at(branch.position + depth, self.chances)
            spare = wish.nodes - len(tokens) - (wish.depth - depth)
            for token in range(1 + min(self.siblings - 1, spare)):
                tokens.append(token)
                parents.append(parent)
                chances.append(said * (1 - said) ** token)
            parent = len(tokens) - 1 - tokens[-1]
        return Draft(tuple(tokens), tuple(parents), tuple(chances))

    def _accepted(self, branch: Branch, draft: Draft) -> tuple[int, ...]:
        path: list[int] = []
        children = {place: index for index, place in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        node: int | None = -1
        while True:
            (_, true), coin = branch.at(branch.position + len(path), self.chances)
            token = 0
            while token < 8 and coin >= 1 - (1 - true) ** (token + 1):
                token += 1
            node = children.get((cast(int, node), token))
            if node is None:
                return tuple(path)
            path.append(node)

    def _noise(self) -> float:
        return math.exp(self.rng.gauss(0, self.noise)) * (5 if self.rng.random() < 0.005 else 1)


def best_fixed(
    make: Callable[[], Simulation], controllers: Iterable[Controller], tokens: int
) -> tuple[float, Controller]:
    """The highest tokens per second of these controllers, and which one it is."""
    return max(((make().run(each, tokens), each) for each in controllers), key=lambda pair: pair[0])


def _odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


def _logistic(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
