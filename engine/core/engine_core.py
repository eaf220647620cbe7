"""The step loop of one model: schedule, forward, sample, commit, emit. One thread only; ``LocalEngine`` drives it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache.paged_kv import KVCache, kv_bytes_per_token
from engine.core.completion import FinishEvent, completion, ending, next_delta, score_result, split_at_possible_stops
from engine.core.loaded_model import LoadedModel
from engine.core.recovery import MAX_UNEXPLAINED, FailureBisection, RequestFailed
from engine.device import DeviceConfig, select_device, select_kv_dtype
from engine.models.config import ModelConfig, read_raw_config
from engine.models.families import is_defined
from engine.models.load import load_model
from engine.models.transformers_backend import TransformersModel
from engine.protocol.types import EngineError, FinishReason
from engine.runner.batch import ScheduledSequence, build_batch
from engine.runner.forward import create_forward
from engine.runner.sample_step import SampledTokens, Sampler, rows_needed, sample_and_score, sample_on_cpu
from engine.sampling.gpu import sample_on_gpu
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import GenerateSequence, Job, ScoreSequence, Sequence
from engine.scheduler.timings import Timings
from engine.speculation.control.adaptive import AdaptiveController
from engine.speculation.control.controller import Controller, DraftOutcome
from engine.speculation.drafter import Drafter, HiddenStateNeeds
from engine.speculation.load import MAX_NODES, check_length, extra_layers, load_drafter
from engine.speculation.speculator import Speculator
from engine.speculation.stats import SpeculationStats
from engine.speculation.verify import accepted

_log = logging.getLogger(__name__)

_DUE = ((0,),)
"""What a branch receives without a guess that was right."""
_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_KV_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """The size of one model's engine."""

    kv_tokens: int | None = None
    """Tokens whose keys and values are kept, running and cached; ``None``: what 1 GiB holds, at most 131,072."""
    page_size: int = 16
    max_running: int = 256
    """Sequences that run at once."""
    max_waiting: int = 4096
    """Sequences that may wait, and the most that one request may have."""
    step_tokens: int = 2048
    """Tokens computed in one step at most."""
    lease_share: float = 0.5
    """Part of the pool that leases may pin."""
    lease_seconds: float = 600.0
    """A lease that no request names for so long ends."""
    draft: str = "off"
    """Who guesses tokens for generating models, as ``engine.speculation.load.FORMS`` names them."""
    draft_length: int = 8
    """Most guesses after each other."""
    deterministic: bool = False
    """A request's tokens are the same bits whatever else runs, however its prompt is cut, cached or recomputed. Slower;
    without it the same holds but for rounding (about 1e-6 of a logit)."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: a GPU if there is one and the model can be computed there."""
    dtype: str = "auto"
    """Of weights, keys and values: ``float32``, ``bfloat16``, or ``auto``: the latter on a GPU. The CPU has float32."""
    kv_dtype: str = "auto"
    """Of keys and values: ``int8`` or ``fp8`` (e4m3), with a scale for each token and head, or ``auto``: ``dtype``.

    What a token leaves in the cache is a function of its own key and value, so it does not matter who wrote it, when,
    and beside what: ``deterministic`` holds to the bit. Without it the rounding before may now and then tip a number to
    its neighbour, which changes logits by up to 1e-3. Against float32 they differ by 0.6 % of their spread with int8
    and 3 % with fp8, which has fewer digits (the bundled policy)."""
    debug: bool = False
    """Check every invariant of the cache and the scheduler whenever nothing is left to do."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """A look at one model's engine. Tokens are counted since the start."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    pinned_tokens: int
    """Slots in pages that leases pin."""
    leases: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    """Guesses computed."""
    accepted_tokens: int
    """Those of them that were right and spared a step."""
    scored_tokens: int
    preemptions: int


