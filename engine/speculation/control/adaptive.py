"""Adaptive draft length: the number of draft tokens that maximises tokens per second."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.acceptance import AcceptanceByDepth, AcceptanceCalibrator
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, DraftOutcome
from engine.speculation.drafter import DraftRequest

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_TREE_WIDTH = 3
"""Draft tokens of a tree per level of depth."""
_FEW_BRANCHES = 8
"""Number of branches up to which there usually is compute to spare, which trees need."""
_FIRST_PROBE_TOKENS, _FIRST_PROBE_DEPTH = 16, 8
"""Maximum number of draft tokens of a first probe: of all branches, and of each."""
_NUM_USUAL_STEPS, _NUM_WARMUP_STEPS, _MIN_STEPS, _MAX_STEPS = 8, 4, 5, 24
"""Steps of a probe: of the chosen size, ignored ones of the other size (caches are cold, the drafter catches up), and
minimum and maximum of measured ones of the other size."""
_CLEAR_DIFFERENCE, _MAX_PROBE_LOSS, _MAX_STEP_LOSS = 0.2, 3.0, 4.0
"""Relative difference in speed that ends a probe, the loss that ends it at once, and the maximum loss that is
attributed to one step, both in usual steps."""
_MAX_FIRST_RUNS, _MAX_MISMATCHES = 8, 64
"""Maximum number of steps of a probe with first runs, and of those with another number of branches."""
_MAX_LOSS_FEW, _MAX_LOSS_MANY = 0.04, 0.01
"""Maximum loss of a probe as a share of the steps until the next one, by number of branches."""
_MAX_PATIENCE, _MAX_STEPS_AFTER_CHANGE = 32, 24
"""Maximum factor by which the time between probes grows while the choice stays, and steps until the first probe of a
new choice."""
_MIN_IMPROVEMENT = 1.02
"""Minimum speed-up for another size to replace the choice."""
_STEPS_PER_LESSON, _LESSONS_PER_DECISION = 8, 4
"""Steps with drafts per step that is learned from, and these per decision."""
_MIN_PROB, _MAX_PROB_IN_PROBES, _MAX_PROB = 0.02, 0.3, 0.8
"""Bounds of the acceptance probability from which draft tokens are verified."""
_MARGINAL_COST = 0.5
"""Marginal cost of a draft token relative to the mean cost: the first ones are the most expensive."""
_PROBES_PER_EXPLORATION = 3
"""Where drafting does not pay, one of this many probes is of each size in turn, the others of the fastest one."""
_FIXED_DRAFT_TOKENS = 4.0
"""Fixed cost of drafting in draft tokens, to extrapolate to sizes that were not measured."""
_WEIGHT = 0.3
"""Weight of a new measurement of a cost that was measured before."""
_MAX_CALIBRATED = 16
"""Maximum number of branches of a step whose drafts the calibrator learns from."""


class DraftSize(NamedTuple):
    """Draft size of a branch."""

    depth: int
    """Maximum depth."""
    nodes: int
    """Maximum number of draft tokens: ``depth`` for a chain, more for a tree."""

    @property
    def is_tree(self) -> bool:
        return self.nodes > self.depth


_NO_DRAFT = DraftSize(0, 0)


class _Sample(NamedTuple):
    seconds: float
    """Duration of a step with drafting."""
    step_seconds: float
    """Duration without drafting."""
    num_draft_tokens: int


@dataclass(slots=True)
class _Probe:
    """A comparison of a size with the chosen one: some steps of the choice, then some of the other size."""

    size: DraftSize
    branches: int
    """Number of branches of its steps, approximately; others do not count."""
    usual_tokens: float
    """Tokens per branch of a usual step."""
    num_ignored: int = 0
    num_mismatches: int = 0
    usual: list[_Sample] = field(default_factory=list)
    samples: list[_Sample] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    """What each step of the other size gained, in usual steps; negative for a loss."""

    @property
    def is_measuring(self) -> bool:
        """True if the next step has the other size."""
        return len(self.usual) >= _NUM_USUAL_STEPS

    @property
    def num_measured(self) -> int:
        return len(self.samples) - _NUM_WARMUP_STEPS

    @property
    def is_done(self) -> bool:
        """True if the result is clear, or more steps would be too costly."""
        gain = sum(self.gains[_NUM_WARMUP_STEPS:])
        is_clear = self.num_measured >= _MIN_STEPS and abs(gain) > _CLEAR_DIFFERENCE * self.num_measured
        is_costly = gain < -_MAX_PROBE_LOSS
        return is_clear or is_costly or self.num_measured >= _MAX_STEPS or self.num_mismatches > _MAX_MISMATCHES

    def matches(self, branches: int) -> bool:
        """Return True if steps of ``branches`` branches count."""
        return 8 * abs(branches - self.branches) <= self.branches

    def add(self, sample: _Sample, tokens: float) -> None:
        """Add a step that generated ``tokens`` tokens per branch."""
        if not self.is_measuring:
            self.usual.append(sample)
            return
        cost = sample.seconds / _robust_mean([usual.seconds for usual in self.usual])
        self.gains.append(max(-_MAX_STEP_LOSS, tokens / self.usual_tokens - cost))
        self.samples.append(sample)


@dataclass(slots=True)
class _Bucket:
    """State of steps with about the same number of branches."""

    costs: dict[DraftSize, float] = field(default_factory=lambda: {_NO_DRAFT: 1.0})
    """Measured costs of steps, relative to each other."""
    token_cost: float = 0.0
    """Cost of verifying one draft token, in plain steps."""
    acceptance: tuple[AcceptanceByDepth, AcceptanceByDepth] = field(
        default_factory=lambda: (AcceptanceByDepth(), AcceptanceByDepth())
    )
    """Of chains and of trees."""
    choice: DraftSize = _NO_DRAFT
    steps_until_probe: int = 0
    patience: int = 1
    """Factor on the steps between probes."""
    probe_index: int = 0
    """Probes since the choice last changed."""
    num_lessons: int = 0
    probe: _Probe | None = None

    def tokens(self, size: DraftSize) -> float:
        """Return the expected number of tokens per branch and step."""
        return 1 + self.acceptance[size.is_tree].expected(size.depth)

    def cost(self, size: DraftSize) -> float:
        """Return the cost of a step, extrapolated from the most similar measured size if it was not measured."""
        if size in self.costs:
            return self.costs[size]
        measured = [other for other in self.costs if other.depth]
        if not measured:
            return self.costs[_NO_DRAFT]
        near = min(measured, key=lambda other: (other.is_tree != size.is_tree, abs(other.nodes - size.nodes)))
        extra = max(0.0, self.costs[near] - self.costs[_NO_DRAFT])
        return self.costs[_NO_DRAFT] + extra * (_FIXED_DRAFT_TOKENS + size.nodes) / (_FIXED_DRAFT_TOKENS + near.nodes)

    def speed(self, size: DraftSize) -> float:
        """Return the expected tokens per second, relative to plain decoding."""
        return self.tokens(size) * self.costs[_NO_DRAFT] / self.cost(size)

    def decide(self) -> None:
        """Choose the fastest size that was measured."""
        best = max(self.costs, key=self.speed)
        if best != self.choice and self.speed(best) > _MIN_IMPROVEMENT * self.speed(self.choice):
            self.choice, self.patience, self.probe_index = best, 1, 0
            self.steps_until_probe = min(self.steps_until_probe, _MAX_STEPS_AFTER_CHANGE)

    def conclude(self, probe: _Probe) -> None:
        """End the probe: learn the cost of its size, choose a size, and schedule the next probe."""
        self.probe, self.probe_index = None, self.probe_index + 1
        max_loss = _MAX_LOSS_FEW if probe.branches <= _FEW_BRANCHES else _MAX_LOSS_MANY
        self.steps_until_probe = int(self.patience * max(3 * len(probe.samples), -sum(probe.gains) / max_loss))
        self.patience = min(_MAX_PATIENCE, 2 * self.patience)
        if not probe.samples:
            return
        is_complete = probe.num_measured > 1
        # Some steps of a probe that ended early may have been interrupted or slowed by catching up.
        samples = probe.samples[_NUM_WARMUP_STEPS:] if is_complete else [min(probe.samples)]
        self._learn_cost(probe.size, probe.usual, samples)
        if is_complete:
            self.decide()

    def _learn_cost(self, size: DraftSize, usual: Sequence[_Sample], samples: Sequence[_Sample]) -> None:
        ratio = _robust_mean([each.seconds for each in samples]) / _robust_mean([each.seconds for each in usual])
        cost = self.costs[self.choice] * ratio
        known = self.costs.get(size, cost)
        self.costs[size] = known * (cost / known) ** _WEIGHT
        if _NO_DRAFT in (self.choice, size):
            drafting, plain = (samples, usual) if size.depth else (usual, samples)
            if num_tokens := statistics.mean(each.num_draft_tokens for each in drafting):
                with_drafts, without = (
                    _robust_mean([each.step_seconds for each in some]) for some in (drafting, plain)
                )
                token_cost = max(0.0, with_drafts / without - 1) / num_tokens
                self.token_cost += (token_cost - self.token_cost) * _WEIGHT


class AdaptiveController:
    """Chooses the draft size with the most tokens per second, or no drafts where plain decoding is faster.

    The expected number of tokens of a step follows from the smoothed acceptance by depth, its cost from probes: some
    steps of another size, timed relative to the steps of the chosen size just before, so a machine that is slower
    today, or contexts that are longer, do not matter. Both depend on the number of branches, so each power of two has
    its own estimates and choice (``_Bucket``).

    The loss of a probe is regained before the next one begins, and each probe after which the choice stays doubles the
    time to the next one. The controller reads no clock and is deterministic."""

    def __init__(self, depth: int, nodes: int) -> None:
        """``depth``, ``nodes``: maximum depth and number of draft tokens of a branch."""
        self._depths = [each for each in _DEPTHS if each < depth] + [depth]
        self._nodes = nodes
        self._calibrator = AcceptanceCalibrator()
        self._buckets: dict[int, _Bucket] = {}
        self._bucket = self._get_bucket(1)
        """Bucket of the current step."""
        self._sizes: list[DraftSize] = []
        """Size of each branch of the current step."""
        self._num_requests = 0
        self._num_base_tokens = 0
        """Tokens of the current step that are no draft tokens."""
        self._has_prompts = False
        """True if the current step computes prompts too."""
        self._num_unmeasured = 0
        """Steps left that reuse the last choice and are not learned from."""
        self._min_prob = _MIN_PROB

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], num_other_tokens: int, num_skipped: int, /
    ) -> Sequence[tuple[int, int]]:
        branches = len(sequences)
        if self._num_unmeasured and branches == len(self._sizes) and not num_other_tokens:
            return self._sizes
        self._bucket.steps_until_probe -= num_skipped
        self._num_unmeasured, self._num_requests, self._num_base_tokens = 0, 0, branches + num_other_tokens
        self._bucket = bucket = self._get_bucket(branches)
        # A few branches without room for drafts do not make it a step with prompts.
        self._has_prompts = 4 * num_other_tokens > branches
        size, probe = bucket.choice, bucket.probe
        if self._has_prompts:
            # In a step with many prompt tokens a draft may cost more than in one without.
            size = size if num_other_tokens <= branches * size.depth else _NO_DRAFT
        else:
            is_idle = probe is None or not (probe.is_measuring or probe.matches(branches))
            if is_idle and bucket.steps_until_probe <= 0:
                probe = bucket.probe = self._next_probe(bucket, branches)
            if probe is not None and probe.is_measuring:
                size = probe.size
        break_even = _MARGINAL_COST * bucket.token_cost * branches * bucket.speed(bucket.choice)
        self._min_prob = max(_MIN_PROB, min(_MAX_PROB if bucket.choice.depth else _MAX_PROB_IN_PROBES, break_even))
        self._sizes = [size] * branches
        return self._sizes

    def trim(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        self._num_requests = len(requests)
        return [self._calibrator.trim(draft, self._min_prob) for draft in drafts]

    def update(
        self, outcomes: Sequence[DraftOutcome], tokens: int, drafting: float, step: float, first: bool, /
    ) -> int:
        if self._num_unmeasured:
            self._num_unmeasured -= 1
            return 0
        bucket, probe, branches = self._bucket, self._bucket.probe, len(self._sizes)
        if self._num_requests:
            self._learn_outcomes(outcomes)
        if self._has_prompts:
            # The prompts are soon done, and then there are more branches, for which drafting may pay.
            return 0 if any(other.choice.depth for other in self._buckets.values()) else MAX_SKIPPED_STEPS
        if probe is not None:
            if not probe.matches(branches):
                probe.num_mismatches += 1
            elif first and probe.num_ignored < _MAX_FIRST_RUNS:
                probe.num_ignored += 1
            else:
                num_accepted = sum(len(outcome.accepted) for outcome in outcomes)
                # The fixed cost of a draft is about that of one token.
                num_draft_tokens = tokens - self._num_base_tokens + len(outcomes)
                probe.add(_Sample(drafting + step, step, num_draft_tokens), 1 + num_accepted / branches)
            if probe.is_done:
                bucket.conclude(probe)
            return 0
        if not bucket.choice.depth:
            bucket.steps_until_probe -= 1
            return max(0, min(MAX_SKIPPED_STEPS, bucket.steps_until_probe))
        self._num_unmeasured = _STEPS_PER_LESSON - 1
        bucket.steps_until_probe -= _STEPS_PER_LESSON
        bucket.num_lessons += 1
        if bucket.num_lessons % _LESSONS_PER_DECISION == 0:
            bucket.decide()
        return 0

    def _learn_outcomes(self, outcomes: Sequence[DraftOutcome]) -> None:
        # What would have been sampled after a branch's end is unknown.
        going = [outcome for outcome in outcomes if outcome.sequence.table is not None]
        branches, size = self._num_requests - len(outcomes) + len(going), self._sizes[0]
        if branches:
            num_accepted = [len(outcome.accepted) for outcome in going]
            self._bucket.acceptance[size.is_tree].learn(size.depth, num_accepted, branches)
        for outcome in going[:_MAX_CALIBRATED]:
            self._calibrator.learn(outcome.draft, outcome.accepted)

    def _get_bucket(self, branches: int) -> _Bucket:
        """Return the bucket of a number of branches: its next power of two.

        A new one takes over the acceptance of the nearest one, and the choice and its costs only from more branches:
        for fewer it costs a few plain steps to find out, much less than steps of drafts that do not pay for many."""
        key = 1 << (branches - 1).bit_length()
        if key not in self._buckets:
            bucket = _Bucket()
            if self._buckets:
                nearest = min(self._buckets, key=lambda other: max(other, key) / min(other, key))
                near = self._buckets[nearest]
                if nearest > key:
                    bucket = _Bucket(dict(near.costs), token_cost=near.token_cost, choice=near.choice)
                bucket.acceptance = copy.deepcopy(near.acceptance)
            self._buckets[key] = bucket
        return self._buckets[key]

    def _next_probe(self, bucket: _Bucket, branches: int) -> _Probe:
        usual = bucket.choice
        size = self._variation(bucket, branches) if usual.depth else self._beginning(bucket, branches)
        return _Probe(size, branches, bucket.tokens(usual))

    def _beginning(self, bucket: _Bucket, branches: int) -> DraftSize:
        """Return the size to probe where there are no drafts: the most promising one, now and then each in turn."""
        # Old observations count little.
        bucket.acceptance[False].fade()
        measured = max(size.depth for size in bucket.costs)
        max_depth = 2 * measured or max(1, min(_FIRST_PROBE_DEPTH, _FIRST_PROBE_TOKENS // branches))
        sizes = [DraftSize(depth, depth) for depth in self._depths if depth <= max_depth]
        turn, rest = divmod(bucket.probe_index, _PROBES_PER_EXPLORATION)
        if rest == _PROBES_PER_EXPLORATION - 1:
            return sizes[turn % len(sizes)]
        return max(sizes, key=bucket.speed) if measured else sizes[-1]

    def _variation(self, bucket: _Bucket, branches: int) -> DraftSize:
        """Return the size to compare the choice with.

        It is the size that should be faster although it was never measured, up to twice as deep, if there is one; else,
        in turn, no drafts, the neighbouring depths, and the other kind."""
        choice = bucket.choice
        sizes = [self._shaped(depth, is_tree=choice.is_tree) for depth in self._depths]
        unmeasured = [size for size in sizes if size.depth <= 2 * choice.depth and size not in bucket.costs]
        if unmeasured:
            best = max(unmeasured, key=bucket.speed)
            if bucket.speed(best) > _MIN_IMPROVEMENT * bucket.speed(choice):
                return best
        index = self._depths.index(choice.depth)
        alternatives = [_NO_DRAFT, *sizes[index + 1 : index + 2], *sizes[max(0, index - 1) : index]]
        if choice.is_tree or (branches <= _FEW_BRANCHES and self._nodes > self._depths[-1]):
            alternatives.append(self._shaped(choice.depth, is_tree=not choice.is_tree))
        return alternatives[bucket.probe_index % len(alternatives)]

    def _shaped(self, depth: int, *, is_tree: bool) -> DraftSize:
        return DraftSize(depth, max(depth, min(self._nodes, _TREE_WIDTH * depth)) if is_tree else depth)


def _robust_mean(seconds: Sequence[float]) -> float:
    """Return the mean of the durations, those over twice the median clipped."""
    longest = 2 * statistics.median_low(seconds)
    return sum([min(each, longest) for each in seconds]) / len(seconds)
