"""Finding the request that makes steps fail.

The jobs that a failed step computed are tried again apart from all others, in halves of halves, until the one that
fails alone is found. A job starts again from its tokens, as after a preemption, so whoever passes has lost nothing but
time. Of ``n`` jobs with one culprit about ``2 log2 n`` groups are tried, which compute each context about twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.sequence import Job, Sequence

MAX_UNEXPLAINED = 8
"""Failed steps that a job survives although nobody failed alone, such as for want of memory."""

StepWork = Iterable[tuple[Sequence, int]]
"""Sequences with the number of tokens that a step was to compute of them."""


class RequestFailed(Exception):
    """A step failed in what it does for one job alone; ``__cause__`` says how."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.request_id)
        self.job = job


class FailureBisection:
    """The jobs of a failed step, in groups of which each must get past the place of the failure by itself."""

    def __init__(self, work: StepWork, jobs: Iterable[Job], reason: str) -> None:
        """``work``: of the step that failed, ``reason``: why; ``jobs``: all there are, who are suspected if it had
        chosen nothing."""
        self.reason = reason
        self.group: list[Job] = []
        """The group that runs now. All other jobs wait."""
        self.found_culprit = False
        """True once one of them failed alone."""
        self._goals: dict[Sequence, int] = {}
        """Tokens that a sequence must have computed to be past the failure."""
        self._groups: list[list[Job]] = []
        """Groups still to be tried, the next one last."""
        self._aim(work)
        self.jobs = list(dict.fromkeys(sequence.job for sequence in self._goals)) or list(jobs)
        self._split(self.jobs)

    def start_next_group(self) -> bool:
        """Makes the next group with something left to do the trial; ``False`` when there is none."""
        self.group = []
        while self._groups and not self.group:
            self.group = [job for job in self._groups.pop() if job.sequences]
        return bool(self.group)

    @property
    def has_passed(self) -> bool:
        """Return true once every sequence of the trial is past the failure, or over."""
        return all(
            sequence.num_computed >= self._goals.get(sequence, 0) for job in self.group for sequence in job.sequences
        )

    def record_failure(self, work: StepWork, blamed: Job | None) -> Job | None:
        """The trial failed in a step with this ``work``: answers the job that is the cause, if that is known now, and
        divides the others into new groups."""
        chosen = {sequence.job for sequence, _ in work}
        failing = [job for job in self.group if job in chosen] or self.group
        self._aim(work)
        if blamed is None and len(failing) == 1:
            [blamed] = failing
        if blamed is None:
            self._groups.append([job for job in self.group if job not in failing])
            self._split(failing)
        else:
            self._groups.append([job for job in self.group if job is not blamed])
            self.found_culprit = True
        return blamed

    def _aim(self, work: StepWork) -> None:
        for sequence, count in work:
            # Where the step had begun to commit, this is one step further than it would have come: no matter.
            self._goals[sequence] = max(self._goals.get(sequence, 0), sequence.num_computed + count)

    def _split(self, jobs: list[Job]) -> None:
        """Two halves; of a single job one group, so that nobody fails without having failed alone."""
        middle = len(jobs) // 2
        self._groups += [jobs[middle:], jobs[:middle]]
