"""The step loop of one model: schedule, forward, sample, commit, emit. Not thread-safe; ``LocalEngine`` drives it.

On a GPU the next step is launched before the results of the latest one are read (``engine.core.pipeline``)."""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from collections.abc import Callable
from pathlib import Path

import torch

from engine.core import pipeline
from engine.core.completion import Finish, find_finish, split_at_possible_stops, take_delta
from engine.core.gpu_memory import NotEnoughMemory
from engine.core.job_results import JobResults
from engine.core.loaded_model import LoadedModel
from engine.core.model_setup import ModelWeights, create_cache, create_speculator
from engine.core.pipeline import LaunchedStep, StepsInFlight
from engine.core.recovery import Recovery, free_failed_step
from engine.core.stats import CoreStats
from engine.device import create_stream, release_freed_memory, use_stream
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError, FinishReason
from engine.runner.forward import create_forward
from engine.runner.probe import ProbeReader
from engine.runner.sample_step import SampledTokens, Sampler, sample_on_cpu
from engine.runner.warm_up import warm_up
from engine.sampling.gpu import sample_on_gpu
from engine.sampling.sampler import LogitsNotFinite
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import GenerateSequence, Job, ScoreSequence, Sequence
from engine.scheduler.timings import Timings
from engine.speculation.control.controller import Controller, DraftOutcome
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import Speculator
from engine.speculation.stats import SpeculationStats
from engine.speculation.verify import find_accepted

_log = logging.getLogger(__name__)

_NO_ACCEPTED = ((0,),)
"""Parts of the samples that a branch without accepted draft tokens gets."""


