"""How much is guessed."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.sequence import GenerateSequence
from engine.speculation.acceptance import Acceptance, Skill
from engine.speculation.costs import Costs, Kind, bucket
from engine.speculation.draft import EMPTY, Draft, Wish
from engine.speculation.plan import DEPTHS, FAINT, LEVELS, Plan, Seen, choose, rated, seen, worth

_PLAIN = 3
"""Steps without guesses that are measured before there are any."""
_CALM = 2
"""Steps without guesses after each other before one is measured: guessing leaves the caches full of other things, and
so a step among such steps costs less than one behind a step with guesses."""
_DRAFTS = 48
"""Drafts that are remembered."""
_LEASES = 1024
"""Jobs that are remembered."""
_SAMPLED, _SHOWN = 32, 4
"""Branches of a step whose outcomes are learned from, and whose drafts are remembered."""
REST = 127
"""Steps after each other that are not looked at while guessing does not pay, at most."""
_GLANCES = 3
"""Steps after each other that are decided like the one before and not learned from, where guessing pays and the plan
has proved itself: small models' steps are as short as learning from them."""
_PROVED = 32
"""Steps for which a plan that has proved itself holds, at least."""
_ODD = 0.3
"""Relative error of an expected cost from which on it is no longer sure that guessing does not pay."""
_PLANNED = 64
"""Steps for which a plan holds at most."""
_UNPAID = 512
"""The same for a plan without guesses, unless there is a trial."""
_TRIAL = 12
"""Steps after each other that guess alike where guessing does not pay, to learn what it costs and brings."""
_TRIAL_EVERY = 50
"""Steps between two such trials."""
_VARIATION = 5
"""Steps after each other that guess otherwise than what seems best."""
_VARY_EVERY = 100
"""Steps between two such variations."""
_SETTLING = 3
"""Of either, steps at first that are not believed: memory of a new size is taken and what is done in it recorded, and
the caches are full of other things."""
_PLAIN_EVERY = 250
"""Steps after which some go without guesses, to see what that costs now, times what guessing wins."""
_TRIALS = (3, 2, 4, 1, 6, 8)
"""Depths that are tried in turn."""
_SHARE = 0.01
"""Part of the time that may be lost with tries."""
_FIRST, _MOST = 8.0, 30.0
"""In plain steps: what may be lost with tries at first, and what of earlier gains may be lost again."""
_STOP, _RESUME = -20.0, -12.0
"""In plain steps: when guessing must stop, whatever is believed of it, and when it may go on."""
_WORST = 4.0
"""In plain steps: the most that a single step is believed to have lost."""


class Outcome(NamedTuple):
    """What became of one branch's draft."""

    sequence: GenerateSequence
    draft: Draft
    """As it was computed."""
    accepted: tuple[int, ...]
    """Indices of the accepted tokens, from the root on."""


