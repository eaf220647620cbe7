"""Speculative decoding of one model: request drafts, fit them into the step, and report the outcome."""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.runner.batch import ScheduledSequence
from engine.sampling.grammar import Grammar
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Sequence
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, Controller, DraftOutcome, StepCost
from engine.speculation.drafter import Drafter, DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.stats import SpeculationStats
from kernels.common import warmup

_log = logging.getLogger(__name__)

_PAUSE = 64
"""Steps without drafts after a drafter's first failure; doubled after each further one."""

_OBSERVED_STEPS = {HiddenStateNeeds.NONE: 0, HiddenStateNeeds.LAST: 1, HiddenStateNeeds.ALL: math.inf}
"""Number of steps before the next draft that a drafter observes."""


class _Phase(Enum):
    """State of the current step."""

    IDLE = auto()
    """No step is in progress, or it skips speculation altogether."""
    OBSERVED = auto()
    """The drafter observes the step; the controller skips it."""
    MEASURED = auto()
    """The controller chose the drafts and measures the step."""


@dataclass(slots=True)
class _SkippedSteps:
    """Steps that the controller asked to skip."""

    num_left: int = 0
    num_skipped: int = 0
    """Steps skipped since the controller last chose."""
    baseline: int = 0
    """Number of sequences in the step before them."""

    def advance(self) -> None:
        self.num_left -= 1
        self.num_skipped += 1


@dataclass(slots=True)
class _Step:
    """Measurements of the current step."""

    num_candidates: int = 0
    """Branches that could be drafted for."""
    has_requests: bool = False
    """True if drafts were requested for any of them."""
    num_tokens: int = 0
    """Tokens computed, draft tokens included."""
    num_first_runs: int = 0
    """``warmup.num_first_runs`` at its start."""
    drafting_seconds: float = 0.0
    started_at: float = 0.0
    """Time at which drafting was done."""


