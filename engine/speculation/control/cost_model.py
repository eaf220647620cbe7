"""Relative costs of steps by draft size, learned from trials."""

from __future__ import annotations

from typing import NamedTuple

_FIXED_DRAFT_TOKENS = 4.0
"""Fixed cost of drafting in draft tokens, assumed until it was measured."""
_MIN_WEIGHT = 0.2
"""Minimum weight of a new measurement."""


class DraftSize(NamedTuple):
    """Draft size of a branch."""

    depth: int
    """Maximum depth."""
    nodes: int
    """Maximum number of draft tokens: ``depth`` for a chain."""

    @property
    def is_tree(self) -> bool:
        """True if some of the tokens are alternatives."""
        return self.nodes > self.depth


NO_DRAFT = DraftSize(0, 0)


class StepCostModel:
    """Cost of a step by the draft size of its branches, relative to a plain step of the same number of branches."""

    def __init__(self) -> None:
        self.measured: dict[DraftSize, float] = {NO_DRAFT: 1.0}
        """Measured costs."""
        self._initial = self.measured
        """Costs of about as many branches, used until some are measured."""
        self._num_trials: dict[DraftSize, int] = {}
        self.token_cost = 0.0
        """Cost of verifying one draft token, in plain steps."""
        self._num_token_costs = 0

    def copy(self) -> StepCostModel:
        """Return initial estimates for another number of branches."""
        other = StepCostModel()
        other._initial = dict(self._known)
        other.token_cost, other._num_token_costs = self.token_cost, min(self._num_token_costs, 1)
        return other

    @property
    def _known(self) -> dict[DraftSize, float]:
        return self.measured if len(self.measured) > 1 else self._initial

    def estimate(self, size: DraftSize) -> float:
        """Return the cost of a step: as measured, else interpolated between the next smaller and larger size that were
        measured.

        If one of these is missing, the cost is proportional to the other's.
        """
        known = self._known
        if size in known:
            return known[size]
        others = sorted(other for other in known if other.depth)
        # Chains are most similar to chains.
        others = [other for other in others if other.is_tree == size.is_tree] or others
        below = next((other for other in reversed(others) if other.nodes <= size.nodes), None)
        above = next((other for other in others if other.nodes > size.nodes), None)
        if below is not None and above is not None:
            part = (size.nodes - below.nodes) / (above.nodes - below.nodes)
            return (1 - part) * known[below] + part * known[above]
        like = below or above
        if like is None:
            return 1.0
        return 1 + max(0.0, known[like] - 1) * (_FIXED_DRAFT_TOKENS + size.nodes) / (_FIXED_DRAFT_TOKENS + like.nodes)

    def learn(self, size: DraftSize, reference: DraftSize, ratio: float, *, reliable: bool) -> None:
        """Learn that a step of ``size`` took ``ratio`` times as long as one of ``reference``.

        Unless the measurement is ``reliable``, the next one of this size gets more weight.
        """
        cost = self.measured.setdefault(reference, self.estimate(reference)) * ratio
        if size == NO_DRAFT:
            # Plain steps are the unit: either all sizes cost that much more, or the estimate of this size was wrong.
            times = self._num_trials.get(reference, 0)
            wrong = cost ** -self._compute_weight(reference)
            for other in self.measured:
                if other.depth:
                    alike = other == reference or other not in self._num_trials
                    self.measured[other] *= wrong if alike else wrong ** (times / (1 + times))
        else:
            was = self.measured.setdefault(size, cost)
            self.measured[size] = was * (cost / was) ** self._compute_weight(size, counts=reliable)

    def learn_token_cost(self, cost: float) -> None:
        """Learn that verifying one draft token took ``cost`` plain steps."""
        self._num_token_costs += 1
        self.token_cost += (max(0.0, cost) - self.token_cost) * max(_MIN_WEIGHT, 1 / self._num_token_costs)

    def _compute_weight(self, size: DraftSize, *, counts: bool = True) -> float:
        times = self._num_trials.get(size, 0) + 1
        if counts:
            self._num_trials[size] = times
        return max(_MIN_WEIGHT, 1 / times)


def batch_bucket(num_branches: int) -> int:
    """Return the bucket of a number of branches: the next power of two.

    Numbers that change by one now and then share a bucket: to draft for a few steps at a time does not pay.
    """
    return 1 << (num_branches - 1).bit_length()
