"""As many guesses as bring the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sequence import GenerateSequence
from engine.speculation.acceptance import Chances, Survival
from engine.speculation.comparison import LEAD, PRICE, SEEN, SETTLING, Comparison
from engine.speculation.controller import REST, Outcome
from engine.speculation.costs import NONE, Costs, Size, bucket
from engine.speculation.draft import EMPTY, Draft, Wish

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""That are asked for."""
_TREE = 3
"""Guesses in a tree for each of its depths."""
_FIRST_DEPTH, _MANY = 3, 8
"""What is tried first: so deep, but of so many branches only one guess for some of them."""
_NEW = 8
"""Steps of the first trial with few branches that are not believed: much of what they do has never been done."""
_SOON, _SELDOM = 12, 128
"""Steps between two comparisons while guessing pays: at first, and after many that changed nothing."""
_CALM = 24
"""Steps between two trials where guessing does not pay, at least."""
_LOOKED = 4
"""Of so many steps one is learned from where guessing pays: small models' steps are as short as learning from them."""
_DECIDED = 8
"""Steps that are learned from between two decisions."""
_SHARE, _FIRST, _MOST = 0.005, 4.0, 20.0
"""What trials may lose: this part of all steps, so many plain steps at first, and so many at once."""
_LEAST = -20.0
"""What one trial may owe to later ones."""
_PAYS, _BETTER = 1.03, 1.015
"""How many times as fast guessing must be to begin, and another size to take the place of one."""
_CLEARLY = 1.1
"""How many times as fast another size must be for the next comparisons to be soon again."""
_BEHIND = 0.9
"""How fast a size must be, beside the choice, to be compared with it in its turn."""
_HARDLY = 1.15
"""How fast a choice is that hardly pays."""
_CLOSE = 0.8
"""How fast a trial of some branches must be for a first one of all."""
_ROTATE = 3
"""Of so many trials one is of each size in turn, and of every guess: what is believed of them may be outdated."""
_FAINT, _UNSURE, _SURE = 0.02, 0.3, 0.8
"""Guesses of a smaller chance are never computed; those of a larger one always are in trials, and at all."""
_SAMPLED = 16
"""Branches of a step whose guesses are learned from one by one."""


@dataclass(slots=True)
class _Load:
    """What is known of steps with about so many branches."""

    costs: Costs
    chains: Survival
    trees: Survival
    choice: Size = NONE
    waited: int = 0
    """Steps since the last comparison."""
    period: int = _SOON
    """Steps between comparisons."""
    turn: int = 0
    """Comparisons so far with this choice or, where it is none, trials."""
    tried: bool = False
    looked: int = 0
    """Steps that were learned from."""
    news: bool = True
    """Whether something was decided since it was asked which size is promising."""
    whole: bool = False
    """Whether the next trial is of all branches."""
    promise: float = _CLOSE
    """How fast a trial of some must be for that."""
    comparison: Comparison | None = None

    def survival(self, size: Size) -> Survival:
        return self.trees if size.nodes > size.depth else self.chains

    def speed(self, size: Size) -> float:
        """Tokens per second, in those of plain decoding."""
        return (1 + self.survival(size).gain(size.depth)) / self.costs.at(size)

    def decide(self) -> None:
        """Takes the fastest of the sizes that were tried."""
        self.news = True
        best, most = self.choice, self.speed(self.choice)
        for size in self.costs.known:
            speed = self.speed(size)
            if speed > most * (_BETTER if best.depth or self.choice.depth else _PAYS):
                best, most = size, speed
        if best != self.choice:
            if not (best.depth and self.choice.depth):
                self.turn, self.period = 0, _SOON
            elif most > _CLEARLY * self.speed(self.choice):
                self.period = _SOON
            self.choice = best


