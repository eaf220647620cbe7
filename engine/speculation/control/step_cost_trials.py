"""Trials that measure the cost of one draft size against another's: some steps of each, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.speculation.control.controller import StepCost
from engine.speculation.control.cost_model import NO_DRAFT, DraftSize, StepCostModel

_NUM_USUAL_STEPS = 8
"""Steps of the usual size that begin a trial."""
_MIN_STEPS, _MAX_STEPS = 5, 24
"""Measured steps of the other size: minimum until the result is clear, and maximum."""
_CLEAR_DIFFERENCE = 0.2
"""Relative difference in speed that makes the result clear."""
_MAX_MEASURED_LOSS, _MAX_LOSS = 3.0, 20.0
"""Loss, in usual steps, that ends a trial early: of measured steps, and of all."""
_MAX_STEP_LOSS, _MIN_LOSSES = 4.0, 3
"""Maximum loss that is attributed to one step, in usual steps, unless most of so many steps or more lose as much: one
may be interrupted, or the drafter may catch up."""
_MAX_MISMATCHES = 64
"""Maximum number of steps with another number of branches before a trial ends."""
_INTERRUPTED = 2.0
"""Factor over the median from which a step counts as interrupted and is clipped."""
_MAX_WARMUP_STEPS = 8
"""Maximum number of steps with first runs that are ignored; where there are always more, they are the usual cost."""


class _Step(NamedTuple):
    seconds: float
    """Duration with drafting."""
    step_seconds: float
    """Duration without drafting."""
    draft_tokens: int
    """Draft tokens verified, plus drafts: the fixed cost of a draft is about that of one token."""


@dataclass(slots=True)
class StepCostTrial:
    """A trial of a draft size: some steps of the usual size, then some of the other."""

    usual: DraftSize
    size: DraftSize
    branches: int
    """Number of branches of its steps, approximately; others do not count."""
    usual_tokens: float
    """Tokens per branch of a usual step."""
    num_warmup: int = 4
    """Ignored first steps of the other size: memory of a new size is allocated, caches are cold, and the drafter
    catches up."""
    share: float = 1.0
    """Share of the branches that get the other size; the others get no drafts."""
    _losses: list[float] = field(default_factory=list)
    """Losses of the steps of the other size, in usual steps; negative for a gain."""
    _spent: float = 0.0
    """Time of the measured steps, in usual steps, and tokens of these, in usual steps' tokens."""
    _made: float = 0.0
    _num_mismatches: int = 0
    """Steps with another number of branches since the trial began."""
    _num_warmup_steps: int = 0
    """Ignored steps with first runs."""
    _before: list[_Step] = field(default_factory=list)
    _after: list[_Step] = field(default_factory=list)

    @property
    def is_measuring(self) -> bool:
        """True if the next step has the other size."""
        return len(self._before) >= _NUM_USUAL_STEPS

    @property
    def is_done(self) -> bool:
        """True if the trial has ended."""
        believed, won = self.steps - self.num_warmup, self._made - self._spent
        is_clear = believed >= _MIN_STEPS and abs(won) > _CLEAR_DIFFERENCE * self.share * self._spent
        is_costly = won < -_MAX_MEASURED_LOSS or self.lost > _MAX_LOSS
        return is_clear or is_costly or believed >= _MAX_STEPS or self._num_mismatches > _MAX_MISMATCHES

    @property
    def lost(self) -> float:
        """Loss of the steps of the other size, in usual steps, single interruptions clipped; negative for a gain."""
        if len(self._losses) < _MIN_LOSSES:
            most = _MAX_STEP_LOSS
        else:
            most = max(_MAX_STEP_LOSS, _INTERRUPTED * statistics.median_low(self._losses))
        return sum(min(each, most) for each in self._losses)

    @property
    def steps(self) -> int:
        """Number of steps of the other size."""
        return len(self._after)

    @property
    def has_result(self) -> bool:
        """True if the trial has measured the other size."""
        return self.steps > self.num_warmup + 1

    def is_about(self, branches: int) -> bool:
        """Return True if steps of ``branches`` branches count."""
        return 8 * abs(branches - self.branches) <= self.branches

    def count_mismatch(self) -> None:
        """Count a step with another number of branches."""
        self._num_mismatches += 1

    def should_discard_warmup(self) -> bool:
        """Return True if a step with first runs is to be ignored, and count it."""
        self._num_warmup_steps += 1
        return self._num_warmup_steps <= _MAX_WARMUP_STEPS

    def add(self, cost: StepCost, draft_tokens: int, drafts: int, won: float) -> None:
        """Add a step with ``draft_tokens`` draft tokens in ``drafts`` drafts; ``won``: accepted tokens per branch."""
        seconds = cost.drafting_seconds + cost.other_seconds
        if self.is_measuring:
            spent = seconds / _robust_mean([each.seconds for each in self._before])
            made = (1 + won) / self.usual_tokens
            self._losses.append(spent - made)
            if len(self._after) >= self.num_warmup:
                self._spent += spent
                self._made += made
        step = _Step(seconds, cost.other_seconds, draft_tokens + drafts)
        (self._after if self.is_measuring else self._before).append(step)

    def conclude(self, costs: StepCostModel) -> None:
        """Update the cost model with the result."""
        before, after = self._before, self._after[self.num_warmup :]
        if not self.has_result:
            if not self._after:
                return
            # The trial ended early, and some of its steps may have been interrupted or slowed by catching up.
            after = [min(self._after)]
        ratio = _robust_mean([each.seconds for each in after]) / _robust_mean([each.seconds for each in before])
        # The cost for a share of the branches is extrapolated to all, and so are its errors.
        costs.learn(self.size, self.usual, max(0.1, 1 + (ratio - 1) / self.share), reliable=self.share == 1)
        if NO_DRAFT in (self.usual, self.size):
            drafting, plain = (after, before) if self.usual == NO_DRAFT else (before, after)
            if draft_tokens := statistics.mean(each.draft_tokens for each in drafting):
                steps = [_robust_mean([each.step_seconds for each in some]) for some in (drafting, plain)]
                costs.learn_token_cost((steps[0] / steps[1] - 1) / draft_tokens)


def _robust_mean(seconds: Sequence[float]) -> float:
    """Return the mean of the durations, interruptions clipped."""
    most = _INTERRUPTED * statistics.median_low(seconds)
    return sum([min(each, most) for each in seconds]) / len(seconds)
