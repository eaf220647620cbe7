"""The requests of one model: queued, run step by step, answered. Not thread-safe; ``LocalEngine`` drives it.

A step goes from ``engine.scheduler`` to ``engine.core.step``, which computes it and appends its tokens; what they mean
for the clients follows here. On a GPU the next step is launched before the results of the latest one are read.
"""

from __future__ import annotations

import logging
import math
import time
from collections import abc
from collections.abc import Callable
from pathlib import Path

import torch

from engine.adapters.invocation import TaggedTokens
from engine.cache.paged_kv import KVCache
from engine.core.loaded_model import LoadedModel
from engine.core.model_setup import ModelWeights
from engine.core.recovery import Recovery, free_failed_step
from engine.core.results import build_completion, build_score_result, take_delta
from engine.core.stats import CoreStats
from engine.core.step import Finish, Step, StepRunner
from engine.device import create_stream, use_stream
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError, FinishReason
from engine.runner.sample_step import SampledTokens
from engine.sampling.sampler import LogitsNotFinite
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import GenerateSequence, Request, ScoreSequence, Sequence
from engine.scheduler.timings import Timings
from engine.speculation.control.controller import Controller
from engine.speculation.drafter import Drafter
from engine.speculation.stats import SpeculationStats

_log = logging.getLogger(__name__)