class AdaptiveController:
    """As many guesses as bring the most tokens per second, and none where plain decoding is faster.

    What pays depends on how many branches there are, so each number has its own choice (``_Load``), which begins as the
    nearest one's. It is the size with the most tokens for its time: how many guesses of a branch are accepted is
    counted (``Survival``), and what a step costs beside others is measured by comparisons: a few steps as usual, then a
    few of another size. So nothing is measured most of the time, and it does not matter that a machine is slower today,
    or at longer contexts.

    While guessing pays, sizes like the choice are compared with it in turn, no guesses among them. Where it does not,
    it is tried now and then: where many branches run with some of them, and with all if that promises much. What a
    trial cost is booked, and the next one waits until steps with as many branches, few or many, have paid it; but the
    first one with each small number of them does not wait. No clock is read and nothing is random.
    """

    least = _FAINT
    """See ``Controller``."""

    def __init__(self, depth: int, nodes: int) -> None:
        """``depth``, ``nodes``: the most guesses after each other, and in all, that are ever asked for."""
        self._depths = [each for each in DEPTHS if each < depth] + [depth]
        self._nodes = nodes
        self._chances = Chances()
        self._loads: dict[int, _Load] = {}
        self._credits = [_FIRST, _FIRST]
        """Plain steps that trials may lose: with few branches, and with many. Each earns by steps of its own: where
        many run, few do for moments."""
        self._load = self._at(1)
        """Of the step under way."""
        self._sizes: list[Size] = []
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

    def sizes(self, sequences: Sequence[GenerateSequence], others: int, /) -> Sequence[tuple[int, int]]:
        """See ``Controller``."""
        branches = len(sequences)
        if self._unheard and branches == len(self._sizes) and not others:
            return self._sizes
        self._unheard, self._wishes, self._due = 0, 0, branches + others
        self._load = load = self._at(branches)
        # A few branches without room for guesses do not make it a step with prompts.
        self._beside = 4 * others > branches
        size, asked = load.choice, branches
        if self._beside:
            # Beside many tokens of prompts a guess may cost what it does not cost without.
            size = size if others <= branches * size.depth else NONE
        else:
            load.waited += 1
            comparison = load.comparison = load.comparison or self._next_comparison(load, branches)
            if comparison is not None and comparison.begun:
                size, asked = comparison.size, int(branches * comparison.part)
        most = _SURE if load.choice.depth else _UNSURE if load.turn % _ROTATE else 0.0
        self._least = max(_FAINT, min(most, load.costs.guess * branches * load.speed(load.choice)))
        self._size, self._sizes = size, [size] * branches
        if asked < branches and size.depth:
            self._sizes = [NONE] * branches
            for place in range(asked):
                self._sizes[(load.turn * asked + place) % branches] = size
        return self._sizes

    def trim(self, wishes: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        self._wishes = len(wishes)
        kept, least = self._chances.kept, self._least
        parts: list[Draft] = []
        for draft in drafts:
            indices = kept(draft, least)
            parts.append(draft if len(indices) == len(draft) else draft.part(indices) if indices else EMPTY)
        return parts

    def learn(self, outcomes: Sequence[Outcome], tokens: int, drafting: float, step: float, first: bool, /) -> int:
        """See ``Controller``."""
        if self._unheard:
            self._unheard -= 1
            return 0
        load, size = self._load, self._size
        if self._wishes:
            self._learn_outcomes(load, size, outcomes)
        comparison = load.comparison
        if not self._beside and comparison is not None:
            self._earn(1)
            won = sum(len(outcome.accepted) for outcome in outcomes) / len(self._sizes)
            if not (first and comparison.disbelieves()):
                comparison.add(drafting, step, tokens - self._due, len(outcomes), won)
                if comparison.over:
                    self._conclude(load, comparison)
            return 0
        if not load.choice.depth:
            rest = self._patience(load, len(self._sizes))
            if self._beside:
                # The prompts are soon done, and then there are more branches, for whom it may pay.
                rest = 0 if any(other.choice.depth for other in self._loads.values()) else REST
            load.waited += rest
            self._earn(1 + rest)
            return rest
        if not self._beside:
            load.looked += 1
            load.waited += _LOOKED - 1
            self._earn(_LOOKED)
            if load.looked % _DECIDED == 0:
                load.decide()
            self._unheard = _LOOKED - 1
        return 0

    def _earn(self, steps: int) -> None:
        """So many steps went by."""
        many = len(self._sizes) >= _MANY
        self._credits[many] = min(_MOST, self._credits[many] + _SHARE * steps)

    def _at(self, branches: int) -> _Load:
        """What is known of so many branches: if nothing is, what is known of about as many."""
        place = bucket(branches)
        load = self._loads.get(place)
        if load is None:
            if self._loads:
                nearest = min(self._loads, key=lambda other: abs(other - place))
                near = self._loads[nearest]
                load = _Load(near.costs.copy(near.choice), near.chains.copy(), near.trees.copy(), near.choice)
                # A first trial may come at once, but of many branches one is enough for all numbers of them.
                load.tried = near.tried and min(nearest, place) >= _MANY
            else:
                load = _Load(Costs(), Survival(), Survival())
            self._loads[place] = load
        return load

    def _learn_outcomes(self, load: _Load, size: Size, outcomes: Sequence[Outcome]) -> None:
        # What a branch would have drawn after its end is not known.
        going = [outcome for outcome in outcomes if outcome.sequence.table is not None]
        branches = self._wishes - len(outcomes) + len(going)
        if branches:
            load.survival(size).learn(size.depth, (len(outcome.accepted) for outcome in going), branches)
        for outcome in going[:_SAMPLED]:
            self._chances.learn(outcome.draft, outcome.accepted)

    def _next_comparison(self, load: _Load, branches: int) -> Comparison | None:
        """The one that begins now, if it is time for one."""
        if load.choice.depth:
            if load.news and load.waited >= LEAD:
                load.news = False
                promising = self._promising(load)
                if promising is not None:
                    load.waited = 0
                    return Comparison(load.choice, promising)
            if load.waited < load.period:
                return None
            load.waited = 0
            size = self._variation(load, branches)
            load.turn += 1
            # What was far behind is tried seldom.
            behind = size in load.costs.known and load.speed(size) < _BEHIND * load.speed(load.choice)
            if behind and size.depth and load.turn // 4 % 4:
                return None
            return Comparison(load.choice, size)
        if self._patience(load, branches):
            return None
        size, share = self._trial(load, branches)
        settling = SETTLING if load.tried or branches >= _MANY else _NEW
        return Comparison(NONE, size, share, settling)

    def _promising(self, load: _Load) -> Size | None:
        """The size that should be the fastest although it was never tried, up to twice as deep as the choice, if there
        is one."""
        depth, nodes = load.choice
        sizes = [self._shaped(each, tree=nodes > depth) for each in self._depths if each <= 2 * depth]
        best = max((size for size in sizes if size not in load.costs.known), key=load.speed, default=NONE)
        return best if load.speed(best) > _BETTER * load.speed(load.choice) else None

    def _variation(self, load: _Load, branches: int) -> Size:
        """Another size than the choice: each kind in turn."""
        depth, nodes = load.choice
        chain = nodes == depth
        # Trees need arithmetic to spare.
        twin = self._shaped(depth, tree=chain) if not chain or branches < _MANY else NONE
        sizes = (
            NONE,
            self._shaped(next((other for other in self._depths if other > depth), depth), tree=not chain),
            self._shaped(max((other for other in self._depths if other < depth), default=0), tree=not chain),
            twin,
        )
        turn = load.turn % len(sizes)
        if load.speed(load.choice) < _HARDLY:
            # Whether it pays at all is asked every other time.
            turn = 1 + load.turn // 2 % (len(sizes) - 1) if load.turn % 2 else 0
        return NONE if sizes[turn] == load.choice else sizes[turn]

    def _shaped(self, depth: int, *, tree: bool) -> Size:
        return Size(depth, max(depth, min(self._nodes, _TREE * depth)) if tree else depth)

    def _trial(self, load: _Load, branches: int) -> tuple[Size, float]:
        """What to try where guessing does not pay, and the part of the branches to try it with."""
        many = branches >= _MANY and not load.whole
        depth = min(1 if many else _FIRST_DEPTH, self._depths[-1])
        sizes = [self._shaped(each, tree=False) for each in self._depths if each <= 2 * depth]
        best = max(sizes, key=lambda size: (load.speed(size), size.depth == depth))
        if load.turn % _ROTATE == 0 and not load.whole:
            best = sizes[load.turn // _ROTATE % len(sizes)]
        if len(load.costs.known) == 1:
            best = self._shaped(depth, tree=False)
        return best, 0.25 if many else 1.0

    def _patience(self, load: _Load, branches: int) -> int:
        """Steps until the next trial, as far as is known, where guessing does not pay; at most ``REST``."""
        size, share = self._trial(load, branches)
        credit = self._credits[branches >= _MANY]
        if not load.tried and (branches < _MANY or credit > 0):
            # Seldom does so little time teach so much.
            return max(0, LEAD - load.waited)
        loss = max(0.1, load.costs.at(size) - 1 - load.survival(size).gain(size.depth))
        missing = min(PRICE, share * loss * (SETTLING + SEEN)) - credit
        return max(0, min(REST, max(_CALM - load.waited, int(missing / _SHARE))))

    def _conclude(self, load: _Load, now: Comparison) -> None:
        now.conclude(load.costs)
        load.comparison, load.waited, load.period = None, 0, min(_SELDOM, 2 * load.period)
        if not now.usual.depth:
            many = len(self._sizes) >= _MANY
            credit = self._credits[many]
            self._credits[many] = min(credit, max(_LEAST, credit - now.paid))
            for other in self._loads.values():
                # What they were about to try was affordable before this, and may not be now.
                if not other.choice.depth:
                    other.comparison = None
            load.turn, load.tried = load.turn + 1, True
            if now.part < 1:
                load.whole = load.speed(now.size) > load.promise
                return
        load.whole = False
        load.decide()
        # Where all together did not pay, what some promise must do.
        load.promise = _CLOSE if load.choice.depth else 1.0
