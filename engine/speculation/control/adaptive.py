"""Adaptive draft length: the number of draft tokens that maximises tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.acceptance import AcceptanceByDepth, AcceptanceCalibrator
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, DraftOutcome, StepCost
from engine.speculation.control.cost_model import NO_DRAFT, DraftSize, StepCostModel, batch_bucket
from engine.speculation.control.step_cost_trials import StepCostTrial
from engine.speculation.drafter import DraftRequest

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Depths that are tried."""
_TREE = 3
"""Draft tokens of a tree per level of depth."""
_FEW_BRANCHES, _TRIAL_SHARE, _NEARLY_AS_FAST = 8, 0.125, 0.85
"""Number of branches above which a trial begins with a share of them; all follow if the share is nearly as fast as
plain steps."""
_FIRST_TRIAL_TOKENS, _FIRST_TRIAL_DEPTH = 16, 8
"""Maximum number of draft tokens of a first trial: of all branches, and of each."""
_MAX_STEPS_AFTER_CHANGE = 24
"""Maximum number of steps before the next trial after the choice changed."""
_STEPS_PER_LESSON, _LESSONS_PER_DECISION = 8, 4
"""Steps with drafts per step that is learned from (small models' steps are as short as that), and these per
decision."""
_MIN_GAIN, _MIN_IMPROVEMENT = 1.03, 1.015
"""Minimum speed-up for drafting to begin, and for another size to replace one."""
_MIN_TRIAL_DISTANCE, _MAX_PATIENCE = 2, 16
"""Steps between two trials, in trials' lengths, and the maximum factor by which they grow if the choice stays."""
_MAX_LOSS_FEW, _MAX_LOSS_MANY = 0.04, 0.01
"""Maximum loss of a trial as a share of the steps until the next one: for few branches, and for many, which seldom have
compute to spare."""
_MIN_PROB, _MAX_PROB_IN_TRIALS, _MAX_PROB = 0.02, 0.3, 0.8
"""Acceptance probabilities: below the first, draft tokens are never verified; the others bound the threshold in trials
and otherwise."""
_MARGINAL_COST = 0.5
"""Marginal cost of a draft token, relative to the mean cost: the first ones are the most expensive."""
_TRIALS_PER_EXPLORATION = 3
"""One of this many trials is an exploration: of all draft tokens, and of each size in turn where drafting does not
pay."""
_MAX_CALIBRATED = 16
"""Maximum number of branches of a step whose drafts the calibrator learns from."""


@dataclass(slots=True)
class _BatchBucket:
    """State of steps with about the same number of branches."""

    costs: StepCostModel
    chains: AcceptanceByDepth
    trees: AcceptanceByDepth
    choice: DraftSize = NO_DRAFT
    steps_until_trial: int = 0
    """Steps until the next trial."""
    trial_interval: int = 1
    """Factor on these steps."""
    trial_index: int = 0
    """Trials since the choice last changed."""
    num_learned: int = 0
    """Number of steps that were learned from."""
    trial: StepCostTrial | None = None

    @property
    def is_exploration_trial(self) -> bool:
        """True if the trial is to find out whether estimates are outdated."""
        return self.trial_index % _TRIALS_PER_EXPLORATION == _TRIALS_PER_EXPLORATION - 1

    def acceptance(self, size: DraftSize) -> AcceptanceByDepth:
        return self.trees if size.is_tree else self.chains

    def tokens(self, size: DraftSize) -> float:
        """Return the mean number of tokens per branch and step."""
        return 1 + self.acceptance(size).gain(size.depth)

    def speed(self, size: DraftSize) -> float:
        """Return the tokens per second, relative to plain decoding."""
        return self.tokens(size) / self.costs.estimate(size)

    def decide(self) -> None:
        """Choose the fastest size that was measured."""
        best, best_speed = self.choice, self.speed(self.choice)
        for size in self.costs.measured:
            speed = self.speed(size)
            if speed > best_speed * (_MIN_IMPROVEMENT if best.depth or self.choice.depth else _MIN_GAIN):
                best, best_speed = size, speed
        if best != self.choice:
            self.choice, self.trial_interval, self.trial_index = best, 1, 0
            self.steps_until_trial = min(self.steps_until_trial, _MAX_STEPS_AFTER_CHANGE)