class EngineCore:
    """One model with its cache and scheduler."""

    def __init__(self, name: str, folder: Path, options: CoreOptions) -> None:
        """Loads the checkpoint in ``folder``; raises ``EngineError`` that says what is wrong with it."""
        self._options = options
        _keep_freed_memory()
        self._device_config = _select_device(folder, options)
        self._kv_type = select_kv_dtype(options.kv_dtype, self._device_config)
        if not self._device_config.uses_gpu_kernels:
            from kernels.cpu.precompile import make_ready

            make_ready()
        self._extra_layers = extra_layers(options.draft, folder)
        model = load_model(folder, self._capacity, self._device_config)
        if options.deterministic and isinstance(model, TransformersModel):
            raise EngineError(f"{folder}: deterministic mode is not supported for architectures run by transformers")
        # What the pool cannot hold could never run, so it bounds the context too.
        capacity = self._capacity(model.config)
        self._pages = capacity // options.page_size
        self.model = LoadedModel(name, folder, model, max_tokens=capacity, max_sequences=options.max_waiting)
        self._jobs: list[Job] = []
        self._deadline = math.inf
        """No job's is earlier."""
        self._scheduled: list[tuple[Sequence, int]] = []
        """Sequences that the step under way computes."""
        self._suspects: FailureBisection | None = None
        """After a step that failed: until it is known who made it fail, the scheduler has a group of them alone."""
        self._unexplained: Counter[Job] = Counter()
        """Failed steps of jobs in flight that nobody turned out to be the cause of."""
        self.timings = Timings()
        self._generated = 0
        self._scored = 0
        self._speculator = self._load_speculator(folder)
        try:
            self._start_empty()
        except RuntimeError as error:
            raise EngineError(
                f"{capacity} tokens of keys and values need {capacity * self._token_bytes(model.config)} bytes: {error}"
            ) from None

    @property
    def can_change_threads(self) -> bool:
        """True if it computes on the processor's threads and sums may round differently with their number."""
        return not self._device_config.uses_gpu_kernels and not self._options.deterministic

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait. May be read from another thread."""
        suspects = self._suspects
        if suspects is None:
            return self._scheduler.num_waiting
        held = sum(len(job.sequences) for job in tuple(self._jobs) if job not in suspects.group)
        return self._scheduler.num_waiting + held

    @property
    def stats(self) -> CoreStats:
        """Current numbers. May be read from another thread; they are then those of about now."""
        scheduler, tally = self._scheduler, self.speculation_stats
        return CoreStats(
            running=len(scheduler.running),
            waiting=self.num_waiting,
            kv_tokens=self.cache.num_used_tokens,
            kv_capacity=self._pages * self._options.page_size,
            pinned_tokens=self.cache.tree.num_pinned * self._options.page_size,
            leases=len(self.cache.leases),
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=self._generated,
            drafted_tokens=0 if tally is None else tally.drafted,
            accepted_tokens=0 if tally is None else tally.accepted,
            scored_tokens=self._scored,
            preemptions=scheduler.num_preemptions,
        )

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """What guessing did, if anybody guesses."""
        return None if self._speculator is None else self._speculator.stats

    def start_speculation(self, drafter: Drafter, controller: Controller) -> None:
        """Guesses tokens from now on. Only while nothing is left to do; the cache is emptied."""
        if self._jobs:
            raise RuntimeError("there are jobs in flight")
        context, trees = self.model.info.context, not self._options.deterministic
        self._speculator = Speculator(drafter, controller, context=context, trees=trees)
        self._start_empty()

    def submit(self, job: Job) -> None:
        """Starts a job whose sequences ``LoadedModel`` made."""
        self.timings.requests["score" if isinstance(job.sequences[0], ScoreSequence) else "generate"] += 1
        self._jobs.append(job)
        self._deadline = min(self._deadline, job.deadline)
        if job.lease is not None:
            self.cache.leases.touch(job.lease)
        if self._suspects is None:
            self._scheduler.add(job)

    def cancel(self, chosen: Callable[[Job], bool], reason: FinishReason = "cancelled") -> None:
        """Ends jobs at once: branches with the tokens that they have, score requests with an error."""
        for job in [job for job in self._jobs if chosen(job)]:
            self._scheduler.remove_job(job)
            self._remove(job)
            if any(isinstance(sequence, ScoreSequence) for sequence in job.sequences):
                job.sink(EngineError(f"score request {job.request_id!r} was {reason}"))
            sequences, job.sequences = job.sequences, []
            for sequence in sequences:
                self._forget(sequence)
            try:
                for sequence in sequences:
                    if isinstance(sequence, GenerateSequence):
                        self._emit_completion(sequence, (reason, None))
            except Exception as error:
                _log.exception("request %s was %s and has no answer", job.request_id, reason)
                job.sink(EngineError(f"the engine failed while it ended this request: {error!r}"))

    def fail(self, error: EngineError) -> None:
        """Ends all jobs with an error; the engine can do nothing after it."""
        for job in self._jobs:
            job.sink(error)
        self._jobs.clear()
        self._suspects = None

    def release(self, lease: str, tokens: Items[int] | None = None) -> None:
        """Ends a lease, or gives up one branch of it. See ``EngineClient.release``."""
        if tokens is not None:
            self.cache.leases.prune(lease, tokens)
            return
        self.cache.leases.release(lease)
        for job in self._jobs:
            if job.lease == lease:
                job.lease = None

    def clear_cache(self) -> None:
        """Forgets every prefix that no running sequence uses."""
        self.cache.clear()
        if self._speculator is not None:
            self._speculator.drafter.clear_cache()

    def check_invariants(self) -> None:
        """Raises ``RuntimeError`` when an invariant of the cache or the scheduler is broken, or when something is still
        held although nothing is left to do."""
        self._scheduler.check_invariants()
        if not self._jobs and (self._scheduler.num_waiting or self.cache.num_available_pages < self._pages):
            raise RuntimeError("nothing is left to do, yet sequences wait or pages are held")

    def step(self) -> None:
        """Advances the work by one forward pass.

        An exception empties the cache, since nothing is known about its state, and the step's jobs are tried again in
        groups (``FailureBisection``): one that fails alone ends with the error. All others go on.
        """
        now = time.monotonic()
        self._scheduled = []
        try:
            if now >= self._deadline:
                self.cancel(lambda job: job.deadline <= now, "timeout")
                self._deadline = min((job.deadline for job in self._jobs), default=math.inf)
            self.cache.leases.expire()
            with torch.inference_mode():
                self._advance(now)
        except Exception as error:
            self._recover(error)
        else:
            self._end_trial()

    def _advance(self, started: float) -> None:
        schedule = self._scheduler.schedule()
        self._scheduled = schedule.scheduled
        for declined in schedule.over_budget:
            self._emit_score(declined, declined=True)
        if not schedule.scheduled:
            return
        speculator, size = self._speculator, self._options.step_tokens
        if speculator is not None and speculator.should_skip_step(len(schedule.scheduled)):
            speculator = None
        work = (
            [ScheduledSequence(*one) for one in schedule.scheduled]
            if speculator is None
            else speculator.add_drafts(schedule.scheduled, size)
        )
        batch, rows, work = build_batch(work, self.cache, self.model.config.attention[0])
        # Who watches steps sees all of them.
        blind = speculator is None or speculator.drafter.hidden_state_needs is HiddenStateNeeds.NONE
        read = rows_needed(work) if blind else None
        hidden = self._forward(batch, rows, read)
        drawn = sample_and_score(work, read, hidden, self.model.decoder, self._forward.fused_sampler, self._sampler)
        self._commit(work, started)
        outcomes = self._settle(drawn)
        if speculator is not None:
            speculator.update(work, outcomes, hidden)

    def _commit(self, work: list[ScheduledSequence], started: float) -> None:
        """The keys and values of the scheduled tokens are valid now; those of guesses are not yet."""
        for sequence, count, _ in work:
            if sequence.started_at is None:
                self.timings.record_start(sequence, started)
            completes = self._computed(sequence, count)
            if isinstance(sequence, ScoreSequence):
                self._scored += count
                if completes:
                    self._scheduler.finish(sequence)
                    self._emit_score(sequence, declined=False)
            elif isinstance(sequence, GenerateSequence) and completes and not sequence.branch.max_tokens:
                try:
                    self._end(sequence, ("length", None))
                except Exception as error:
                    raise RequestFailed(sequence.job) from error

    def _computed(self, sequence: Sequence, count: int) -> bool:
        """``count`` more tokens of a sequence are computed. What fills a page or ends its prefix becomes shareable;
        answers whether its prefix ended."""
        size = self.cache.page_size
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + count
        completes = before < sequence.num_prefix_tokens <= sequence.num_computed
        if completes or sequence.num_computed // size > before // size:
            self.cache.publish(sequence.pages, sequence.tokens, sequence.num_computed, include_partial=completes)
        return completes

    def _settle(self, drawn: list[SampledTokens]) -> list[DraftOutcome]:
        """Branches receive what they drew: the token that was due, and after each guess that was right the next."""
        paths = [accepted(one.draft, one.tokens) if one.draft.tokens else () for one in drawn]
        self._move_accepted(drawn, paths)
        now = time.monotonic()
        outcomes: list[DraftOutcome] = []
        for one, path in zip(drawn, paths, strict=True):
            sequence, draft = one.sequence, one.draft
            if sequence.first_token_at is None:
                self.timings.record_token(sequence, now)
            sequence.num_drafted += len(draft.tokens)
            before = sequence.num_accepted
            try:
                for places in split_at_possible_stops(sequence, one.tokens, path) if path else _DUE:
                    self._append(one, places)
                    if sequence.table is None:  # it ended
                        break
            except Exception as error:
                raise RequestFailed(sequence.job) from error
            if draft.tokens:
                outcomes.append(DraftOutcome(sequence, draft, path[: sequence.num_accepted - before]))
        return outcomes

    def _move_accepted(self, drawn: list[SampledTokens], paths: list[tuple[int, ...]]) -> None:
        """Brings the keys and values of a tree's accepted path to the slots that its tokens have in the sequence."""
        moves = [
            (one.sequence.pages, one.sequence.num_computed + guess, one.sequence.num_computed + place)
            for one, path in zip(drawn, paths, strict=True)
            if path and path[-1] != len(path) - 1  # else it is the draft's beginning
            for place, guess in enumerate(path)
            if guess != place
        ]
        if moves:
            self.cache.move_tokens(moves)

    def _append(self, drawn: SampledTokens, places: Items[int]) -> None:
        """A branch receives some of the tokens that were drawn, of which only the last can end it."""
        sequence, token = drawn.sequence, 0
        for place in places:
            token = drawn.tokens[place]
            sequence.tokens.append(token)
            sequence.generated.append(token)
            sequence.logprob += drawn.logprobs[place]
            if sequence.penalties is not None:
                sequence.penalties.add(token)
            if sequence.logprobs is not None:
                sequence.logprobs.append(drawn.details[place])
        self._generated += len(places)
        right = len(sequence.tokens) - 1 - sequence.num_computed
        if right:  # the tokens before the last are guesses, and computed
            sequence.num_accepted += right
            self._computed(sequence, right)
        reason = ending(sequence, token, self.model.info.context)
        if reason is not None:
            self._end(sequence, reason)
        elif sequence.job.stream and (delta := next_delta(sequence)):
            sequence.job.sink(delta)

    def _end(self, sequence: GenerateSequence, reason: FinishEvent) -> None:
        self._scheduler.finish(sequence)
        self._emit_completion(sequence, reason)
        self._leave(sequence)

    def _emit_completion(self, sequence: GenerateSequence, reason: FinishEvent) -> None:
        self.timings.record_finish(sequence, reason[0], time.monotonic())
        rest, answer = completion(sequence, reason)
        if rest is not None:
            sequence.job.sink(rest)
        sequence.job.sink(answer)

    def _emit_score(self, sequence: ScoreSequence, *, declined: bool) -> None:
        sequence.job.sink(score_result(sequence, declined=declined))
        self._leave(sequence)

    def _leave(self, sequence: GenerateSequence | ScoreSequence) -> None:
        self._forget(sequence)
        sequence.job.sequences.remove(sequence)
        if not sequence.job.sequences:
            self._remove(sequence.job)

    def _remove(self, job: Job) -> None:
        self._jobs.remove(job)
        self._unexplained.pop(job, None)

    def _forget(self, sequence: Sequence) -> None:
        if self._speculator is not None and isinstance(sequence, GenerateSequence):
            self._speculator.release(sequence)

    def _recover(self, error: Exception) -> None:
        """Starts empty again with everybody but the job that is known to have failed the step, if one is."""
        blamed: Job | None = None
        if isinstance(error, RequestFailed) and isinstance(error.__cause__, Exception):
            blamed, error = error.job, error.__cause__
        suspects, work = self._suspects, self._scheduled
        if suspects is None:
            _log.error("a step of model %s failed", self.model.info.id, exc_info=error)
            if blamed is None:
                self._suspects = FailureBisection(work, self._jobs, repr(error))
        else:
            _log.warning("a step of model %s failed again, with fewer requests: %r", self.model.info.id, error)
            blamed = suspects.record_failure(work, blamed)
        self._restart()
        if blamed is not None:
            self._fail(blamed, repr(error))
        self._next_trial()

    def _end_trial(self) -> None:
        """Goes on with the next suspects when those that run have passed."""
        if self._suspects is not None and self._suspects.has_passed:
            for job in self._suspects.group:
                self._scheduler.remove_job(job)
            self._next_trial()

    def _next_trial(self) -> None:
        """Schedules the next group of suspects, or everybody when there is none."""
        suspects = self._suspects
        if suspects is None or not suspects.start_next_group():
            self._suspects = None
            if suspects is not None and not suspects.found_culprit:
                self._excuse(suspects)
        for job in self._jobs if self._suspects is None else self._suspects.group:
            self._scheduler.add(job)

    def _excuse(self, suspects: FailureBisection) -> None:
        """Lets jobs go on after a failure of which none was the cause, but not for ever."""
        alive = [job for job in suspects.jobs if job.sequences]
        _log.warning("none of %d requests failed alone: they go on", len(alive))
        for job in alive:
            self._unexplained[job] += 1
            if self._unexplained[job] > MAX_UNEXPLAINED:
                self._fail(job, suspects.reason)

    def _fail(self, job: Job, reason: str) -> None:
        """Ends a job that does not run."""
        _log.error("request %s of model %s fails: %s", job.request_id, self.model.info.id, reason)
        self._remove(job)
        sequences, job.sequences = job.sequences, []
        for sequence in sequences:
            self._forget(sequence)
        job.sink(EngineError(f"the engine failed while it worked on this request: {reason}"))

    def _restart(self) -> None:
        """Starts empty again; every job in flight waits to be scheduled anew."""
        self.cache.reset()
        for job in self._jobs:
            job.waiting = []
            for sequence in job.sequences:
                sequence.table, sequence.match, sequence.num_computed = None, None, 0
        self._scheduler.reset()
        self._connect()

    def _load_speculator(self, folder: Path) -> Speculator | None:
        """What the options want for this model; classifiers have nothing to guess."""
        options, context = self._options, self.model.info.context
        check_length(options.draft_length)
        if self.model.config.num_labels:
            return None
        drafter = load_drafter(options.draft, folder, self.model.decoder, context=context)
        if drafter is None:
            return None
        controller = AdaptiveController(options.draft_length, MAX_NODES)
        return Speculator(drafter, controller, context=context, trees=not options.deterministic)

    def _capacity(self, config: ModelConfig) -> int:
        """Tokens whose keys and values the pool holds: whole pages, at least one."""
        options = self._options
        wanted = options.kv_tokens or min(_DEFAULT_KV_TOKENS, _DEFAULT_KV_BYTES // self._token_bytes(config))
        return max(1, wanted // options.page_size) * options.page_size

    def _token_bytes(self, config: ModelConfig) -> int:
        """Size of one token's keys and values, the drafter's included."""
        layers = config.num_layers + (0 if config.num_labels else self._extra_layers)
        return layers * kv_bytes_per_token(config.attention[0], self._kv_type)

    def _start_empty(self) -> None:
        config, options, speculator = self.model.config, self._options, self._speculator
        self.cache = KVCache(
            layers=config.num_layers + (0 if speculator is None else speculator.drafter.layers),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            pages=self._pages,
            page_size=options.page_size,
            rows=options.max_running,
            context=self.model.info.context,
            device_config=self._device_config,
            dtype=self._kv_type,
            max_pinned=int(self._pages * options.lease_share),
            lease_seconds=options.lease_seconds,
        )
        self._sampler: Sampler = sample_on_gpu if self._device_config.uses_gpu_kernels else sample_on_cpu
        self._scheduler = Scheduler(self.cache, max_running=options.max_running, step_tokens=options.step_tokens)
        self._connect()

    def _connect(self) -> None:
        """Makes what reads and writes the cache, which is empty."""
        self._forward = create_forward(self.model.decoder, self.cache, deterministic=self._options.deterministic)
        if self._speculator is not None:
            self._speculator.reset(self.cache)


def _select_device(folder: Path, options: CoreOptions) -> DeviceConfig:
    """Where the model in ``folder`` is computed."""
    architecture, cpu_only_reason = read_raw_config(folder).architecture, None
    if options.deterministic:
        cpu_only_reason = "deterministic mode is for the CPU alone"
    elif not is_defined(architecture):
        cpu_only_reason = f"{folder} is a {architecture}, which transformers runs on the CPU alone"
    return select_device(options.device, options.dtype, cpu_only_reason=cpu_only_reason)


def _keep_freed_memory() -> None:
    """Makes the C library keep freed blocks of up to 31 MiB for the next step.

    By default it returns them to the kernel, which clears them page by page when the next step asks again: a sixth of
    a step's time. Freeing one large block, never touched, raises the threshold (mallopt(3), M_MMAP_THRESHOLD).
    """
    torch.empty(31 << 20, dtype=torch.uint8)
