"""Recovery from a failed step: find the request that makes it fail, and continue the others.

This is for failures of what all sequences of a step share, such as the forward pass. An error in one sequence's own
data, such as its grammar or its text, ends that sequence alone (``Sequence.fail``) and loses nothing else.

The jobs of a failed step are tried again apart from all others, in halves of halves, until one fails alone. A job
starts again from its tokens, as after a preemption, so a job that passes loses only time. Of ``n`` jobs with one
culprit about ``2 log2 n`` groups are tried, which compute each context about twice."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable

from engine.scheduler.sequence import Job, Sequence

_log = logging.getLogger(__name__)

MAX_UNEXPLAINED = 8
"""Maximum number of failed steps that a job survives although no job failed alone, such as for lack of memory."""

StepWork = Iterable[tuple[Sequence, int]]
"""Sequences with the number of tokens that a step was to compute of them."""


def free_failed_step(error: BaseException | None) -> None:
    """Free the tensors of a failed step, which the tracebacks of its error and of the error's causes keep."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class FailureBisection:
    """The jobs of a failed step, in groups that must each get past the failure."""

    def __init__(self, work: StepWork, jobs: Iterable[Job], reason: str) -> None:
        """``work`` and ``reason``: of the failed step; ``jobs``: all jobs, which are suspects if the step had no
        work."""
        self.reason = reason
        self.group: list[Job] = []
        """Group that runs now; all other jobs wait."""
        self.found_culprit = False
        """True once a job failed alone."""
        self._goals: dict[Sequence, int] = {}
        """Number of tokens each sequence must compute to be past the failure."""
        self._groups: list[list[Job]] = []
        """Groups still to be tried, the next one last."""
        self._aim(work)
        self.jobs = list(dict.fromkeys(sequence.job for sequence in self._goals)) or list(jobs)
        self._split(self.jobs)

    def start_next_group(self) -> bool:
        """Start the next group with unfinished sequences; return False if there is none."""
        self.group = []
        while self._groups and not self.group:
            self.group = [job for job in self._groups.pop() if job.sequences]
        return bool(self.group)

    @property
    def has_passed(self) -> bool:
        """True if every sequence of the group is past the failure or finished."""
        unfinished = (sequence for job in self.group for sequence in job.sequences)
        return all(sequence.num_computed >= self._goals.get(sequence, 0) for sequence in unfinished)

    def record_failure(self, work: StepWork) -> Job | None:
        """Record that the group failed in a step with this ``work``; return the job that caused it, if it is known now.

        The other jobs are divided into new groups.
        """
        chosen = {sequence.job for sequence, _ in work}
        failing = [job for job in self.group if job in chosen] or self.group
        self._aim(work)
        self._groups.append([job for job in self.group if job not in failing])
        if len(failing) > 1:
            self._split(failing)
            return None
        self.found_culprit = True
        return failing[0]

    def _aim(self, work: StepWork) -> None:
        for sequence, count in work:
            # If the step had begun to commit, this goal is one step too far, which does no harm.
            self._goals[sequence] = max(self._goals.get(sequence, 0), sequence.num_computed + count)

    def _split(self, jobs: list[Job]) -> None:
        """Add two halves as groups, or one group for a single job, so that no job fails without having failed alone."""
        middle = len(jobs) // 2
        self._groups += [jobs[middle:], jobs[:middle]]


class Recovery:
    """The jobs to try after failed steps of a model."""

    def __init__(self, model: str) -> None:
        self.bisection: FailureBisection | None = None
        """Search for the job that made a step fail; while it runs, the scheduler has one group of jobs alone."""
        self._model = model

    def record_failure(self, error: Exception, work: StepWork, jobs: Iterable[Job]) -> tuple[Job | None, str]:
        """Record a failed step; return the job that caused it, if it is known, and the reason.

        ``work`` and ``jobs``: as for ``FailureBisection``.
        """
        culprit: Job | None = None
        if self.bisection is not None:
            _log.warning("a step of model %s failed again, with fewer requests: %r", self._model, error)
            culprit = self.bisection.record_failure(work)
        else:
            _log.error("a step of model %s failed", self._model, exc_info=error)
            self.bisection = FailureBisection(work, jobs, repr(error))
        return culprit, repr(error)

    def start_next_group(self) -> list[tuple[Job, str]]:
        """Start the next group of the bisection, or end it. Return the jobs to fail, with the reason.

        If no job failed alone, each continues up to ``MAX_UNEXPLAINED`` times.
        """
        bisection = self.bisection
        if bisection is None or bisection.start_next_group():
            return []
        self.bisection = None
        if bisection.found_culprit:
            return []
        alive = [job for job in bisection.jobs if job.sequences]
        _log.warning("none of %d requests failed alone: they continue", len(alive))
        for job in alive:
            job.num_unexplained_failures += 1
        return [(job, bisection.reason) for job in alive if job.num_unexplained_failures > MAX_UNEXPLAINED]
