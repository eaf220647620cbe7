"""The results of jobs on their way to the clients, and the end of jobs and sequences."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core.completion import Finish, build_completion, build_score_result
from engine.protocol.types import EngineError, FinishReason
from engine.scheduler.sequence import GenerateSequence, Job, ScoreSequence, Sequence
from engine.scheduler.timings import Timings


class JobResults:
    """Sends results to clients and removes what has ended from the jobs in flight.

    A job of which a sequence fails gets the error last, when its other sequences have finished.
    """

    def __init__(self, jobs: list[Job], timings: Timings, release: Callable[[Sequence], None]) -> None:
        """``jobs``: those in flight, of which ended ones are removed; ``release``: called with each ended sequence."""
        self._jobs, self._timings, self._release = jobs, timings, release

    def send_completion(self, sequence: GenerateSequence, finish: Finish) -> None:
        """Send the completion of a branch, and its last delta before."""
        last_delta, completion = build_completion(sequence, finish)
        self._timings.record_finish(sequence, finish[0], time.monotonic())
        if last_delta is not None:
            sequence.job.sink(last_delta)
        sequence.job.sink(completion)

    def send_score(self, sequence: ScoreSequence, *, is_over_budget: bool) -> None:
        """Send the scores of an item and remove it."""
        sequence.job.sink(build_score_result(sequence, is_over_budget=is_over_budget))
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence, and its job if it was the last one."""
        self._release(sequence)
        job = sequence.job
        job.error = job.error or sequence.error
        job.sequences.remove(sequence)
        if not job.sequences:
            self._jobs.remove(job)
            if job.error is not None:
                job.sink(job.error)

    def cancel(self, job: Job, reason: FinishReason) -> None:
        """End a job that is not scheduled: branches with the tokens that they have, score requests with an error."""
        for sequence in list(job.sequences):
            try:
                if isinstance(sequence, ScoreSequence):
                    raise EngineError(f"score request {job.request_id!r} was {reason}")
                if isinstance(sequence, GenerateSequence):
                    self.send_completion(sequence, (reason, None))
            except Exception as error:
                sequence.fail(error)
            self.remove(sequence)

    def fail(self, job: Job, error: EngineError) -> None:
        """End a job that is not scheduled with an error."""
        self._jobs.remove(job)
        for sequence in job.sequences:
            self._release(sequence)
        job.sequences = []
        job.sink(error)