class AdaptiveController:
    """Chooses the draft size with the most tokens per second, or no drafts where plain decoding is faster.

    The best size depends on the number of branches, so each bucket has its own choice (``_BatchBucket``). A new bucket
    begins with the choice of the nearest one with more branches, else without drafts. The number of accepted tokens is
    estimated by depth (``AcceptanceByDepth``). The cost of a step is measured by trials (``StepCostTrial``) relative to
    other steps of the same time, and interpolated between measured sizes, so most steps need no measurement and a
    machine that is slower today, or contexts that are longer, do not matter.

    The loss of a trial is regained before the next one begins. Each trial after which the choice stays doubles the time
    to the next one, up to ``_MAX_PATIENCE`` times. The controller reads no clock and is deterministic."""

    def __init__(self, depth: int, nodes: int) -> None:
        """``depth``, ``nodes``: maximum depth and number of draft tokens of a branch."""
        self._depths = [each for each in DEPTHS if each < depth] + [depth]
        self._nodes = nodes
        self._calibrator = AcceptanceCalibrator()
        self._buckets: dict[int, _BatchBucket] = {}
        self._bucket = self._get_bucket(1)
        """Bucket of the current step."""
        self._sizes: list[DraftSize] = []
        """Sizes chosen for the current step, at least one of which is ``_size``."""
        self._size = NO_DRAFT
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
        self._bucket.steps_until_trial -= num_skipped
        self._num_unmeasured, self._num_requests, self._num_base_tokens = 0, 0, branches + num_other_tokens
        self._bucket = bucket = self._get_bucket(branches)
        # A few branches without room for drafts do not make it a step with prompts.
        self._has_prompts = 4 * num_other_tokens > branches
        size, num_drafting = bucket.choice, branches
        if self._has_prompts:
            # In a step with many prompt tokens a draft may cost more than in one without.
            size = size if num_other_tokens <= branches * size.depth else NO_DRAFT
        else:
            trial = bucket.trial
            if bucket.steps_until_trial <= 0 and (
                trial is None or not (trial.is_measuring or trial.is_about(branches))
            ):
                trial = bucket.trial = self._next_trial(bucket, branches)
            if trial is not None and trial.is_measuring:
                size, num_drafting = trial.size, int(branches * trial.share)
        max_prob = _MAX_PROB if bucket.choice.depth else _MAX_PROB_IN_TRIALS
        break_even = _MARGINAL_COST * bucket.costs.token_cost * branches * bucket.speed(bucket.choice)
        self._min_prob = max(_MIN_PROB, min(max_prob, break_even))
        if not self._has_prompts and size != bucket.choice and bucket.is_exploration_trial:
            self._min_prob = 0.0
        self._size, self._sizes = size, [size] * branches
        if size.depth and num_drafting < branches:
            self._sizes = [size] * num_drafting + [NO_DRAFT] * (branches - num_drafting)
        return self._sizes

    def trim(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        self._num_requests = len(requests)
        return [self._calibrator.trim(draft, self._min_prob) for draft in drafts]

    def update(self, outcomes: Sequence[DraftOutcome], cost: StepCost, /) -> int:
        if self._num_unmeasured:
            self._num_unmeasured -= 1
            return 0
        bucket = self._bucket
        if self._num_requests:
            self._learn_outcomes(bucket, self._size, outcomes)
        if self._has_prompts:
            # The prompts are soon done, and then there are more branches, for which drafting may pay.
            return 0 if any(other.choice.depth for other in self._buckets.values()) else MAX_SKIPPED_STEPS
        if bucket.trial is not None:
            branches, trial = len(self._sizes), bucket.trial
            if not trial.is_about(branches):
                trial.count_mismatch()
            elif not (cost.has_first_runs and trial.should_discard_warmup()):
                won = sum(len(outcome.accepted) for outcome in outcomes) / branches
                trial.add(cost, cost.num_tokens - self._num_base_tokens, len(outcomes), won)
            if trial.is_done:
                self._conclude(bucket, trial)
            return 0
        if not bucket.choice.depth:
            bucket.steps_until_trial -= 1
            return max(0, min(MAX_SKIPPED_STEPS, bucket.steps_until_trial))
        self._num_unmeasured = _STEPS_PER_LESSON - 1
        bucket.steps_until_trial -= _STEPS_PER_LESSON
        bucket.num_learned += 1
        if bucket.num_learned % _LESSONS_PER_DECISION == 0:
            bucket.decide()
        return 0

    def _get_bucket(self, branches: int) -> _BatchBucket:
        """Return the bucket of a number of branches; a new one starts from the nearest one.

        That drafting pays is taken over from more branches only: for fewer it costs a few plain steps to find out, much
        less than some steps of drafts that do not pay for many."""
        key = batch_bucket(branches)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = _BatchBucket(StepCostModel(), AcceptanceByDepth(), AcceptanceByDepth())
            if self._buckets:
                nearest = min(self._buckets, key=lambda other: max(other, key) / min(other, key))
                near = self._buckets[nearest]
                bucket = _BatchBucket(near.costs.copy(), near.chains.copy(), near.trees.copy())
                if nearest > key:
                    bucket.choice = near.choice
                # A first trial may come at once, but one is enough for all large numbers of branches.
                if min(nearest, key) > _FEW_BRANCHES and bucket.choice == near.choice:
                    bucket.steps_until_trial = near.steps_until_trial
            self._buckets[key] = bucket
        return bucket

    def _learn_outcomes(self, bucket: _BatchBucket, size: DraftSize, outcomes: Sequence[DraftOutcome]) -> None:
        # What would have been sampled after a branch's end is unknown.
        going = [outcome for outcome in outcomes if outcome.sequence.table is not None]
        branches = self._num_requests - len(outcomes) + len(going)
        if branches:
            bucket.acceptance(size).learn(size.depth, (len(outcome.accepted) for outcome in going), branches)
        for outcome in going[:_MAX_CALIBRATED]:
            self._calibrator.learn(outcome.draft, outcome.accepted)

    def _next_trial(self, bucket: _BatchBucket, branches: int) -> StepCostTrial:
        usual, known = bucket.choice, max(size.depth for size in bucket.costs.measured)
        if usual.depth:
            size = self._choose_variation(bucket, branches)
            return StepCostTrial(usual, size, branches, bucket.tokens(usual))
        most = 2 * known or max(1, min(_FIRST_TRIAL_DEPTH, _FIRST_TRIAL_TOKENS // branches))
        sizes = [self._create_size(depth) for depth in self._depths if depth <= most]
        size = max(sizes, key=bucket.speed) if known else sizes[-1]
        if bucket.is_exploration_trial:
            size = sizes[bucket.trial_index // _TRIALS_PER_EXPLORATION % len(sizes)]
        # Old observations count little.
        bucket.chains = bucket.chains.copy()
        return StepCostTrial(usual, size, branches, 1.0, share=_TRIAL_SHARE if branches > _FEW_BRANCHES else 1.0)

    def _choose_variation(self, bucket: _BatchBucket, branches: int) -> DraftSize:
        """Return the size to compare the choice with.

        It is the size that should be faster although it was never measured, up to twice as deep, if there is one; else,
        in turn, no drafts, the neighbouring depths, the more promising one first, and the other kind."""
        # Drafting seldom pays for many branches: the machine may have been slower for a while when it seemed to.
        if branches > _FEW_BRANCHES and not bucket.trial_index:
            return NO_DRAFT
        depth, tree = bucket.choice.depth, bucket.choice.is_tree
        sizes = [self._create_size(each, tree=tree) for each in self._depths]
        promising = [size for size in sizes if size.depth <= 2 * depth and size not in bucket.costs.measured]
        best = max(promising, key=bucket.speed, default=NO_DRAFT)
        if bucket.speed(best) > _MIN_IMPROVEMENT * bucket.speed(bucket.choice):
            return best
        index = self._depths.index(depth)
        adjacent = sizes[index + 1 : index + 2] + sizes[max(0, index - 1) : index]
        neighbours = (NO_DRAFT, *sorted(adjacent, key=bucket.speed, reverse=True))
        # Trees pay only if there is compute to spare.
        if tree or (branches <= _FEW_BRANCHES and self._nodes > self._depths[-1]):
            neighbours += (self._create_size(depth, tree=not tree),)
        return neighbours[bucket.trial_index % len(neighbours)]

    def _create_size(self, depth: int, *, tree: bool = False) -> DraftSize:
        return DraftSize(depth, max(depth, min(self._nodes, _TREE * depth)) if tree else depth)

    def _conclude(self, bucket: _BatchBucket, trial: StepCostTrial) -> None:
        trial.conclude(bucket.costs)
        bucket.trial, bucket.trial_index = None, bucket.trial_index + 1
        share = _MAX_LOSS_FEW if trial.branches <= _FEW_BRANCHES else _MAX_LOSS_MANY
        bucket.steps_until_trial = int(
            bucket.trial_interval * max(_MIN_TRIAL_DISTANCE * trial.steps, trial.lost / share)
        )
        bucket.trial_interval = min(_MAX_PATIENCE, 2 * bucket.trial_interval)
        if trial.share < 1 and bucket.speed(trial.size) > _NEARLY_AS_FAST:
            bucket.trial = StepCostTrial(NO_DRAFT, trial.size, trial.branches, 1.0)
        elif trial.share == 1 and trial.has_result:
            bucket.decide()
