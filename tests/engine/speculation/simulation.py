"""Simulated engine with given acceptance rates and step costs and its own clock.

A branch's samples and draft tokens depend on the branch and the position alone, so that controllers are compared on
identical work.
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
from engine.speculation.control.controller import Controller, DraftOutcome, StepCost
from engine.speculation.drafter import DraftRequest
from tests.seeds import shift

AcceptanceCalibrator = Callable[[random.Random, float], tuple[float, float]]


def honest(_: random.Random, usual: float) -> tuple[float, float]:
    """Return the branch's true acceptance rate as the drafter's estimate for each draft token."""
    return usual, usual


def mute(_: random.Random, usual: float) -> tuple[float, float]:
    """Return an estimate without information about the draft tokens."""
    return 0.5, usual


def informed(rng: random.Random, usual: float) -> tuple[float, float]:
    """Return different acceptance rates per draft token, estimated correctly."""
    chance = _logistic(_odds(usual) + rng.gauss(0, 1.5))
    return chance, chance


def boastful(rng: random.Random, usual: float) -> tuple[float, float]:
    """Return different acceptance rates per draft token, estimated with overconfidence."""
    chance = _logistic(_odds(usual) + rng.gauss(0, 1.5))
    return _logistic(2 * _odds(chance) + 1), chance


@dataclass(eq=False)
class Branch:
    """A simulated branch, as controller and drafter see it."""

    usual: float
    """Acceptance rate of the branch's draft tokens."""
    left: int
    """Number of tokens until the branch ends."""
    rng: random.Random
    position: int = 0
    missed: int = 0
    """Number of tokens generated since the last draft request."""
    job: Any = field(default_factory=lambda: SimpleNamespace(pin_key=None))
    table: object | None = True
    known: list[tuple[tuple[float, float], float]] = field(default_factory=list)
    """By position: estimated and true acceptance rate, and the random number that decides acceptance."""

    def at(self, position: int, chances: AcceptanceCalibrator) -> tuple[tuple[float, float], float]:
        while len(self.known) <= position:
            self.known.append((chances(self.rng, self.usual), self.rng.random()))
        return self.known[position]


@dataclass
class Simulation:
    """Decoding of ``branches`` branches at a time; when one ends, another begins."""

    step: Callable[[int, int], float]
    """Seconds of a step by its numbers of branches and tokens."""
    draft: Callable[[int, int], float]
    """Seconds of drafting by number of branches and depth."""
    usual: Callable[[random.Random], float]
    """Acceptance rate of a new branch."""
    chances: AcceptanceCalibrator = honest
    offers: float = 1.0
    """Fraction of requests for which the drafter has a draft."""
    siblings: int = 1
    """Number of draft tokens after each token of the likeliest chain if a tree is requested."""
    firsts: int = 0
    """Number of first steps per token count that record kernels: eight times as slow, and reported as first runs."""
    missing: float = 0.0
    """Seconds of drafting for each token generated since the last draft request."""
    branches: int = 1
    length: int = 200
    """Mean number of tokens of a branch."""
    noise: float = 0.05
    """Standard deviation of the logarithm of every time; one in 200 takes five times as long."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(shift(self.seed))
        self.running: list[Branch] = []
        self.born = 0
        self.seconds = 0.0
        self.tokens = 0
        self.rest = self.resting = self.rested = 0
        """Steps left to skip for the controller, number of branches in the step before them, and steps skipped."""
        self.met: Counter[int] = Counter()
        """Number of steps by their number of tokens."""
        self.sizes: list[int] = []
        """Number of draft tokens of each step."""

    def run(self, controller: Controller, tokens: int) -> float:
        """Generate ``tokens`` tokens and return the tokens per second."""
        seconds, before = self.seconds, self.tokens
        while self.tokens - before < tokens:
            self._advance(controller)
        return (self.tokens - before) / (self.seconds - seconds)

    def _advance(self, controller: Controller) -> None:
        del self.running[self.branches :]
        while len(self.running) < self.branches:
            rng = random.Random(shift(self.seed << 32 | self.born))
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
            self.rest = controller.update(outcomes, StepCost(tokens, drafting, seconds, first))
            self.resting = len(rows)
        for branch in [branch for branch in self.running if branch.table is None]:
            self.running.remove(branch)
        self.seconds += drafting + seconds
        self.sizes.append(guesses)

    def _guess(self, wish: DraftRequest) -> Draft:
        """Return the likeliest chain, whose tokens are 0, and if a tree is requested, leaves 1, 2, … beside it.

        Each leaf has the chain's acceptance rate among the cases in which its siblings before it are rejected."""
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
    """Return the highest tokens per second of these controllers, and the controller."""
    return max(((make().run(each, tokens), each) for each in controllers), key=lambda pair: pair[0])


def _odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


def _logistic(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))