class Controller(Protocol):
    """Decides how much is guessed for whom.

    One thread calls it. A step in which branches are due calls ``sizes``, then ``trim`` if any of them is to get
    guesses, and ``learn`` when it is done, whether or not anything was guessed; but for steps that fail, and for those
    that it wants to hear nothing of.
    """

    def sizes(self, sequences: Sequence[GenerateSequence], others: int, /) -> list[tuple[int, int]]:
        """For each branch that is due one token, the most guesses after each other and the most in all (``Wish``); 0, 0
        for none. ``others``: tokens that the step computes for prompts."""
        ...

    def trim(self, wishes: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """The parts of the drafts that are worth computing, one for each wish."""
        ...

    def learn(self, outcomes: Sequence[Outcome], tokens: int, drafting: float, step: float, /) -> int:
        """A step with ``tokens`` tokens in all took ``step`` seconds, and drafting ``drafting`` beside it; there is an
        outcome for each branch that had guesses. Answers how many steps from now on are to go without guesses and
        without a word to the controller."""
        ...

    def forget(self, sequence: GenerateSequence, /) -> None:
        """A branch is over."""
        ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """Always the same: for tests, and to measure drafters by."""

    depth: int
    nodes: int
    """``depth`` for chains, more for trees."""

    def sizes(self, sequences: Sequence[GenerateSequence], _: int, /) -> list[tuple[int, int]]:
        """See ``Controller``."""
        return [(self.depth, self.nodes)] * len(sequences)

    def trim(self, _: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        return list(drafts)

    def learn(self, _outcomes: Sequence[Outcome], _tokens: int, _drafting: float, _step: float, /) -> int:
        """See ``Controller``."""
        return 0

    def forget(self, _: GenerateSequence, /) -> None:
        """See ``Controller``."""


@dataclass(slots=True)
class _Burst:
    """Steps after each other that guess alike."""

    trial: bool
    """Where guessing does not pay; else it is a variation of what seems best."""
    depth: int
    nodes: int
    branches: int
    """That get guesses."""
    left: int
    """Steps to go."""
    done: int = 0
    """Steps, with the one under way."""
    won: float = 0.0
    """Seconds, in the steps that are believed."""

    @property
    def settles(self) -> bool:
        """Whether the step under way is not to be believed."""
        return self.done <= _SETTLING


@dataclass(slots=True)
class _Step:
    """The step under way."""

    branches: int
    others: int
    plan: Plan
    burst: _Burst | None = None
    size: tuple[int, int] | None = None
    """That was asked for every branch, if that is what the plan says."""
    wishes: int = 0
    depth: int = 0
    """That was asked for."""


@dataclass(slots=True)
class _Glanced:
    """Steps since the last one that was learned from."""

    steps: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Planned:
    """A plan for steps of about one size."""

    plan: Plan
    until: int
    """Number of the step that needs a new one."""
    steps: int
    """For which it holds."""


_NOTHING = Plan(0, False, 0, 0.0, 0.0, 0.0)


class AdaptiveController:
    """As many guesses as bring the most tokens per second, and none where plain decoding is faster.

    Three things are learned from every step: what steps and drafting cost (``Costs``), how far the drafter is to be
    believed (``Acceptance``), and what its drafts look like (the last few are remembered). ``sizes`` asks for the depth
    with which those drafts would have brought the most (``choose``); ``trim`` keeps of what comes the guesses that are
    worth their time (``worth``).

    Where guessing does not pay, it is tried now and then on a few branches, for some steps. The gain or loss of every
    step beside a plain one is booked: trials are paid from a hundredth of the time and from earlier gains, and whatever
    is believed, guessing stops when the account is overdrawn. No clock is read and nothing is random.
    """

    def __init__(self, depth: int, nodes: int) -> None:
        """``depth``, ``nodes``: the most guesses after each other, and in all, that are ever asked for."""
        self._depth, self._nodes = depth, nodes
        self._costs = Costs()
        self._acceptance = Acceptance(depth)
        self._skills: dict[GenerateSequence, Skill] = {}
        self._leases: OrderedDict[str, Skill] = OrderedDict()
        """Of the branches that jobs had; the latest used last."""
        self._usual = 0.5
        """A branch's first guess is right so often if nothing else is known."""
        self._drafts: deque[Seen] = deque(maxlen=_DRAFTS)
        self._deepest = 0
        """That was ever asked for."""
        self._least = FAINT
        """Chance below which guesses need not be looked at: half of what was worth it lately."""
        self._widest = 0.0
        """Guesses of one branch that were worth it lately."""
        self._plans: dict[int, _Planned] = {}
        self._steps = 0
        self._varied = self._plain = self._tried = 0
        """When guessing was last varied, left out, and tried although it does not pay."""
        self._bursts = 0
        self._burst: _Burst | None = None
        """The latest one."""
        self._lucky = True
        """Whether the last trial paid."""
        self._credit: float | None = None
        """Seconds that may be lost; ``None`` before a step was measured."""
        self._overdrawn = False
        self._rest = 0
        """Steps before this one that were not looked at."""
        self._patience = 0
        """Steps that need not be looked at after one in which nothing was new. Prompts and trials that did not pay
        leave it as it is."""
        self._calm = 0
        """Steps before this one that were without guesses."""
        self._glances = 0
        """Steps to go that are not learned from."""
        self._glanced = _Glanced()
        self._glancing = False
        """Whether this is one of them."""
        self._looked = 0.0
        """Seconds of the last step that was learned from."""
        self._step: _Step | None = None

    def sizes(self, sequences: Sequence[GenerateSequence], others: int, /) -> list[tuple[int, int]]:
        """See ``Controller``."""
        self._steps += 1
        branches, last = len(sequences), self._step
        self._glancing = self._glances > 0 and not others and last is not None and last.branches == branches
        if self._glancing and last is not None and last.size is not None:
            self._glances -= 1
            return [last.size] * branches
        # A few branches without room for guesses do not make it a step with prompts.
        others = others if 4 * others > branches else 0
        known = not self._overdrawn and self._costs.plain(branches) >= _PLAIN
        # A drafter of which nothing is known is tried first.
        plan = self._plan(sequences) if known and self._costs.drafted else _NOTHING
        self._step = step = _Step(branches, others, plan)
        sizes = [(0, 0)] * branches
        if plan.depth and not (others and self._is_late(step)):
            if self._is_plain_due(plan, branches):
                return sizes
            step.burst = burst = self._variation(plan, branches)
            if burst is not None:
                return [(burst.depth, burst.nodes)] * branches
            size = (plan.depth, self._size(plan))
            if not plan.level:
                step.size = size
                return [size] * branches
            return [size if self._level(one) >= plan.level else (0, 0) for one in sequences]
        step.burst = burst = self._trial(branches) if known and not plan.depth and not others else None
        if burst is not None:
            for place in range(min(burst.branches, branches)):
                sizes[(self._bursts * burst.branches + place) % branches] = burst.depth, burst.nodes
        return sizes

    def trim(self, wishes: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        step = self._step
        if step is None:
            raise RuntimeError("drafts without a step")
        step.wishes, step.depth = len(wishes), max(wish.depth for wish in wishes)
        self._deepest = max(self._deepest, step.depth)
        everything: list[tuple[float, int, int, bool]] = []
        for place, (wish, draft) in enumerate(zip(wishes, drafts, strict=True)):
            skill = self._skill(wish.sequence)
            guesses = rated(draft, skill, self._acceptance, self._least)
            everything += [(-path, place, index, main) for index, (path, _, main) in enumerate(guesses)]
            if self._glancing:
                continue
            if (place - self._steps * _SHOWN) % len(wishes) < _SHOWN:
                self._drafts.append(seen(self._level(wish.sequence), guesses, wish.depth))
            first = max(guesses)[0] if guesses else 0.0
            skill.first += (first - skill.first) / 16
            self._usual += (first - self._usual) / 64
        if step.burst is not None and step.burst.trial:
            return list(drafts)
        everything.sort()
        kept: list[list[int]] = [[] for _ in drafts]
        chosen = self._worth(step, everything)
        for _, place, index, _ in chosen:
            kept[place].append(index)
        self._least = max(FAINT, min(1.1 * self._least, -chosen[-1][0] / 2 if chosen else FAINT))
        self._widest = max(0.98 * self._widest, *map(len, kept))
        return [
            draft if len(indices) == len(draft) else draft.part(sorted(indices)) if indices else EMPTY
            for draft, indices in zip(drafts, kept, strict=True)
        ]

    def learn(self, outcomes: Sequence[Outcome], tokens: int, drafting: float, step: float, /) -> int:
        """See ``Controller``."""
        now = self._step
        if now is None:
            raise RuntimeError("outcomes without a step")
        if self._glancing:
            self._glanced.steps += 1
            self._glanced.accepted += sum(len(outcome.accepted) for outcome in outcomes)
            self._glanced.seconds += drafting + min(step, 2 * self._looked)
            if not self._looked * (1 - _ODD) < step < self._looked * (1 + _ODD):
                self._glances = 0
            return 0
        tree = any(not outcome.draft.is_chain for outcome in outcomes)
        kind = Kind.MIXED if now.others else Kind.TREE if tree else Kind.CHAIN
        usual = self._costs.steps(kind, now.branches).at(tokens) * self._costs.pace
        settles = now.burst is not None and now.burst.settles
        if now.others or (not settles if outcomes else self._calm >= _CALM):
            self._costs.learn_step(kind, now.branches, tokens, step)
        if not now.others:
            if not settles:
                self._costs.learn_drafting(now.wishes or now.branches, now.depth, drafting)
            if not outcomes and self._calm >= _CALM:
                self._plain = self._steps
            # That everything stood still for a while is not the guesses' fault.
            self._book(now, outcomes, drafting + min(step, 2 * usual))
        apart = 1 + len(outcomes) // (_SAMPLED + 1)
        for outcome in outcomes[self._steps % apart :: apart]:
            # What a branch would have drawn after its end is not known.
            if outcome.sequence.table is not None:
                self._acceptance.learn(outcome.draft, outcome.accepted, self._skill(outcome.sequence))
        odd = not usual * (1 - _ODD) < step < usual * (1 + _ODD)
        # One odd step may be the machine's doing, which for steps of less than a millisecond is usual.
        if self._is_idle(now):
            self._patience = self._patience // 2 if odd else min(REST, 2 * self._patience + 1)
        elif now.plan.depth and not now.others:
            self._patience = 0
        # At many branches there is a prompt in nearly every step.
        self._rest = self._patience if self._is_idle(now) or (now.others and not now.plan.depth) else 0
        self._calm = 0 if now.wishes or now.others else self._calm + 1
        self._calm += self._rest
        self._steps += self._rest
        proved = now.size is not None and not now.plan.tree and self._plans[bucket(now.branches)].steps >= _PROVED
        self._looked = step
        self._glances = _GLANCES if proved and not odd else 0
        return self._rest

    def forget(self, sequence: GenerateSequence, /) -> None:
        """See ``Controller``."""
        skill, lease = self._skills.pop(sequence, None), sequence.job.lease
        if skill is None or lease is None:
            return
        known = self._leases.setdefault(lease, Skill(skill.weight, skill.first))
        self._leases.move_to_end(lease)
        known.weight += (skill.weight - known.weight) / 4
        known.first += (skill.first - known.first) / 4
        if len(self._leases) > _LEASES:
            self._leases.popitem(last=False)

    def _is_idle(self, step: _Step) -> bool:
        """Whether it had no guesses and was not to have any, and the next ones will hardly be different."""
        return not (step.wishes or step.others or step.plan.depth) and self._costs.plain(step.branches) >= _PLAIN

    def _plan(self, sequences: Sequence[GenerateSequence]) -> Plan:
        place = bucket(len(sequences))
        planned = self._plans.get(place)
        if planned is None or planned.until <= self._steps:
            counts = [0] * (len(LEVELS) + 1)
            for sequence in sequences:
                counts[self._level(sequence)] += 1
            deepest, last = min(self._depth, max(4, 2 * self._deepest)), 0 if planned is None else planned.plan.depth
            plan = choose(self._drafts, counts, self._costs, deepest, last)
            # The more branches, the sooner others take their places.
            most = _PLANNED // min(4, len(sequences))
            steps = _UNPAID if not plan.depth else 2 if planned is None else min(most, 2 * planned.steps)
            planned = self._plans[place] = _Planned(plan, self._steps + steps, steps)
        return planned.plan

    def _is_late(self, step: _Step) -> bool:
        """Whether guesses delay a step's prompts by more than they would cost in a step without."""
        costs, plan, tokens = self._costs, step.plan, step.branches + step.others
        row = costs.steps(Kind.MIXED, step.branches)
        seconds = row.at(tokens + plan.guesses) - row.at(tokens) + costs.drafting(step.branches, plan.depth)
        return plan.gain < plan.rate * seconds

    def _is_plain_due(self, plan: Plan, branches: int) -> bool:
        """Whether it is time to see what steps without guesses cost now."""
        faster = plan.rate * self._costs.steps(Kind.CHAIN, branches).at(branches) / branches
        return self._steps - self._plain >= _PLAIN_EVERY * faster

    def _variation(self, plan: Plan, branches: int) -> _Burst | None:
        """Another plan for some steps now and then, to learn what that brings."""
        if (going := self._going(trial=False)) is not None:
            return going
        if self._steps - self._varied < _VARY_EVERY:
            return None
        self._varied = self._steps
        self._bursts += 1
        depths = (
            next((depth for depth in DEPTHS if depth > plan.depth), plan.depth),
            plan.depth,
            2 * plan.depth,
            max(depth for depth in DEPTHS if depth < max(plan.depth, 2)),
        )
        turn = self._bursts % len(depths)
        other = replace(plan, depth=min(self._depth, depths[turn]), tree=plan.tree != (turn == 1))
        self._burst = _Burst(False, other.depth, self._size(other), branches, _VARIATION)
        return self._going(trial=False)

    def _trial(self, branches: int) -> _Burst | None:
        """Guesses for some branches although that does not seem to pay, if it is the time and there is the credit."""
        if (going := self._going(trial=True)) is not None:
            return going
        if self._credit is None or self._steps - self._tried < (1 if self._lucky else _TRIAL_EVERY):
            return None
        depth, count = min(self._depth, _TRIALS[self._bursts % len(_TRIALS)]), max(1, branches // 8)
        row = self._costs.steps(Kind.CHAIN, branches)
        price = row.at(branches + count * depth) - row.at(branches) + self._costs.drafting(count, depth)
        # About half of it comes back.
        if price * self._costs.pace * _TRIAL / 2 > self._credit:
            return None
        self._tried = self._steps
        self._bursts += 1
        self._burst = _Burst(True, depth, min(self._nodes, depth * (2 - self._bursts % 2)), count, _TRIAL)
        return self._going(trial=True)

    def _going(self, *, trial: bool) -> _Burst | None:
        """The burst that this step belongs to, if one of that kind is under way."""
        burst = self._burst
        if burst is None or burst.trial is not trial or not burst.left:
            return None
        burst.left -= 1
        burst.done += 1
        return burst

    def _size(self, plan: Plan) -> int:
        """Guesses in all that a branch is asked for."""
        if not plan.tree:
            return plan.depth
        return min(self._nodes, max(2 * plan.depth, int(1.5 * self._widest)))

    def _worth(
        self, step: _Step, guesses: list[tuple[float, int, int, bool]]
    ) -> Sequence[tuple[float, int, int, bool]]:
        """Those of the guesses, sorted by falling chance, that are worth their time: of all, or of the likeliest chain
        of each branch, which is easier to compute."""
        costs, branches, tokens = self._costs, step.branches, step.branches + step.others
        chains = [guess for guess in guesses if guess[3]]
        kind = Kind.MIXED if step.others else Kind.CHAIN
        count, value = worth([-guess[0] for guess in chains], costs.steps(kind, branches), tokens, step.plan.rate)
        if len(chains) < len(guesses):
            kind = Kind.MIXED if step.others else Kind.TREE
            row = costs.steps(kind, branches)
            of_all, with_trees = worth([-guess[0] for guess in guesses], row, tokens, step.plan.rate)
            if with_trees > value:
                return guesses[:of_all]
        return chains[:count]

    def _book(self, step: _Step, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Books what guessing won or lost beside a plain step, and what may be lost from now on."""
        costs = self._costs
        if costs.plain(step.branches) < _PLAIN:
            return
        plain = costs.steps(Kind.CHAIN, step.branches).at(step.branches) + costs.drafting(step.branches, 0)
        plain *= costs.pace
        if self._credit is None:
            self._credit = _FIRST * plain
        seen, self._glanced = self._glanced, _Glanced()
        steps = 1 + seen.steps
        if step.wishes:
            accepted = seen.accepted + sum(len(outcome.accepted) for outcome in outcomes)
            won = max(-_WORST * steps * plain, plain * (steps + accepted / step.branches) - seconds - seen.seconds)
            self._credit += won
            if step.burst is not None and step.burst.trial:
                self._learn_trial(step.burst, step.branches, won)
        self._credit += _SHARE * plain * (steps + self._rest)
        self._credit = min(_MOST * plain, self._credit)
        self._overdrawn = self._credit < (_RESUME if self._overdrawn else _STOP) * plain

    def _learn_trial(self, trial: _Burst, branches: int, won: float) -> None:
        trial.won += 0 if trial.settles else won
        if not trial.left:
            self._lucky = trial.won > 0
            planned = self._plans.get(bucket(branches))
            if planned is not None:
                planned.until = self._steps

    def _skill(self, sequence: GenerateSequence) -> Skill:
        skill = self._skills.get(sequence)
        if skill is None:
            known = self._leases.get(sequence.job.lease) if sequence.job.lease else None
            skill = Skill(0.0, self._usual) if known is None else Skill(known.weight, known.first)
            self._skills[sequence] = skill
        return skill

    def _level(self, sequence: GenerateSequence) -> int:
        return bisect_right(LEVELS, self._skill(sequence).first)
