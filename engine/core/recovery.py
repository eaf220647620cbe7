"""Recovery from a failed step: find the request that makes it fail, and continue the others.

This is for failures of what all sequences of a step share, such as the forward pass. An error in one sequence's own
data, such as its grammar or its text, ends that sequence alone (``Sequence.fail``) and loses nothing else.

The requests of a failed step are tried again apart from all others, in halves of halves, until one fails alone. Each
starts again from its tokens, as after a preemption, so one that passes loses only time. Of ``n`` requests with one
culprit about ``2 log2 n`` groups are tried, which compute each context about twice."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable

from engine.scheduler.sequence import Request, Sequence

_log = logging.getLogger(__name__)

MAX_UNEXPLAINED = 8
"""Maximum number of failed steps that a request survives although none failed alone, such as for lack of memory."""

StepWork = Iterable[tuple[Sequence, int]]
"""Sequences with the number of tokens that a step was to compute of them."""


def free_failed_step(error: BaseException | None) -> None:
    """Free the tensors of a failed step, which the tracebacks of its error and of the error's causes keep."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class FailureBisection:
    """The requests of a failed step, in groups that must each get past the failure."""

    def __init__(self, work: StepWork, requests: Iterable[Request], reason: str) -> None:
        """``work`` and ``reason``: of the failed step; ``requests``: all of them, suspects if the step had no work."""
        self.reason = reason
        self.group: list[Request] = []
        """Group that runs now; all other requests wait."""
        self.found_culprit = False
        """True once a request failed alone."""
        self._goals: dict[Sequence, int] = {}
        """Number of tokens each sequence must compute to be past the failure."""
        self._groups: list[list[Request]] = []
        """Groups still to be tried, the next one last."""
        self._aim(work)
        self.requests = list(dict.fromkeys(sequence.request for sequence in self._goals)) or list(requests)
        self._split(self.requests)

    def start_next_group(self) -> bool:
        """Start the next group with unfinished sequences; return False if there is none."""
        self.group = []
        while self._groups and not self.group:
            self.group = [request for request in self._groups.pop() if request.sequences]
        return bool(self.group)

    @property
    def has_passed(self) -> bool:
        """True if every sequence of the group is past the failure or finished."""
        unfinished = (sequence for request in self.group for sequence in request.sequences)
        return all(sequence.num_computed >= self._goals.get(sequence, 0) for sequence in unfinished)

    def record_failure(self, work: StepWork) -> Request | None:
        """Record that the group failed in a step with this ``work``; return its cause, if that is known now.

        The other requests are divided into new groups.
        """
        chosen = {sequence.request for sequence, _ in work}
        failing = [request for request in self.group if request in chosen] or self.group
        self._aim(work)
        self._groups.append([request for request in self.group if request not in failing])
        if len(failing) > 1:
            self._split(failing)
            return None
        self.found_culprit = True
        return failing[0]

    def _aim(self, work: StepWork) -> None:
        for sequence, count in work:
            # If the step had begun to commit, this goal is one step too far, which does no harm.
            self._goals[sequence] = max(self._goals.get(sequence, 0), sequence.num_computed + count)

    def _split(self, requests: list[Request]) -> None:
        """Add two halves as groups, or one group for a single request: none fails that has not failed alone."""
        middle = len(requests) // 2
        self._groups += [requests[middle:], requests[:middle]]


class Recovery:
    """The requests to try after failed steps of a model."""

    def __init__(self, model: str) -> None:
        self.bisection: FailureBisection | None = None
        """Search for the request that made a step fail; while it runs, the scheduler has one group alone."""
        self._model = model

    def record_failure(
        self, error: Exception, work: StepWork, requests: Iterable[Request]
    ) -> tuple[Request | None, str]:
        """Record a failed step; return the request that caused it, if it is known, and the reason.

        ``work`` and ``requests``: as for ``FailureBisection``.
        """
        culprit: Request | None = None
        if self.bisection is not None:
            _log.warning("a step of model %s failed again, with fewer requests: %r", self._model, error)
            culprit = self.bisection.record_failure(work)
        else:
            _log.error("a step of model %s failed", self._model, exc_info=error)
            self.bisection = FailureBisection(work, requests, repr(error))
        return culprit, repr(error)

    def start_next_group(self) -> list[tuple[Request, str]]:
        """Start the next group of the bisection, or end it. Return the requests to fail, with the reason.

        If no request failed alone, each continues up to ``MAX_UNEXPLAINED`` times.
        """
        bisection = self.bisection
        if bisection is None or bisection.start_next_group():
            return []
        self.bisection = None
        if bisection.found_culprit:
            return []
        alive = [request for request in bisection.requests if request.sequences]
        _log.warning("none of %d requests failed alone: they continue", len(alive))
        for request in alive:
            request.num_unexplained_failures += 1
        return [(request, bisection.reason) for request in alive if request.num_unexplained_failures > MAX_UNEXPLAINED]