class Speculator:
    """The drafter of one model and its controller.

    Drafts change nothing but the speed, so a drafter that fails ends no request: the error is logged, the drafter is
    reset, and drafting pauses.
    """

    def __init__(self, drafter: Drafter, controller: Controller, *, context: int, trees: bool) -> None:
        """``context``: maximum number of tokens of a sequence. ``trees``: True if the attention supports trees."""
        self.drafter = drafter
        self.controller = controller
        self.stats = SpeculationStats(drafter.kind)
        self._context = context
        self._trees = trees
        self._phase = _Phase.IDLE
        self._step = _Step()
        self._skipped = _SkippedSteps()
        self.observed_layers = frozenset(drafter.observed_layers)
        """Layers whose hidden states the drafter observes, see ``Drafter``."""
        has_needs = drafter.hidden_state_needs is not HiddenStateNeeds.NONE
        self.needs_all_hidden_states = has_needs and not drafter.observed_layers
        """True if the drafter observes the final hidden states of all tokens."""
        self._reads_tokens_only = not has_needs
        """True if the drafter has nothing in the pages of the cache, of which branches may lose some."""
        self._max_unobserved = _OBSERVED_STEPS[drafter.hidden_state_needs]
        self._controller_seconds = 0.0
        """Duration of the controller's last update, not yet counted."""
        self._finished: list[GenerateSequence] = []
        """Branches that the current step finished."""
        self._pause = _PAUSE
        """Steps without drafts after the next failure."""
        self._num_paused = 0
        """Steps left of the current pause, skipped ones not counted."""

    def reset(self, cache: KVCache) -> None:
        """Start with an empty ``cache`` of the target."""
        self._cache = cache
        # CPU time excludes what other processes do, but while a GPU computes this thread may sleep.
        self._clock = time.perf_counter if cache.data.is_cuda else time.thread_time
        self.drafter.reset(cache)
        self._release_finished()

    @property
    def reads_next_step(self) -> bool:
        """True unless the next step is skipped: else it needs the tokens of the steps before it."""
        return not self._skipped.num_left or self._skipped.num_left <= self._max_unobserved

    def should_skip_step(self, num_sequences: int, *, has_unread: bool = False) -> bool:
        """Return True if the next step, of ``num_sequences``, needs no speculation: no drafts and nothing to observe.

        To be called before every step; if False, ``add_drafts`` and ``update`` follow. ``has_unread``: tokens of the
        step before it are not read, which is allowed unless it ``reads_next_step``.
        """
        skipped = self._skipped
        if not skipped.num_left:
            return False
        # Drafts that cost more than they save at a large batch size may save time at a small one.
        if 8 * abs(num_sequences - skipped.baseline) > skipped.baseline:
            skipped.num_left = 1 if has_unread else 0
            if not has_unread:
                return False
        elif skipped.num_left <= self._max_unobserved:
            return False
        skipped.advance()
        self.stats.record_step(num_sequences, (), 0.0)
        return True

    def add_drafts(self, scheduled: abc.Sequence[tuple[Sequence, int]], step_tokens: int) -> list[ScheduledSequence]:
        """Add drafts to the scheduled decoding branches, within ``step_tokens`` and without preempting any."""
        if self._skipped.num_left:
            self._phase = _Phase.OBSERVED
            return [ScheduledSequence(sequence, count) for sequence, count in scheduled]
        self._phase = _Phase.MEASURED
        step = self._step
        step.num_first_runs = warmup.num_first_runs
        if self._num_paused:
            self._num_paused -= 1
        step.num_tokens = sum([count for _, count in scheduled])
        started_at = self._clock()
        requests = self._create_requests(scheduled)
        step.has_requests = bool(requests)
        drafts: dict[Sequence, Draft] = {}
        if requests:
            for request, draft in zip(requests, self._propose(requests), strict=True):
                if draft.tokens:
                    fitted = self._fit(request, draft, step_tokens - step.num_tokens, len(scheduled))
                    drafts[request.sequence] = fitted
                    step.num_tokens += len(fitted.tokens)
        step.started_at = self._clock()
        step.drafting_seconds = step.started_at - started_at
        return [ScheduledSequence(sequence, count, drafts.get(sequence, EMPTY_DRAFT)) for sequence, count in scheduled]

    def update(
        self,
        scheduled: abc.Sequence[ScheduledSequence],
        outcomes: abc.Sequence[DraftOutcome],
        *,
        hidden: Tensor,
        kept: Mapping[int, Tensor],
    ) -> None:
        """Report the finished step that ``add_drafts`` began to the drafter and the controller.

        ``scheduled`` is in the order of the batch; ``hidden``: its final hidden states ``[tokens, width]``, of all
        tokens if the drafter ``needs_all_hidden_states``; ``kept``: those after the ``observed_layers``.
        """
        if self._phase is _Phase.OBSERVED:
            started_at = self._clock()
            self._observe(_step_results(scheduled, outcomes), hidden, kept)
            self.stats.record_step(len(scheduled), (), self._clock() - started_at)
            self._skipped.advance()
        else:
            self._measure(scheduled, outcomes, hidden=hidden, kept=kept)
        self._release_finished()

    def _measure(
        self,
        scheduled: abc.Sequence[ScheduledSequence],
        outcomes: abc.Sequence[DraftOutcome],
        *,
        hidden: Tensor,
        kept: Mapping[int, Tensor],
    ) -> None:
        step, finished_at = self._step, self._clock()
        step_seconds = finished_at - step.started_at
        has_needs = self.drafter.hidden_state_needs is not HiddenStateNeeds.NONE
        self._observe(_step_results(scheduled, outcomes) if has_needs else [], hidden, kept)
        observed_at = self._clock()
        observing_seconds = observed_at - finished_at
        drafting_seconds = step.drafting_seconds + observing_seconds
        # The controller's last update is no part of this step's cost: in most steps there is none.
        self.stats.record_step(step.num_candidates, outcomes, drafting_seconds + self._controller_seconds)
        self._controller_seconds = 0.0
        if step.num_candidates:
            if not step.has_requests:
                drafting_seconds = self._amortize(step.drafting_seconds, observing_seconds)
            has_first_runs = warmup.num_first_runs > step.num_first_runs
            cost = StepCost(step.num_tokens, drafting_seconds, step_seconds, has_first_runs)
            self._skipped.num_left = self.controller.update(outcomes, cost)
            self._skipped.baseline = len(scheduled)
            self._controller_seconds = self._clock() - observed_at

    def _amortize(self, choosing_seconds: float, observing_seconds: float) -> float:
        """Return the cost per step of not drafting: the controller chooses in one of many steps then."""
        if self.drafter.hidden_state_needs is HiddenStateNeeds.ALL:
            return observing_seconds + choosing_seconds / (1 + MAX_SKIPPED_STEPS)
        return (observing_seconds + choosing_seconds) / (1 + MAX_SKIPPED_STEPS)

    def release(self, sequence: GenerateSequence) -> None:
        """Release the drafter's state of a finished branch, after its last step was reported."""
        self._finished.append(sequence)
        if self._phase is _Phase.IDLE:
            self._release_finished()

    def _release_finished(self) -> None:
        self._phase = _Phase.IDLE
        finished, self._finished = self._finished, []
        for sequence in finished:
            try:
                self.drafter.release(sequence)
            except Exception:
                self._handle_failure()

    def _propose(self, requests: list[DraftRequest]) -> list[Draft]:
        if self._num_paused:
            return [EMPTY_DRAFT] * len(requests)
        try:
            drafts = self.drafter.propose(requests)
            for request, draft in zip(requests, drafts, strict=True):
                # A deeper draft would write past the branch's end.
                if len(draft.tokens) > request.depth < max(draft.depths):
                    raise ValueError(f"a draft has depth {max(draft.depths)}; at most {request.depth} was requested")
            drafts = [
                draft if request.sequence.grammar is None else _follow_grammar(request, draft, request.sequence.grammar)
                for request, draft in zip(requests, drafts, strict=True)
            ]
            # Drafting a stop token is useless: if all before it is accepted, the branch ends there anyway.
            drafts = [
                draft if sequence.terminal_tokens.isdisjoint(draft.tokens) else draft.without(sequence.terminal_tokens)
                for (sequence, _, _), draft in zip(requests, drafts, strict=True)
            ]
            return self.controller.trim(requests, drafts)
        except Exception:
            self._handle_failure()
            return [EMPTY_DRAFT] * len(requests)

    def _observe(self, results: list[StepResult], hidden: Tensor, kept: Mapping[int, Tensor]) -> None:
        if self._num_paused:
            return
        try:
            if self.drafter.observed_layers:
                hidden = torch.cat([kept[layer] for layer in self.drafter.observed_layers], dim=1)
            self.drafter.observe_step(results, hidden)
        except Exception:
            self._handle_failure()

    def _handle_failure(self) -> None:
        """Log the drafter's exception, reset the drafter and pause drafting."""
        _log.exception("the drafter %s failed; no drafts for %d steps", self.drafter.kind, self._pause)
        self._num_paused, self._pause = self._pause, 2 * self._pause
        self.drafter.reset(self._cache)

    def _create_requests(self, scheduled: abc.Sequence[tuple[Sequence, int]]) -> list[DraftRequest]:
        """Return draft requests for the decoding branches that may generate more than one token."""
        candidates: list[GenerateSequence] = []
        max_depths: list[int] = []
        for sequence, count in scheduled:
            num_tokens = len(sequence.tokens)
            if (
                count == 1
                and sequence.num_computed + 1 == num_tokens
                and isinstance(sequence, GenerateSequence)
                and sequence.request.allow_draft
                and (sequence.drops is None or self._reads_tokens_only)
            ):
                # The step samples one token more than it accepts.
                end = min(sequence.num_prefix_tokens + sequence.branch.max_tokens, self._context)
                max_depth = end - num_tokens - 1
                if sequence.drops is not None:  # what follows a drop does not see what this step sees
                    max_depth = min(max_depth, sequence.drops.count_until_next(sequence.num_computed) - 1)
                if max_depth > 0:
                    candidates.append(sequence)
                    max_depths.append(max_depth)
        self._step.num_candidates = len(candidates)
        if not candidates:
            return []
        requests = []
        num_other_tokens = self._step.num_tokens - len(candidates)
        sizes = self.controller.choose_sizes(candidates, num_other_tokens, self._skipped.num_skipped)
        self._skipped.num_skipped = 0
        for sequence, max_depth, (depth, nodes) in zip(candidates, max_depths, sizes, strict=True):
            if depth > 0:
                depth_left = min(depth, max_depth)
                if nodes > depth and self._trees:
                    # The slots of a tree are consecutive like a chain's, and within the context too.
                    nodes = max(depth_left, min(nodes, self._context - len(sequence.tokens)))
                    requests.append(DraftRequest(sequence, depth_left, nodes))
                else:
                    requests.append(DraftRequest(sequence, depth_left, depth_left))
        return requests

    def _fit(self, request: DraftRequest, draft: Draft, tokens_left: int, num_running: int) -> Draft:
        """Truncate a draft to the free tokens and pages; a page is taken only if one is left per running sequence."""
        table, cache, num_tokens = request.sequence.pages, self._cache, len(request.sequence.tokens)
        count = min(len(draft.tokens), request.nodes, tokens_left)
        if num_tokens + count > table.num_pages * cache.page_size:
            num_missing = -(-(num_tokens + count) // cache.page_size) - table.num_pages
            if cache.num_available_pages - num_missing >= num_running:
                cache.reserve(table, num_tokens + count)
            count = max(0, min(count, table.num_pages * cache.page_size - num_tokens))
        return draft if count == len(draft.tokens) else draft.select(range(count))


def _follow_grammar(request: DraftRequest, draft: Draft, grammar: Grammar) -> Draft:
    """Return the tokens that the grammar forces, or else the draft without those that could not be accepted."""
    try:
        forced = grammar.find_forced()[: request.depth]
        if forced:
            return Draft.chain(forced, [1.0] * len(forced))
        valid = grammar.find_valid(draft.tokens, draft.parents)
    except Exception as error:  # the fault of this branch and not of the drafter
        request.sequence.fail(error)
        return EMPTY_DRAFT
    return draft if len(valid) == len(draft) else draft.select(valid)


def _step_results(scheduled: abc.Sequence[ScheduledSequence], outcomes: abc.Sequence[DraftOutcome]) -> list[StepResult]:
    """Return the results of a step for the branches that continue."""
    accepted = {outcome.sequence: outcome.accepted for outcome in outcomes}
    results: list[StepResult] = []
    start = 0
    for sequence, num_tokens, draft in scheduled:
        draft_start = start + num_tokens
        table = sequence.table
        # The entries of a branch that lost pages would be read by nobody.
        if isinstance(sequence, GenerateSequence) and table is not None and not table.num_dropped_pages:
            own_rows, indices = range(start, draft_start), accepted.get(sequence)
            rows = [*own_rows, *(draft_start + index for index in indices)] if indices else own_rows
            results.append(StepResult(sequence, sequence.num_computed - len(rows), rows))
        start = draft_start + len(draft.tokens)
    return results