class EngineCore:
    """One model with its requests, their scheduler and the runner of their steps."""

    def __init__(self, name: str, folder: Path, options: EngineOptions, weights: ModelWeights | None = None) -> None:
        """Load the checkpoint in ``folder``; raise ``EngineError`` with the reason if it is invalid.

        ``weights``: of the checkpoint, if they are loaded already.
        """
        self._options = options
        weights = ModelWeights(name, folder, options) if weights is None else weights
        # What the pool cannot hold could never run, so it bounds the context too.
        capacity = weights.choose_num_tokens()
        self.model = LoadedModel(name, folder, weights.model, options, max_tokens=capacity, template=weights.template)
        self.model.add_adapters(weights.adapters)
        self._requests: list[Request] = []
        self._deadline = math.inf
        """Lower bound of all requests' deadlines."""
        self._scheduled: list[tuple[Sequence, int]] = []
        """Work of the step that is launched or read now, for the analysis of a failure."""
        self._is_idle = False
        """True if the latest schedule was empty although sequences wait."""
        self._stream = create_stream(weights.device_config.device)
        self._recovery = Recovery(name)
        self.timings = Timings()
        with use_stream(self._stream):
            self.runner = StepRunner(self.model, weights, options, self.timings, num_tokens=capacity)
        self._scheduler = self._create_scheduler()

    def _create_scheduler(self) -> Scheduler:
        options = self._options
        return Scheduler(
            self.cache,
            max_running=options.max_running,
            step_tokens=options.step_tokens,
            loader=self.runner.loader,
        )

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    @property
    def can_change_threads(self) -> bool:
        """True on the CPU if results may round differently with the number of threads."""
        return not self.runner.device_config.uses_gpu_kernels and not self._options.deterministic

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waits_for_loads(self) -> bool:
        """True if there is nothing to compute before a load is read or given up, or ``wake_time`` has come."""
        loader = self.runner.loader
        if loader is None or not self._is_idle or loader.has_news or not loader.is_reading:
            return False
        return time.monotonic() < self.wake_time

    @property
    def wake_time(self) -> float:
        """Time of ``time.monotonic`` at which a core that waits for loads has to go on; infinite without one."""
        loader = self.runner.loader
        return self._deadline if loader is None else min(self._deadline, loader.next_deadline)

    def on_load(self, wake: Callable[[], None]) -> None:
        """Let another thread call ``wake`` after each load."""
        if self.runner.loader is not None:
            self.runner.loader.on_read = wake

    @property
    def has_results(self) -> bool:
        """True if ``finish`` does not wait for the device."""
        return self.runner.unread is None or self.runner.unread.event.query()

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences. May be read from another thread."""
        bisection = self._recovery.bisection
        if bisection is None:
            return self._scheduler.num_waiting
        held = [request for request in tuple(self._requests) if request not in bisection.group]
        return self._scheduler.num_waiting + sum(len(request.sequences) for request in held)

    @property
    def stats(self) -> CoreStats:
        """Current statistics. May be read from another thread, and are approximate then."""
        return CoreStats.of(
            self._scheduler,
            self.speculation_stats,
            waiting=self.num_waiting,
            generated_tokens=self.runner.num_generated,
            scored_tokens=self.runner.num_scored,
        )

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        return None if self.runner.speculator is None else self.runner.speculator.stats

    def start_speculation(self, drafter: Drafter, controller: Controller) -> None:
        """Enable speculative decoding. Only while there are no requests; the cache is emptied."""
        if self._requests:
            raise RuntimeError("there are requests in flight")
        with use_stream(self._stream):
            del self._scheduler  # which holds the old cache
            self.runner.start_speculation(drafter, controller)
        self._scheduler = self._create_scheduler()

    # Requests.

    def submit(self, request: Request) -> None:
        """Start a request with sequences created by ``LoadedModel``."""
        if request.pin_key is not None:
            self.cache.pins.touch(request.pin_key)
            self.cache.retained.touch(request.pin_key)
        if self._recovery.bisection is None:
            self._scheduler.add(request)
        self.timings.requests["score" if isinstance(request.sequences[0], ScoreSequence) else "generate"] += 1
        self._requests.append(request)
        self._deadline = min(self._deadline, request.deadline)

    def cancel(self, chosen: Callable[[Request], bool], reason: FinishReason = "cancelled") -> None:
        """End requests immediately: branches with the tokens that they have, score requests with an error."""
        for request in [request for request in self._requests if chosen(request)]:
            for sequence in request.sequences:
                sequence.drop_unread()
            self._scheduler.remove_request(request)
            for sequence in list(request.sequences):
                try:
                    if isinstance(sequence, ScoreSequence):
                        raise EngineError(f"score request {request.request_id!r} was {reason}")
                    if isinstance(sequence, GenerateSequence):
                        self._send_completion(sequence, (reason, None))
                except Exception as error:
                    sequence.fail(error)
                self._remove(sequence)
        self._drop_useless_steps()

    def fail(self, error: EngineError) -> None:
        """End all requests with an error; the engine is unusable afterwards."""
        for request in self._requests:
            request.on_event(error)
        self._requests.clear()
        self._drop_useless_steps()
        self._recovery.bisection = None

    def close(self) -> None:
        """Stop the threads of the cache's lower tier, and remove its files. Nothing may run any more."""
        self.runner.close()

    def release(self, pin_key: str, tokens: abc.Sequence[int] | None = None) -> None:
        """Drop the pins of a key, or of one branch under it; see ``EngineClient.release``."""
        if tokens is not None:
            for invocation in self.model.invocations.values():
                if not invocation.tokens:
                    keys = TaggedTokens(tokens, invocation.index, 0)
                    self.cache.retained.prune(pin_key, keys)
                    self.cache.pins.prune(pin_key, keys)
            self.cache.retained.prune(pin_key, tokens)
            self.cache.pins.prune(pin_key, tokens)
            return
        self.cache.pins.release(pin_key)
        self.cache.retained.release(pin_key)
        for request in (request for request in self._requests if request.pin_key == pin_key):
            request.pin_key = None

    def clear_cache(self) -> None:
        """Drop every cached prefix that no running sequence uses."""
        self.runner.clear_cache()

    def check_invariants(self) -> None:
        """Raise ``RuntimeError`` if an invariant is broken, or if pages are held although there are no requests."""
        self._scheduler.check_invariants()
        if not self._requests and (
            self._scheduler.num_waiting or self.cache.count_available_pages() < self.runner.num_pages
        ):
            raise RuntimeError("sequences wait or pages are held although there are no requests")

    # Steps.

    def step(self) -> None:
        """Launch a step and read the results of the one before it, on a CPU those of the same step."""
        if self.waits_for_loads and self.runner.loader is not None:
            self.runner.loader.wait()
        self.launch()
        self.finish()

    def launch(self) -> None:
        """Plan and launch a step without waiting for the device, unless results must be read first."""
        if self.runner.unread is None:
            self._run_part(self._launch)

    def finish(self) -> None:
        """Read the results of the step before the latest one, once the device has computed them."""
        if self.runner.unread is not None:
            self._run_part(lambda: self._read_step(self.runner.take_unread()))

    def _run_part(self, part: Callable[[], None]) -> None:
        """Run a part of a step. An exception empties the cache, whose state is unknown (``engine.core.recovery``)."""
        self._scheduled = []
        with use_stream(self._stream):
            try:
                with torch.inference_mode():
                    part()
            except Exception as error:
                culprit, reason = self._recovery.record_failure(error, self._scheduled, self._requests)
                free_failed_step(error)
                self._restart()
                if culprit is not None:
                    self._fail(culprit, reason)
                self._run_next_group()
                return
        bisection = self._recovery.bisection
        if bisection is not None and not self.runner.has_steps and bisection.has_passed:
            for request in bisection.group:
                self._scheduler.remove_request(request)
            self._run_next_group()

    def _launch(self) -> None:
        self._is_idle = False
        now = time.monotonic()
        if now >= self._deadline:
            self.cancel(lambda request: request.deadline <= now, "timeout")
            self._deadline = min((request.deadline for request in self._requests), default=math.inf)
        self.cache.pins.expire()
        self.cache.retained.expire()
        self.runner.rotate()
        if self.runner.must_read_first(self._scheduler, is_bisecting=self._recovery.bisection is not None):
            return
        schedule = self._scheduler.schedule()
        # Only sequences that wait for loads can leave nothing to schedule while others wait.
        self._is_idle = not schedule.scheduled and self._scheduler.num_waiting > 0 and not self.runner.has_steps
        self._scheduled = schedule.scheduled
        for sequence in schedule.over_budget:
            self._send_score(sequence, is_over_budget=True)
        if schedule.scheduled:
            step = self.runner.launch(schedule.scheduled, now)
            if step.is_synchronous:
                self._read_step(step)

    def _read_step(self, step: Step) -> None:
        """Wait for a step and act on its results."""
        self._scheduled = step.work
        sampled = self.runner.read(step)
        for sequence in step.completed:
            if sequence.table is None or sequence.error is not None:
                continue
            try:
                if isinstance(sequence, ScoreSequence):
                    self._scheduler.finish(sequence)
                    self._send_score(sequence, is_over_budget=False)
                elif isinstance(sequence, GenerateSequence):
                    self._finish_branch(sequence, ("length", None))
            except Exception as error:
                sequence.fail(error)
        self._append_sampled_tokens(step, sampled)
        self._end_failed([sequence for sequence, _ in step.work if sequence.error is not None])
        self.runner.report_outcomes(step)
        self._drop_useless_steps()

    def _append_sampled_tokens(self, step: Step, sampled: list[SampledTokens]) -> None:
        """Append to each branch what was sampled for it; send its completion if it ends, and else what it streams."""
        now = time.monotonic()
        for samples in sampled:
            sequence = samples.sequence
            if sequence.error is not None:
                continue
            if sequence.first_token_at is None:
                self.timings.record_token(sequence, now)
            try:
                finish = self.runner.append(step, samples)
                if finish is not None:
                    self._finish_branch(sequence, finish)
                elif sequence.request.stream and (delta := take_delta(sequence)):
                    sequence.request.on_event(delta)
            except Exception as error:
                sequence.fail(error)

    def _drop_useless_steps(self) -> None:
        """Forget the steps in flight if no request is left."""
        if not self._requests:
            self.runner.forget_steps()

    # Results.

    def _finish_branch(self, sequence: GenerateSequence, finish: Finish) -> None:
        self._scheduler.finish(sequence)
        self._send_completion(sequence, finish)
        self._remove(sequence)

    def _send_completion(self, sequence: GenerateSequence, finish: Finish) -> None:
        """Send the completion of a branch, and its last delta before."""
        last_delta, completion = build_completion(sequence, finish)
        self.timings.record_finish(sequence, finish[0], time.monotonic())
        if last_delta is not None:
            sequence.request.on_event(last_delta)
        sequence.request.on_event(completion)

    def _send_score(self, sequence: ScoreSequence, *, is_over_budget: bool) -> None:
        """Send the scores of an item that is not scheduled, and remove it."""
        sequence.request.on_event(build_score_result(sequence, is_over_budget=is_over_budget))
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence, and its request if it was the last one.

        A request of which a sequence failed gets the error last, when its other sequences have ended.
        """
        self.runner.release(sequence)
        request = sequence.request
        request.error = request.error or sequence.error
        request.sequences.remove(sequence)
        if not request.sequences:
            self._requests.remove(request)
            if request.error is not None:
                request.on_event(request.error)

    # Failures.

    def _end_failed(self, failed: list[Sequence]) -> None:
        """End sequences that cannot go on, for reasons of their own, and those that read the same damaged pages."""
        not_finite = [sequence for sequence in failed if isinstance(sequence.error, LogitsNotFinite)]
        damaged = set[int]()
        if not_finite:  # the search reads every snapshot of a model with states
            damaged = self.cache.find_damaged(sequence.table for sequence in not_finite if sequence.table is not None)
        if damaged:
            _log.warning("keys or values of %d pages are not finite: they are dropped", len(damaged))
            readers = [one for one in self._scheduler.running if not damaged.isdisjoint(one.pages.references)]
            for reader in readers:
                reader.fail(LogitsNotFinite())
            failed = list(dict.fromkeys([*failed, *readers]))
        for sequence in failed:
            sequence.drop_unread()
            if sequence.table is not None:
                self._scheduler.finish(sequence)
            if sequence in sequence.request.sequences:
                self._remove(sequence)
        if damaged:
            self.cache.drop(damaged)

    def _run_next_group(self) -> None:
        """Schedule the next requests to try after a failed step; all requests once its cause is known or given up."""
        for request, reason in self._recovery.start_next_group():
            self._fail(request, reason)
        for request in self._requests if self._recovery.bisection is None else self._recovery.bisection.group:
            self._scheduler.add(request)

    def _fail(self, request: Request, reason: str) -> None:
        """End a request that is not running with an error."""
        _log.error("request %s of model %s fails: %s", request.request_id, self.model.info.id, reason)
        self._requests.remove(request)
        for sequence in request.sequences:
            self.runner.release(sequence)
        request.sequences = []
        request.on_event(EngineError(f"the engine failed while processing this request: {reason}"))

    def _restart(self) -> None:
        """Empty the cache and unschedule every request; the results of steps in flight are lost."""
        self.runner.reset()
        for request in self._requests:
            request.waiting = []
            for sequence in request.sequences:
                sequence.drop_unread()
                sequence.table, sequence.match, sequence.num_computed = None, None, 0
        self._scheduler.reset()
