"""As many guesses as bring the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.acceptance import AcceptanceByDepth, AcceptanceCalibrator
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, DraftOutcome
from engine.speculation.control.cost_model import NONE, DraftSize, StepCostModel, bucket
from engine.speculation.control.step_cost_trials import StepCostTrial
from engine.speculation.drafter import DraftRequest

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""That are asked for."""
_TREE = 3
"""Guesses in a tree for each of its depths."""
_FEW, _PART, _CLOSE = 8, 0.125, 0.85
"""Of more branches only some are tried first, and all if they would be nearly as fast as without guesses."""
_FIRST, _DEEP = 16, 8
"""Guesses of a first trial, of all branches and of each."""
_SOON = 24
"""Steps to the next comparison after another choice, at most."""
_LOOKED, _DECIDED = 8, 4
"""Of so many steps with guesses one is learned from, as small models' steps are as short as that, and of so many of
these one decides."""
_PAYS, _BETTER = 1.03, 1.015
"""How many times as fast guessing must be to begin, and another size to take the place of one."""
_APART, _PATIENT = 2, 16
"""Between two comparisons there are so many times as many steps as in the first; with each after which nothing else is
chosen, twice as many, up to so many times."""
_SHARE, _OF_MANY = 0.04, 0.01
"""What a comparison lost is at most this part of the steps to the next one, and of those with many branches, for whom
guessing seldom pays: what is arithmetic to spare for a few they use themselves."""
_FAINT, _UNSURE, _SURE = 0.02, 0.3, 0.8
"""Guesses of a smaller chance are never computed; those of a larger one always are in trials, and at all."""
_NEXT = 0.5
"""What one guess more costs beside the mean of all: the first ones are the dearest."""
_OTHER = 3
"""Of so many comparisons one is of every guess and, where guessing does not pay, of each size in turn: what is believed
of them may be outdated."""
_SAMPLED = 16
"""Branches of a step whose guesses are learned from one by one."""


@dataclass(slots=True)
class _Load:
    """What is known of steps with about so many branches."""

    costs: StepCostModel
    chains: AcceptanceByDepth
    trees: AcceptanceByDepth
    choice: DraftSize = NONE
    wait: int = 0
    """Steps to the next comparison."""
    patience: int = 1
    """How many times as long they become."""
    turn: int = 0
    """Comparisons so far with this choice."""
    looked: int = 0
    """Steps that were learned from."""
    comparison: StepCostTrial | None = None

    @property
    def turns_aside(self) -> bool:
        """Whether the comparison is one to find out whether what is believed is outdated."""
        return self.turn % _OTHER == _OTHER - 1

    def survival(self, size: DraftSize) -> AcceptanceByDepth:
        return self.trees if size.is_tree else self.chains

    def tokens(self, size: DraftSize) -> float:
        """Of a branch in a step."""
        return 1 + self.survival(size).gain(size.depth)

    def speed(self, size: DraftSize) -> float:
        """Tokens per second, in those of plain decoding."""
        return self.tokens(size) / self.costs.at(size)

    def decide(self) -> None:
        """Takes the fastest of the sizes that were compared."""
        best, most = self.choice, self.speed(self.choice)
        for size in self.costs.known:
            speed = self.speed(size)
            if speed > most * (_BETTER if best.depth or self.choice.depth else _PAYS):
                best, most = size, speed
        if best != self.choice:
            self.choice, self.patience, self.turn, self.wait = best, 1, 0, min(self.wait, _SOON)