class EngineCore:
    """One model with its cache, scheduler and drafter."""

    def __init__(self, name: str, folder: Path, options: EngineOptions, weights: ModelWeights | None = None) -> None:
        """Load the checkpoint in ``folder``; raise ``EngineError`` with the reason if it is invalid.

        ``weights``: of the checkpoint, if they are loaded already.
        """
        self._options = options
        weights = ModelWeights(name, folder, options) if weights is None else weights
        self._device_config, self._kv_dtype = weights.device_config, weights.kv_dtype
        # What the pool cannot hold could never run, so it bounds the context too.
        capacity = weights.choose_num_tokens()
        self._pages = capacity // options.page_size
        self.model = LoadedModel(name, folder, weights.model, options, max_tokens=capacity, template=weights.template)
        self._jobs: list[Job] = []
        self._deadline = math.inf
        """Lower bound of all jobs' deadlines."""
        self._scheduled: list[tuple[Sequence, int]] = []
        """Work of the step that is launched or read now, for the analysis of a failure."""
        self._steps = StepsInFlight()
        self._stream = create_stream(self._device_config.device)
        self._recovery = Recovery(name)
        self.timings = Timings()
        self._results = JobResults(self._jobs, self.timings, self._release_draft_state)
        self._generated, self._scored = 0, 0
        self._speculator = create_speculator(weights.drafter, options, context=self.model.info.context)
        with use_stream(self._stream):
            try:
                self._start_empty()
            except RuntimeError as error:
                num_bytes = capacity * weights.bytes_per_token
                raise NotEnoughMemory(f"{capacity} tokens of keys and values need {num_bytes} bytes: {error}") from None
            warm_up(name, weights.model, self.cache, self._forward, options, weights.drafter)

    @property
    def can_change_threads(self) -> bool:
        """True on the CPU if results may round differently with the number of threads."""
        return not self._device_config.uses_gpu_kernels and not self._options.deterministic

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def has_results(self) -> bool:
        """True if ``finish`` does not wait for the device."""
        return self._steps.unread is None or self._steps.unread.event.query()

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences. May be read from another thread."""
        bisection = self._recovery.bisection
        held = [] if bisection is None else [job for job in tuple(self._jobs) if job not in bisection.group]
        return self._scheduler.num_waiting + sum(len(job.sequences) for job in held)

    @property
    def stats(self) -> CoreStats:
        """Current statistics. May be read from another thread, and are approximate then."""
        return CoreStats.of(
            self._scheduler,
            self.speculation_stats,
            waiting=self.num_waiting,
            generated_tokens=self._generated,
            scored_tokens=self._scored,
        )

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        return None if self._speculator is None else self._speculator.stats

    def start_speculation(self, drafter: Drafter, controller: Controller) -> None:
        """Enable speculative decoding. Only while there are no jobs; the cache is emptied."""
        if self._jobs:
            raise RuntimeError("there are jobs in flight")
        with use_stream(self._stream):
            self._disconnect()
            del self.cache, self._scheduler
            trees = not self._options.deterministic
            self._speculator = Speculator(drafter, controller, context=self.model.info.context, trees=trees)
            self._start_empty()

    def submit(self, job: Job) -> None:
        """Start a job with sequences created by ``LoadedModel``."""
        if job.lease is not None:
            self.cache.leases.touch(job.lease)
        if self._recovery.bisection is None:
            self._scheduler.add(job)
        self.timings.requests["score" if isinstance(job.sequences[0], ScoreSequence) else "generate"] += 1
        self._jobs.append(job)
        self._deadline = min(self._deadline, job.deadline)

    def cancel(self, chosen: Callable[[Job], bool], reason: FinishReason = "cancelled") -> None:
        """End jobs immediately: branches with the tokens that they have, score requests with an error."""
        for job in [job for job in self._jobs if chosen(job)]:
            for sequence in job.sequences:
                sequence.drop_unread()
            self._scheduler.remove_job(job)
            self._results.cancel(job, reason)
        self._drop_useless_steps()

    def fail(self, error: EngineError) -> None:
        """End all jobs with an error; the engine is unusable afterwards."""
        for job in self._jobs:
            job.sink(error)
        self._jobs.clear()
        self._drop_useless_steps()
        self._recovery.bisection = None

    def release(self, lease: str, tokens: abc.Sequence[int] | None = None) -> None:
        """End a lease, or release one branch of it; see ``EngineClient.release``."""
        if tokens is not None:
            self.cache.leases.prune(lease, tokens)
            return
        self.cache.leases.release(lease)
        for job in (job for job in self._jobs if job.lease == lease):
            job.lease = None

    def clear_cache(self) -> None:
        """Drop every cached prefix that no running sequence uses."""
        self.cache.clear()
        if self._speculator is not None:
            self._speculator.drafter.clear_cache()

    def check_invariants(self) -> None:
        """Raise ``RuntimeError`` if an invariant is broken, or if pages are held although there are no jobs."""
        self._scheduler.check_invariants()
        if not self._jobs and (self._scheduler.num_waiting or self.cache.num_available_pages < self._pages):
            raise RuntimeError("sequences wait or pages are held although there are no jobs")

    def step(self) -> None:
        """Launch a step and read the results of the one before it, on a CPU those of the same step."""
        self.launch()
        self.finish()

    def launch(self) -> None:
        """Plan and launch a step without waiting for the device, unless results must be read first."""
        if self._steps.unread is None:
            self._run(self._launch)

    def finish(self) -> None:
        """Read the results of the step before the latest one, once the device has computed them."""
        if self._steps.unread is not None:
            self._run(lambda: self._read(self._steps.take_unread()))

    def _run(self, part: Callable[[], None]) -> None:
        """Run a part of a step. An exception empties the cache, whose state is unknown (``engine.core.recovery``)."""
        self._scheduled = []
        with use_stream(self._stream):
            try:
                with torch.inference_mode():
                    part()
            except Exception as error:
                culprit, reason = self._recovery.record_failure(error, self._scheduled, self._jobs)
                free_failed_step(error)
                self._restart()
                if culprit is not None:
                    self._fail(culprit, reason)
                self._run_next_group()
                return
        bisection = self._recovery.bisection
        if bisection is not None and not self._steps and bisection.has_passed:
            for job in bisection.group:
                self._scheduler.remove_job(job)
            self._run_next_group()

    def _launch(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            self.cancel(lambda job: job.deadline <= now, "timeout")
            self._deadline = min((job.deadline for job in self._jobs), default=math.inf)
        self.cache.leases.expire()
        previous = self._steps.move()
        is_bisecting = self._recovery.bisection is not None
        if previous and pipeline.must_read_first(
            previous, self._scheduler, self._speculator, is_bisecting=is_bisecting
        ):
            return
        schedule = self._scheduler.schedule()
        self._scheduled = schedule.scheduled
        for sequence in schedule.over_budget:
            self._results.send_score(sequence, is_over_budget=True)
        if not schedule.scheduled:
            return
        parts = self.model, self.cache, self._forward, self._sampler, self._speculator, self._options.step_tokens
        step = pipeline.launch_step(schedule.scheduled, self._steps, *parts)
        pipeline.commit(step, self.cache, self.timings, now)
        if step.is_read_at_once:
            self._read(step)
        else:
            pipeline.append_unread(step, self.model.info.context)
            self._steps.latest = step

    def _read(self, step: LaunchedStep) -> None:
        """Wait for a step and act on its results."""
        self._scheduled = step.work
        step.event.synchronize()
        # Branches that have ended since the launch are left out.
        sampled = [one for one in step.results.read() if one.sequence.table is not None]
        self._scored += step.num_scored
        for sequence in step.completed:
            if sequence.table is None or sequence.error is not None:
                continue
            try:
                if isinstance(sequence, ScoreSequence):
                    self._scheduler.finish(sequence)
                    self._results.send_score(sequence, is_over_budget=False)
                elif isinstance(sequence, GenerateSequence):
                    self._finish_branch(sequence, ("length", None))
            except Exception as error:
                sequence.fail(error)
        outcomes = self._append_sampled_tokens(sampled, step.probe)
        self._end_failed([sequence for sequence, _ in step.work if sequence.error is not None])
        if step.speculator is not None and step.observed is not None:
            step.speculator.update(step.scheduled, outcomes, *step.observed)
        self._drop_useless_steps()

    def _drop_useless_steps(self) -> None:
        """Forget the steps in flight if no job is left."""
        if not self._jobs:
            self._steps.clear()

    def _append_sampled_tokens(self, sampled: list[SampledTokens], probe: ProbeReader | None) -> list[DraftOutcome]:
        """Append to each branch its next token and, after each accepted draft token, the one sampled there."""
        paths = [find_accepted(one.draft, one.tokens) if one.draft.tokens else () for one in sampled]
        pipeline.move_accepted(self.cache, sampled, paths)
        now = time.monotonic()
        outcomes: list[DraftOutcome] = []
        for samples, path in zip(sampled, paths, strict=True):
            sequence, draft = samples.sequence, samples.draft
            if sequence.error is not None:
                continue
            if sequence.first_token_at is None:
                self.timings.record_token(sequence, now)
            sequence.num_drafted += len(draft.tokens)
            num_accepted_before = sequence.num_accepted
            try:
                parts = split_at_possible_stops(sequence, samples.tokens, path) if path else _NO_ACCEPTED
                for indices in parts:
                    self._append(samples, indices, probe)
                    if sequence.table is None:  # the branch ended
                        break
            except Exception as error:
                sequence.fail(error)
                continue
            if draft.tokens:
                outcomes.append(DraftOutcome(sequence, draft, path[: sequence.num_accepted - num_accepted_before]))
        return outcomes

    def _append(self, samples: SampledTokens, indices: abc.Sequence[int], probe: ProbeReader | None) -> None:
        """Append some of the sampled tokens to their branch; only the last of them can end it."""
        sequence, token = samples.sequence, samples.tokens[indices[-1]]
        is_computed = pipeline.append_samples(self.cache, samples, indices)
        self._generated += len(indices)
        finish = find_finish(sequence, token, self.model.info.context)
        if finish is not None:
            if sequence.is_probed and probe is not None:
                sequence.probe_score = probe.read(samples.row + indices[-1])
            pipeline.drop_last_computed(sequence)
            self._finish_branch(sequence, finish)
            return
        if is_computed:
            pipeline.share_read_page(self.cache, sequence)
        if sequence.job.stream and (delta := take_delta(sequence)):
            sequence.job.sink(delta)

    def _finish_branch(self, sequence: GenerateSequence, finish: Finish) -> None:
        self._scheduler.finish(sequence)
        self._results.send_completion(sequence, finish)
        self._results.remove(sequence)

    def _end_failed(self, failed: list[Sequence]) -> None:
        """End sequences that cannot go on, for reasons of their own, and those that read the same damaged pages."""
        not_finite = [sequence for sequence in failed if isinstance(sequence.error, LogitsNotFinite)]
        damaged = self.cache.find_damaged(sequence.table for sequence in not_finite if sequence.table is not None)
        if damaged:
            _log.warning("keys or values of %d pages are not finite: they are dropped", len(damaged))
            readers = [one for one in self._scheduler.running if not damaged.isdisjoint(one.pages.pages)]
            for reader in readers:
                reader.fail(LogitsNotFinite())
            failed = list(dict.fromkeys([*failed, *readers]))
        for sequence in failed:
            sequence.drop_unread()
            if sequence.table is not None:
                self._scheduler.finish(sequence)
            if sequence in sequence.job.sequences:
                self._results.remove(sequence)
        if damaged:
            self.cache.drop(damaged)

    def _release_draft_state(self, sequence: Sequence) -> None:
        if self._speculator is not None and isinstance(sequence, GenerateSequence):
            self._speculator.release(sequence)

    def _run_next_group(self) -> None:
        """Schedule the next jobs to try after a failed step; all jobs once its cause is known or given up."""
        for job, reason in self._recovery.start_next_group():
            self._fail(job, reason)
        for job in self._jobs if self._recovery.bisection is None else self._recovery.bisection.group:
            self._scheduler.add(job)

    def _fail(self, job: Job, reason: str) -> None:
        """End a job that is not running with an error."""
        _log.error("request %s of model %s fails: %s", job.request_id, self.model.info.id, reason)
        self._results.fail(job, EngineError(f"the engine failed while processing this request: {reason}"))

    def _restart(self) -> None:
        """Empty the cache and unschedule every job; the results of steps in flight are lost."""
        self._steps.clear()
        self._disconnect()
        self.cache.reset()
        for job in self._jobs:
            job.waiting = []
            for sequence in job.sequences:
                sequence.drop_unread()
                sequence.table, sequence.match, sequence.num_computed = None, None, 0
        self._scheduler.reset()
        self._connect()

    def _disconnect(self) -> None:
        """Free the forward pass with its graphs, which a GPU has no room to keep while another one is created."""
        del self._forward
        release_freed_memory(self._device_config.device)

    def _start_empty(self) -> None:
        options, num_draft_layers = self._options, 0 if self._speculator is None else self._speculator.drafter.layers
        sizes = num_draft_layers, self._pages, self.model.info.context, self._device_config, self._kv_dtype
        self.cache = create_cache(self.model.config, options, *sizes)
        self._sampler: Sampler = sample_on_gpu if self._device_config.uses_gpu_kernels else sample_on_cpu
        self._scheduler = Scheduler(self.cache, max_running=options.max_running, step_tokens=options.step_tokens)
        self._connect()

    def _connect(self) -> None:
        """Create the forward pass over the cache, which is empty, and reset the drafter."""
        self._steps.clear()
        self._forward = create_forward(self.model.decoder, self.cache)
        if self._speculator is not None:
            self._speculator.reset(self.cache)