class AdaptiveController:
    """As many guesses as bring the most tokens per second, and none where plain decoding is faster.

    What pays depends on how many branches there are, so each number has its own choice (``_Load``), which begins as
    that of more branches, if those are nearest, or with no guesses. It is the size with the most tokens for its time.
    How many guesses of a branch are accepted is counted (``AcceptanceByDepth``): deep ones tell of smaller depths.
    What a step costs beside others is measured by comparisons: a few steps as usual, then a few of another size;
    sizes between those lie on the line through them. So nothing is measured most of the time; a machine that
    is slower today does not matter.

    What a comparison has lost beside the usual steps is earned before the next one begins. Each after which nothing
    else is chosen doubles the time until the next one, up to ``_PATIENT`` times. No clock is read, and nothing is
    random.
    """

    def __init__(self, depth: int, nodes: int) -> None:
        """``depth``, ``nodes``: the most guesses after each other, and in all, that are ever asked for."""
        self._depths = [each for each in DEPTHS if each < depth] + [depth]
        self._nodes = nodes
        self._chances = AcceptanceCalibrator()
        self._loads: dict[int, _Load] = {}
        self._load = self._at(1)
        """Of the step under way."""
        self._sizes: list[DraftSize] = []
        """That are asked for in it, of whom at least one ``self._size``."""
        self._size = NONE
        self._wishes = 0
        self._due = 0
        """Tokens of the step that are no guesses."""
        self._beside = False
        """Whether the step computes prompts too."""
        self._unheard = 0
        """Steps to go that are like the last one and not learned from."""
        self._least = _FAINT

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], others: int, rested: int, /
    ) -> Sequence[tuple[int, int]]:
        """See ``Controller``."""
        branches = len(sequences)
        if self._unheard and branches == len(self._sizes) and not others:
            return self._sizes
        self._load.wait -= rested
        self._unheard, self._wishes, self._due = 0, 0, branches + others
        self._load = load = self._at(branches)
        # A few branches without room for guesses do not make it a step with prompts.
        self._beside = 4 * others > branches
        size, asked = load.choice, branches
        if self._beside:
            # Beside many tokens of prompts a guess may cost what it does not cost without.
            size = size if others <= branches * size.depth else NONE
        else:
            now = load.comparison
            if load.wait <= 0 and (now is None or not (now.begun or now.is_about(branches))):
                now = load.comparison = self._next_comparison(load, branches)
            if now is not None and now.begun:
                size, asked = now.size, int(branches * now.part)
        most = _SURE if load.choice.depth else _UNSURE
        self._least = max(_FAINT, min(most, _NEXT * load.costs.guess * branches * load.speed(load.choice)))
        if not self._beside and size != load.choice and load.turns_aside:
            self._least = 0.0
        self._size, self._sizes = size, [size] * branches
        if size.depth and asked < branches:
            self._sizes = [size] * asked + [NONE] * (branches - asked)
        return self._sizes

    def trim(self, wishes: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        self._wishes = len(wishes)
        trimmed, least = self._chances.trimmed, self._least
        return [trimmed(draft, least) for draft in drafts]

    def update(
        self, outcomes: Sequence[DraftOutcome], tokens: int, drafting: float, step: float, first: bool, /
    ) -> int:
        """See ``Controller``."""
        if self._unheard:
            self._unheard -= 1
            return 0
        load = self._load
        if self._wishes:
            self._learn_outcomes(load, self._size, outcomes)
        if self._beside:
            # The prompts are soon done, and then there are more branches, for whom it may pay.
            return 0 if any(other.choice.depth for other in self._loads.values()) else MAX_SKIPPED_STEPS
        if load.comparison is not None:
            branches, now = len(self._sizes), load.comparison
            if not now.is_about(branches):
                now.passes()
            elif not (first and now.disbelieves()):
                won = sum(len(outcome.accepted) for outcome in outcomes) / branches
                now.add(drafting, step, tokens - self._due, len(outcomes), won)
            if now.over:
                self._conclude(load, now)
            return 0
        if not load.choice.depth:
            load.wait -= 1
            return max(0, min(MAX_SKIPPED_STEPS, load.wait))
        self._unheard = _LOOKED - 1
        load.wait -= _LOOKED
        load.looked += 1
        if load.looked % _DECIDED == 0:
            load.decide()
        return 0

    def _at(self, branches: int) -> _Load:
        """What is known of so many branches: if nothing is, what is known of about as many. That guesses pay is taken
        over from more branches alone: for fewer it costs a few plain steps to find out, many times less than some steps
        with guesses for many branches that do not pay."""
        place = bucket(branches)
        load = self._loads.get(place)
        if load is None:
            load = _Load(StepCostModel(), AcceptanceByDepth(), AcceptanceByDepth())
            if self._loads:
                nearest = min(self._loads, key=lambda other: max(other, place) / min(other, place))
                near = self._loads[nearest]
                load = _Load(near.costs.copy(), near.chains.copy(), near.trees.copy())
                if nearest > place:
                    load.choice = near.choice
                # A first trial may come at once, but of many branches one is enough for all numbers of them.
                if min(nearest, place) > _FEW and load.choice == near.choice:
                    load.wait = near.wait
            self._loads[place] = load
        return load

    def _learn_outcomes(self, load: _Load, size: DraftSize, outcomes: Sequence[DraftOutcome]) -> None:
        # What a branch would have drawn after its end is not known.
        going = [outcome for outcome in outcomes if outcome.sequence.table is not None]
        branches = self._wishes - len(outcomes) + len(going)
        if branches:
            load.survival(size).learn(size.depth, (len(outcome.accepted) for outcome in going), branches)
        for outcome in going[:_SAMPLED]:
            self._chances.learn(outcome.draft, outcome.accepted)

    def _next_comparison(self, load: _Load, branches: int) -> StepCostTrial:
        usual, known = load.choice, max(size.depth for size in load.costs.known)
        if usual.depth:
            size = self._variation(load, branches)
            return StepCostTrial(usual, size, branches, load.tokens(usual))
        most = 2 * known or max(1, min(_DEEP, _FIRST // branches))
        sizes = [self._shaped(depth) for depth in self._depths if depth <= most]
        size = max(sizes, key=load.speed) if known else sizes[-1]
        if load.turns_aside:
            size = sizes[load.turn // _OTHER % len(sizes)]
        # What was long ago counts little.
        load.chains = load.chains.copy()
        return StepCostTrial(usual, size, branches, 1.0, part=_PART if branches > _FEW else 1.0)

    def _variation(self, load: _Load, branches: int) -> DraftSize:
        """What the choice is compared with: the size that should be faster although it never was compared, up to twice
        as deep, if there is one; else no guesses, the next larger and smaller one, the more promising first, and one of
        the other kind, in turn."""
        # For many branches it may seldom pay: perhaps the machine was slower for a while when it seemed to.
        if branches > _FEW and not load.turn:
            return NONE
        depth, tree = load.choice.depth, load.choice.is_tree
        sizes = [self._shaped(each, tree=tree) for each in self._depths]
        promising = [size for size in sizes if size.depth <= 2 * depth and size not in load.costs.known]
        best = max(promising, key=load.speed, default=NONE)
        if load.speed(best) > _BETTER * load.speed(load.choice):
            return best
        place = self._depths.index(depth)
        beside = sizes[place + 1 : place + 2] + sizes[max(0, place - 1) : place]
        neighbours = (NONE, *sorted(beside, key=load.speed, reverse=True))
        # Trees need arithmetic to spare.
        if tree or (branches <= _FEW and self._nodes > self._depths[-1]):
            neighbours += (self._shaped(depth, tree=not tree),)
        return neighbours[load.turn % len(neighbours)]

    def _shaped(self, depth: int, *, tree: bool = False) -> DraftSize:
        return DraftSize(depth, max(depth, min(self._nodes, _TREE * depth)) if tree else depth)

    def _conclude(self, load: _Load, now: StepCostTrial) -> None:
        now.conclude(load.costs)
        load.comparison, load.turn = None, load.turn + 1
        share = _SHARE if now.branches <= _FEW else _OF_MANY
        load.wait = int(load.patience * max(_APART * now.steps, now.lost / share))
        load.patience = min(_PATIENT, 2 * load.patience)
        if now.part < 1 and load.speed(now.size) > _CLOSE:
            load.comparison = StepCostTrial(NONE, now.size, now.branches, 1.0)
        elif now.part == 1 and now.enough:
            load.decide()
